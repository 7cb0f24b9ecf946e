"""Equinox: arrays of a module partitioned from what is static, `filter_value_and_grad`; diffrax on top of it.

Programs that need diffrax import it themselves, so that the others need Equinox alone.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.corpus.data import normal, tokens, uniform


def _trained(model, optimizer):
    """The arrays of a model, its static part, and the state of the optimizer."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return params, static, optimizer.init(params)


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 8, kernel_size=3, padding=1, key=keys[0]),
            jax.nn.relu,
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            jnp.ravel,
            eqx.nn.Linear(8 * 8 * 8, 32, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(32, 10, key=keys[2]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def cnn(scale=1):
    optimizer = optax.adamw(3e-4)
    params, static, opt_state = _trained(CNN(jax.random.key(0)), optimizer)
    x, y = normal(16 * scale, 1, 16, 16), tokens(16 * scale, below=10)

    def loss_fn(model, x, y):
        log_probs = jax.vmap(model)(x)
        return -jnp.mean(jnp.take_along_axis(log_probs, y[:, None], axis=1))

    def make_step(params, opt_state, x, y):
        model = eqx.combine(params, static)
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss

    return make_step, (params, opt_state, x, y)


class GRUClassifier(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, in_size, out_size, hidden, key):
        ckey, lkey = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(in_size, hidden, key=ckey)
        self.linear = eqx.nn.Linear(hidden, out_size, use_bias=False, key=lkey)
        self.bias = jnp.zeros(out_size)

    def __call__(self, xs):
        hidden = jnp.zeros((self.cell.hidden_size,))
        out, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), hidden, xs)
        return jax.nn.sigmoid(self.linear(out) + self.bias)


def gru_scan(scale=1):
    optimizer = optax.adam(1e-2)
    params, static, opt_state = _trained(GRUClassifier(2, 1, 16, jax.random.key(0)), optimizer)
    x, y = normal(16 * scale, 12, 2), tokens(16 * scale, below=2).astype(jnp.float32)

    def make_step(params, opt_state, x, y):
        @jax.value_and_grad
        def compute_loss(params):
            pred = jax.vmap(eqx.combine(params, static))(x)[:, 0]
            return -jnp.mean(y * jnp.log(pred) + (1 - y) * jnp.log(1 - pred))

        loss, grads = compute_loss(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(params, updates), opt_state, loss

    return make_step, (params, opt_state, x, y)


class Patches(eqx.Module):
    linear: eqx.nn.Linear
    size: int

    def __init__(self, channels, width, size, key):
        self.size = size
        self.linear = eqx.nn.Linear(size * size * channels, width, key=key)

    def __call__(self, x):
        c, h, w = x.shape
        p = self.size
        x = x.reshape(c, h // p, p, w // p, p).transpose(1, 3, 0, 2, 4).reshape(-1, c * p * p)
        return jax.vmap(self.linear)(x)


class AttentionBlock(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width, heads, key):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.linear1 = eqx.nn.Linear(width, 2 * width, key=keys[1])
        self.linear2 = eqx.nn.Linear(2 * width, width, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        k1, k2 = jax.random.split(key)
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.linear1)(jax.vmap(self.norm2)(x))
        y = jax.vmap(self.linear2)(self.dropout(jax.nn.gelu(y), key=k1))
        return x + self.dropout(y, key=k2)


class ViT(eqx.Module):
    patches: Patches
    positions: jax.Array
    cls: jax.Array
    blocks: list[AttentionBlock]
    head: eqx.nn.Sequential

    def __init__(self, width, layers, key):
        keys = jax.random.split(key, layers + 4)
        self.patches = Patches(3, width, 4, keys[0])
        self.positions = jax.random.normal(keys[1], (17, width))
        self.cls = jax.random.normal(keys[2], (1, width))
        self.blocks = [AttentionBlock(width, 4, k) for k in keys[4:]]
        self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(width), eqx.nn.Linear(width, 10, key=keys[3])])

    def __call__(self, x, key):
        x = jnp.concatenate([self.cls, self.patches(x)]) + self.positions
        for block, k in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, k)
        return self.head(x[0])


def vit(scale=1):
    optimizer = optax.adamw(1e-3)
    params, static, opt_state = _trained(ViT(32, 2, jax.random.key(0)), optimizer)
    x, y = normal(8 * scale, 3, 16, 16), tokens(8 * scale, below=10)

    def step(params, opt_state, x, y, key):
        key, subkey = jax.random.split(key)

        def compute_grads(params):
            model = eqx.combine(params, static)
            logits = jax.vmap(model)(x, jax.random.split(subkey, x.shape[0]))
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, grads = jax.value_and_grad(compute_grads)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, value

    return step, (params, opt_state, x, y, jax.random.key(1))


def stateful_batch_norm(scale=1):
    """`eqx.nn.State`, batch statistics over a named axis of vmap."""

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        linear1: eqx.nn.Linear
        linear2: eqx.nn.Linear

        def __init__(self, key):
            k1, k2 = jax.random.split(key)
            self.norm = eqx.nn.BatchNorm(input_size=32, axis_name="batch", mode="batch")
            self.linear1, self.linear2 = eqx.nn.Linear(8, 32, key=k1), eqx.nn.Linear(32, 3, key=k2)

        def __call__(self, x, state):
            x, state = self.norm(self.linear1(x), state)
            return self.linear2(jax.nn.relu(x)), state

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    optimizer = optax.adam(1e-3)
    params, static, opt_state = _trained(model, optimizer)
    x, y = normal(16 * scale, 8), tokens(16 * scale, below=3)

    def make_step(params, state, opt_state, x, y):
        def compute_loss(params, state):
            batch_model = jax.vmap(
                eqx.combine(params, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None)
            )
            logits, state = batch_model(x, state)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state

        (loss, state), grads = jax.value_and_grad(compute_loss, has_aux=True)(params, state)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(params, updates), state, opt_state, loss

    return make_step, (params, state, opt_state, x, y)


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y)


def neural_ode(scale=1):
    """A learnt vector field, trajectories of a batch, adaptive steps."""
    import diffrax

    mlp = eqx.nn.MLP(2, 2, 32, 2, activation=jax.nn.softplus, key=jax.random.key(0))
    optimizer = optax.adabelief(3e-3)
    params, static, opt_state = _trained(Field(mlp), optimizer)
    ts, ys = jnp.linspace(0.0, 2.0, 10), normal(8 * scale, 10, 2, scale=0.5)

    def make_step(params, opt_state, ts, ys):
        def solve(field, y0):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(field),
                diffrax.Tsit5(),
                t0=ts[0],
                t1=ts[-1],
                dt0=ts[1] - ts[0],
                y0=y0,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
                saveat=diffrax.SaveAt(ts=ts),
                max_steps=64,
            ).ys

        def grad_loss(params):
            field = eqx.combine(params, static)
            return jnp.mean((ys - jax.vmap(solve, in_axes=(None, 0))(field, ys[:, 0])) ** 2)

        loss, grads = jax.value_and_grad(grad_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(params, updates), opt_state, loss

    return make_step, (params, opt_state, ts, ys)


def neural_sde(scale=1):
    """A latent SDE by Euler-Maruyama, a Brownian path for each example."""
    import diffrax

    drift = eqx.nn.MLP(3, 3, 16, 1, key=jax.random.key(0))
    diffusion = eqx.nn.MLP(3, 3, 16, 1, final_activation=jax.nn.tanh, key=jax.random.key(1))
    optimizer = optax.rmsprop(1e-3)
    params, static, opt_state = _trained((drift, diffusion), optimizer)
    y0, target = normal(16 * scale, 3), normal(16 * scale, 3, seed=1)

    def make_step(params, opt_state, y0, target, key):
        def path(model, y, key):
            mu, sigma = model
            noise = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(3,), key=key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, args: mu(y)),
                diffrax.ControlTerm(lambda t, y, args: jnp.diag(sigma(y)), noise),
            )
            solved = diffrax.diffeqsolve(
                terms, diffrax.Euler(), t0=0.0, t1=1.0, dt0=0.125, y0=y, adjoint=diffrax.RecursiveCheckpointAdjoint()
            )
            return solved.ys[-1]

        def loss_fn(params):
            keys = jax.random.split(key, y0.shape[0])
            ends = jax.vmap(path, in_axes=(None, 0, 0))(eqx.combine(params, static), y0, keys)
            return jnp.mean((ends - target) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(params, updates), opt_state, loss

    return make_step, (params, opt_state, y0, target, jax.random.key(2))


def spectral_norm(scale=1):
    """Weights divided by a running estimate of their largest singular value."""

    class Critic(eqx.Module):
        first: eqx.nn.SpectralNorm
        second: eqx.nn.SpectralNorm

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.first = eqx.nn.SpectralNorm(eqx.nn.Linear(16, 32, key=keys[0]), "weight", key=keys[1])
            self.second = eqx.nn.SpectralNorm(eqx.nn.Linear(32, 1, key=keys[2]), "weight", key=keys[3])

        def __call__(self, x, state):
            x, state = self.first(x, state)
            x, state = self.second(jax.nn.leaky_relu(x), state)
            return x, state

    model, state = eqx.nn.make_with_state(Critic)(jax.random.key(0))
    optimizer = optax.adam(1e-3, b1=0.5)
    params, static, opt_state = _trained(model, optimizer)
    real, fake = normal(16 * scale, 16), uniform(16 * scale, 16)

    def make_step(params, state, opt_state, real, fake):
        def hinge(params, state):
            critic = jax.vmap(eqx.combine(params, static), in_axes=(0, None), out_axes=(0, None), axis_name="batch")
            on_real, state = critic(real, state)
            on_fake, state = critic(fake, state)
            return jax.nn.relu(1 - on_real).mean() + jax.nn.relu(1 + on_fake).mean(), state

        (loss, state), grads = jax.value_and_grad(hinge, has_aux=True)(params, state)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(params, updates), state, opt_state, loss

    return make_step, (params, state, opt_state, real, fake)
