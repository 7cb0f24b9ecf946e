"""Cost of planned stages: seconds of their passes.

    seconds of a program  =  operations, with the collectives that reduce their results                -> _operations
                          +  memory traffic of operations after them                                   -> _traffic
                          +  reshards, in the program that reads the result                            -> _reshards
                          +  copies of offloaded state, in updates                          autopar.cost_models.offload

Over all programs of a stage, passes m times, these add up to the optimizer's objective, except for its negligible cost
of local slices. Their bytes: `autopar.passes.stages.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from autopar.cost_models import offload
from autopar.cost_models.sharding.groups import Model
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.collective import Collective
from autopar.ir.layout import Layout, ProgramLayouts
from autopar.passes.intra_op import extract
from autopar.passes.solver.optimize import Solution
from autopar.passes.stages.divide import PASS_KINDS
from autopar.passes.stages.graph import BEGIN, StageGraph, recomputation
from autopar.passes.stages.memory import StageLiveness

UPDATE = "update"


class SolvedStage(Protocol):
    """A stage with its problem and solution, as `autopar.passes.stages.plan.StagePlan` describes them."""

    @property
    def graph(self) -> StageGraph: ...
    @property
    def mesh(self) -> LogicalMesh: ...
    @property
    def model(self) -> Model: ...
    @property
    def solution(self) -> Solution: ...
    @property
    def liveness(self) -> StageLiveness: ...
    @property
    def layouts(self) -> ProgramLayouts: ...
    @cached_property
    def collectives(self) -> tuple[Collective, ...]: ...
    def layout(self, value: int) -> Layout | None: ...


@dataclass(frozen=True)
class StageTimes:
    """Predicted seconds of one planned stage.

    Attributes:
        forward, backward, weight: s of a pass F, B, W of one microbatch.
        update: s of the programs that run once per step, without `reduce` and `host`.
        reduce: s per step of the collectives in updates: sums of gradients over devices.
        sent: value sent to another stage -> bytes of one microbatch of it, over the whole submesh.
        host: s per step of the copies of offloaded state to the device and back.
        recomputation: s by which rematerialisation would prolong a backward pass.
    """

    forward: float
    backward: float
    weight: float
    update: float
    reduce: float
    sent: Mapping[int, int]
    host: float = 0.0
    recomputation: float = 0.0

    def scaled(self, share: float) -> StageTimes:
        """All seconds times `share`, with the same bytes sent."""
        forward, backward, weight = share * self.forward, share * self.backward, share * self.weight
        update, reduce, host = share * self.update, share * self.reduce, share * self.host
        return StageTimes(forward, backward, weight, update, reduce, self.sent, host, share * self.recomputation)

    def seconds(self, microbatches: int) -> float:
        """s per step of the stage alone."""
        return microbatches * (self.forward + self.backward + self.weight) + self.update + self.reduce + self.host


class _Seconds(NamedTuple):
    """Seconds per step of one operation (-1: of none) in a program of the stage."""

    program: str
    op: int
    seconds: float


def stage_times(plan: SolvedStage) -> StageTimes:
    """Seconds of a planned stage."""
    graph, microbatches = plan.graph.graph, plan.graph.microbatches
    by_program: dict[str, float] = dict.fromkeys((*PASS_KINDS, UPDATE), 0.0)
    repeated = {inner.index for i in recomputation(plan.graph).ops for inner in graph.by_index[i].walk()}
    recomputed = 0.0
    for program, op, seconds in (*_operations(plan), *_traffic(plan), *_reshards(plan, in_update=False)):
        by_program[program] += seconds
        recomputed += seconds / microbatches if program == PASS_KINDS[0] and op in repeated else 0.0
    reduce = sum(seconds for _, _, seconds in _reshards(plan, in_update=True))
    sent = {v: graph.type_of(graph.outputs[i]).nbytes for i, v in plan.graph.sent.items()}
    forward, backward, weight = (by_program[kind] / microbatches for kind in PASS_KINDS)
    host_bytes = plan.liveness.host_bytes(plan.solution.assignment)
    host = offload.seconds(host_bytes, plan.mesh) if host_bytes else 0.0
    return StageTimes(forward, backward, weight, by_program[UPDATE], reduce, sent, host, recomputed)


def _program(plan: SolvedStage, op: int) -> str:
    """F, B, W, or "update" for a program that runs once."""
    name = plan.graph.program_of(op)
    return name if name in PASS_KINDS else UPDATE


def _operations(plan: SolvedStage) -> Iterator[_Seconds]:
    for op, seconds in extract.operation_seconds(plan.model, plan.solution.assignment):
        yield _Seconds(_program(plan, op), op, seconds)


def _traffic(plan: SolvedStage) -> Iterator[_Seconds]:
    groups, readers = plan.model.grouping.groups, _first_readers(plan)
    for charge, seconds in extract.traffic_seconds(plan.model, plan.solution.assignment, plan.mesh):
        value = groups[charge.group].value
        program = _program(plan, charge.op) if charge.op >= 0 else readers.get(value, UPDATE)
        yield _Seconds(program, charge.op, seconds)


def _first_readers(plan: SolvedStage) -> Mapping[int, str]:
    """Argument -> the program that first reads it."""
    readers: dict[int, str] = {}
    for op in plan.graph.graph.ops:
        for atom in op.inputs:
            if isinstance(atom, int) and atom in plan.graph.graph.names:
                readers.setdefault(atom, _program(plan, op.index))
    return readers


def _reshards(plan: SolvedStage, *, in_update: bool) -> Iterator[_Seconds]:
    """Collectives between operations; `in_update`: only those of updates, otherwise only the others."""
    mesh, overlap = plan.mesh, plan.model.grouping.overlap
    overlapped, uses = mesh.with_overlap(), {use.site: use for use in plan.model.grouping.uses}
    for c in plan.collectives:
        use = uses.get(c.op)
        if use is None:
            continue  # part of the cost of an operation
        program = _program_at(plan, use.op, c.op)
        if (program == UPDATE) == in_update:
            submesh = overlapped if overlap.moves(use.value, use.op) else mesh
            is_shared = c.count < plan.graph.microbatches  # a copy that all passes share
            seconds = extract.collective_seconds(c, submesh)
            yield _Seconds(UPDATE if is_shared else program, use.op, seconds)


def _program_at(plan: SolvedStage, op: int, site: str) -> str:
    """The program that reshards a value for a site; for a result of the graph, the program that computes it."""
    if op >= 0:
        return _program(plan, op)
    atom = plan.graph.graph.outputs[int(site.removeprefix("out"))]
    producer = plan.graph.maker.get(atom, BEGIN) if isinstance(atom, int) else BEGIN
    return producer if producer in PASS_KINDS else UPDATE
