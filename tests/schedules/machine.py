"""Instruction lists executed on numbers: the oracle of the checker.

Stage s of microbatch i computes a = sin(w_s z + carry / 2), z the sum of what its borders bring (the microbatch itself
if there are none) and `carry` the a of the slice before, if the two are slices of one sequence. The loss is the sum of
a over stages that nobody reads. Ranks take turns at random; both ends of a transfer act at once. Reading what is not
there is a KeyError, and so is making it twice; blocked ranks and anything left over are an AssertionError.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Hashable
from typing import Any

from autopar.schedules import Instruction, Pipeline, Schedule


class Machine:
    """All ranks with what they hold."""

    def __init__(self, schedule: Schedule) -> None:
        self.pipeline = schedule.pipeline
        self.lists = schedule.lists
        self.arrays: dict[Hashable, Any] = {}
        self.sums = [0.0] * len(self.pipeline.placement)
        self.results: dict[int, float] = {}
        self.updated: set[int] = set()

    def put(self, key: Hashable, value: Any) -> None:
        if key in self.arrays:
            raise KeyError(key)
        self.arrays[key] = value

    def take(self, key: Hashable) -> Any:
        return self.arrays.pop(key)

    def execute(self, seed: int) -> dict[int, float]:
        """Sum over microbatches per stage: gradients of the weights, or a if there are no backward passes."""
        rng = random.Random(seed)
        position = [0] * len(self.lists)
        arrived: dict[Hashable, dict[Instruction, int]] = {}
        waiting: set[int] = set()
        while True:
            free = [
                r for r, instructions in enumerate(self.lists) if r not in waiting and position[r] < len(instructions)
            ]
            if not free:
                break
            rank = rng.choice(free)
            instruction = self.lists[rank][position[rank]]
            key, parties = self.pipeline.event(instruction)
            if parties == 1:
                getattr(self, instruction.op)(rank, instruction)
                position[rank] += 1
                continue
            group = arrived.setdefault(key, {})
            group[instruction] = rank
            waiting.add(rank)
            if len(group) == parties:
                getattr(self, "together" if instruction.op == "reduce" else "transfer")(group)
                for member in arrived.pop(key).values():
                    position[member] += 1
                    waiting.discard(member)
        assert not waiting, "blocked"
        assert not self.arrays, "something is left over"
        assert self.updated == set(range(len(self.pipeline.placement))), "not updated"
        return self.results

    def gather(self, rank: int, i: Instruction) -> Any:
        """The sum of what the borders bring; None if there are none."""
        taken_values = [
            self.take((rank, i.kind, other, i.microbatch, i.stage)) for other in self.pipeline.inputs(i.kind, i.stage)
        ]
        return sum(taken_values) if taken_values else None

    def scatter(self, rank: int, i: Instruction, value: float) -> None:
        for other in self.pipeline.outputs(i.kind, i.stage):
            self.put((rank, i.kind, i.stage, i.microbatch, other), value)

    def run(self, rank: int, i: Instruction) -> None:
        assert self.pipeline.placement[i.stage] == rank
        assert i.microbatch < self.pipeline.microbatches
        assert self.pipeline.routed(i.stage, i.microbatch)
        {"F": self.forward, "B": self.backward, "W": self.weight}[i.kind](rank, i)

    def forward(self, rank: int, i: Instruction) -> None:
        here = (rank, i.stage, i.microbatch)
        z = self.gather(rank, i)
        z = data(i.microbatch) if z is None else z
        before = self.pipeline.slice_before("F", i.microbatch)
        u = parameter(self.pipeline, i.stage) * z + (
            0 if before is None else self.take(("carry", rank, i.stage, before)) / 2
        )
        if (i.microbatch + 1) % self.pipeline.slices:
            self.put(("carry", *here), math.sin(u))
        self.scatter(rank, i, math.sin(u))
        if self.pipeline.backward:
            self.put(("stash", *here), (z, math.cos(u)))
        else:
            self.put(("gradient", *here), math.sin(u))

    def backward(self, rank: int, i: Instruction) -> None:
        here = (rank, i.stage, i.microbatch)
        cotangent = self.gather(rank, i)
        cotangent = 1.0 if cotangent is None else cotangent
        if self.pipeline.slice_before("B", i.microbatch) is not None:
            cotangent += self.take(("cocarry", *here))
        z, slope = self.arrays["stash", *here]
        u = cotangent * slope
        if i.microbatch % self.pipeline.slices:
            self.put(("cocarry", rank, i.stage, i.microbatch - 1), u / 2)
        self.scatter(rank, i, u * parameter(self.pipeline, i.stage))
        if self.pipeline.split:
            self.put(("deferred", *here), (u, z))
        else:
            self.put(("gradient", *here), u * z)
        self.put(("did B", *here), None)

    def weight(self, rank: int, i: Instruction) -> None:
        u, z = self.arrays["deferred", rank, i.stage, i.microbatch]
        self.put(("gradient", rank, i.stage, i.microbatch), u * z)
        self.put(("did W", rank, i.stage, i.microbatch), None)

    def accumulate(self, rank: int, i: Instruction) -> None:
        self.sums[i.stage] += self.take(("gradient", rank, i.stage, i.microbatch))

    def free(self, rank: int, i: Instruction) -> None:
        """What a pass left goes only after its reader has run."""
        here = (rank, i.stage, i.microbatch)
        self.take((f"did {'B' if i.kind == 'F' else 'W'}", *here))
        self.take(("stash" if i.kind == "F" else "deferred", *here))

    def transfer(self, group: dict[Instruction, int]) -> None:
        (send, sender), (receive, receiver) = sorted(group.items(), key=lambda pair: pair[0].op != "send")
        assert (send.op, receive.op) == ("send", "recv")
        assert sender != receiver
        where = (send.kind, send.stage, send.microbatch, send.to)
        self.put((receiver, *where), self.take((sender, *where)))

    def reduce(self, rank: int, i: Instruction) -> None:
        self.together({i: rank})

    def together(self, group: dict[Instruction, int]) -> None:
        """The sum over all copies of a stage."""
        total = sum(self.sums[i.stage] for i in group)
        for i, rank in group.items():
            assert self.pipeline.placement[i.stage] == rank
            assert i.microbatch == self.pipeline.microbatches - 1
            assert i.stage not in self.results
            self.results[i.stage] = total

    def update(self, rank: int, i: Instruction) -> None:
        assert self.pipeline.placement[i.stage] == rank
        assert i.microbatch == self.pipeline.microbatches - 1
        assert i.stage in self.results
        assert i.stage not in self.updated
        self.updated.add(i.stage)


def parameter(pipeline: Pipeline, stage: int) -> float:
    return 0.7 + 0.1 * (stage % pipeline.stages)


def data(microbatch: int) -> float:
    return 0.3 + 0.2 * microbatch


def expected(pipeline: Pipeline) -> dict[int, float]:
    """What `Machine.execute` has to give: gradients by complex steps, or the sums of a."""
    if not pipeline.backward:
        return {s: _loss(pipeline, {}, {s}).real for s in range(pipeline.stages)}
    step = 1e-30
    return {
        s: _loss(pipeline, {s % pipeline.stages: step * 1j}).imag / step for s in range(len(pipeline.placement))
    }  # fmt: skip


def _loss(pipeline: Pipeline, nudge: dict[int, complex], counted: set[int] | None = None) -> complex:
    """The sum of a over some stages, None: those that nobody reads; `nudge` is added to the weights."""
    borders = [(a, b) for a, b in pipeline.borders if b < pipeline.stages]
    if counted is None:
        counted = set(range(pipeline.stages)) - {a for a, _ in borders}
    total = 0j
    carry = [0j] * pipeline.stages
    for i in range(pipeline.microbatches):
        activations: list[complex] = []
        for s in range(pipeline.stages):
            read = [activations[a] for a, b in borders if b == s]
            before = carry[s] / 2 if i % pipeline.slices else 0
            u = (parameter(pipeline, s) + nudge.get(s, 0)) * (sum(read) if read else data(i)) + before
            carry[s] = cmath.sin(u)
            activations.append(carry[s])
            if s in counted:
                total += activations[s]
    return total
