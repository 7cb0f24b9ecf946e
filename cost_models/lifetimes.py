"""When each buffer is in memory: an order of execution, and the first and last moment of every written value.

The order depends on the program alone, not on layouts. Moments are numbered through all frames, so that what lives
around a loop lives during its moments too:

    breadth first                 everything as soon as its operands are there (Kahn's algorithm, 1962)   -> _eagerly
    program order                 but updates as soon as their gradients are there, unless they are
                                  programs of their own (`Graph.repeats`)                                 -> _in_turn
    birth(v), death(v)            the moment that makes v, the last moment that reads it                  -> _Clock
    a step fused into kernels     runs from the first to the last of them                                 -> _spans
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost_models.fusion import Written
from autopar.cost_models.steps import LOOP, PRODUCTS, STORE, Frame, Program, Step


@dataclass(eq=False)
class Lifetimes:
    """Moments of a program.

    Attributes:
        moments: the step that runs at each; loops stand before and after the moments of their bodies.
        birth, death: written value or token -> first and last moment. A token is born when what it copies is there
            (breadth first), where it is first read (program order), or in between -> _Clock._fetched.
        late: moments of products that nothing but updates waits for, ascending, if the compiler puts them off.
        end: the moment after the last, at which results are still there.
    """

    moments: list[Step] = field(default_factory=list)
    birth: dict[int, int] = field(default_factory=dict)
    death: dict[int, int] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return len(self.moments)


def lifetimes(p: Program, w: Written) -> Lifetimes:
    """When everything that is written lives."""
    clock = _Clock(p, w)
    for v in (*p.graph.inputs, *(c for c, _ in p.graph.constants)):
        clock.found.birth[v] = 0
    clock.run(p.top)
    clock.leave(p.top, clock.found.end)
    for v, birth in clock.found.birth.items():
        clock.found.death.setdefault(v, birth)
    return clock.found


@dataclass(eq=False)
class _Clock:
    p: Program
    w: Written
    found: Lifetimes = field(default_factory=Lifetimes)
    product: int | None = None  # the moment of the last product in the frame that runs

    def run(self, frame: Frame) -> None:
        """Run the steps of a frame, from the moment that comes next."""
        steps = [s for s in frame.steps if not s.outputs or any(v in self.w.values for v in s.outputs)]
        reads = [self.w.reads(step) for step in steps]
        waits = self._waits(steps, reads)
        late = _for_weights(steps, waits) if self.p.backend.overlaps else frozenset[int]()
        first, self.product = self.found.end, None
        for i in self._order(steps, waits, late):
            self.found.late.extend([self.found.end] if i in late else [])
            self._step(steps[i], reads[i], first)
            self.product = self.found.end - 1 if self.w.has_product(steps[i]) else self.product
        self.product = None

    def _order(self, steps: Sequence[Step], waits: Sequence[Sequence[int]], late: frozenset[int]) -> list[int]:
        if self.p.backend.runs_eagerly:
            return _eagerly(waits)
        after = self._next_products(steps, late) if late else ()
        return _in_turn(steps, waits, self.p.graph.repeats is None, late, after)

    def _next_products(self, steps: Sequence[Step], late: frozenset[int]) -> list[int]:
        """For each step the next product of the backward pass that is not late; itself if there is none."""
        found, following = list(range(len(steps))), -1
        for i in reversed(range(len(steps))):
            found[i] = following if following > i else i
            if self.w.has_product(steps[i]) and steps[i].op.phase == "backward" and i not in late:
                following = i
        return found

    def _waits(self, steps: Sequence[Step], reads: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each step the steps that it waits for, ascending."""
        maker = {v: i for i, step in enumerate(steps) for v in step.outputs}
        waits: list[list[int]] = []
        tokens = self.p.tokens
        for step, read in zip(steps, reads, strict=True):
            needed = (*read, *(s for v in step.after for s in self.w.sources.get(v, ()))) if step.after else read
            behind = [s for v in needed for s in ((v,) if v not in tokens else self._copied(v))]
            waits.append(sorted({maker[s] for s in behind if s in maker}))
        return waits

    def _copied(self, token: int) -> tuple[int, ...]:
        return self.w.sources.get(self.p.behind(token), ())

    def _step(self, step: Step, reads: Sequence[int], first: int) -> None:
        begin = self.found.end
        self.found.moments.append(step)
        for v in step.outputs:
            # Where everything starts early, so do the stacked results of loops: they are filled with zeros.
            early = step.kind == LOOP and self.p.backend.runs_eagerly and v not in reads
            self.found.birth[v] = first if early else begin
        for inner in step.frames:
            self.run(inner)
            self.leave(inner, self.found.end)
        if step.frames:
            self.found.moments.append(step)
        taken = {self.p.behind(v) for v, _ in step.taken}
        for v in reads if step.kind != STORE or not self.p.backend.stores_early else ():
            self._read(v, begin, begin if v in taken else self.found.end - 1)

    def leave(self, frame: Frame, moment: int) -> None:
        """What leaves a frame is there until this moment."""
        for v in frame.leaving:
            for s in self.w.sources.get(v, ()):
                self._read(s, moment, moment)

    def _read(self, v: int, begin: int, end: int) -> None:
        self.found.death[v] = max(self.found.death.get(v, 0), end)
        if v in self.p.tokens:
            if self.p.behind(v) in self.p.views and self.p.behind(v) in self.w.values:
                self._read(self.p.behind(v), begin, end)
            ready = max((self.found.birth.get(s, begin) for s in self._copied(v)), default=0)
            born = self._fetched(v, ready, begin)
            self.found.birth[v] = min(self.found.birth.get(v, born), born)

    def _fetched(self, token: int, ready: int, begin: int) -> int:
        """The moment at which a copy starts to be made of what is ready, to be read when a step begins."""
        b = self.p.backend
        if b.runs_eagerly or (b.overlaps and self.p.behind(token) not in self.p.graph.names):
            return ready
        return begin if self.product is None or not b.overlaps else max(ready, self.product)


def _eagerly(waits: Sequence[Sequence[int]]) -> list[int]:
    left = [len(w) for w in waits]
    followers: list[list[int]] = [[] for _ in waits]
    for i, needed in enumerate(waits):
        for j in needed:
            followers[j].append(i)
    ready = deque(i for i, count in enumerate(left) if count == 0)
    order: list[int] = []
    while ready:
        order.append(ready.popleft())
        for i in followers[order[-1]]:
            left[i] -= 1
            if left[i] == 0:
                ready.append(i)
    return order


def _in_turn(
    steps: Sequence[Step], waits: Sequence[Sequence[int]], early: bool, late: frozenset[int], after: Sequence[int]
) -> list[int]:
    """Program order, updates early; the `late` steps right after the next product that is none of them, `after`."""
    turn: list[int] = []
    for i, (step, needed) in enumerate(zip(steps, waits, strict=True)):
        last = max((turn[j] for j in needed), default=0)
        own = after[i] if i in late else max(i, last)
        turn.append(last if early and step.op.phase == "update" and step.kind != STORE else own)
    return sorted(range(len(steps)), key=lambda i: (turn[i], i in late or steps[i].op.phase == "update", i))


def _for_weights(steps: Sequence[Step], waits: Sequence[Sequence[int]]) -> frozenset[int]:
    """Products of the backward pass that nothing but updates waits for."""
    followers: list[list[int]] = [[] for _ in steps]
    for i, needed in enumerate(waits):
        for j in needed:
            followers[j].append(i)
    return frozenset(
        i
        for i, step in enumerate(steps)
        if step.name in PRODUCTS and step.op.phase == "backward"
        if followers[i] and all(steps[j].op.phase == "update" for j in followers[i])
    )
