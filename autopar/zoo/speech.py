"""Speech encoder-decoder in the manner of Whisper (Radford et al., 2023).

    mel [B,F,M] -> gelu(conv) -> gelu(conv, stride 2) [B,F/2,D] -> + sinusoids -> pre-norm encoder blocks -> LN
    tokens [B,S] -> + learned positions -> blocks of causal self-attention, cross-attention, GELU -> LN -> embed^T

Keys have no bias. The loss counts the tokens before each text's end; the step makes the mask from the lengths.
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
    normals,
    repeat_blocks,
    trainable,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` on either side, `width` (D), `heads`, `vocab` (V), `mels` (M) of `frames` (F).

    A batch is `batch` recordings with texts of up to `seq` tokens (S).
    """

    layers: int
    width: int
    heads: int
    mels: int = 80
    vocab: int = 51865
    frames: int = 3000
    seq: int = 448
    batch: int = 256
    precision: Precision = MIXED
    scan: bool = False
    remat: bool = False


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(2, 32, 8, mels=8, vocab=64, frames=32, seq=8, batch=8, precision=SINGLE),
        "small": Config(12, 768, 12),
        "large": Config(32, 1280, 20, mels=128, vocab=51866),
    }
)

TABLE = {"embed": PartitionSpec("model", None)}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"mel" [B,F,M], "tokens" int32[B,S+1], "lengths" int32[B]}."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-4, b2=0.98, eps=1e-6, weight_decay=0.1))
    init, step = trainable(_params(config), partial(_loss, config), optimizer, config.precision.params)
    names = frozenset(gpt.BLOCK_TABLE) if config.scan else frozenset[str]()
    table = with_layer_axis({**gpt.BLOCK_TABLE, **TABLE}, names)
    notes = (
        "Dimensions, batch and optimizer: Radford et al. (2023), table 1 and appendix F; 128 mels and vocabulary of "
        "the large model: its third release. No positions are trained in the encoder."
    )
    return Model(name, "speech", step, init, jax.jit(partial(_batch, config)), table, notes)


def _batch(config: Config, key: jax.Array) -> Batch:
    mel_key, two, three = jax.random.split(key, 3)
    (mel,) = normals([(config.batch, config.frames, config.mels)], mel_key, config.precision.params)
    text = jax.random.randint(two, (config.batch, config.seq + 1), 0, config.vocab, jnp.int32)
    return {"mel": mel, "tokens": text, "lengths": lengths_between(three, config.batch, config.seq)}


def _params(config: Config) -> Tree:
    width, heads, scan = config.width, config.heads, config.scan
    encoder = gpt.block_spec(width, heads)
    decoder = {
        "self": gpt.attention_spec(width, heads),
        "cross": gpt.attention_spec(width, heads),
        "ffn": gpt.feed_forward_spec(width, 4 * width),
    }
    return {
        "conv1": _conv_params(config.mels, width),
        "conv2": _conv_params(width, width),
        "encoder": {"blocks": block_params(encoder, config.layers, scan=scan), **_norm_params(width)},
        "decoder": {
            **gpt.embedding_spec(config.vocab, config.seq, width, tied=True),
            "blocks": block_params(decoder, config.layers, scan=scan),
        },
    }


def _conv_params(inputs: int, outputs: int) -> dict[str, Param]:
    return {"kernel": Param((3, inputs, outputs), (3 * inputs) ** -0.5), "bias": Param((outputs,))}


def _norm_params(width: int) -> dict[str, Param]:
    return {"ln_scale": Param((width,), mean=1.0), "ln_bias": Param((width,))}


def _convolve(params: Tree, x: jax.Array, stride: int = 1) -> jax.Array:
    return nn.erf_gelu(nn.add_bias(nn.convolve1d(x, params["kernel"], stride), params["bias"]))


def _encoder_block(params: Tree, x: jax.Array) -> jax.Array:
    return gpt.block(params, x, activation=nn.erf_gelu)


def _decoder_block(params: Tree, x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """One block on x [B,S,D] with mask [B,1,S,S], which attends to all of source [B,F/2,D]."""
    x = gpt.attention(params["self"], x, mask)
    x = gpt.attention(params["cross"], x, None, source)
    return gpt.feed_forward(params["ffn"], x, nn.erf_gelu)


def _encode(config: Config, params: Tree, mel: jax.Array) -> jax.Array:
    """mel [B,F,M] -> [B,F/2,D]."""
    x = _convolve(params["conv2"], _convolve(params["conv1"], mel.astype(config.precision.compute)), 2)
    steps = jnp.arange(x.shape[1], dtype=jnp.promote_types(x.dtype, jnp.float32))
    x = x + nn.sinusoids(steps, config.width).astype(x.dtype)
    encoder = params["encoder"]
    x = repeat_blocks(_encoder_block, encoder["blocks"], x, scan=config.scan, remat=config.remat)
    return nn.layer_norm(x, encoder["ln_scale"], encoder["ln_bias"])


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    dtype, decoder = config.precision.compute, params["decoder"]
    source = _encode(config, params, batch["mel"])
    inside = nn.before(batch["lengths"], config.seq)
    mask = nn.mask_bias(inside[:, None, None, :] & nn.causal(config.seq), dtype)
    x = gpt.embed(decoder, batch["tokens"][:, :-1], dtype)
    x = repeat_blocks(_decoder_block, decoder["blocks"], x, mask, source, scan=config.scan, remat=config.remat)
    x = nn.layer_norm(x, decoder["ln_scale"], decoder["ln_bias"])
    return nn.weighted_cross_entropy(nn.project(x, decoder["embed"].T), batch["tokens"][:, 1:], inside)
