"""LLaMA 3: RMS norm, rotary positions, grouped-query attention, SwiGLU (Dubey et al., 2024, table 3).

    x <- x + Attention(RoPE(h Wq), RoPE(h Wk), h Wv) Wo     h = RMS(x); Wq [D,H,K], Wk, Wv [D,G,K], Wo [H,K,D]
    x <- x + (silu(h W1) * h W3) W2                         W1, W3 [D,F], W2 [F,D]

H query heads share G key heads: weights are viewed as [D,G,R,K] with R = H/G, so that no activation is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from autopar.zoo import gpt
from autopar.zoo.layers import attention as attentions
from autopar.zoo.layers import nn
from autopar.zoo.model import (
    MIXED,
    SINGLE,
    Batch,
    Model,
    Param,
    Precision,
    Tree,
    block_params,
    repeat_blocks,
    token_batch,
    trainable,
    trainable_with_master,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` of `width` (D), `heads` (H), `kv_heads` (G), `hidden` (F); `vocab`, `seq`, `batch`.

    A head has `head_dim` elements (K), by default D / H. A feed-forward layer that is not `gated` has no W3.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128256
    seq: int = 8192
    batch: int = 64
    precision: Precision = MIXED
    scan: bool = False
    remat: bool = False
    tied: bool = False
    master: bool = False
    attention: str = "naive"
    head_dim: int | None = None
    gated: bool = True

    @property
    def head(self) -> int:
        """Width of a head (K)."""
        return self.head_dim or self.width // self.heads


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(2, 32, heads=8, kv_heads=4, hidden=64, vocab=64, seq=16, batch=8, precision=SINGLE),
        "8b": Config(32, 4096, heads=32, kv_heads=8, hidden=14336),
        "70b": Config(80, 8192, heads=64, kv_heads=8, hidden=28672),
    }
)

ROPE_BASE = 500_000.0

BLOCK_TABLE = {
    "wq": PartitionSpec(None, "model", None),
    "wk": PartitionSpec(None, "model", None),
    "wv": PartitionSpec(None, "model", None),
    "wo": PartitionSpec("model", None, None),
    "w1": PartitionSpec(None, "model"),
    "w3": PartitionSpec(None, "model"),
    "w2": PartitionSpec("model", None),
}
EMBEDDING_TABLE = {"embed": PartitionSpec("model", None), "head": PartitionSpec(None, "model")}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"tokens", "labels"}, both int32[batch, seq]."""
    attentions.check(name, config.attention, head=config.head, seq=config.seq, dtype=config.precision.compute)
    make_step, dtype = trainable, config.precision.params
    if config.master:
        make_step, dtype = trainable_with_master, config.precision.compute
    init, step = make_step(_params(config), partial(_loss, config), optax.adamw(3e-4), dtype)
    names = frozenset(BLOCK_TABLE) if config.scan else frozenset[str]()
    table = with_layer_axis({**BLOCK_TABLE, **EMBEDDING_TABLE}, names)
    notes = "Dimensions: The Llama 3 Herd of Models (Dubey et al., 2024), table 3; batch and sequence are ours."
    return Model(name, "llama3", step, init, token_batch(config.batch, config.seq, config.vocab), table, notes)


def _block_params(config: Config) -> Tree:
    width, head = config.width, config.head
    params = {
        "norm1": Param((width,), mean=1.0),
        "wq": Param((width, config.heads, head), 0.02),
        "wk": Param((width, config.kv_heads, head), 0.02),
        "wv": Param((width, config.kv_heads, head), 0.02),
        "wo": Param((config.heads, head, width), 0.02),
        "norm2": Param((width,), mean=1.0),
        "w1": Param((width, config.hidden), 0.02),
        "w3": Param((width, config.hidden), 0.02),
        "w2": Param((config.hidden, width), 0.02),
    }
    return params if config.gated else {name: param for name, param in params.items() if name != "w3"}


def _params(config: Config) -> Tree:
    width = config.width
    params = {
        "embed": Param((config.vocab, width), 0.02),
        "blocks": block_params(_block_params(config), config.layers, scan=config.scan),
        "norm": Param((width,), mean=1.0),
    }
    return params if config.tied else {**params, "head": Param((width, config.vocab), 0.02)}


def rope_tables(seq: int, head: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rotary angles, dtype[seq, head]; sin carries the sign of the rotation (Su et al., 2021)."""
    half = head // 2
    angles = lax.broadcasted_iota(jnp.promote_types(dtype, jnp.float32), (seq, half), 0) * _frequencies(half, dtype)
    sin = jnp.sin(angles)
    cos = jnp.cos(angles)
    return lax.concatenate([cos, cos], 1).astype(dtype), lax.concatenate([-sin, sin], 1).astype(dtype)


def _frequencies(half: int, dtype: str) -> jax.Array:
    return ROPE_BASE ** (-jnp.arange(half, dtype=jnp.promote_types(dtype, jnp.float32)) / half)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [B,S,...,K] rotated by its position: x cos + (x2, x1) sin, with (x1, x2) the halves of the last dimension."""
    half, last = x.shape[-1] // 2, x.ndim - 1
    low, high = lax.slice_in_dim(x, 0, half, axis=last), lax.slice_in_dim(x, half, 2 * half, axis=last)
    swapped = lax.concatenate([high, low], last)
    where = (1, last)
    rotated = lax.mul(swapped, lax.broadcast_in_dim(sin, x.shape, where))
    return lax.add(lax.mul(x, lax.broadcast_in_dim(cos, x.shape, where)), rotated)


def _attention(
    config: Config, params: Tree, h: jax.Array, cos: jax.Array, sin: jax.Array, bias: jax.Array
) -> jax.Array:
    """Grouped-query attention of h [B,S,D]; scores are [B,G,S,R,T]."""
    groups, head = config.kv_heads, config.head
    shared = config.heads // groups
    query = nn.project(h, lax.reshape(params["wq"], (config.width, groups, shared, head)))
    key, value = nn.project(h, params["wk"]), nn.project(h, params["wv"])
    query, key = rotate(query, cos * head**-0.5, sin * head**-0.5), rotate(key, cos, sin)
    scores = lax.dot_general(query, key, (((4,), (3,)), ((0, 2), (0, 2))))
    scores = lax.add(scores, lax.broadcast_in_dim(bias, scores.shape, (2, 4)))
    mixed = lax.dot_general(nn.softmax(scores), value, (((4,), (1,)), ((0, 1), (0, 2))))
    merge = lax.reshape(params["wo"], (groups, shared, head, config.width)).astype(h.dtype)
    return lax.dot_general(mixed, merge, (((1, 3, 4), (0, 1, 2)), ((), ())))


def _fused_attention(
    kernel: attentions.Kernel, params: Tree, h: jax.Array, cos: jax.Array, sin: jax.Array
) -> jax.Array:
    """The same by a kernel, which takes grouped heads and has a scale and a mask of its own."""
    query, key, value = (nn.project(h, params[name]) for name in ("wq", "wk", "wv"))
    return nn.project(kernel(rotate(query, cos, sin), rotate(key, cos, sin), value), params["wo"], 2)


def _block(
    config: Config, params: Tree, x: jax.Array, *tables: jax.Array, kernel: attentions.Kernel | None = None
) -> jax.Array:
    attend = partial(_attention, config) if kernel is None else partial(_fused_attention, kernel)
    x = x + attend(params, nn.rms_norm(x, params["norm1"]), *tables)
    h = nn.rms_norm(x, params["norm2"])
    hidden = nn.silu(nn.project(h, params["w1"]))
    hidden = lax.mul(hidden, nn.project(h, params["w3"])) if config.gated else hidden
    return x + nn.project(hidden, params["w2"])


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    dtype = config.precision.compute
    x = nn.lookup(params["embed"], batch["tokens"], dtype)
    tables = rope_tables(config.seq, config.head, dtype)
    tables = (*tables, nn.causal_bias(config.seq, dtype)) if config.attention == "naive" else tables
    body = gpt.with_kernel(partial(_block, config), config.attention, causal=True)
    x = repeat_blocks(body, params["blocks"], x, *tables, scan=config.scan, remat=config.remat)
    head = params["head"] if "head" in params else params["embed"].T
    return nn.cross_entropy(nn.project(nn.rms_norm(x, params["norm"]), head), batch["labels"])
