"""The work of a pipeline, and the instruction lists that do it.

A `Pipeline` is the work: stages on ranks, microbatches, and borders between stages. It defines the dependencies:

    F(s, i)  needs  F(a, i)              for every border (a, s)           -> Pipeline.inputs
                    F(s, i - 1)          if the two are slices of one sequence (causal attention, TeraPipe)
    B(s, i)  needs  F(s, i)
                    B(b, i)              for every border (s, b)
                    B(s, i + 1)          if the two are slices of one sequence
    W(s, i)  needs  B(s, i)

A `Schedule` is one way to do it: a list per rank, issued in order. A transfer is one event on two ranks, since several
processes run it as one program on both submeshes, and so is a sum over copies of a stage. `issue_order` merges all
lists into one order in which every rank, and every process, can dispatch them.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.errors import ScheduleError
from autopar.schedules.instructions import Instruction, Kind, parse

Weights = Literal["stashed", "double", "latest"]
Slot = tuple[int, int]
"""(rank, position in its list)."""


@dataclass(frozen=True)
class Pipeline:
    """The work of one step, or of several in a row.

    Attributes:
        placement: rank of every stage. With copies, stage s of copy c has the number c * stages + s.
        microbatches: number of microbatches, of all batches; slices of sequences count one by one.
        borders: (a, b), a < b: stage b reads outputs of stage a.
        window: number of microbatches whose sums one update uses.
        backward: whether there are backward passes.
        split: whether gradients of weights have passes of their own.
        weights: the version of the weights that a pass uses. "stashed": F the newest, B that of its F; "double": the
            version before that of its window; "latest": always the newest.
        copies: number of copies of every stage; microbatch i runs through copy `copy_of[i]`.
        slices: microbatches i with equal i // slices are slices of one sequence, in order.
    """

    placement: tuple[int, ...]
    microbatches: int
    borders: tuple[tuple[int, int], ...]
    window: int
    backward: bool = True
    split: bool = False
    weights: Weights = "stashed"
    copies: int = 1
    copy_of: tuple[int, ...] = ()
    slices: int = 1

    @property
    def stages(self) -> int:
        """Number of stages of one copy."""
        return len(self.placement) // self.copies

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return max(self.placement) + 1

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The passes of every stage and microbatch, in order."""
        return ("F", "B", "W") if self.split else ("F", "B") if self.backward else ("F",)

    def routed(self, stage: int, microbatch: int) -> bool:
        """Whether the microbatch runs through the stage."""
        return self.copies == 1 or self.copy_of[microbatch] == stage // self.stages

    def window_of(self, stage: int, last: int) -> tuple[int, ...]:
        """The microbatches of the window that ends with `last` that run through the stage."""
        return tuple(i for i in range(last - self.window + 1, last + 1) if self.routed(stage, i))

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages whose F it reads."""
        return tuple(tuple(a for a, b in self.borders if b == stage) for stage in range(len(self.placement)))

    @cached_property
    def sinks(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that read its F."""
        return tuple(tuple(b for a, b in self.borders if a == stage) for stage in range(len(self.placement)))

    def inputs(self, kind: Kind, stage: int) -> tuple[int, ...]:
        """The stages whose pass of the same kind and microbatch a pass reads."""
        return self.sources[stage] if kind == "F" else self.sinks[stage] if kind == "B" else ()

    def outputs(self, kind: Kind, stage: int) -> tuple[int, ...]:
        """The stages that read the output of a pass."""
        if kind == "F":
            return self.sinks[stage]
        return self.sources[stage] if kind == "B" else ()

    def slice_before(self, kind: Kind, microbatch: int) -> int | None:
        """The slice of the same sequence whose pass has to come just before; None if there is none."""
        slice_index = microbatch % self.slices
        if kind == "F":
            return microbatch - 1 if slice_index else None
        return microbatch + 1 if kind == "B" and slice_index + 1 < self.slices else None

    def event(self, instruction: Instruction) -> tuple[Hashable, int]:
        """The event that an instruction is part of.

        Returns:
            key: the same for all instructions of a joint event; None for an instruction that involves one rank only.
            parties: number of instructions with this key.
        """
        i = instruction
        if i.op in ("send", "recv"):
            return (i.kind, i.stage, i.microbatch, i.to), 2
        if i.op == "reduce" and self.copies > 1:
            return ("reduce", i.stage % self.stages, i.microbatch), self.copies
        return None, 1


Lists = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """Instruction lists, one per rank, for a pipeline; see `autopar.schedules`. `str` prints one line per rank.

    Attributes:
        name: of the schedule, in errors.
        pipeline: the work.
        lists: instructions per rank, in order.
    """

    name: str
    pipeline: Pipeline
    lists: Lists

    def __str__(self) -> str:
        return (
            "\n".join(f"rank {r}: {' '.join(map(str, instructions))}" for r, instructions in enumerate(self.lists))
            + "\n"
        )

    @cached_property
    def order(self) -> tuple[Slot, ...]:
        """All instructions in an order in which they can be dispatched; ScheduleError if the lists deadlock."""
        order = issue_order(self.pipeline, self.lists)
        if len(order) < sum(map(len, self.lists)):
            raise ScheduleError(f"schedule {self.name} blocks itself; `autopar.schedules.check` says where")
        return order


def peak_stash(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most (stage, microbatch) pairs that its stash has at a time: from F to the last free."""
    last: Kind = "B" if schedule.pipeline.split else "F"
    peaks: list[int] = []
    for instructions in schedule.lists:
        now = peak = 0
        for i in instructions:
            if i.op == "run" and i.kind == "F" and schedule.pipeline.backward:
                now += 1
                peak = max(peak, now)
            elif i.op == "free" and i.kind == last:
                now -= 1
        peaks.append(peak)
    return tuple(peaks)


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, the most versions of its weights at a time: the newest, and older ones that are still used."""
    created: list[dict[int, int]] = [{0: -1} for _ in schedule.pipeline.placement]
    last_use: list[dict[int, int]] = [{} for _ in schedule.pipeline.placement]
    for instructions in schedule.lists:
        for position, i in enumerate(instructions):
            if i.op == "run":
                last_use[i.stage][i.version] = position
            elif i.op == "update":
                created[i.stage][len(created[i.stage])] = position
    return tuple(
        max(1 + sum(uses.get(old, -1) > at for old in range(version)) for version, at in births.items())
        for births, uses in zip(created, last_use, strict=True)
    )


def parse_schedule(text: str, pipeline: Pipeline, name: str = "text") -> Schedule:
    """The schedule that prints as `text`; ScheduleError on a word that is not an instruction."""
    lines = [line.partition(":")[2] for line in text.strip().splitlines()]
    return Schedule(name, pipeline, tuple(tuple(map(parse, line.split())) for line in lines))


def issue_order(pipeline: Pipeline, lists: Sequence[Sequence[Instruction]]) -> tuple[Slot, ...]:
    """All instructions in the order in which they would be issued if passes took one tick each and all else no time.

    Ties go to the lower rank; of a transfer, the send comes first. If every rank waits for another, the order ends, and
    is shorter than the lists.
    """
    order: list[Slot] = []
    position = [0] * len(lists)
    waiting: dict[Hashable, list[int]] = {}
    heap = [(0, rank) for rank in range(len(lists))]
    while heap:
        clock, rank = heapq.heappop(heap)
        if position[rank] == len(lists[rank]):
            continue
        instruction = lists[rank][position[rank]]
        key, parties = pipeline.event(instruction)
        group = [rank]
        if parties > 1:
            group = waiting.setdefault(key, [])
            group.append(rank)
            if len(group) < parties:
                continue
            group = sorted(waiting.pop(key), key=lambda r: (lists[r][position[r]].op == "recv", r))
        for member in group:
            order.append((member, position[member]))
            position[member] += 1
            heapq.heappush(heap, (clock + (instruction.op == "run"), member))
    return tuple(order)
