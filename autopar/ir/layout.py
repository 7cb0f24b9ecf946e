"""Layouts of values on a mesh, and the collectives that lead from one to another.

A layout gives every mesh axis the dimension it cuts, `REPLICATED`, or `PARTIAL` (each device holds a summand). Several
axes on one dimension cut it in mesh order, the first axis major.

Asked for an arbitrary change of layout, XLA may gather the whole value first, or exchange it among parts of an axis. A
few elementary moves it makes just as asked, so that every change is made of these (h: bytes held before, h': after):

    replicated -> dim d     a local slice, if no more minor axis cuts d                                 -> _slices
    dim c -> replicated     an all-gather to h'; a permute of h before, if a more minor axis stays      -> _gathers
    dim c -> dim d          an all-to-all of h, for the most minor axes of c; then a permute of h,
                            if a more minor axis cuts d                                                 -> _exchanges
    other axes, no coarser  a local slice of one dimension, or none, then a permute of h'               -> _permutes

One move is one sharding constraint. `route` finds the moves with the fewest bytes on the wire, among the layouts that
give every axis its source, its target or nothing, by Dijkstra's algorithm (1959); codegen emits the layouts on the
way, `steps` lists the collectives. Partial sums come first:

    one partial axis -> dim     a reduce-scatter, if no more minor axis cuts it                         -> _reduced
    otherwise                   one joint all-reduce over all of them, the scatters local slices of it  -> _reduced

Bytes are fractions of the whole value and dimensions are only told apart, never compared, so that a recipe depends on
the pattern of source and target alone and one table serves every shape. Measurements: docs/design.md, "Resharding".
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, count, groupby, pairwise, product
from typing import Any

import jax

from autopar.ir.collective import wire_bytes

REPLICATED = -1
PARTIAL = -2

#: One entry per mesh axis: a dimension, REPLICATED or PARTIAL.
Layout = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One communication step: `axes` are mesh axis indices, `fraction` bytes per device over bytes of the value."""

    kind: str
    axes: tuple[int, ...]
    fraction: float


def replicated(axes: int) -> Layout:
    """The layout in which every device holds the whole value."""
    return (REPLICATED,) * axes


def partial_axes(layout: Layout | None) -> list[int]:
    """Mesh axes along which a value in this layout is a partial sum: each is a leading dimension of its array."""
    return [axis for axis, dim in enumerate(layout or ()) if dim == PARTIAL]


def spec(layout: Layout, rank: int, names: Sequence[str]) -> jax.sharding.PartitionSpec:
    """The PartitionSpec of a layout without partial sums; trailing unsharded dimensions are left out."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for name, dim in zip(names, layout, strict=True):
        if dim >= 0:
            dims[dim].append(name)
    entries: list[Any] = [tuple(d) if len(d) > 1 else (d[0] if d else None) for d in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return jax.sharding.PartitionSpec(*entries)


def from_spec(partition: Iterable[Any], names: Sequence[str]) -> Layout:
    """The layout of a PartitionSpec. KeyError on an axis name that the mesh lacks."""
    layout = [REPLICATED] * len(names)
    position = {name: i for i, name in enumerate(names)}
    for dim, entry in enumerate(partition):
        for name in entry if isinstance(entry, tuple) else (entry,) if entry is not None else ():
            layout[position[name]] = dim
    return tuple(layout)


def cuts(layout: Layout, sizes: Sequence[int]) -> Mapping[int, int]:
    """Into how many parts each sharded dimension is cut."""
    found: dict[int, int] = {}
    for dim, size in zip(layout, sizes, strict=True):
        if dim >= 0:
            found[dim] = found.get(dim, 1) * size
    return found


def divides(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """True if every cut dimension splits evenly."""
    return all(shape[dim] % parts == 0 for dim, parts in cuts(layout, sizes).items())


def device_share(layout: Layout | None, shape: Sequence[int], sizes: Sequence[int]) -> float:
    """The share of a value that each device holds, padding included; without a layout all of it."""
    if layout is None:
        return 1.0
    return math.prod(-(-shape[d] // n) / shape[d] for d, n in cuts(layout, sizes).items())


def local_shape(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of one device's piece, padding included."""
    parts = cuts(layout, sizes)
    return tuple(math.ceil(n / parts.get(d, 1)) for d, n in enumerate(shape))


@lru_cache(maxsize=65536)
def steps(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Step, ...] | None:
    """The steps from one layout to another on a mesh of these axis sizes; None if there is no way (into PARTIAL)."""
    if _into_partial(source, target):
        return None
    _, sums, moves = _way(source, target, sizes)
    found = chain(sums, *(move.steps for move in moves))
    # an axis of a single device moves nothing
    real = (replace(step, axes=tuple(axis for axis in step.axes if sizes[axis] > 1)) for step in found)
    return tuple(step for step in real if step.axes)


@lru_cache(maxsize=65536)
def route(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    """The layouts to constrain a value to on its way from source to target, both left out; mostly none.

    The layouts on the way divide every shape that source and target both divide. There is none into PARTIAL.
    """
    if _into_partial(source, target):
        return ()
    reduced, _, moves = _way(source, target, sizes)
    # local slices one after the other are one constraint
    stops = [move.target for move, after in pairwise(moves) if not (move.is_local and after.is_local)]
    path = [source, *_sum_stops(source, target), reduced, *stops, target]
    return tuple(layout for layout, _ in groupby(path))[1:-1]


def _into_partial(source: Layout, target: Layout) -> bool:
    return any(t == PARTIAL and s != PARTIAL for s, t in zip(source, target, strict=True))


def _held(layout: Layout, sizes: Sequence[int]) -> float:
    """Fraction of the value that one device holds."""
    return 1.0 / math.prod(size for dim, size in zip(layout, sizes, strict=True) if dim >= 0)


def _most_cuts(source: Layout, target: Layout, sizes: tuple[int, ...]) -> Mapping[int, int]:
    """Into how many parts each dimension can be cut if all that is known is that source and target divide it."""
    before, after = cuts(source, sizes), cuts(target, sizes)
    return {dim: math.lcm(before.get(dim, 1), after.get(dim, 1)) for dim in {**before, **after}}


def _within(parts: Mapping[int, int], most: Mapping[int, int]) -> bool:
    return all(most.get(dim, 1) % n == 0 for dim, n in parts.items())


def _axes_on(layout: Layout, dim: int) -> tuple[int, ...]:
    """Mesh axes that cut a dimension (or that are REPLICATED), major to minor."""
    return tuple(axis for axis, d in enumerate(layout) if d == dim)


def _put(layout: Layout, axes: Sequence[int], dim: int) -> Layout:
    return tuple(dim if axis in axes else d for axis, d in enumerate(layout))


def _way(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Layout, tuple[Step, ...], tuple[_Move, ...]]:
    """Where the partial sums end, how they are summed, and the moves from there."""
    reduced, sums = _reduced(source, target, sizes)
    moves = _moves(reduced, target, sizes)
    whole = _summed(source, target)
    if any(move.target == whole for move in moves):  # what was scattered is gathered again: not scattered, then
        reduced, sums = _reduced(source, whole, sizes)
        moves = _moves(reduced, target, sizes)
    return reduced, sums, moves


# --- partial sums -----------------------------------------------------------------------------------------------------


def _summed(source: Layout, target: Layout) -> Layout:
    """The source with every sum that ends replicated."""
    return tuple(REPLICATED if s == PARTIAL != t else s for s, t in zip(source, target, strict=True))


def _reduced(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Layout, tuple[Step, ...]]:
    """The layout once the partial sums that end are summed, and the steps that sum them."""
    ending = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s == PARTIAL != t]
    if not ending:
        return source, ()
    if len(ending) == 1 and target[ending[0]] >= 0:
        (axis,) = ending
        scattered = _put(source, ending, target[axis])
        most = _most_cuts(source, target, sizes)
        if target[axis] not in source[axis + 1 :] and _within(cuts(scattered, sizes), most):
            return scattered, (Step("reduce-scatter", (axis,), _held(source, sizes)),)
    # Compilers sum along all axes at once, and scatter the sum over several onto one dimension only.
    return _summed(source, target), (Step("all-reduce", tuple(ending), _held(source, sizes)),)


def _sum_stops(source: Layout, target: Layout) -> tuple[Layout, ...]:
    """Where to stop before a sum is scattered: the whole sum, which compilers turn into a reduce-scatter themselves.

    Without the stop XLA puts idle axes to use in its own way, or sums twice.
    """
    return (_summed(source, target),)


# --- elementary moves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Move:
    """A change of layout that takes exactly these steps.

    wire: bytes per device on the wire for a value of as many bytes as makes them whole.
    """

    target: Layout
    steps: tuple[Step, ...]
    wire: int

    @property
    def is_local(self) -> bool:
        return all(step.kind == "slice" for step in self.steps)


def _move(target: Layout, sizes: tuple[int, ...], *steps: Step) -> _Move:
    whole = math.prod(sizes) ** 2
    sent = (step for step in steps if step.kind != "slice")
    wire = (wire_bytes(step.kind, step.fraction * whole, _count(step.axes, sizes)) for step in sent)
    return _Move(target, steps, sum(map(round, wire)))


@lru_cache(maxsize=65536)
def _of_few_axes(layout: Layout, dims: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[_Move, ...]:
    """The moves that change a group of axes alike, where values have these dimensions."""
    return (*_slices(layout, dims, sizes), *_gathers(layout, sizes), *_exchanges(layout, dims, sizes))


def _slices(layout: Layout, dims: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[_Move]:
    for axis in _axes_on(layout, REPLICATED):
        for dim in (d for d in dims if d not in layout[axis + 1 :]):
            target = _put(layout, (axis,), dim)
            yield _move(target, sizes, Step("slice", (axis,), _held(target, sizes)))


def _gathers(layout: Layout, sizes: tuple[int, ...]) -> Iterator[_Move]:
    for axes, dim in _groups(layout):
        target = _put(layout, axes, REPLICATED)
        held = _held(target, sizes)
        if dim not in target[axes[0] :]:
            yield _move(target, sizes, Step("all-gather", axes, held))
        elif whole := _whole_axes(_major_replicas(target, _count(axes, sizes), sizes), sizes):
            after = _pieces((*_axes_on(target, dim), *whole), sizes)
            moved = _moved(_pieces(_axes_on(layout, dim), sizes), after)
            permute = Step("collective-permute", moved, _held(layout, sizes))
            yield _move(target, sizes, permute, Step("all-gather", whole, held))


def _exchanges(layout: Layout, dims: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[_Move]:
    held = _held(layout, sizes)
    for axes, dim in _groups(layout):
        if dim in _put(layout, axes, REPLICATED)[axes[0] :]:
            continue
        for onto in (d for d in dims if d != dim):
            target = _put(layout, axes, onto)
            arrived = _pieces((*_axes_on(layout, onto), *axes), sizes)
            moved = _moved(arrived, _pieces(_axes_on(target, onto), sizes))
            permute = (Step("collective-permute", moved, held),) if moved else ()
            yield _move(target, sizes, Step("all-to-all", axes, held), *permute)


@lru_cache(maxsize=65536)
def _permute(layout: Layout, target: Layout, sizes: tuple[int, ...]) -> _Move | None:
    """The permute between two layouts, if one is all it takes and something travels; else they are local slices."""
    before, after = cuts(layout, sizes), cuts(target, sizes)
    changed = [dim for dim in {**before, **after} if before.get(dim, 1) != after.get(dim, 1)]
    # two dimensions at once would make the axes depend on which one XLA cuts first
    if target == layout or len(changed) > 1:
        return None
    dim = changed[0] if changed else REPLICATED
    parts, rest = divmod(after.get(dim, 1), before.get(dim, 1))
    refined = () if rest else _refined(layout, dim, parts, sizes)
    moved = _moved(refined, _pieces(_device_order(target), sizes)) if refined else ()
    return _move(target, sizes, Step("collective-permute", moved, _held(target, sizes))) if moved else None


def _groups(layout: Layout) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every set of axes that cut one dimension, with that dimension."""
    for dim in dict.fromkeys(d for d in layout if d >= 0):
        axes = _axes_on(layout, dim)
        yield from ((group, dim) for n in range(1, len(axes) + 1) for group in combinations(axes, n))


def _count(axes: Sequence[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


# --- who holds what ---------------------------------------------------------------------------------------------------

_Pieces = tuple[tuple[int, int], ...]
"""(axis, how many ways it or a part of it cuts), major to minor: the order in which devices number what they hold."""


def _pieces(axes: Sequence[int], sizes: Sequence[int]) -> _Pieces:
    return tuple((axis, sizes[axis]) for axis in axes if sizes[axis] > 1)


def _device_order(layout: Layout) -> tuple[int, ...]:
    """Axes in the order in which they number the shards, then the replicas of each shard."""
    dims = sorted({d for d in layout if d >= 0})
    return tuple(chain.from_iterable(_axes_on(layout, dim) for dim in (*dims, REPLICATED)))


def _major_replicas(layout: Layout, parts: int, sizes: Sequence[int]) -> _Pieces:
    """The replicas that XLA tells apart to cut a dimension further: the most major ones, perhaps part of an axis.

    They stand in for the axes that were meant until the permute of the same move. Empty where they do not divide.
    """
    found: list[tuple[int, int]] = []
    for axis, size in _pieces(_axes_on(layout, REPLICATED), sizes):
        part = math.gcd(parts, size)
        if parts > 1 and part > 1:
            found.append((axis, part))
            parts //= part
        if part < size:
            break
    return tuple(found) if parts == 1 else ()


def _whole_axes(pieces: _Pieces, sizes: Sequence[int]) -> tuple[int, ...]:
    """The axes of these pieces; none if some piece is a part of its axis."""
    return tuple(axis for axis, _ in pieces) if all(size == sizes[axis] for axis, size in pieces) else ()


def _refined(layout: Layout, dim: int, parts: int, sizes: Sequence[int]) -> _Pieces:
    """How devices number what they hold once a dimension is cut into so many parts more; empty where that fails."""
    taken = _major_replicas(layout, parts, sizes)
    if parts > 1 and not taken:
        return ()
    used = dict(taken)
    replicas = _pieces(_axes_on(layout, REPLICATED), sizes)
    left = ((axis, size // used.get(axis, 1)) for axis, size in replicas if used.get(axis) != size)
    dims = sorted({d for d in (*layout, dim) if d >= 0})
    shards = ((*_pieces(_axes_on(layout, d), sizes), *(taken if d == dim else ())) for d in dims)
    return (*chain.from_iterable(shards), *left)


def _moved(before: _Pieces, after: _Pieces) -> tuple[int, ...]:
    """Axes along which data travels from devices that number it one way to devices that number it another way."""
    first, second = _strides(before), _strides(after)
    return tuple(sorted(axis for axis in {**first, **second} if first.get(axis) != second.get(axis)))


def _strides(pieces: _Pieces) -> Mapping[int, tuple[int, int]]:
    """Axis -> (how far apart its neighbours are, its size); one in two parts is told by the size of either."""
    return {axis: (math.prod(n for _, n in pieces[i + 1 :]), size) for i, (axis, size) in enumerate(pieces)}


# --- the cheapest route -----------------------------------------------------------------------------------------------


_Price = tuple[int, int, tuple[tuple[str, tuple[int, ...]], ...]]
"""Wire bytes, number of steps, and their kinds and axes; the smallest wins."""


@lru_cache(maxsize=65536)
def _moves(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[_Move, ...]:
    """The moves with the fewest wire bytes; among those the fewest steps, then major axes first."""
    within, ticket = _region(source, target, sizes), count()
    dims = tuple(dict.fromkeys(d for d in (*source, *target) if d >= 0))
    queue: list[tuple[_Price, int, Layout, tuple[_Move, ...]]] = [((0, 0, ()), next(ticket), source, ())]
    done: set[Layout] = set()
    while queue:
        (wire, length, names), _, layout, path = heapq.heappop(queue)
        if layout == target:
            return path
        if layout in done:
            continue
        done.add(layout)
        permutes = (_permute(layout, other, sizes) for other in within if other not in done)
        for move in chain(_of_few_axes(layout, dims, sizes), permutes):
            if move is not None and move.target in within and move.target not in done:
                name = tuple((step.kind, step.axes) for step in move.steps)
                price = wire + move.wire, length + len(move.steps), (*names, *name)
                heapq.heappush(queue, (price, next(ticket), move.target, (*path, move)))
    raise AssertionError(f"no way from {source} to {target} on {sizes}")  # gathering every axis always is one


def _region(source: Layout, target: Layout, sizes: tuple[int, ...]) -> Mapping[Layout, None]:
    """Where a route may lead: each axis as at either end or idle, and dividing what source and target both divide."""
    ends = list(zip(source, target, strict=True))
    options = ((PARTIAL,) if PARTIAL in pair else dict.fromkeys((*pair, REPLICATED)) for pair in ends)
    most = _most_cuts(source, target, sizes)
    return dict.fromkeys(layout for layout in product(*options) if _within(cuts(layout, sizes), most))
