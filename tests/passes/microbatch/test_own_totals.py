"""With `per_microbatch`, a step computes what accumulating the gradients of its microbatches computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.trace import trace
from autopar.passes.microbatch.loop import split_step

COUNT, EXAMPLES, WIDTH = 4, 32, 8
Params = Mapping[str, Any]


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def product_of_mean(params: Params, x: Any) -> Any:
    h = jnp.tanh(x @ params["w"])
    return jnp.mean((h + h.mean(0) @ params["v"]) ** 2)


def scaled_mean(params: Params, x: Any) -> Any:
    h = jnp.tanh(x @ params["w"])
    return jnp.mean(jnp.sin(h - params["b"] * h.mean(0)))


def batch_norm(params: Params, x: Any) -> Any:
    h = x @ params["w"]
    mean = h.mean(0)
    var = jnp.mean(h * h, 0) - mean * mean
    return jnp.mean(jnp.tanh((h - mean) * jax.lax.rsqrt(var + 1e-3) * params["b"] @ params["v"]) ** 2)


def gated_by_mean(params: Params, x: Any) -> Any:
    h = jnp.tanh(x @ params["w"])
    gate = jax.nn.sigmoid(h.mean(0) @ params["v"] + params["b"])
    return jnp.mean((h * gate) ** 2)


def scaled_by_maximum(params: Params, x: Any) -> Any:
    h = jnp.tanh(x @ params["w"])
    return jnp.mean((h / (1 + jnp.abs(h).max(0) * params["b"])) @ params["v"])


def two_layers(params: Params, x: Any) -> Any:
    h = jnp.tanh(x @ params["v"])
    return batch_norm(params, jnp.tanh(h + h.mean(0) @ params["v"]))


def penalised_mean(params: Params, x: Any) -> Any:
    h = jnp.tanh(x @ params["w"])
    mean = h.mean(0)
    return jnp.mean((h - mean) ** 2 @ params["v"]) + jnp.sum((mean * params["b"]) ** 2)


def masked_batch_norm(params: Params, x: Any) -> Any:
    """The number of examples that count depends on the input alone, so that it is known before the loop."""
    h, mask = jnp.tanh(x @ params["w"]), (x[:, :1] > -0.5).astype(x.dtype)
    mean = jnp.sum(h * mask, 0) / jnp.sum(mask)
    return jnp.sum(jnp.tanh((h - mean) * params["b"] @ params["v"]) ** 2 * mask) / jnp.sum(mask)


LOSSES = (
    product_of_mean,
    scaled_mean,
    batch_norm,
    gated_by_mean,
    scaled_by_maximum,
    two_layers,
    penalised_mean,
    masked_batch_norm,
)


def inputs() -> tuple[dict[str, Any], Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    w, v = (jax.random.normal(k, (WIDTH, WIDTH), jnp.float64) for k in keys[:2])
    b, x = (jax.random.normal(k, s, jnp.float64) for k, s in zip(keys[2:], ((WIDTH,), (EXAMPLES, WIDTH)), strict=True))
    return {"w": w, "v": v, "b": b}, x


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_the_step_is_that_of_accumulated_gradients(loss: Callable[[Params, Any], Any]) -> None:
    params, x = inputs()

    def step(params: Params, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g / (1e-8 + jnp.abs(g)), params, gradients), gradients, value

    traced = trace(step, params, x)
    microbatched = split_step(traced, COUNT, (1,), per_microbatch=("*",))
    each = [jax.value_and_grad(loss)(params, block) for block in jnp.split(x, COUNT)]
    expected, gradients = jax.tree.map(lambda *xs: sum(xs) / COUNT, *each)
    _, got, value = jax.jit(microbatched)(params, x)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for name in params:
        np.testing.assert_allclose(got[name], gradients[name], rtol=1e-9, atol=1e-13, err_msg=name)
    assert not np.allclose(got["w"], jax.grad(loss)(params, x)["w"], rtol=1e-6), "the test tells nothing"


def test_what_is_not_differentiated_has_the_totals_of_the_batch() -> None:
    params, x = inputs()

    def step(params: Params, x: Any) -> Any:
        gradients = jax.grad(product_of_mean)(params, x)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        return gradients, norm

    gradients, norm = jax.jit(split_step(trace(step, params, x), COUNT, (1,), per_microbatch=("*",)))(params, x)
    assert np.allclose(norm, np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients))), rtol=1e-12)


def test_totals_that_no_pattern_names_are_those_of_the_batch() -> None:
    """Statistics are of the microbatch, and the loss divides by the count of the batch; both in the gradient too."""
    params, x = inputs()

    def terms(params: Params, x: Any, count: Any) -> Any:
        h, mask = jnp.tanh(x @ params["w"]), (x[:, :1] > -0.5).astype(x.dtype)
        with jax.named_scope("statistics"):
            mean = jnp.sum(h * mask, 0) / jnp.sum(mask)
        error = jnp.sum(jnp.tanh((h - mean) @ params["v"]) ** 2 * mask)
        return error / (jnp.sum(mask) if count is None else count), jnp.sum((mean * params["b"]) ** 2)

    def step(params: Params, x: Any) -> Any:
        return jax.value_and_grad(lambda p: sum(terms(p, x, None)))(params)

    def expected(params: Params) -> Any:
        count = jnp.sum((x[:, :1] > -0.5).astype(x.dtype))
        each = [terms(params, block, count) for block in jnp.split(x, COUNT)]
        return sum(error for error, _ in each) + sum(penalty for _, penalty in each) / COUNT

    got = jax.jit(split_step(trace(step, params, x), COUNT, (1,), per_microbatch=("statistics",)))(params, x)
    value, gradients = jax.value_and_grad(expected)(params)
    np.testing.assert_allclose(got[0], value, rtol=1e-12)
    for name in params:
        np.testing.assert_allclose(got[1][name], gradients[name], rtol=1e-9, atol=1e-13, err_msg=name)
