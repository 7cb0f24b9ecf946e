"""Compares the collectives of a plan with those of a compiled program, piece by piece and in bytes on the wire.

Pieces are matched as multisets, by (kind, axes, bytes). What is left over may still be the same movement in other
steps: a gather of b bytes over x and y sends as much as one over y and then one over x, in whichever order,

    (nx ny - 1) / (nx ny) b  =  (ny - 1) / ny * b / nx  +  (nx - 1) / nx * b,

and a reduce-scatter likewise, so such chains are matched next.

    exact multiset                   `_cancel`
    chains over several axes         `_cancel_joined`, `_cover`
    volume                           `autopar.ir.collective.wire_bytes`, the ring volume
    what is left over, in words      `differences`
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from autopar.ir.collective import Collective, wire_bytes
from autopar.ir.keyed import grouped

_CHAINABLE = ("all-gather", "reduce-scatter")

_Key = tuple[str, tuple[str, ...], int]  # kind, axes, bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    """The collectives of a plan matched with those of a compiled program.

    Attributes:
        matched: executions per step that agree in kind, axes and bytes.
        joined: gathers and scatters over several axes that agree only as one collective over all of these axes.
        predicted_only: collectives of the plan without a match, with the unmatched executions in `count`.
        emitted_only: collectives of the program without a match.
        predicted_wire_bytes: bytes that a device sends per step according to the plan.
        emitted_wire_bytes: bytes that a device sends per step in the program.
    """

    matched: int
    joined: int
    predicted_only: tuple[Collective, ...]
    emitted_only: tuple[Collective, ...]
    predicted_wire_bytes: float
    emitted_wire_bytes: float

    @property
    def ratio(self) -> float:
        """Emitted over predicted wire bytes: 1 if both are 0, infinite if only the prediction is."""
        if not self.predicted_wire_bytes:
            return math.inf if self.emitted_wire_bytes else 1.0
        return self.emitted_wire_bytes / self.predicted_wire_bytes


def group_size(axes: Iterable[str], axis_sizes: Mapping[str, int]) -> int:
    """Devices in one group over `axes`; part of an axis, "y:(2)4", counts the four devices it names."""
    return math.prod(int(m[1]) if (m := re.search(r":\(\d+\)(\d+)$", a)) else axis_sizes[a] for a in axes)


def group(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Equal pieces merged, counts added, in sorted order; a tag or source stays where all merged pieces share it."""
    groups = grouped((_key(c), c) for c in collectives)
    return tuple(
        Collective(*key, sum(c.count for c in cs), _shared(c.op for c in cs), _shared(c.source for c in cs))
        for key, cs in sorted(groups.items(), key=lambda item: item[0])
    )


def compare(
    predicted: Iterable[Collective],
    emitted: Iterable[Collective],
    axis_sizes: Mapping[str, int],
    *,
    reduce_scatter_as_all_reduce: bool = False,
    ignore_scalars_below: int = 64,
) -> Comparison:
    """Matches two sets of collectives piece by piece and adds up what each puts on the wire.

    Args:
        predicted: of the plan.
        emitted: of the compiled program.
        axis_sizes: mesh axis -> devices along it.
        reduce_scatter_as_all_reduce: count a reduce-scatter as an all-reduce of the same operand, on both sides; XLA on
            CPU emits no reduce-scatter.
        ignore_scalars_below: bytes; smaller pieces (loss, norms) are left out on both sides. One stays where it is the
            counterpart of a larger piece that counts padding.
    """
    sides = [[_as_all_reduce(c) if reduce_scatter_as_all_reduce else c for c in side] for side in (predicted, emitted)]
    sides = _without_scalars(sides[0], sides[1], ignore_scalars_below)
    wires = [sum(c.count * wire_bytes(c.kind, c.bytes, group_size(c.axes, axis_sizes)) for c in side) for side in sides]
    # pieces of the same operation are paired first, so that what is left over names the right ones
    tagged, left, right = _cancel(sides[0], sides[1], lambda c: (_key(c), c.op))
    untagged, left, right = _cancel(left, right, _key)
    joined, left, right = _cancel_joined(left, right, axis_sizes)
    return Comparison(tagged + untagged, joined, tuple(left), tuple(right), wires[0], wires[1])


def _without_scalars(left: list[Collective], right: list[Collective], limit: int) -> list[list[Collective]]:
    """Both sides without pieces below a limit, except where the same operation's piece on the other side is padded.

    That is, at least as large as the limit, and less than twice as large as the small piece.
    """

    def is_padded(c: Collective, other: Sequence[Collective]) -> bool:
        return any((d.kind, d.op) == (c.kind, c.op) and limit <= d.bytes < 2 * c.bytes for d in other)

    return [
        [c for c in side if c.bytes >= limit or (c.op and is_padded(c, other))]
        for side, other in ((left, right), (right, left))
    ]


def _key(c: Collective) -> _Key:
    return c.kind, c.axes, c.bytes


def _shared(names: Iterable[str]) -> str:
    first, *further = dict.fromkeys(names)
    return "" if further else first


def _as_all_reduce(c: Collective) -> Collective:
    return replace(c, kind="all-reduce") if c.kind == "reduce-scatter" else c


# --- exact matches ----------------------------------------------------------------------------------------------------

_Sides = tuple[int, list[Collective], list[Collective]]  # executions matched, what is left of either side


def _cancel(left: list[Collective], right: list[Collective], key: Callable[[Collective], Hashable]) -> _Sides:
    common = _counts(left, key) & _counts(right, key)
    return common.total(), _without(left, common, key), _without(right, common, key)


def _counts(side: Iterable[Collective], key: Callable[[Collective], Hashable]) -> Counter[Hashable]:
    counts: Counter[Hashable] = Counter()
    for c in side:
        counts[key(c)] += c.count
    return counts


def _without(
    side: Iterable[Collective], taken: Mapping[Hashable, int], key: Callable[[Collective], Hashable]
) -> list[Collective]:
    """`side` less `taken` executions of each key, the earliest first."""
    owed, rest = Counter(taken), list[Collective]()
    for c in side:
        gone = min(c.count, owed[key(c)])
        owed[key(c)] -= gone
        rest += [replace(c, count=c.count - gone)] if gone < c.count else []
    return rest


# --- chains -----------------------------------------------------------------------------------------------------------


def _cancel_joined(left: list[Collective], right: list[Collective], axis_sizes: Mapping[str, int]) -> _Sides:
    counts = _counts(left, _key), _counts(right, _key)
    taken: tuple[Counter[Hashable], Counter[Hashable]] = (Counter(), Counter())
    joined = 0
    for goal in _goals([*left, *right], tuple(axis_sizes)):
        while all(covers := [_cover(side, goal, axis_sizes) for side in counts]):
            joined += 1
            for side, total, cover in zip(counts, taken, covers, strict=True):
                side.subtract(cover)
                total.update(cover)
    return joined, _without(left, taken[0], _key), _without(right, taken[1], _key)


def _goals(pieces: list[Collective], mesh_axes: tuple[str, ...]) -> Iterator[_Key]:
    """Every movement over two or more axes that the pieces could be or add up to, the widest first."""
    for kind in _CHAINABLE:
        ours = [c for c in pieces if c.kind == kind]
        used = [axis for axis in mesh_axes if any(axis in c.axes for c in ours)]
        wide = chain.from_iterable(combinations(used, n) for n in range(len(used), 1, -1))
        sizes = sorted({c.bytes for c in ours})
        yield from ((kind, axes, nbytes) for axes in wide for nbytes in sizes)


def _cover(pieces: Mapping[Hashable, int], goal: _Key, axis_sizes: Mapping[str, int]) -> tuple[_Key, ...]:
    """Pieces that one after another do what `goal` does, or none: the widest step has all the bytes."""
    kind, axes, nbytes = goal
    if pieces.get(goal, 0) > 0:
        return (goal,)
    for step in chain.from_iterable(combinations(axes, n) for n in range(1, len(axes))):
        rest = tuple(axis for axis in axes if axis not in step)
        widest = (kind, step, nbytes)
        if pieces.get(widest, 0) > 0:
            remaining = _cover(pieces, (kind, rest, nbytes // group_size(step, axis_sizes)), axis_sizes)
            if remaining:
                return (widest, *remaining)
    return ()


# --- in words ---------------------------------------------------------------------------------------------------------

#: Operations that a line of a report names.
_NAMED = 3


def differences(c: Comparison) -> list[str]:
    """What differs, in words: a line for the pieces of one source line that are equal."""
    lines: list[str] = []
    for title, side in (("predicted but not emitted", c.predicted_only), ("emitted but not predicted", c.emitted_only)):
        alike = grouped(((x.kind, x.axes, x.bytes, x.source), x) for x in side)
        lines += [f"{title}: {_together(pieces)}" for pieces in alike.values()]
    return lines


def _together(pieces: Sequence[Collective]) -> str:
    """Pieces that differ in their operations alone: "3 x all-reduce over x, 1,024 bytes at model.py:7 (op1, op5)"."""
    first, ops = pieces[0], list(dict.fromkeys(x.op for x in pieces if x.op))
    more = f" and {len(ops) - _NAMED} more" if len(ops) > _NAMED else ""
    where = f" at {first.source}" if first.source else ""
    what = f" ({', '.join(ops[:_NAMED])}{more})" if ops else ""
    count = sum(x.count for x in pieces)
    return f"{count} x {first.kind} over {'+'.join(first.axes)}, {first.bytes:,} bytes{where}{what}"
