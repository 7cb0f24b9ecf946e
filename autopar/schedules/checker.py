"""The checker: proves that instruction lists compute their pipeline, cannot deadlock, and keep their stash bounds.

Each invariant is a generator of complaints about a schedule:

    complete    every rank has exactly the instructions that the pipeline asks of it, each once    -> _complete
    ready       all dependencies of an instruction on its own rank come before it                  -> _ready
    versions    every pass uses the version of the weights that the pipeline's rule asks for, and
                that version exists by then                                                        -> _versions
    acyclic     the lists in issue order, with both ends of a transfer as one event, have no cycle:
                whatever the times are, some rank can always go on                                 -> _acyclic
    bounded     the stash of every rank is within its bound                                        -> _bounded

Complete and ready imply that data come before their use on each rank, acyclic implies that all transfers between ranks
happen. Together they imply that every pass of every microbatch runs once, on the right data. The expected instructions
follow from the pipeline alone, not from the way in which a schedule was made.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.schedules.complete import VERSIONS
from autopar.schedules.instructions import Instruction, Op
from autopar.schedules.pipeline import Pipeline, Schedule, peak_stash


def _expected(pipeline: Pipeline) -> list[list[Instruction]]:
    """The instructions of each rank, in no particular order, versions left out."""
    instructions: list[list[Instruction]] = [[] for _ in range(pipeline.ranks)]
    for stage, rank in enumerate(pipeline.placement):
        for i in range(pipeline.microbatches):
            if pipeline.routed(stage, i):
                instructions[rank] += _of_microbatch(pipeline, stage, i)
        for last in range(pipeline.window - 1, pipeline.microbatches, pipeline.window):
            instructions[rank] += (Instruction("reduce", "", stage, last), Instruction("update", "", stage, last))
    return instructions


def _without_version(i: Instruction) -> Instruction:
    """The instruction without the version of its weights."""
    return replace(i, version=0) if i.version else i


def _of_microbatch(pipeline: Pipeline, stage: int, i: int) -> Iterator[Instruction]:
    def elsewhere(other: int) -> bool:
        return pipeline.placement[other] != pipeline.placement[stage]

    for kind in pipeline.kinds:
        yield Instruction("run", kind, stage, i)
        for other in filter(elsewhere, pipeline.inputs(kind, stage)):
            yield Instruction("recv", kind, other, i, to=stage)
        for other in filter(elsewhere, pipeline.outputs(kind, stage)):
            yield Instruction("send", kind, stage, i, to=other)
    for kind in pipeline.kinds[:-1]:
        yield Instruction("free", kind, stage, i)
    yield Instruction("accumulate", "", stage, i)


def _complete(schedule: Schedule, bounds: Sequence[int] | None) -> Iterator[str]:
    expected = _expected(schedule.pipeline)
    if len(schedule.lists) != len(expected):
        yield f"there are {len(schedule.lists)} lists for {len(expected)} ranks"
        return
    for rank, (have, want) in enumerate(zip(schedule.lists, expected, strict=True)):
        counts = Counter(map(_without_version, have))
        wanted = Counter(want)
        yield from (f"rank {rank} lacks {i}" for i in wanted if i not in counts)
        yield from (f"rank {rank} has {i}, which is no work of its" for i in counts if i not in wanted)
        yield from (f"rank {rank} has {i} {n} times" for i, n in counts.items() if n > 1)


def _run_dependencies(pipeline: Pipeline, i: Instruction) -> Iterator[Instruction]:
    """What a pass needs: its inputs, the pass before it of the same stage and microbatch, the slice before it."""
    for other in pipeline.inputs(i.kind, i.stage):
        same_rank = pipeline.placement[other] == pipeline.placement[i.stage]
        yield Instruction("run" if same_rank else "recv", i.kind, other, i.microbatch, to=-1 if same_rank else i.stage)
    if i.kind != "F":
        yield Instruction("run", pipeline.kinds[pipeline.kinds.index(i.kind) - 1], i.stage, i.microbatch)
    before = pipeline.slice_before(i.kind, i.microbatch)
    if before is not None:
        yield Instruction("run", i.kind, i.stage, before)


def _free_dependencies(pipeline: Pipeline, i: Instruction) -> Iterator[Instruction]:
    yield Instruction("run", pipeline.kinds[pipeline.kinds.index(i.kind) + 1], i.stage, i.microbatch)


def _accumulate_dependencies(pipeline: Pipeline, i: Instruction) -> Iterator[Instruction]:
    yield Instruction("run", pipeline.kinds[-1], i.stage, i.microbatch)
    # the sums of the window before must have been applied before those of this one begin
    if i.microbatch >= pipeline.window:
        yield Instruction("update", "", i.stage, i.microbatch // pipeline.window * pipeline.window - 1)


DEPENDENCIES: Mapping[Op, Callable[[Pipeline, Instruction], Iterable[Instruction]]] = MappingProxyType(
    {
        "run": _run_dependencies,
        "send": lambda pipeline, i: (Instruction("run", i.kind, i.stage, i.microbatch),),
        "recv": lambda pipeline, i: (),
        "free": _free_dependencies,
        "accumulate": _accumulate_dependencies,
        "reduce": lambda pipeline, i: (
            Instruction("accumulate", "", i.stage, member) for member in pipeline.window_of(i.stage, i.microbatch)
        ),
        "update": lambda pipeline, i: (Instruction("reduce", "", i.stage, i.microbatch),),
    }
)
"""Op -> the instructions that have to come before one with this op on its own rank."""


def _ready(schedule: Schedule, bounds: Sequence[int] | None) -> Iterator[str]:
    for rank, instructions in enumerate(schedule.lists):
        done: set[Instruction] = set()
        for i in instructions:
            unversioned = _without_version(i)
            for dependency in DEPENDENCIES[i.op](schedule.pipeline, unversioned):
                if dependency not in done:
                    yield f"rank {rank} has {i} before {dependency}"
            done.add(unversioned)


def _versions(schedule: Schedule, bounds: Sequence[int] | None) -> Iterator[str]:
    rule, window = VERSIONS[schedule.pipeline.weights], schedule.pipeline.window
    for rank, instructions in enumerate(schedule.lists):
        updates: Counter[int] = Counter()
        first: dict[tuple[int, int], int] = {}
        for i in instructions:
            if i.op == "update":
                updates[i.stage] += 1
            elif i.op == "run":
                wanted = rule(updates[i.stage], first.get((i.stage, i.microbatch)), i.microbatch // window)
                first.setdefault((i.stage, i.microbatch), i.version)
                if i.version != wanted:
                    yield f"rank {rank} runs {i} with version {i.version} of the weights in place of {wanted}"
                if i.version > updates[i.stage]:
                    yield f"rank {rank} runs {i} when there are only {updates[i.stage]} updates of its weights"


def _runs_to_end(schedule: Schedule) -> bool:
    """Whether all lists end if each rank goes on as soon as all ranks of its next event have reached that event."""
    # An event of one party is passed at once. One of several waits until all of its ranks are at it, which then move on
    # together; if the lists contain a cycle, `moving` runs empty before they end.
    events = [[schedule.pipeline.event(i) for i in instructions] for instructions in schedule.lists]
    parties_of = Counter(key for instructions in events for key, parties in instructions if parties > 1)
    at = [0] * len(events)
    arrived: dict[object, list[int]] = {}
    moving = list(range(len(events)))
    while moving:
        rank = moving.pop()
        instructions = events[rank]
        while at[rank] < len(instructions) and instructions[at[rank]][1] == 1:
            at[rank] += 1
        if at[rank] < len(instructions):
            key = instructions[at[rank]][0]
            arrived.setdefault(key, []).append(rank)
            if len(arrived[key]) == parties_of[key]:
                moving.extend(arrived[key])
                for other in arrived[key]:
                    at[other] += 1
    return all(position == len(instructions) for position, instructions in zip(at, events, strict=True))


def _acyclic(schedule: Schedule, bounds: Sequence[int] | None) -> Iterator[str]:
    # The simulation is linear and needs no graph; the graph is only built to name a cycle.
    if _runs_to_end(schedule):
        return
    names: dict[object, str] = {}
    graph = TopologicalSorter[object]()
    for rank, instructions in enumerate(schedule.lists):
        keys = enumerate(map(schedule.pipeline.event, instructions))
        events = [key if parties > 1 else (rank, position) for position, (key, parties) in keys]
        for event, i in zip(events, instructions, strict=True):
            names.setdefault(event, f"{i} on rank {rank}")
        for before, event in itertools.pairwise(events):
            graph.add(event, before)
    try:
        graph.prepare()
    except CycleError as error:
        cycle = [names[event] for event in error.args[1][:-1]]
        yield "each of these waits for the one before, in a circle: " + ", ".join(cycle)


def _bounded(schedule: Schedule, bounds: Sequence[int] | None) -> Iterator[str]:
    for rank, (peak, bound) in enumerate(zip(peak_stash(schedule), bounds or (), strict=bounds is not None)):
        if peak > bound:
            yield f"rank {rank} holds {peak} microbatches of its stages, and may hold {bound}"


CHECKS: tuple[tuple[str, Callable[[Schedule, Sequence[int] | None], Iterator[str]]], ...] = (
    ("every instruction occurs once, on its rank", _complete),
    ("what an instruction needs comes before it", _ready),
    ("every pass uses the right weights", _versions),
    ("no rank waits for ever", _acyclic),
    ("no rank holds more than its bound", _bounded),
)


def check(schedule: Schedule, bounds: Sequence[int] | None = None) -> Schedule:
    """The schedule itself, if it satisfies every invariant of `CHECKS`.

    Args:
        schedule: instruction lists and their pipeline.
        bounds: for each rank, the most (stage, microbatch) pairs in its stash, which lasts from F to the last pass;
            None: no bound.

    Raises:
        ScheduleError: names the schedule, the invariant, the rank and the instruction of the first violation.
    """
    for title, complaints in CHECKS:
        for complaint in complaints(schedule, bounds):
            raise ScheduleError(f"schedule {schedule.name} breaks '{title}': {complaint}")
    return schedule
