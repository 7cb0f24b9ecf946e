"""A speech recogniser: Conformer encoder (Gulati et al., 2020), trained by CTC (Graves et al., 2006).

    mel [B,F,M] -> two 3x3 convolutions of stride 2, ReLU -> [B,T,D], T = F/4
    x <- x + FFN(x) / 2                              LN, W1 [D,4D], swish, W2 [4D,D]
    x <- x + Attention(LN(x))                        relative positions: (q + u) k^T + (q + v) p^T, p [2T-1,H,K]
    x <- x + Conv(LN(x))                             GLU of D -> 2D; depthwise, 32 wide; norm; swish; D -> D
    x <- LN(x + FFN(x) / 2)

The norm inside the convolution is a layer norm, where the paper has a batch norm: frames of padding do not enter it.
The step makes the padding masks from the lengths, for the attention, the convolution and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax
from jax import lax
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
    lengths_between,
    norm_spec,
    normals,
    repeat_blocks,
    trainable,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` of `width` (D), `heads` (H) and `kernel` frames; `vocab` (V) with the blank as its 0.

    A batch is `batch` recordings of `seq` frames (F) of `mels` (M), with texts of up to `labels` tokens (N).
    """

    layers: int
    width: int
    heads: int
    kernel: int = 32
    vocab: int = 1024
    mels: int = 80
    seq: int = 1600
    labels: int = 128
    batch: int = 256
    precision: Precision = MIXED
    scan: bool = False
    remat: bool = False


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(2, 32, 8, kernel=4, vocab=32, mels=8, seq=64, labels=4, batch=8, precision=SINGLE),
        "medium": Config(16, 256, 4),
        "large": Config(17, 512, 8),
    }
)

BLOCK_TABLE = {
    "wq": PartitionSpec(None, "model", None),
    "wk": PartitionSpec(None, "model", None),
    "wv": PartitionSpec(None, "model", None),
    "wp": PartitionSpec(None, "model", None),
    "bq": PartitionSpec("model", None),
    "bv": PartitionSpec("model", None),
    "content": PartitionSpec("model", None),
    "relative": PartitionSpec("model", None),
    "wo": PartitionSpec("model", None, None),
    "w1": PartitionSpec(None, "model"),
    "b1": PartitionSpec("model"),
    "w2": PartitionSpec("model", None),
}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`.

    batch = {"mel" [B,F,M], "frames" int32[B], "labels" int32[B,N], "lengths" int32[B]}: frames and lengths are numbers
    of frames and labels before the padding.
    """
    optimizer = optax.adamw(1e-3, b2=0.98, eps=1e-6, weight_decay=1e-6)
    init, step = trainable(_params(config), partial(_loss, config), optimizer, config.precision.params)
    names = frozenset(BLOCK_TABLE) if config.scan else frozenset[str]()
    notes = (
        "Dimensions: Gulati et al. (2020), table 1, without its LSTM decoder; lengths and batch are ours. No dropout, "
        "layer norm for batch norm, and no key bias, which cancels in the softmax. Slow sinusoids nearly do: Adam's "
        "epsilon is 1e-6, not 1e-9, so that it does not scale up the rounding of their gradients."
    )
    make_batch = jax.jit(partial(_batch, config))
    return Model(name, "ctc", step, init, make_batch, with_layer_axis(BLOCK_TABLE, names), notes)


def _batch(config: Config, key: jax.Array) -> Batch:
    keys = jax.random.split(key, 4)
    (mel,) = normals([(config.batch, config.seq, config.mels)], keys[0], config.precision.params)
    return {
        "mel": mel,
        "frames": lengths_between(keys[1], config.batch, config.seq),
        "labels": jax.random.randint(keys[2], (config.batch, config.labels), 1, config.vocab, jnp.int32),
        "lengths": lengths_between(keys[3], config.batch, config.labels),
    }


# Parameters


def _params(config: Config) -> Tree:
    width, bands = config.width, -(-config.mels // 4)
    return {
        "conv1": _kernel_params((3, 3), 1, width),
        "conv2": _kernel_params((3, 3), width, width),
        "enter": _kernel_params((bands,), width, width),
        "blocks": block_params(_block_params(config), config.layers, scan=config.scan),
        "head": _kernel_params((), width, config.vocab),
    }


def _kernel_params(sides: tuple[int, ...], inputs: int, outputs: int) -> dict[str, Param]:
    shape = (*sides, inputs, outputs)
    return {"kernel": Param(shape, math.prod(shape[:-1]) ** -0.5), "bias": Param((outputs,))}


def _feed_forward_params(width: int) -> Tree:
    return {
        "norm": norm_spec(width),
        "w1": Param((width, 4 * width), width**-0.5),
        "b1": Param((4 * width,)),
        "w2": Param((4 * width, width), (4 * width) ** -0.5),
        "b2": Param((width,)),
    }


def _block_params(config: Config) -> Tree:
    width = config.width
    split = (config.heads, width // config.heads)
    return {
        "ffn1": _feed_forward_params(width),
        "attention": {
            "norm": norm_spec(width),
            **{name: Param((width, *split), width**-0.5) for name in ("wq", "wk", "wv", "wp")},
            **{name: Param(split) for name in ("bq", "bv", "content", "relative")},
            "wo": Param((*split, width), width**-0.5),
            "bo": Param((width,)),
        },
        "conv": {
            "norm": norm_spec(width),
            "enter": _kernel_params((), width, 2 * width),
            "depthwise": {"kernel": Param((config.kernel, 1, width), config.kernel**-0.5), "bias": Param((width,))},
            "inner_norm": norm_spec(width),
            "leave": _kernel_params((), width, width),
        },
        "ffn2": _feed_forward_params(width),
        "norm": norm_spec(width),
    }


# Layers


def _feed_forward(params: Tree, x: jax.Array) -> jax.Array:
    """x [B,T,D] plus half of the feed-forward layer of its norm."""
    h = nn.silu(nn.affine(nn.norm(params["norm"], x), params["w1"], params["b1"]))
    return x + 0.5 * nn.affine(h, params["w2"], params["b2"])


def shift(scores: jax.Array) -> jax.Array:
    """Scores [B,H,T,2T-1] of queries by relative position, T-1 to -(T-1) -> [B,H,T,T] by key (Dai et al., 2019).

    A column of zeros in front makes rows of 2T; read as rows of 2T - 1, each starts one further to the left.
    """
    batch, heads, steps, offsets = scores.shape
    wide = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(batch, heads, offsets + 1, steps)
    return wide[:, :, 1:].reshape(batch, heads, steps, offsets)[..., :steps]


def _attention(params: Tree, x: jax.Array, bias: jax.Array, positions: jax.Array) -> jax.Array:
    """x [B,T,D] plus attention of its norm, with the padding's bias [B,1,1,T] and sinusoids [2T-1,D]."""
    h = nn.norm(params["norm"], x)
    query, value = (nn.affine(h, params[f"w{n}"], params[f"b{n}"]) for n in "qv")
    key, offsets = nn.project(h, params["wk"]), nn.project(positions, params["wp"])
    content, relative = nn.add_bias(query, params["content"]), nn.add_bias(query, params["relative"])
    scores = jnp.einsum("bshk,bthk->bhst", content, key) + shift(jnp.einsum("bshk,ohk->bhso", relative, offsets))
    weights = nn.softmax(scores * key.shape[-1] ** -0.5 + bias)
    mixed = jnp.einsum("bhst,bthk->bhsk", weights, value)
    return x + nn.add_bias(nn.merge_heads(mixed, params["wo"]), params["bo"])


def _convolution(params: Tree, x: jax.Array, inside: jax.Array) -> jax.Array:
    """x [B,T,D] plus the convolution of its norm, over frames that are inside, bool[B,T,1]."""
    h, gate = jnp.split(nn.dense(params["enter"], nn.norm(params["norm"], x)), 2, axis=-1)
    h = jnp.where(inside, h * lax.logistic(gate), 0)
    h = nn.add_bias(nn.convolve1d(h, params["depthwise"]["kernel"]), params["depthwise"]["bias"])
    return x + nn.dense(params["leave"], nn.silu(nn.norm(params["inner_norm"], h)))


def _block(params: Tree, x: jax.Array, bias: jax.Array, positions: jax.Array, inside: jax.Array) -> jax.Array:
    x = _attention(params["attention"], _feed_forward(params["ffn1"], x), bias, positions)
    return nn.norm(params["norm"], _feed_forward(params["ffn2"], _convolution(params["conv"], x, inside)))


# The network


def _enter(params: Tree, mel: jax.Array) -> jax.Array:
    """mel [B,F,M] -> [B,T,D]: convolved over frames and bands, a quarter of both left; the bands are then merged."""
    x = mel[..., None]
    for name in ("conv1", "conv2"):
        x = jax.nn.relu(nn.add_bias(nn.convolve(x, params[name]["kernel"], 2), params[name]["bias"]))
    return nn.dense(params["enter"], x, 2)


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    dtype = config.precision.compute
    x = _enter(params, batch["mel"].astype(dtype))
    steps = x.shape[1]
    inside = nn.before((batch["frames"] + 3) // 4, steps)
    offsets = jnp.arange(steps - 1, -steps, -1).astype(jnp.promote_types(dtype, jnp.float32))
    positions = nn.sinusoids(offsets, config.width).astype(dtype)
    bias = nn.mask_bias(inside, dtype)[:, None, None, :]
    shared = (bias, positions, inside[..., None])
    x = repeat_blocks(_block, params["blocks"], x, *shared, scan=config.scan, remat=config.remat)
    logits = nn.dense(params["head"], x).astype(jnp.promote_types(dtype, jnp.float32))
    paddings = (~inside).astype(logits.dtype)
    label_paddings = (~nn.before(batch["lengths"], config.labels)).astype(logits.dtype)
    return jnp.mean(optax.ctc_loss(logits, paddings, batch["labels"], label_paddings))
