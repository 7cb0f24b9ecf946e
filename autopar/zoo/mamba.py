"""Mamba: a language model of selective state spaces (Gu and Dao, 2023, "Mamba", section 3 and figure 3).

    u, z = h Wx, h Wz                        h = RMS(r); Wx, Wz [D,E], E = 2 D channels
    x = silu(conv(u) + bias)                 each channel by itself, over the last 4 steps
    d, B, C = x Ws                           Ws [E,R+2N], R = ceil(D / 16), N = 16
    y = scan(x, softplus(d Wd + bd), -exp(A), B, C) + skip x            -> `autopar.zoo.layers.selective_scan`
    r <- r + (y silu(z)) Wo                  Wo [E,D]

The named sizes are those of the published checkpoints (table in the README of github.com/state-spaces/mamba), trained
on sequences of 2048 tokens (Gu and Dao, 2023, appendix E.2). Their vocabulary is that of GPT-NeoX, 50277 tokens, padded
to a multiple of 8. Their output layer shares the table of the embedding, as that of the "-tied" variants does here,
which have as many parameters as the checkpoints. The batch is ours.
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

from autopar.zoo.layers import nn, selective_scan
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
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` blocks of `width` (D), `states` per channel (N); `vocab`, `seq` tokens, `batch` sequences.

    Attributes:
        selective_scan: "associative" or "pallas" -> `autopar.zoo.layers.selective_scan`.
    """

    layers: int
    width: int
    vocab: int = 50280
    states: int = 16
    seq: int = 2048
    batch: int = 256
    precision: Precision = MIXED
    scan: bool = False
    remat: bool = False
    tied: bool = False
    selective_scan: str = "associative"

    @property
    def channels(self) -> int:
        """Channels of the scan (E)."""
        return EXPANSION * self.width

    @property
    def rank(self) -> int:
        """Numbers per token from which the step sizes of its channels are computed (R)."""
        return math.ceil(self.width / 16)


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(layers=2, width=32, vocab=64, states=4, seq=16, batch=8, precision=SINGLE),
        "130m": Config(layers=24, width=768),
        "370m": Config(layers=48, width=1024),
        "790m": Config(layers=48, width=1536),
        "1.4b": Config(layers=48, width=2048),
        "2.8b": Config(layers=64, width=2560),
    }
)

EXPANSION = 2  # channels of the scan per one of the residual stream
WINDOW = 4  # steps that the convolution reads
STEP_SIZE = 0.01  # of the scan before training, about the middle of the paper's [0.001, 0.1]

BLOCK_TABLE = {
    "wx": PartitionSpec(None, "model"),
    "wz": PartitionSpec(None, "model"),
    "conv": PartitionSpec(None, "model"),
    "conv_bias": PartitionSpec("model"),
    "ws": PartitionSpec("model", None),
    "wd": PartitionSpec(None, "model"),
    "bd": PartitionSpec("model"),
    "a": PartitionSpec("model", None),
    "skip": PartitionSpec("model"),
    "wo": PartitionSpec("model", None),
}
EMBEDDING_TABLE = {"embed": PartitionSpec("model", None), "head": PartitionSpec(None, "model")}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"tokens", "labels"}, both int32[batch, seq]."""
    selective_scan.check(name, config.selective_scan)
    init, step = trainable(_params(config), partial(_loss, config), optax.adamw(6e-4), config.precision.params)
    names = frozenset(BLOCK_TABLE) if config.scan else frozenset[str]()
    table = with_layer_axis({**BLOCK_TABLE, **EMBEDDING_TABLE}, names)
    head = "shares the embedding" if config.tied else "has its own table of vocab x width"
    notes = f"Dimensions: Mamba (Gu and Dao, 2023) and its checkpoints; the batch is ours. The output layer {head}."
    return Model(name, "mamba", step, init, token_batch(config.batch, config.seq, config.vocab), table, notes)


def _params(config: Config) -> Tree:
    params = {
        "embed": Param((config.vocab, config.width), 0.02),
        "blocks": block_params(_block_params(config), config.layers, scan=config.scan),
        "norm": Param((config.width,), mean=1.0),
    }
    return params if config.tied else {**params, "head": Param((config.width, config.vocab), 0.02)}


def _block_params(config: Config) -> dict[str, Param]:
    """Parameters of one block: 6 D^2 + E (R + 2 N) + R E + E N + 7 E + D, for E = 2 D."""
    width, channels, rank, states = config.width, config.channels, config.rank, config.states
    return {
        "norm": Param((width,), mean=1.0),
        "wx": Param((width, channels), 0.02),
        "wz": Param((width, channels), 0.02),
        "conv": Param((WINDOW, channels), WINDOW**-0.5),
        "conv_bias": Param((channels,)),
        "ws": Param((channels, rank + 2 * states), channels**-0.5),
        "wd": Param((rank, channels), rank**-0.5),
        "bd": Param((channels,), mean=math.log(math.expm1(STEP_SIZE))),
        "a": Param((channels, states), 0.5, math.log((1 + states) / 2)),  # of the logarithms of about 1 to N
        "skip": Param((channels,), mean=1.0),
        "wo": Param((channels, width), 0.02),
    }


def _convolve(u: jax.Array, weights: jax.Array) -> jax.Array:
    """u [B,S,E] over its last steps, each channel with weights of its own [WINDOW,E]; before the first step u is 0.

    As one product per step of the window, which XLA fuses. A convolution in groups would need as many channels as the
    devices divide.
    """
    padded = lax.pad(u, jnp.zeros((), u.dtype), ((0, 0, 0), (WINDOW - 1, 0, 0), (0, 0, 0)))
    shifted = [lax.slice_in_dim(padded, k, k + u.shape[1], axis=1) * weights[k] for k in range(WINDOW)]
    return sum(shifted[1:], shifted[0])


def _mixer(config: Config, scan: selective_scan.Scan, params: Tree, h: jax.Array) -> jax.Array:
    """The channels of h [B,S,D] along the sequence -> [B,S,D]; the scan is in float32 or wider."""
    states, rank = config.states, config.rank
    u = nn.project(h, params["wx"])
    x = nn.silu(nn.add_bias(_convolve(u, params["conv"].astype(u.dtype)), params["conv_bias"]))
    z = nn.project(h, params["wz"])
    steps, b, c = lax.split(nn.project(x, params["ws"]), (rank, states, states), axis=2)
    delta = jax.nn.softplus(nn.widen(nn.affine(steps, params["wd"], params["bd"])))
    a = -jnp.exp(nn.widen(params["a"]))
    y = scan(nn.widen(x), delta, a, nn.widen(b), nn.widen(c)).astype(h.dtype)
    return nn.project((y + x * params["skip"].astype(h.dtype)) * nn.silu(z), params["wo"])


def _block(config: Config, scan: selective_scan.Scan, params: Tree, x: jax.Array) -> jax.Array:
    return x + _mixer(config, scan, params, nn.rms_norm(x, params["norm"]))


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    x = nn.lookup(params["embed"], batch["tokens"], config.precision.compute)
    body = partial(_block, config, selective_scan.SCANS[config.selective_scan])
    x = repeat_blocks(body, params["blocks"], x, scan=config.scan, remat=config.remat)
    head = params["head"] if "head" in params else params["embed"].T
    return nn.cross_entropy(nn.project(nn.rms_norm(x, params["norm"]), head), batch["labels"])
