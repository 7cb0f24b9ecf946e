"""Convolutions in groups: their rules as text, any plan against one device, and partial sums of kernels' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.api import parallelize
from autopar.ir.trace import trace
from autopar.rules import rules_of
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal
from tests.support.random_plans import assert_random_plan_equals_jit

IMAGES = array(8, 5, 5, 16)


def convolution(groups: int, numbers: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC")) -> Callable[..., jax.Array]:
    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    return run


def gradients(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda *args: jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), (0, 1))(*args)


def for_each_example(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The gradient of a kernel for each example, which JAX computes in as many groups."""
    own = jax.grad(lambda kernel, x: jnp.sum(jnp.sin(convolution(1)(x[None], kernel))))
    return jax.vmap(own, (None, 0))(kernel, x)


FORWARD = "a b c d, e f g d -> a b c d | keep b c e f g"
BACKWARD = "a b c d, e f d g -> a b c d | keep b c e f g"
#: title -> function, arguments, the rules of its convolutions
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "groups": (
        gradients(convolution(4)),
        (IMAGES, array(3, 3, 4, 32)),
        (FORWARD, "a b c d, a b c d -> e f g d | reduce a | keep b c e f g", BACKWARD),
    ),
    "depthwise": (
        gradients(convolution(16)),
        (IMAGES, array(3, 3, 1, 16)),
        (FORWARD, "a b c d, a b c d -> e f g d | reduce a | keep b c e f g", BACKWARD),
    ),
    "features in front of the result": (
        convolution(16, ("NHWC", "HWIO", "NCHW")),
        (IMAGES, array(3, 3, 1, 16)),
        ("a b c d, e f g d -> a d b c | keep b c e f g",),
    ),
    "features behind those of the operand": (
        convolution(8, ("CHWN", "OIHW", "HWNC")),
        (array(16, 5, 5, 8), array(16, 2, 3, 3)),
        ("a b c d, a e f g -> b c d a | keep b c e f g",),
    ),
    "for each example": (
        for_each_example,
        (array(8, 5, 5, 2), array(3, 3, 2, 4)),
        ("a b c d, e f d g -> a b c g | reduce d | keep b c e f", "a b c d, e b c a -> f g d a | keep b c e f g"),
    ),
}


def rule_texts(fn: Callable[..., Any], *args: Any) -> tuple[str, ...]:
    graph = trace(fn, *args).graph
    rules = rules_of(graph)
    return tuple(str(rules[op.signature]) for op in graph.walk() if op.name == "conv_general_dilated")


@pytest.mark.core
@pytest.mark.parametrize("title", CASES)
def test_examples_and_groups_may_be_sharded(title: str) -> None:
    fn, args, expected = CASES[title]
    assert rule_texts(fn, *args) == expected


# A step


def step_of(groups: int) -> Callable[..., Any]:
    def step(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda kernel: jnp.mean(jnp.sin(convolution(groups)(x, kernel)) ** 2))(kernel)
        return kernel - 0.1 * grad, loss

    return step


@pytest.mark.core
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_any_plan_of_a_loop_over_microbatches_gives_the_same_numbers(
    groups: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = step_of(groups), (array(3, 3, 16 // groups, 16), array(16, 5, 5, 16))
    assert_random_plan_equals_jit(monkeypatch, step, args, seed, mesh=(2, 4), num_microbatches=2)


@pytest.mark.parametrize("groups", [1, 4])
def test_gradients_of_kernels_are_reduced_once_for_all_microbatches(groups: int) -> None:
    shapes = (3, 3, 64 // groups, 64), (256, 16, 16, 64)
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    plan = autopar.plan(step_of(groups), *args, mesh=(8,), cluster="dgx-h100", num_microbatches=4)
    assert plan.inputs[1] == (0,)
    of_kernels = [c for c in plan.collectives if c.bytes > 4]
    assert {c.count for c in of_kernels} == {1}
    report = autopar.verify(plan, step_of(groups), *args)
    assert report.ok, str(report)


def test_a_network_of_depthwise_convolutions_is_data_parallel() -> None:
    """The images of a large batch stay where they are, forward and backward."""

    def loss(kernels: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.relu(convolution(x.shape[-1] // kernel.shape[2])(x, kernel))
        return jnp.mean(x**2)

    shapes = (3, 3, 1, 64), (1, 1, 64, 64), (3, 3, 16, 64)
    kernels = tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    images = jax.ShapeDtypeStruct((1024, 32, 32, 64), np.float32)
    plan = autopar.plan(jax.grad(loss), kernels, images, mesh=(8,), cluster="dgx-h100")
    assert plan.inputs[-1] == (0,)
    assert sum(c.bytes for c in plan.collectives) < 1e6
    assert not [note for note in plan.notes if "replicated" in note]


def test_clipped_gradients_of_each_example_run_in_microbatches() -> None:
    """As in training with differential privacy; the groups of a microbatch are its examples."""

    def step(kernel: jax.Array, x: jax.Array) -> jax.Array:
        grads = for_each_example(x, kernel)
        norms = jnp.sqrt(jnp.sum(grads**2, axis=(1, 2, 3, 4), keepdims=True))
        return kernel - 0.1 * jnp.mean(grads / jnp.maximum(1.0, norms), 0)

    args = array(3, 3, 2, 4), array(16, 5, 5, 2)
    for mesh in ((2,), (2, 4)):
        run = parallelize(step, mesh=mesh, num_microbatches=2, donate_argnums=())
        assert run.plan(*args).num_microbatches == 2
        assert_equal(run(*args), jax.jit(step)(*args))
