"""Microbatches without markers: which operations of a step run once per block of the batch.

The batch is cut into m blocks. One pass in program order gives every value a state (see
`autopar.passes.microbatch.states`) and a segment:

    0      before the loop over microbatches: parameters, and the little that is computed from the whole batch
    1      inside the loop
    2      after the loop, when totals are known: the update
    3, 4   a second loop that reads such totals, and the operations after it

An operation is placed in the first segment where its operands are known and it can run      -> Analyzer.place

    all operands invariant                    where they are known, on whole values
    some operand split                        in a loop, on blocks, by the table of rules             -> _in_loop
    some operand a partial sum                it needs the total: after the loop. Two gradients whose only use is their
                                              sum are added inside the loop, transposed there if they are transposed
                                              first, and a scan of blocks carries a part on
                                                                             -> _shares_accumulator, _carries_on
    no rule, and operands that are cheap      before the loops, on the whole batch: the count of a mask
                                                                                                  -> _before_loop
    otherwise                                 after the loop, on blocks joined into whole values   -> _after_loop

so that partial sums are combined as early as possible and every step stays correct: f(sum_k x_k) is computed from the
sum. An unsuitable step loses the benefit of microbatches. The result says by how much, and names the operations that
read totals and the operations of the forward pass that yield these                                        -> _reasons

A second loop makes steps exact that need totals of the forward pass in the backward pass, such as balance losses of
experts that are products of batch means, or contrastive losses (gradient caching: Gao et al., "Scaling deep contrastive
learning batch size under memory limited setup", 2021). The first loop then computes those totals only; the second
repeats the operations of the first that it needs. Batch norm would need two more loops per layer and is refused. With
`per_microbatch`, a total that is read inside the loop is estimated from the microbatch itself: m times its own sum, or
its own maximum                                                                         -> _may_use_own_totals
Frameworks that accumulate gradients treat batch statistics in this way. Derivatives that depend on such an estimate
are means over microbatches (see `autopar.passes.microbatch.programs`). What is not differentiated still gets totals
over all microbatches: running means are those of the whole batch, running variances average those within microbatches.

Which cuts of the batch are tried: `autopar.passes.microbatch.split`. The operations of each program:
`autopar.passes.microbatch.programs`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from autopar.cost_models.flops import work
from autopar.cost_models.kernels import KERNELS
from autopar.ir.graph import Atom, Graph, Op, is_zero
from autopar.ir.keyed import totals
from autopar.ir.op_sets import ADDITIONS, ALL_PRODUCTS, KERNEL_CALLS, RELAYOUTS
from autopar.passes.microbatch.constant_indices import constant_component
from autopar.passes.microbatch.equal_values import first_equal
from autopar.passes.microbatch.grouped import Groups, is_grouped
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.programs import Analysis, PlacedOp, build_programs
from autopar.passes.microbatch.regions import Blocking, FlattenedOps, Reason, apply_rule, blocking_op
from autopar.passes.microbatch.rules.table import invariant_results
from autopar.passes.microbatch.rules.types import RuleResult
from autopar.passes.microbatch.states import INVARIANT, SUM, ZERO, Grouped, Invariant, Partial, Split, State

#: Limit on values that are computed from the whole batch before the loop: bytes per byte of the batch, plus bytes.
HOISTED_BYTES_PER_BATCH_BYTE = 16.0
# Masks and tables of positions of a small batch are larger than 16 times the batch, and small all the same.
HOISTED_BYTES_FREE = 1 << 16


class OutsideLimitError(Exception):
    """More FLOPs than allowed need several microbatches."""


class GroupedOutsideError(Exception):
    """Rows that a block has sorted are read outside of the loop."""


class _OperandUse(NamedTuple):
    """How an operation reads an operand.

    Attributes:
        state: its state.
        segment: where it is known.
        outer: it is read whole, from outside of the loop.
        own_totals: it is partial, and replaces its total.
    """

    state: State
    segment: int
    outer: bool = True
    own_totals: bool = False


@dataclass(eq=False)
class Analyzer:
    """The state of one pass; local to `split`.

    Attributes:
        limit: largest FLOPs outside of loops that come from the whole batch; `outside_flops` counts them.
        groups: rows that are sorted by group in each block; None: such sorts are of the whole batch.
        hoists_totals: totals that are cheap are computed before the loop, although they may be the microbatch's own.
        values: state and segment of every value.
        places: index of an operation -> its segment, and how it runs there.
        whole: values of the loop that are also computed on the whole batch, before the loop.
        heavy: values that need products, loops or totals.
        whole_batch_reader: values outside of loops that come from the whole batch -> index of the operation that first
            read the whole batch.
        producers: value -> the operation that defines it.
        originals: recomputed values -> the values that they equal.
        reads: value -> number of operands and results that are this value.
        uses: value -> how an operation reads it, before totals are considered.
        rules: (signature of an operation without regions, states of its operands) -> how it runs on blocks.
    """

    graph: Graph
    flat: FlattenedOps
    batch: Mapping[int, Split]
    count: int
    loops: int
    per_microbatch: tuple[str, ...]
    share_accumulators: bool
    limit: float = math.inf
    groups: Groups | None = None
    hoists_totals: bool = True
    outside_flops: float = 0.0
    values: dict[int, tuple[State, int]] = field(default_factory=dict)
    places: dict[int, tuple[int, PlacedOp]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    heavy: set[int] = field(default_factory=set)
    whole_batch_reader: dict[int, int] = field(default_factory=dict)
    producers: dict[int, Op] = field(default_factory=dict)
    originals: Mapping[int, int] = field(default_factory=dict)
    reads: Counter[Atom] = field(default_factory=Counter)
    uses: dict[int, _OperandUse] = field(default_factory=dict[int, "_OperandUse"])
    rules: dict[tuple[int, tuple[State, ...]], RuleResult | None] = field(default_factory=dict)

    def run(self) -> Microbatches:
        """Place all operations."""
        self.values.update((v, (INVARIANT, 0)) for v in (*self.graph.inputs, *(c for c, _ in self.flat.constants)))
        self.values.update((v, (state, 1)) for v, state in self.batch.items())
        self.whole.update(self.batch)
        self.producers.update((v, op) for op in self.flat.ops for v in op.outputs)
        self.reads.update(a for op in self.flat.ops for a in op.inputs if isinstance(a, int))
        self.reads.update(a for a in self.flat.outputs if isinstance(a, int))
        self.originals = first_equal(self.flat.ops)
        for op in self.flat.ops:
            segment, placed, results = self.place(op)
            self._record(placed.op, segment, placed, results)
        if any(isinstance(self.use(a).state, Grouped) for a in self.flat.outputs):
            raise GroupedOutsideError
        self.flat = replace(self.flat, ops=tuple(self.places[op.index][1].op for op in self.flat.ops))
        return _result(self)

    # Operands

    def use(self, atom: Atom) -> _OperandUse:
        """State and segment of an operand, before totals are considered."""
        if not isinstance(atom, int):
            return _OperandUse(ZERO if is_zero(atom) else INVARIANT, 0)
        operand_use = self.uses.get(atom)
        if operand_use is None:
            state, segment = self.values[atom]
            operand_use = self.uses[atom] = _OperandUse(state, segment, segment % 2 == 0)
        return operand_use

    def _total_of(self, op: Op, atom: Atom, use: _OperandUse) -> _OperandUse:
        """The total of a partial value: computed before the loop if that is cheap, else known after the loop."""
        assert isinstance(atom, int)
        early = self.hoists_totals or not self._may_use_own_totals(op)
        if early and not _is_heavy(op) and self._hoist([atom]):
            return _OperandUse(INVARIANT, 0)
        return _OperandUse(INVARIANT, use.segment + 1)

    def _hoist(self, values: Sequence[int]) -> bool:
        """Compute values of the loop before it as well, on the whole batch; False if that is not cheap."""
        if any(v in self.heavy or self.values[v][1] > 1 for v in values):
            return False
        hoisted: dict[int, None] = {}
        stack = list(values)
        while stack:
            value = stack.pop()
            if value in hoisted or value in self.whole or self.values[value][1] == 0:
                continue
            producer = self.producers[value]
            hoisted.update(dict.fromkeys(producer.outputs))  # its other results are then known whole as well
            stack.extend(a for a in producer.inputs if isinstance(a, int))
        allowed = HOISTED_BYTES_FREE + HOISTED_BYTES_PER_BATCH_BYTE * sum(
            self.graph.types[v].nbytes for v in self.batch
        )
        if sum(self.graph.types[v].nbytes for v in hoisted) > allowed:
            return False
        self.whole.update(hoisted)
        return True

    # Placing one operation

    def place(self, op: Op) -> tuple[int, PlacedOp, tuple[State, ...]]:
        """Segment of an operation, how it reads its operands and runs there, and the states of its results."""
        adds_parts = self._shares_accumulator(op)
        uses = [self.use(a) for a in op.inputs]
        if self._reads_counts(op) and (placed := self._in_loop(op, uses)) is not None:
            return placed
        # an operation that does not merely add parts, or carry one on, reads totals
        if any(isinstance(v.state, Partial) for v in uses) and not (adds_parts or self._carries_on(op, uses)):
            op = self._read_originals(op, uses)
            uses = [
                self._total_of(op, a, v) if isinstance(v.state, Partial) else v
                for a, v in ((a, self.use(a)) for a in op.inputs)
            ]
        # on whole values, as soon as all of them are known
        if all(isinstance(v.state, Invariant) for v in uses):
            segment = max((v.segment for v in uses), default=0)
            hoisted = [i for i, a in enumerate(op.inputs) if uses[i].segment == 0 and self.use(a).segment > 0]
            placed = replace(_placed(op, uses, None), hoisted=frozenset(hoisted))
            return segment, placed, invariant_results(op, [v.state for v in uses])
        # side effects happen once in a step, not once in a microbatch
        placed = None if op.equation.effects else self._in_loop(op, uses)
        # rows that a block has sorted exist in the loop alone
        if placed is None and any(isinstance(v.state, Grouped) for v in uses):
            raise GroupedOutsideError
        if placed is None and not op.equation.effects:
            placed = self._with_own_totals(op, uses) or self._before_loop(op, uses)
        return placed or self._after_loop(op, uses)

    def _read_originals(self, op: Op, uses: Sequence[_OperandUse]) -> Op:
        """The operation, with recomputed partial operands replaced by their originals where those are known earlier."""

        def original(atom: Atom, use: _OperandUse) -> Atom:
            earlier = self.originals.get(atom) if isinstance(atom, int) and isinstance(use.state, Partial) else None
            if earlier is None or isinstance(self.values[earlier][0], Split) or self.values[earlier][1] > use.segment:
                return atom
            self.reads.update({earlier: 1, atom: -1})
            return earlier

        inputs = tuple(map(original, op.inputs, uses))
        return op if inputs == op.inputs else replace(op, inputs=inputs)

    def _carries_on(self, op: Op, uses: Sequence[_OperandUse]) -> bool:
        """True for a scan over examples whose carry begins with the part of a scan before it, and stays a part.

        Layers that are divided into several scans carry an auxiliary loss on so.
        """
        states = tuple([v.state for v in uses])
        reads_blocks = op.name == "scan" and any(isinstance(s, Split) for s in states)
        return reads_blocks and not op.equation.effects and self._rule_result(op, states) is not None

    def _shares_accumulator(self, op: Op) -> bool:
        """True for the sum of two partial sums that nothing else reads: one accumulator suffices for both.

        A gradient of a product is transposed before it is added to another gradient of the same weights. Such
        operations on one of the parts move into the loop.
        """
        if not self.share_accumulators or op.name not in ADDITIONS:
            return False
        relayouts: list[Op] = []
        for atom in op.inputs:
            behind_loop = self._relayouts_of_part(atom)
            if behind_loop is None:
                return False
            relayouts.extend(behind_loop)
        for relayout in relayouts:
            placed = self._in_loop(relayout, [self.use(a) for a in relayout.inputs])
            assert placed is not None
            self._record(relayout, *placed)
            for v in relayout.outputs:
                del self.uses[v]
        return True

    def _relayouts_of_part(self, atom: Atom) -> tuple[Op, ...] | None:
        """The operations behind the loop that make a value of a partial sum, and that parts may run through as well.

        Returns:
            In order; () for a partial sum; None for other values, and where anything else reads one of these.
        """
        if not isinstance(atom, int) or self.reads[atom] != 1:
            return None
        if self.use(atom).state == SUM:
            return ()
        producer = self.producers.get(atom)
        if producer is None or producer.name not in RELAYOUTS:
            return None
        segment, placed = self.places[producer.index]
        relayouts = self._relayouts_of_part(placed.op.inputs[0])
        if relayouts is None or segment == 0:
            return None
        result = self._rule_result(placed.op, (SUM,))
        return (*relayouts, placed.op) if result is not None and result.results == (SUM,) else None

    def _reads_counts(self, op: Op) -> bool:
        """True for an operation that reads the block's own counts of groups, and not their totals."""
        if self.groups is None or op.equation.effects:
            return False
        return any(a in self.groups.counts for a in op.inputs)

    def _in_loop(self, op: Op, uses: Sequence[_OperandUse]) -> tuple[int, PlacedOp, tuple[State, ...]] | None:
        """In a loop, on blocks."""
        segment = max(v.segment for v in uses)
        loop = segment if segment % 2 else segment + 1
        if loop > 2 * self.loops - 1:
            return None
        result = self._rule_result(op, tuple([v.state for v in uses]))
        return result and (loop, _placed(op, uses, result), result.results)

    def _rule_result(self, op: Op, states: tuple[State, ...]) -> RuleResult | None:
        """How an operation runs on blocks; None if it cannot. Found once for equal operations on equal states."""
        key = op.signature, states
        if key in self.rules:
            return self.rules[key]
        asked = False

        def constant(operand: int, component: int) -> NDArray[Any] | None:
            nonlocal asked
            asked = True  # so the result depends on the values of this operation's operands
            return constant_component(self.graph, self.producers, op.inputs[operand], component)

        result = apply_rule(self.graph, op, states, self.count, constant, self.groups)
        grouped = self.groups is not None and is_grouped(op, states, self.groups)
        if not op.regions and not asked and not grouped:
            self.rules[key] = result
        return result

    def _with_own_totals(self, op: Op, uses: Sequence[_OperandUse]) -> tuple[int, PlacedOp, tuple[State, ...]] | None:
        """In the loop, with totals estimated from the microbatch."""
        own_totals = [v.segment >= 2 and v.outer for v in uses]
        if not any(own_totals) or not self._may_use_own_totals(op):
            return None
        if any(o and a in self.whole_batch_reader for o, a in zip(own_totals, op.inputs, strict=True)):
            return None
        estimated = [_OperandUse(v.state, 1, False, True) if o else v for o, v in zip(own_totals, uses, strict=True)]
        return self._in_loop(op, estimated)

    def _may_use_own_totals(self, op: Op) -> bool:
        """True if the totals that an operation reads may be the microbatch's own."""
        if not self.per_microbatch:
            return False
        names = {*names_of(op), *names_of(_source(self, op).op)}
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.per_microbatch for name in sorted(names))

    def _before_loop(self, op: Op, uses: Sequence[_OperandUse]) -> tuple[int, PlacedOp, tuple[State, ...]] | None:
        """Before the loop, on the whole batch."""
        looped = [a for a, v in zip(op.inputs, uses, strict=True) if v.segment == 1 and isinstance(a, int)]
        if _is_heavy(op) or any(v.segment > 1 for v in uses) or not self._hoist(looped):
            return None
        whole = [_OperandUse(INVARIANT, 0) for _ in uses]
        return 0, _placed(op, whole, None), (INVARIANT,) * len(op.outputs)

    def _after_loop(self, op: Op, uses: Sequence[_OperandUse]) -> tuple[int, PlacedOp, tuple[State, ...]]:
        """After the loop, on blocks joined into whole values."""
        segment = max(v.segment for v in uses)
        whole = [_OperandUse(INVARIANT, 0) for _ in uses]
        return segment + segment % 2, _placed(op, whole, None), (INVARIANT,) * len(op.outputs)

    def _record(self, op: Op, segment: int, placed: PlacedOp, results: tuple[State, ...]) -> None:
        self.places[op.index] = segment, placed
        self.values.update((v, (s, segment)) for v, s in zip(op.outputs, results, strict=True))
        values = [a for a in op.inputs if isinstance(a, int)]
        if _is_heavy(op) or not self.heavy.isdisjoint(values):
            self.heavy.update(op.outputs)
        if segment % 2 == 0:
            whole_batch_reader = [self.whole_batch_reader[v] for v in values if v in self.whole_batch_reader]
            if any(isinstance(self.values[v][0], Split) for v in values):
                whole_batch_reader.append(op.index)
            if whole_batch_reader:
                self.whole_batch_reader.update(dict.fromkeys(op.outputs, min(whole_batch_reader)))
                self.outside_flops += work(self.graph, op) if self.limit < math.inf else 0.0
        if self.outside_flops > self.limit:
            raise OutsideLimitError


def _placed(op: Op, uses: Sequence[_OperandUse], result: RuleResult | None) -> PlacedOp:
    outer = frozenset([i for i, v in enumerate(uses) if v.outer])
    return PlacedOp(op, outer, frozenset([i for i, v in enumerate(uses) if v.own_totals]), result)


def names_of(op: Op) -> tuple[str, ...]:
    """Names by which `per_microbatch` may refer to an operation: its primitive, its source line, its scopes."""
    return op.name, op.source, *re.findall(r"[^()/]+", str(op.name_stack))


def _is_heavy(op: Op) -> bool:
    """True for operations that are never computed on the whole batch before the loop."""
    return op.name in _HEAVY or bool(op.regions) or bool(op.equation.effects)


#: Operations without products or regions that are not cheap, or whose cost is not known.
_OPAQUE = (*KERNEL_CALLS, *KERNELS, "pure_callback", "shard_map", "fft", "sort")
_HEAVY = frozenset((*ALL_PRODUCTS, *_OPAQUE))


# The result


def _result(analyzer: Analyzer) -> Microbatches:
    programs = build_programs(
        Analysis(analyzer.graph, analyzer.flat, analyzer.count, analyzer.values, analyzer.places, analyzer.whole)
    )
    prologue, loops = programs.prologue, programs.loops
    looped = {p.op.index: work(analyzer.graph, p.op) for s in loops for p in s.body}
    outside = [p.op for placed in (prologue, *(s.after for s in loops)) for p in placed if p.op.index not in looped]
    displaced = {op.index: work(analyzer.graph, op) for op in outside if _whole_batch_reader(analyzer, op) >= 0}
    inside, outside_flops = math.fsum(looped.values()), math.fsum(displaced.values())
    repeated = {p.op.index for p in loops[0].body} & {p.op.index for p in loops[-1].body} if len(loops) > 1 else ()
    return Microbatches(
        analyzer.graph,
        analyzer.flat,
        analyzer.count,
        analyzer.batch,
        {**{v: state for v, (state, _) in analyzer.values.items()}, **programs.blocks},
        prologue,
        loops,
        inside / (inside + outside_flops) if outside_flops else 1.0,
        math.fsum(looped[i] for i in sorted(repeated)) / inside if inside else 0.0,
        _reasons(analyzer, displaced),
    )


def _whole_batch_reader(analyzer: Analyzer, op: Op) -> int:
    """Index of the first operation on the way to this one that reads the whole batch; -1 if none does."""
    return min((analyzer.whole_batch_reader[v] for v in op.outputs if v in analyzer.whole_batch_reader), default=-1)


def _reasons(analyzer: Analyzer, displaced: Mapping[int, float]) -> tuple[Reason, ...]:
    """Operations that read the whole batch, by the FLOPs that follow them."""
    by_index = {op.index: op for op in analyzer.flat.ops}
    flops_of = totals((_whole_batch_reader(analyzer, by_index[i]), flops) for i, flops in displaced.items())
    order = sorted((root for root in flops_of if flops_of[root]), key=lambda root: (-flops_of[root], root))
    sources = [(by_index[r], _source(analyzer, by_index[r]), flops_of[r]) for r in order]
    return tuple(Reason(op if source.is_total else source.op, source.op, source.why, n) for op, source, n in sources)


def _source(analyzer: Analyzer, op: Op) -> Blocking:
    """The first operation whose total `op` reads: if possible a sum, of the forward pass. Else the operation without
    a rule.
    """
    stack = [v for v in op.inputs if isinstance(v, int) and analyzer.values[v][1] >= 2]
    seen: set[int] = set()
    blocked: list[Op] = []
    while stack:
        value = stack.pop()
        if value in seen or value not in analyzer.producers:
            continue
        seen.add(value)
        producer = analyzer.producers[value]
        if analyzer.values[value][1] % 2:
            blocked.append(producer)
        elif analyzer.values[value][1]:
            stack.extend(v for v in producer.inputs if isinstance(v, int))
    if not blocked:
        states = tuple(analyzer.use(x).state for x in op.inputs)
        return blocking_op(analyzer.graph, op, states, analyzer.count)
    summed = [o for o in blocked if any(isinstance(analyzer.values[v][0], Partial) for v in o.outputs)]
    return Blocking(min(summed or blocked, key=lambda o: (o.phase != "forward", o.index)), is_total=True)
