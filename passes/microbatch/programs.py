"""The programs of a split step: which operations run before, in and after the loops over microbatches.

Every operation has a segment (see `autopar.passes.microbatch.analysis`). From the results backwards, a program gets
those operations of its segments that a later program or the results need:

    after the last loop     what the results need of totals                                  -> _Liveness.outside
    in the last loop        what those totals need; operations of the first loop repeated    -> _Liveness.loop
    after the first loop    from totals, the values that the second loop reads; nothing else
    in the first loop       what those totals need
    before the loops        whole values that any of them reads                              -> _Liveness.before

Operations whose results loops only read in blocks then move into the loops (`slice_pushdown`), as do views
                                                                                             -> _push_slices
Operations whose results no loop reads move from before the loops to the end, so that their results are not live during
the loops                                                                                    -> _defer_prologue

Where the loop estimates totals from the microbatch (`per_microbatch`), microbatch k computes a loss f_k of its own, and
the gradient is that of mean_k f_k. A derivative that depends on such a total is therefore a mean over the microbatches
                                                                                             -> _averaged

    y_i = h_i + mean_j(h_j) W      dL/dW = mean_k t_k c_k      t_k, c_k: the total and its cotangent in microbatch k

and not the product of the mean of t and the mean of c.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.op_sets import BROADCASTS, REORDERINGS, RESHAPES
from autopar.passes.microbatch.regions import FlattenedOps, narrow_scan
from autopar.passes.microbatch.rules.types import RuleResult
from autopar.passes.microbatch.slice_pushdown import push_down, readers_of
from autopar.passes.microbatch.states import Partial, ReductionKind, Split, State

Combine = Literal[ReductionKind, "mean", "concatenate", "last"]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedOp:
    """An operation in one of the programs.

    Attributes:
        op: the operation; its operands are those of the flattened graph.
        outer: positions of operands that are read whole, from outside the loop; other operands are of this microbatch.
        own_totals: positions of partial operands that replace their totals: m times the sum, the maximum itself.
        rule_result: how it runs on a block; None if it runs unchanged, on its operands as they are.
        hoisted: positions of partial operands that it reads as totals of the batch, computed before the loop.
    """

    op: Op
    outer: frozenset[int] = frozenset()
    own_totals: frozenset[int] = frozenset()
    rule_result: RuleResult | None = None
    hoisted: frozenset[int] = frozenset()


class AccumulatedValue(NamedTuple):
    """A value of a loop that is read outside the loop, and how its parts or blocks are combined into the whole."""

    value: int
    combine: Combine


@dataclass(frozen=True, slots=True, eq=False)
class AccumulationLoop:
    """One loop over all microbatches.

    Attributes:
        body: operations that run once per microbatch.
        totals: values of the body that are read outside the loop.
        after: operations that run once, after the loop.
    """

    body: tuple[PlacedOp, ...]
    totals: tuple[AccumulatedValue, ...]
    after: tuple[PlacedOp, ...]


@dataclass(frozen=True, eq=False)
class Analysis:
    """The result of the analysis of a step, from which programs are built.

    Attributes:
        graph, flat: the step, and its operations with rematerialised bodies inlined.
        count: number of microbatches.
        values: state and segment of every value.
        places: index of an operation -> its segment, and how it runs there.
        whole: values of a loop that are also computed on the whole batch, before the loop.
    """

    graph: Graph
    flat: FlattenedOps
    count: int
    values: Mapping[int, tuple[State, int]]
    places: Mapping[int, tuple[int, PlacedOp]]
    whole: Set[int]


@dataclass(frozen=True, slots=True, eq=False)
class LoopPrograms:
    """The programs of a step.

    Attributes:
        prologue: operations before the loops.
        loops: the loops in order.
        blocks: states of values that loops compute in blocks instead of whole.
    """

    prologue: tuple[PlacedOp, ...]
    loops: tuple[AccumulationLoop, ...]
    blocks: Mapping[int, State]


def build_programs(analysis: Analysis) -> LoopPrograms:
    """The programs that the results need."""
    return _defer_prologue(analysis, _push_slices(analysis, *_by_segment(analysis)))


@dataclass(eq=False)
class _Liveness:
    """The values that programs need of each other, collected from the last program to the first.

    Attributes:
        needed: whole values that a later program or the results read; grows.
        taken: indices of operations that are in a program outside of loops already.
        averaged: values after the loop that are means over microbatches.
    """

    analysis: Analysis
    needed: set[int]
    taken: set[int] = field(default_factory=set)
    averaged: Set[int] = frozenset()

    def outside(self, segments: Sequence[int]) -> list[PlacedOp]:
        """Operations of these segments that are needed and not taken yet, in program order."""
        placed_ops: list[PlacedOp] = []
        for op in reversed(self.analysis.flat.ops):
            segment, placed = self.analysis.places[op.index]
            if op.index in self.taken or segment not in segments:
                continue
            if op.equation.effects or any(v in self.needed and v not in self.averaged for v in op.outputs):
                self.taken.add(op.index)
                placed_ops.append(placed)
                self.needed.update(a for a in op.inputs if isinstance(a, int))
        return placed_ops[::-1]

    def totals(self, segments: Sequence[int]) -> list[int]:
        """Values of loops at these segments that are needed whole."""
        values, whole = self.analysis.values, self.analysis.whole
        means = self.needed & self.averaged
        return [v for v in sorted(self.needed) if (values[v][1] in segments and v not in whole) or v in means]

    def loop(self, last: int, wanted: Iterable[int]) -> list[PlacedOp]:
        """The body of a loop that computes `wanted`, with the operations of earlier loops that it repeats."""
        local = set(wanted)
        placed_ops: list[PlacedOp] = []
        for op in reversed(self.analysis.flat.ops):
            segment, placed = self.analysis.places[op.index]
            if local.isdisjoint(op.outputs) or (segment > last and segment % 2):
                continue
            placed = placed if segment % 2 else self._on_own_totals(placed)
            placed_ops.append(placed)
            for i, atom in enumerate(op.inputs):
                if isinstance(atom, int):
                    (self.needed if i in placed.outer else local).add(atom)
        return placed_ops[::-1]

    def _on_own_totals(self, placed: PlacedOp) -> PlacedOp:
        """An operation after the loop, repeated in the loop on the microbatch's own totals."""
        operands = {i: self.analysis.values[atom] for i, atom in enumerate(placed.op.inputs) if isinstance(atom, int)}
        outer = frozenset(i for i, (_, segment) in operands.items() if segment == 0) | placed.hoisted
        own_totals = frozenset(i for i, (state, _) in operands.items() if isinstance(state, Partial)) - outer
        return PlacedOp(placed.op, outer, own_totals)

    def before(self) -> list[PlacedOp]:
        """Operations before the loops."""
        placed_ops: list[PlacedOp] = []
        for op in reversed(self.analysis.flat.ops):
            early = self.analysis.places[op.index][0] == 0 or any(v in self.analysis.whole for v in op.outputs)
            if early and (op.equation.effects or any(v in self.needed for v in op.outputs)):
                placed_ops.append(PlacedOp(op, frozenset(range(len(op.inputs)))))
                self.needed.update(a for a in op.inputs if isinstance(a, int))
        return placed_ops[::-1]


def _by_segment(analysis: Analysis) -> tuple[tuple[PlacedOp, ...], tuple[AccumulationLoop, ...]]:
    """The prologue and the loops, every operation in the program of its segment."""
    results = {v for v in analysis.flat.outputs if isinstance(v, int)}
    if all(segment <= 2 for _, segment in analysis.values.values()):
        liveness = _Liveness(analysis, results, averaged=_averaged(analysis))
        after = liveness.outside((2,))
        loop = _accumulation_loop(analysis, liveness, 1, liveness.totals((1,)), after)
        return tuple(liveness.before()), (loop,)
    # The totals that the second loop reads are found with everything after it; the operations after it may shrink then.
    liveness = _Liveness(analysis, set(results))
    liveness.outside((2, 4))
    needed = {v for p in liveness.loop(3, liveness.totals((1, 3))) for v in _outer_values(p)}
    # segment 1: a total of the first loop that the second reads directly
    read = {v for v in needed if analysis.values[v][1] in (1, 2) and v not in analysis.whole}
    early = _Liveness(analysis, read)
    middle = early.outside((2,))
    first = _accumulation_loop(analysis, early, 1, early.totals((1,)), middle)
    liveness = _Liveness(analysis, results, set(early.taken))
    after = liveness.outside((2, 4))
    of_first = {total.value for total in first.totals}
    of_second = [v for v in liveness.totals((1, 3)) if v not in of_first]
    second = _accumulation_loop(analysis, liveness, 3, of_second, after)
    liveness.needed.update(early.needed)
    return tuple(liveness.before()), (first, second)


def _outer_values(placed: PlacedOp) -> list[int]:
    return [a for i, a in enumerate(placed.op.inputs) if i in placed.outer and isinstance(a, int)]


def _accumulation_loop(
    analysis: Analysis, liveness: _Liveness, last: int, values: Sequence[int], after: Sequence[PlacedOp]
) -> AccumulationLoop:
    """A loop that adds up these values."""
    loop = liveness.loop(last, values)
    means = [AccumulatedValue(v, "mean") for v in values if v in liveness.averaged]
    totals = [AccumulatedValue(v, _combine(analysis.values[v][0])) for v in values if v not in liveness.averaged]
    return AccumulationLoop(tuple(loop), tuple(sorted((*means, *totals))), tuple(after))


def _averaged(analysis: Analysis) -> frozenset[int]:
    """Derivatives, and differentiated values, after the loop that depend on totals that the loop estimates.

    Running statistics, metrics and the update are not differentiated: they are computed from totals of the batch.
    Integers have no mean, and what needs blocks of the whole batch cannot run in the loop.
    """
    producers = {v: op for op in analysis.flat.ops for v in op.outputs}
    placed = [analysis.places[op.index] for op in analysis.flat.ops]
    # totals that operations of the loop estimate from their own microbatch
    stack = [p.op.inputs[i] for segment, p in placed if segment == 1 for i in sorted(p.own_totals)]
    estimated: set[Atom] = set()
    while stack:
        value = stack.pop()
        if isinstance(value, int) and value not in estimated and analysis.values[value][1] > 0:
            estimated.add(value)
            # made after the loop of other totals, which are estimated with it
            if analysis.values[value][1] == 2:
                stack.extend(producers[value].inputs)
    averaged: set[int] = set()
    of_whole_batch: set[Atom] = set()
    for op in analysis.flat.ops if estimated else ():
        if analysis.places[op.index][0] != 2:
            continue
        split = any(isinstance(a, int) and isinstance(analysis.values[a][0], Split) for a in op.inputs)
        # it reads joined blocks, which the loop does not have
        if split or not of_whole_batch.isdisjoint(op.inputs):
            of_whole_batch.update(op.outputs)
        elif not estimated.isdisjoint(op.inputs) and not op.equation.effects:
            estimated.update(op.outputs)
            floating = all(_FLOATING.match(analysis.graph.types[v].dtype) for v in op.outputs)
            averaged.update(op.outputs if floating and op.is_differentiated else ())
    return frozenset(averaged)


def _combine(state: State) -> Combine:
    if isinstance(state, Partial):
        return state.kind
    return "concatenate" if isinstance(state, Split) else "last"


#: Names of dtypes whose values have means.
_FLOATING = re.compile("b?float|complex")


def _push_slices(analysis: Analysis, prologue: Sequence[PlacedOp], loops: Sequence[AccumulationLoop]) -> LoopPrograms:
    """The programs, with values that are only read in blocks computed in blocks."""
    rule_results = {p.op.index: p.rule_result for loop in loops for p in loop.body}
    scans = {p.op.index: p.op for loop in loops for p in loop.body if p.op.name == "scan" and p.rule_result is not None}
    hoisted_ops = [p.op for p in prologue if p.op.index not in rule_results]
    # operations that depend on no example and yet run in the loop, after an operation that has to run there
    whole = [p.op for loop in loops for p in loop.body if p.rule_result is None and not p.own_totals]
    candidates = sorted((*hoisted_ops, *scans.values(), *whole), key=lambda op: op.index)
    all_ops = {
        p.op.index: p.op for group in (prologue, *(x for loop in loops for x in (loop.body, loop.after))) for p in group
    }
    read_whole = {v for v in analysis.flat.outputs if isinstance(v, int)}
    repeated = (
        p.op for group in (prologue, *(loop.after for loop in loops)) for p in group if p.op.index in rule_results
    )
    read_whole.update(v for op in repeated for v in op.inputs if isinstance(v, int))
    read_whole.update(t.value for loop in loops for t in loop.totals)
    readers = readers_of(tuple(all_ops.values()))
    changed, _ = push_down(
        analysis.graph, candidates, rule_results, readers, read_whole, analysis.count, narrow_scan=narrow_scan
    )
    moved_ops = [op for op in hoisted_ops if op.index in changed or _is_view(op)]
    local_values = {v for op in moved_ops for v in op.outputs}
    in_blocks = [op for op in candidates if op.index in changed]
    states = {v: s for op in in_blocks for v, s in zip(op.outputs, changed[op.index].results, strict=True)}

    def moved(placed: PlacedOp) -> PlacedOp:
        local = [i for i, atom in enumerate(placed.op.inputs) if atom in local_values]
        if not local and placed.op.index not in changed:
            return placed
        return replace(
            placed, outer=placed.outer.difference(local), rule_result=changed.get(placed.op.index, placed.rule_result)
        )

    def with_moved_ops(placed: Sequence[PlacedOp]) -> tuple[PlacedOp, ...]:
        body = [moved(p) for p in placed]
        read = {atom for p in body for atom in p.op.inputs}
        for op in reversed(moved_ops):
            if op.outputs[0] in read:
                body.append(moved(PlacedOp(op, frozenset(range(len(op.inputs))))))
                read.update(op.inputs)
        return tuple(sorted(body, key=lambda p: p.op.index))

    rest = tuple(p for p in prologue if p.op.index not in changed or p.op.index in rule_results)
    return LoopPrograms(rest, tuple(replace(loop, body=with_moved_ops(loop.body)) for loop in loops), states)


def _is_view(op: Op) -> bool:
    """True for operations that are cheaper to repeat where they are read than to store: views, and constants of one
    value.
    """
    return op.name in _VIEWS


_VIEWS = (*BROADCASTS, *RESHAPES, *REORDERINGS)


def _defer_prologue(analysis: Analysis, programs: LoopPrograms) -> LoopPrograms:
    """Moves operations before the loops that no loop needs to the end: their results are not live during the loops."""
    *first, last = programs.loops
    read_by_loops = {v for loop in first for p in loop.after for v in p.op.inputs}
    read_by_loops.update(v for loop in programs.loops for p in loop.body for v in _outer_values(p))
    read_at_end = {v for p in last.after for v in p.op.inputs} | set(analysis.flat.outputs)
    early: list[PlacedOp] = []
    late: list[PlacedOp] = []
    for placed in reversed(programs.prologue):
        op = placed.op
        chosen, read = (early, read_by_loops) if any(v in read_by_loops for v in op.outputs) else (late, read_at_end)
        if op.equation.effects or any(v in read for v in op.outputs):
            chosen.append(placed)
            read.update(op.inputs)
    after = sorted((*late, *last.after), key=lambda p: p.op.index)
    return LoopPrograms(tuple(early[::-1]), (*first, replace(last, after=tuple(after))), programs.blocks)
