"""A schedule lowered to calls of compiled programs: what each instruction does is worked out once, not in every step.

    begin     arguments and their shardings                                            -> LoweredBegin
    pass      program, operands and results, values to send, values that die           -> LoweredPass
    send      values and their shardings on the submesh of the reader                  -> LoweredSend
    update    program, and the sources of its operands                                 -> LoweredUpdate

The order is that of the schedule, with all updates at the end: no state is donated while a pass may still fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding

from autopar.codegen.stages.planned import PlannedPrograms
from autopar.passes.stages.divide import PASS_KINDS, Stages, Transfer
from autopar.runtime.programs import CompiledPrograms, begin_interface, not_donated
from autopar.schedules.instructions import Instruction, Kind
from autopar.schedules.pipeline import Schedule

#: An argument: its value in the graph, its position among the argument leaves, its sharding.
ArgumentSource = tuple[int, int, NamedSharding]


@dataclass(frozen=True, slots=True, eq=False)
class LoweredBegin:
    """The first program of a stage.

    Attributes:
        function: the program.
        reads: the arguments that it takes.
        arguments: all arguments that it or a pass reads, to be copied to the submesh.
        whole: values that it returns, the same for every microbatch.
        blocks: arguments that it splits into microbatches.
    """

    function: Callable[..., Any]
    reads: tuple[int, ...]
    arguments: tuple[ArgumentSource, ...]
    whole: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoweredPass:
    """A pass of a stage.

    Attributes:
        function: the program; None for a pass with nothing to compute.
        whole, blocks, reads, writes: see `autopar.passes.stages.divide.Pass`.
        transfers: the values that it sends: the transfer, whether both stages are on one rank, the values.
        dropped: values of the microbatch that no later pass reads.
    """

    function: Callable[..., Any] | None
    whole: tuple[int, ...]
    blocks: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    transfers: tuple[tuple[Transfer, bool, tuple[int, ...]], ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoweredSend:
    """A copy from one submesh to another.

    Attributes:
        values: the values that are copied.
        shardings: their shardings on the submesh of the reader.
    """

    values: tuple[int, ...]
    shardings: list[NamedSharding]


@dataclass(frozen=True, slots=True, eq=False)
class LoweredUpdate:
    """An update.

    Attributes:
        function: the program.
        stage: where it runs.
        donated, arguments: arguments that are donated to it, and those that are not.
        totals: stage, pass and position of every total, and its sharding; None: it has that sharding already.
        reads: values of other updates and their shardings; None likewise.
        writes: values that it returns.
    """

    function: Callable[..., Any]
    stage: int
    donated: tuple[ArgumentSource, ...]
    arguments: tuple[ArgumentSource, ...]
    totals: tuple[tuple[tuple[int, Kind], int, NamedSharding | None], ...]
    reads: tuple[tuple[int, NamedSharding | None], ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoweredSchedule:
    """A lowered schedule.

    Attributes:
        begins: per stage.
        passes: by stage and kind.
        sends: by transfer, between ranks only.
        updates: in the order in which they run.
        order: the instructions before the updates.
    """

    begins: tuple[LoweredBegin, ...]
    passes: Mapping[tuple[int, Kind], LoweredPass]
    sends: Mapping[Transfer, LoweredSend]
    updates: tuple[LoweredUpdate, ...]
    order: tuple[Instruction, ...]


def lower_schedule(planned: PlannedPrograms, schedule: Schedule, compiled: CompiledPrograms) -> LoweredSchedule:
    """Lower a schedule to calls of compiled programs.

    Args:
        planned: the step in stages, and the shardings of its values.
        schedule: the order of instructions.
        compiled: the programs.
    """
    stages, placement = planned.stages, schedule.pipeline.placement
    count = len(stages.stages)
    sends = {
        transfer: LoweredSend(values, [planned.value(transfer.target, v) for v in values])
        for transfer, values in stages.transfers.items()
        if placement[transfer.source] != placement[transfer.target]
    }
    return LoweredSchedule(
        tuple(_lower_begin(planned, compiled, s) for s in range(count)),
        {(s, kind): _lower_pass(stages, placement, compiled, s, kind) for s in range(count) for kind in PASS_KINDS},
        sends,
        tuple(_lower_update(planned, compiled, number) for number in range(len(compiled.updates))),
        tuple(_dispatched(schedule, sends)),
    )


def _dispatched(schedule: Schedule, sends: Mapping[Transfer, LoweredSend]) -> Iterator[Instruction]:
    """Instructions that this process dispatches; receives are part of sends, accumulation is part of passes."""
    for rank, position in schedule.order:
        i = schedule.lists[rank][position]
        if i.op in ("run", "free") or (i.op == "send" and Transfer(i.kind, i.stage, i.to) in sends):
            yield i


def _sources(planned: PlannedPrograms, stage: int, values: Sequence[int]) -> tuple[ArgumentSource, ...]:
    positions = {v: i for i, v in enumerate(planned.stages.split.graph.inputs)}
    return tuple((v, positions[v], planned.argument(stage, v)) for v in values)


def _lower_begin(planned: PlannedPrograms, compiled: CompiledPrograms, stage: int) -> LoweredBegin:
    reads, whole, blocks = begin_interface(planned.stages, stage)
    every = tuple(dict.fromkeys((*reads, *planned.stages.stages[stage].arguments)))
    return LoweredBegin(compiled.begin[stage], reads, _sources(planned, stage, every), whole, blocks)


def _lower_pass(
    stages: Stages, placement: Sequence[int], compiled: CompiledPrograms, stage: int, kind: Kind
) -> LoweredPass:
    programs = stages.stages[stage]
    pass_, later_reads = programs.passes[kind], programs.live_after(kind)
    so_far = [programs.passes[k] for k in PASS_KINDS[: PASS_KINDS.index(kind) + 1]]
    alive = dict.fromkeys(v for p in so_far for v in (*p.reads, *p.writes))
    arrived = [v for transfer, values in stages.transfers.items() if transfer.target == stage for v in values]
    transfers = tuple(
        (transfer, placement[transfer.target] == placement[stage], values)
        for transfer, values in stages.transfers.items()
        if (transfer.kind, transfer.source) == (kind, stage)
    )
    dropped = tuple(v for v in dict.fromkeys((*alive, *(arrived if kind != "F" else ()))) if v not in later_reads)
    return LoweredPass(
        compiled.passes[stage].get(kind), pass_.whole, pass_.blocks, pass_.reads, pass_.writes, transfers, dropped
    )


def _lower_update(planned: PlannedPrograms, compiled: CompiledPrograms, number: int) -> LoweredUpdate:
    updates = planned.stages.updates
    update, donated = updates.programs[number], compiled.donated[number]
    maker = {v: n for n, earlier in enumerate(updates.programs[:number]) for v in earlier.writes}

    def moved(have: NamedSharding, want: NamedSharding) -> NamedSharding | None:
        return None if have == want else want

    totals = tuple(
        (place, position, moved(planned.total(place[0], t.value), planned.update_total(number, t.value)))
        for t in update.totals
        for place, position in [_total(planned.stages, t.value)]
    )
    return LoweredUpdate(
        compiled.updates[number],
        update.stage,
        _sources(planned, update.stage, donated),
        _sources(planned, update.stage, not_donated(update.arguments, donated)),
        totals,
        tuple((v, moved(planned.update_result(maker[v], v), planned.update_read(number, v))) for v in update.reads),
        update.writes,
    )


def _total(stages: Stages, value: int) -> tuple[tuple[int, Kind], int]:
    """The stage and pass that add up a total, and its position among their totals."""
    return next(
        ((s, kind), position)
        for s, stage in enumerate(stages.stages)
        for kind, pass_ in stage.passes.items()
        for position, total in enumerate(pass_.totals)
        if total.value == value
    )
