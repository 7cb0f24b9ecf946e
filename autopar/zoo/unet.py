"""A conditional U-Net for diffusion: convolutions, time embedding, self- and cross-attention, skips from down to up.

    down, per level: residual block, transformer; halve
    middle: residual block, transformer, residual block
    up, per level: concatenate the level's output on the way down, residual block, transformer; double

(Ronneberger et al., 2015; Ho et al., 2020; Rombach et al., 2022.) The skips join distant layers, which a chain of
pipeline stages must carry along -> _predict. It predicts the noise of NHWC images; the loss is the mean squared error.

The named sizes are those of Alpa's public benchmark suite: image side 32, channels (c, 2 c, 4 c, 4 c), eight heads,
context of (side / 8)^2 tokens of width 4 c, float32. Its up path differs in detail (which levels attend, how many
skips), so that parameter counts here are near the names, not equal to them.
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

from autopar.zoo.layers import nn
from autopar.zoo.model import (
    SINGLE,
    Batch,
    Model,
    Param,
    Precision,
    Tree,
    norm_spec,
    normals,
    trainable,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `channels` (c), `image` side in pixels, `heads`, `groups` of the norm, `batch` images.

    Of the `levels`, the upper `attending` have transformers; the middle always has one.
    """

    channels: int
    levels: int = 4
    attending: int = 3
    image: int = 32
    heads: int = 8
    groups: int = 4
    batch: int = 2048
    precision: Precision = SINGLE
    remat: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels per level: doubled at every level but the last."""
        return tuple(self.channels * 2 ** min(i, self.levels - 2) for i in range(self.levels))


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(16, levels=2, attending=0, image=8, batch=8),
        "470m": Config(320, batch=256),
        "1b": Config(480),
        "1.2b": Config(512),
        "1.8b": Config(640),
        "2b": Config(672),
    }
)

TABLE = {
    "wq": PartitionSpec(None, "model", None),
    "wk": PartitionSpec(None, "model", None),
    "wv": PartitionSpec(None, "model", None),
    "wo": PartitionSpec("model", None, None),
    "w1": PartitionSpec(None, None, "model"),
    "w2": PartitionSpec("model", None),
    "conv1/kernel": PartitionSpec(None, None, None, "model"),
    "conv2/kernel": PartitionSpec(None, None, "model", None),
}

IMAGE_CHANNELS = 4


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = images and noise [B,H,W,4], times [B], context [B,T,4 c]."""
    init, step = trainable(_params(config), partial(_loss, config), optax.adamw(1e-4), config.precision.params)
    notes = "Dimensions: Alpa's benchmark suite; the up path is plainer, so sizes are near the names only."
    return Model(name, "unet", step, init, jax.jit(partial(_batch, config)), with_layer_axis(TABLE, frozenset()), notes)


# Parameters


def _params(config: Config) -> Tree:
    widths, base = config.widths, config.channels
    residual = {"residual": _residual_params(config, widths[-1], widths[-1])}
    return {
        "first": _conv_params(3, IMAGE_CHANNELS, base),
        "time1": _dense_params(base, 4 * base),
        "time2": _dense_params(4 * base, 4 * base),
        "down": [_down_params(config, level) for level in range(config.levels)],
        "middle": [
            {**residual, "transformer": _transformer_params(config, widths[-1])},
            residual,
        ],
        "up": [_up_params(config, level) for level in reversed(range(config.levels))],
        "norm": norm_spec(base),
        "last": _conv_params(3, base, IMAGE_CHANNELS),
    }


def _down_params(config: Config, level: int) -> Tree:
    width, inputs = config.widths[level], config.widths[max(level - 1, 0)]
    resize = {"resize": _conv_params(3, width, width)} if level < config.levels - 1 else {}
    return {**_block_params(config, level, inputs), **resize}


def _up_params(config: Config, level: int) -> Tree:
    width, below = config.widths[level], config.widths[min(level + 1, config.levels - 1)]
    resize = {"resize": _conv_params(3, width, width)} if level > 0 else {}
    return {**_block_params(config, level, below + width), **resize}


def _block_params(config: Config, level: int, inputs: int) -> Tree:
    params = {"residual": _residual_params(config, inputs, config.widths[level])}
    attends = level < config.attending
    return {**params, "transformer": _transformer_params(config, config.widths[level])} if attends else params


def _conv_params(side: int, inputs: int, outputs: int) -> Tree:
    return {"kernel": Param((side, side, inputs, outputs), (side * side * inputs) ** -0.5), "bias": Param((outputs,))}


def _dense_params(inputs: int, outputs: int) -> Tree:
    return {"kernel": Param((inputs, outputs), inputs**-0.5), "bias": Param((outputs,))}


def _residual_params(config: Config, inputs: int, outputs: int) -> Tree:
    params = {
        "norm1": norm_spec(inputs),
        "conv1": _conv_params(3, inputs, outputs),
        "time": _dense_params(4 * config.channels, outputs),
        "norm2": norm_spec(outputs),
        "conv2": _conv_params(3, outputs, outputs),
    }
    return params if inputs == outputs else {**params, "shortcut": _dense_params(inputs, outputs)}


def _attention_params(config: Config, width: int, context: int) -> Tree:
    split = (config.heads, width // config.heads)
    return {
        **norm_spec(width),
        "wq": Param((width, *split), width**-0.5),
        "wk": Param((context, *split), context**-0.5),
        "wv": Param((context, *split), context**-0.5),
        "wo": Param((*split, width), width**-0.5),
        "bo": Param((width,)),
    }


def _transformer_params(config: Config, width: int) -> Tree:
    hidden = 4 * width
    return {
        "norm": norm_spec(width),
        "enter": _dense_params(width, width),
        "self": _attention_params(config, width, width),
        "cross": _attention_params(config, width, config.widths[-1]),
        "glu": {
            **norm_spec(width),
            "w1": Param((width, 2, hidden), width**-0.5),
            "b1": Param((2, hidden)),
            "w2": Param((hidden, width), hidden**-0.5),
            "b2": Param((width,)),
        },
        "leave": _dense_params(width, width),
    }


# Layers


def group_norm(x: jax.Array, params: Tree, groups: int) -> jax.Array:
    """Group normalisation of x [N,H,W,C] over H, W and C / groups (Wu and He, 2018)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(*x.shape[:3], groups, -1)
    mean = jnp.mean(wide, (1, 2, 4), keepdims=True)
    var = jnp.mean(jnp.square(wide - mean), (1, 2, 4), keepdims=True)
    unit = ((wide - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape).astype(x.dtype)
    return unit * params["scale"].astype(x.dtype) + params["bias"].astype(x.dtype)


def _conv(x: jax.Array, params: Tree, stride: int = 1) -> jax.Array:
    return nn.add_bias(nn.convolve(x, params["kernel"], stride), params["bias"])


def _residual(config: Config, params: Tree, x: jax.Array, time: jax.Array) -> jax.Array:
    """Residual block on x [N,H,W,C], shifted by the time embedding [N, 4 c]."""
    y = _conv(nn.silu(group_norm(x, params["norm1"], config.groups)), params["conv1"])
    y = y + nn.dense(params["time"], nn.silu(time))[:, None, None, :]
    y = _conv(nn.silu(group_norm(y, params["norm2"], config.groups)), params["conv2"])
    return y + (nn.dense(params["shortcut"], x) if "shortcut" in params else x)


def _attention(params: Tree, x: jax.Array, context: jax.Array | None) -> jax.Array:
    h = nn.norm(params, x)
    source = h if context is None else context
    query, key, value = nn.project(h, params["wq"]), nn.project(source, params["wk"]), nn.project(source, params["wv"])
    return x + nn.add_bias(nn.merge_heads(nn.attend(query, key, value), params["wo"]), params["bo"])


def _gated(params: Tree, x: jax.Array) -> jax.Array:
    h = nn.affine(nn.norm(params, x), params["w1"], params["b1"])
    return x + nn.affine(h[..., 0, :] * nn.gelu(h[..., 1, :]), params["w2"], params["b2"])


def _transformer(config: Config, params: Tree, x: jax.Array, context: jax.Array) -> jax.Array:
    """x [N,H,W,C] plus a transformer block over its H W pixels, which also attends to context [N,T,4 c]."""
    pixels = group_norm(x, params["norm"], config.groups).reshape(x.shape[0], -1, x.shape[-1])
    y = _attention(params["self"], nn.dense(params["enter"], pixels), None)
    y = _gated(params["glu"], _attention(params["cross"], y, context))
    return x + nn.dense(params["leave"], y).reshape(x.shape)


def _block(config: Config, params: Tree, x: jax.Array, time: jax.Array, context: jax.Array) -> jax.Array:
    x = _residual(config, params["residual"], x, time)
    return _transformer(config, params["transformer"], x, context) if "transformer" in params else x


def _double(x: jax.Array) -> jax.Array:
    """Nearest-neighbour upsampling of x [N,H,W,C] to twice the side."""
    batch, height, width, channels = x.shape
    wide = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
    return wide.reshape(batch, 2 * height, 2 * width, channels)


# The network


def _predict(config: Config, params: Tree, images: jax.Array, times: jax.Array, context: jax.Array) -> jax.Array:
    plain = partial(_block, config)
    block = jax.checkpoint(plain) if config.remat else plain
    time = nn.silu(nn.dense(params["time1"], nn.sinusoids(times, config.channels).astype(images.dtype)))
    time = nn.dense(params["time2"], time)
    x = _conv(images, params["first"])
    skips: list[jax.Array] = []
    for level in params["down"]:
        x = block(level, x, time, context)
        skips.append(x)
        x = _conv(x, level["resize"], 2) if "resize" in level else x
    for layer in params["middle"]:
        x = block(layer, x, time, context)
    for level in params["up"]:
        x = block(level, jnp.concatenate([x, skips.pop()], -1), time, context)
        x = _conv(_double(x), level["resize"]) if "resize" in level else x
    return _conv(nn.silu(group_norm(x, params["norm"], config.groups)), params["last"])


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    dtype = config.precision.compute
    images, noise = batch["images"], batch["noise"]
    # Cosine schedule of Nichol and Dhariwal (2021): at time t the image keeps cos(t pi / 2000) of itself.
    phase = (batch["times"] * (jnp.pi / 2000))[:, None, None, None]
    mixed = (jnp.cos(phase) * images + jnp.sin(phase) * noise).astype(dtype)
    guess = _predict(config, params, mixed, batch["times"], batch["context"].astype(dtype))
    return jnp.mean(jnp.square(guess.astype(noise.dtype) - noise))


def _batch(config: Config, key: jax.Array) -> Batch:
    images = (config.batch, config.image, config.image, IMAGE_CHANNELS)
    tokens = (config.image // 2 ** (config.levels - 1)) ** 2
    shapes = [images, images, (config.batch, tokens, config.widths[-1]), (config.batch,)]
    clean, noise, context, times = normals(shapes, key, config.precision.params)
    return {"images": clean, "noise": noise, "context": context, "times": 1000 * lax.logistic(times)}
