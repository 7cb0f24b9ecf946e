"""Train steps for `bench predictions`, each around operations that compilers treat in their own way.

unrolled-muon      Newton-Schulz iterations, unrolled, for every weight of an MLP
unrolled-mlp       layers of a scan that is unrolled, and its gradient
head-integers      a cross entropy over a large vocabulary with integer labels
head-logsumexp     the same as logsumexp less the label's logit
head-one-hot       the same with one-hot labels
set-columns        every other column of an activation replaced
set-block          the first columns of an activation replaced
rolled-maximum     the maximum of an activation and its rolls
running-product    a cumulative product of an activation
looped-rows        a loop over every example
resized-linear     images enlarged bilinearly
resized-nearest    images enlarged by repetition
complex-product    a product with complex weights
lora-scan          adapters of low rank beside bfloat16 weights that a scan reads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from autopar.zoo.model import Batch, Model, Param, Tree, token_batch, trainable

Loss = Callable[[Tree, Batch], jax.Array]
WIDTH = 512  # of activations
VOCAB = 8192
RATE = 0.1  # of SGD


def _mlp(params: Tree, batch: Batch) -> jax.Array:
    x = batch["x"]
    for w in params["ws"]:
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def _scanned(params: Tree, batch: Batch) -> jax.Array:
    x, sums = lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.square(x).sum()), batch["x"], params["ws"], unroll=True)
    return jnp.square(x).mean() + sums.sum()


def _head(loss: Callable[[jax.Array, jax.Array], jax.Array]) -> Loss:
    return lambda params, batch: loss(
        jnp.tanh(params["embedding"][batch["tokens"]]) @ params["head"], batch["labels"]
    ).mean()


def _logsumexp(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]


def _one_hot(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, VOCAB)).sum(-1)


def _of_activation(change: Callable[[jax.Array], jax.Array]) -> Loss:
    return lambda params, batch: jnp.square(change(batch["x"] @ params["w"])).sum()


def _rolled(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.roll(x, k, 1) for k in range(3)]).max(0)


def _looped(row: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 4, lambda _, y: jnp.sin(y) * row, row)


def _resized(method: str) -> Loss:
    def loss(params: Tree, batch: Batch) -> jax.Array:
        x = jnp.tanh(batch["x"] * params["scale"])
        batch_size, height, width, channels = x.shape
        return jnp.square(jax.image.resize(x, (batch_size, 2 * height, 2 * width, channels), method)).mean()

    return loss


def _complex(params: Tree, batch: Batch) -> jax.Array:
    return jnp.square(jnp.abs(jnp.fft.fft(batch["x"], axis=1) @ lax.complex(params["real"], params["imag"]))).sum()


def _adapted(params: Tree, batch: Batch) -> jax.Array:
    def layer(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        w, down, up = weights
        return jax.nn.relu(x @ w + (x @ down.astype(x.dtype)) @ up.astype(x.dtype)), None

    x = lax.scan(layer, batch["x"], (batch["ws"], params["down"], params["up"]))[0]
    return jnp.square(x.astype("float32")).mean()


def _arrays(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Callable[[jax.Array], Batch]:
    return lambda key: {name: jax.random.normal(key, shape, dtype) for name, (shape, dtype) in shapes.items()}


def _model(name: str, spec: Tree, loss: Loss, inputs: Callable[[jax.Array], Batch], optimizer: Any = None) -> Model:
    init, step = trainable(spec, loss, optax.sgd(RATE) if optimizer is None else optimizer, "float32")
    return Model(name, name, step, init, inputs)


def _leaf(*shape: int) -> Param:
    return Param(shape, WIDTH**-0.5)


def _muon(batch: int, width: int) -> Model:
    spec, inputs = {"ws": [_leaf(width, width)] * 4}, _arrays({"x": ((batch, width), "float32")})
    return _model("unrolled-muon", spec, _mlp, inputs, optax.contrib.muon(1e-2))


def _unrolled(batch: int) -> Model:
    inputs = _arrays({"x": ((batch, WIDTH), "float32")})
    return _model("unrolled-mlp", {"ws": _leaf(6, WIDTH, WIDTH)}, _scanned, inputs)


def _language(name: str, loss: Callable[[jax.Array, jax.Array], jax.Array], batch: int) -> Model:
    spec = {"embedding": _leaf(VOCAB, 64), "head": _leaf(64, VOCAB)}
    return _model(name, spec, _head(loss), token_batch(batch, 128, VOCAB))


def _activation(name: str, change: Callable[[jax.Array], jax.Array], batch: int) -> Model:
    inputs = _arrays({"x": ((batch, WIDTH), "float32")})
    return _model(name, {"w": _leaf(WIDTH, 2 * WIDTH)}, _of_activation(change), inputs)


def _images(name: str, method: str, batch: int) -> Model:
    return _model(name, {"scale": _leaf(8)}, _resized(method), _arrays({"x": ((batch, 64, 64, 8), "float32")}))


def _complex_product(batch: int) -> Model:
    spec = {"real": _leaf(WIDTH, WIDTH), "imag": _leaf(WIDTH, WIDTH)}
    return _model("complex-product", spec, _complex, _arrays({"x": ((batch, WIDTH), "float32")}))


def _lora(batch: int, layers: int) -> Model:
    spec = {"down": _leaf(layers, WIDTH, 16), "up": _leaf(layers, 16, WIDTH)}
    shapes = {"x": ((batch, WIDTH), "bfloat16"), "ws": ((layers, WIDTH, WIDTH), "bfloat16")}
    return _model("lora-scan", spec, _adapted, _arrays(shapes))


_INTEGERS = optax.softmax_cross_entropy_with_integer_labels

#: Name -> the model with these sizes.
OPERATIONS: Mapping[str, Callable[..., Model]] = MappingProxyType(
    {
        "unrolled-muon": _muon,
        "unrolled-mlp": _unrolled,
        "head-integers": partial(_language, "head-integers", _INTEGERS),
        "head-logsumexp": partial(_language, "head-logsumexp", _logsumexp),
        "head-one-hot": partial(_language, "head-one-hot", _one_hot),
        "set-columns": partial(_activation, "set-columns", lambda x: x.at[:, ::2].set(0.0)),
        "set-block": partial(_activation, "set-block", lambda x: x.at[:, :100].set(1.0)),
        "rolled-maximum": partial(_activation, "rolled-maximum", _rolled),
        "running-product": partial(_activation, "running-product", lambda x: jnp.cumprod(x, 1)),
        "looped-rows": partial(_activation, "looped-rows", jax.vmap(_looped)),
        "resized-linear": partial(_images, "resized-linear", "bilinear"),
        "resized-nearest": partial(_images, "resized-nearest", "nearest"),
        "complex-product": _complex_product,
        "lora-scan": _lora,
    }
)
