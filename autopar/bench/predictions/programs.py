"""Train steps for `bench predictions` that the zoo has none of: dropout, batch norm in half floats, padding masks.

dropout-gpt       masks by threefry after the embedding, the attention weights and both branches of each block
dropout-gpt-rbg   the same with the generator of XLA, whose bits no device makes a part of
padded-encoder    attention and loss over the tokens before each sequence's length, the masks made inside the step
half-gpt          activations in bfloat16, parameters in float32
half-wresnet      batch norm, activations in bfloat16, parameters in float32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax
from jax import lax

from autopar.zoo import gpt, wresnet
from autopar.zoo.layers import nn
from autopar.zoo.model import MIXED, SINGLE, Batch, Model, Tree, token_batch, trainable

RATE = 0.1  # of what dropout removes
_GPT = replace(gpt.SIZES["3m"], precision=SINGLE)


def _key(batch: int, seq: int, impl: str) -> Callable[[jax.Array], Batch]:
    """Tokens, labels, and a key for dropout."""
    tokens = token_batch(batch, seq, _GPT.vocab)
    return lambda key: {**tokens(key), "key": jax.random.key(0, impl=impl)}


def _lengths(batch: int, seq: int) -> Callable[[jax.Array], Batch]:
    """Tokens, labels, and how many tokens each sequence has."""
    tokens = token_batch(batch, seq, _GPT.vocab)
    return lambda key: {**tokens(key), "lengths": jax.random.randint(key, (batch,), 1, seq + 1)}


def _dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(key, 1 - RATE, x.shape)
    return jnp.where(keep, x / (1 - RATE), 0.0)


def _attend(params: Tree, x: jax.Array, mask: jax.Array, drop: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Self-attention of the norm of x [B,S,D] where `mask`, broadcast to [B,H,S,S], is true."""
    h = nn.layer_norm(x, params["ln1_scale"], params["ln1_bias"])
    query, value = (nn.affine(h, params[f"w{n}"], params[f"b{n}"]) for n in "qv")
    key = nn.project(h, params["wk"]) * query.shape[-1] ** -0.5
    scores = jnp.einsum("bshk,bthk->bhst", query, key)
    weights = drop(jax.nn.softmax(jnp.where(mask, scores, -1e9)))
    return nn.add_bias(jnp.einsum("bhst,bthk,hkd->bsd", weights, value, params["wo"]), params["bo"])


def _mlp(params: Tree, x: jax.Array) -> jax.Array:
    h = nn.layer_norm(x, params["ln2_scale"], params["ln2_bias"])
    return nn.affine(jax.nn.gelu(nn.affine(h, params["w1"], params["b1"])), params["w2"], params["b2"])


def _block(params: Tree, x: jax.Array, mask: jax.Array, key: jax.Array | None) -> jax.Array:
    """A block with dropout, or without if there is no key."""
    keys = (None,) * 3 if key is None else jax.random.split(key, 3)
    drops = [(lambda y: y) if k is None else partial(_dropout, k) for k in keys]
    x = x + drops[1](_attend(params, x, mask, drops[0]))
    return x + drops[2](_mlp(params, x))


def _dropout_loss(params: Tree, batch: Batch) -> jax.Array:
    first, *keys = jax.random.split(batch["key"], len(params["blocks"]) + 1)
    x = _dropout(first, gpt.embed(params, batch["tokens"], "float32"))
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    for layer, key in zip(params["blocks"], keys, strict=True):
        x = _block(layer, x, mask, key)
    return gpt.next_token_loss(params, x, batch["labels"])


def _padded_loss(params: Tree, batch: Batch) -> jax.Array:
    x = gpt.embed(params, batch["tokens"], "float32")
    real = jnp.arange(x.shape[1]) < batch["lengths"][:, None]
    for layer in params["blocks"]:
        x = _block(layer, x, real[:, None, None, :], None)
    logits = nn.project(nn.layer_norm(x, params["ln_scale"], params["ln_bias"]), params["head"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.sum(losses, where=real) / lax.convert_element_type(real.sum(), "float32")


def _transformer(
    name: str,
    loss: Callable[[Tree, Batch], jax.Array],
    inputs: Callable[[int, int], Callable[[jax.Array], Batch]],
    layers: int,
    batch: int,
    seq: int,
) -> Model:
    config = replace(_GPT, layers=layers, batch=batch, seq=seq)
    init, step = trainable(gpt.parameters(config), loss, optax.adamw(3e-4), "float32")
    return Model(name, name, step, init, inputs(batch, seq))


def _half_gpt(layers: int, batch: int, seq: int) -> Model:
    return gpt.build("half-gpt", replace(_GPT, layers=layers, batch=batch, seq=seq, precision=MIXED))


def _half_wresnet(batch: int) -> Model:
    return wresnet.build("half-wresnet", replace(wresnet.SIZES["toy"], batch=batch, precision=MIXED))


#: Name -> the model with these sizes.
PROGRAMS: Mapping[str, Callable[..., Model]] = MappingProxyType(
    {
        "dropout-gpt": partial(_transformer, "dropout-gpt", _dropout_loss, partial(_key, impl="threefry2x32")),
        "dropout-gpt-rbg": partial(_transformer, "dropout-gpt-rbg", _dropout_loss, partial(_key, impl="rbg")),
        "padded-encoder": partial(_transformer, "padded-encoder", _padded_loss, _lengths),
        "half-gpt": _half_gpt,
        "half-wresnet": _half_wresnet,
    }
)
