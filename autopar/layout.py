"""Layouts of values on a mesh, and the collectives that lead from one to another.

A layout gives every mesh axis the dimension it cuts, `REPLICATED`, or `PARTIAL` (each device holds a summand). Several
axes on one dimension cut it in mesh order, the first axis major. Getting from `s` to `t` goes in this order, which is
what XLA's partitioner does (docs/design.md, "Resharding"):

    partial -> replicated        all-reduce, all such axes jointly, after the reduce-scatters
    partial -> dim d             reduce-scatter onto d, if the axis is minor to those that already cut d
    replicated -> dim d          a local slice; a permute as well if a more minor axis already cuts d
    dim c -> dim d               all-to-all
    dim c -> replicated          all-gather, axes of one dimension jointly

Every step is priced by the bytes a device holds at that moment; `steps` returns them as fractions of the whole value,
so that a recipe depends on the pattern of `s` and `t` alone and one table serves every shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

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
    if any(t == PARTIAL and s != PARTIAL for s, t in zip(source, target, strict=True)):
        return None
    out: list[Step] = []
    current = list(source)
    _reduce(current, target, sizes, out)
    _slice(current, target, sizes, out)
    _exchange(current, target, sizes, out)
    _gather(current, target, sizes, out)
    return tuple(out)


def _held(current: Sequence[int], sizes: Sequence[int]) -> float:
    """Fraction of the value that one device holds."""
    return 1.0 / math.prod(size for dim, size in zip(current, sizes, strict=True) if dim >= 0)


def _minor_axis_on(current: Sequence[int], dim: int, axis: int) -> bool:
    return any(d == dim for d in current[axis + 1 :])


def _reduce(current: list[int], target: Layout, sizes: Sequence[int], out: list[Step]) -> None:
    ending = [a for a, (s, t) in enumerate(zip(current, target, strict=True)) if s == PARTIAL and t != PARTIAL]
    for axis in ending:
        dim = target[axis]
        if dim >= 0 and not _minor_axis_on(current, dim, axis):
            out.append(Step("reduce-scatter", (axis,), _held(current, sizes)))
            current[axis] = dim
    rest = tuple(a for a in ending if current[a] == PARTIAL)
    if rest:
        out.append(Step("all-reduce", rest, _held(current, sizes)))
        for axis in rest:
            current[axis] = REPLICATED


def _slice(current: list[int], target: Layout, sizes: Sequence[int], out: list[Step]) -> None:
    for axis, dim in enumerate(target):
        if current[axis] == REPLICATED and dim >= 0:
            current[axis] = dim
            out.append(Step("slice", (axis,), _held(current, sizes)))
            if _minor_axis_on(current, dim, axis):
                out.append(Step("collective-permute", (axis,), _held(current, sizes)))


def _exchange(current: list[int], target: Layout, sizes: Sequence[int], out: list[Step]) -> None:
    for axis, dim in enumerate(target):
        held = current[axis]
        if held >= 0 and dim >= 0 and held != dim:
            out.append(Step("all-to-all", (axis,), _held(current, sizes)))
            if _minor_axis_on(current, held, axis) or _minor_axis_on(current, dim, axis):
                out.append(Step("collective-permute", (axis,), _held(current, sizes)))
            current[axis] = dim


def _gather(current: list[int], target: Layout, sizes: Sequence[int], out: list[Step]) -> None:
    for dim in sorted({d for d, t in zip(current, target, strict=True) if d >= 0 and t == REPLICATED}):
        axes = tuple(a for a, d in enumerate(current) if d == dim and target[a] == REPLICATED)
        if any(current[b] == dim and b not in axes for b in range(min(axes) + 1, len(current))):
            out.append(Step("collective-permute", axes, _held(current, sizes)))
        for axis in axes:
            current[axis] = REPLICATED
        out.append(Step("all-gather", axes, _held(current, sizes)))
