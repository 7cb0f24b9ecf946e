"""A stand-in memory model for tests and measurements: values live from their operation to their last reader.

Rough on purpose (no schedule, no fusion beyond the grouping's), but with the shape of the real one: thousands of
points, arguments that always live, residuals that live long, buffers of reshards that live at one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.memory.row import Row
from autopar.cost_models.sharding.groups import Model
from autopar.cost_models.sharding.strategies import share, shares
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.problem import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes that a node (or an edge: `edge` >= 0) holds from point `birth` to `death`, both included."""

    node: int
    edge: int
    birth: int
    death: int
    table: Floats


class Liveness:
    """A `RowSource` over pieces."""

    def __init__(self, model: Model, pieces: Sequence[Piece], points: int) -> None:
        self.model = model
        self.pieces = tuple(pieces)
        self.points = points
        self.size = np.array([p.table.size for p in pieces])
        self.offset = np.concatenate([[0], np.cumsum(self.size)[:-1]])
        self.flat = np.concatenate([p.table.ravel() for p in pieces])
        self.node = np.array([p.node for p in pieces])
        self.birth = np.array([p.birth for p in pieces])
        self.death = np.array([p.death for p in pieces])
        self.edged = np.flatnonzero([p.edge >= 0 for p in pieces])

    def peak(self, assignment: Ints) -> tuple[float, Row]:
        profile = self.profile(assignment)
        point = int(profile.argmax())
        return float(profile[point]), self.row(point)

    def over(self, assignment: Ints, nbytes: float) -> Sequence[Row]:
        point, held = self.peak(assignment)[1], self.profile(assignment)
        return [point] if held.max() > nbytes else []

    def profile(self, assignment: Ints) -> Floats:
        choice = assignment[self.node].copy()
        for i in self.edged:
            e = self.model.problem.edges[self.pieces[i].edge]
            choice[i] = e.gu[assignment[e.u]] * e.table.shape[1] + e.gv[assignment[e.v]]
        held = self.flat[self.offset + choice]
        change = np.zeros(self.points + 2)
        np.add.at(change, self.birth, held)
        np.add.at(change, self.death + 1, -held)
        return change.cumsum()[: self.points]

    def row(self, point: int) -> Row:
        nodes: dict[int, Floats] = {}
        edges: dict[int, Floats] = {}
        for i in np.flatnonzero((self.birth <= point) & (self.death >= point)):
            p = self.pieces[i]
            into, key = (edges, p.edge) if p.edge >= 0 else (nodes, p.node)
            into[key] = into[key] + p.table if key in into else p.table
        return Row(f"op{point}", 0.0, nodes, edges)

    def rows(self) -> Sequence[Row]:
        """The points with the most bytes when everything is whole, one in each of four parts of the program."""
        whole = self.profile(np.zeros(len(self.model.problem.nodes), dtype=np.int64))
        return [self.row(int(whole.argmax()))]


def liveness(graph: Graph, model: Model, mesh: LogicalMesh) -> Liveness:
    """Pieces of every homed value of rank above zero that is an argument, a cluster's own, or read twice."""
    points = len(graph.ops)
    born = dict.fromkeys(graph.inputs, -1)
    last: dict[int, int] = {}
    reads: dict[int, int] = {}
    for t, op in enumerate(graph.ops):
        for atom in op.inputs:
            if isinstance(atom, int):
                last[atom] = t
                reads[atom] = reads.get(atom, 0) + 1
        for v in op.outputs:
            born[v] = t
    for atom in graph.outputs:
        if isinstance(atom, int):
            last[atom] = points - 1
    clusters = model.grouping.groups
    own = {c.value for c in clusters}
    sizes: dict[object, Floats] = {}
    pieces: list[Piece] = []
    for value, binding in model.grouping.bindings.items():
        if binding.view is not None or value not in born:
            continue
        argument = born[value] < 0
        if not (argument or value in own or reads.get(value, 0) > 1) or graph.types[value].nbytes < 1024:
            continue
        c = clusters[binding.group]
        key = (c.strategies.index, binding.dims, graph.types[value].nbytes)
        if key not in sizes:
            each = shares(c.strategies.result, c.strategies.sizes, mesh.sizes)
            sizes[key] = graph.types[value].nbytes * share(each, binding.dims)
        birth, death = (0, points - 1) if argument else (born[value], last.get(value, born[value]))
        pieces.append(Piece(binding.group, -1, birth, death, sizes[key]))
    at = {op.index: t for t, op in enumerate(graph.ops)}
    tables: dict[object, Floats] = {}
    for i, e in enumerate(model.problem.edges):
        if e.v >= len(clusters) or clusters[e.v].op not in at:
            continue
        value = clusters[e.u].value if e.u < len(clusters) else _copied(model)[e.u]
        nbytes = graph.types[value].nbytes
        if nbytes < 1 << 20 or not (e.table > 0).any():
            continue
        key = (e.key, nbytes)
        if key not in tables:
            reader = clusters[e.v].strategies
            own_share = shares(reader.assigned, reader.sizes, mesh.sizes).prod(1)
            best = np.ones(e.table.shape[1])
            np.minimum.at(best, e.gv, own_share)
            tables[key] = np.where(e.table > 0, nbytes * np.maximum(best, 1.0 / mesh.size), 0.0)
        t = at[clusters[e.v].op]
        pieces.append(Piece(e.u, i, t, t, tables[key]))
    return Liveness(model, pieces, points)


def _copied(model: Model) -> dict[int, int]:
    return {node: value for value, node in model.copies.items()}
