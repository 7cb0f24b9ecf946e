"""What a device runs of cuDNN's attention whose positions are cut (context parallelism).

Keys and values are gathered on every device, and their gradients reduced and scattered. Without a mask a device then
runs the operation on its queries. Under a causal mask the first queries see few keys and the last ones all: devices
exchange blocks of c positions first (`autopar.rules.block_pairs`). The queries of block j see

    the keys of block j            under the kernel's own causal mask
    the j c keys before it         as a sequence of this length: a padding mask

The kernel gives the softmax statistic L, the logarithm of the sum of exponentials, with each output, by which both
parts are merged (Dao et al., 2022, section 3.1):

    L = log(exp(L_1) + exp(L_2))         o = exp(L_1 - L) o_1 + exp(L_2 - L) o_2

The kernel of the backward pass reads L and o of the whole row, so that the gradients of both parts add up.

Or devices pass their pieces of keys and values round, and gather none (`autopar.rules.ring`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.rules import cudnn
from autopar.rules.block_pairs import BlockPairs
from autopar.rules.ring import Ring, backward, forward

Params = Mapping[str, Any]
#: Runs the operation with these operands and parameters.
Bind = Callable[[Sequence[Any], Params], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of queries: where it begins, and the arguments of the operation for the keys that it sees.

    Attributes:
        begin: first position of the block.
        size: its positions.
        dim: the dimension of positions in queries, keys and values.
    """

    begin: Any
    size: int
    dim: int

    def own(self, x: Any) -> Any:
        """Keys or values of the block."""
        return lax.dynamic_slice_in_dim(x, self.begin, self.size, self.dim)

    def lengths(self, batch: int) -> tuple[Any, Any]:
        """Lengths of queries and of the keys before the block, one at least, which `has_before` leaves out again."""
        before = jnp.maximum(self.begin, 1).astype(jnp.int32)
        return jnp.full((batch,), self.size, jnp.int32), jnp.broadcast_to(before, (batch,))

    @property
    def has_before(self) -> Any:
        return self.begin > 0

    def added(self, before: Any, own: Any) -> Any:
        """A gradient of all keys or values: that of those before the block, and that of the block's own, in float32."""
        place = jnp.arange(before.shape[self.dim]).reshape([-1 if d == self.dim else 1 for d in range(before.ndim)])
        total = jnp.where(place < self.begin, before.astype(jnp.float32), 0)
        return lax.dynamic_update_slice_in_dim(total, own.astype(jnp.float32), self.begin, self.dim)


def run(
    name: str,
    bind: Bind,
    params: Params,
    shards: Sequence[Any],
    axes: tuple[str, ...],
    count: int,
    *,
    gather: bool,
    ring: bool,
) -> list[Any]:
    """The results of a device for its piece of the queries.

    Args:
        name: the operation, of `ATTENTION`.
        bind: runs the operation.
        params: its parameters.
        shards: operands, whose pieces are those of this device.
        axes: names of the mesh axes that cut the positions, in the order in which they do.
        count: number of devices along these axes.
        gather: keys and values are pieces too, and so are their gradients. Otherwise both are whole, and the gradients
            those over the queries of this device.
        ring: pieces are passed round.
    """
    dim, (q, k, v, *rest) = cudnn.position_dim(params), shards
    if gather and "bwd" in name:  # or the compiler keeps what the forward pass has gathered until here
        k, v, *rest = lax.optimization_barrier((k, v, *rest))
    if ring:
        return _in_ring(name, bind, params, (q, k, v, *rest), Ring(axes, count, dim, cudnn.is_causal(params)))
    if gather:
        k, v = (lax.all_gather(x, axes, axis=dim, tiled=True) for x in (k, v))
    operands = q, k, v, *rest
    results = _causal(name, bind, params, operands, axes, count) if cudnn.is_causal(params) else bind(operands, params)
    if not gather or "bwd" not in name:
        return [*results]
    of_keys = (lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) for x in results[1:3])
    return [results[0], *of_keys, *results[3:]]


def _in_ring(name: str, bind: Bind, params: Params, operands: Sequence[Any], ring: Ring) -> list[Any]:
    """The results from pieces of keys and values that are passed round."""
    q, k, v, *rest = operands
    unused, row = (rest[:-3], rest[-3:]) if "bwd" in name else (rest, [])

    def attend(queries: Sequence[Any], keys: Sequence[Any], causal: bool) -> Sequence[Any]:
        masked = _under(params, "CAUSAL" if causal else "NO_MASK")
        return bind((queries[0], *keys, *unused, *queries[1:]), masked)

    if row:
        return [*backward(ring, attend, (q, *row), (k, v))]
    results = forward(ring, attend, (q,), (k, v))
    return [*results] if params["is_training"] else [results[0]]


def _causal(
    name: str, bind: Bind, params: Params, operands: Sequence[Any], axes: tuple[str, ...], count: int
) -> list[Any]:
    """The results under a causal mask, from all keys and values."""
    blocks, dim = BlockPairs(axes, count), cudnn.position_dim(params)
    size = operands[0].shape[dim] // 2
    places = [_Block(number * size, size, dim) for number in blocks.numbers]
    if "bwd" in name:
        return _backward(bind, params, operands, blocks, places)
    queries = blocks.taken(operands[0], dim)
    first, second = (_forward(bind, params, q, operands, block) for q, block in zip(queries, places, strict=True))
    results = [blocks.returned(first[0], second[0], dim)]
    return [*results, blocks.returned(first[1], second[1], 2)] if params["is_training"] else results


def _under(params: Params, mask: str) -> Params:
    """The parameters with another mask; a forward pass gives its statistic besides."""
    kind: Any = type(params["mask_type"])
    training = {"is_training": True} if "is_training" in params else {}
    return {**params, "mask_type": kind[mask], **training}


def _forward(bind: Bind, params: Params, q: Any, shards: Sequence[Any], block: _Block) -> tuple[Any, Any]:
    """Output and statistic of one block."""
    _, k, v, *rest = shards
    out, statistic = bind((q, block.own(k), block.own(v), *rest), _under(params, "CAUSAL"))
    lengths = block.lengths(q.shape[0])
    out_before, before = bind((q, k, v, rest[0], *lengths, *rest[3:]), _under(params, "PADDING"))
    before = jnp.where(block.has_before, before, -jnp.inf)
    total = jnp.logaddexp(statistic, before)

    def weighed(x: Any, of: Any) -> Any:
        """In float32; the statistic has heads before positions, the output as its layout says."""
        weight = jnp.exp(of - total)
        return x.astype(jnp.float32) * (weight.swapaxes(1, 2) if block.dim == 1 else weight)[..., None]

    return (weighed(out, statistic) + weighed(out_before, before)).astype(out.dtype), total


def _backward(
    bind: Bind, params: Params, shards: Sequence[Any], blocks: BlockPairs, places: Sequence[_Block]
) -> list[Any]:
    """The gradients of queries, and of keys and values over the queries of this device."""
    q, k, v, *rest = shards
    unused, (statistic, out, grad), dim = rest[:-3], rest[-3:], places[0].dim
    taken = zip(
        *(blocks.taken(x, d) for x, d in ((q, dim), (statistic, 2), (out, dim), (grad, dim))), places, strict=True
    )
    of_queries: list[Any] = []  # of both blocks
    of_keys, of_values = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for q_block, *row, block in taken:
        own = bind((q_block, block.own(k), block.own(v), *unused, *row), _under(params, "CAUSAL"))
        lengths = block.lengths(q_block.shape[0])
        operands = (q_block, k, v, unused[0], *lengths, *unused[3:], *row)
        before = bind(operands, _under(params, "PADDING"))
        earlier = jnp.where(block.has_before, before[0].astype(jnp.float32), 0)
        of_queries.append((own[0].astype(jnp.float32) + earlier).astype(q.dtype))
        of_keys += block.added(before[1], own[1])
        of_values += block.added(before[2], own[2])
    return [blocks.returned(of_queries[0], of_queries[1], dim), of_keys.astype(k.dtype), of_values.astype(v.dtype)]
