"""Flax Linen: TrainState, mutable batch statistics, dropout, as in its guides."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from tests.corpus.data import normal, tokens, uniform


class ResidualBlock(nn.Module):
    features: int
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x, train):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = norm()(y)
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    classes: int = 16

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = ResidualBlock(16)(x, train)
        x = ResidualBlock(32, (2, 2))(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class BatchNormState(train_state.TrainState):
    batch_stats: Any


def resnet_batch_norm(scale=1):
    model = ResNet()
    images, labels = uniform(8 * scale, 16, 16, 3), tokens(8 * scale, below=16)
    variables = model.init(jax.random.key(0), images[:1])
    state = BatchNormState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9, nesterov=True),
    )

    def train_step(state, batch):
        def loss_fn(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, (updates, logits)

        (loss, (updates, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads).replace(batch_stats=updates["batch_stats"])
        return state, {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["label"])}

    return train_step, (state, {"image": images, "label": labels})


class DropoutMLP(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        for width in (64, 64):
            x = nn.Dropout(0.3, deterministic=not training)(nn.gelu(nn.Dense(width)(x)))
        return nn.Dense(10)(x)


class DropoutState(train_state.TrainState):
    key: jax.Array


def dropout_mlp(scale=1):
    model = DropoutMLP()
    x, y = normal(16 * scale, 32), tokens(16 * scale, below=10)
    params = model.init(jax.random.key(0), x[:1], training=False)["params"]
    state = DropoutState.create(apply_fn=model.apply, params=params, key=jax.random.key(1), tx=optax.adamw(1e-3))

    @jax.jit
    def train_step(state, batch):
        dropout_key = jax.random.fold_in(key=state.key, data=state.step)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"], training=True, rngs={"dropout": dropout_key})
            return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step, (state, {"x": x, "y": y})


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask, deterministic):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=4, dropout_rate=0.1, deterministic=deterministic)(y, mask=mask)
        x = x + y
        y = nn.Dense(128)(nn.LayerNorm()(x))
        return x + nn.Dropout(0.1)(nn.Dense(x.shape[-1])(nn.gelu(y)), deterministic=deterministic)


class MaskedLM(nn.Module):
    vocab: int

    @nn.compact
    def __call__(self, ids, pad, deterministic=False):
        embed = nn.Embed(self.vocab, 32)
        x = embed(ids) + self.param("positions", nn.initializers.normal(0.02), (ids.shape[1], 32))
        mask = nn.make_attention_mask(pad, pad)
        for _ in range(2):
            x = EncoderBlock()(x, mask, deterministic)
        return embed.attend(nn.LayerNorm()(x))


def masked_lm(scale=1):
    vocab, mask_id, length = 64, 1, 16
    model = MaskedLM(vocab)
    ids = tokens(8 * scale, length, below=vocab - 2) + 2
    ids = jnp.where(jnp.arange(length) < 16 - 2 * (jnp.arange(8 * scale)[:, None] % 4), ids, 0)
    params = model.init(jax.random.key(0), ids[:1], ids[:1] > 0, deterministic=True)["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state, ids, key):
        key = jax.random.fold_in(key, state.step)
        mask_key, dropout_key = jax.random.split(key)
        pad = ids > 0
        chosen = jax.random.bernoulli(mask_key, 0.3, ids.shape) & pad
        inputs = jnp.where(chosen, mask_id, ids)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, inputs, pad, rngs={"dropout": dropout_key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
            return jnp.sum(losses * chosen) / jnp.maximum(chosen.sum(), 1)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step, (state, ids, jax.random.key(7))


class VAE(nn.Module):
    latents: int = 8

    @nn.compact
    def __call__(self, x, key):
        h = nn.relu(nn.Dense(64, name="fc1")(x))
        mean, logvar = nn.Dense(self.latents, name="mean")(h), nn.Dense(self.latents, name="logvar")(h)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, logvar.shape)
        h = nn.relu(nn.Dense(64, name="fc2")(z))
        return nn.Dense(x.shape[-1], name="fc3")(h), mean, logvar


def vae(scale=1):
    images = uniform(16 * scale, 64)
    model = VAE()
    key = jax.random.key(0)
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=model.init(key, images[:1], key)["params"], tx=optax.adam(1e-3)
    )

    def train_step(state, batch, z_rng):
        def loss_fn(params):
            recon, mean, logvar = state.apply_fn({"params": params}, batch, z_rng)
            bce = optax.sigmoid_binary_cross_entropy(recon, batch).sum(-1).mean()
            kld = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), axis=-1).mean()
            return bce + kld

        grads = jax.grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads)

    return train_step, (state, images, jax.random.key(3))
