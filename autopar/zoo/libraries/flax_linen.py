"""A small convolutional classifier in Flax Linen; the state is Flax's own `TrainState`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from autopar.zoo.libraries.build import Config
from autopar.zoo.model import Batch, Metrics, Model, image_batch

IMAGE = 8


class Classifier(nn.Module):
    """Convolutions, mean over pixels, dense layer: [B,8,8,3] -> logits [B,classes]."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        dtypes: dict[str, Any] = {"dtype": config.precision.compute, "param_dtype": config.precision.params}
        x = images
        for _ in range(config.layers):
            x = nn.relu(nn.Conv(config.width, (3, 3), **dtypes)(x))
        return nn.Dense(config.classes, **dtypes)(jnp.mean(x, (1, 2)))


def build(name: str, config: Config) -> Model:
    """The model of one config; batch = {"images" [batch, 8, 8, 3], "labels" int32[batch]}."""
    model = Classifier(config)
    optimizer = optax.adamw(1e-3)
    images = jnp.zeros((1, IMAGE, IMAGE, 3), config.precision.params)

    def init(key: jax.Array) -> TrainState:
        params = model.init(key, images)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["images"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    make_batch = image_batch(config.batch, IMAGE, 3, config.classes, config.precision.params)
    return Model(name, "flax-linen", step, init, make_batch, (), "Written as in the guides of Flax Linen.")
