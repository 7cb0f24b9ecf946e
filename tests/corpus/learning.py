"""Learning patterns in plain JAX: second order, implicit layers, mixtures of densities, hypernetworks, LSTMs."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import optax

from tests.corpus.data import normal, tokens, uniform


def _mlp(widths, seed=0):
    return [
        {"w": normal(a, b, seed=seed + i, scale=a**-0.5), "b": jnp.zeros(b)}
        for i, (a, b) in enumerate(itertools.pairwise(widths))
    ]


def _apply(layers, x, activation=jnp.tanh):
    for layer in layers[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def maml(scale=1):
    """Gradients through two inner steps, a batch of tasks by vmap: second order."""
    params, tx = _mlp((1, 32, 32, 1)), optax.adam(1e-3)
    tasks = {name: uniform(8 * scale, 10, 1, seed=i, low=-5, high=5) for i, name in enumerate(("support", "query"))}
    phase = uniform(8 * scale, 1, 1, seed=5, high=3.0)

    def loss(params, x, phase):
        return jnp.mean((_apply(params, x) - jnp.sin(x + phase)) ** 2)

    def task_loss(params, support, query, phase):
        for _ in range(2):
            grads = jax.grad(loss)(params, support, phase)
            params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return loss(params, query, phase)

    def step(params, opt_state, tasks, phase):
        def outer(p):
            return jax.vmap(partial(task_loss, p))(tasks["support"], tasks["query"], phase).mean()

        value, grads = jax.value_and_grad(outer)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (params, tx.init(params), tasks, phase)


def deep_equilibrium(scale=1):
    """A fixed point found by a while loop, differentiated implicitly by a custom VJP."""
    width = 16
    params = {
        "w": normal(width, width, scale=0.1),
        "u": normal(8, width, seed=1, scale=0.3),
        "out": normal(width, 1, seed=2),
    }
    tx = optax.adam(1e-3)
    x, y = normal(16 * scale, 8), normal(16 * scale, 1, seed=3)

    def cell(params, x, z):
        return jnp.tanh(z @ params["w"] + x @ params["u"])

    def iterate(f, z):
        def more(carry):
            z, before, i = carry
            return (jnp.max(jnp.abs(z - before)) > 1e-6) & (i < 50)

        return jax.lax.while_loop(more, lambda c: (f(c[0]), c[0], c[2] + 1), (f(z), z, 0))[0]

    @jax.custom_vjp
    def solve(params, x):
        return iterate(lambda z: cell(params, x, z), jnp.zeros((x.shape[0], width), x.dtype))

    def forward(params, x):
        z = solve(params, x)
        return z, (params, x, z)

    def backward(residuals, g):
        params, x, z = residuals
        _, vjp_z = jax.vjp(lambda z: cell(params, x, z), z)
        u = iterate(lambda u: g + vjp_z(u)[0], jnp.zeros_like(g))
        return jax.vjp(lambda params, x: cell(params, x, z), params, x)[1](u)

    solve.defvjp(forward, backward)

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((solve(p, x) @ p["out"] - y) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), x, y)


def mixture_density(scale=1):
    """Logits, means and scales of a mixture of Gaussians from one network."""
    params, tx = _mlp((4, 64, 64, 15)), optax.noisy_sgd(1e-3, key=0)
    x, y = normal(16 * scale, 4), normal(16 * scale, seed=1)

    def step(params, opt_state, x, y):
        def loss_fn(p):
            logits, means, log_scales = jnp.split(_apply(p, x), 3, axis=-1)
            parts = jax.nn.log_softmax(logits) + jax.scipy.stats.norm.logpdf(y[:, None], means, jnp.exp(log_scales))
            return -jax.scipy.special.logsumexp(parts, axis=-1).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), x, y)


def hypernetwork(scale=1):
    """The weights of each task's network come from another network."""
    params, tx = _mlp((8, 64, 6 * 16 + 16)), optax.adamw(1e-3)
    codes, x, y = normal(8 * scale, 8), normal(8 * scale, 12, 6, seed=1), normal(8 * scale, 12, seed=2)

    def step(params, opt_state, codes, x, y):
        def loss_fn(p):
            weights = _apply(p, codes, jax.nn.relu)
            first, second = weights[:, :96].reshape(-1, 6, 16), weights[:, 96:]
            hidden = jax.nn.relu(jnp.einsum("tnf,tfh->tnh", x, first))
            return jnp.mean((jnp.einsum("tnh,th->tn", hidden, second) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), codes, x, y)


def lstm_peepholes(scale=1):
    """An LSTM in both directions by scans, packed sequences masked by their lengths."""
    width, length = 16, 12
    cell = {
        "x": normal(8, 4 * width, scale=0.3),
        "h": normal(width, 4 * width, seed=1, scale=0.2),
        "b": jnp.zeros(4 * width),
    }
    params = {"forward": cell, "backward": cell, "out": normal(2 * width, 5, seed=2, scale=0.2)}
    tx = optax.adam(1e-3)
    x, y, lengths = normal(8 * scale, length, 8), tokens(8 * scale, below=5), tokens(8 * scale, below=length - 2) + 2

    def run(p, x, mask, reverse):
        def one(carry, inputs):
            c, h = carry
            x, inside = inputs
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, axis=-1)
            c_new = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h_new = jax.nn.sigmoid(o) * jnp.tanh(c_new)
            inside = inside[:, None]
            return (jnp.where(inside, c_new, c), jnp.where(inside, h_new, h)), None

        zeros = jnp.zeros((x.shape[1], width), x.dtype)
        return jax.lax.scan(one, (zeros, zeros), (x, mask), reverse=reverse)[0][1]

    def step(params, opt_state, x, y, lengths):
        mask = (jnp.arange(length) < lengths[:, None]).T

        def loss_fn(p):
            time_major = x.swapaxes(0, 1)
            ends = [run(p["forward"], time_major, mask, False), run(p["backward"], time_major, mask, True)]
            logits = jnp.concatenate(ends, -1) @ p["out"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), x, y, lengths)


def physics_informed(scale=1):
    """The residual of the heat equation by nested derivatives, collocation points by vmap."""
    params, tx = _mlp((2, 32, 32, 1)), optax.adam(1e-3)
    inner, border = uniform(32 * scale, 2), uniform(16 * scale, 2, seed=1)

    def u(params, point):
        return _apply(params, point)[0]

    def residual(params, point):
        grad = jax.grad(u, argnums=1)(params, point)
        hessian = jax.hessian(u, argnums=1)(params, point)
        return grad[1] - 0.1 * hessian[0, 0]

    def step(params, opt_state, inner, border):
        def loss_fn(p):
            inside = jax.vmap(partial(residual, p))(inner)
            edge = jax.vmap(partial(u, p))(border) - jnp.sin(jnp.pi * border[:, 0])
            return jnp.mean(inside**2) + jnp.mean(edge**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), inner, border)


def simclr_with_queue(scale=1):
    """MoCo: a momentum encoder, a queue of keys as a ring buffer in the state."""
    n, width, size = 8 * scale, 16, 32 * scale
    params, tx = _mlp((24, 64, width)), optax.sgd(0.03, momentum=0.9)
    queue = normal(size, width, seed=3)
    state = (
        params,
        tx.init(params),
        params,
        queue / jnp.linalg.norm(queue, axis=-1, keepdims=True),
        jnp.zeros((), jnp.int32),
    )
    views = normal(2, n, 24, seed=4)

    def embed(params, x):
        z = _apply(params, x, jax.nn.relu)
        return z / jnp.linalg.norm(z, axis=-1, keepdims=True)

    def step(state, views):
        params, opt_state, slow, queue, at = state
        keys = jax.lax.stop_gradient(embed(slow, views[1]))

        def loss_fn(p):
            q = embed(p, views[0])
            positive = jnp.sum(q * keys, -1, keepdims=True)
            logits = jnp.concatenate([positive, q @ queue.T], -1) / 0.2
            return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.zeros(n, jnp.int32)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        slow = optax.incremental_update(params, slow, 0.01)
        queue = jax.lax.dynamic_update_slice_in_dim(queue, keys, at, axis=0)
        return (params, opt_state, slow, queue, (at + n) % size), loss

    return step, (state, views)


def implicit_ridge(scale=1):
    """A linear solve inside the loss: ridge regression on features that are learnt, by Cholesky for each task."""
    params, tx = _mlp((6, 32, 16)), optax.adam(1e-3)
    log_ridge = jnp.zeros(())
    support, query = normal(8 * scale, 20, 6), normal(8 * scale, 10, 6, seed=1)
    targets = normal(8 * scale, 30, seed=2)

    def step(params, opt_state, support, query, targets):
        def one(params, support, query, targets):
            phi, psi = _apply(params["net"], support), _apply(params["net"], query)
            gram = phi.T @ phi + jnp.exp(params["log_ridge"]) * jnp.eye(phi.shape[1], dtype=phi.dtype)
            factor = jax.scipy.linalg.cho_factor(gram, lower=True)
            w = jax.scipy.linalg.cho_solve(factor, phi.T @ targets[:20])
            return jnp.mean((psi @ w - targets[20:]) ** 2)

        def loss_fn(p):
            return jax.vmap(one, in_axes=(None, 0, 0, 0))(p, support, query, targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"net": params, "log_ridge": log_ridge}
    return step, (params, tx.init(params), support, query, targets)
