"""Wide ResNet: bottleneck blocks whose 3x3 convolution is widened, batch norm with running statistics in the state.

    x <- relu(BN(conv1x1(relu(BN(conv3x3(relu(BN(conv1x1(x)))))) + shortcut)     channels f, f w, 4 f

(He et al., 2016; Zagoruyko and Komodakis, 2016.) Images are NHWC, kernels HWIO. The statistics of the norm are taken
over the global batch, so the batch mixes: what a data-parallel plan must reduce, and a microbatched one cannot split.

The named sizes are those of the Alpa paper (Zheng et al., 2022), section 8, and of its public benchmark suite: image
side 224, 1024 classes, float32, global batch 1536 (1520 for 13b, as there). Optimizer: AdamW.
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
    image_batch,
    norm_spec,
    trainable_with_statistics,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `stages` of so many blocks, the first with `channels` (f), twice as many in each next one.

    `factor` (w) widens the 3x3 convolution; `image` is a side in pixels, `batch` a number of images.
    """

    stages: tuple[int, ...]
    channels: int
    factor: int
    image: int = 224
    classes: int = 1024
    batch: int = 1536
    precision: Precision = SINGLE
    remat: bool = False
    sgd: bool = False


_DEPTH_50, _DEPTH_101 = (3, 4, 6, 3), (3, 4, 23, 3)

SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config((1, 2), channels=8, factor=2, image=16, classes=64, batch=8),
        "250m": Config(_DEPTH_50, 160, 2),
        "500m": Config(_DEPTH_50, 224, 2),
        "1b": Config(_DEPTH_50, 320, 2),
        "2b": Config(_DEPTH_50, 448, 2),
        "4b": Config(_DEPTH_50, 640, 2),
        "6.8b": Config(_DEPTH_50, 320, 16),
        "13b": Config(_DEPTH_101, 320, 16, batch=1520),
    }
)

TABLE = {
    "conv1": PartitionSpec(None, None, None, "model"),
    "conv2": PartitionSpec(None, None, "model", None),
    "head": PartitionSpec(None, "model"),
}

MOMENTUM = 0.9


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"images" [batch, image, image, 3], "labels" int32[batch]}."""
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True) if config.sgd else optax.adamw(1e-3)

    init, step = trainable_with_statistics(
        parameters(config), statistics(config), partial(_loss, config), optimizer, config.precision.params
    )
    batch = image_batch(config.batch, config.image, 3, config.classes, config.precision.params)
    notes = "Dimensions: Alpa (Zheng et al., 2022), section 8. The last norm of a block starts at 1, not 0."
    return Model(name, "wresnet", step, init, batch, with_layer_axis(TABLE, frozenset()), notes)


def _widths(config: Config) -> list[list[tuple[int, int]]]:
    """Per stage, per block: (channels in, bottleneck channels)."""
    widths: list[list[tuple[int, int]]] = []
    before = config.channels
    for index, blocks in enumerate(config.stages):
        filters = config.channels * 2**index
        widths.append([(before if block == 0 else 4 * filters, filters) for block in range(blocks)])
        before = 4 * filters
    return widths


def _kernel(side: int, inputs: int, outputs: int) -> Param:
    return Param((side, side, inputs, outputs), (2 / (side * side * inputs)) ** 0.5)


def _norm_stats(channels: int) -> dict[str, Param]:
    return {"mean": Param((channels,)), "var": Param((channels,), mean=1.0)}


def parameters(config: Config) -> Tree:
    """What is trained."""
    last = 4 * config.channels * 2 ** (len(config.stages) - 1)
    return {
        "stem": _kernel(7, 3, config.channels),
        "stem_norm": norm_spec(config.channels),
        "stages": [
            [_block_params(config, index, *widths) for index, widths in enumerate(stage)] for stage in _widths(config)
        ],
        "head": Param((last, config.classes), last**-0.5),
        "head_bias": Param((config.classes,)),
    }


def _block_params(config: Config, index: int, inputs: int, filters: int) -> Tree:
    inner, outputs = filters * config.factor, 4 * filters
    params = {
        "conv1": _kernel(1, inputs, filters),
        "conv2": _kernel(3, filters, inner),
        "conv3": _kernel(1, inner, outputs),
        **{f"norm{i + 1}": norm_spec(width) for i, width in enumerate((filters, inner, outputs))},
    }
    shortcut = {"conv0": _kernel(1, inputs, outputs), "norm0": norm_spec(outputs)}
    return {**params, **shortcut} if index == 0 else params


def statistics(config: Config) -> Tree:
    """The running moments of every norm, in a tree like that of the parameters."""

    def of_block(index: int, filters: int) -> Tree:
        widths = {"norm1": filters, "norm2": filters * config.factor, "norm3": 4 * filters}
        widths |= {"norm0": 4 * filters} if index == 0 else {}
        return {name: _norm_stats(width) for name, width in widths.items()}

    return {
        "stem_norm": _norm_stats(config.channels),
        "stages": [[of_block(i, filters) for i, (_, filters) in enumerate(stage)] for stage in _widths(config)],
    }


def batch_norm(x: jax.Array, params: Tree, stats: Tree) -> tuple[jax.Array, Tree]:
    """Normalise x [N,H,W,C] by the moments of this batch; also the running moments, moved towards them."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, (0, 1, 2))
    var = jnp.mean(jnp.square(wide), (0, 1, 2)) - jnp.square(mean)
    unit = ((wide - mean) * lax.rsqrt(var + 1e-5)).astype(x.dtype)
    moved = {
        name: (MOMENTUM * stats[name] + (1 - MOMENTUM) * lax.stop_gradient(new)).astype(stats[name].dtype)
        for name, new in (("mean", mean), ("var", var))
    }
    return unit * params["scale"].astype(x.dtype) + params["bias"].astype(x.dtype), moved


def _block(stride: int, params: Tree, stats: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
    """One bottleneck block on x [N,H,W,C]; a block with "conv0" has a projected shortcut."""
    moved: dict[str, Tree] = {}
    y, moved["norm1"] = batch_norm(nn.convolve(x, params["conv1"]), params["norm1"], stats["norm1"])
    y = nn.convolve(jax.nn.relu(y), params["conv2"], stride)
    y, moved["norm2"] = batch_norm(y, params["norm2"], stats["norm2"])
    y, moved["norm3"] = batch_norm(nn.convolve(jax.nn.relu(y), params["conv3"]), params["norm3"], stats["norm3"])
    if "conv0" in params:
        x, moved["norm0"] = batch_norm(nn.convolve(x, params["conv0"], stride), params["norm0"], stats["norm0"])
    return jax.nn.relu(x + y), moved


def _stage(
    config: Config, stride: int, params: list[Tree], stats: list[Tree], x: jax.Array
) -> tuple[jax.Array, list[Tree]]:
    moved: list[Tree] = []
    for index, (block_params, block_stats) in enumerate(zip(params, stats, strict=True)):
        block = jax.jit(partial(_block, stride if index == 0 else 1))
        x, new = (jax.checkpoint(block) if config.remat else block)(block_params, block_stats, x)
        moved.append(new)
    return x, moved


def forward(config: Config, params: Tree, stats: Tree, images: jax.Array) -> tuple[jax.Array, Tree]:
    """Logits [N,classes] of images [N,H,W,3], and the moved statistics."""
    x = nn.convolve(images.astype(config.precision.compute), params["stem"], 2)
    x, stem = batch_norm(x, params["stem_norm"], stats["stem_norm"])
    x = jax.nn.relu(x)
    if config.image >= 64:
        # Smaller images are not pooled (Zagoruyko and Komodakis, 2016). On the toys a 3x3 maximum would be positive
        # everywhere, the stem's bias would cancel in the next norm, and Adam would scale up its rounding noise.
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    moved: list[Tree] = []
    for index, (stage_params, stage_stats) in enumerate(zip(params["stages"], stats["stages"], strict=True)):
        x, new = _stage(config, 1 if index == 0 else 2, stage_params, stage_stats, x)
        moved.append(new)
    logits = nn.affine(jnp.mean(x, (1, 2)), params["head"], params["head_bias"])
    return logits, {"stem_norm": stem, "stages": moved}


def _loss(config: Config, params: Tree, stats: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
    logits, moved = forward(config, params, stats, batch["images"])
    return nn.cross_entropy(logits, batch["labels"]), moved
