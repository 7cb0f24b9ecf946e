"""Gathers and scatters on blocks.

    batch dimensions of the indices      split with them                                       -> _gather_rows
    windows that are taken whole         split with the operand
    rows of the indices                  a gather's result is split; a scatter-add's, onto zeros, is a partial sum
    rows that are known to point into    split with the operand, their index taken relative to the block: `x[arange(n),
    their own block                      labels]` and its transpose                            -> _own_block

Parts of a whole go through as `autopar.passes.microbatch.table` says. Dimension numbers are those of
`jax.lax.GatherDimensionNumbers` and `jax.lax.ScatterDimensionNumbers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.passes.microbatch.rule_types import Case, Outcome, together
from autopar.passes.microbatch.states import INVARIANT, SUM, ZERO, Invariant, Kind, Split, State, divided, fits


def gather(case: Case) -> Outcome | None:
    operand, indices = case.states
    if isinstance(indices, Split):
        return _gather_rows(case, operand, indices)
    assert isinstance(operand, Split)
    numbers, dim = case.params["dimension_numbers"], operand.dim
    if dim in numbers.operand_batching_dims:
        row = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        result = Split(_batch_dims(case)[row], operand.outer)
        return Outcome((result,), {1: Split(row, operand.outer)})
    sizes = case.params["slice_sizes"]
    if sizes[dim] != case.operands[0][dim] or not _starts_at_zero(case, dim):
        return None
    windows = [d for d in range(len(sizes)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    if dim not in windows:
        return None
    result = Split(numbers.offset_dims[windows.index(dim)], operand.outer)
    return Outcome((result,), params={"slice_sizes": divided(sizes, dim, case.count)})


def fill_is_lost_in_sums(case: Case, kind: Kind) -> bool:
    """True if as many fill values as there are parts combine to one: zero, nan and infinities in a sum."""
    if kind != "sum" or case.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return True
    fill = case.params["fill_value"]
    if fill is None:  # nan, or of integers the least or largest
        return bool(jnp.issubdtype(case.result_dtypes[0], jnp.inexact))
    return bool(fill == 0 or not np.isfinite(fill))


def _starts_at_zero(case: Case, dim: int) -> bool:
    """A window as long as the dimension starts at its begin, unless starts out of bounds fill it."""
    modes = (jax.lax.GatherScatterMode.CLIP, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    return dim not in case.params["dimension_numbers"].start_index_map or case.params["mode"] in modes


def _batch_dims(case: Case) -> list[int]:
    """Dimensions of a gather's result that come from its indices."""
    offset = case.params["dimension_numbers"].offset_dims
    return [d for d in range(len(case.results[0])) if d not in offset]


def _gather_rows(case: Case, operand: State, indices: Split) -> Outcome | None:
    numbers, dim = case.params["dimension_numbers"], indices.dim
    if dim == len(case.operands[1]) - 1:
        return None
    result = Split(_batch_dims(case)[dim], indices.outer)
    if dim in numbers.start_indices_batching_dims:
        partner = numbers.operand_batching_dims[numbers.start_indices_batching_dims.index(dim)]
        return together(result, operand, Split(partner, indices.outer), 0)
    if isinstance(operand, Invariant):
        return Outcome((result,))
    assert isinstance(operand, Split)
    columns = _own_block(case, operand, indices, numbers.start_index_map, numbers.collapsed_slice_dims)
    return None if columns is None else Outcome((result,), columns=columns)


def _own_block(
    case: Case, operand: Split, indices: Split, index_map: Sequence[int], single: Sequence[int]
) -> dict[int, tuple[int, NDArray[Any]]] | None:
    """Local values of the index into a split dimension, if block k of the indices points into block k only.

    So x[arange(n), labels] does: its first index is known, and on every block the same once the offset is taken off.
    """
    if operand.dim not in index_map or operand.dim not in single:
        return None
    component = tuple(index_map).index(operand.dim)
    known = case.column(1, component)
    if known is None or not known.size:
        return None
    extent, n = case.operands[0][operand.dim], case.count
    inner = extent // operand.outer // n
    outside, rest = np.divmod(known, inner * n)
    block, inside = np.divmod(rest, inner)
    blocks = [_block(x, indices, n) for x in (block, outside * inner + inside)]
    home = np.arange(n).reshape(-1, *[1] * (blocks[0].ndim - 1))
    if known.min() < 0 or known.max() >= extent or (blocks[0] != home).any() or (blocks[1] != blocks[1][:1]).any():
        return None
    return {1: (component, blocks[1][0])}


def _block(array: NDArray[Any], state: Split, count: int) -> NDArray[Any]:
    """All blocks of an array, stacked in front."""
    shape, d = array.shape, state.dim
    inner = shape[d] // state.outer // count
    parts = array.reshape(*shape[:d], state.outer, count, inner, *shape[d + 1 :])
    return np.moveaxis(parts, d + 1, 0).reshape(count, *shape[:d], state.outer * inner, *shape[d + 1 :])


def scatter(case: Case) -> Outcome | None:
    operand, indices, updates = case.states
    numbers = case.params["dimension_numbers"]
    rows = [d for d in range(len(case.operands[2])) if d not in numbers.update_window_dims]
    if isinstance(indices, Split):
        return _scatter_rows(case, indices, rows)
    if isinstance(updates, Split) and updates.dim in rows:
        return _scatter_rows(case, Split(rows.index(updates.dim), updates.outer), rows)
    return _scatter_windows(case, operand, updates)


def _scatter_rows(case: Case, indices: Split, rows: Sequence[int]) -> Outcome | None:
    """Scattering the rows of each block: onto batch dimensions, its own block, or as a part of a sum."""
    numbers, dim, outer = case.params["dimension_numbers"], indices.dim, indices.outer
    operand, _, updates = case.states
    if dim == len(case.operands[1]) - 1:
        return None
    wanted = Split(rows[dim], outer)
    if not isinstance(updates, Invariant) and updates != wanted:
        return None
    cuts = {i: s for i, s in ((1, indices), (2, wanted)) if isinstance(case.states[i], Invariant)}
    if dim in numbers.scatter_indices_batching_dims:
        target = Split(numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(dim)], outer)
        found = together(target, operand, target, 0)
        return found and Outcome(found.results, {**cuts, **found.cuts})
    aligned = _scatter_own_block(case, indices)
    if aligned is not None:
        target, columns = aligned
        found = together(target, operand, target, 0)
        return found and Outcome(found.results, {**cuts, **found.cuts}, columns=columns)
    summed = case.op.name == "scatter-add" and operand == ZERO
    return Outcome((SUM,), cuts) if summed else None


def _scatter_own_block(case: Case, indices: Split) -> tuple[Split, dict[int, tuple[int, NDArray[Any]]]] | None:
    """The dimension that the rows of each block scatter onto their own block of, and the local indices."""
    numbers = case.params["dimension_numbers"]
    for dim in numbers.scatter_dims_to_operand_dims:
        for outer in dict.fromkeys((indices.outer, 1)):
            target = Split(dim, outer)
            if dim in numbers.inserted_window_dims and fits(case.operands[0], target, case.count):
                index_map, single = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
                columns = _own_block(case, target, indices, index_map, single)
                if columns is not None:
                    return target, columns
    return None


def _scatter_windows(case: Case, operand: State, updates: State) -> Outcome | None:
    """Windows that hold a whole dimension of the operand, which is split."""
    numbers = case.params["dimension_numbers"]
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(len(case.operands[0])) if d not in taken]
    if isinstance(updates, Split):
        dim, outer = windows[numbers.update_window_dims.index(updates.dim)], updates.outer
    elif isinstance(operand, Split):
        dim, outer = operand.dim, operand.outer
    else:
        return None
    if dim in numbers.operand_batching_dims:
        rows = [d for d in range(len(case.operands[2])) if d not in numbers.update_window_dims]
        row = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        return _scatter_rows(case, Split(row, outer), rows)
    if dim not in windows or dim in numbers.scatter_dims_to_operand_dims:
        return None
    window = Split(numbers.update_window_dims[windows.index(dim)], outer)
    if case.operands[2][window.dim] != case.operands[0][dim] or operand not in (Split(dim, outer), INVARIANT, ZERO):
        return None
    wanted = {0: Split(dim, outer), 2: window}
    return Outcome((Split(dim, outer),), {i: s for i, s in wanted.items() if isinstance(case.states[i], Invariant)})
