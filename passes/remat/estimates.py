"""Forecasts of costs and freed bytes of rematerialised layers, from the plan of the program as written.

    seconds  =  recomputed operations, with the collectives that reduce their results
             +  memory traffic of the operations after them
             +  reshards of their operands
             -  memory traffic of the values that only the backward pass had needed in memory
    bytes    =  dropped residuals live at the peak  -  results of products saved in their place

Values that do not depend on the batch keep their layouts of the forward pass, and are not resharded again.
Both formulas assume the layouts of that plan. A plan of the rematerialised program may have better layouts, and may
peak elsewhere. So a forecast decides where a search begins, and never which plan is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cost_models.compiler.fusion import KERNEL, LIGHT, SECONDS
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.row import smallest
from autopar.cost_models.sharding.groups import Model, Use
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, Op
from autopar.ir.keyed import grouped, totals
from autopar.ir.layout import ProgramLayouts, device_share
from autopar.ir.problem import Ints
from autopar.passes.intra_op import extract
from autopar.passes.layers import find as layers_pass
from autopar.passes.remat.rewrite import DOTS, FULL, Rematerialised, rematerialised


class Estimate(NamedTuple):
    """Seconds that rematerialising one layer adds to a step, and bytes per device that it frees at the peak."""

    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Forecast:
    """Forecast of rematerialising layers by one policy.

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
    recomputable: Sequence[bool],
    layered: Graph | None = None,
) -> Mapping[str, Forecast]:
    """Policy -> its forecast; empty if a loop over layers may be rematerialised, whose body has no estimate.

    Args:
        graph: the program as written.
        model, liveness: its optimization problem on `mesh`, and its memory.
        assignment: its plan, a strategy for each node of the problem.
        recomputable: for each layer whether it may be rematerialised.
        layered: the part of the program that has the layers, such as `one_microbatch`.
    """
    plan = _Plan.of(graph, model, mesh, liveness, assignment, layered or graph)
    by_policy = {policy: plan.forecast(policy, recomputable) for policy in (DOTS, FULL)}
    return {policy: forecast for policy, forecast in by_policy.items() if forecast is not None}


def one_microbatch(graph: Graph) -> Graph | None:
    """The operations of one microbatch as a program with the same operations and values.

    This is the body of the largest loop; None if that has no backward pass.
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
        layered: the part of the program that has the layers.
        seconds_of: operation -> s per step of its work and of its memory traffic.
        written_s: light operation -> s per step to write its result.
        kernels: operations with strategies of their own.
        uses_of: operation -> its operands that depend on the batch.
        peak_bytes_of: value -> bytes per device at the peak, of those live then.
    """

    graph: Graph
    model: Model
    mesh: LogicalMesh
    liveness: Liveness
    assignment: Ints
    layered: Graph
    layouts: ProgramLayouts
    seconds_of: Mapping[int, float]
    written_s: Mapping[int, float]
    kernels: frozenset[int]
    uses_of: Mapping[int, Sequence[Use]]
    peak_bytes_of: Mapping[int, float]

    @staticmethod
    def of(
        graph: Graph, model: Model, mesh: LogicalMesh, liveness: Liveness, assignment: Ints, layered: Graph
    ) -> _Plan:
        traffic = [(charge.op, seconds) for charge, seconds in extract.traffic_seconds(model, assignment, mesh)]
        seconds_of = totals((*extract.operation_seconds(model, assignment), *traffic))
        kernels = frozenset(group.op for group in model.grouping.groups if group.op >= 0)
        early = model.grouping.overlap.early
        uses_of = grouped((use.op, use) for use in model.grouping.uses if use.value not in early)
        peak_bytes_of = totals((buffer.value, nbytes) for buffer, nbytes in liveness.at_peak(assignment)[2])
        layouts = extract.layouts(model, assignment)
        context = (graph, model, mesh, liveness, assignment, layered, layouts)
        written_s = dict(reversed(traffic))  # the first charge of an operation is that of its result
        return _Plan(*context, seconds_of, written_s, kernels, uses_of, peak_bytes_of)

    def forecast(self, policy: str, recomputable: Sequence[bool]) -> Forecast | None:
        """The forecast of one policy; None if a loop over layers is recomputable."""
        layers = zip(
            layers_pass.find(self.layered).layers, rematerialised(self.layered, policy), recomputable, strict=True
        )
        changes = [(layer.kind, change) for layer, change, is_recomputable in layers if is_recomputable]
        of_kind: dict[int, Estimate] = {}  # layers of one kind are equal programs
        dropped: set[int] = set()
        least_bytes = 0.0
        for kind, change in changes:
            if change is None:
                return None
            if kind not in of_kind:
                of_kind[kind] = Estimate(self._seconds(change), self._freed_bytes(change))
            dropped |= change.dropped
            saved_bytes = (self.graph.types[v].nbytes for v in change.saved if v not in self.peak_bytes_of)
            least_bytes += sum(saved_bytes) / self.mesh.size
        least_bytes += smallest(self.liveness.at_peak_without(dropped, self.assignment))
        return Forecast(tuple(of_kind[kind] for kind, _ in changes), least_bytes)

    def _seconds(self, change: Rematerialised) -> float:
        recomputed = sorted(change.recomputed)
        operands = tuple(use for op in recomputed for use in self.uses_of.get(op, ()))
        model = replace(self.model, grouping=replace(self.model.grouping, uses=operands))
        resharded = extract.reshards(self.graph, model, self.layouts, self.mesh)
        reshards = sum(extract.collective_seconds(c, self.mesh) for c in resharded)
        unwritten = sum(self.written_s.get(self.graph.producers[v].index, 0.0) for v in self._unwritten(change))
        return sum(self.seconds_of.get(op, 0.0) for op in recomputed) + reshards - unwritten

    def _unwritten(self, change: Rematerialised) -> Iterator[int]:
        """Dropped values that are written to memory for the backward pass alone."""
        for value in change.dropped & self.graph.producers.keys():
            readers = [use.op for use in self.graph.uses_of(value)]
            forward = [op for op in readers if op is None or op.phase == "forward"]
            if self._is_written(readers) and not self._is_written(forward):
                yield value

    def _is_written(self, readers: Sequence[Op | None]) -> bool:
        """Whether the result of a light operation with these readers (None: the caller) is in memory."""
        kernel = any(op is None or op.regions or op.index in self.kernels for op in readers)
        return SECONDS.is_written({LIGHT: len(readers), KERNEL: kernel})

    def _freed_bytes(self, change: Rematerialised) -> float:
        freed = sum(self.peak_bytes_of.get(v, 0.0) for v in change.dropped)
        return freed - sum(self._device_bytes(v) for v in change.saved if v not in self.peak_bytes_of)

    def _device_bytes(self, value: int) -> float:
        """Bytes per device of a value."""
        type_ = self.graph.types[value]
        return type_.nbytes * device_share(self.layouts.values.get(value), type_.shape, self.mesh.sizes)
