"""A recurrent language model: layers of gated recurrent units (Cho et al., 2014), each a scan over time.

    r, z = logistic(x Wx + h Wh + b)[:2]     n = tanh(x Wx + r * h Wh + b)[2]     h <- (1 - z) n + z h

The input products of all time steps are one contraction before the scan; only h Wh is inside the loop.
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
    block_params,
    repeat_blocks,
    token_batch,
    trainable,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` recurrent layers of `width` (D), `vocab`, `seq` steps, `batch` sequences."""

    layers: int
    width: int
    vocab: int
    seq: int
    batch: int
    precision: Precision = SINGLE
    scan: bool = False
    remat: bool = False


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(layers=2, width=32, vocab=64, seq=16, batch=8),
        "200m": Config(layers=4, width=2048, vocab=32000, seq=256, batch=256),
    }
)

BLOCK_TABLE = {"wx": PartitionSpec(None, None, "model"), "wh": PartitionSpec(None, None, "model")}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"tokens", "labels"}, both int32[batch, seq]."""
    init, step = trainable(_params(config), partial(_loss, config), optax.adamw(1e-3), config.precision.params)
    names = frozenset(BLOCK_TABLE) if config.scan else frozenset[str]()
    make_batch = token_batch(config.batch, config.seq, config.vocab)
    return Model(name, "rnn", step, init, make_batch, with_layer_axis(BLOCK_TABLE, names))


def _params(config: Config) -> Tree:
    width = config.width
    gates = Param((width, 3, width), width**-0.5)
    block = {"wx": gates, "wh": gates, "b": Param((3, width))}
    return {
        "embed": Param((config.vocab, width), 1.0),
        "blocks": block_params(block, config.layers, scan=config.scan),
        "head": Param((width, config.vocab), width**-0.5),
    }


def _unit(recurrent: jax.Array, hidden: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One time step: hidden [B,D], gates [B,3,D] from the input -> new hidden, twice (carry and output)."""
    inner = nn.project(hidden, recurrent)
    reset, update = lax.logistic(gates[:, 0] + inner[:, 0]), lax.logistic(gates[:, 1] + inner[:, 1])
    candidate = lax.tanh(gates[:, 2] + reset * inner[:, 2])
    hidden = (1 - update) * candidate + update * hidden
    return hidden, hidden


def _layer(params: Tree, x: jax.Array) -> jax.Array:
    """One recurrent layer on x [T,B,D], from a hidden state of zeros."""
    gates = nn.affine(x, params["wx"], params["b"])
    return lax.scan(partial(_unit, params["wh"]), jnp.zeros_like(x[0]), gates)[1]


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    x = nn.lookup(params["embed"], batch["tokens"].T, config.precision.compute)
    x = repeat_blocks(_layer, params["blocks"], x, scan=config.scan, remat=config.remat)
    return nn.cross_entropy(nn.project(x, params["head"]), batch["labels"].T)
