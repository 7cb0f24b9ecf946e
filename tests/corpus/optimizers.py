"""Optimizers and loops around them: optax.contrib, MultiSteps, loss scaling, averages, L-BFGS, per-example clipping."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.corpus.data import normal, tokens


def _mlp(widths, seed=0):
    return [
        {"w": normal(a, b, seed=seed + i, scale=a**-0.5), "b": jnp.zeros(b)}
        for i, (a, b) in enumerate(itertools.pairwise(widths))
    ]


def _apply(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def _loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(_apply(params, x), y).mean()


def _data(scale, n=16, width=32):
    return normal(n * scale, width), tokens(n * scale, below=8)


def _plain(tx, scale, widths=(32, 64, 64, 8)):
    """The loop of the optax guides."""
    params = _mlp(widths)

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(_loss)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), *_data(scale))


def muon(scale=1):
    """Newton-Schulz iterations of the momentum of matrices, Adam for the rest."""
    return _plain(optax.contrib.muon(0.02), scale)


def schedule_free(scale=1):
    """Gradients at an interpolation of two sequences; parameters for evaluation from the state."""
    tx = optax.contrib.schedule_free_adamw(1e-3, warmup_steps=5)
    step, (params, opt_state, x, y) = _plain(tx, scale)

    def with_evaluation(params, opt_state, x, y):
        params, opt_state, loss = step(params, opt_state, x, y)
        return params, opt_state, loss, _loss(optax.contrib.schedule_free_eval_params(opt_state, params), x, y)

    return with_evaluation, (params, opt_state, x, y)


def sam(scale=1):
    """Sharpness-aware minimisation: a second gradient at an adversarial point, inside the update."""
    tx = optax.contrib.sam(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2, opaque_mode=True
    )
    params = _mlp((32, 64, 8))

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(_loss)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params, grad_fn=lambda p, _: jax.grad(_loss)(p, x, y))
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), *_data(scale))


def prodigy(scale=1):
    """Prodigy, whose step size follows the distance from the start."""
    return _plain(optax.contrib.prodigy(1.0), scale)


def sophia_like_hutchinson(scale=1):
    """optax.contrib's Sophia: an estimate of the Hessian's diagonal by Hutchinson, every other step."""
    tx = optax.contrib.sophia(1e-3, update_interval=2)
    params = _mlp((32, 64, 8))

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(_loss)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params, obj_fn=lambda p: _loss(p, x, y))
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), *_data(scale))


def multi_steps(scale=1):
    """optax.MultiSteps: gradients of four calls averaged before one update, non-finite ones skipped."""
    tx = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=2, should_skip_update_fn=optax.skip_not_finite)
    return _plain(tx.gradient_transformation(), scale)


def ema_and_lookahead(scale=1):
    """Fast and slow weights, and an average of the updates."""
    tx = optax.lookahead(optax.chain(optax.adam(1e-2), optax.ema(0.9)), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(_mlp((32, 64, 8)))

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(_loss)(params.fast, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), *_data(scale))


def grouped_with_schedules(scale=1):
    """Hyperparameters in the state, groups of parameters with transformations of their own, frozen ones among them."""
    params = {"body": _mlp((32, 64, 64)), "head": _mlp((64, 8), seed=5), "frozen": normal(32, seed=9)}
    labels = {"body": "body", "head": "head", "frozen": "frozen"}
    tx = optax.multi_transform(
        {
            "body": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-3, 1e-4, 10)),
            "head": optax.sgd(optax.exponential_decay(0.1, 5, 0.9), momentum=0.9),
            "frozen": optax.set_to_zero(),
        },
        labels,
    )

    def step(params, opt_state, x, y):
        def loss_fn(p):
            h = jax.nn.gelu(_apply(p["body"], x * (1 + p["frozen"])))
            return optax.softmax_cross_entropy_with_integer_labels(_apply(p["head"], h), y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), *_data(scale))


class Scaled(NamedTuple):
    params: Any
    opt_state: Any
    scale: jax.Array
    good: jax.Array


def dynamic_loss_scaling(scale=1):
    """Half precision with a scale that doubles after good steps and halves after an overflow."""
    tx = optax.sgd(0.1, momentum=0.9)
    params = _mlp((32, 64, 64, 8))
    state = Scaled(params, tx.init(params), jnp.float32(2.0**14), jnp.zeros((), jnp.int32))

    def step(state, x, y):
        def scaled_loss(params):
            half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
            loss = _loss_in_single(_apply(half, x.astype(jnp.float16)), y)
            return loss * state.scale, loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(state.params)
        grads = jax.tree.map(lambda g: g / state.scale, grads)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (state.params, state.opt_state))
        good = jnp.where(finite, state.good + 1, 0)
        grow = good >= 2
        scale = jnp.where(finite, jnp.where(grow, state.scale * 2, state.scale), state.scale / 2)
        return Scaled(*kept, scale, jnp.where(grow, 0, good)), {"loss": loss, "finite": finite}

    def _loss_in_single(logits, y):
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y).mean()

    return step, (state, *_data(scale))


def lbfgs(scale=1):
    """optax.lbfgs with its zoom line search, the value and gradient kept from the search."""
    tx = optax.lbfgs(memory_size=4, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=6))
    params = _mlp((32, 16, 8))

    def step(params, opt_state, x, y):
        def value_fn(p):
            return _loss(p, x, y) + 1e-3 * optax.tree.norm(p, squared=True)

        value, grads = optax.value_and_grad_from_state(value_fn)(params, state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params, value=value, grad=grads, value_fn=value_fn)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (params, tx.init(params), *_data(scale))


def dp_sgd(scale=1):
    """Per-example gradients by vmap, each clipped, noise added to their sum."""
    params = _mlp((32, 32, 8))
    tx = optax.contrib.differentially_private_aggregate(l2_norm_clip=1.0, noise_multiplier=0.5, key=0)
    tx = optax.chain(tx, optax.sgd(0.1))

    def step(params, opt_state, x, y):
        def one(params, x, y):
            return _loss(params, x[None], y[None])

        losses, grads = jax.vmap(jax.value_and_grad(one), in_axes=(None, 0, 0))(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    return step, (params, tx.init(params), *_data(scale))
