"""Images: DDPM with a small U-Net and averaged weights, MLP-Mixer, contrastive pairs."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from tests.corpus.data import normal, tokens, uniform


class TimeEmbedding(nn.Module):
    width: int

    @nn.compact
    def __call__(self, t):
        freqs = jnp.exp(-np.log(1e4) * jnp.arange(self.width // 2) / (self.width // 2))
        angles = t[:, None] * freqs[None].astype(t.dtype)
        x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        return nn.Dense(self.width)(nn.silu(nn.Dense(self.width)(x)))


class ResBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, t):
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(num_groups=4)(x)))
        h = h + nn.Dense(self.width)(nn.silu(t))[:, None, None]
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(num_groups=4)(h)))
        return h + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1))(x))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x, t):
        t = TimeEmbedding(16)(t)
        h0 = nn.Conv(8, (3, 3))(x)
        h1 = ResBlock(8)(h0, t)
        h2 = ResBlock(16)(nn.avg_pool(h1, (2, 2), (2, 2)), t)
        b, height, width, c = h2.shape
        flat = nn.GroupNorm(num_groups=4)(h2).reshape(b, height * width, c)
        h2 = h2 + nn.SelfAttention(num_heads=2)(flat).reshape(h2.shape)
        up = jax.image.resize(h2, (b, 2 * height, 2 * width, c), "nearest")
        h = ResBlock(8)(jnp.concatenate([up, h1], -1), t)
        return nn.Conv(x.shape[-1], (3, 3))(nn.silu(nn.GroupNorm(num_groups=4)(h)))


class EMAState(train_state.TrainState):
    ema: Any


def ddpm_unet(scale=1):
    """Noise is predicted at random times; weights averaged exponentially."""
    model = UNet()
    images = uniform(8 * scale, 8, 8, 3, low=-1.0)
    params = model.init(jax.random.key(0), images[:1], jnp.zeros(1))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4))
    state = EMAState.create(apply_fn=model.apply, params=params, tx=tx, ema=params)
    alphas = np.cumprod(1 - np.linspace(1e-4, 0.02, 100))

    def train_step(state, images, key):
        key_t, key_noise = jax.random.split(jax.random.fold_in(key, state.step))
        t = jax.random.randint(key_t, (images.shape[0],), 0, 100)
        noise = jax.random.normal(key_noise, images.shape, images.dtype)
        alpha = jnp.asarray(alphas, images.dtype)[t][:, None, None, None]
        noisy = jnp.sqrt(alpha) * images + jnp.sqrt(1 - alpha) * noise

        def loss_fn(params):
            return jnp.mean((state.apply_fn({"params": params}, noisy, t.astype(images.dtype)) - noise) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        state = state.apply_gradients(grads=grads)
        decay = jnp.minimum(0.999, (1 + state.step) / (10 + state.step)).astype(images.dtype)
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, state.ema, state.params)
        return state.replace(ema=ema), loss

    return train_step, (state, images, jax.random.key(1))


class MixerBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        y = nn.Dense(y.shape[-1])(nn.gelu(nn.Dense(32)(y)))
        x = x + y.swapaxes(1, 2)
        y = nn.Dense(64)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (4, 4), strides=(4, 4))(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for _ in range(2):
            x = MixerBlock()(x)
        return nn.Dense(10, kernel_init=nn.initializers.zeros)(nn.LayerNorm()(x).mean(1))


def mlp_mixer(scale=1):
    """Mixed examples (mixup), smoothed labels, decoupled weight decay."""
    model = Mixer()
    images, labels = normal(8 * scale, 16, 16, 3), tokens(8 * scale, below=10)
    params = model.init(jax.random.key(0), images[:1])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.lamb(1e-3))

    def train_step(state, images, labels, key):
        key = jax.random.fold_in(key, state.step)
        share = jax.random.beta(key, 0.4, 0.4, dtype=images.dtype)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 10, dtype=images.dtype), 0.1)
        images = share * images + (1 - share) * images[::-1]
        targets = share * targets + (1 - share) * targets[::-1]

        def loss_fn(params):
            return optax.softmax_cross_entropy(state.apply_fn({"params": params}, images), targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step, (state, images, labels, jax.random.key(2))


def clip_contrastive(scale=1):
    """Two towers, a learnt temperature, every pair of the batch in the loss."""

    class Tower(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Dense(64)(x))
            x = nn.Dense(32)(nn.LayerNorm()(x))
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    tower = Tower()
    pairs = {"image": normal(16 * scale, 48), "text": normal(16 * scale, 24, seed=1)}
    params = {name: tower.init(jax.random.key(i), x[:1]) for i, (name, x) in enumerate(pairs.items())}
    params["log_scale"] = jnp.asarray(np.log(1 / 0.07), jnp.float32)
    tx = optax.adamw(1e-3)

    def step(params, opt_state, pairs):
        def loss_fn(p):
            image, text = (tower.apply(p[name], pairs[name]) for name in ("image", "text"))
            logits = jnp.exp(p["log_scale"]) * image @ text.T
            labels = jnp.arange(logits.shape[0])
            each = optax.softmax_cross_entropy_with_integer_labels
            return (each(logits, labels).mean() + each(logits.T, labels).mean()) / 2

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params | {"log_scale": jnp.clip(params["log_scale"], 0, np.log(100))}, opt_state, loss

    return step, (params, tx.init(params), pairs)
