"""Vision transformer: patches as tokens, the blocks of GPT without a mask, mean pooling (Dosovitskiy et al., 2021)."""

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
    image_batch,
    repeat_blocks,
    trainable,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` of `width` (D) and `heads`; square `image` and `patch` sides in pixels; `batch` images."""

    layers: int
    width: int
    heads: int
    patch: int
    image: int = 224
    classes: int = 1000
    batch: int = 4096
    precision: Precision = MIXED
    scan: bool = False
    remat: bool = False
    attention: str = "naive"


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(2, 32, 8, patch=4, image=16, classes=64, batch=8, precision=SINGLE),
        "b16": Config(12, 768, 12, patch=16),
        "l16": Config(24, 1024, 16, patch=16),
        "h14": Config(32, 1280, 16, patch=14),
    }
)


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"images" [batch, image, image, 3], "labels" int32[batch]}."""
    seq = (config.image // config.patch) ** 2
    attentions.check(name, config.attention, head=config.width // config.heads, seq=seq, dtype=config.precision.compute)
    init, step = trainable(_params(config), partial(_loss, config), optax.adamw(3e-4), config.precision.params)
    names = frozenset(gpt.BLOCK_TABLE) if config.scan else frozenset[str]()
    table = with_layer_axis({**gpt.BLOCK_TABLE, "head": PartitionSpec(None, "model")}, names)
    batch = image_batch(config.batch, config.image, 3, config.classes, config.precision.params)
    notes = "Dimensions: Dosovitskiy et al. (2021), table 1; mean pooling in place of the class token."
    return Model(name, "vit", step, init, batch, table, notes)


def _params(config: Config) -> Tree:
    width = config.width
    return {
        "patches": Param((3 * config.patch**2, width), 0.02),
        "positions": Param(((config.image // config.patch) ** 2, width), 0.02),
        "blocks": block_params(gpt.block_spec(width, config.heads), config.layers, scan=config.scan),
        "ln_scale": Param((width,), mean=1.0),
        "ln_bias": Param((width,)),
        "head": Param((width, config.classes), 0.02),
    }


def patches(images: jax.Array, side: int) -> jax.Array:
    """[B,H,W,C] -> [B, (H/side)(W/side), side side C]: the image cut into squares, row by row."""
    batch, height, width, channels = images.shape
    rows, columns = height // side, width // side
    tiles = images.reshape(batch, rows, side, columns, side, channels).transpose(0, 1, 3, 2, 4, 5)
    return tiles.reshape(batch, rows * columns, side * side * channels)


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    tokens = patches(batch["images"].astype(config.precision.compute), config.patch)
    x = nn.add_bias(nn.project(tokens, params["patches"]), params["positions"])
    body = gpt.with_kernel(gpt.block, config.attention, causal=False)
    x = repeat_blocks(body, params["blocks"], x, None, scan=config.scan, remat=config.remat)
    pooled = jnp.mean(nn.layer_norm(x, params["ln_scale"], params["ln_bias"]), axis=1)
    return nn.cross_entropy(nn.project(pooled, params["head"]), batch["labels"])
