"""From the order of passes on each rank to complete instruction lists.

Everything else follows from the order: a pass that another rank reads is sent as soon as it is done, gradients are
added and buffers freed at once, a stage sums and updates when the last microbatch of its window is in. Passes are
played through at one tick each; the receive stands in its rank's list where it falls in that play, so that all
transfers have one order in which no two ranks wait for each other.

    after F(s, i) and B(s, i)        send to every stage on another rank that reads it
    after the last pass of (s, i)    accumulate
    after B(s, i), after W(s, i)     free what F left, free what B left
    after the last accumulate        reduce and update; copies of a stage do so together, when all passes are done
        of a window
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.schedules.instructions import Instruction
from autopar.schedules.orders import Orders, Pass
from autopar.schedules.pipeline import Lists, Pipeline, Weights

#: Version of the weights, from the updates so far, the version that F of the same stage and microbatch had, the window.
VERSIONS: Mapping[Weights, Callable[[int, int | None, int], int]] = MappingProxyType(
    {
        "stashed": lambda updates, forward, window: updates if forward is None else forward,
        "double": lambda updates, forward, window: max(window - 1, 0),
        "latest": lambda updates, forward, window: updates,
    }
)


@dataclass
class _Play:
    """The lists so far."""

    pipeline: Pipeline
    lists: list[list[Instruction]]
    done: set[Pass] = field(default_factory=set)
    updates: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    left: dict[tuple[int, int], int] = field(default_factory=dict)

    def missing(self, one: Pass) -> Pass | None:
        """A pass that has to be done before; None if all are."""
        kind, stage, i = one
        needed: list[Pass] = [(kind, other, i) for other in self.pipeline.inputs(kind, stage)]
        if kind != "F":
            needed.append(("F" if kind == "B" else "B", stage, i))
        before = self.pipeline.slice_before(kind, i)
        if before is not None:
            needed.append((kind, stage, before))
        return next((other for other in needed if other not in self.done), None)

    def start(self, one: Pass) -> None:
        kind, stage, i = one
        rule = VERSIONS[self.pipeline.weights]
        version = rule(self.updates[stage], self.versions.get((stage, i)), i // self.pipeline.window)
        self.versions.setdefault((stage, i), version)
        self._emit(Instruction("run", kind, stage, i, version=version))

    def end(self, one: Pass) -> None:
        kind, stage, i = one
        self.done.add(one)
        for reader in self.pipeline.outputs(kind, stage):
            if self.pipeline.placement[reader] != self.pipeline.placement[stage]:
                self._emit(Instruction("send", kind, stage, i, to=reader))
                self._emit(Instruction("recv", kind, stage, i, to=reader))
        if kind == self.pipeline.kinds[-1]:
            self._emit(Instruction("accumulate", "", stage, i))
        if kind != "F":
            self._emit(Instruction("free", "F" if kind == "B" else "B", stage, i))
        if kind == self.pipeline.kinds[-1] and self.pipeline.copies == 1:
            self._count(stage, i)

    def _count(self, stage: int, i: int) -> None:
        window = i // self.pipeline.window
        left = self.left.get((stage, window), self.pipeline.window) - 1
        self.left[stage, window] = left
        if not left:
            self.finish(stage, (window + 1) * self.pipeline.window - 1)

    def finish(self, stage: int, last: int) -> None:
        """The update of a stage with the window that ends with microbatch `last`."""
        self._emit(Instruction("reduce", "", stage, last))
        self._emit(Instruction("update", "", stage, last))
        self.updates[stage] += 1

    def _emit(self, instruction: Instruction) -> None:
        stage = instruction.to if instruction.op == "recv" else instruction.stage
        self.lists[self.pipeline.placement[stage]].append(instruction)


def complete(pipeline: Pipeline, orders: Orders) -> Lists:
    """The instruction lists that run the passes of `orders`; ScheduleError if they wait for each other."""
    play = _Play(pipeline, [[] for _ in orders])
    parked: dict[Pass, list[int]] = defaultdict(list)
    position = [0] * len(orders)
    heap = [(0, 1, rank) for rank in range(len(orders))]  # (tick, 0: a pass ends or 1: the next may start, rank)
    while heap:
        tick, starts, rank = heapq.heappop(heap)
        if not starts:
            one = orders[rank][position[rank]]
            position[rank] += 1
            play.end(one)
            for waiter in (rank, *parked.pop(one, ())):
                heapq.heappush(heap, (tick, 1, waiter))
        elif position[rank] < len(orders[rank]):
            one = orders[rank][position[rank]]
            needed = play.missing(one)
            if needed is not None:
                parked[needed].append(rank)
            else:
                play.start(one)
                heapq.heappush(heap, (tick + 1, 0, rank))
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            kind, stage, i = order[position[rank]]
            raise ScheduleError(f"rank {rank} waits forever before {kind}{stage}.{i}: the orders block each other")
    if pipeline.copies > 1:
        for stage in range(pipeline.stages):
            for copy in range(pipeline.copies):
                play.finish(copy * pipeline.stages + stage, pipeline.microbatches - 1)
    return tuple(map(tuple, play.lists))
