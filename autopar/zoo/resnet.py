"""ResNet with bottleneck blocks (He et al., 2016): `wresnet` of factor 1, trained by SGD with momentum.

The stride of a block is in its 3x3 convolution. The loss is smoothed (Szegedy et al., 2016), and weight decay is for
kernels alone, as the gradient of a penalty.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax

from autopar.zoo import wresnet
from autopar.zoo.model import MIXED, SINGLE, Batch, Model, Tree, image_batch, trainable_with_statistics, with_layer_axis
from autopar.zoo.wresnet import Config

SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config((1, 2), channels=8, factor=1, image=16, classes=64, batch=8, precision=SINGLE, sgd=True),
        "50": Config((3, 4, 6, 3), channels=64, factor=1, classes=1000, batch=256, precision=MIXED, sgd=True),
        "101": Config((3, 4, 23, 3), channels=64, factor=1, classes=1000, batch=256, precision=MIXED, sgd=True),
    }
)

RATE, MOMENTUM, DECAY, SMOOTHING = 0.1, 0.9, 1e-4, 0.1


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"images" [batch, image, image, 3], "labels" int32[batch]}."""
    optimizer = optax.chain(optax.add_decayed_weights(DECAY, _kernels), optax.sgd(RATE, MOMENTUM))
    init, step = trainable_with_statistics(
        wresnet.parameters(config),
        wresnet.statistics(config),
        partial(_loss, config),
        optimizer,
        config.precision.params,
    )
    batch = image_batch(config.batch, config.image, 3, config.classes, config.precision.params)
    notes = (
        "Dimensions, batch and optimizer: He et al. (2016), table 1 and section 3.4; label smoothing and strides as is "
        "usual now. The last norm of a block starts at 1, not 0."
    )
    return Model(name, "resnet", step, init, batch, with_layer_axis(wresnet.TABLE, frozenset()), notes)


def _kernels(params: Tree) -> Tree:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _loss(config: Config, params: Tree, stats: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
    logits, moved = wresnet.forward(config, params, stats, batch["images"])
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], config.classes, dtype=logits.dtype), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets).mean(), moved
