"""What every instruction of a step does, worked out once for all calls.

    begin     arguments and their places                                                -> Begin
    pass      its program, lists of values, what it hands over, what nobody reads later -> Passing
    send      values and their places on the submesh of the reader                      -> Sending
    update    its program, and where its operands come from                             -> Updating

The order is that of the schedule, with all updates at its end: while anything may still fail in a pass, no update has
taken over any state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding

from autopar.codegen.stage_shardings import Places
from autopar.passes.stages.divide import PASS_KINDS, Stages, Transfer
from autopar.runtime.programs import Compiled, left, needed
from autopar.schedules.instructions import Instruction, Kind
from autopar.schedules.pipeline import Schedule

#: Where an argument comes from: its value, its position, its place.
Source = tuple[int, int, NamedSharding]


@dataclass(frozen=True, slots=True, eq=False)
class Begin:
    """The first program of a stage.

    Attributes:
        function: the program.
        reads: the arguments that it takes.
        arguments: all that it and passes read, to be brought to the submesh.
        whole: values that it gives.
        blocks: arguments that it cuts into microbatches.
    """

    function: Callable[..., Any]
    reads: tuple[int, ...]
    arguments: tuple[Source, ...]
    whole: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Passing:
    """A pass of a stage.

    Attributes:
        function: the program; None for a pass with nothing to compute.
        whole, blocks, reads, writes: see `autopar.passes.stages.divide.Pass`.
        transfers: what it sends: to whom, whether on the same rank, the values.
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
class Sending:
    """What is copied from one submesh to another."""

    values: tuple[int, ...]
    places: list[NamedSharding]


@dataclass(frozen=True, slots=True, eq=False)
class Updating:
    """An update.

    Attributes:
        function: the program.
        stage: where it runs.
        taken, arguments: arguments that it takes over, and others.
        totals: stage, pass and position of every total, and its place; None where it lies there already.
        reads: values of other updates and their places; None likewise.
        writes: what it gives.
    """

    function: Callable[..., Any]
    stage: int
    taken: tuple[Source, ...]
    arguments: tuple[Source, ...]
    totals: tuple[tuple[tuple[int, Kind], int, NamedSharding | None], ...]
    reads: tuple[tuple[int, NamedSharding | None], ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """A step: per stage, per stage and pass, per hand, per update; and the instructions before the updates."""

    begins: tuple[Begin, ...]
    passes: Mapping[tuple[int, Kind], Passing]
    sends: Mapping[Transfer, Sending]
    updates: tuple[Updating, ...]
    order: tuple[Instruction, ...]


def script(places: Places, schedule: Schedule, compiled: Compiled) -> Script:
    """All that a step does.

    Args:
        places: the step in stages, and where its values lie.
        schedule: the order.
        compiled: its programs.
    """
    stages, placement = places.stages, schedule.pipeline.placement
    count = len(stages.stages)
    sends = {
        transfer: Sending(values, [places.value(transfer.target, v) for v in values])
        for transfer, values in stages.transfers.items()
        if placement[transfer.source] != placement[transfer.target]
    }
    return Script(
        tuple(_begin(places, compiled, s) for s in range(count)),
        {(s, kind): _passing(stages, placement, compiled, s, kind) for s in range(count) for kind in PASS_KINDS},
        sends,
        tuple(_updating(places, compiled, number) for number in range(len(compiled.updates))),
        tuple(_order(schedule, sends)),
    )


def _order(schedule: Schedule, sends: Mapping[Transfer, Sending]) -> Iterator[Instruction]:
    """Instructions that are something to do here; receives come with sends, sums with passes."""
    for rank, position in schedule.order:
        i = schedule.lists[rank][position]
        if i.op in ("run", "free") or (i.op == "send" and Transfer(i.kind, i.stage, i.to) in sends):
            yield i


def _sources(places: Places, stage: int, values: Sequence[int]) -> tuple[Source, ...]:
    positions = {v: i for i, v in enumerate(places.stages.split.graph.inputs)}
    return tuple((v, positions[v], places.argument(stage, v)) for v in values)


def _begin(places: Places, compiled: Compiled, stage: int) -> Begin:
    reads, whole, blocks = needed(places.stages, stage)
    every = tuple(dict.fromkeys((*reads, *places.stages.stages[stage].arguments)))
    return Begin(compiled.begin[stage], reads, _sources(places, stage, every), whole, blocks)


def _passing(stages: Stages, placement: Sequence[int], compiled: Compiled, stage: int, kind: Kind) -> Passing:
    found = stages.stages[stage]
    one, kept = found.passes[kind], found.live_after(kind)
    before = [found.passes[k] for k in PASS_KINDS[: PASS_KINDS.index(kind) + 1]]
    known = dict.fromkeys(v for p in before for v in (*p.reads, *p.writes))
    arrived = [v for transfer, values in stages.transfers.items() if transfer.target == stage for v in values]
    transfers = tuple(
        (transfer, placement[transfer.target] == placement[stage], values)
        for transfer, values in stages.transfers.items()
        if (transfer.kind, transfer.source) == (kind, stage)
    )
    dropped = tuple(v for v in dict.fromkeys((*known, *(arrived if kind != "F" else ()))) if v not in kept)
    return Passing(compiled.passes[stage].get(kind), one.whole, one.blocks, one.reads, one.writes, transfers, dropped)


def _updating(places: Places, compiled: Compiled, number: int) -> Updating:
    updates = places.stages.updates
    update, taken = updates.programs[number], compiled.taken[number]
    maker = {v: n for n, earlier in enumerate(updates.programs[:number]) for v in earlier.writes}

    def moved(have: NamedSharding, want: NamedSharding) -> NamedSharding | None:
        return None if have == want else want

    totals = tuple(
        (place, position, moved(places.total(place[0], t.value), places.ended(number, t.value)))
        for t in update.totals
        for place, position in [_total(places.stages, t.value)]
    )
    return Updating(
        compiled.updates[number],
        update.stage,
        _sources(places, update.stage, taken),
        _sources(places, update.stage, left(update.arguments, taken)),
        totals,
        tuple((v, moved(places.result(maker[v], v), places.read(number, v))) for v in update.reads),
        update.writes,
    )


def _total(stages: Stages, value: int) -> tuple[tuple[int, Kind], int]:
    """The stage and pass that add up a total, and its position among their totals."""
    return next(
        ((s, kind), position)
        for s, stage in enumerate(stages.stages)
        for kind, one in stage.passes.items()
        for position, total in enumerate(one.totals)
        if total.value == value
    )
