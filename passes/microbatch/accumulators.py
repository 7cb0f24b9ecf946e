"""How the parts of a total that microbatches yield are combined.

sum, mean              added in float32 or wider, and rounded to the step's own dtype at the end
max, min, and, or      folded from the identity element
concatenate            blocks, stacked and joined
last                   the last microbatch's value
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.passes.microbatch.states import SUM, Split, State, local_shape, part_dtype


def join_blocks(blocks: Any, state: Split) -> Any:
    """The whole array from its blocks, which are stacked along a new leading dimension."""
    count, *shape = blocks.shape
    d = state.dim
    inner = shape[d] // state.outer
    folded = blocks.reshape(count, *shape[:d], state.outer, inner, *shape[d + 1 :])
    return jnp.moveaxis(folded, 0, d + 1).reshape(*shape[:d], count * shape[d], *shape[d + 1 :])


@dataclass(frozen=True, eq=False)
class Accumulator:
    """How the parts of one total are combined.

    Attributes:
        zero: gives the initial carry.
        add: (carry, part, number of the microbatch) -> carry.
        finish: carry -> the whole value.
        is_stacked: the carry has the parts one by one, along a leading dimension.
    """

    zero: Callable[[], Any]
    add: Callable[[Any, Any, Any], Any]
    finish: Callable[[Any], Any]
    is_stacked: bool = False


#: (number of microbatches; shape, dtype, state of the whole value) -> its accumulator.
_AccumulatorFactory = Callable[[int, tuple[int, ...], Any, State], Accumulator]


def _sum_accumulator(count: int, shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
    """Sums in at least float32."""
    wide = part_dtype(dtype, SUM)
    return Accumulator(partial(jnp.zeros, shape, wide), lambda c, p, _: c + p.astype(wide), lambda c: c.astype(dtype))


def _mean_accumulator(count: int, shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
    """Means over `count` microbatches, in at least float32."""
    total = _sum_accumulator(count, shape, dtype, state)
    return replace(total, finish=lambda c: (c / np.asarray(count, c.dtype)).astype(dtype))


def _fold_accumulator(combine: Callable[[Any, Any], Any], identity: Callable[[Any], Any]) -> _AccumulatorFactory:
    """Combines parts by `combine`, of which `identity` gives the identity element for a dtype."""

    def make(count: int, shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
        zero = partial(jnp.full, shape, identity(dtype), dtype)
        return Accumulator(zero, lambda c, p, _: combine(c, p), lambda c: c)

    return make


def _smallest(dtype: Any) -> Any:
    """Identity of the maximum: -inf, or the least number if the dtype has no infinity."""
    return _extreme(dtype, -1)


def _largest(dtype: Any) -> Any:
    """Identity of the minimum."""
    return _extreme(dtype, 1)


def _extreme(dtype: Any, sign: int) -> Any:
    if dtype == jnp.bool_:
        return sign > 0
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.iinfo(dtype).min if sign < 0 else jnp.iinfo(dtype).max
    infinity = np.asarray(sign * np.inf).astype(dtype)  # nan for dtypes of eight bits without infinity
    return infinity if np.isinf(infinity) else sign * float(jnp.finfo(dtype).max)


def _all_ones(dtype: Any) -> Any:
    return np.invert(np.zeros((), dtype))


def _concatenate_accumulator(count: int, shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
    """Joins the blocks of a split value."""
    assert isinstance(state, Split)
    zero = partial(jnp.zeros, (count, *local_shape(shape, state, count)), dtype)

    def add(carry: Any, part: Any, index: Any) -> Any:
        return jax.lax.dynamic_update_index_in_dim(carry, part, index, 0)

    return Accumulator(zero, add, partial(join_blocks, state=state), is_stacked=True)


def _last_accumulator(count: int, shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
    """Keeps the last microbatch's value of an invariant."""
    return Accumulator(partial(jnp.zeros, shape, dtype), lambda c, p, _: p, lambda c: c)


#: How parts are combined (`AccumulatedValue.combine`) -> the accumulator.
_ACCUMULATORS: Mapping[str, _AccumulatorFactory] = {
    "sum": _sum_accumulator,
    "mean": _mean_accumulator,
    "max": _fold_accumulator(jnp.maximum, _smallest),
    "min": _fold_accumulator(jnp.minimum, _largest),
    "and": _fold_accumulator(jnp.bitwise_and, _all_ones),
    "or": _fold_accumulator(jnp.bitwise_or, lambda dtype: np.zeros((), dtype)),
    "concatenate": _concatenate_accumulator,
    "last": _last_accumulator,
}


def accumulator(combine: str, count: int, shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
    """The accumulator of one total.

    Args:
        combine: as in `AccumulatedValue.combine`.
        count: number of microbatches.
        shape, dtype, state: of the whole value.
    """
    return _ACCUMULATORS[combine](count, shape, dtype, state)
