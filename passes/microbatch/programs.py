"""The programs of a split step: what stands before, in and after the loops over microbatches.

Every operation has its stage (see `autopar.passes.microbatch.analysis`). From the results backwards, a program holds
those of its stages that a later program or the results need:

    after the last loop     what the results need of totals                                -> _Liveness.outside
    in the last loop        what those totals need, operations of the first loop repeated  -> _Liveness.loop
    after the first loop    what the second reads of totals, and no more
    in the first loop       what those totals need
    before                  whole values that any of them reads                            -> _Liveness.before

What loops then read in blocks only moves into them (`slice_pushdown`), as do views                     -> _in_blocks
What no loop reads at all moves behind them, so that none has to hold it                               -> _late
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from autopar.ir.graph import Graph, Op
from autopar.passes.microbatch.regions import Flat, narrowed
from autopar.passes.microbatch.rule_types import Outcome
from autopar.passes.microbatch.slice_pushdown import readers_of, sink
from autopar.passes.microbatch.states import Kind, Partial, Split, State

How = Literal[Kind, "concatenate", "last"]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """An operation in one of the programs.

    Attributes:
        op: the operation, its operands as in the flattened graph.
        outer: positions of operands that are read whole, from outside the loop; the others are of this microbatch.
        own: positions of partial operands that stand for their totals: m times the sum, the maximum itself.
        outcome: how it runs on a block; None where it runs on what it reads as in the undivided step.
    """

    op: Op
    outer: frozenset[int] = frozenset()
    own: frozenset[int] = frozenset()
    outcome: Outcome | None = None


class Total(NamedTuple):
    """A value of a loop that is read outside of it, and how its blocks become the whole."""

    value: int
    how: How


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """One loop over all microbatches, the totals it hands out, and the operations that then run once."""

    loop: tuple[Placed, ...]
    totals: tuple[Total, ...]
    after: tuple[Placed, ...]


@dataclass(frozen=True, eq=False)
class Facts:
    """What the analysis found out.

    Attributes:
        values: state and stage of every value.
        places: index of an operation -> its stage and how it runs there.
        whole: values of a loop that are known whole before it as well.
    """

    graph: Graph
    flat: Flat
    count: int
    values: Mapping[int, tuple[State, int]]
    places: Mapping[int, tuple[int, Placed]]
    whole: Set[int]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Operations before the loops, the sweeps in order, and states of values that loops make in blocks."""

    prologue: tuple[Placed, ...]
    sweeps: tuple[Sweep, ...]
    blocks: Mapping[int, State]


def place(facts: Facts) -> Placement:
    """The programs that the results need."""
    found = _in_blocks(facts, *_by_stage(facts))
    return _late(facts, found)


@dataclass(eq=False)
class _Liveness:
    """What programs need of each other, found from the last to the first."""

    a: Facts
    outer: set[int]
    taken: set[int] = field(default_factory=set)

    def outside(self, stages: Sequence[int]) -> list[Placed]:
        """Operations of these stages that are needed, and not taken yet, in program order."""
        found: list[Placed] = []
        for op in reversed(self.a.flat.ops):
            stage, placed = self.a.places[op.index]
            if op.index in self.taken or stage not in stages:
                continue
            if op.equation.effects or any(v in self.outer for v in op.outputs):
                self.taken.add(op.index)
                found.append(placed)
                self.outer.update(a for a in op.inputs if isinstance(a, int))
        return found[::-1]

    def totals(self, stages: Sequence[int]) -> list[int]:
        """Values of loops at these stages that are needed whole."""
        values, whole = self.a.values, self.a.whole
        return [v for v in sorted(self.outer) if values[v][1] in stages and v not in whole]

    def loop(self, last: int, wanted: Iterable[int]) -> list[Placed]:
        """Operations of a loop, with those of earlier loops that it repeats."""
        local = set(wanted)
        found: list[Placed] = []
        for op in reversed(self.a.flat.ops):
            stage, placed = self.a.places[op.index]
            if not any(v in local for v in op.outputs) or (stage > last and stage % 2):
                continue
            placed = placed if stage % 2 else self._estimated(placed)
            found.append(placed)
            for i, atom in enumerate(op.inputs):
                if isinstance(atom, int):
                    (self.outer if i in placed.outer else local).add(atom)
        return found[::-1]

    def _estimated(self, placed: Placed) -> Placed:
        """An operation after the loop, repeated in it on the microbatch's own totals."""
        known = {i: self.a.values[atom] for i, atom in enumerate(placed.op.inputs) if isinstance(atom, int)}
        outer = frozenset(i for i, (_, stage) in known.items() if stage == 0)
        own = frozenset(i for i, (state, _) in known.items() if isinstance(state, Partial))
        return Placed(placed.op, outer, own)

    def before(self) -> list[Placed]:
        """Operations before the loops."""
        found: list[Placed] = []
        for op in reversed(self.a.flat.ops):
            early = self.a.places[op.index][0] == 0 or any(v in self.a.whole for v in op.outputs)
            if early and (op.equation.effects or any(v in self.outer for v in op.outputs)):
                found.append(Placed(op, frozenset(range(len(op.inputs)))))
                self.outer.update(a for a in op.inputs if isinstance(a, int))
        return found[::-1]


def _by_stage(a: Facts) -> tuple[tuple[Placed, ...], tuple[Sweep, ...]]:
    """The prologue and the sweeps, every operation where its stage is."""
    results = {v for v in a.flat.outputs if isinstance(v, int)}
    if all(stage <= 2 for _, stage in a.values.values()):
        alive = _Liveness(a, results)
        after = alive.outside((2,))
        sweep = _sweep(a, alive, 1, (1,), after)
        return tuple(alive.before()), (sweep,)
    # What the second loop reads of totals is found with all else after it; that may then shrink.
    alive = _Liveness(a, set(results))
    alive.outside((2, 4))
    outer = {v for p in alive.loop(3, alive.totals((1, 3))) for v in _outer_values(p)}
    # stage 1: a total of the first loop that is read as it is
    read = {v for v in outer if a.values[v][1] in (1, 2) and v not in a.whole}
    early = _Liveness(a, read)
    middle = early.outside((2,))
    alive = _Liveness(a, results, set(early.taken))
    after = alive.outside((2, 4))
    second = _sweep(a, alive, 3, (1, 3), after)
    alive.outer.update(early.outer)
    first = _Liveness(a, early.outer)
    sweep = _sweep(a, first, 1, (1,), middle)
    alive.outer.update(first.outer)
    return tuple(alive.before()), (sweep, second)


def _outer_values(placed: Placed) -> list[int]:
    return [a for i, a in enumerate(placed.op.inputs) if i in placed.outer and isinstance(a, int)]


def _sweep(a: Facts, alive: _Liveness, last: int, stages: Sequence[int], after: Sequence[Placed]) -> Sweep:
    values = alive.totals(stages)
    loop = alive.loop(last, values)
    return Sweep(tuple(loop), tuple(Total(v, _how(a.values[v][0])) for v in values), tuple(after))


def _how(state: State) -> How:
    if isinstance(state, Partial):
        return state.kind
    return "concatenate" if isinstance(state, Split) else "last"


def _in_blocks(a: Facts, prologue: Sequence[Placed], sweeps: Sequence[Sweep]) -> Placement:
    """The programs with what is only read in blocks made in blocks."""
    looped = {p.op.index: p.outcome for s in sweeps for p in s.loop}
    scans = {p.op.index: p.op for s in sweeps for p in s.loop if p.op.name == "scan" and p.outcome is not None}
    hoisted = [p.op for p in prologue if p.op.index not in looped]
    # what depends on no example and yet runs in the loop, behind something that does run there
    whole = [p.op for s in sweeps for p in s.loop if p.outcome is None and not p.own]
    candidates = sorted((*hoisted, *scans.values(), *whole), key=lambda op: op.index)
    apart = {p.op.index: p.op for group in (prologue, *(x for s in sweeps for x in (s.loop, s.after))) for p in group}
    kept = {v for v in a.flat.outputs if isinstance(v, int)}
    again = (p.op for group in (prologue, *(s.after for s in sweeps)) for p in group if p.op.index in looped)
    kept.update(v for op in again for v in op.inputs if isinstance(v, int))
    kept.update(t.value for s in sweeps for t in s.totals)
    readers = readers_of(tuple(apart.values()))
    changed, _ = sink(a.graph, candidates, looped, readers, kept, a.count, narrow=narrowed)
    sunk = [op for op in hoisted if op.index in changed or _is_free(op)]
    local_values = {v for op in sunk for v in op.outputs}
    made = [op for op in candidates if op.index in changed]
    states = {v: s for op in made for v, s in zip(op.outputs, changed[op.index].results, strict=True)}

    def moved(placed: Placed) -> Placed:
        local = {i for i, atom in enumerate(placed.op.inputs) if atom in local_values}
        return replace(placed, outer=placed.outer - local, outcome=changed.get(placed.op.index, placed.outcome))

    def loop(placed: Sequence[Placed]) -> tuple[Placed, ...]:
        found = [moved(p) for p in placed]
        read = {atom for p in found for atom in p.op.inputs}
        for op in reversed(sunk):
            if op.outputs[0] in read:
                found.append(moved(Placed(op, frozenset(range(len(op.inputs))))))
                read.update(op.inputs)
        return tuple(sorted(found, key=lambda p: p.op.index))

    rest = tuple(p for p in prologue if p.op.index not in changed or p.op.index in looped)
    return Placement(rest, tuple(replace(s, loop=loop(s.loop)) for s in sweeps), states)


def _is_free(op: Op) -> bool:
    """What is cheaper to make where it is read than to keep: constants of one value, and other looks at a value."""
    return op.name in _VIEWS


_VIEWS = ("broadcast_in_dim", "iota", "reshape", "transpose", "rev", "squeeze", "expand_dims")


def _late(a: Facts, found: Placement) -> Placement:
    """The programs with what no loop needs moved from before them to the end: no loop has to hold it."""
    *first, last = found.sweeps
    soon = {v for s in first for p in s.after for v in p.op.inputs}
    soon.update(v for s in found.sweeps for p in s.loop for v in _outer_values(p))
    finally_read = {v for p in last.after for v in p.op.inputs} | set(a.flat.outputs)
    early: list[Placed] = []
    late: list[Placed] = []
    for placed in reversed(found.prologue):
        op = placed.op
        chosen, read = (early, soon) if any(v in soon for v in op.outputs) else (late, finally_read)
        if op.equation.effects or any(v in read for v in op.outputs):
            chosen.append(placed)
            read.update(op.inputs)
    after = sorted((*late, *last.after), key=lambda p: p.op.index)
    return Placement(tuple(early[::-1]), (*first, replace(last, after=tuple(after))), found.blocks)
