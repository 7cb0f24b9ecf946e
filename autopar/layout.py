"""Layouts of values on a mesh, and the collectives that lead from one to another.

A layout gives every mesh axis the dimension it cuts, `REPLICATED`, or `PARTIAL` (each device holds a summand). Several
axes on one dimension cut it in mesh order, the first axis major.

Asked for an arbitrary change of layout, XLA may gather the whole value first, or exchange it among parts of an axis. A
few elementary moves it makes just as asked, so that every change is made of these (h: bytes held before, h': after):

    replicated -> dim d     a local slice; then a permute of h', if a more minor axis cuts d            -> _slices
    dim c -> replicated     an all-gather to h'; a permute of h before, if a more minor axis stays      -> _gathers
    dim c -> dim d          an all-to-all of h, for the most minor axes of c; then a permute of h,
                            if a more minor axis cuts d                                                 -> _exchanges
    same cuts, other axes   a permute of h                                                              -> _permutes

One move is one sharding constraint. `route` finds the moves with the fewest bytes on the wire, among the layouts that
give every axis its source, its target or nothing, by Dijkstra's algorithm (1959); codegen emits the layouts on the
way, `steps` lists the collectives. Partial sums come first:

    partial -> dim d        a reduce-scatter, if no more minor axis cuts d                              -> _reduced
    partial -> replicated   one joint all-reduce for all such axes, after the reduce-scatters           -> _reduced

Bytes are fractions of the whole value and dimensions are only told apart, never compared, so that a recipe depends on
the pattern of source and target alone and one table serves every shape. Measurements: docs/design.md, "Resharding".
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, count, pairwise, product
from typing import Any

import jax

from autopar.collective import wire_bytes

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


def from_spec(partition: Sequence[Any], names: Sequence[str]) -> Layout:
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


def local_shape(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of one device's piece, padding included."""
    parts = cuts(layout, sizes)
    return tuple(math.ceil(n / parts.get(d, 1)) for d, n in enumerate(shape))


@lru_cache(maxsize=65536)
def steps(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Step, ...] | None:
    """The steps from one layout to another on a mesh of these axis sizes; None if there is no way (into PARTIAL)."""
    if _into_partial(source, target):
        return None
    reduced, sums = _reduced(source, target, sizes)
    found = chain(sums, *(move.steps for move in _moves(reduced, target, sizes)))
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
    reduced, _ = _reduced(source, target, sizes)
    moves = _moves(reduced, target, sizes)
    # local slices one after the other are one constraint
    stops = [move.target for move, after in pairwise(moves) if not (move.is_local and after.is_local)]
    return tuple(stops if reduced in (source, target) else [reduced, *stops])


def _into_partial(source: Layout, target: Layout) -> bool:
    return any(t == PARTIAL and s != PARTIAL for s, t in zip(source, target, strict=True))


def _held(layout: Layout, sizes: Sequence[int]) -> float:
    """Fraction of the value that one device holds."""
    return 1.0 / math.prod(size for dim, size in zip(layout, sizes, strict=True) if dim >= 0)


def _axes_on(layout: Layout, dim: int) -> tuple[int, ...]:
    """Mesh axes that cut a dimension (or that are REPLICATED), major to minor."""
    return tuple(axis for axis, d in enumerate(layout) if d == dim)


def _put(layout: Layout, axes: Sequence[int], dim: int) -> Layout:
    return tuple(dim if axis in axes else d for axis, d in enumerate(layout))


# --- partial sums -----------------------------------------------------------------------------------------------------


def _reduced(source: Layout, target: Layout, sizes: Sequence[int]) -> tuple[Layout, tuple[Step, ...]]:
    """The layout once the partial sums that end are summed, and the steps that sum them."""
    out: list[Step] = []
    current = source
    ending = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s == PARTIAL and t != PARTIAL]
    for axis in ending:
        dim = target[axis]
        if dim >= 0 and dim not in current[axis + 1 :]:
            out.append(Step("reduce-scatter", (axis,), _held(current, sizes)))
            current = _put(current, (axis,), dim)
    rest = tuple(axis for axis in ending if current[axis] == PARTIAL)
    if rest:
        out.append(Step("all-reduce", rest, _held(current, sizes)))
    return _put(current, rest, REPLICATED), tuple(out)


# --- elementary moves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Move:
    """A change of layout that takes exactly these steps."""

    target: Layout
    steps: tuple[Step, ...]

    @property
    def is_local(self) -> bool:
        return all(step.kind == "slice" for step in self.steps)


_Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Region:
    """Where a route may lead.

    Attributes:
        sizes: of the mesh axes.
        options: what each axis may be given.
        layouts: layout -> its cuts, for every layout that divides what source and target divide.
    """

    sizes: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]
    layouts: Mapping[Layout, _Cuts]


def _region(source: Layout, target: Layout, sizes: tuple[int, ...]) -> _Region:
    ends = list(zip(source, target, strict=True))
    options = tuple((PARTIAL,) if PARTIAL in pair else tuple(dict.fromkeys((*pair, REPLICATED))) for pair in ends)
    before, after = cuts(source, sizes), cuts(target, sizes)
    allowed = {d: math.lcm(before.get(d, 1), after.get(d, 1)) for d in {**before, **after}}
    found = {layout: cuts(layout, sizes) for layout in product(*options)}
    fits = {layout: c for layout, c in found.items() if all(allowed[d] % parts == 0 for d, parts in c.items())}
    return _Region(sizes, options, {layout: tuple(sorted(c.items())) for layout, c in fits.items()})


def _slices(layout: Layout, region: _Region) -> Iterator[_Move]:
    for axis in _axes_on(layout, REPLICATED):
        for dim in (d for d in region.options[axis] if d >= 0):
            target = _put(layout, (axis,), dim)
            held = _held(target, region.sizes)
            cut = Step("slice", (axis,), held)
            if dim not in layout[axis + 1 :]:
                yield _Move(target, (cut,))
            elif spare := _spare(layout, region.sizes[axis], region.sizes):
                moved = _moved((*_axes_on(layout, dim), *spare), _axes_on(target, dim), region.sizes)
                yield _Move(target, (cut, Step("collective-permute", moved, held)))


def _gathers(layout: Layout, region: _Region) -> Iterator[_Move]:
    for axes, dim in _groups(layout):
        if any(REPLICATED not in region.options[axis] for axis in axes):
            continue
        target = _put(layout, axes, REPLICATED)
        held = _held(target, region.sizes)
        if dim not in target[axes[0] :]:
            yield _Move(target, (Step("all-gather", axes, held),))
        elif spare := _spare(target, math.prod(region.sizes[axis] for axis in axes), region.sizes):
            moved = _moved(_axes_on(layout, dim), (*_axes_on(target, dim), *spare), region.sizes)
            permute = Step("collective-permute", moved, _held(layout, region.sizes))
            yield _Move(target, (permute, Step("all-gather", spare, held)))


def _exchanges(layout: Layout, region: _Region) -> Iterator[_Move]:
    held = _held(layout, region.sizes)
    for axes, dim in _groups(layout):
        if dim in _put(layout, axes, REPLICATED)[axes[0] :]:
            continue
        for onto in (d for d in region.options[axes[0]] if d >= 0 and d != dim):
            if any(onto not in region.options[axis] for axis in axes):
                continue
            target = _put(layout, axes, onto)
            moved = _moved((*_axes_on(layout, onto), *axes), _axes_on(target, onto), region.sizes)
            permute = (Step("collective-permute", moved, held),) if moved else ()
            yield _Move(target, (Step("all-to-all", axes, held), *permute))


def _permutes(layout: Layout, region: _Region) -> Iterator[_Move]:
    cut = region.layouts[layout]
    for target, same in region.layouts.items():
        if same == cut and target != layout:
            moved = _moved(_device_order(layout), _device_order(target), region.sizes)
            yield _Move(target, (Step("collective-permute", moved, _held(layout, region.sizes)),))


_MOVES: tuple[Callable[[Layout, _Region], Iterator[_Move]], ...] = (_slices, _gathers, _exchanges, _permutes)


def _groups(layout: Layout) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every set of axes that cut one dimension, with that dimension."""
    for dim in dict.fromkeys(d for d in layout if d >= 0):
        axes = _axes_on(layout, dim)
        yield from ((group, dim) for n in range(1, len(axes) + 1) for group in combinations(axes, n))


def _spare(layout: Layout, parts: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The axes whose replicas XLA tells apart to cut a dimension in parts: its most major ones; none if only partly.

    They stand in for the axis that was meant until the permute that comes along with the move.
    """
    found: tuple[int, ...] = ()
    for axis in _axes_on(layout, REPLICATED):
        if math.prod(sizes[a] for a in found) < parts:
            found = (*found, axis)
    return found if math.prod(sizes[a] for a in found) == parts else ()


def _device_order(layout: Layout) -> tuple[int, ...]:
    """Axes in the order in which they number the pieces, then the replicas of each piece."""
    dims = sorted({d for d in layout if d >= 0})
    return tuple(chain.from_iterable(_axes_on(layout, dim) for dim in (*dims, REPLICATED)))


def _moved(before: Sequence[int], after: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Axes along which data travels when axes that number pieces in one order number them in another."""
    strides = [
        {axis: math.prod(sizes[a] for a in order[i + 1 :]) for i, axis in enumerate(order)} for order in (before, after)
    ]
    every = sorted({*before, *after})
    return tuple(axis for axis in every if sizes[axis] > 1 and strides[0].get(axis) != strides[1].get(axis))


# --- the cheapest route -----------------------------------------------------------------------------------------------


_Price = tuple[int, int, tuple[tuple[str, tuple[int, ...]], ...]]
"""Wire bytes, number of steps, and their kinds and axes; the smallest wins."""


def _moves(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[_Move, ...]:
    """The moves with the fewest wire bytes; among those the fewest steps, then major axes first."""
    region, ticket = _region(source, target, sizes), count()
    queue: list[tuple[_Price, int, Layout, tuple[_Move, ...]]] = [((0, 0, ()), next(ticket), source, ())]
    done: set[Layout] = set()
    while queue:
        (wire, length, names), _, layout, path = heapq.heappop(queue)
        if layout == target:
            return path
        if layout in done:
            continue
        done.add(layout)
        for move in chain.from_iterable(moves(layout, region) for moves in _MOVES):
            if move.target in region.layouts and move.target not in done:
                name = tuple((step.kind, step.axes) for step in move.steps)
                price = wire + _wire(move, sizes), length + len(move.steps), (*names, *name)
                heapq.heappush(queue, (price, next(ticket), move.target, (*path, move)))
    raise AssertionError(f"no way from {source} to {target} on {sizes}")  # gathering every axis always is one


def _wire(move: _Move, sizes: tuple[int, ...]) -> int:
    """Bytes per device on the wire for a value of as many bytes as makes them whole."""
    whole = math.prod(sizes) ** 2
    groups = [math.prod(sizes[axis] for axis in step.axes) for step in move.steps]
    parts = zip(move.steps, groups, strict=True)
    return sum(round(wire_bytes(s.kind, s.fraction * whole, n)) for s, n in parts if s.kind != "slice")
