"""Products over groups of rows (`jax.lax.ragged_dot_general`, megablox): their rule, and the groups of a block of rows.

    rows times a matrix of their group       m k, g k n, g -> m n
    contracted within each group             m k, m n, g -> g k n        (the gradient of the matrices)
    a batch in groups                        b m k, b k n, g -> b m n    (a batched product)

The groups follow one another from row 0, so that group i has the rows  start_i .. end_i - 1  with end_i the sum of the
sizes up to i. Of a block of rows a .. b - 1 it has

    size_i  =  clip(end_i, a, b) - clip(start_i, a, b)                                                   -> block_sizes

rows, again one group after the other from the block's first row. So rows may be sharded, and so may every other
dimension but that of the groups, whose matrices each device needs. XLA does not find this: on TPU it gathers the rows.
Kernels multiply tiles of rows, and a device has whole tiles                         -> `autopar.jax_compat.megablox`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.rules.notation import Dims, Rule, parse

GROUPS = "groups"


def ragged_dimension(params: Mapping[str, Any]) -> int:
    """The dimension of the first operand whose positions are in groups."""
    (dimension,) = params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    return dimension


def contracts_rows(params: Mapping[str, Any]) -> bool:
    """Whether the dimension in groups is contracted, so that the result has one matrix for each group."""
    (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return ragged_dimension(params) in contracted


def batches_rows(params: Mapping[str, Any]) -> bool:
    """Whether the dimension in groups is a batch: groups change nothing then, and every backend ignores them."""
    _, (batch, _) = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return ragged_dimension(params) in batch


def holds(dtype: str, number: int) -> bool:
    """Whether all integers from 0 to this one are in a dtype of integers."""
    kind = jnp.dtype(dtype)
    return bool(jnp.issubdtype(kind, jnp.integer)) and number <= jnp.iinfo(kind).max


def rule(
    params: Mapping[str, Any], operands: Sequence[Dims], results: Sequence[Dims], dtype: str, tile: int = 1
) -> Rule:
    """The rule of a product over groups.

    Args:
        params: of the operation.
        operands, results: shapes of the two factors, of the sizes of the groups and of what else a kernel reads, and of
            the product.
        dtype: of the sizes. Rows that it cannot count need replication.
        tile: the number of rows of which a part has to be a multiple.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (contracted, contracted_right), (batch, batch_right) = numbers.dot_dimension_numbers
    left = [f"l{d}" for d in range(len(operands[0]))]
    right = [f"r{d}" for d in range(len(operands[1]))]
    # dimensions of the batch and contracted ones are the same factor in both operands
    for d, e in zip((*batch, *contracted), (*batch_right, *contracted_right), strict=True):
        right[e] = left[d]
    for d in numbers.rhs_group_dimensions:
        right[d] = GROUPS
    kept = [name for d, name in enumerate(left) if d not in (*batch, *contracted)]
    kept += [name for name in right if name not in (*left, GROUPS)]
    result = [GROUPS] * contracts_rows(params) + [left[d] for d in batch] + kept
    sizes = [*_in_front(params, left), GROUPS] if len(operands[2]) > 1 else [GROUPS]
    rows = ragged_dimension(params)
    # parts count their own rows, in the dtype of the sizes
    whole = [GROUPS] if holds(dtype, operands[0][rows]) else [GROUPS, left[rows]]
    rest = [["1"] * len(shape) for shape in operands[3:]]
    sides = ", ".join(" ".join(names) for names in (left, right, sizes, *rest))
    written = parse(f"{sides} -> {' '.join(result) or '()'} | keep {' '.join(whole)}", operands, results, "autopar")
    # rows are cut in whole tiles alone
    factor = written.operands[0][rows]
    return replace(written, sizes=tuple(n // tile if f == factor else n for f, n in enumerate(written.sizes)))


def in_groups(params: Mapping[str, Any], rule: Rule) -> tuple[int, int]:
    """The factors of a product over groups that are its rows and their groups."""
    return rule.operands[0][ragged_dimension(params)], rule.operands[2][-1]


def _in_front(params: Mapping[str, Any], left: list[str]) -> list[str]:
    """The dimensions of the first operand for each position of which the sizes of the groups may differ."""
    (contracted, _), (batch, _) = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    rows = ragged_dimension(params)
    if batches_rows(params):
        return [left[d] for d in batch[: batch.index(rows)]]
    alike = contracted if rows in contracted else [d for d in range(len(left)) if d not in (*batch, *contracted)]
    return [left[d] for d in (*batch, *alike[: alike.index(rows)])]


def block_sizes(sizes: jax.Array, block: Any, rows: int) -> jax.Array:
    """Sizes of the groups within a block of rows.

    Args:
        sizes: of the groups, shape (..., groups).
        block: number of the block; those before it have as many rows.
        rows: of the block.
    """
    first = block.astype(sizes.dtype) * rows
    ends = jnp.cumsum(sizes, -1, dtype=sizes.dtype)
    return jnp.clip(ends, first, first + rows) - jnp.clip(ends - sizes, first, first + rows)
