"""GShard mixture of experts: GPT blocks whose every second feed-forward layer is routed (Lepikhin et al., 2020).

Tokens are cut into groups g of s tokens; each goes to its two best experts e, as far as these have one of c slots free:

    gates[gse]     = softmax(x Wg)                          -> _moe
    combine[gsec]  = normalised gate of the kept choices    -> route (algorithm 1 of the paper)
    y              = combine . expert(dispatch . x)         dispatch = combine > 0; the "gsec,gsd->egcd" einsums
    auxiliary loss = E sum_e (share routed to e)(mean gate) -> balance

The "-dropless" variants have no slots: rows are sorted by expert and multiplied in groups of any size
(Gale et al., "MegaBlocks", 2023; `jax.lax.ragged_dot`)                                                     -> _dropless
Those of the "-megablox" variants are multiplied by JAX's Pallas kernel for TPUs           -> autopar.zoo.layers.grouped

The named sizes are those of the Alpa paper (Zheng et al., 2022), section 8, and of its public benchmark suite:
sequence length 1024, vocabulary 32000, global batch 1024, groups of 2048 tokens, feed-forward factor 8 in routed and
plain layers. Its parameter formula counts one embedding table: the "-tied" variants agree with it within 1%.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError
from autopar.zoo import gpt
from autopar.zoo.layers import attention as attentions
from autopar.zoo.layers import grouped, nn
from autopar.zoo.model import (
    HALF,
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
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: those of GPT, and `experts` (E), `group` (s) tokens per group, `factor` = F / D.

    `layers` counts plain and routed layers and is even; slots per expert and group are c = 2 s / E (capacity factor 1).
    """

    layers: int
    width: int
    heads: int
    experts: int
    group: int = 2048
    factor: int = 8
    vocab: int = 32000
    seq: int = 1024
    batch: int = 1024
    precision: Precision = HALF
    scan: bool = False
    remat: bool = False
    attention: str = "naive"
    tied: bool = False
    dropless: bool = False
    megablox: bool = False
    adafactor: bool = False


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(2, 32, 8, experts=8, group=16, factor=2, vocab=64, seq=16, batch=8, precision=SINGLE),
        "380m": Config(8, 768, 16, experts=8),
        "690m": Config(8, 768, 16, experts=16),
        "1.3b": Config(16, 768, 16, experts=16),
        "2.4b": Config(16, 1024, 16, experts=16),
        "7.1b": Config(16, 1280, 16, experts=32),
        "10b": Config(16, 1536, 16, experts=32),
        "27b": Config(16, 2048, 16, experts=48),
        "70b": Config(32, 2048, 16, experts=64),
        "140b": Config(32, 2048, 16, experts=128),
    }
)

BALANCE_WEIGHT = 0.01
#: Experts per token.
CHOICES = 2

#: Each device has experts of its own.
BLOCK_TABLE = {
    **gpt.BLOCK_TABLE,
    "expert_in": PartitionSpec("model", None, None),
    "expert_out": PartitionSpec("model", None, None),
}
#: Each device has a part of every expert.
DROPLESS_TABLE = {
    **gpt.BLOCK_TABLE,
    "expert_in": PartitionSpec(None, None, "model"),
    "expert_out": PartitionSpec(None, "model", None),
}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"tokens", "labels"}, both int32[batch, seq]."""
    if config.layers % 2:
        raise ArgumentError(f"layers={config.layers} of {name!r} must be even: routed and plain layers alternate")
    attentions.check(
        name, config.attention, head=config.width // config.heads, seq=config.seq, dtype=config.precision.compute
    )
    if config.megablox and config.precision.compute not in ("float32", "bfloat16"):
        raise ArgumentError(
            f"megablox of {name!r} takes float32 and bfloat16, and this model computes in {config.precision.compute}; "
            "-dropless has any dtype"
        )
    optimizer = optax.adafactor(1e-2) if config.adafactor else optax.adamw(3e-4)
    init, step = trainable(_params(config), partial(_loss, config), optimizer, config.precision.params)
    blocks = DROPLESS_TABLE if config.dropless or config.megablox else BLOCK_TABLE
    names = frozenset(blocks) if config.scan else frozenset[str]()
    table = with_layer_axis({**blocks, **gpt.EMBEDDING_TABLE}, names)
    notes = "Dimensions: Alpa (Zheng et al., 2022), section 8. Experts have no biases."
    return Model(name, "moe", step, init, token_batch(config.batch, config.seq, config.vocab), table, notes)


def _params(config: Config) -> Tree:
    width, hidden = config.width, config.factor * config.width
    routed = {
        **gpt.attention_spec(width, config.heads),
        "ln2_scale": Param((width,), mean=1.0),
        "ln2_bias": Param((width,)),
        "gate": Param((width, config.experts), 0.02),
        "expert_in": Param((config.experts, width, hidden), 0.02),
        "expert_out": Param((config.experts, hidden, width), 0.02),
    }
    plain = {**gpt.attention_spec(width, config.heads), **gpt.feed_forward_spec(width, hidden)}
    pairs = block_params({"routed": routed, "plain": plain}, config.layers // 2, scan=config.scan)
    return {**gpt.embedding_spec(config.vocab, config.seq, width, tied=config.tied), "blocks": pairs}


def route(gates: jax.Array, capacity: int) -> jax.Array:
    """Weights combine[g,s,e,c] of top-2 routing from gates [g,s,e]; choices beyond an expert's capacity are dropped."""
    first = _best(gates)
    second = _best(gates * (1 - first))
    first_slot = jnp.cumsum(first, 1) - first
    kept_first = first * (first_slot < capacity)
    second_slot = jnp.cumsum(second, 1) - second + jnp.sum(kept_first, 1, keepdims=True)
    kept_second = second * (second_slot < capacity)
    total = jnp.sum(gates * (kept_first + kept_second), -1, keepdims=True)
    share = gates / jnp.where(total > 0, total, 1)
    return _slots(share * kept_first, first_slot, capacity) + _slots(share * kept_second, second_slot, capacity)


def _best(gates: jax.Array) -> jax.Array:
    """One-hot of the largest gate, in the gates' dtype."""
    return jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1], dtype=gates.dtype)


def _slots(share: jax.Array, slot: jax.Array, capacity: int) -> jax.Array:
    """[g,s,e] -> [g,s,e,c]: the share is at its slot."""
    return share[..., None] * jax.nn.one_hot(slot.astype(jnp.int32), capacity, dtype=share.dtype)


def balance(gates: jax.Array) -> jax.Array:
    """Load-balance loss of gates [g,s,e]: 1 when tokens and gates are spread evenly, E when one expert has all."""
    routed = jnp.mean(_best(gates), 1)
    return gates.shape[-1] * jnp.mean(jnp.sum(routed * jnp.mean(gates, 1), -1))


def _moe(config: Config, params: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [B,S,D] plus the routed feed-forward layer of its norm, and the balance loss."""
    size = min(config.group, config.batch * config.seq)
    h = nn.layer_norm(x, params["ln2_scale"], params["ln2_bias"]).reshape(-1, size, config.width)
    wide = jnp.promote_types(h.dtype, jnp.float32)
    gates = jax.nn.softmax(nn.project(h, params["gate"]).astype(wide), -1)
    if config.dropless or config.megablox:
        rows, weights = h.reshape(-1, config.width), gates.reshape(-1, config.experts)
        product = grouped.megablox if config.megablox else jax.lax.ragged_dot
        return x + _dropless(params, rows, weights, product).reshape(x.shape), balance(gates)
    combine = route(gates, max(1, 2 * size // config.experts))
    dispatch = (combine > 0).astype(h.dtype)
    inputs = jnp.einsum("gsec,gsd->egcd", dispatch, h)
    hidden = nn.gelu(jnp.einsum("egcd,edf->egcf", inputs, params["expert_in"].astype(h.dtype)))
    outputs = jnp.einsum("egcf,efd->egcd", hidden, params["expert_out"].astype(h.dtype))
    mixed = jnp.einsum("gsec,egcd->gsd", combine.astype(h.dtype), outputs)
    return x + mixed.reshape(x.shape), balance(gates)


def _dropless(params: Tree, x: jax.Array, gates: jax.Array, product: grouped.Product) -> jax.Array:
    """The experts' outputs of rows x [T,D] by their two best gates of [T,E], normalised."""
    share, chosen = jax.lax.top_k(gates, CHOICES)
    share = (share / jnp.sum(share, -1, keepdims=True)).astype(x.dtype)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=gates.shape[-1])
    hidden = nn.gelu(product(x[order // CHOICES], params["expert_in"].astype(x.dtype), sizes))
    outputs = product(hidden, params["expert_out"].astype(x.dtype), sizes)
    return jnp.zeros_like(x).at[order // CHOICES].add(outputs * share.reshape(-1)[order][:, None])


def _pair(
    config: Config,
    params: Tree,
    carry: tuple[jax.Array, jax.Array],
    bias: jax.Array | None,
    kernel: attentions.Kernel | None = None,
) -> Tree:
    x, total = carry
    x, extra = _moe(config, params["routed"], gpt.attention(params["routed"], x, bias, kernel=kernel))
    return gpt.block(params["plain"], x, bias, kernel=kernel), total + extra.astype(total.dtype)


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    dtype = config.precision.compute
    x = gpt.embed(params, batch["tokens"], dtype)
    carry = (x, jnp.zeros((), config.precision.params))
    mask = nn.causal_bias(config.seq, dtype) if config.attention == "naive" else None
    body = gpt.with_kernel(partial(_pair, config), config.attention, causal=True)
    x, extra = repeat_blocks(body, params["blocks"], carry, mask, scan=config.scan, remat=config.remat)
    pairs = config.layers // 2
    return gpt.next_token_loss(params, x, batch["labels"]) + BALANCE_WEIGHT / pairs * extra
