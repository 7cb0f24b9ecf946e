"""A small decoder in Flax NNX, in the functional form: split before the step, merge inside it.

Query, key and value come from one projection here, which are separate in the other transformers of the zoo.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from autopar.zoo.libraries.build import SequenceConfig
from autopar.zoo.model import Batch, Metrics, Model, State, token_batch

HEADS = 8


class Block(nnx.Module):
    """Pre-norm attention and feed-forward layer."""

    def __init__(self, config: SequenceConfig, *, rngs: nnx.Rngs) -> None:
        width, dtypes = config.width, _dtypes(config)
        self.norm1 = nnx.LayerNorm(width, rngs=rngs, **dtypes)
        self.qkv = nnx.LinearGeneral(width, (3, HEADS, width // HEADS), use_bias=False, rngs=rngs, **dtypes)
        self.merge = nnx.LinearGeneral((HEADS, width // HEADS), width, axis=(-2, -1), rngs=rngs, **dtypes)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs, **dtypes)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs, **dtypes)
        self.down = nnx.Linear(4 * width, width, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.merge(_attend(self.qkv(self.norm1(x)), mask))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


def _attend(qkv: jax.Array, mask: jax.Array) -> jax.Array:
    """Causal attention of qkv [B,S,3,H,K] -> [B,S,H,K]. Own, since JAX's computes in float32 whatever the dtype."""
    query, key, value = (qkv[:, :, i] for i in range(3))
    scores = jnp.einsum("bshk,bthk->bhst", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("bhst,bthk->bshk", weights, value)


class Decoder(nnx.Module):
    """Embedding, blocks, output layer: int32[B,S] -> logits [B,S,classes]."""

    def __init__(self, config: SequenceConfig, *, rngs: nnx.Rngs) -> None:
        dtypes = _dtypes(config)
        self.embed = nnx.Embed(config.classes, config.width, rngs=rngs, **dtypes)
        self.positions = nnx.Embed(config.seq, config.width, rngs=rngs, **dtypes)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.head = nnx.Linear(config.width, config.classes, rngs=rngs, **dtypes)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens, dtype=jnp.bool_)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def _dtypes(config: SequenceConfig) -> dict[str, Any]:
    return {"dtype": config.precision.compute, "param_dtype": config.precision.params}


def _loss(model: Decoder, batch: Batch) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["labels"]).mean()


def build(name: str, config: SequenceConfig) -> Model:
    """The model of one config; batch = {"tokens", "labels"}, both int32[batch, seq]."""

    def create(key: jax.Array) -> tuple[Decoder, nnx.Optimizer[Decoder]]:
        model = Decoder(config, rngs=nnx.Rngs(key))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def init(key: jax.Array) -> State:
        _, params, rest = nnx.split(create(key), nnx.Param, ...)
        return {"params": params, "opt": rest}

    graphdef, _ = nnx.split(nnx.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0))))

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        model, optimizer = nnx.merge(graphdef, state["params"], state["opt"])
        loss, grads = nnx.value_and_grad(_loss)(model, batch)
        optimizer.update(model, grads)
        _, params, rest = nnx.split((model, optimizer), nnx.Param, ...)
        return {"params": params, "opt": rest}, {"loss": loss}

    notes = "Written as in the guides of Flax NNX; the state also holds its random streams."
    return Model(name, "flax-nnx", step, init, token_batch(config.batch, config.seq, config.classes), (), notes)
