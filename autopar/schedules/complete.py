"""From the order of passes on each rank to complete instruction lists.

All other instructions follow from that order: a value that another rank reads is sent as soon as it is made, gradients
are added and buffers freed at once, and a stage sums and updates after the last microbatch of its window. The passes
are simulated with one tick each, and a receive is inserted into its rank's list at the simulated time of the send. All
transfers then have one order in which no two ranks wait for each other.

    after F(s, i) and B(s, i)        send to every stage on another rank that reads it
    after the last pass of (s, i)    accumulate
    after B(s, i), after W(s, i)     free the stash of F, free what B kept for W
    after the last accumulate        reduce and update; copies of a stage do so together, when all passes of the
                                     window are done
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.schedules.instructions import Instruction
from autopar.schedules.orders import Orders, PassId
from autopar.schedules.pipeline import Lists, Pipeline, Schedule, Weights

#: Rule -> function from the number of updates so far, the version that F of the same stage and microbatch used (None
#: for F itself), and the window, to the version of the weights that a pass uses.
VERSIONS: Mapping[Weights, Callable[[int, int | None, int], int]] = MappingProxyType(
    {
        "stashed": lambda updates, forward, window: updates if forward is None else forward,
        "double": lambda updates, forward, window: max(window - 1, 0),
        "latest": lambda updates, forward, window: updates,
    }
)


@dataclass
class _Simulation:
    """The instruction lists so far, while passes are simulated.

    Attributes:
        pipeline: the work.
        lists: instructions per rank.
        done: passes that have ended.
        updates: stage -> number of updates.
        versions: (stage, microbatch) -> version of the weights that its first pass used.
        remaining: (stage, window) -> microbatches whose last pass has not ended.
    """

    pipeline: Pipeline
    lists: list[list[Instruction]]
    done: set[PassId] = field(default_factory=set)
    updates: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    remaining: dict[tuple[int, int], int] = field(default_factory=dict)

    def unfinished_dependency(self, pass_id: PassId) -> PassId | None:
        """A pass that has to end before this one can start; None if all have ended."""
        kind, stage, i = pass_id
        dependencies: list[PassId] = [(kind, other, i) for other in self.pipeline.inputs(kind, stage)]
        if kind != "F":
            dependencies.append(("F" if kind == "B" else "B", stage, i))
        before = self.pipeline.slice_before(kind, i)
        if before is not None:
            dependencies.append((kind, stage, before))
        return next((other for other in dependencies if other not in self.done), None)

    def start(self, pass_id: PassId) -> None:
        """Start a pass: emits its run."""
        kind, stage, i = pass_id
        rule = VERSIONS[self.pipeline.weights]
        version = rule(self.updates[stage], self.versions.get((stage, i)), i // self.pipeline.window)
        self.versions.setdefault((stage, i), version)
        self._emit(Instruction("run", kind, stage, i, version=version))

    def end(self, pass_id: PassId) -> None:
        """End a pass: emits what follows from it."""
        kind, stage, i = pass_id
        self.done.add(pass_id)
        for reader in self.pipeline.outputs(kind, stage):
            if self.pipeline.placement[reader] != self.pipeline.placement[stage]:
                self._emit(Instruction("send", kind, stage, i, to=reader))
                self._emit(Instruction("recv", kind, stage, i, to=reader))
        if kind == self.pipeline.kinds[-1]:
            self._emit(Instruction("accumulate", "", stage, i))
        if kind != "F":
            self._emit(Instruction("free", "F" if kind == "B" else "B", stage, i))
        if kind == self.pipeline.kinds[-1] and self.pipeline.copies == 1:
            self._count_down(stage, i)

    def _count_down(self, stage: int, i: int) -> None:
        window = i // self.pipeline.window
        remaining = self.remaining.get((stage, window), self.pipeline.window) - 1
        self.remaining[stage, window] = remaining
        if not remaining:
            self.emit_update(stage, (window + 1) * self.pipeline.window - 1)

    def emit_update(self, stage: int, last: int) -> None:
        """Emits reduce and update of a stage, for the window that ends with microbatch `last`."""
        self._emit(Instruction("reduce", "", stage, last))
        self._emit(Instruction("update", "", stage, last))
        self.updates[stage] += 1

    def _emit(self, instruction: Instruction) -> None:
        stage = instruction.to if instruction.op == "recv" else instruction.stage
        self.lists[self.pipeline.placement[stage]].append(instruction)


def complete(pipeline: Pipeline, orders: Orders) -> Lists:
    """The instruction lists that run the passes of `orders`.

    Args:
        pipeline: the work.
        orders: the passes of every rank in order.

    Raises:
        ScheduleError: the orders wait for each other.
    """
    simulation = _Simulation(pipeline, [[] for _ in orders])
    parked: dict[PassId, list[int]] = defaultdict(list)
    position = [0] * len(orders)
    heap = [(0, 1, rank) for rank in range(len(orders))]  # (tick, 0: a pass ends or 1: the next may start, rank)
    while heap:
        tick, starts, rank = heapq.heappop(heap)
        if not starts:
            pass_id = orders[rank][position[rank]]
            position[rank] += 1
            simulation.end(pass_id)
            for waiter in (rank, *parked.pop(pass_id, ())):
                heapq.heappush(heap, (tick, 1, waiter))
        elif position[rank] < len(orders[rank]):
            pass_id = orders[rank][position[rank]]
            dependency = simulation.unfinished_dependency(pass_id)
            if dependency is not None:
                parked[dependency].append(rank)
            else:
                simulation.start(pass_id)
                heapq.heappush(heap, (tick + 1, 0, rank))
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            kind, stage, i = order[position[rank]]
            raise ScheduleError(f"rank {rank} waits forever before {kind}{stage}.{i}: the orders block each other")
    if pipeline.copies > 1:
        for stage in range(pipeline.stages):
            for copy in range(pipeline.copies):
                simulation.emit_update(copy * pipeline.stages + stage, pipeline.microbatches - 1)
    return tuple(map(tuple, simulation.lists))


def forward_only(pipeline: Pipeline, borders: Sequence[tuple[int, int]]) -> Schedule:
    """A schedule of forward passes alone on the ranks of another pipeline: microbatch i of stage s at tick s + i."""
    forward = Pipeline(pipeline.placement, pipeline.microbatches, tuple(borders), pipeline.microbatches, backward=False)
    stages = range(len(pipeline.placement))
    ticks = sorted((s + i, s, i) for s in stages for i in range(pipeline.microbatches))
    orders: list[tuple[PassId, ...]] = [
        tuple(("F", s, i) for _, s, i in ticks if pipeline.placement[s] == rank) for rank in range(pipeline.ranks)
    ]
    return Schedule("forward", forward, complete(forward, tuple(orders)))
