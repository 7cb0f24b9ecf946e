"""What recomputing a layer will cost and free, read off the plan of the program as written.

    seconds  =  operations that run once more, with the collectives that end their sums
             +  light traffic of what follows them
             +  reshards of what they read
    bytes    =  dropped values alive at the peak  -  results of products that are kept in their place

What is made of parameters alone is there in the layouts that the forward pass read, and is not moved again.
All of it assumes the layouts of that plan. A plan of the recomputed program may choose better ones, and its peak may be
elsewhere, so that these are estimates: they say where to search first, and no plan is chosen by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cluster import LogicalMesh
from autopar.cost_models.collectives import collective_time
from autopar.cost_models.memory import Liveness
from autopar.graph import Graph
from autopar.layout import Layout, local_shape
from autopar.passes import decode
from autopar.passes import layers as layers_pass
from autopar.passes.homes import Use
from autopar.passes.intra_op import Model
from autopar.passes.memory_rows import smallest
from autopar.passes.problem import Ints
from autopar.passes.remat import Change, changes
from autopar.passes.state import match_state
from autopar.passes.strategies import share, shares


class Estimate(NamedTuple):
    """What recomputing one layer adds to a step (s) and frees at its peak (bytes per device)."""

    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Forecast:
    """What recomputing layers by one policy is about to cost.

    Attributes:
        steps: one estimate for each layer that is open to it, in order.
        least_bytes: bytes per device that stay at the peak with all of them recomputed, in the smallest layouts.
    """

    steps: tuple[Estimate, ...]
    least_bytes: float


@dataclass(frozen=True, eq=False)
class AsWritten:
    """The plan of the program as written, by operation and by value: what forecasts are read off.

    Attributes:
        graph, model, mesh: the program, its problem and the mesh it is planned for.
        liveness, assignment: its memory and its plan.
        layouts: those of the plan.
        own: operation -> s per step of its own work, its light traffic included.
        uses: operation -> what it reads that is not made of parameters alone.
        held: value -> bytes per device at the peak.
    """

    graph: Graph
    model: Model
    mesh: LogicalMesh
    liveness: Liveness
    assignment: Ints
    layouts: decode.Layouts
    own: Mapping[int, float]
    uses: Mapping[int, Sequence[Use]]
    held: Mapping[int, float]

    @staticmethod
    def of(graph: Graph, model: Model, mesh: LogicalMesh, liveness: Liveness, assignment: Ints) -> AsWritten:
        own: dict[int, float] = {}
        for op, seconds in _work(model, mesh, assignment):
            own[op] = own.get(op, 0.0) + seconds
        uses: dict[int, list[Use]] = {}
        moved = _of_the_batch(graph)
        for use in model.clustering.uses:
            if use.value in moved:
                uses.setdefault(use.op, []).append(use)
        held: dict[int, float] = {}
        for buffer, nbytes in liveness.at_peak(assignment)[2]:
            held[buffer.value] = held.get(buffer.value, 0.0) + nbytes
        layouts = decode.layouts(model, assignment)
        return AsWritten(graph, model, mesh, liveness, assignment, layouts, own, uses, held)

    def forecast(self, policy: str, open_to: Sequence[bool]) -> Forecast | None:
        """What recomputing layers by a policy costs and frees; None where loops over layers are recomputed.

        Args:
            policy: one of `autopar.passes.remat.POLICIES`.
            open_to: for each layer whether it may be recomputed.
        """
        layers = layers_pass.find(self.graph).layers
        found = zip(layers, changes(self.graph, policy), open_to, strict=True)
        chosen = [(layer.kind, change) for layer, change, open_ in found if open_]
        kinds: dict[int, Estimate] = {}  # layers of one kind are equal programs
        dropped: set[int] = set()
        least = 0.0
        for kind, change in chosen:
            if change is None:
                return None
            if kind not in kinds:
                kinds[kind] = Estimate(self.seconds(change), self.nbytes(change))
            dropped |= change.dropped
            least += sum(self.graph.types[v].nbytes for v in change.kept if v not in self.held) / self.mesh.size
        least += smallest(self.liveness.at_peak_without(dropped, self.assignment))
        return Forecast(tuple(kinds[kind] for kind, _ in chosen), least)

    def seconds(self, change: Change) -> float:
        """s per step of the operations that run once more."""
        read = tuple(use for op in sorted(change.again) for use in self.uses.get(op, ()))
        model = replace(self.model, clustering=replace(self.model.clustering, uses=read))
        moved = decode.reshards(self.graph, model, self.layouts, self.mesh)
        seconds = (
            c.count * collective_time(c.kind, c.bytes, tuple(map(self.mesh.axis, c.axes)), self.mesh) for c in moved
        )
        return sum(self.own.get(op, 0.0) for op in change.again) + sum(seconds)

    def nbytes(self, change: Change) -> float:
        """Bytes per device that are not held at the peak any more."""
        freed = sum(self.held.get(v, 0.0) for v in change.dropped)
        return freed - sum(self._piece(v) for v in change.kept if v not in self.held)

    def _piece(self, value: int) -> float:
        type_, layout = self.graph.types[value], self.layouts.values.get(value)
        shape = type_.shape if layout is None else local_shape(_cut(layout), type_.shape, self.mesh.sizes)
        return math.prod(shape) * type_.itemsize


def _cut(layout: Layout) -> Layout:
    return tuple(max(d, -1) for d in layout)


def _of_the_batch(graph: Graph) -> frozenset[int]:
    """Values that depend on an argument that is no state."""
    state = set(match_state(graph).values())
    found = {v for position, v in enumerate(graph.inputs) if position not in state}
    for op in graph.ops:
        if any(isinstance(a, int) and a in found for a in op.inputs):
            found.update(op.outputs)
            found.update(v for inner in op.walk() for v in inner.outputs)
    return frozenset(found)


def _work(model: Model, mesh: LogicalMesh, assignment: Ints) -> Iterator[tuple[int, float]]:
    """Operation and s per step, for all operations with strategies and for all light traffic."""
    clusters = model.clustering.clusters
    for index, c in enumerate(clusters):
        if c.op >= 0:
            yield c.op, c.weight * float(c.strategies.cost[assignment[index]])
    pieces: dict[tuple[int, int, tuple[int, ...]], float] = {}
    for charge in model.clustering.charges:
        strategies, choice = clusters[charge.cluster].strategies, int(assignment[charge.cluster])
        key = strategies.index, choice, charge.dims
        if key not in pieces:
            each = shares(strategies.held[choice : choice + 1], strategies.sizes, mesh.sizes)
            pieces[key] = float(share(each, charge.dims)[0])
        yield charge.op, charge.nbytes * pieces[key] / mesh.device.memory_bandwidth
