"""Mutable arrays (`jax.new_ref`) that a step makes for itself, as its writes and reads are for the compiler: values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.api import parallelize
from autopar.ir.trace import trace
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal
from tests.support.source_lines import line

pytestmark = pytest.mark.core

W, X = array(8, 8), array(16, 8)


def statistic_of_a_loss(w: jax.Array, x: jax.Array) -> Any:
    """A value out of a differentiated function, without `has_aux`."""
    ref = jax.new_ref(jnp.zeros(8))

    def loss(w: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w)
        ref[...] = jax.lax.stop_gradient(h).mean(0)
        return jnp.mean(h**2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value, ref[...]


def gradient_of_an_activation(w: jax.Array, x: jax.Array) -> Any:
    """A cotangent out of a backward pass."""

    @jax.custom_vjp
    def tap(h: jax.Array, ref: Any) -> jax.Array:
        return h

    def backward(ref: Any, cotangent: jax.Array) -> Any:
        ref[...] = cotangent
        return cotangent, None

    tap.defvjp(lambda h, ref: (h, ref), backward)
    ref = jax.new_ref(jnp.zeros((16, 8)))
    gradient = jax.grad(lambda w: jnp.mean(tap(x @ w, ref) ** 2))(w)
    return w - 0.1 * gradient, ref[...].sum(1)


def writes_of_inner_functions(w: jax.Array, x: jax.Array) -> Any:
    """In `jax.jit`, a branch and a loop, of an array that is an argument there."""
    ref = jax.new_ref(x)

    @jax.jit
    def double(ref: Any) -> None:
        ref[...] = ref[...] * 2

    def add() -> None:
        ref[:, 0] = ref[:, 0] + 1

    def body(carry: jax.Array, i: jax.Array) -> Any:
        ref[...] = jnp.tanh(ref[...] @ w)
        return carry + i, None

    double(ref)
    jax.lax.cond(w.sum() > 0, add, lambda: None)
    count, _ = jax.lax.scan(body, 0, jnp.arange(3))
    return w - 0.1 * jax.grad(lambda w: jnp.mean((ref[...] @ w) ** 2))(w), count


STEPS: tuple[Callable[..., Any], ...] = (statistic_of_a_loss, gradient_of_an_activation, writes_of_inner_functions)


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}, {"num_microbatches": 2, "stages": 2}], ids=str)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_mutable_arrays_are_values(step: Callable[..., Any], options: dict[str, Any]) -> None:
    run = parallelize(step, mesh=(8,), donate_argnums=(), **options)
    assert_equal(run(W, X), jax.jit(step)(W, X))


def test_a_write_has_the_line_of_the_user() -> None:
    def step(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[0] = jnp.ones(8)  # written here
        return ref[...]

    sources = {op.source for op in trace(step, X).graph.walk() if "scatter" in op.name or "update" in op.name}
    assert sources == {line(sys.modules[__name__], "# written " + "here")}
