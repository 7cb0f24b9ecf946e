"""BERT: post-norm transformer encoder that predicts masked tokens and the next sentence (Devlin et al., 2019).

    x <- LN(x + Attention(x) Wo + bo)           Wq, Wk, Wv [D,H,K], Wo [H,K,D]
    x <- LN(x + gelu(x W1 + b1) W2 + b2)        W1 [D,4D], W2 [4D,D]

The batch is as the original's data come: token, segment and attention-mask rows of a fixed length, and a fixed number
of predicted positions per row, with a weight of 0 where a row has fewer. The step turns the mask into a bias, gathers
the predicted positions before the output layer, and weighs their losses.
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

from autopar.zoo import gpt
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
    lengths_between,
    norm_spec,
    repeat_blocks,
    trainable,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` of `width` (D) and `heads` (H), `vocab` (V), `batch` sequences of `seq` tokens (S).

    Of each sequence up to `predictions` (P) tokens are predicted.
    """

    layers: int
    width: int
    heads: int
    vocab: int = 30522
    seq: int = 512
    predictions: int = 76
    batch: int = 256
    precision: Precision = MIXED
    scan: bool = False
    remat: bool = False


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(2, 32, 8, vocab=64, seq=16, predictions=4, batch=8, precision=SINGLE),
        "base": Config(12, 768, 12),
        "large": Config(24, 1024, 16),
    }
)

TABLE = {
    "embed": PartitionSpec("model", None),
    "output_bias": PartitionSpec("model"),
}

MASK, WORDS = 3, 4  # the token that hides others, and the first that is a word


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; what is in a batch: `_batch`."""
    optimizer = optax.adamw(1e-4, weight_decay=0.01)
    init, step = trainable(_params(config), partial(_loss, config), optimizer, config.precision.params)
    names = frozenset(gpt.BLOCK_TABLE) if config.scan else frozenset[str]()
    table = with_layer_axis({**gpt.BLOCK_TABLE, **TABLE}, names)
    notes = (
        "Dimensions and batch: Devlin et al. (2019), sections 3 and A.2; 76 predictions a row as in MLPerf. "
        "No dropout, and no key bias, which cancels in the softmax."
    )
    return Model(name, "bert", step, init, jax.jit(partial(_batch, config)), table, notes)


def _batch(config: Config, key: jax.Array) -> Batch:
    """tokens, segments, mask int32[B,S]; positions, labels int32[B,P], weights [B,P]; is_next int32[B].

    Rows are padded after lengths from S / 2 to S. Of the predicted tokens 80% are hidden, 10% are another
    word, 10% stay.
    """
    rows, seq, most = config.batch, config.seq, config.predictions
    keys = jax.random.split(key, 7)
    lengths = lengths_between(keys[0], rows, seq)[:, None]
    inside = jnp.arange(seq) < lengths
    words = jax.random.randint(keys[1], (rows, seq), WORDS, config.vocab, jnp.int32)
    order = jnp.argsort(jnp.where(inside, jax.random.uniform(keys[2], (rows, seq)), 2.0), axis=1)
    positions = jnp.sort(order[:, :most], axis=1).astype(jnp.int32)
    labels = jnp.take_along_axis(words, positions, axis=1)
    random_words = jax.random.randint(keys[3], (rows, most), WORDS, config.vocab, jnp.int32)
    choice = jax.random.uniform(keys[4], (rows, most))
    shown = jnp.where(choice < 0.8, MASK, jnp.where(choice < 0.9, random_words, labels))
    counts = jnp.clip(lengths * 15 // 100, 1, most)
    counted = jnp.arange(most) < counts
    shown = jnp.where(counted, shown, labels)
    tokens = words.at[jnp.arange(rows)[:, None], positions].set(shown)
    return {
        "tokens": jnp.where(inside, tokens, 0),
        "segments": (inside & (jnp.arange(seq) >= lengths // 2)).astype(jnp.int32),
        "mask": inside.astype(jnp.int32),
        "positions": positions,
        "labels": labels,
        "weights": counted.astype(config.precision.params),
        "is_next": jax.random.randint(keys[5], (rows,), 0, 2, jnp.int32),
    }


def _params(config: Config) -> Tree:
    width = config.width
    return {
        "embed": Param((config.vocab, width), 0.02),
        "segments": Param((2, width), 0.02),
        "positions": Param((config.seq, width), 0.02),
        "norm": norm_spec(width),
        "blocks": block_params(gpt.block_spec(width, config.heads), config.layers, scan=config.scan),
        "transform": {"kernel": Param((width, width), 0.02), "bias": Param((width,)), "norm": norm_spec(width)},
        "output_bias": Param((config.vocab,)),
        "pooler": {"kernel": Param((width, width), 0.02), "bias": Param((width,))},
        "next": {"kernel": Param((width, 2), 0.02), "bias": Param((2,))},
    }


def _block(params: Tree, x: jax.Array, bias: jax.Array) -> jax.Array:
    """One block on x [B,S,D] with the padding's bias [B,1,1,S]."""
    x = nn.layer_norm(x + nn.multi_head(params, x, x, bias), params["ln1_scale"], params["ln1_bias"])
    hidden = nn.erf_gelu(nn.affine(x, params["w1"], params["b1"]))
    return nn.layer_norm(x + nn.affine(hidden, params["w2"], params["b2"]), params["ln2_scale"], params["ln2_bias"])


def _encode(config: Config, params: Tree, batch: Batch) -> jax.Array:
    """[B,S,D] of a batch's tokens, segments and mask."""
    dtype = config.precision.compute
    x = nn.lookup(params["embed"], batch["tokens"], dtype) + nn.lookup(params["segments"], batch["segments"], dtype)
    x = nn.norm(params["norm"], nn.add_bias(x, params["positions"]))
    bias = nn.mask_bias(batch["mask"] > 0, dtype)[:, None, None, :]
    return repeat_blocks(_block, params["blocks"], x, bias, scan=config.scan, remat=config.remat)


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    """The mean loss of the predicted tokens plus that of the next sentence."""
    x = _encode(config, params, batch)
    predicted = jnp.take_along_axis(x, batch["positions"][:, :, None], axis=1)
    predicted = nn.norm(params["transform"]["norm"], nn.erf_gelu(nn.dense(params["transform"], predicted)))
    logits = nn.affine(predicted, params["embed"].T, params["output_bias"])
    tokens = nn.weighted_cross_entropy(logits, batch["labels"], batch["weights"])
    pooled = jnp.tanh(nn.dense(params["pooler"], x[:, 0]))
    return tokens + nn.cross_entropy(nn.dense(params["next"], pooled), batch["is_next"])
