"""How a step is cut into microbatches, or why it cannot be.

The cuts of the batch are tried in the order of `_batch_strides`, with one loop and then with two. A cut is taken if

    loop share = FLOPs in loops / (FLOPs in loops + FLOPs outside on the whole batch)    -> Microbatches.loop_share

is at least `MIN_LOOP_SHARE`. Otherwise the split is refused, and the error names the operations that need more than one
microbatch, from the cut with the largest share                                                            -> _refusal
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Literal

from autopar.cost_models.flops import work
from autopar.errors import ArgumentError, MicrobatchError
from autopar.ir.graph import Graph, Op
from autopar.passes.microbatch.analysis import Analyzer, GroupedOutsideError, OutsideLimitError, names_of
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.microbatch.grouped import Groups, find_groups
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.regions import FlattenedOps, flatten
from autopar.passes.microbatch.rules import manual_blocks
from autopar.passes.microbatch.states import Partial, Split
from autopar.rules import manual

#: Least share of the FLOPs that has to run in loops; a split with less is refused.
MIN_LOOP_SHARE = 0.99
#: Largest number of arguments, and of reasons, that a refusal names.
MAX_NAMES, MAX_REASONS = 6, 3


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
        ArgumentError: `count` is less than 1, or a glob matches nothing in the step.
    """
    _check(graph, count, per_microbatch)
    leaves = [graph.inputs[i] for i in batch_leaves(graph, count, batch)]
    flat = flatten(graph.ops, graph.outputs, graph.constants)
    groups = find_groups(graph, flat.ops, flat.outputs)
    limit = math.inf if reasons or count == 1 else (1 - min_loop_share) * math.fsum(work(graph, op) for op in flat.ops)
    best: Microbatches | None = None
    # one loop before two: the second repeats operations of the first
    exact = tuple((allowed_loops, ()) for allowed_loops in range(1, loops + 1))
    # with a microbatch's own totals first, as they are asked for
    for allowed_loops, own in ((1, tuple(per_microbatch)), *exact) if per_microbatch else exact:
        for outer in _batch_strides(graph, flat, leaves, count, shards):
            batched = {v: Split(0, outer) for v in leaves}
            analyzer = partial(Analyzer, graph, flat, batched, count, allowed_loops, own, share_accumulators, limit)
            try:
                candidate = _run(analyzer, groups)
                if own and _mixes_totals(candidate):
                    candidate = _run(partial(analyzer, hoists_totals=False), groups)
            except OutsideLimitError:
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


def _check(graph: Graph, count: int, patterns: Sequence[str]) -> None:
    """Raises ArgumentError for less than one microbatch, and for a glob that matches nothing in the step."""
    if count < 1:
        raise ArgumentError(f"the number of microbatches must be at least 1, got {count}")
    if all(pattern == "*" for pattern in patterns):
        return
    names = sorted({name for op in graph.walk() for name in names_of(op) if name})
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, MAX_NAMES, cutoff=0.4)
            nearest = f"; the nearest: {', '.join(map(repr, near))}" if near else ""
            raise ArgumentError(
                f"per_microbatch={pattern!r} matches no source line ('model.py:30'), scope of jax.named_scope or "
                f"primitive of the step{nearest}"
            )


def _run(analyzer: Callable[..., Analyzer], groups: Groups | None) -> Microbatches:
    """The split in which each block sorts its own rows; where that is not possible, all rows are in one sort."""
    if groups is not None:
        try:
            return analyzer(groups=groups).run()
        except GroupedOutsideError:
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

    First the pieces of the batch that devices have, then the rows into which the step reshapes its batch or what it
    computes of it, such as groups of examples that share a statistic. Then the pieces of which it takes some, such as
    halves, and the shards of its `shard_map`s, then 1: blocks of consecutive examples. With 1 every device's examples
    are in one microbatch, so that examples move between devices; but a step may need that, such as one that sorts the
    tokens of neighbouring examples.
    """
    extents = {graph.types[v].shape[0] for v in leaves}
    by_shard = shards if all(extent % (shards * count) == 0 for extent in extents) else 1
    yield by_shard
    rows = dict.fromkeys(
        graph.types[op.outputs[0]].shape[0]
        for op in flat.ops
        if op.name == "reshape"
        and graph.types[op.outputs[0]].rank > 1
        and not extents.isdisjoint(graph.type_of(op.inputs[0]).shape[:1])
    )
    rows.update(dict.fromkeys(n for op in flat.ops for n in _pieces_taken(graph, op, extents)))
    rows.update(dict.fromkeys(n for op in manual.calls(graph) for n in _shards(graph, op, extents)))
    yield from (n for n in rows if n > 1 and all(extent > n and extent % (n * count) == 0 for extent in extents))
    if by_shard > 1:
        yield 1


def _pieces_taken(graph: Graph, op: Op, extents: Set[int]) -> Iterator[int]:
    """The number of equal pieces of as many rows as the batch has, of which an operation takes some."""
    shape = graph.type_of(op.inputs[0]).shape if op.name in ("slice", "split") else ()
    if shape and shape[0] in extents:
        start = op.params["start_indices"][0] if op.name == "slice" else 0
        yield shape[0] // (math.gcd(shape[0], start, *(graph.types[v].shape[0] for v in op.outputs)) or 1)


def _shards(graph: Graph, op: Op, extents: Set[int]) -> Iterator[int]:
    """The numbers of shards into which a `shard_map` cuts as many rows as the batch has."""
    call = manual.call_of(op)
    for atom, spec in zip(op.inputs, call.operands, strict=True):
        if not extents.isdisjoint(graph.type_of(atom).shape[:1]):
            yield manual_blocks.pieces(spec, 0, call.mesh)


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
