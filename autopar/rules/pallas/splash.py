"""Positions of queries in JAX's splash attention, cut over devices.

Prefetched tables say which blocks are read, and whether the scores of a block of queries and one of keys are computed.
The kernels `splash_*_fwd*` and `splash_*_dq*` have the grid (heads, blocks of queries, columns), the kernel
`splash_*_dkv*` has (blocks of keys, heads, rows):

                             fwd, dq [heads, block of queries, column]     dkv [heads, row, block of keys]
    data_next                the block of keys                             the block of queries
    block_mask > 0           its scores are computed                       the same
    mask_next                the block of the mask, where masks are stored

Blocks that are computed may be moved together, so that a column is no block of keys, and a row no block of queries. In
fwd and dq a device with some blocks of queries has their rows of the tables. In dkv scratch memory is zero at the first
row, each row adds its share to it, and after the last row it is the result:

    dk[k] = sum over rows r of g(k, queries[data_next[r, k]])          dv likewise

A device computes its part of the sum with tables in which row i is its own block i, which is computed where some row of
the whole tables computes this block                                                                  -> local_tables
The comparison of the row with the last one is with the last one here                                 -> with_last_row

A mask leaves blocks out, most often those of later keys. Devices then compute pairs of blocks, which have the same work
together (`autopar.rules.block_pairs`).

That the results of dkv are such sums, and what its tables say, is not derived from the body. It is known of the kernels
of this name, in jax 0.10.2 and 0.12.0. All else is looked at: what depends on the row, and in which way. That fwd and
dq can be cut is derived.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autopar.rules.pallas.axes import (
    GridAxis,
    Queries,
    covers,
    derived_axes,
    dims_of,
    dims_that_follow,
    obstacle_of_call,
    state_of,
)
from autopar.rules.pallas.places import Params, Places, body_axes, places_of

_NAME = re.compile(r"splash_m[qh]a_(fwd|dq|dkv)")
_ROWS = 1  # the dimension of blocks of queries, or of rows, in the tables


def grid_axes(params: Params, unread: Sequence[int] | None = None) -> tuple[GridAxis, ...]:
    """The axes of a kernel's grid, if it is one of these; otherwise as derived.

    `unread`: results that nothing reads; None: those that JAX's function does not read, scratch memory in jax 0.10.
    """
    kind, places = _NAME.match(params.get("name") or ""), places_of(params)
    if not kind or len(body_axes(params)) != 3:
        return derived_axes(params, places, unread or ())
    scratch = _scratch_results(params, places)
    axes = list(derived_axes(params, places, scratch if unread is None else unread))
    tables = params["grid_mapping"].num_index_operands
    number = body_axes(params)[-1 if kind[1] == "dkv" else 1]
    if unread is None or {*scratch} <= {*unread}:
        if kind[1] == "dkv":
            axes[number] = _axis_of_rows(params, number) or axes[number]
        elif tables and not axes[number].obstacle:
            dims = (*(None for _ in range(tables)), *axes[number].dims[tables:])
            axes[number] = replace(axes[number], dims=dims, queries=_queries(params, number, sums=False))
    return tuple(axes)


def _queries(params: Params, axis: int, *, sums: bool) -> Queries:
    """A mask that leaves blocks out has given the kernel an estimate of its work (`autopar.ir.jaxpr.kernel_work`)."""
    return Queries(sums, pairs=params["cost_estimate"] is not None and params["grid_mapping"].grid[axis] % 2 == 0)


def _scratch_results(params: Params, places: Places) -> list[int]:
    """Results whose block is the same in all runs."""
    blocks = places.blocks[params["grid_mapping"].num_inputs :]
    axes = {*body_axes(params)}
    return [r for r, block in enumerate(blocks) if not any(axes & dim.index.depends_on for dim in block)]


def _axis_of_rows(params: Params, axis: int) -> GridAxis | None:
    """The axis of rows of a dkv kernel, if it can be cut."""
    mapping, count = params["grid_mapping"], params["grid_mapping"].grid[axis]
    tables = range(mapping.num_index_operands)
    places = places_of(params, {0: axis} if tables else {})
    dims = (*(None for _ in tables), *dims_of(params, axis, places)[len(tables) :])
    is_cut = (
        count > 1
        and all(places.tables.get((table, _ROWS)) == axis for table in tables)
        and _operands_follow(params, axis, places)
        and axis not in places.used
        and _compares_with_ends(params, axis)
        and not obstacle_of_call(params, dims)
        and not state_of(params)
    )
    return GridAxis(count, dims, "", _queries(params, axis, sums=True)) if is_cut else None


def _operands_follow(params: Params, axis: int, places: Places) -> bool:
    """Whether blocks of operands are counted by the axis or do not depend on it, and no result depends on it."""
    mapping = params["grid_mapping"]
    counted = [[block[d] for d in dims_that_follow(block, axis)] for block in places.blocks]
    return not any(counted[mapping.num_inputs :]) and all(
        len(of) <= 1 and all(dim.index.axis == axis and covers(dim, mapping.grid[axis]) for dim in of) for of in counted
    )


def _compares_with_ends(params: Params, axis: int) -> bool:
    """Whether the body compares its place on the axis with 0 and the last alone, where `with_last_row` sees it."""
    other = 2 * params["grid_mapping"].grid[axis]
    changed = {**params, "jaxpr": with_last_row(params, axis, other)}
    return places_of(changed).compared.get(axis, frozenset()) <= {0, other}


def with_last_row(params: Params, axis: int, last: int) -> Any:
    """The body in which comparisons of the row with the last one of the whole grid are with `last`."""
    body, number, whole = params["jaxpr"], body_axes(params).index(axis), params["grid_mapping"].grid[axis] - 1
    rows = {e.outvars[0] for e in body.eqns if e.primitive.name == "program_id" and e.params["axis"] == number}

    def changed(atom: Any) -> Any:
        if not isinstance(atom, jex.Literal) or int(atom.val) != whole:
            return atom
        aval: Any = atom.aval
        return jex.Literal(np.asarray(last, aval.dtype)[()], aval)

    def compares(equation: Any) -> bool:
        return equation.primitive.name == "eq" and any(
            not isinstance(a, jex.Literal) and a in rows for a in equation.invars
        )

    return body.replace(eqns=[e.replace(invars=[*map(changed, e.invars)]) if compares(e) else e for e in body.eqns])


def local_tables(tables: Sequence[jax.Array], own: jax.Array, queries: Queries) -> list[jax.Array]:
    """Tables of a device's own blocks of queries, in the shape of the whole ones.

    Args:
        tables: the whole tables [h,R,k]: blocks, whether they are computed, blocks of the mask.
        own: the numbers of the device's blocks of queries.
        queries: of the axis.
    """
    blocks, computed, *masks = tables
    if queries.sums:
        is_row = (computed > 0)[:, :, None] & (blocks[:, :, None].astype(jnp.int32) == own[:, None])  # [h,R,own,k]
        rows = [jnp.where(is_row, table[:, :, None], 0).max(1) for table in (computed, *masks)]
        place = jnp.broadcast_to(jnp.arange(len(own), dtype=blocks.dtype)[:, None], rows[0].shape)
        rows = [place, *rows]
    else:
        rows = [jnp.take(table, own, axis=_ROWS) for table in tables]
    rest = [(0, 0), (0, blocks.shape[_ROWS] - len(own)), (0, 0)]
    return [jnp.pad(table, rest) for table in rows]
