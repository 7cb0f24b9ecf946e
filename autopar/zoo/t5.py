"""T5: transformer encoder-decoder with relative position biases, without biases anywhere else (Raffel et al., 2020).

    encoder: x <- x + Attention(h) Wo                 h = RMS(x); Wq, Wk, Wv [D,H,K], Wo [H,K,D]
             x <- x + relu(h W1) W2                   W1 [D,F], W2 [F,D]
    decoder: the same, causal, with attention to the encoder's output in between

Scores are not scaled; a table [32,H] of biases by relative position, one for all layers of a side, is added to them.
Logits are the embedding's transpose on the output times D^-1/2. The step shifts the targets to the right for the
decoder's input, and makes the padding masks and loss weights from tokens that are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import log
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

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
    ended_text,
    repeat_blocks,
    trainable,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` on either side, `width` (D), `heads` (H) of `head` (K), `hidden` (F), `vocab` (V).

    A batch is `batch` pairs of `seq` tokens (S) and `targets` tokens (T).
    """

    layers: int
    width: int
    heads: int
    head: int
    hidden: int
    vocab: int = 32128
    seq: int = 512
    targets: int = 114
    batch: int = 128
    precision: Precision = MIXED
    scan: bool = False
    remat: bool = False
    adafactor: bool = False


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(2, 32, heads=8, head=4, hidden=64, vocab=64, seq=16, targets=8, batch=8, precision=SINGLE),
        "base": Config(12, 768, heads=12, head=64, hidden=3072),
        "large": Config(24, 1024, heads=16, head=64, hidden=4096),
    }
)

BUCKETS, DISTANCE = 32, 128  # of relative positions; larger distances share a bucket
END, WORDS = 1, 2  # the token that ends a text, and the first that is a word

BLOCK_TABLE = {
    "wq": PartitionSpec(None, "model", None),
    "wk": PartitionSpec(None, "model", None),
    "wv": PartitionSpec(None, "model", None),
    "wo": PartitionSpec("model", None, None),
    "w1": PartitionSpec(None, "model"),
    "w2": PartitionSpec("model", None),
}
TABLE = {"embed": PartitionSpec("model", None), "relative": PartitionSpec(None, "model")}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"inputs" int32[batch, seq], "targets" int32[batch, targets]}, 0 padding."""
    optimizer = optax.adafactor(1e-2) if config.adafactor else optax.adamw(1e-3)
    init, step = trainable(_params(config), partial(_loss, config), optimizer, config.precision.params)
    names = frozenset(BLOCK_TABLE) if config.scan else frozenset[str]()
    table = with_layer_axis({**BLOCK_TABLE, **TABLE}, names)
    notes = (
        "Dimensions: Raffel et al. (2020), section 3.7; length and batch: section 3.1.2; 114 targets are what its span "
        "corruption makes of 512 tokens. No dropout; AdamW unless -adafactor, which is the paper's."
    )
    return Model(name, "t5", step, init, jax.jit(partial(_batch, config)), table, notes)


def _batch(config: Config, key: jax.Array) -> Batch:
    input_key, two = jax.random.split(key)
    words = (WORDS, config.vocab)
    return {
        "inputs": ended_text(input_key, config.batch, config.seq, END, words),
        "targets": ended_text(two, config.batch, config.targets, END, words),
    }


def _params(config: Config) -> Tree:
    width, heads = config.width, config.heads
    relative, norm = Param((BUCKETS, heads), width**-0.5), Param((width,), mean=1.0)
    encoder = {"self": _attention_params(config), "ffn": _feed_forward_params(config)}
    decoder = {**encoder, "cross": _attention_params(config)}
    return {
        "embed": Param((config.vocab, width), 1.0),
        "encoder": {
            "relative": relative,
            "blocks": block_params(encoder, config.layers, scan=config.scan),
            "norm": norm,
        },
        "decoder": {
            "relative": relative,
            "blocks": block_params(decoder, config.layers, scan=config.scan),
            "norm": norm,
        },
    }


def _attention_params(config: Config) -> dict[str, Param]:
    width, heads, head = config.width, config.heads, config.head
    return {
        "norm": Param((width,), mean=1.0),
        "wq": Param((width, heads, head), (width * head) ** -0.5),
        "wk": Param((width, heads, head), width**-0.5),
        "wv": Param((width, heads, head), width**-0.5),
        "wo": Param((heads, head, width), (heads * head) ** -0.5),
    }


def _feed_forward_params(config: Config) -> dict[str, Param]:
    width, hidden = config.width, config.hidden
    return {
        "norm": Param((width,), mean=1.0),
        "w1": Param((width, hidden), width**-0.5),
        "w2": Param((hidden, width), hidden**-0.5),
    }


def buckets(queries: int, keys: int, *, bidirectional: bool) -> jax.Array:
    """int32[queries,keys], the bucket of each relative position: near ones have their own, further ones share.

    Bidirectional buckets keep half of them for keys after the query; the others put all of these into bucket 0.
    """
    relative = jnp.arange(keys) - jnp.arange(queries)[:, None]
    count = BUCKETS // 2 if bidirectional else BUCKETS
    start = jnp.where(relative > 0, count, 0) if bidirectional else 0
    distance = jnp.abs(relative) if bidirectional else jnp.maximum(-relative, 0)
    exact = count // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / log(DISTANCE / exact)
    far = jnp.minimum(exact + (ratio * (count - exact)).astype(jnp.int32), count - 1)
    return (start + jnp.where(distance < exact, distance, far)).astype(jnp.int32)


def _position_bias(table: jax.Array, queries: int, keys: int, *, bidirectional: bool, dtype: str) -> jax.Array:
    """Rows of the table [32,H] by relative position -> [1,H,S,T]."""
    biases = nn.lookup(table, buckets(queries, keys, bidirectional=bidirectional), dtype)
    return biases.transpose(2, 0, 1)[None]


def _attend(params: Tree, x: jax.Array, bias: jax.Array, source: jax.Array | None = None) -> jax.Array:
    h = nn.rms_norm(x, params["norm"])
    return x + nn.multi_head(params, h, h if source is None else source, bias, scaled=False)


def _feed_forward(params: Tree, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(nn.project(nn.rms_norm(x, params["norm"]), params["w1"]))
    return x + nn.project(h, params["w2"])


def _encoder_block(params: Tree, x: jax.Array, bias: jax.Array) -> jax.Array:
    """One block on x [B,S,D] with bias [B,H,S,S]."""
    return _feed_forward(params["ffn"], _attend(params["self"], x, bias))


def _decoder_block(params: Tree, x: jax.Array, bias: jax.Array, source: jax.Array, padding: jax.Array) -> jax.Array:
    """One block on x [B,T,D] with bias [B,H,T,T]; it attends to source [B,S,D] with padding [B,1,1,S]."""
    x = _attend(params["self"], x, bias)
    return _feed_forward(params["ffn"], _attend(params["cross"], x, padding, source))


def _encode(config: Config, params: Tree, embed: jax.Array, tokens: jax.Array, padding: jax.Array) -> jax.Array:
    dtype, seq = config.precision.compute, tokens.shape[1]
    bias = padding + _position_bias(params["relative"], seq, seq, bidirectional=True, dtype=dtype)
    x = nn.lookup(embed, tokens, dtype)
    x = repeat_blocks(_encoder_block, params["blocks"], x, bias, scan=config.scan, remat=config.remat)
    return nn.rms_norm(x, params["norm"])


def _decode(
    config: Config, params: Tree, embed: jax.Array, tokens: jax.Array, source: jax.Array, padding: jax.Array
) -> jax.Array:
    dtype, seq = config.precision.compute, tokens.shape[1]
    bias = _position_bias(params["relative"], seq, seq, bidirectional=False, dtype=dtype)
    # Padding comes after the words, so that the causal mask hides it from all targets that count; the original masks it
    # as well. The first input is 0 too, and seen.
    seen = (tokens > 0).at[:, 0].set(True)[:, None, None, :]
    bias = bias + nn.mask_bias(seen & nn.causal(seq), dtype)
    x = nn.lookup(embed, tokens, dtype)
    shared = (bias, source, padding)
    x = repeat_blocks(_decoder_block, params["blocks"], x, *shared, scan=config.scan, remat=config.remat)
    return nn.rms_norm(x, params["norm"])


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    inputs, targets, embed = batch["inputs"], batch["targets"], params["embed"]
    padding = nn.mask_bias(inputs > 0, config.precision.compute)[:, None, None, :]
    source = _encode(config, params["encoder"], embed, inputs, padding)
    shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    x = _decode(config, params["decoder"], embed, shifted, source, padding)
    logits = nn.project(x * config.width**-0.5, embed.T)
    return nn.weighted_cross_entropy(logits, targets, targets > 0)
