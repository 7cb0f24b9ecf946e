"""Peak memory of every plan of a program, by liveness: the rows of the optimization problem.

    bytes(t, x)  =  arguments(x)  +  sum of the buffers alive at moment t under assignment x
    peak(x)      =  max_t bytes(t, x)                                                        -> Liveness.peak

A buffer's bytes depend on one decision or on one edge, so that a moment is a row that is linear in one-hot choices
(-> Liveness.row); all moments of one assignment come from two histograms, of births and deaths (-> Liveness.profile).

What lives when: `steps` (the program as the compiler meets it), `fusion` (what is written to memory), `lifetimes` (in
which order), `buffers` (how large under which choice), `backends` (how compilers differ).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.compiler.backends import Backend
from autopar.cost_models.memory.buffers import Buffer, buffers
from autopar.cost_models.memory.row import Row
from autopar.cost_models.sharding.groups import Model
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, Op
from autopar.ir.problem import Edge, Floats, Ints
from autopar.ir.train_state import in_place

SHOWN = 8  # local peaks of one assignment that become rows at once


class Liveness:
    """The memory of every plan of one program on one mesh; a `RowSource`.

    Args:
        graph, model, mesh: the program, its optimization problem, and the mesh that was built for.
        backend: whose compiler will run it.
        donated: positions of the arguments that are given away; default: those that are state.
        hosted: positions of those arguments that wait in the host's memory (`autopar.passes.remat.offload`).
    """

    def __init__(
        self,
        graph: Graph,
        model: Model,
        mesh: LogicalMesh,
        backend: Backend,
        donated: Sequence[int] | None = None,
        hosted: Sequence[int] = (),
    ) -> None:
        donated_positions = sorted(in_place(graph).values()) if donated is None else donated
        allocation = buffers(graph, model, mesh, backend, donated_positions, hosted)
        self.graph, self.backend = graph, backend
        self.buffers, self.moments = allocation.all, allocation.lives.moments
        self._problem = model.problem
        self._sizes = allocation.sizes
        self._columns = _Columns.of(allocation.all)
        self._projections = _Projections.of(model.problem.edges)
        self._argument = np.array([b.what == "argument" for b in allocation.all], bool)
        self._rows: dict[int | None, Row] = {}

    def sizes(self, assignment: Ints) -> Floats:
        """Bytes of every buffer under a full assignment, shape (buffers,)."""
        chosen = np.asarray(assignment, np.int64)
        c = self._columns
        at = c.at.copy()
        at[c.on_node] += chosen[c.node[c.on_node]]
        at[c.on_edge] += self._projections.places(c.edge[c.on_edge], chosen)
        return self._sizes[at]

    def profile(self, assignment: Ints) -> Floats:
        """Bytes of everything but arguments at every moment, shape (moments + 1,)."""
        return self.profile_of(self.sizes(assignment))

    def profile_of(self, sizes: Floats) -> Floats:
        """The same from the bytes of every buffer, as `sizes` returns them."""
        length = len(self.moments) + 2
        c = self._columns
        # Bytes are added at the birth of a buffer and taken away one moment after its death: it counts at both ends.
        sizes = np.where(self._argument, 0.0, sizes)
        change = np.bincount(c.birth, sizes, length) - np.bincount(c.death + 1, sizes, length)
        return np.cumsum(change, dtype=np.float64)[:-1]

    def peak(self, assignment: Ints) -> tuple[float, Row]:
        """The most bytes that a device holds at once under a full assignment, and the row of that moment."""
        peak, moment, _ = self._at_peak(self.sizes(assignment))
        return peak, self.row(moment)

    def over(self, assignment: Ints, nbytes: float) -> Sequence[Row]:
        """The rows of the highest local peaks above so many bytes; the last moment of one that is flat."""
        sizes = self.sizes(assignment)
        beside_arguments = self.profile_of(sizes)
        room = nbytes - float(sizes[self._argument].sum())
        highest = [self.row(moment) for moment in highest_peaks(beside_arguments, room)]
        return sorted(highest, key=lambda row: -row.value(self._problem, assignment))  # equal up to rounding: by value

    def at_peak(self, assignment: Ints) -> tuple[float, int | None, Sequence[tuple[Buffer, float]]]:
        """The peak, the moment where it is reached (None: arguments alone), and what lives then with its bytes."""
        sizes = self.sizes(assignment)
        peak, moment, alive = self._at_peak(sizes)
        return peak, moment, [(self.buffers[i], float(sizes[i])) for i in np.flatnonzero(alive)]

    def _at_peak(self, sizes: Floats) -> tuple[float, int | None, NDArray[np.bool_]]:
        arguments = float(sizes[self._argument].sum())
        beside_arguments = self.profile_of(sizes)
        moment = int(beside_arguments.argmax())
        most = float(beside_arguments[moment])
        peak_moment = moment if most > 0 else None
        return arguments + most, peak_moment, self._alive(peak_moment)

    def beside_arguments(self, moment: int) -> Row:
        """What lives at a moment besides arguments."""
        return self._sum(self._name(moment), self._alive(moment) & ~self._argument)

    def _alive(self, moment: int | None) -> NDArray[np.bool_]:
        c = self._columns
        return self._argument if moment is None else self._argument | ((c.birth <= moment) & (moment <= c.death))

    def rows(self) -> Sequence[Row]:
        """The peaks of two extreme assignments."""
        return tuple({row.name: row for row in (self.peak(a)[1] for a in self.extremes())}.values())

    def extremes(self) -> tuple[Ints, Ints]:
        """Everywhere the cheapest strategy, and everywhere the smallest."""
        cheapest = np.array([int(np.argmin(n.cost)) for n in self._problem.nodes], np.int64)
        prints = [self.footprint(v).sum(1) for v in range(len(self._problem.nodes))]
        smallest = np.array([int(np.argmin(p)) for p in prints], np.int64)
        return cheapest, smallest

    def at_peak_without(self, values: Collection[int], assignment: Ints) -> Row:
        """The row of an assignment's peak without these values of the graph and their copies."""
        _, moment, alive = self._at_peak(self.sizes(assignment))
        kept = np.array([b.value not in values for b in self.buffers], bool)
        return self._sum(self._name(moment), alive & kept)

    def row(self, moment: int | None) -> Row:
        """What lives at a moment; None: arguments alone."""
        if moment not in self._rows:
            self._rows[moment] = self._row(moment)
        return self._rows[moment]

    def _row(self, moment: int | None) -> Row:
        return self._sum(self._name(moment), self._alive(moment))

    def row_of(self, name: str, indices: Sequence[int]) -> Row:
        """These buffers, by index, whenever they are there."""
        chosen = np.zeros(len(self.buffers), bool)
        chosen[list(indices)] = True
        return self._sum(name, chosen)

    def most(self, index: int) -> float:
        """The most bytes that a buffer takes under any choice."""
        buffer = self.buffers[index]
        if buffer.edge >= 0:
            return float(self._table(buffer.edge, {buffer.at: 1}).max())
        return float((self._vector(buffer.node, {buffer.at: 1}) if buffer.node >= 0 else self._sizes[buffer.at]).max())

    def _sum(self, name: str, chosen: NDArray[np.bool_]) -> Row:
        c = self._columns
        nodes = {v: self._vector(v, at) for v, at in _grouped(c.node, c.at, chosen & (c.node >= 0)).items()}
        edges = {e: self._table(e, at) for e, at in _grouped(c.edge, c.at, chosen & (c.edge >= 0)).items()}
        fixed = chosen & (c.node < 0) & (c.edge < 0)
        return Row(name, float(self._sizes[c.at[fixed]].sum()), nodes, edges)

    def _vector(self, node: int, at: Mapping[int, int]) -> Floats:
        length = len(self._problem.nodes[node].cost)
        return np.sum([count * self._sizes[a : a + length] for a, count in at.items()], axis=0)

    def _table(self, edge: int, at: Mapping[int, int]) -> Floats:
        shape = self._problem.edges[edge].table.shape
        size = shape[0] * shape[1]
        return np.sum([count * self._sizes[a : a + size] for a, count in at.items()], axis=0).reshape(shape)

    def footprint(self, node: int) -> Floats:
        """Shape (strategies, k): a column for each kind of buffer whose bytes this node decides."""
        length = len(self._problem.nodes[node].cost)
        columns = [self._sizes[a : a + length] for a in self._columns.kinds_of_nodes.get(node, ())]
        return np.stack(columns, axis=1) if columns else np.zeros((length, 0))

    def op_at(self, moment: int | None) -> Op | None:
        """The operation that runs at a moment; None for arguments alone and for the results at the end."""
        return self.moments[moment].op if moment is not None and moment < len(self.moments) else None

    def _name(self, moment: int | None) -> str:
        op = self.op_at(moment)
        if op is None:
            return "arguments" if moment is None else "results"
        return f"moment {moment}: {op.tag} {op.name}{f' ({op.source})' if op.source else ''}"


def highest_peaks(nbytes: Floats, above: float) -> list[int]:
    """The moments of the highest local peaks above so many bytes, highest first; the last moment of one that is flat.

    `nbytes`: of every moment, shape (moments,).
    """
    # ">=" before and ">" after: of equal neighbours only the last is a peak
    before, after = np.append(0.0, nbytes[:-1]), np.append(nbytes[1:], 0.0)
    moments = np.flatnonzero((nbytes > above) & (nbytes >= before) & (nbytes > after))
    return [int(m) for m in moments[np.argsort(-nbytes[moments], kind="stable")][:SHOWN]]


@dataclass(frozen=True, eq=False)
class _Columns:
    """The buffers as arrays, and where the sizes that each node and edge decides start."""

    birth: Ints
    death: Ints
    at: Ints
    node: Ints
    edge: Ints
    on_node: Ints
    on_edge: Ints
    kinds_of_nodes: Mapping[int, Sequence[int]]

    @staticmethod
    def of(buffers: Sequence[Buffer]) -> _Columns:
        columns = [*zip(*buffers, strict=True)][2:] or [()] * 5  # without the names and values
        birth, death, node, edge, at = (np.array(column, np.int64) for column in columns)
        kinds = {v: tuple(starts) for v, starts in _grouped(node, at, node >= 0).items()}
        return _Columns(birth, death, at, node, edge, np.flatnonzero(node >= 0), np.flatnonzero(edge >= 0), kinds)


def _grouped(owner: Ints, at: Ints, chosen: NDArray[np.bool_]) -> dict[int, dict[int, int]]:
    """Owner -> start of sizes -> how many of the chosen buffers have these; both ascending."""
    pairs, counts = np.unique(np.stack([owner[chosen], at[chosen]], axis=1), axis=0, return_counts=True)
    counts_by_owner: dict[int, dict[int, int]] = {}
    for (who, start), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        counts_by_owner.setdefault(who, {})[start] = count
    return counts_by_owner


@dataclass(frozen=True, eq=False)
class _Projections:
    """Classes of both ends of every edge, in one array each end points into."""

    classes: Ints
    first: Ints
    u: Ints
    v: Ints
    width: Ints

    @staticmethod
    def of(edges: Sequence[Edge]) -> _Projections:
        starts: dict[int, int] = {}
        runs: list[Ints] = [np.zeros(0, np.int64)]
        filled = 0
        for classes in (c for e in edges for c in (e.gu, e.gv)):
            if id(classes) not in starts:
                starts[id(classes)] = filled
                runs.append(classes)
                filled += len(classes)
        first = np.array([(starts[id(e.gu)], starts[id(e.gv)]) for e in edges], np.int64).reshape(-1, 2)
        ends = np.array([(e.u, e.v, e.table.shape[1]) for e in edges], np.int64).reshape(-1, 3)
        return _Projections(np.concatenate(runs), first, *np.ascontiguousarray(ends.T))

    def places(self, edges: Ints, chosen: Ints) -> Ints:
        """Where in its table each of these edges is under an assignment."""
        rows = self.classes[self.first[edges, 0] + chosen[self.u[edges]]]
        return rows * self.width[edges] + self.classes[self.first[edges, 1] + chosen[self.v[edges]]]
