"""A small classifier in Equinox: the model is a pytree, the step takes its arrays and closes over the rest."""

from __future__ import annotations

import equinox as eqx
import jax
import optax

from autopar.zoo.libraries.build import Config
from autopar.zoo.model import Batch, Metrics, Model, State, labels_from, normals


def _create(config: Config, key: jax.Array) -> eqx.nn.MLP:
    width = config.width
    return eqx.nn.MLP(width, config.classes, 2 * width, config.layers, dtype=config.precision.params, key=key)


@eqx.filter_value_and_grad
def _loss(model: eqx.nn.MLP, batch: Batch) -> jax.Array:
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def build(name: str, config: Config) -> Model:
    """The model of one config; batch = {"x" [batch, width], "labels" int32[batch]}."""
    optimizer = optax.adamw(1e-3)
    shape = eqx.filter_eval_shape(_create, config, jax.random.key(0))
    static = eqx.filter(shape, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)

    def init(key: jax.Array) -> State:
        params, _ = eqx.partition(_create(config, key), eqx.is_inexact_array)
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        model = eqx.combine(state["params"], static)
        loss, grads = _loss(model, batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": eqx.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    @jax.jit
    def make_batch(key: jax.Array) -> Batch:
        x, noise = normals([(config.batch, config.width), (config.batch,)], key, config.precision.params)
        return {"x": x, "labels": labels_from(noise, config.classes)}

    return Model(name, "equinox", step, init, make_batch, (), "Written as in the guides of Equinox.")
