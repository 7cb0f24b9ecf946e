"""Microbatches without markers: which operations of a step run once per block of the batch.

The batch is cut into m blocks. One pass in program order gives every value a state (see
`autopar.passes.microbatch.states`) and a stage:

    0      before the loop over microbatches: parameters, and what little is taken from the whole batch
    1      inside it
    2      after it, when totals are known: the update
    3, 4   a second loop that reads such totals, and what comes after that

An operation stands at the first stage where its operands are known and it can run       -> _Analysis.place

    all operands invariant                    where they are known, on whole values
    some operand split                        in a loop, on blocks, by the table of rules
    some operand a partial sum                its total is wanted: after the loop. Two gradients that only meet in a
                                              sum are added inside                                     -> _absorbs
    no rule for operands that come cheaply    before the loops, on the whole batch: the count of a mask -> _hoisted
    otherwise                                 after the loop, on blocks put together again              -> _gathered

so that partial sums are completed at their earliest, and any step stays correct: f(sum_k x_k) is computed from the sum.
What an unsuitable step loses is the point of microbatches, and that is measured:

    share = FLOPs in loops / (FLOPs in loops + FLOPs outside on the whole batch)              -> Microbatches.share

Where it falls below `LEAST_SHARE` the split is refused, with the operation that hands a total back and the one in the
forward pass that the total is of                                                             -> _reasons

A second sweep makes exact what needs totals of the forward pass in the backward pass, such as balance losses of experts
that are products of batch means, or contrastive losses (gradient caching: Gao et al., "Scaling deep contrastive
learning batch size under memory limited setup", 2021). The first loop then computes those totals only; the second
repeats what it needs of it. Batch norm would need two more sweeps per layer and is refused. With `per_microbatch` a
total that is fed back is taken from the microbatch itself: m times its own sum, its own maximum       -> _accepts
That is what frameworks that accumulate gradients do to batch statistics. Results outside the loop still get totals over
all microbatches: running means are those of the whole batch, running variances average those within microbatches.

Which operations each program then holds: `autopar.passes.microbatch.programs`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from numpy.typing import NDArray

from autopar.cost_models.flops import work
from autopar.errors import ArgumentError, MicrobatchError
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.op_sets import PRODUCTS
from autopar.ir.train_state import match_state
from autopar.passes.microbatch.constant_indices import column
from autopar.passes.microbatch.equal_values import first_equal
from autopar.passes.microbatch.programs import Facts, Placed, Sweep, Total, place
from autopar.passes.microbatch.regions import Flat, blocking, decide, flatten, is_zero
from autopar.passes.microbatch.rule_types import Outcome
from autopar.passes.microbatch.states import INVARIANT, SUM, ZERO, Invariant, Partial, Split, State
from autopar.passes.microbatch.table import invariant_results

#: Share of FLOPs in the loop below which a split is refused.
LEAST_SHARE = 0.99
#: What may be computed from the whole batch before the loop, in bytes per byte of the batch, and in bytes besides.
HOISTED_BYTES = 16.0
HOISTED_FREELY = 1 << 16
#: Arguments that a refusal names.
MOST_NAMES = 6


class Reason(NamedTuple):
    """Why FLOPs stand outside of the loops: `op` reads in whole what `source` gives block by block."""

    op: Op
    source: Op
    flops: float

    def __str__(self) -> str:
        at = f" at {self.op.source}" if self.op.source else ""
        if self.source is self.op:
            return f"{self.op.name}{at} combines examples of the whole batch"
        of = f" at {self.source.source}" if self.source.source else ""
        return f"{self.source.name}{of} is over the whole batch, and {self.op.name}{at} hands it back to every example"


@dataclass(frozen=True, slots=True, eq=False)
class Microbatches:
    """A step as programs around loops over microbatches.

    Attributes:
        graph, flat: the step, and its operations with rematerialised bodies laid flat.
        count: number of microbatches.
        batch: argument values that are cut, and how.
        states: state of every value inside the loops.
        prologue: operations before the loops, on whole values.
        sweeps: the loops in order, usually one.
        share: part of the FLOPs (products, loops counted as often as they run) that runs in loops, 0 to 1.
        repeated: FLOPs that run in the first sweep and again in the second, over those in loops.
        reasons: what keeps the rest outside, the most FLOPs first.
    """

    graph: Graph
    flat: Flat
    count: int
    batch: Mapping[int, Split]
    states: Mapping[int, State]
    prologue: tuple[Placed, ...]
    sweeps: tuple[Sweep, ...]
    share: float
    repeated: float
    reasons: tuple[Reason, ...]

    @property
    def loop(self) -> tuple[Placed, ...]:
        """Operations of the last loop."""
        return self.sweeps[-1].loop

    @property
    def epilogue(self) -> tuple[Placed, ...]:
        """Operations after the last loop."""
        return self.sweeps[-1].after

    @property
    def totals(self) -> tuple[Total, ...]:
        """What the last loop hands out."""
        return self.sweeps[-1].totals


# Choosing how to cut


def batch_leaves(graph: Graph, count: int, chosen: Sequence[int] | Literal["auto"] = "auto") -> tuple[int, ...]:
    """Positions of the argument leaves that hold the batch.

    "auto": leaves that are no state, of arguments that have one leading extent throughout (of any argument, if there is
    none such), as far as they have the extent that most of them share; of two such extents, that with more elements.
    Scalars among chosen leaves are the same for all microbatches.

    Raises:
        MicrobatchError: there is none, or the leading extent of one does not divide by `count`.
    """
    if isinstance(chosen, str):
        chosen = _likely_batch(graph)
        if not chosen:
            raise MicrobatchError("no argument holds a batch: all are state or scalars. Name it with batch_argnums.")
    chosen = [i for i in chosen if graph.types[graph.inputs[i]].rank]
    for i in chosen:
        shape = graph.types[graph.inputs[i]].shape
        if shape[0] % count or not shape[0]:
            raise MicrobatchError(
                f"batch argument '{graph.input_paths[i]}' of shape {shape} cannot be cut into {count} microbatches: "
                f"its first dimension has to divide by {count}"
            )
    return tuple(chosen)


def _likely_batch(graph: Graph) -> list[int]:
    state = set(match_state(graph).values())
    shapes = {i: graph.types[v].shape for i, v in enumerate(graph.inputs) if i not in state and graph.types[v].rank}
    arguments: dict[str, list[int]] = {}
    for i in shapes:
        arguments.setdefault(graph.input_paths[i].split("/", 1)[0], []).append(i)
    uniform = [i for leaves in arguments.values() if len({shapes[i][0] for i in leaves}) == 1 for i in leaves]
    fit = uniform or list(shapes)
    leaves, elements = Counter(shapes[i][0] for i in fit), Counter[int]()
    for i in fit:
        elements[shapes[i][0]] += math.prod(shapes[i])
    best = max(leaves, key=lambda n: (leaves[n], elements[n], n), default=0)
    return [i for i in fit if shapes[i][0] == best]


def split(
    graph: Graph,
    count: int,
    batch: Sequence[int] | Literal["auto"] = "auto",
    *,
    per_microbatch: Sequence[str] = (),
    sweeps: int = 2,
    shards: int = 1,
    absorb: bool = True,
    least_share: float = LEAST_SHARE,
    reasons: bool = True,
) -> Microbatches:
    """How a step runs in `count` microbatches.

    Args:
        graph: the step.
        count: number of microbatches, at least 1.
        batch: positions of the argument leaves that hold the batch, or "auto"; see `batch_leaves`.
        per_microbatch: globs; totals that are fed back into the loop may be the microbatch's own where one of them
            matches the source line, a scope of `jax.named_scope`, or the primitive of the operation in the forward pass
            that the total is of, or of the one that hands it back. "*": all.
        sweeps: loops over the microbatches that may be used, 1 or 2. A second is used only where one does not do.
        shards: pieces that the batch lies in, one after another, on as many devices. Every microbatch then takes its
            part of each piece, so that no example has to move; where the batch does not divide so, of the whole.
        absorb: two gradients that only meet in a sum share an accumulator. Where they arise on different devices, as
            those of tied weights do in a pipeline, that would move one of them in every microbatch.
        least_share: share of FLOPs in loops that is asked for; one microbatch needs none.
        reasons: whether an error says what needs more than one microbatch, which takes as long as to find a way.

    Raises:
        MicrobatchError: less than that would run in the loops, or the batch does not divide.
    """
    if count < 1:
        raise ArgumentError(f"the number of microbatches must be at least 1, got {count}")
    leaves = [graph.inputs[i] for i in batch_leaves(graph, count, batch)]
    flat = flatten(graph.ops, graph.outputs, graph.constants)
    most = math.inf if reasons or count == 1 else (1 - least_share) * math.fsum(work(graph, op) for op in flat.ops)
    best: Microbatches | None = None
    for allowed in range(1, sweeps + 1 if not per_microbatch else 2):
        for outer in _strides(graph, flat, leaves, count, shards):
            batched = {v: Split(0, outer) for v in leaves}
            try:
                found = _Analysis(graph, flat, batched, count, allowed, tuple(per_microbatch), absorb, most).run()
            except _TooMuchError:
                continue
            if found.share >= least_share or count == 1:
                return found
            if best is None or found.share > best.share:
                best = found
    if best is None:
        raise MicrobatchError(f"the step does not fall into {count} microbatches")
    raise _refusal(best, per_microbatch)


def _strides(graph: Graph, flat: Flat, leaves: Sequence[int], count: int, shards: int) -> Iterator[int]:
    """Ways to deal examples to microbatches: as they lie, by the rows that a step folds its batch into, in order.

    In order every device's examples are in one microbatch, so that they move; but a step may need that, such as one
    that sorts the tokens of neighbouring examples.
    """
    extents = {graph.types[v].shape[0] for v in leaves}
    apart = shards if all(extent % (shards * count) == 0 for extent in extents) else 1
    yield apart
    found = dict.fromkeys(
        graph.types[op.outputs[0]].shape[0]
        for op in flat.ops
        if op.name == "reshape" and op.inputs[0] in leaves and graph.types[op.outputs[0]].rank > 1
    )
    yield from (n for n in found if n > 1 and all(extent > n and extent % (n * count) == 0 for extent in extents))
    if apart > 1:
        yield 1


def _refusal(found: Microbatches, per_microbatch: Sequence[str]) -> MicrobatchError:
    """`per_microbatch` as it was given: what it covers already is not advised."""
    shown = found.reasons[:3]
    lines = tuple(dict.fromkeys(r.source.source or r.source.name for r in shown))
    reasons = "; ".join(map(str, shown))
    given = all(any(fnmatch.fnmatchcase(line, pattern) for pattern in per_microbatch) for line in lines)
    accept = "" if given else f" accept each microbatch's own totals with per_microbatch={lines!r} or '*' for all,"
    return MicrobatchError(
        f"the step does not fall into {found.count} microbatches: {1 - found.share:.0%} of its FLOPs need more than one"
        f" of them: {reasons}. Use one microbatch,{accept} or rewrite the operation per example. What is cut is the "
        "first dimension of "
        f"{_batch_names(found)}: if one of these holds no examples, say with batch_argnums which do."
    )


def _batch_names(found: Microbatches) -> str:
    """The arguments that are cut, the first few of many."""
    paths = dict(zip(found.graph.inputs, found.graph.input_paths, strict=True))
    names = [repr(paths[v]) for v in found.batch]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


# The analysis


class _TooMuchError(Exception):
    """More FLOPs need several microbatches than may."""


class _View(NamedTuple):
    """An operand as an operation sees it: its state, when it is known, and how it is read."""

    state: State
    stage: int
    outer: bool = True
    own: bool = False


@dataclass(eq=False)
class _Analysis:
    """The growing facts of one pass; local to `split`.

    Attributes:
        facts: state and stage of every value.
        places: index of an operation -> its stage and how it runs there.
        most: FLOPs that may need more than one microbatch; `lost` is how many do so far.
        whole: values of the loop that are known whole before it as well.
        heavy: values that take products, loops or totals to compute.
        originals: recomputed values -> the values that they equal.
        roots: values outside of loops that come from the whole batch -> index of the operation that first read it.
    """

    graph: Graph
    flat: Flat
    batch: Mapping[int, Split]
    count: int
    sweeps: int
    per_microbatch: tuple[str, ...]
    absorb: bool
    most: float = math.inf
    lost: float = 0.0
    facts: dict[int, tuple[State, int]] = field(default_factory=dict)
    places: dict[int, tuple[int, Placed]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    heavy: set[int] = field(default_factory=set)
    roots: dict[int, int] = field(default_factory=dict)
    producers: dict[int, Op] = field(default_factory=dict)
    originals: Mapping[int, int] = field(default_factory=dict)
    reads: Counter[Atom] = field(default_factory=Counter)

    def run(self) -> Microbatches:
        self.facts.update((v, (INVARIANT, 0)) for v in (*self.graph.inputs, *(c for c, _ in self.flat.constants)))
        self.facts.update((v, (state, 1)) for v, state in self.batch.items())
        self.whole.update(self.batch)
        self.producers.update((v, op) for op in self.flat.ops for v in op.outputs)
        self.reads.update(a for op in self.flat.ops for a in op.inputs if isinstance(a, int))
        self.reads.update(a for a in self.flat.outputs if isinstance(a, int))
        self.originals = first_equal(self.flat.ops)
        for op in self.flat.ops:
            stage, placed, results = self.place(op)
            self._record(placed.op, stage, placed, results)
        self.flat = replace(self.flat, ops=tuple(self.places[op.index][1].op for op in self.flat.ops))
        return _result(self)

    # Operands

    def view(self, atom: Atom) -> _View:
        if not isinstance(atom, int):
            return _View(ZERO if is_zero(atom) else INVARIANT, 0)
        state, stage = self.facts[atom]
        return _View(state, stage, stage % 2 == 0)

    def _total(self, op: Op, atom: Atom, view: _View) -> _View:
        """The whole of a value of the loop: before it if it comes cheaply, else after."""
        assert isinstance(atom, int)
        if not _is_heavy(op) and self._hoist([atom]):
            return _View(INVARIANT, 0)
        return _View(INVARIANT, view.stage + 1)

    def _hoist(self, values: Sequence[int]) -> bool:
        """Compute values of the loop before it, on the whole batch, if that is cheap."""
        if any(v in self.heavy or self.facts[v][1] > 1 for v in values):
            return False
        cone: dict[int, None] = {}
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if value in cone or value in self.whole or self.facts[value][1] == 0:
                continue
            producer = self.producers[value]
            cone.update(dict.fromkeys(producer.outputs))  # its other results are then known whole as well
            waiting.extend(a for a in producer.inputs if isinstance(a, int))
        allowed = HOISTED_FREELY + HOISTED_BYTES * sum(self.graph.types[v].nbytes for v in self.batch)
        if sum(self.graph.types[v].nbytes for v in cone) > allowed:
            return False
        self.whole.update(cone)
        return True

    # Placing one operation

    def place(self, op: Op) -> tuple[int, Placed, tuple[State, ...]]:
        """Its stage, how it reads its operands and runs there, and the states of its results."""
        views = [self.view(a) for a in op.inputs]
        if not self._absorbs(op, views):
            op = self._reading_originals(op, views)
            views = [
                self._total(op, a, v) if isinstance(v.state, Partial) else v
                for a, v in ((a, self.view(a)) for a in op.inputs)
            ]
        if all(isinstance(v.state, Invariant) for v in views):
            stage = max((v.stage for v in views), default=0)
            return stage, _placed(op, views, None), invariant_results(op, [v.state for v in views])
        if not op.equation.effects:
            found = self._looped(op, views) or self._with_own_totals(op, views) or self._hoisted(op, views)
            if found is not None:
                return found
        return self._gathered(op, views)

    def _reading_originals(self, op: Op, views: Sequence[_View]) -> Op:
        """The operation with parts whose totals it wants replaced by what they recompute, if that is known earlier."""

        def original(atom: Atom, view: _View) -> Atom:
            found = self.originals.get(atom) if isinstance(atom, int) and isinstance(view.state, Partial) else None
            if found is None or isinstance(self.facts[found][0], Split) or self.facts[found][1] > view.stage:
                return atom
            self.reads.update({found: 1, atom: -1})
            return found

        inputs = tuple(map(original, op.inputs, views))
        return op if inputs == op.inputs else replace(op, inputs=inputs)

    def _absorbs(self, op: Op, views: Sequence[_View]) -> bool:
        """True for a sum of partial sums that nothing else reads: one accumulator does for both."""
        sums = self.absorb and op.name in ("add", "add_any")
        return sums and all(v.state == SUM and self.reads[a] == 1 for a, v in zip(op.inputs, views, strict=True))

    def _looped(self, op: Op, views: Sequence[_View]) -> tuple[int, Placed, tuple[State, ...]] | None:
        """In a loop, on blocks."""
        known = max(v.stage for v in views)
        loop = known if known % 2 else known + 1
        if loop > 2 * self.sweeps - 1:
            return None
        states = tuple(v.state for v in views)
        column_of = partial(self._index, op)
        found = decide(self.graph, op, states, self.count, column_of)
        return found and (loop, _placed(op, views, found), found.results)

    def _index(self, op: Op, operand: int, component: int) -> NDArray[Any] | None:
        """A component of an array of indices, where its values are known."""
        return column(self.graph, self.producers, op.inputs[operand], component)

    def _with_own_totals(self, op: Op, views: Sequence[_View]) -> tuple[int, Placed, tuple[State, ...]] | None:
        """In the loop, with totals estimated from the microbatch."""
        own = [v.stage >= 2 and v.outer for v in views]
        if not any(own) or not self._accepts(op):
            return None
        if any(o and a in self.roots for o, a in zip(own, op.inputs, strict=True)):
            return None
        estimated = [_View(v.state, 1, False, True) if o else v for o, v in zip(own, views, strict=True)]
        return self._looped(op, estimated)

    def _accepts(self, op: Op) -> bool:
        """True if the totals that an operation reads may be the microbatch's own."""
        if not self.per_microbatch:
            return False
        names = {*_names(op), *_names(_source(self, op))}
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.per_microbatch for name in sorted(names))

    def _hoisted(self, op: Op, views: Sequence[_View]) -> tuple[int, Placed, tuple[State, ...]] | None:
        """Before the loop, on the whole batch."""
        looped = [a for a, v in zip(op.inputs, views, strict=True) if v.stage == 1 and isinstance(a, int)]
        if _is_heavy(op) or any(v.stage > 1 for v in views) or not self._hoist(looped):
            return None
        whole = [_View(INVARIANT, 0) for _ in views]
        return 0, _placed(op, whole, None), (INVARIANT,) * len(op.outputs)

    def _gathered(self, op: Op, views: Sequence[_View]) -> tuple[int, Placed, tuple[State, ...]]:
        """After the loop, on blocks put together again."""
        known = max(v.stage for v in views)
        whole = [_View(INVARIANT, 0) for _ in views]
        return known + known % 2, _placed(op, whole, None), (INVARIANT,) * len(op.outputs)

    def _record(self, op: Op, stage: int, placed: Placed, results: tuple[State, ...]) -> None:
        self.places[op.index] = stage, placed
        self.facts.update((v, (s, stage)) for v, s in zip(op.outputs, results, strict=True))
        values = [a for a in op.inputs if isinstance(a, int)]
        if _is_heavy(op) or any(v in self.heavy for v in values):
            self.heavy.update(op.outputs)
        if stage % 2 == 0:
            roots = [self.roots[v] for v in values if v in self.roots]
            if any(isinstance(self.facts[v][0], Split) for v in values):
                roots.append(op.index)
            if roots:
                self.roots.update(dict.fromkeys(op.outputs, min(roots)))
                self.lost += work(self.graph, op) if self.most < math.inf else 0.0
        if self.lost > self.most:
            raise _TooMuchError


def _placed(op: Op, views: Sequence[_View], found: Outcome | None) -> Placed:
    outer = frozenset(i for i, v in enumerate(views) if v.outer)
    return Placed(op, outer, frozenset(i for i, v in enumerate(views) if v.own), found)


def _names(op: Op) -> tuple[str, ...]:
    """What an operation may be called: its primitive, its source line, the scopes that it stands in."""
    return op.name, op.source, *re.findall(r"[^()/]+", str(op.name_stack))


def _is_heavy(op: Op) -> bool:
    return op.name in PRODUCTS or bool(op.regions) or bool(op.equation.effects) or op.name in _OPAQUE


_OPAQUE = ("pallas_call", "custom_call", "ffi_call", "pure_callback", "shard_map", "ragged_dot", "fft", "sort")


# What came out


def _result(a: _Analysis) -> Microbatches:
    found = place(Facts(a.graph, a.flat, a.count, a.facts, a.places, a.whole))
    prologue, sweeps = found.prologue, found.sweeps
    looped = {p.op.index: work(a.graph, p.op) for s in sweeps for p in s.loop}
    outside = [p.op for placed in (prologue, *(s.after for s in sweeps)) for p in placed if p.op.index not in looped]
    displaced = {op.index: work(a.graph, op) for op in outside if _root(a, op) >= 0}
    inside, lost = math.fsum(looped.values()), math.fsum(displaced.values())
    twice = {p.op.index for p in sweeps[0].loop} & {p.op.index for p in sweeps[-1].loop} if len(sweeps) > 1 else ()
    return Microbatches(
        a.graph,
        a.flat,
        a.count,
        a.batch,
        {**{v: state for v, (state, _) in a.facts.items()}, **found.blocks},
        prologue,
        sweeps,
        inside / (inside + lost) if lost else 1.0,
        math.fsum(looped[i] for i in sorted(twice)) / inside if inside else 0.0,
        _reasons(a, displaced),
    )


def _root(a: _Analysis, op: Op) -> int:
    """Index of the operation that first read the whole batch on the way to this one, -1 if none did."""
    return min((a.roots[v] for v in op.outputs if v in a.roots), default=-1)


def _reasons(a: _Analysis, displaced: Mapping[int, float]) -> tuple[Reason, ...]:
    by_index = {op.index: op for op in a.flat.ops}
    weight: dict[int, float] = {}
    for index, amount in displaced.items():
        root = _root(a, by_index[index])
        weight[root] = weight.get(root, 0.0) + amount
    order = sorted((root for root in weight if weight[root]), key=lambda root: (-weight[root], root))
    return tuple(Reason(by_index[r], _source(a, by_index[r]), weight[r]) for r in order)


def _source(a: _Analysis, op: Op) -> Op:
    """The first operation whose total an operation reads, a sum, of the forward pass if possible; else what blocks."""
    waiting = [v for v in op.inputs if isinstance(v, int) and a.facts[v][1] >= 2]
    seen: set[int] = set()
    found: list[Op] = []
    while waiting:
        value = waiting.pop()
        if value in seen or value not in a.producers:
            continue
        seen.add(value)
        producer = a.producers[value]
        if a.facts[value][1] % 2:
            found.append(producer)
        elif a.facts[value][1]:
            waiting.extend(v for v in producer.inputs if isinstance(v, int))
    if not found:
        states = tuple(a.view(x).state for x in op.inputs)
        return blocking(a.graph, op, states, a.count)
    summed = [o for o in found if any(isinstance(a.facts[v][0], Partial) for v in o.outputs)]
    return min(summed or found, key=lambda o: (o.phase != "forward", o.index))
