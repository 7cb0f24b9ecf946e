"""Attention whose keys and values are passed round in a ring, for what a device runs of cuDNN's operations.

Each of n devices has one piece of the queries, keys and values. In step r device d has the keys and values of device
d - r, computes its queries' part with them, and passes them to device d + 1. Parts of one row are merged by the softmax
statistic L, the logarithm of the sum of exponentials (Liu et al., 2023, Ring Attention with Blockwise Transformers):

    L = log(exp(L_1) + exp(L_2))         o = exp(L_1 - L) o_1 + exp(L_2 - L) o_2                       -> Merged

The kernel of the backward pass reads L and o of the whole row, so that the gradients of all parts add up: those of
queries where they are, those of keys and values along the ring, a step behind the piece that they belong to.

Under a causal mask a device has the blocks d and 2 n - 1 - d of 2 n blocks (`autopar.rules.block_pairs`), one behind
the other: its own keys and queries are a shorter sequence with the same mask. Of the keys of another device j

    j < d     both blocks of queries see the first block, and none the second
    j > d     the second block of queries sees both blocks, and the first none

which is two products of whole blocks in every step and on every device:                               -> _Pairs

    (first queries, first keys) or (second queries, second keys)        (second queries, first keys)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax

from autopar.rules.block_pairs import BlockPairs

Arrays: TypeAlias = tuple[Any, ...]
#: Runs attention of queries, keys and values, and what else belongs to a row of queries, under a causal mask or none.
Attend: TypeAlias = Callable[[Arrays, Arrays, bool], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Ring:
    """Devices along some mesh axes, each of which passes what it has to the next.

    Attributes:
        axes: names of the mesh axes that cut the positions, in the order in which they do.
        count: number of devices along these axes.
        dim: dimension of positions in queries, keys and values.
        causal: a query sees the keys up to its own position alone.
    """

    axes: tuple[str, ...]
    count: int
    dim: int
    causal: bool

    @property
    def blocks(self) -> BlockPairs:
        return BlockPairs(self.axes, self.count)

    def entered(self, x: Any, dim: int) -> Any:
        """What this device computes with, of a piece along the positions."""
        return self.blocks.joined(x, dim) if self.causal else x

    def left(self, x: Any, dim: int) -> Any:
        """The piece of this device, of what it has computed."""
        return self.blocks.split(x, dim) if self.causal else x

    def passed(self, arrays: Arrays) -> Arrays:
        """What the device before has."""
        moves = [(d, (d + 1) % self.count) for d in range(self.count)]
        return tuple(lax.ppermute(x, self.axes, moves) for x in arrays)

    def steps(self, state: Any, keys: Arrays, step: Callable[[Any, Arrays, Any], Any]) -> Any:
        """The state after all pieces of keys and values but the device's own.

        Args:
            state: before.
            keys: the device's own keys and values.
            step: (state, keys and values of another device, whether that is an earlier one) -> state.
        """
        here = lax.axis_index(self.axes)

        def body(carry: Any, number: Any) -> Any:
            state, keys = carry
            return (step(state, keys, number <= here), self.passed(keys)), None

        carry = state, self.passed(keys)
        if self.count > 2:
            carry, _ = lax.scan(body, carry, jnp.arange(1, self.count - 1))
        return step(*carry, self.count - 1 <= here)


# Forward


def forward(ring: Ring, attend: Attend, queries: Arrays, keys: Arrays) -> Arrays:
    """Output and statistic of a device's piece of the queries.

    Args:
        ring: the devices.
        attend: gives output and statistic; the statistic has heads before positions.
        queries: the piece of the queries.
        keys: the pieces of keys and values.
    """
    dims = ring.dim, 2
    queries, keys = (tuple(ring.entered(x, ring.dim) for x in arrays) for arrays in (queries, keys))
    out, statistic = attend(queries, keys, ring.causal)

    def step(state: Arrays, keys: Arrays, earlier: Any) -> Arrays:
        if not ring.causal:
            return _merged(ring, state, attend(queries, keys, False))
        pairs = _Pairs(earlier, _halves(queries, (ring.dim,)), _halves(keys, (ring.dim,) * 2))
        first, second = _halves(state, dims)
        own, late = attend(*pairs.chosen, False), attend(*pairs.last, False)
        second = _merged(ring, second, late)
        merged = _merged(ring, _where(earlier, first, second), own)
        return _joined(_where(earlier, merged, first), _where(earlier, second, merged), dims)

    out32, statistic = ring.steps((out.astype(jnp.float32), statistic), keys, step)
    return tuple(ring.left(x, dim) for x, dim in zip((out32.astype(out.dtype), statistic), dims, strict=True))


def _merged(ring: Ring, first: Arrays, second: Sequence[Any]) -> Arrays:
    """Output, in float32, and statistic of rows of which there are two parts."""
    total = jnp.logaddexp(first[1], second[1])

    def weighed(out: Any, statistic: Any) -> Any:
        weight = jnp.exp(statistic - total)
        return out.astype(jnp.float32) * (weight.swapaxes(1, 2) if ring.dim == 1 else weight)[..., None]

    return weighed(*first) + weighed(*second), total


# Backward


def backward(ring: Ring, attend: Attend, queries: Arrays, keys: Arrays) -> Arrays:
    """The gradients of a device's pieces of queries, keys and values.

    Args:
        ring: the devices.
        attend: gives gradients of queries, keys and values.
        queries: pieces of the queries, of the statistic, of the output and of its gradient.
        keys: the pieces of keys and values.
    """
    dims = ring.dim, 2, ring.dim, ring.dim
    dtypes = [x.dtype for x in (queries[0], *keys)]
    queries = tuple(ring.entered(x, dim) for x, dim in zip(queries, dims, strict=True))
    keys = tuple(ring.entered(x, ring.dim) for x in keys)

    def step(state: Arrays, keys: Arrays, earlier: Any) -> Arrays:
        of_queries, *of_keys = state
        arrived = ring.passed(tuple(of_keys))
        if not ring.causal:
            return _sums((of_queries, *arrived), attend(queries, keys, False))
        pairs = _Pairs(earlier, _halves(queries, dims), _halves(keys, (ring.dim,) * 2))
        own, late = _wide(attend(*pairs.chosen, False)), _wide(attend(*pairs.last, False))
        none = tuple(map(jnp.zeros_like, own))
        first, second = _where(earlier, own, none), _where(earlier, none, own)
        whole = (
            _joined(first[:1], _sums(second[:1], late[:1]), (ring.dim,)),
            _joined(_sums(first[1:], late[1:]), second[1:], (ring.dim,) * 2),
        )
        return _sums((of_queries, *arrived), (*whole[0], *whole[1]))

    own = _wide(attend(queries, keys, ring.causal))
    of_queries, *of_keys = ring.steps(own, keys, step)
    grads = of_queries, *ring.passed(tuple(of_keys))
    return tuple(ring.left(x.astype(dtype), ring.dim) for x, dtype in zip(grads, dtypes, strict=True))


# Blocks


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The two products of a step under a causal mask.

    Attributes:
        earlier: whether the keys are those of an earlier device.
        queries, keys: both blocks of all arrays.
    """

    earlier: Any
    queries: tuple[Arrays, Arrays]
    keys: tuple[Arrays, Arrays]

    @property
    def chosen(self) -> tuple[Arrays, Arrays]:
        """The first blocks of both, or the second ones."""
        return _where(self.earlier, *self.queries), _where(self.earlier, *self.keys)

    @property
    def last(self) -> tuple[Arrays, Arrays]:
        """The second block of queries and the first one of keys."""
        return self.queries[1], self.keys[0]


def _halves(arrays: Sequence[Any], dims: Sequence[int]) -> tuple[Arrays, Arrays]:
    pairs = [jnp.split(x, 2, dim) for x, dim in zip(arrays, dims, strict=True)]
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


def _joined(first: Arrays, second: Arrays, dims: Sequence[int]) -> Arrays:
    return tuple(jnp.concatenate([a, b], dim) for a, b, dim in zip(first, second, dims, strict=True))


def _where(condition: Any, first: Arrays, second: Arrays) -> Arrays:
    return tuple(jnp.where(condition, a, b) for a, b in zip(first, second, strict=True))


def _wide(arrays: Sequence[Any]) -> Arrays:
    return tuple(x.astype(jnp.float32) for x in arrays)


def _sums(first: Sequence[Any], second: Sequence[Any]) -> Arrays:
    return tuple(a + b for a, b in zip(first, _wide(second), strict=True))
