"""Layouts of values on a mesh, and the collectives that lead from one to another.

A layout gives every mesh axis the dimension that it cuts, `REPLICATED`, or `PARTIAL` (each device has a summand).
Several axes on one dimension cut it in mesh order, the first axis major.

For an arbitrary change of layout, XLA may gather the whole value first, or exchange it among parts of an axis. A few
elementary moves it lowers exactly as requested, so that every change is composed of these (h: bytes per device before
the move, h': after):

    replicated -> dim d     a local slice, if no more minor axis cuts d                                -> _slices
    dim c -> replicated     an all-gather to h'; a permute of h before, if a more minor axis stays     -> _gathers
    dim c -> dim d          an all-to-all of h, for the most minor axes of c; then a permute of h,
                            if a more minor axis cuts d                                                -> _exchanges
    other axes, no coarser  a local slice of one dimension, or none, then a permute of h'              -> _permute

One move is one sharding constraint. `route` finds the moves with the fewest bytes on the wire, among the layouts that
give every axis its source, its target or nothing, by Dijkstra's algorithm (1959). Codegen emits the intermediate
layouts, `steps` lists the collectives. Partial sums are reduced first:

    one partial axis -> dim   a reduce-scatter, if no more minor axis cuts it                          ->
    _reduce_partials otherwise                 one joint all-reduce over all axes; scatters are then local slices
    -> _reduce_partials

Bytes are fractions of the whole value, and dimensions are only distinguished, never compared. A route therefore depends
on the pattern of source and target alone, and one table serves every shape. Measurements:
docs/benchmarks/layout-changes.md.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True)
class ProgramLayouts:
    """Layouts of one program on one mesh.

    Attributes:
        values: bound value -> its layout.
        uses: site -> layout, if it differs from that of the value.
        copies: bound value -> layout of the copy that its readers share, if it differs from that of the value.
        rings: tags of the operations whose devices pass pieces of operands round, instead of gathering them.
    """

    values: Mapping[int, Layout]
    uses: Mapping[str, Layout]
    copies: Mapping[int, Layout]
    rings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One communication step: `axes` are mesh axis indices, `fraction` bytes per device over bytes of the value."""

    kind: str
    axes: tuple[int, ...]
    fraction: float


def replicated(axes: int) -> Layout:
    """The layout in which every device has the whole value."""
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


def longest_dividing(shape: Sequence[int], parts: int, but: Collection[int] = ()) -> int | None:
    """The first longest dimension that falls into so many equal parts, `but` these; None if none does."""
    dims = (d for d, extent in enumerate(shape) if extent and extent % parts == 0 and d not in but)
    return max(dims, key=lambda d: (shape[d], -d), default=None)


def cuts(layout: Layout, sizes: Sequence[int]) -> Mapping[int, int]:
    """Number of parts of each sharded dimension."""
    parts: dict[int, int] = {}
    for dim, size in zip(layout, sizes, strict=True):
        if dim >= 0:
            parts[dim] = parts.get(dim, 1) * size
    return parts


def divides(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """True if every sharded dimension divides evenly."""
    return all(shape[dim] % parts == 0 for dim, parts in cuts(layout, sizes).items())


def even(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> Layout:
    """The layout without the axes that shard a dimension unevenly."""
    kept = list(replicated(len(sizes)))
    for axis, dim in enumerate(layout):
        kept[axis] = dim
        if dim >= 0 and not divides(tuple(kept), shape, sizes):
            kept[axis] = REPLICATED
    return tuple(kept)


def device_share(layout: Layout | None, shape: Sequence[int], sizes: Sequence[int]) -> float:
    """The share of a value that each device has, padding included; 1 without a layout."""
    if layout is None:
        return 1.0
    return math.prod(-(-shape[d] // n) / shape[d] for d, n in cuts(layout, sizes).items())


def local_shape(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of one device's piece, padding included."""
    parts = cuts(layout, sizes)
    return tuple(math.ceil(n / parts.get(d, 1)) for d, n in enumerate(shape))


@lru_cache(maxsize=65536)
def steps(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Step, ...] | None:
    """The steps from one layout to another on a mesh of these axis sizes; None if impossible (into PARTIAL)."""
    if _into_partial(source, target):
        return None
    _, reductions, moves = _plan_moves(_without_single_devices(source, target, sizes), target, sizes)
    moves_and_reductions = chain(reductions, *(move.steps for move in moves))
    # an axis of a single device moves nothing
    real = (replace(step, axes=tuple(axis for axis in step.axes if sizes[axis] > 1)) for step in moves_and_reductions)
    return tuple(step for step in real if step.axes)


@lru_cache(maxsize=65536)
def route(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    """The intermediate layouts to constrain a value to between source and target; mostly none.

    They divide every shape that source and target both divide. There are none into PARTIAL.
    """
    if _into_partial(source, target):
        return ()
    source = _without_single_devices(source, target, sizes)
    reduced, _, moves = _plan_moves(source, target, sizes)
    # consecutive local slices are one constraint
    intermediate = [move.target for move, after in pairwise(moves) if not (move.is_local and after.is_local)]
    path = [source, *_reduction_stops(source, target), reduced, *intermediate, target]
    return tuple(layout for layout, _ in groupby(path))[1:-1]


def _into_partial(source: Layout, target: Layout) -> bool:
    return any(t == PARTIAL and s != PARTIAL for s, t in zip(source, target, strict=True))


def _without_single_devices(source: Layout, target: Layout, sizes: Sequence[int]) -> Layout:
    """An equal layout with the entries of `target` for axes of a single device, which leave a dimension whole."""
    ends = zip(source, target, sizes, strict=True)
    return tuple(t if size == 1 and PARTIAL not in (s, t) else s for s, t, size in ends)


def _shard_fraction(layout: Layout, sizes: Sequence[int]) -> float:
    """Fraction of the value that one device has."""
    return 1.0 / math.prod(size for dim, size in zip(layout, sizes, strict=True) if dim >= 0)


def _max_cuts(source: Layout, target: Layout, sizes: tuple[int, ...]) -> Mapping[int, int]:
    """Largest number of parts of each dimension that is certain to divide it, given that source and target do."""
    before, after = cuts(source, sizes), cuts(target, sizes)
    return {dim: math.lcm(before.get(dim, 1), after.get(dim, 1)) for dim in {**before, **after}}


def _respects(parts: Mapping[int, int], max_cuts: Mapping[int, int]) -> bool:
    """True if every number of parts divides the largest number that is certain to divide the dimension."""
    return all(max_cuts.get(dim, 1) % n == 0 for dim, n in parts.items())


def _axes_on(layout: Layout, dim: int) -> tuple[int, ...]:
    """Mesh axes that cut a dimension (or that are REPLICATED), major to minor."""
    return tuple(axis for axis, d in enumerate(layout) if d == dim)


def _with_axes_on(layout: Layout, axes: Sequence[int], dim: int) -> Layout:
    """The layout with these axes on a dimension (or REPLICATED)."""
    return tuple(dim if axis in axes else d for axis, d in enumerate(layout))


def _plan_moves(
    source: Layout, target: Layout, sizes: tuple[int, ...]
) -> tuple[Layout, tuple[Step, ...], tuple[_Move, ...]]:
    """The layout after reduction of partial sums, the steps that reduce them, and the moves from there."""
    reduced, reductions = _reduce_partials(source, target, sizes)
    moves = _moves(reduced, target, sizes)
    whole = _fully_reduced(source, target)
    if any(move.target == whole for move in moves):  # the scattered sum would be gathered again: an all-reduce instead
        reduced, reductions = _reduce_partials(source, whole, sizes)
        moves = _moves(reduced, target, sizes)
    return reduced, reductions, moves


# --- partial sums -----------------------------------------------------------------------------------------------------


def _fully_reduced(source: Layout, target: Layout) -> Layout:
    """The source, with every partial sum that the target does not have replicated."""
    return tuple(REPLICATED if s == PARTIAL != t else s for s, t in zip(source, target, strict=True))


def _reduce_partials(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Layout, tuple[Step, ...]]:
    """The layout after reduction of the partial sums that the target does not have, and the steps that reduce them."""
    reduced_axes = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s == PARTIAL != t]
    if not reduced_axes:
        return source, ()
    if len(reduced_axes) == 1 and target[reduced_axes[0]] >= 0:
        (axis,) = reduced_axes
        scattered = _with_axes_on(source, reduced_axes, target[axis])
        max_cuts = _max_cuts(source, target, sizes)
        if target[axis] not in source[axis + 1 :] and _respects(cuts(scattered, sizes), max_cuts):
            return scattered, (Step("reduce-scatter", (axis,), _shard_fraction(source, sizes)),)
    # Compilers reduce over all axes at once, and scatter a sum over several axes onto one dimension only.
    return _fully_reduced(source, target), (Step("all-reduce", tuple(reduced_axes), _shard_fraction(source, sizes)),)


def _reduction_stops(source: Layout, target: Layout) -> tuple[Layout, ...]:
    """The intermediate layout before a sum is scattered: the whole sum, which compilers turn into a reduce-scatter
    themselves.

    Without it XLA uses idle axes in its own way, or reduces twice.
    """
    return (_fully_reduced(source, target),)


# --- elementary moves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Move:
    """A change of layout that lowers to exactly these steps.

    Attributes:
        target: the layout after it.
        steps: its steps.
        wire: bytes per device on the wire, for a value of (number of devices)^2 bytes, so that they are whole numbers.
    """

    target: Layout
    steps: tuple[Step, ...]
    wire: int

    @property
    def is_local(self) -> bool:
        return all(step.kind == "slice" for step in self.steps)


def _move(target: Layout, sizes: tuple[int, ...], *steps: Step) -> _Move:
    whole = math.prod(sizes) ** 2
    remote = (step for step in steps if step.kind != "slice")
    wire = (wire_bytes(step.kind, step.fraction * whole, _count(step.axes, sizes)) for step in remote)
    return _Move(target, steps, sum(map(round, wire)))


@lru_cache(maxsize=65536)
def _few_axis_moves(layout: Layout, dims: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[_Move, ...]:
    """The moves that change a group of axes in the same way, for values with these dimensions."""
    return (*_slices(layout, dims, sizes), *_gathers(layout, sizes), *_exchanges(layout, dims, sizes))


def _slices(layout: Layout, dims: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[_Move]:
    """Local slices along one replicated axis."""
    for axis in _axes_on(layout, REPLICATED):
        for dim in (d for d in dims if d not in layout[axis + 1 :]):
            target = _with_axes_on(layout, (axis,), dim)
            yield _move(target, sizes, Step("slice", (axis,), _shard_fraction(target, sizes)))


def _gathers(layout: Layout, sizes: tuple[int, ...]) -> Iterator[_Move]:
    """All-gathers of a group of axes on one dimension."""
    for axes, dim in _groups(layout):
        target = _with_axes_on(layout, axes, REPLICATED)
        fraction = _shard_fraction(target, sizes)
        if dim not in target[axes[0] :]:
            yield _move(target, sizes, Step("all-gather", axes, fraction))
        elif whole := _full_axes(_major_replicas(target, _count(axes, sizes), sizes), sizes):
            after = _axis_parts((*_axes_on(target, dim), *whole), sizes)
            moved_axes = _moved_axes(_axis_parts(_axes_on(layout, dim), sizes), after)
            permute = Step("collective-permute", moved_axes, _shard_fraction(layout, sizes))
            yield _move(target, sizes, permute, Step("all-gather", whole, fraction))


def _exchanges(layout: Layout, dims: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[_Move]:
    """All-to-alls of a group of axes from one dimension to another."""
    fraction = _shard_fraction(layout, sizes)
    for axes, dim in _groups(layout):
        if dim in _with_axes_on(layout, axes, REPLICATED)[axes[0] :]:
            continue
        for onto in (d for d in dims if d != dim):
            target = _with_axes_on(layout, axes, onto)
            arrived = _axis_parts((*_axes_on(layout, onto), *axes), sizes)
            moved_axes = _moved_axes(arrived, _axis_parts(_axes_on(target, onto), sizes))
            permute = (Step("collective-permute", moved_axes, fraction),) if moved_axes else ()
            yield _move(target, sizes, Step("all-to-all", axes, fraction), *permute)


@lru_cache(maxsize=65536)
def _permute(layout: Layout, target: Layout, sizes: tuple[int, ...]) -> _Move | None:
    """The permute between two layouts if one permute suffices and data moves; None also if local slices suffice."""
    before, after = cuts(layout, sizes), cuts(target, sizes)
    changed = [dim for dim in {**before, **after} if before.get(dim, 1) != after.get(dim, 1)]
    # with two dimensions at once the axes would depend on which of them XLA cuts first
    if target == layout or len(changed) > 1:
        return None
    dim = changed[0] if changed else REPLICATED
    parts, rest = divmod(after.get(dim, 1), before.get(dim, 1))
    order = () if rest else _order_after_split(layout, dim, parts, sizes)
    moved_axes = _moved_axes(order, _axis_parts(_device_order(target), sizes)) if order else ()
    return (
        _move(target, sizes, Step("collective-permute", moved_axes, _shard_fraction(target, sizes)))
        if moved_axes
        else None
    )


def _groups(layout: Layout) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every set of axes that cut one dimension, with that dimension."""
    for dim in dict.fromkeys(d for d in layout if d >= 0):
        axes = _axes_on(layout, dim)
        yield from ((group, dim) for n in range(1, len(axes) + 1) for group in combinations(axes, n))


def _count(axes: Sequence[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


# --- which device has which shard -------------------------------------------------------------------------------------

_AxisParts = tuple[tuple[int, int], ...]
"""(axis, number of parts that the axis or a factor of it gives), major to minor: the order of shards over devices."""


def _axis_parts(axes: Sequence[int], sizes: Sequence[int]) -> _AxisParts:
    return tuple((axis, sizes[axis]) for axis in axes if sizes[axis] > 1)


def _device_order(layout: Layout) -> tuple[int, ...]:
    """Axes in the order in which they number the shards, then the replicas of each shard."""
    dims = sorted({d for d in layout if d >= 0})
    return tuple(chain.from_iterable(_axes_on(layout, dim) for dim in (*dims, REPLICATED)))


def _major_replicas(layout: Layout, parts: int, sizes: Sequence[int]) -> _AxisParts:
    """The replicas that XLA uses to cut a dimension further: the most major ones, perhaps a factor of an axis.

    They replace the requested axes until the permute of the same move. Empty if they do not divide.
    """
    replicas: list[tuple[int, int]] = []
    for axis, size in _axis_parts(_axes_on(layout, REPLICATED), sizes):
        part = math.gcd(parts, size)
        if parts > 1 and part > 1:
            replicas.append((axis, part))
            parts //= part
        if part < size:
            break
    return tuple(replicas) if parts == 1 else ()


def _full_axes(pieces: _AxisParts, sizes: Sequence[int]) -> tuple[int, ...]:
    """The axes of these parts; none if some part is a factor of its axis only."""
    return tuple(axis for axis, _ in pieces) if all(size == sizes[axis] for axis, size in pieces) else ()


def _order_after_split(layout: Layout, dim: int, parts: int, sizes: Sequence[int]) -> _AxisParts:
    """The order of shards over devices once a dimension is cut into `parts` more parts; empty if that fails."""
    taken = _major_replicas(layout, parts, sizes)
    if parts > 1 and not taken:
        return ()
    used = dict(taken)
    replicas = _axis_parts(_axes_on(layout, REPLICATED), sizes)
    left = ((axis, size // used.get(axis, 1)) for axis, size in replicas if used.get(axis) != size)
    dims = sorted({d for d in (*layout, dim) if d >= 0})
    shards = ((*_axis_parts(_axes_on(layout, d), sizes), *(taken if d == dim else ())) for d in dims)
    return (*chain.from_iterable(shards), *left)


def _moved_axes(before: _AxisParts, after: _AxisParts) -> tuple[int, ...]:
    """Axes along which data moves from devices in one order of shards to devices in another."""
    first, second = _strides(before), _strides(after)
    return tuple(sorted(axis for axis in {**first, **second} if first.get(axis) != second.get(axis)))


def _strides(pieces: _AxisParts) -> Mapping[int, tuple[int, int]]:
    """Axis -> (stride between its neighbours, its size); an axis in two parts has that of its last part."""
    return {axis: (math.prod(n for _, n in pieces[i + 1 :]), size) for i, (axis, size) in enumerate(pieces)}


# --- the cheapest route -----------------------------------------------------------------------------------------------


_RouteCost = tuple[int, int, tuple[tuple[str, tuple[int, ...]], ...]]
"""Wire bytes, number of steps, and their kinds and axes; the smallest wins."""


@lru_cache(maxsize=65536)
def _moves(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[_Move, ...]:
    """The moves with the fewest wire bytes; among those the fewest steps, then major axes first."""
    allowed, ticket = _allowed_layouts(source, target, sizes), count()
    dims = tuple(dict.fromkeys(d for d in (*source, *target) if d >= 0))
    queue: list[tuple[_RouteCost, int, Layout, tuple[_Move, ...]]] = [((0, 0, ()), next(ticket), source, ())]
    settled: set[Layout] = set()
    while queue:
        (wire, length, names), _, layout, path = heapq.heappop(queue)
        if layout == target:
            return path
        if layout in settled:
            continue
        settled.add(layout)
        permutes = (_permute(layout, other, sizes) for other in allowed if other not in settled)
        for move in chain(_few_axis_moves(layout, dims, sizes), permutes):
            if move is not None and move.target in allowed and move.target not in settled:
                name = tuple((step.kind, step.axes) for step in move.steps)
                cost = wire + move.wire, length + len(move.steps), (*names, *name)
                heapq.heappush(queue, (cost, next(ticket), move.target, (*path, move)))
    raise AssertionError(f"no way from {source} to {target} on {sizes}")  # gathering every axis is always possible


def _allowed_layouts(source: Layout, target: Layout, sizes: tuple[int, ...]) -> Mapping[Layout, None]:
    """Layouts that a route may use: each axis as at either end or idle, dividing what source and target both divide."""
    ends = list(zip(source, target, strict=True))
    options = ((PARTIAL,) if PARTIAL in pair else dict.fromkeys((*pair, REPLICATED)) for pair in ends)
    max_cuts = _max_cuts(source, target, sizes)
    return dict.fromkeys(layout for layout in product(*options) if _respects(cuts(layout, sizes), max_cuts))
