"""Rules of gathers and scatters on blocks.

    batch dimensions of the indices    are split together with those of the operand or updates     -> _gather_rows
    windows over a whole dimension     are split together with the operand
    rows of the indices                a gather's result is split; a scatter-add's, onto zeros, is a partial sum
    rows that point into their own     are split together with the operand; the index is then relative to the block:
    block, by constant indices         `x[arange(n), labels]` and its transpose                    -> _own_block_indices

Partial operands are described in `autopar.passes.microbatch.rules.table`. Dimension numbers are those of
`jax.lax.GatherDimensionNumbers` and `jax.lax.ScatterDimensionNumbers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.passes.microbatch.rules.types import Operands, RuleResult, align_operand
from autopar.passes.microbatch.states import (
    INVARIANT,
    SUM,
    ZERO,
    Invariant,
    ReductionKind,
    Split,
    State,
    divided,
    is_divisible,
)


def gather(operands: Operands) -> RuleResult | None:
    """The rule of `gather`."""
    operand, indices = operands.states
    if isinstance(indices, Split):
        return _gather_rows(operands, operand, indices)
    assert isinstance(operand, Split)
    numbers, dim = operands.params["dimension_numbers"], operand.dim
    if dim in numbers.operand_batching_dims:
        return _gather_batched(operands, operand)
    sizes = operands.params["slice_sizes"]
    if sizes[dim] != operands.shapes[0][dim] or not _starts_at_zero(operands, dim):
        return None
    windows = [d for d in range(len(sizes)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    if dim not in windows:
        return None
    result = Split(numbers.offset_dims[windows.index(dim)], operand.outer)
    return RuleResult((result,), params={"slice_sizes": divided(sizes, dim, operands.count)})


def _gather_batched(operands: Operands, operand: Split) -> RuleResult:
    """The operand is split along a batching dimension: each block gathers with its own rows of indices."""
    numbers = operands.params["dimension_numbers"]
    row = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand.dim)]
    return RuleResult((Split(_batch_dims(operands)[row], operand.outer),), {1: Split(row, operand.outer)})


def fill_combines_to_itself(operands: Operands, kind: ReductionKind) -> bool:
    """True if the fill values of all parts combine to one fill value: zero, nan and infinities in a sum."""
    if kind != "sum" or operands.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return True
    fill = operands.params["fill_value"]
    if fill is None:  # nan, or of integers the least or largest
        return bool(jnp.issubdtype(operands.result_dtypes[0], jnp.inexact))
    return bool(fill == 0 or not np.isfinite(fill))


def _starts_at_zero(operands: Operands, dim: int) -> bool:
    """True if a window as long as the dimension begins at 0: starts out of bounds are clamped, and do not fill the
    window.
    """
    in_bounds = (jax.lax.GatherScatterMode.CLIP, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    return dim not in operands.params["dimension_numbers"].start_index_map or operands.params["mode"] in in_bounds


def _batch_dims(operands: Operands) -> list[int]:
    """Dimensions of a gather's result that come from its indices."""
    offset = operands.params["dimension_numbers"].offset_dims
    return [d for d in range(len(operands.result_shapes[0])) if d not in offset]


def _gather_rows(operands: Operands, operand: State, indices: Split) -> RuleResult | None:
    """A gather whose indices are split along their rows."""
    numbers, dim = operands.params["dimension_numbers"], indices.dim
    # The last dimension of the indices is the components of one index, which must stay together.
    if dim == len(operands.shapes[1]) - 1:
        return None
    result = Split(_batch_dims(operands)[dim], indices.outer)
    if dim in numbers.start_indices_batching_dims:
        partner = numbers.operand_batching_dims[numbers.start_indices_batching_dims.index(dim)]
        return align_operand(result, operand, Split(partner, indices.outer), 0)
    if isinstance(operand, Invariant):
        return RuleResult((result,))
    assert isinstance(operand, Split)
    local_indices = _own_block_indices(
        operands, operand, indices, numbers.start_index_map, numbers.collapsed_slice_dims
    )
    return None if local_indices is None else RuleResult((result,), local_indices=local_indices)


def _own_block_indices(
    operands: Operands, operand: Split, indices: Split, index_map: Sequence[int], single: Sequence[int]
) -> dict[int, tuple[int, NDArray[Any]]] | None:
    """Indices into a split dimension relative to the block, if block k of the indices points into block k of the
    operand only.

    So x[arange(n), labels] does: its first index is constant, and relative to the block it is the same on every block.
    """
    if operand.dim not in index_map or operand.dim not in single:
        return None
    component = tuple(index_map).index(operand.dim)
    constant = operands.constant_component(1, component)
    if constant is None or not constant.size:
        return None
    # An index as (outside, block, inside), as the dimension is viewed: its block must be the one that reads it, and
    # (outside, inside), its place in that block, must be equal on all blocks, which run one program.
    extent, n = operands.shapes[0][operand.dim], operands.count
    inner = extent // operand.outer // n
    outside, rest = np.divmod(constant, inner * n)
    block, inside = np.divmod(rest, inner)
    blocks = [_stack_blocks(x, indices, n) for x in (block, outside * inner + inside)]
    own_block = np.arange(n).reshape(-1, *[1] * (blocks[0].ndim - 1))
    if (
        constant.min() < 0
        or constant.max() >= extent
        or (blocks[0] != own_block).any()
        or (blocks[1] != blocks[1][:1]).any()
    ):
        return None
    return {1: (component, blocks[1][0])}


def _stack_blocks(array: NDArray[Any], state: Split, count: int) -> NDArray[Any]:
    """All blocks of an array, stacked along a new leading dimension."""
    shape, d = array.shape, state.dim
    inner = shape[d] // state.outer // count
    parts = array.reshape(*shape[:d], state.outer, count, inner, *shape[d + 1 :])
    return np.moveaxis(parts, d + 1, 0).reshape(count, *shape[:d], state.outer * inner, *shape[d + 1 :])


def scatter(operands: Operands) -> RuleResult | None:
    """The rule of the scatters."""
    operand, indices, updates = operands.states
    numbers = operands.params["dimension_numbers"]
    rows = [d for d in range(len(operands.shapes[2])) if d not in numbers.update_window_dims]
    if isinstance(indices, Split):
        return _scatter_rows(operands, indices, rows)
    if isinstance(updates, Split) and updates.dim in rows:
        return _scatter_rows(operands, Split(rows.index(updates.dim), updates.outer), rows)
    return _scatter_windows(operands, operand, updates)


def _scatter_rows(operands: Operands, indices: Split, rows: Sequence[int]) -> RuleResult | None:
    """A scatter of split rows: onto batch dimensions, into its own block, or as a part of a sum."""
    numbers, dim, outer = operands.params["dimension_numbers"], indices.dim, indices.outer
    operand, _, updates = operands.states
    if dim == len(operands.shapes[1]) - 1:
        return None
    wanted = Split(rows[dim], outer)
    if not isinstance(updates, Invariant) and updates != wanted:
        return None
    slices = {i: s for i, s in ((1, indices), (2, wanted)) if isinstance(operands.states[i], Invariant)}
    if dim in numbers.scatter_indices_batching_dims:
        target = Split(numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(dim)], outer)
        aligned = align_operand(target, operand, target, 0)
        return aligned and RuleResult(aligned.results, {**slices, **aligned.slices})
    aligned = _scatter_own_block(operands, indices)
    if aligned is not None:
        target, local_indices = aligned
        aligned = align_operand(target, operand, target, 0)
        return aligned and RuleResult(aligned.results, {**slices, **aligned.slices}, local_indices=local_indices)
    # Rows that may point anywhere add to zeros: each block gives a part of the sum. What the operand had before would
    # be counted once per block.
    summed = operands.op.name == "scatter-add" and operand == ZERO
    return RuleResult((SUM,), slices) if summed else None


def _scatter_own_block(operands: Operands, indices: Split) -> tuple[Split, dict[int, tuple[int, NDArray[Any]]]] | None:
    """The split of the operand such that the rows of each block point into their own block, and the indices relative
    to it.
    """
    numbers = operands.params["dimension_numbers"]
    for dim in numbers.scatter_dims_to_operand_dims:
        for outer in dict.fromkeys((indices.outer, 1)):
            target = Split(dim, outer)
            if dim in numbers.inserted_window_dims and is_divisible(operands.shapes[0], target, operands.count):
                index_map, single = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
                local_indices = _own_block_indices(operands, target, indices, index_map, single)
                if local_indices is not None:
                    return target, local_indices
    return None


def _scatter_windows(operands: Operands, operand: State, updates: State) -> RuleResult | None:
    """A scatter of windows that cover the split dimension of the operand in full."""
    numbers = operands.params["dimension_numbers"]
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(len(operands.shapes[0])) if d not in taken]
    if isinstance(updates, Split):
        dim, outer = windows[numbers.update_window_dims.index(updates.dim)], updates.outer
    elif isinstance(operand, Split):
        dim, outer = operand.dim, operand.outer
    else:
        return None
    if dim in numbers.operand_batching_dims:
        rows = [d for d in range(len(operands.shapes[2])) if d not in numbers.update_window_dims]
        row = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        return _scatter_rows(operands, Split(row, outer), rows)
    if dim not in windows or dim in numbers.scatter_dims_to_operand_dims:
        return None
    window = Split(numbers.update_window_dims[windows.index(dim)], outer)
    if operands.shapes[2][window.dim] != operands.shapes[0][dim] or operand not in (Split(dim, outer), INVARIANT, ZERO):
        return None
    wanted = {0: Split(dim, outer), 2: window}
    return RuleResult(
        (Split(dim, outer),), {i: s for i, s in wanted.items() if isinstance(operands.states[i], Invariant)}
    )
