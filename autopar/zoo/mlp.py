"""A residual multi-layer perceptron on a regression target: the smallest step with every phase of training.

Each block is x + relu(x W1 + b1) W2 + b2 with W1 [D,F] and W2 [F,D]: the pair that Megatron splits by column, then row.
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

from autopar.zoo.layers import nn
from autopar.zoo.model import (
    SINGLE,
    Batch,
    Model,
    Param,
    Precision,
    Tree,
    block_params,
    normals,
    repeat_blocks,
    trainable,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` blocks of `width` (D) and `hidden` (F) on `batch` rows."""

    layers: int
    width: int
    hidden: int
    batch: int
    precision: Precision = SINGLE
    scan: bool = False
    remat: bool = False


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(layers=2, width=32, hidden=64, batch=8),
        "1b": Config(layers=8, width=4096, hidden=16384, batch=4096),
    }
)

TABLE = {
    "w1": PartitionSpec(None, "model"),
    "b1": PartitionSpec("model"),
    "w2": PartitionSpec("model", None),
}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"x", "y"}, both [batch, width]."""
    init, step = trainable(_params(config), partial(_loss, config), optax.adamw(1e-3), config.precision.params)
    names = frozenset(TABLE) if config.scan else frozenset[str]()
    return Model(name, "mlp", step, init, jax.jit(partial(_batch, config)), with_layer_axis(TABLE, names))


def _params(config: Config) -> Tree:
    block = {
        "w1": Param((config.width, config.hidden), config.width**-0.5),
        "b1": Param((config.hidden,)),
        "w2": Param((config.hidden, config.width), config.hidden**-0.5),
        "b2": Param((config.width,)),
    }
    return {"blocks": block_params(block, config.layers, scan=config.scan)}


def _block(params: Tree, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(nn.affine(x, params["w1"], params["b1"]))
    return x + nn.affine(hidden, params["w2"], params["b2"])


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    x = batch["x"].astype(config.precision.compute)
    x = repeat_blocks(_block, params["blocks"], x, scan=config.scan, remat=config.remat)
    return jnp.mean(jnp.square(x.astype(config.precision.params) - batch["y"]))


def _batch(config: Config, key: jax.Array) -> Batch:
    shape = (config.batch, config.width)
    x, y = normals([shape, shape], key, config.precision.params)
    return {"x": x, "y": y}
