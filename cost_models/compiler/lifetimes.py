"""When each buffer is in memory: an order of execution, and the first and last moment of every written value.

The order depends on the program alone, not on layouts. Moments are numbered through all frames, so that what lives
around a loop lives during its moments too:

    breadth first                 everything as soon as its operands are there (Kahn's algorithm, 1962)   -> _eagerly
    depth first                   everything when what it is made for is next                             -> _in_depth
    program order                 but updates as soon as their gradients are there, unless they are
                                  programs of their own (`Graph.repeats`)                                 -> _in_turn
    birth(v), death(v)            the moment that makes v, the last moment that reads it                  -> _Clock
    a step fused into kernels     runs from the first to the last of them                                 -> _spans
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from autopar.cost_models.compiler.compiled_program import OVERWRITES, Frame, Program, Step
from autopar.cost_models.compiler.fusion import LIGHT, LOOP, PRODUCT, STORE
from autopar.cost_models.compiler.written_values import Written
from autopar.ir import control_flow
from autopar.ir.keyed import grouped
from autopar.ir.op_sets import LAPACK


@dataclass(eq=False)
class Lifetimes:
    """Moments of a program.

    Attributes:
        moments: the step that runs at each; loops are before and after the moments of their bodies.
        birth, death: written value or token -> first and last moment. A token is born when what it copies is there
            (breadth first), where it is first read (program order), or in between -> _Clock._fetched.
        within: value made in a loop's body, in the memory of one of its results -> itself, or the token that leaves.
        late: moments of products that nothing but updates waits for, ascending, if the compiler puts them off.
        end: the moment after the last, at which results are still there.
    """

    moments: list[Step] = field(default_factory=list)
    birth: dict[int, int] = field(default_factory=dict)
    death: dict[int, int] = field(default_factory=dict)
    within: dict[int, int] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return len(self.moments)


def lifetimes(p: Program, w: Written) -> Lifetimes:
    """When everything that is written lives."""
    clock = _Clock(p, w)
    for v in (*p.graph.inputs, *(c for c, _ in p.graph.constants)):
        clock.lives.birth[v] = 0
    clock.run(p.top)
    clock.leave(p.top, clock.lives.end)
    for v, birth in clock.lives.birth.items():
        clock.lives.death.setdefault(v, birth)
    clock.pass_on()
    return clock.lives


@dataclass(eq=False)
class _Clock:
    p: Program
    w: Written
    lives: Lifetimes = field(default_factory=Lifetimes)
    product: int | None = None  # the moment of the last product in the frame that runs
    ended: dict[int, int] = field(default_factory=dict)  # result of a loop -> its last moment
    copies_read: list[int] = field(default_factory=list)  # tokens, in the order in which they are read

    def run(self, frame: Frame) -> None:
        """Run the steps of a frame, from the moment that comes next."""
        steps = [s for s in frame.steps if not s.outputs or any(v in self.w.values for v in s.outputs)]
        reads = [self.w.reads(step) for step in steps]
        waits = self._waits(steps, reads)
        late = _for_weights(steps, waits) if self.p.backend.overlaps else frozenset[int]()
        first, self.product = self.lives.end, None
        for i in self._order(frame, steps, waits, late):
            self.lives.late.extend([self.lives.end] if i in late else [])
            self._step(steps[i], reads[i], first)
            self.product = self.lives.end - 1 if self.w.has_product(steps[i]) else self.product
        self.product = None

    @cached_property
    def eager(self) -> bool:
        """Whether everything runs as soon as its operands are there."""
        return self.p.backend.runs_eagerly and not self.deep

    @cached_property
    def deep(self) -> bool:
        """Whether everything runs when what it is made for is next."""
        b = self.p.backend
        return b.runs_eagerly and b.solves_in_depth and any(op.name in LAPACK for op in self.p.graph.walk())

    def _order(
        self, frame: Frame, steps: Sequence[Step], waits: Sequence[Sequence[int]], late: frozenset[int]
    ) -> list[int]:
        if self.eager:
            return _eagerly(waits)
        if self.deep:
            nbytes = [sum(self.p.type_of(v).nbytes for v in step.outputs) for step in steps]
            return _in_depth(waits, self._ends(frame, steps), nbytes)
        after = self._next_products(steps, late) if late else ()
        early = {i for i, step in enumerate(steps) if self._is_early(step)}
        return _in_turn(steps, waits, early, late, after)

    def _is_early(self, step: Step) -> bool:
        """Whether a step runs as soon as what it reads is there: an update, or the sum of a loop's carry and a part."""
        if step.op.index in self._additions:
            return True
        return self.p.graph.repeats is None and step.op.phase == "update" and step.kind != STORE

    @cached_property
    def _additions(self) -> frozenset[int]:
        """Operations that add to carries of scans at the end of a body; their kernels make products of gradients."""
        scans = (op for op in self.p.graph.walk() if op.name == "scan")
        return frozenset(add.index for op in scans for _, adds in control_flow.sums(self.p.graph, op) for add in adds)

    def _ends(self, frame: Frame, steps: Sequence[Step]) -> list[int]:
        """The steps that a frame runs for: those that make what leaves it, or leave nothing to read."""
        leaving = {self.p.behind(s) for v in frame.leaving for s in self.w.sources.get(v, ())}
        return [i for i, step in enumerate(steps) if not step.outputs or not leaving.isdisjoint(step.outputs)]

    def _next_products(self, steps: Sequence[Step], late: frozenset[int]) -> list[int]:
        """For each step the next product of the backward pass that is not late; itself if there is none."""
        next_products, following = list(range(len(steps))), -1
        for i in reversed(range(len(steps))):
            next_products[i] = following if following > i else i
            if self.w.has_product(steps[i]) and steps[i].op.phase == "backward" and i not in late:
                following = i
        return next_products

    def _waits(self, steps: Sequence[Step], reads: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each step the steps that it waits for, ascending; for no copy of a value that it repeats instead."""
        maker = {v: i for i, step in enumerate(steps) for v in step.outputs}
        waits: list[list[int]] = []
        tokens = self.p.tokens
        for step, read in zip(steps, reads, strict=True):
            needed = (*read, *(s for v in step.after for s in self.w.sources.get(v, ()))) if step.after else read
            read_here = (v for v in needed if v not in self.w.repeated_through)
            behind = [s for v in read_here for s in ((v,) if v not in tokens else self._copied(v))]
            waits.append(sorted({maker[s] for s in behind if s in maker}))
        return waits

    def _copied(self, token: int) -> tuple[int, ...]:
        return self.w.sources.get(self.p.behind(token), ())

    def _step(self, step: Step, reads: Sequence[int], first: int) -> None:
        begin, before = self.lives.end, len(self.copies_read)
        self.lives.moments.append(step)
        stacked = self.p.stacked if step.kind == LOOP and self.eager else ()
        for v in step.outputs:
            # Where everything starts early, so do the stacked results of loops: they are filled with zeros.
            self.lives.birth[v] = first if v in stacked else begin
        for inner in step.frames:
            self.run(inner)
            if not step.joins:
                self._keep_within(inner, begin)
            self.leave(inner, self.lives.end, begin if step.joins else None)
        if step.joins:
            self.lives.birth.update(dict.fromkeys(step.outputs, self.lives.end))
        if step.frames:
            if self.eager and not step.joins:
                self._hoist(before, begin)
            self.ended.update(dict.fromkeys(step.outputs, self.lives.end))
            self.lives.moments.append(step)
        taken = {self.p.behind(v) for v, _ in step.taken}
        for v in reads if step.kind != STORE or not self.p.backend.stores_early else ():
            self._read(v, begin, begin if self.p.behind(v) in taken or step.joins else self.lives.end - 1)

    def _hoist(self, before: int, begin: int) -> None:
        """Copies that were made before a loop began then are read in every iteration of it.

        (openxla/xla, xla/service/while_loop_invariant_code_motion.cc.)
        """
        lives = self.lives
        for v in set(self.copies_read[before:]):
            if lives.birth[v] < begin < lives.death[v]:
                lives.death[v] = lives.end

    def _keep_within(self, frame: Frame, begin: int) -> None:
        """What leaves the body of a loop that began then is made in its result's memory, unless that is read later."""
        for leaving, result in frame.carried:
            last = max(self.lives.death.get(v, begin) for v in (result, *self._tokens.get(result, ())))
            self.lives.within.update(self._made_within(leaving, result, begin, last) or ())

    def pass_on(self) -> None:
        """What a loop starts from, and nothing reads later, is made in the memory in which the loop goes on; what a
        branch of a conditional leaves in that of the result.
        """
        lives, arguments = self.lives, {*self.p.graph.inputs, *(c for c, _ in self.p.graph.constants)}
        for begin in reversed(range(lives.end)):
            step = lives.moments[begin]
            for read, result in step.taken:
                v = self.p.behind(read)
                last = max(lives.death.get(x, 0) for x in (v, *self._tokens.get(v, ())))
                if lives.birth[result] == begin and v not in arguments and last <= begin:
                    self._pass(v, read, result)
            for read, result in (pair for frame in step.frames for pair in frame.carried) if step.joins else ():
                v = self.p.behind(read)
                if begin < lives.birth.get(v, begin) <= lives.birth[result]:
                    self._pass(v, read, result)

    def _pass(self, v: int, read: int, result: int) -> None:
        lives = self.lives
        if v in lives.birth and v not in lives.within:
            lives.within[v] = read
            lives.birth[result] = min(lives.birth[result], lives.birth[v])

    @cached_property
    def _tokens(self) -> Mapping[int, Sequence[int]]:
        """Value -> the copies of it."""
        return grouped((v, token) for token, (v, _) in self.p.tokens.items())

    def _made_within(self, read: int, result: int, begin: int, last: int) -> list[tuple[int, int]] | None:
        """Values that are made in the memory of a loop's result if this one is, and as what each of them is read there.

        None where it needs memory of its own: it is not made in the body that began then, or before the result is read
        last there. What a loop inside starts from is made in that memory as well, and what a conditional's branches
        leave.
        """
        v = self.p.behind(read)
        if v == result:
            return []
        born = self.lives.birth.get(v, begin)
        step = self.lives.moments[born]
        if v in self.lives.within or born <= begin or v not in step.outputs:
            return None
        # a conditional leaves it, so each of its branches has to make it there
        if step.joins:
            left = [y for inner in step.frames for y, joined in inner.carried if joined == v]
            branches = [self._made_within(y, result, begin, last) for y in left]
            return [(v, read), *(x for branch in branches for x in branch or ())] if None not in branches else None
        # operands whose memory the step takes over
        started = [x for x, y in step.taken if y == v and self.lives.death.get(x) == born]
        overwrites = step.kind == LIGHT or step.name in OVERWRITES or result in map(self.p.behind, started)
        # the result is still read when this is written
        if born < last or (born == last and not overwrites):
            return None
        return [(v, read), *(x for s in started for x in self._made_within(s, result, begin, last) or ())]

    def leave(self, frame: Frame, moment: int, begin: int | None = None) -> None:
        """What leaves a frame is there until this moment; a branch that began then only passes on what is older."""
        for v in frame.leaving:
            for s in self.w.sources.get(v, ()):
                born = self.lives.birth.get(self.p.behind(s), moment)
                read = moment if begin is None or born >= begin else begin
                self._read(s, read, read)

    def _read(self, v: int, begin: int, end: int) -> None:
        self.lives.death[v] = max(self.lives.death.get(v, 0), end)
        if v in self.p.tokens:
            self.copies_read.append(v)
            if self.p.behind(v) in self.p.views and self.p.behind(v) in self.w.values:
                self._read(self.p.behind(v), begin, end)
            ready = max((self.ended.get(s, self.lives.birth.get(s, begin)) for s in self._copied(v)), default=0)
            born = self._fetched(v, ready, begin)
            self.lives.birth[v] = min(self.lives.birth.get(v, born), born)
            if v in self.p.source_token:
                self._read(self.p.source_token[v], born, born)

    def _fetched(self, token: int, ready: int, begin: int) -> int:
        """The moment at which a copy starts to be made of what is ready, to be read when a step begins."""
        b = self.p.backend
        if self.eager or (b.overlaps and not self.w.is_ready(self.p, self.p.behind(token))):
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


def _in_depth(waits: Sequence[Sequence[int]], ends: Sequence[int], nbytes: Sequence[int]) -> list[int]:
    """Each step after what it waits for, of which those come first that more is read of elsewhere, then larger ones.

    (openxla/xla, xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc: `DFSMemoryScheduler`.)

    Args:
        waits: step -> the steps that it waits for.
        ends: the steps that everything is made for.
        nbytes: of what each step makes.
    """
    users = [0] * len(waits)
    for i in (i for needed in (*waits, ends) for i in needed):
        users[i] += 1
    rank: list[tuple[int, int]] = []  # readers beside the first and bytes, each with those of all that was made before
    for i, (needed, most) in enumerate(zip(waits, accumulate(nbytes), strict=True)):
        before = [rank[j] for j in needed]
        readers_before = max(users[i] - 1, 0) + sum(extra_readers for extra_readers, _ in before)
        rank.append((min(readers_before, len(waits)), min(nbytes[i] + sum(size for _, size in before), most)))
    order: dict[int, None] = {}
    unread = [i for i, count in enumerate(users) if count == 0]
    left = [*sorted(unread, key=rank.__getitem__), *sorted(ends, key=rank.__getitem__)]
    while left:
        i = left[-1]
        missing = [] if i in order else [j for j in waits[i] if j not in order]
        left.extend(sorted(missing, key=rank.__getitem__))
        if not missing:
            order.setdefault(left.pop())
    return list(order)


def _in_turn(
    steps: Sequence[Step],
    waits: Sequence[Sequence[int]],
    early: AbstractSet[int],
    late: frozenset[int],
    after: Sequence[int],
) -> list[int]:
    """Program order; `early` steps as soon as they can, and `late` ones right after the next product that is none of
    them, `after`.
    """
    turn: list[int] = []
    for i, needed in enumerate(waits):
        last = max((turn[j] for j in needed), default=0)
        own = after[i] if i in late else max(i, last)
        turn.append(last if i in early else own)
    behind = early | late | {i for i, step in enumerate(steps) if step.op.phase == "update"}
    return sorted(range(len(steps)), key=lambda i: (turn[i], i in behind, i))


def _for_weights(steps: Sequence[Step], waits: Sequence[Sequence[int]]) -> frozenset[int]:
    """Products of the backward pass that nothing but updates waits for."""
    followers: list[list[int]] = [[] for _ in steps]
    for i, needed in enumerate(waits):
        for j in needed:
            followers[j].append(i)
    return frozenset(
        i
        for i, step in enumerate(steps)
        if step.kind == PRODUCT and step.op.phase == "backward"
        if followers[i] and all(steps[j].op.phase == "update" for j in followers[i])
    )
