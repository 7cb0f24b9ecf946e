"""Microbatches without markers: which operations of a step run once per block of the batch.

The batch is cut into m blocks. One pass in program order gives every value a state (see
`autopar.passes.microbatch.states`) and a segment:

    0      before the loop over microbatches: parameters, and the little that is computed from the whole batch
    1      inside the loop
    2      after the loop, when totals are known: the update
    3, 4   a second loop that reads such totals, and the operations after it

An operation is placed in the first segment where its operands are known and it can run      -> _Analyzer.place

    all operands invariant                    where they are known, on whole values
    some operand split                        in a loop, on blocks, by the table of rules             -> _in_loop
    some operand a partial sum                it needs the total: after the loop. Two gradients whose only use is their
                                              sum are added inside the loop, and a scan of blocks carries
                                              a part on                                        -> _adds_parts
    no rule, and operands that are cheap      before the loops, on the whole batch: the count of a mask
                                                                                                  -> _before_loop
    otherwise                                 after the loop, on blocks joined into whole values   -> _after_loop

so that partial sums are combined as early as possible and every step stays correct: f(sum_k x_k) is computed from the
sum. An unsuitable step loses the benefit of microbatches, which is measured:

    loop share = FLOPs in loops / (FLOPs in loops + FLOPs outside on the whole batch)    -> Microbatches.loop_share

If it is below `MIN_LOOP_SHARE`, the split is refused. The error names the operation that reads a total and the
operation of the forward pass that yields the total                                                        -> _reasons

A second loop makes steps exact that need totals of the forward pass in the backward pass, such as balance losses of
experts that are products of batch means, or contrastive losses (gradient caching: Gao et al., "Scaling deep contrastive
learning batch size under memory limited setup", 2021). The first loop then computes those totals only; the second
repeats the operations of the first that it needs. Batch norm would need two more loops per layer and is refused. With
`per_microbatch`, a total that is read inside the loop is estimated from the microbatch itself: m times its own sum, or
its own maximum                                                                         -> _may_use_own_totals
Frameworks that accumulate gradients treat batch statistics in this way. Derivatives that depend on such an estimate
are means over microbatches (see `autopar.passes.microbatch.programs`). What is not differentiated still gets totals
over all microbatches: running means are those of the whole batch, running variances average those within microbatches.

The operations of each program: `autopar.passes.microbatch.programs`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from numpy.typing import NDArray

from autopar.cost_models.flops import work
from autopar.cost_models.kernels import KERNELS
from autopar.errors import ArgumentError, MicrobatchError
from autopar.ir.graph import Atom, Graph, Op, is_zero
from autopar.ir.op_sets import ADDITIONS, ALL_PRODUCTS, KERNEL_CALLS
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.microbatch.constant_indices import constant_component
from autopar.passes.microbatch.equal_values import first_equal
from autopar.passes.microbatch.grouped import Groups, find_groups, is_grouped
from autopar.passes.microbatch.programs import AccumulatedValue, AccumulationLoop, Analysis, PlacedOp, build_programs
from autopar.passes.microbatch.regions import Blocking, FlattenedOps, Reason, apply_rule, blocking_op, flatten
from autopar.passes.microbatch.rules.table import invariant_results
from autopar.passes.microbatch.rules.types import RuleResult
from autopar.passes.microbatch.states import INVARIANT, SUM, ZERO, Grouped, Invariant, Partial, Split, State

#: Least share of the FLOPs that has to run in loops; a split with less is refused.
MIN_LOOP_SHARE = 0.99
#: Limit on values that are computed from the whole batch before the loop: bytes per byte of the batch, plus bytes.
HOISTED_BYTES_PER_BATCH_BYTE = 16.0
# Masks and tables of positions of a small batch are larger than 16 times the batch, and small all the same.
HOISTED_BYTES_FREE = 1 << 16
#: Largest number of arguments, and of reasons, that a refusal names.
MAX_NAMES, MAX_REASONS = 6, 3


@dataclass(frozen=True, slots=True, eq=False)
class Microbatches:
    """A step as programs around loops over microbatches.

    Attributes:
        graph, flat: the step, and its operations with rematerialised bodies inlined.
        count: number of microbatches.
        batch: argument values that are cut, and how.
        states: state of every value inside the loops.
        prologue: operations before the loops, on whole values.
        loops: the loops in order, usually one.
        loop_share: share of the FLOPs (of products, in loops times trip counts) that runs in loops, 0 to 1.
        repeated_share: FLOPs of the first loop that the second repeats, as a share of the FLOPs in loops.
        reasons: why the other FLOPs are outside of the loops, the most FLOPs first.
    """

    graph: Graph
    flat: FlattenedOps
    count: int
    batch: Mapping[int, Split]
    states: Mapping[int, State]
    prologue: tuple[PlacedOp, ...]
    loops: tuple[AccumulationLoop, ...]
    loop_share: float
    repeated_share: float
    reasons: tuple[Reason, ...]

    @property
    def body(self) -> tuple[PlacedOp, ...]:
        """Operations of the last loop."""
        return self.loops[-1].body

    @property
    def epilogue(self) -> tuple[PlacedOp, ...]:
        """Operations after the last loop."""
        return self.loops[-1].after

    @property
    def totals(self) -> tuple[AccumulatedValue, ...]:
        """Values of the last loop that are read outside of it."""
        return self.loops[-1].totals


# How the batch is cut


def split(
    graph: Graph,
    count: int,
    batch: Sequence[int] | Literal["auto"] = "auto",
    *,
    per_microbatch: Sequence[str] = (),
    loops: int = 2,
    shards: int = 1,
    share_accumulators: bool = True,
    min_loop_share: float = MIN_LOOP_SHARE,
    reasons: bool = True,
) -> Microbatches:
    """Split a step into `count` microbatches.

    Args:
        graph: the step.
        count: number of microbatches, at least 1.
        batch: positions of the argument leaves that hold the batch, or "auto"; see `batch_leaves`.
        per_microbatch: globs. A total that is read inside the loop may be the microbatch's own where one of them
            matches the source line, a scope of `jax.named_scope`, or the primitive, of the operation in the forward
            pass that yields the total or of the operation that reads it. "*": all. Where that does not suffice, the
            totals are those of the batch, as without globs.
        loops: largest number of loops over the microbatches, 1 or 2. A second is used only if one does not suffice.
        shards: pieces, in order, in which the batch is distributed over as many devices. Every microbatch then takes
            its part of each piece, so that no example has to move; if the extent is not divisible so, it takes a part
            of the whole.
        share_accumulators: two gradients whose only use is their sum share an accumulator. Where they are computed on
            different devices, as those of tied weights are in a pipeline, that would move one of them in every
            microbatch.
        min_loop_share: least share of the FLOPs that has to run in loops; not required of one microbatch.
        reasons: whether an error gives reasons. That takes as long as splitting a step.

    Raises:
        MicrobatchError: less than that would run in the loops, or the batch is not divisible.
    """
    if count < 1:
        raise ArgumentError(f"the number of microbatches must be at least 1, got {count}")
    leaves = [graph.inputs[i] for i in batch_leaves(graph, count, batch)]
    flat = flatten(graph.ops, graph.outputs, graph.constants)
    groups = find_groups(graph, flat.ops, flat.outputs)
    limit = math.inf if reasons or count == 1 else (1 - min_loop_share) * math.fsum(work(graph, op) for op in flat.ops)
    best: Microbatches | None = None
    exact = tuple((allowed_loops, ()) for allowed_loops in range(1, loops + 1))
    for allowed_loops, own in ((1, tuple(per_microbatch)), *exact) if per_microbatch else exact:
        for outer in _batch_strides(graph, flat, leaves, count, shards):
            batched = {v: Split(0, outer) for v in leaves}
            analyzer = partial(_Analyzer, graph, flat, batched, count, allowed_loops, own, share_accumulators, limit)
            try:
                candidate = _run(analyzer, groups)
                if own and _mixes_totals(candidate):
                    candidate = _run(partial(analyzer, hoists_totals=False), groups)
            except _OutsideLimitError:
                continue
            if candidate.loop_share >= min_loop_share or count == 1:
                return candidate
            if best is None or candidate.loop_share > best.loop_share:
                best = candidate
    if best is None or not reasons:
        raise MicrobatchError(f"the step does not fall into {count} microbatches")

    def helps(*patterns: str) -> bool:
        """Whether the step falls into microbatches with these globs."""
        try:
            split(graph, count, batch, per_microbatch=patterns, loops=1, min_loop_share=min_loop_share, reasons=False)
        except MicrobatchError:
            return False
        return True

    raise MicrobatchError(f"the step does not fall into {count} microbatches: {_refusal(best, per_microbatch, helps)}")


def _run(analyzer: Callable[..., _Analyzer], groups: Groups | None) -> Microbatches:
    """The split in which each block sorts its own rows; where that is not possible, all rows are in one sort."""
    if groups is not None:
        try:
            return analyzer(groups=groups).run()
        except _GroupedOutsideError:
            pass
    return analyzer().run()


def _mixes_totals(divided: Microbatches) -> bool:
    """Whether some totals are the microbatch's own and others, computed before the loop, are those of the batch.

    A loss that divides by the microbatch's count would then have a gradient that divides by the count of the batch.
    """
    before = {v for p in divided.prologue for v in p.op.outputs}
    own = any(p.own_totals for loop in divided.loops for p in loop.body)
    return own and any(isinstance(divided.states.get(v), Partial) for v in before)


def _batch_strides(graph: Graph, flat: FlattenedOps, leaves: Sequence[int], count: int, shards: int) -> Iterator[int]:
    """Values of `Split.outer` for the batch, in the order in which they are tried.

    First the pieces of the batch that devices have, then the rows into which the step reshapes its batch, then the
    pieces of which it takes some, such as halves, then 1: blocks of consecutive examples. With 1 every device's
    examples are in one microbatch, so that examples move between devices; but a step may need that, such as one that
    sorts the tokens of neighbouring examples.
    """
    extents = {graph.types[v].shape[0] for v in leaves}
    by_shard = shards if all(extent % (shards * count) == 0 for extent in extents) else 1
    yield by_shard
    rows = dict.fromkeys(
        graph.types[op.outputs[0]].shape[0]
        for op in flat.ops
        if op.name == "reshape" and op.inputs[0] in leaves and graph.types[op.outputs[0]].rank > 1
    )
    rows.update(dict.fromkeys(n for op in flat.ops for n in _pieces_taken(graph, op, extents)))
    yield from (n for n in rows if n > 1 and all(extent > n and extent % (n * count) == 0 for extent in extents))
    if by_shard > 1:
        yield 1


def _pieces_taken(graph: Graph, op: Op, extents: Set[int]) -> Iterator[int]:
    """The number of equal pieces of as many rows as the batch has, of which an operation takes some."""
    shape = graph.type_of(op.inputs[0]).shape if op.name in ("slice", "split") else ()
    if shape and shape[0] in extents:
        start = op.params["start_indices"][0] if op.name == "slice" else 0
        yield shape[0] // (math.gcd(shape[0], start, *(graph.types[v].shape[0] for v in op.outputs)) or 1)


def _refusal(best: Microbatches, per_microbatch: Sequence[str], helps: Callable[..., bool]) -> str:
    """Why a step cannot be split, and what helps.

    Args:
        best: the split with the largest loop share.
        per_microbatch: as the user gave it.
        helps: whether the step is split with these globs in its place.
    """
    main_reasons = list({str(r): r for r in best.reasons}.values())[:MAX_REASONS]
    reasons = "; ".join(map(str, main_reasons))
    lines = [r.source.source or r.source.name for r in main_reasons if not r.why]
    accept = _advised(tuple(dict.fromkeys((*per_microbatch, *lines))), per_microbatch, helps)
    return (
        f"{1 - best.loop_share:.0%} of its FLOPs need more than one of them: {reasons}. Use one microbatch,{accept} or "
        f"rewrite the operation per example. What is cut is the first dimension of {_batch_names(best)}: if one of "
        "these holds no examples, say with batch_argnums which do."
    )


def _advised(patterns: tuple[str, ...], given: Sequence[str], helps: Callable[..., bool]) -> str:
    """The advice to accept a microbatch's own totals by globs with which the step is split; "" if there are none."""
    if "*" in given or not helps("*"):
        return ""
    exact = f"{patterns!r} or '*' for all" if set(patterns) > {*given} and helps(*patterns) else "'*'"
    return f" accept each microbatch's own totals with per_microbatch={exact},"


def _batch_names(best: Microbatches) -> str:
    """The arguments that are cut, the first few of many."""
    paths = dict(zip(best.graph.inputs, best.graph.input_paths, strict=True))
    names = [repr(paths[v]) for v in best.batch]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


# The analysis


class _OutsideLimitError(Exception):
    """More FLOPs than allowed need several microbatches."""


class _GroupedOutsideError(Exception):
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
class _Analyzer:
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
            raise _GroupedOutsideError
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
        uses = [self.use(a) for a in op.inputs]
        if self._reads_counts(op) and (placed := self._in_loop(op, uses)) is not None:
            return placed
        if any(isinstance(v.state, Partial) for v in uses) and not self._adds_parts(op, uses):
            op = self._read_originals(op, uses)
            uses = [
                self._total_of(op, a, v) if isinstance(v.state, Partial) else v
                for a, v in ((a, self.use(a)) for a in op.inputs)
            ]
        if all(isinstance(v.state, Invariant) for v in uses):
            segment = max((v.segment for v in uses), default=0)
            hoisted = [i for i, a in enumerate(op.inputs) if uses[i].segment == 0 and self.use(a).segment > 0]
            placed = replace(_placed(op, uses, None), hoisted=frozenset(hoisted))
            return segment, placed, invariant_results(op, [v.state for v in uses])
        placed = None if op.equation.effects else self._in_loop(op, uses)
        if placed is None and any(isinstance(v.state, Grouped) for v in uses):
            raise _GroupedOutsideError
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

    def _adds_parts(self, op: Op, uses: Sequence[_OperandUse]) -> bool:
        """True for an operation that reads parts of a total and not the total."""
        return self._shares_accumulator(op, uses) or self._carries_on(op, uses)

    def _carries_on(self, op: Op, uses: Sequence[_OperandUse]) -> bool:
        """True for a scan over examples whose carry begins with the part of a scan before it, and stays a part.

        Layers that are divided into several scans carry an auxiliary loss on so.
        """
        states = tuple([v.state for v in uses])
        reads_blocks = op.name == "scan" and any(isinstance(s, Split) for s in states)
        return reads_blocks and not op.equation.effects and self._rule_result(op, states) is not None

    def _shares_accumulator(self, op: Op, uses: Sequence[_OperandUse]) -> bool:
        """True for the sum of two partial sums that nothing else reads: one accumulator suffices for both."""
        sums = self.share_accumulators and op.name in ADDITIONS
        return sums and all(v.state == SUM and self.reads[a] == 1 for a, v in zip(op.inputs, uses, strict=True))

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
        names = {*_names(op), *_names(_source(self, op).op)}
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
            raise _OutsideLimitError


def _placed(op: Op, uses: Sequence[_OperandUse], result: RuleResult | None) -> PlacedOp:
    outer = frozenset([i for i, v in enumerate(uses) if v.outer])
    return PlacedOp(op, outer, frozenset([i for i, v in enumerate(uses) if v.own_totals]), result)


def _names(op: Op) -> tuple[str, ...]:
    """Names by which `per_microbatch` may refer to an operation: its primitive, its source line, its scopes."""
    return op.name, op.source, *re.findall(r"[^()/]+", str(op.name_stack))


def _is_heavy(op: Op) -> bool:
    """True for operations that are never computed on the whole batch before the loop."""
    return op.name in _HEAVY or bool(op.regions) or bool(op.equation.effects)


#: Operations without products or regions that are not cheap, or whose cost is not known.
_OPAQUE = (*KERNEL_CALLS, *KERNELS, "pure_callback", "shard_map", "fft", "sort")
_HEAVY = frozenset((*ALL_PRODUCTS, *_OPAQUE))


# The result


def _result(analyzer: _Analyzer) -> Microbatches:
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


def _whole_batch_reader(analyzer: _Analyzer, op: Op) -> int:
    """Index of the first operation on the way to this one that reads the whole batch; -1 if none does."""
    return min((analyzer.whole_batch_reader[v] for v in op.outputs if v in analyzer.whole_batch_reader), default=-1)


def _reasons(analyzer: _Analyzer, displaced: Mapping[int, float]) -> tuple[Reason, ...]:
    """Operations that read the whole batch, by the FLOPs that follow them."""
    by_index = {op.index: op for op in analyzer.flat.ops}
    flops_of: dict[int, float] = {}
    for index, flops in displaced.items():
        root = _whole_batch_reader(analyzer, by_index[index])
        flops_of[root] = flops_of.get(root, 0.0) + flops
    order = sorted((root for root in flops_of if flops_of[root]), key=lambda root: (-flops_of[root], root))
    sources = [(by_index[r], _source(analyzer, by_index[r]), flops_of[r]) for r in order]
    return tuple(Reason(op if source.is_total else source.op, source.op, source.why, n) for op, source, n in sources)


def _source(analyzer: _Analyzer, op: Op) -> Blocking:
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
