"""Known deviations of compilers from the plan that depend on facts that only the compiler has.

An exception has a name, which reports print, and changes no bytes on the wire. Each exception removes collectives that
a comparison has left unmatched, and counts them:

    a kind of collective in place of another, with equal axes and bytes   -> _substituted
    a piece of the same operation that counts padding                     -> _padded
    or that runs along other axes                                         -> _among_as_many
    an all-gather of data that is gathered for a reader nearby            -> _drop_shared_gathers
    an all-gather of a value that the plan recomputes in each layout      -> _drop_recomputed
    a move of a value that the plan computes in the wanted layout         -> _drop_constant_moves
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from autopar.ir.collective import Collective
from autopar.plans.comparison import Comparison, group_size
from autopar.verification.dataflow import Context


@dataclass(frozen=True, slots=True)
class Unmatched:
    """The collectives that a comparison could not match, on both sides."""

    predicted: tuple[Collective, ...]
    emitted: tuple[Collective, ...]


Exemption = Callable[[Unmatched, Context, Sequence[Collective]], Unmatched]
Matches = Callable[[Context, Collective, Collective], bool]
"""(context, planned, emitted) -> whether the two collectives do the same work."""


def apply_exceptions(
    platform: str, comparison: Comparison, predicted: Sequence[Collective], context: Context
) -> tuple[Comparison, Mapping[str, int]]:
    """Remove the unmatched collectives that `EXCEPTIONS` explains, and count them per exception.

    Args:
        platform: "cpu", "gpu", "shardy" or "tpu".
        comparison: of the predicted collectives with those that the platform emits.
        predicted: the plan's collectives, lowered for the platform.
        context: what was compiled.
    """
    counts = dict[str, int]()
    unmatched = Unmatched(_merged(comparison.predicted_only), _merged(comparison.emitted_only))
    for name, exempt in EXCEPTIONS.get(platform, {}).items():
        unexplained = exempt(unmatched, context, predicted)
        count = max(
            _total_runs(unmatched.predicted) - _total_runs(unexplained.predicted),
            _total_runs(unmatched.emitted) - _total_runs(unexplained.emitted),
        )
        counts.update({name: count} if count else {})
        unmatched = unexplained
    return replace(comparison, predicted_only=unmatched.predicted, emitted_only=unmatched.emitted), counts


def _merged(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """Equal collectives as one with the sum of their counts: a loop may be unrolled on one side."""
    runs: Counter[Collective] = Counter()
    for c in collectives:
        runs[replace(c, count=1)] += c.count
    return tuple(replace(c, count=count) for c, count in runs.items())


def _total_runs(collectives: tuple[Collective, ...]) -> int:
    return sum(c.count for c in collectives)


def _drop_pairs(matches: Matches, unmatched: Unmatched, context: Context, _: Any) -> Unmatched:
    """Removes planned and emitted collectives that match, pair by pair."""
    predicted_only, emitted_only = list(unmatched.predicted), list(unmatched.emitted)
    for c in unmatched.predicted:
        other = next((o for o in emitted_only if matches(context, c, o)), None)
        if other is not None:
            predicted_only.remove(c)
            emitted_only.remove(other)
    return Unmatched(tuple(predicted_only), tuple(emitted_only))


def _substituted(planned: str, emitted: str) -> Exemption:
    """An exception for one kind planned and another emitted."""
    return partial(_drop_pairs, lambda _, c, o: (c.kind, o.kind) == (planned, emitted) and _size(c) == _size(o))


def _size(c: Collective) -> tuple[tuple[str, ...], int, int]:
    return c.axes, c.bytes, c.count


def _padded(context: Context, planned: Collective, emitted: Collective) -> bool:
    """Whether one side counts the padding of uneven pieces, less than the data, and the other does not."""
    summing = context.reduced_op(planned)
    value = context.values.get(planned.op) if summing is None else summing.outputs[0]
    extents = context.graph.types[value].shape if value is not None else ()
    uneven = any(extent % size for extent in extents for size in context.sizes.values())
    same = _same_operation(planned, emitted) and planned.axes == emitted.axes
    less, more = sorted((planned.bytes, emitted.bytes))
    return uneven and same and less < more < 2 * less


def _among_as_many(context: Context, planned: Collective, emitted: Collective) -> bool:
    """Whether two collectives of one operation run among equally many devices, along other axes or parts of axes."""
    sizes = (group_size(c.axes, context.sizes) for c in (planned, emitted))
    return _same_operation(planned, emitted) and planned.bytes == emitted.bytes and len(set(sizes)) == 1


def _same_operation(planned: Collective, emitted: Collective) -> bool:
    return (planned.kind, planned.op, planned.count) == (emitted.kind, emitted.op, emitted.count)


def _drop_shared_gathers(unmatched: Unmatched, context: Context, predicted: Sequence[Collective]) -> Unmatched:
    """Removes all-gathers of data that an earlier one gathers, up to dimensions of extent 1, as in a reversed kernel.

    XLA's pass schedule-aware-collective-cse merges them if their readers are near in the compiled program.
    """
    shared = Counter(_size(c) for c in _repeated_gathers(predicted, context))
    remaining: list[Collective] = []
    for c in unmatched.predicted:
        shared_already = c.kind == "all-gather" and shared[_size(c)] > 0
        shared.subtract({_size(c): shared_already})
        remaining += [] if shared_already else [c]
    return replace(unmatched, predicted=tuple(remaining))


def _repeated_gathers(predicted: Sequence[Collective], context: Context) -> Iterator[Collective]:
    """All-gathers of data that an earlier one gathers too."""
    seen: set[Hashable] = set()
    for c in predicted:
        value = context.values.get(c.op, -1)
        if c.kind == "all-gather" and value >= 0:
            key = context.gather_key(value, c.op), _size(c)
            if key in seen:
                yield c
            seen.add(key)


def _drop_recomputed(unmatched: Unmatched, context: Context, predicted: Sequence[Collective]) -> Unmatched:
    """Removes all-gathers of a broadcast read in several layouts: XLA merges equal operations before it partitions."""
    remaining = tuple(c for c in unmatched.emitted if c.kind != "all-gather" or c.op not in context.recomputed)
    return replace(unmatched, emitted=remaining)


def _drop_constant_moves(unmatched: Unmatched, context: Context, predicted: Sequence[Collective]) -> Unmatched:
    """Removes moves of values computed from constants alone: in the plan every device computes its own piece."""
    moves = ("all-gather", "all-to-all", "collective-permute")
    remaining = tuple(c for c in unmatched.emitted if c.kind not in moves or c.op not in context.free_ops)
    return replace(unmatched, emitted=remaining)


#: Platform -> name -> exception, in the order in which they apply.
EXCEPTIONS: Mapping[str, Mapping[str, Exemption]] = MappingProxyType(
    {
        # Shardy scatters a sum exactly where one slice follows it; XLA decides by the operation
        # (-> autopar.passes.op_groups.reduction_lowering).
        "shardy": {
            "sum scattered that XLA leaves whole and slices": _substituted("all-reduce", "reduce-scatter"),
            "sum left whole that XLA scatters, its slices being in two places": _substituted(
                "reduce-scatter", "all-reduce"
            ),
            "padding of uneven pieces, which Shardy leaves to XLA": partial(_drop_pairs, _padded),
            "exchange along other axes of as many devices": partial(_drop_pairs, _among_as_many),
            "value made of constants in one layout and moved to another": _drop_constant_moves,
        },
        "tpu": {
            "gather of equal data shared, as the readers are near": _drop_shared_gathers,
            "broadcast made in one layout and gathered for another": _drop_recomputed,
            "sum left whole, its pieces being no whole tiles in libtpu's layout": _substituted(
                "reduce-scatter", "all-reduce"
            ),
            "sum scattered although its pieces have few rows": _substituted("all-reduce", "reduce-scatter"),
            "small gather done as a sum of pieces in buffers of zeros": _substituted("all-gather", "all-reduce"),
        },
    }
)
