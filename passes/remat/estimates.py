"""Forecasts of what rematerialising layers costs and frees, read off the plan of the program as written.

    seconds  =  recomputed operations, with the collectives that end their sums
             +  light traffic of the operations that follow them
             +  reshards of their operands
    bytes    =  dropped residuals alive at the peak  -  products saved in their place

Values that depend on no batch keep the layouts in which the forward pass read them, and are not moved again.
Both formulas assume the layouts of that plan. A plan of the rematerialised program may choose better layouts, and may
peak elsewhere. A forecast therefore decides where a search begins, and never which plan wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.row import smallest
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.layout import device_share
from autopar.ir.problem import Ints
from autopar.passes.intra_op import extract
from autopar.passes.intra_op.build import Model
from autopar.passes.layers import find as layers_pass
from autopar.passes.op_groups.bindings import Use
from autopar.passes.remat.rewrite import DOTS, FULL, Rematerialised, rematerialised


class Estimate(NamedTuple):
    """What rematerialising one layer adds to a step (s) and frees at its peak (bytes per device)."""

    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Forecast:
    """What rematerialising layers by one policy is about to cost.

    Attributes:
        layers: an estimate for each layer that may be rematerialised, in order.
        least_bytes: bytes per device that stay at the peak with all these layers rematerialised, in the smallest
            layouts.
    """

    layers: tuple[Estimate, ...]
    least_bytes: float


def forecasts(
    graph: Graph,
    model: Model,
    mesh: LogicalMesh,
    liveness: Liveness,
    assignment: Ints,
    open_to: Sequence[bool],
    layered: Graph | None = None,
) -> Mapping[str, Forecast]:
    """Policy -> its forecast; empty where a loop over layers may be rematerialised, whose body this does not price.

    Args:
        graph: the program as written.
        model, liveness: its optimization problem on `mesh`, and its memory.
        assignment: its plan, a strategy for each node of the problem.
        open_to: for each layer whether it may be rematerialised.
        layered: where its layers are, if that is a part of it, such as `one_microbatch`.
    """
    plan = _Plan.of(graph, model, mesh, liveness, assignment, layered or graph)
    found = {policy: plan.forecast(policy, open_to) for policy in (DOTS, FULL)}
    return {policy: forecast for policy, forecast in found.items() if forecast is not None}


def one_microbatch(graph: Graph) -> Graph | None:
    """What a program does with each of its microbatches, as a program with the same operations and values.

    It is the body of the largest loop; None if that has no backward pass.
    """
    bodies = [op.regions[0] for op in graph.ops if op.name == "scan"]
    body = max(bodies, key=lambda region: len(region.ops), default=None)
    if body is None or not any(op.phase == "backward" for op in body.ops):
        return None
    return replace(
        graph,
        inputs=body.inputs,
        input_paths=tuple(map(str, range(len(body.inputs)))),
        ops=body.ops,
        outputs=body.outputs,
        output_paths=tuple(map(str, range(len(body.outputs)))),
        carried={},
    )


@dataclass(frozen=True, eq=False)
class _Plan:
    """The plan of the program as written, by operation and by value.

    Attributes:
        layered: where its layers are.
        seconds_of: operation -> s per step of its work and of its light traffic.
        uses_of: operation -> its operands that depend on the batch.
        peak_bytes_of: value -> bytes per device at the peak, of those alive then.
    """

    graph: Graph
    model: Model
    mesh: LogicalMesh
    liveness: Liveness
    assignment: Ints
    layered: Graph
    layouts: extract.Layouts
    seconds_of: Mapping[int, float]
    uses_of: Mapping[int, Sequence[Use]]
    peak_bytes_of: Mapping[int, float]

    @staticmethod
    def of(
        graph: Graph, model: Model, mesh: LogicalMesh, liveness: Liveness, assignment: Ints, layered: Graph
    ) -> _Plan:
        seconds_of: dict[int, float] = {}
        light = ((charge.op, seconds) for charge, seconds in extract.traffic_seconds(model, assignment, mesh))
        for op, seconds in (*extract.operation_seconds(model, assignment), *light):
            seconds_of[op] = seconds_of.get(op, 0.0) + seconds
        uses_of: dict[int, list[Use]] = {}
        for use in model.grouping.uses:
            if use.value not in model.grouping.overlap.early:
                uses_of.setdefault(use.op, []).append(use)
        peak_bytes_of: dict[int, float] = {}
        for buffer, nbytes in liveness.at_peak(assignment)[2]:
            peak_bytes_of[buffer.value] = peak_bytes_of.get(buffer.value, 0.0) + nbytes
        layouts = extract.layouts(model, assignment)
        return _Plan(graph, model, mesh, liveness, assignment, layered, layouts, seconds_of, uses_of, peak_bytes_of)

    def forecast(self, policy: str, open_to: Sequence[bool]) -> Forecast | None:
        """The forecast of one policy; None where a loop over layers is open to it."""
        layers = zip(layers_pass.find(self.layered).layers, rematerialised(self.layered, policy), open_to, strict=True)
        chosen = [(layer.kind, change) for layer, change, open_ in layers if open_]
        of_kind: dict[int, Estimate] = {}  # layers of one kind are equal programs
        dropped: set[int] = set()
        least = 0.0
        for kind, change in chosen:
            if change is None:
                return None
            if kind not in of_kind:
                of_kind[kind] = Estimate(self._seconds(change), self._freed_bytes(change))
            dropped |= change.dropped
            saved = (self.graph.types[v].nbytes for v in change.saved if v not in self.peak_bytes_of)
            least += sum(saved) / self.mesh.size
        least += smallest(self.liveness.at_peak_without(dropped, self.assignment))
        return Forecast(tuple(of_kind[kind] for kind, _ in chosen), least)

    def _seconds(self, change: Rematerialised) -> float:
        again = sorted(change.recomputed)
        read = tuple(use for op in again for use in self.uses_of.get(op, ()))
        model = replace(self.model, grouping=replace(self.model.grouping, uses=read))
        moved = extract.reshards(self.graph, model, self.layouts, self.mesh)
        reshards = sum(extract.collective_seconds(c, self.mesh) for c in moved)
        return sum(self.seconds_of.get(op, 0.0) for op in again) + reshards

    def _freed_bytes(self, change: Rematerialised) -> float:
        freed = sum(self.peak_bytes_of.get(v, 0.0) for v in change.dropped)
        return freed - sum(self._piece(v) for v in change.saved if v not in self.peak_bytes_of)

    def _piece(self, value: int) -> float:
        """Bytes of a value that each device has."""
        type_ = self.graph.types[value]
        return type_.nbytes * device_share(self.layouts.values.get(value), type_.shape, self.mesh.sizes)
