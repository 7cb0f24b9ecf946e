"""Cost of planned stages: seconds of their passes, and bytes on their devices.

    seconds of a program  =  operations, with the collectives that reduce their results                -> _operations
                          +  memory traffic of operations after them                                   -> _traffic
                          +  reshards, in the program that reads the result                            -> _reshards

Over all programs of a stage, passes m times, these add up to the optimizer's objective, except for its negligible cost
of local slices.

    bytes per device  =  state + sums + batch + copies + microbatches in flight x stash + temporaries    -> stage_memory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Protocol

from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.sharding.groups import Model
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.collective import Collective
from autopar.ir.graph import Type
from autopar.ir.layout import Layout, ProgramLayouts, device_share
from autopar.passes.intra_op import extract
from autopar.passes.solver.optimize import Solution
from autopar.passes.stages.divide import PASS_KINDS
from autopar.passes.stages.graph import BEGIN, StageGraph

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
    def liveness(self) -> Liveness: ...
    @property
    def layouts(self) -> ProgramLayouts: ...
    @cached_property
    def collectives(self) -> tuple[Collective, ...]: ...
    def layout(self, value: int) -> Layout | None: ...


class DeviceBytes(Protocol):
    """Bytes per device of a value; `wide`: at least four per number."""

    def __call__(self, plan: SolvedStage, value: int, *, wide: bool = False) -> float: ...


@dataclass(frozen=True)
class StageTimes:
    """Predicted seconds of one planned stage.

    Attributes:
        forward, backward, weight: s of a pass F, B, W of one microbatch.
        update: s of the programs that run once per step, without `reduce`.
        reduce: s per step of the collectives in updates: sums of gradients over devices.
        sent: value sent to another stage -> bytes of one microbatch of it, over the whole submesh.
    """

    forward: float
    backward: float
    weight: float
    update: float
    reduce: float
    sent: Mapping[int, int]

    def scaled(self, share: float) -> StageTimes:
        """All seconds times `share`, with the same bytes sent."""
        forward, backward, weight = share * self.forward, share * self.backward, share * self.weight
        return StageTimes(forward, backward, weight, share * self.update, share * self.reduce, self.sent)

    def seconds(self, microbatches: int) -> float:
        """s per step of the stage alone."""
        return microbatches * (self.forward + self.backward + self.weight) + self.update + self.reduce


@dataclass(frozen=True)
class StageMemory:
    """Predicted bytes per device of one planned stage.

    Attributes:
        state: arguments that it stores or reads whole: parameters, optimizer state.
        sums: accumulators, from the first pass to the update.
        batch: the blocks of all microbatches.
        copies: results of the prologue, and copies of these and of arguments in other layouts, while passes run.
        stash: per microbatch, residuals of forward passes for backward passes, values received included.
        temporaries: the peak of all else that is live in a pass.
        update: the peak of all else besides state and sums that is live in an update, new state included.
    """

    state: float
    sums: float
    batch: float
    copies: float
    stash: float
    temporaries: float
    update: float

    def scaled(self, share: float) -> StageMemory:
        """All bytes times `share`."""
        return StageMemory(*(share * nbytes for nbytes in astuple(self)))

    def peak(self, in_flight: int) -> float:
        """Peak bytes with `in_flight` microbatches between F and the last pass."""
        passes = self.batch + self.copies + in_flight * self.stash + self.temporaries
        return self.state + self.sums + max(passes, self.update)


def stage_times(plan: SolvedStage) -> StageTimes:
    """Seconds of a planned stage."""
    graph, microbatches = plan.graph.graph, _microbatches(plan)
    by_program: dict[str, float] = dict.fromkeys((*PASS_KINDS, UPDATE), 0.0)
    for program, seconds in (*_operations(plan), *_traffic(plan), *_reshards(plan, in_update=False)):
        by_program[program] += seconds
    reduce = sum(seconds for _, seconds in _reshards(plan, in_update=True))
    sent = {v: graph.type_of(graph.outputs[i]).nbytes for i, v in plan.graph.sent.items()}
    forward, backward, weight = (by_program[kind] / microbatches for kind in PASS_KINDS)
    return StageTimes(forward, backward, weight, by_program[UPDATE], reduce, sent)


def _microbatches(plan: SolvedStage) -> int:
    """Number of microbatches."""
    repeats = plan.graph.graph.repeats
    assert repeats is not None
    return repeats.inputs[plan.graph.index]


def _program(plan: SolvedStage, op: int) -> str:
    """F, B, W, or "update" for a program that runs once."""
    name = plan.graph.program_of(op)
    return name if name in PASS_KINDS else UPDATE


# Seconds per step, by program


def _operations(plan: SolvedStage) -> Iterator[tuple[str, float]]:
    for op, seconds in extract.operation_seconds(plan.model, plan.solution.assignment):
        yield _program(plan, op), seconds


def _traffic(plan: SolvedStage) -> Iterator[tuple[str, float]]:
    groups, readers = plan.model.grouping.groups, _first_readers(plan)
    for charge, seconds in extract.traffic_seconds(plan.model, plan.solution.assignment, plan.mesh):
        value = groups[charge.group].value
        yield _program(plan, charge.op) if charge.op >= 0 else readers.get(value, UPDATE), seconds


def _first_readers(plan: SolvedStage) -> Mapping[int, str]:
    """Argument -> the program that first reads it."""
    readers: dict[int, str] = {}
    for op in plan.graph.graph.ops:
        for atom in op.inputs:
            if isinstance(atom, int) and atom in plan.graph.graph.names:
                readers.setdefault(atom, _program(plan, op.index))
    return readers


def _reshards(plan: SolvedStage, *, in_update: bool) -> Iterator[tuple[str, float]]:
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
            is_shared = c.count < _microbatches(plan)  # a copy that all passes share
            yield UPDATE if is_shared else program, extract.collective_seconds(c, submesh)


def _program_at(plan: SolvedStage, op: int, site: str) -> str:
    """The program that reshards a value for a site; for a result of the graph, the program that computes it."""
    if op >= 0:
        return _program(plan, op)
    atom = plan.graph.graph.outputs[int(site.removeprefix("out"))]
    producer = plan.graph.maker.get(atom, BEGIN) if isinstance(atom, int) else BEGIN
    return producer if producer in PASS_KINDS else UPDATE


# Bytes


def stage_memory(plan: SolvedStage) -> StageMemory:
    """Bytes per device of a planned stage.

    The stash counts every value once, in its layout. Of a forward value that is recomputed at every reader, it has the
    operands instead.
    """
    persistent, copies = _persistent(plan, stored_bytes), _shared_copies(plan)
    passes, update = _transient_peaks(plan)
    return replace(persistent, copies=copies, temporaries=max(0.0, passes - copies - persistent.stash), update=update)


def least_memory(plan: SolvedStage) -> StageMemory:
    """A lower bound on the memory of every plan of a stage: even shards, without copies and temporaries."""
    return _persistent(plan, even_bytes)


def _persistent(plan: SolvedStage, device_bytes: DeviceBytes) -> StageMemory:
    """State, sums, the batch and the stash, by the bytes per device of each value."""
    graph, microbatches = plan.graph, _microbatches(plan)
    state = sum(device_bytes(plan, v) for v in graph.arguments.values())
    sums = sum(device_bytes(plan, a, wide=True) for v in graph.summed_in if isinstance(a := graph.local[v], int))
    batch = sum(microbatches * device_bytes(plan, v) for v in graph.blocks.values())
    stash = sum(device_bytes(plan, v) for v in _stashed(plan))
    return StageMemory(state, sums, batch, 0.0, stash, 0.0, 0.0)


def _shared_copies(plan: SolvedStage) -> float:
    """Bytes per device shared by passes: of each whole value or argument, its largest copy that is live in passes."""
    graph, sizes = plan.graph, plan.liveness.sizes(plan.solution.assignment)
    whole = {a for a in graph.whole.values() if isinstance(a, int)}
    shared_values = {"value": whole, "copy": whole | {*graph.arguments.values()}}
    pass_moments = [m for m, step in enumerate(plan.liveness.moments) if _program(plan, step.op.index) in PASS_KINDS]
    largest: dict[int, float] = {}
    for buffer, size in zip(plan.liveness.buffers, sizes, strict=True):
        is_live = pass_moments and buffer.birth <= pass_moments[-1] and buffer.death >= pass_moments[0]
        if is_live and buffer.value in shared_values.get(buffer.what, ()):
            largest[buffer.value] = max(largest.get(buffer.value, 0.0), float(size))
    return sum(largest.values())


def stored_bytes(plan: SolvedStage, value: int, *, wide: bool = False) -> float:
    """Bytes per device of a value in its layout; `wide`: at least four per number, as accumulators have."""
    type_, layout = plan.graph.graph.types[value], plan.layout(value)
    return _dense_bytes(type_, wide) * device_share(layout, type_.shape, plan.mesh.sizes)


def even_bytes(plan: SolvedStage, value: int, *, wide: bool = False) -> float:
    """Bytes per device of a value that is sharded evenly over the whole submesh."""
    return _dense_bytes(plan.graph.graph.types[value], wide) / plan.mesh.size


def _dense_bytes(type_: Type, wide: bool) -> float:
    return type_.size * (max(type_.itemsize, 4) if wide and "float" in type_.dtype else type_.itemsize)


def _stashed(plan: SolvedStage) -> Sequence[int]:
    """Values that later passes read of earlier ones or of other stages."""
    graph, has_layout = plan.graph, plan.layouts.values
    program_of, received = graph.maker, {*graph.received.values()}
    producer = {v: op for op in graph.graph.ops for v in op.outputs}
    stashed: dict[int, None] = {}
    for op in graph.graph.ops:
        program = program_of.get(op.outputs[0], BEGIN) if op.outputs else BEGIN
        if program not in ("B", "W"):
            continue
        stack, visited = [a for a in op.inputs if isinstance(a, int)], set[int]()
        while stack:
            value = stack.pop()
            if value in visited:
                continue
            visited.add(value)
            source_program = program_of.get(value, "F" if value in received else BEGIN)
            is_recomputed = value in producer and value not in has_layout and graph.graph.types[value].rank > 0
            if is_recomputed and source_program != BEGIN:
                stack.extend(a for a in producer[value].inputs if isinstance(a, int))
            elif source_program in PASS_KINDS and PASS_KINDS.index(source_program) < PASS_KINDS.index(program):
                stashed[value] = None
    return tuple(sorted(stashed))


def _transient_peaks(plan: SolvedStage) -> tuple[float, float]:
    """Peak bytes besides arguments while passes run, and while updates run."""
    profile = plan.liveness.profile(plan.solution.assignment)
    passes, update = 0.0, 0.0
    for moment, step in enumerate(plan.liveness.moments):
        if _program(plan, step.op.index) in PASS_KINDS:
            passes = max(passes, float(profile[moment]))
        else:
            update = max(update, float(profile[moment]))
    return passes, update
