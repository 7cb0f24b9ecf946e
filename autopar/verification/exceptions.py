"""What a compiler is known to do otherwise than planned, where that depends on what only it knows.

An exception has a name that reports print, and no discount: bytes on the wire stay as they are compared. Each takes
collectives that are left over from a comparison away, and counts them:

    a kind of collective in place of another, axes and bytes alike       -> _instead
    a piece of the same operation that counts padding                    -> _padded
    or runs along other axes                                             -> _among_as_many
    a gather of data that is gathered for a reader nearby                -> _gathered_already
    a gather of what the plan computes anew in each layout               -> _computed_once
    a move of what the plan computes in the layout that is wanted        -> _made_in_one_layout
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.plans.comparison import Comparison, group_size
from autopar.plans.plan import Plan
from autopar.verification.dataflow import Context


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of either side of a comparison."""

    predicted: tuple[Collective, ...]
    emitted: tuple[Collective, ...]


Exemption = Callable[[Left, Context, Sequence[Collective]], Left]
Alike = Callable[[Context, Collective, Collective], bool]
"""Whether a planned and an emitted collective are the same work."""


def explained(
    platform: str, found: Comparison, predicted: Sequence[Collective], plan: Plan, graph: Graph
) -> tuple[Comparison, Mapping[str, int]]:
    """A comparison without what `EXCEPTIONS` explains, and how many collectives each exception explains.

    Args:
        platform: "cpu", "gpu", "shardy" or "tpu".
        found: the comparison of what is predicted with what the platform emits.
        predicted: the plan's collectives, converted for the platform.
        plan, graph: what was compiled.
    """
    context, counts = Context(graph, plan), dict[str, int]()
    left = Left(_merged(found.predicted_only), _merged(found.emitted_only))
    for name, exempt in EXCEPTIONS.get(platform, {}).items():
        rest = exempt(left, context, predicted)
        count = max(_runs(left.predicted) - _runs(rest.predicted), _runs(left.emitted) - _runs(rest.emitted))
        counts.update({name: count} if count else {})
        left = rest
    return replace(found, predicted_only=left.predicted, emitted_only=left.emitted), counts


def _merged(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """Equal collectives as one that runs as often: a loop may be unrolled on one side."""
    runs: Counter[Collective] = Counter()
    for c in collectives:
        runs[replace(c, count=1)] += c.count
    return tuple(replace(c, count=count) for c, count in runs.items())


def _runs(collectives: tuple[Collective, ...]) -> int:
    return sum(c.count for c in collectives)


def _paired(alike: Alike, left: Left, context: Context, _: Any) -> Left:
    """What is planned and what is emitted, one by one, where they are alike."""
    mine, theirs = list(left.predicted), list(left.emitted)
    for c in left.predicted:
        other = next((o for o in theirs if alike(context, c, o)), None)
        if other is not None:
            mine.remove(c)
            theirs.remove(other)
    return Left(tuple(mine), tuple(theirs))


def _instead(planned: str, emitted: str) -> Exemption:
    """One kind planned, another emitted."""
    return partial(_paired, lambda _, c, o: (c.kind, o.kind) == (planned, emitted) and _size(c) == _size(o))


def _size(c: Collective) -> tuple[tuple[str, ...], int, int]:
    return c.axes, c.bytes, c.count


def _padded(context: Context, planned: Collective, emitted: Collective) -> bool:
    """Whether one side counts the padding of uneven pieces, less than half of them, and the other does not."""
    summing = context.summing(planned)
    value = context.values.get(planned.op) if summing is None else summing.outputs[0]
    extents = context.graph.types[value].shape if value is not None else ()
    uneven = any(extent % size for extent in extents for size in context.sizes.values())
    same = _of_one_operation(planned, emitted) and planned.axes == emitted.axes
    less, more = sorted((planned.bytes, emitted.bytes))
    return uneven and same and less < more < 2 * less


def _among_as_many(context: Context, planned: Collective, emitted: Collective) -> bool:
    """Whether two collectives run among equally many devices, along different axes or parts of them."""
    sizes = (group_size(c.axes, context.sizes) for c in (planned, emitted))
    return _of_one_operation(planned, emitted) and planned.bytes == emitted.bytes and len(set(sizes)) == 1


def _of_one_operation(planned: Collective, emitted: Collective) -> bool:
    return (planned.kind, planned.op, planned.count) == (emitted.kind, emitted.op, emitted.count)


def _gathered_already(left: Left, context: Context, predicted: Sequence[Collective]) -> Left:
    """Gathers of what an earlier one gathers too, but for dimensions of extent 1: a kernel of 1 x 1 and its reverse.

    XLA's pass schedule-aware-collective-cse shares them where their readers are near in the compiled program.
    """
    shared = Counter(_size(c) for c in _again(predicted, context))
    kept: list[Collective] = []
    for c in left.predicted:
        gone = c.kind == "all-gather" and shared[_size(c)] > 0
        shared.subtract({_size(c): gone})
        kept += [] if gone else [c]
    return replace(left, predicted=tuple(kept))


def _again(predicted: Sequence[Collective], context: Context) -> Iterator[Collective]:
    """Gathers of data that an earlier one gathers too."""
    seen: set[Hashable] = set()
    for c in predicted:
        value = context.values.get(c.op, -1)
        if c.kind == "all-gather" and value >= 0:
            key = context.way(value, c.op), _size(c)
            if key in seen:
                yield c
            seen.add(key)


def _computed_once(left: Left, context: Context, predicted: Sequence[Collective]) -> Left:
    """Gathers of a broadcast that is wanted in several layouts: equal operations are one before XLA partitions them."""
    kept = tuple(c for c in left.emitted if c.kind != "all-gather" or c.op not in context.computed_anew)
    return replace(left, emitted=kept)


def _made_in_one_layout(left: Left, context: Context, predicted: Sequence[Collective]) -> Left:
    """Moves of what is made of constants alone, of which the plan has every device make its own piece."""
    moves = ("all-gather", "all-to-all", "collective-permute")
    kept = tuple(c for c in left.emitted if c.kind not in moves or c.op not in context.free)
    return replace(left, emitted=kept)


#: Platform -> name -> what it takes away, in this order.
EXCEPTIONS: Mapping[str, Mapping[str, Exemption]] = MappingProxyType(
    {
        # Shardy scatters a sum exactly where one slice follows it; XLA goes by the operation
        # (-> autopar.passes.op_groups.reduction_lowering).
        "shardy": {
            "sum scattered that XLA leaves whole and slices": _instead("all-reduce", "reduce-scatter"),
            "sum left whole that XLA scatters, its slices being in two places": _instead(
                "reduce-scatter", "all-reduce"
            ),
            "padding of uneven pieces, which Shardy leaves to XLA": partial(_paired, _padded),
            "exchange along other axes of as many devices": partial(_paired, _among_as_many),
            "value made of constants in one layout and moved to another": _made_in_one_layout,
        },
        "tpu": {
            "gather of equal data shared, as the readers are near": _gathered_already,
            "broadcast made in one layout and gathered for another": _computed_once,
            "sum left whole, its pieces being no whole tiles in libtpu's layout": _instead(
                "reduce-scatter", "all-reduce"
            ),
            "sum scattered although its pieces have few rows": _instead("all-reduce", "reduce-scatter"),
            "small gather done as a sum of pieces in buffers of zeros": _instead("all-gather", "all-reduce"),
        },
    }
)
