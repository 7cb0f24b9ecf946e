"""The rule of a kernel, and its call on parts of its operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.rules.block_pairs import BlockPairs, exchanged
from autopar.rules.notation import Dims, Rule
from autopar.rules.pallas import splash
from autopar.rules.pallas.axes import GridAxis, Queries
from autopar.rules.pallas.places import Params
from autopar.rules.sent import Sent

Shape = tuple[int, ...]


def grid_axes(params: Params, unread: Sequence[int] | None = None) -> tuple[GridAxis, ...]:
    """The axes of a kernel's grid; none if it is known at run time only.

    Args:
        params: of the `pallas_call`.
        unread: results that nothing reads; None: not known.
    """
    return () if params["grid_mapping"].num_dynamic_grid_bounds else splash.grid_axes(params, unread)


def rule(params: Params, operands: Sequence[Shape], results: Sequence[Shape], unread: Sequence[int] = ()) -> Rule:
    """The rule of a kernel: a factor for each grid axis without obstacles; all else needs replication.

    A factor over which the results are sums is reduced. One that is cut in pairs of blocks has half as many shards.
    """
    sizes: list[int] = []
    reduced: list[int] = []
    shapes = [*operands, *results]
    dims: list[list[int]] = [[-1] * len(shape) for shape in shapes]
    axes = [axis for axis in grid_axes(params, unread) if not axis.obstacle and axis.size > 1]
    for factor, axis in enumerate(axes):
        for number, dim in enumerate(axis.dims):
            if dim is not None:
                dims[number][dim] = factor
        queries = axis.queries or Queries(sums=False, pairs=False)
        if queries.sums:
            reduced.append(factor)
        sizes.append(axis.size // 2 if queries.pairs else axis.size)
    for of, shape in zip(dims, shapes, strict=True):
        for d, extent in enumerate(shape):
            if of[d] < 0:
                of[d] = len(sizes)
                sizes.append(extent)
    sides: list[Dims] = [tuple(of) for of in dims]
    count, kept = len(operands), tuple(range(len(axes), len(sizes)))
    sent = tuple(sent for factor, axis in enumerate(axes) for sent in _exchanges(axis, factor))
    return Rule(tuple(sides[:count]), tuple(sides[count:]), tuple(sizes), tuple(reduced), kept, "autopar", sent)


def _exchanges(axis: GridAxis, factor: int) -> Iterator[Sent]:
    """What devices exchange where a factor, which is this axis, is cut in pairs of blocks.

    The gradients of keys and values exchange what those of queries exchange too: compilers merge the two.
    """
    if axis.queries is not None and axis.queries.pairs and not axis.queries.sums:
        yield from exchanged([i for i, dim in enumerate(axis.dims) if dim is not None], factor)


def obstacles(params: Params) -> str:
    """Why no axis of a kernel's grid is cut, in words."""
    if params["grid_mapping"].num_dynamic_grid_bounds:
        return "its grid is known at run time only"
    return _reasons(enumerate(grid_axes(params))) or "its grid has a single point"


def uncut_axes(params: Params, rule: Rule) -> str:
    """Why axes of a kernel's grid along which its rule cuts nothing are not cut, in words; "" if there are none."""
    sides, free = (*rule.operands, *rule.results), {*rule.free}
    cuts = [{sides[i][d] for i, d in enumerate(axis.dims) if d is not None} for axis in grid_axes(params)]
    return _reasons((i, axis) for i, axis in enumerate(grid_axes(params)) if not cuts[i] & free)


def _reasons(axes: Iterable[tuple[int, GridAxis]]) -> str:
    return "; ".join(f"grid axis {i}: {axis.obstacle}" for i, axis in axes if axis.size > 1 and axis.obstacle)


def bind_part(
    equation: Any, results: Sequence[Shape], parts: Sequence[Any], specs: Sequence[PartitionSpec] = ()
) -> list[Any]:
    """Call a kernel on parts of its operands, cut along its factors.

    Args:
        equation: the call on whole operands.
        results: the shapes of the parts of its results.
        parts: of the operands.
        specs: how the operands are cut over the mesh in force, inside `jax.shard_map`.
    """
    axes = grid_axes(equation.params)
    for axis in axes:
        names = _names(axis, specs)
        if names and axis.queries is not None:
            return _bind_queries(equation, results, parts, axes, axis, names)
    return _bind(equation, results, parts, axes)


def _names(axis: GridAxis, specs: Sequence[PartitionSpec]) -> tuple[str, ...]:
    """The mesh axes that cut the operands along a grid axis."""
    dims = zip(specs, axis.dims, strict=False)
    entries = [spec[dim] for spec, dim in dims if dim is not None and dim < len(spec)]
    entry = entries[0] if entries else None
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _bind_queries(
    equation: Any,
    results: Sequence[Shape],
    parts: Sequence[Any],
    axes: Sequence[GridAxis],
    axis: GridAxis,
    names: tuple[str, ...],
) -> list[Any]:
    """Call a kernel of splash attention on a device's positions of queries, which one of its axes has."""
    queries, count, operands = axis.queries or Queries(sums=False, pairs=False), len(parts), [*parts]
    first, dim = next((i, d) for i, d in enumerate(axis.dims) if d is not None)
    mapping = equation.params["grid_mapping"]
    whole = mapping.block_mappings[first - mapping.num_index_operands].array_aval.shape[dim]
    devices = whole // parts[first].shape[dim]
    blocks, pairs = axis.size // devices, BlockPairs(names, devices)
    if queries.pairs:
        half = jnp.arange(blocks // 2)
        own = jnp.concatenate([number * (blocks // 2) + half for number in pairs.numbers])
        operands = [x if d is None else pairs.joined(x, d) for x, d in zip(parts, axis.dims, strict=False)]
    else:
        own = jax.lax.axis_index(names) * blocks + jnp.arange(blocks)
    if tables := mapping.num_index_operands:
        operands[:tables] = splash.local_tables(operands[:tables], own, queries)
    bound = _bind(equation, results, operands, axes)
    if queries.sums:
        return list(jax.lax.psum(bound, names))
    if not queries.pairs:
        return bound
    return [x if d is None else pairs.split(x, d) for x, d in zip(bound, axis.dims[count:], strict=True)]


def _bind(equation: Any, results: Sequence[Shape], parts: Sequence[Any], axes: Sequence[GridAxis]) -> list[Any]:
    params, prefetched = equation.params, equation.params["grid_mapping"].num_index_operands
    if params["grid_mapping"].num_dynamic_grid_bounds:  # never cut
        return list(equation.primitive.bind(*parts, **params))
    changed = _part_params(params, [tuple(part.shape) for part in parts], results, axes)
    # the body and the index maps take tables in their whole shape, of which the runs here read the beginning
    shapes = [reference.aval.shape for reference in params["jaxpr"].invars[:prefetched]]
    tables = [
        jnp.pad(part, [(0, n - m) for n, m in zip(shape, part.shape, strict=True)]) if part.shape != shape else part
        for part, shape in zip(parts[:prefetched], shapes, strict=True)
    ]
    return list(equation.primitive.bind(*tables, *parts[prefetched:], **{**params, **changed}))


def part_params(params: Params, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    """The parameters of a kernel that differ in a call on parts of its operands, cut along its factors.

    Args:
        params: those of the call on whole operands.
        operands, results: the shapes of the parts.
    """
    return _part_params(params, operands, results, grid_axes(params))


def _part_params(
    params: Params, operands: Sequence[Shape], results: Sequence[Shape], axes: Sequence[GridAxis]
) -> dict[str, Any]:
    mapping, avals = params["grid_mapping"], params["out_avals"]
    grid, shapes = list(mapping.grid), [*operands[mapping.num_index_operands :], *results]
    body = params["jaxpr"]
    for i, axis in enumerate(axes):
        # all operands and results are cut alike, along dimensions that no other axis has a part in
        for block, shape, dim in zip(
            mapping.block_mappings, shapes, axis.dims[mapping.num_index_operands :], strict=True
        ):
            if dim is not None and shape[dim] != block.array_aval.shape[dim]:
                grid[i] = axis.size * shape[dim] // block.array_aval.shape[dim]
        if axis.queries is not None and axis.queries.sums:
            body = splash.with_last_row(params, i, grid[i] - 1)
    blocks = tuple(
        block.replace(array_aval=block.array_aval.update(shape=shape))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    changed: dict[str, Any] = {
        "grid_mapping": mapping.replace(grid=tuple(grid), block_mappings=blocks),
        "out_avals": tuple(aval.update(shape=shape) for aval, shape in zip(avals, results, strict=True)),
        "jaxpr": body,
    }
    if params.get("cost_estimate") is not None:
        share = math.prod(grid) / math.prod(mapping.grid)
        changed["cost_estimate"] = _scaled(params["cost_estimate"], share)
    return changed


def _scaled(estimate: Any, share: float) -> Any:
    """A cost estimate of a share of the work."""
    counts = {f.name: getattr(estimate, f.name) for f in fields(estimate)}
    return replace(estimate, **{name: int(n * share) for name, n in counts.items() if isinstance(n, int | float)})
