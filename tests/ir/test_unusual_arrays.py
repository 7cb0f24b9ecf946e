"""Arrays that few programs have: of less than a byte per element, and without elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import parallelize
from autopar.hardware.cluster import Cluster
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal
from tests.support.effort import sample

pytestmark = pytest.mark.core


def step(params: Any, x: jax.Array) -> Any:
    """A train step on a batch of any type of numbers."""

    def loss(params: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(x.astype(jnp.float32) @ params["up"]) @ params["down"])

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def parameters(features: int, hidden: int) -> Any:
    return {"up": array(features, hidden), "down": array(hidden, 4)}


# Less than a byte per element


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_an_argument_of_less_than_a_byte_per_element_is_read_in_shards(dtype: str) -> None:
    x = jnp.arange(128).reshape(16, 8).astype(dtype)
    run = parallelize(lambda x: (x.astype(jnp.float32) * 2, x), mesh=(8,), pins={"x": P("x")}, donate_argnums=())
    _, same = run(x)
    doubled, again = run(same)  # JAX checks the arguments of a first call in Python, those of the next in C++
    np.testing.assert_array_equal(doubled, x.astype(jnp.float32) * 2)
    assert again.sharding.spec == P("x")


def test_stages_read_arguments_of_less_than_a_byte_per_element() -> None:
    args = parameters(8, 8), jnp.arange(128).reshape(16, 8).astype(jnp.int4)
    assert_equal(parallelize(step, mesh=(8,), stages=2, donate_argnums=())(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_rows_of_a_sharded_table_by_indices_of_less_than_four_bytes(dtype: str) -> None:
    """XLA's partitioner knows no such indices, and ends the process."""

    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))

    def rows(table: jax.Array, i: jax.Array) -> jax.Array:
        return lax.gather(table, i, numbers, (1, 3), mode="clip")

    args = array(6, 3), jnp.array([1, 2, 3, 5, 4, 0, 70, 127], dtype)[:, None]
    plan = autopar.plan(rows, *args, mesh=(2, 4), pins={"table": P("x"), "i": P("y"), "out:0": P("y")})
    at_home = replace(plan, stages=(replace(plan.stages[0], uses={}),))
    np.testing.assert_array_equal(parallelize(rows, plan=at_home, donate_argnums=())(*args), rows(*args))


# Without elements

EMPTY: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "rows of a product": (jnp.matmul, ((0, 16), (16, 8))),
    "columns of a product": (jnp.matmul, ((16, 16), (16, 0))),
    "what a product contracts": (jnp.matmul, ((16, 0), (0, 8))),
    "a batch of products": (lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), ((0, 16, 8), (0, 8, 8))),
    "images": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), ((0, 8, 8, 8), (8, 8, 3, 3))),
    "input channels": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), ((8, 0, 8, 8), (8, 0, 3, 3))),
    "output channels": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), ((8, 8, 8, 8), (0, 8, 3, 3))),
    "what is summed": (lambda x: x.sum(0), ((0, 16),)),
    "what stays": (lambda x: x.sum(1), ((0, 16),)),
    "what is sorted": (lambda x: jnp.sort(x, 0), ((0, 8),)),
    "one part of several": (lambda x, y: jnp.concatenate([x, y], 0), ((0, 8), (16, 8))),
    "iterations": (lambda x: lax.scan(lambda c, a: (c + a @ a.T, a @ a.T), jnp.zeros((8, 8)), x), ((0, 8, 8),)),
    "the batch of a step": (lambda a, b, x: step({"up": a, "down": b}, x), ((16, 8), (8, 4), (0, 16))),
    "features of a step": (lambda a, b, x: step({"up": a, "down": b}, x), ((0, 8), (8, 4), (16, 0))),
    "hidden units of a step": (lambda a, b, x: step({"up": a, "down": b}, x), ((8, 0), (0, 4), (16, 8))),
}


@pytest.mark.parametrize("preset", sample(["dgx-h100", "tpu-v5e"], ["dgx-h100"]))
@pytest.mark.parametrize("title", EMPTY)
def test_empty_arrays_are_planned(title: str, preset: str) -> None:
    fn, shapes = EMPTY[title]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    for budget in (None, "min"):
        plan = autopar.plan(fn, *types, mesh=(2, 4), cluster=Cluster.preset(preset), memory_budget=budget)
        assert 0 <= plan.step_time_s < 1e-3
        assert plan.flops_per_device >= 0
        layouts = zip(plan.outputs, plan.output_shapes, strict=True)
        assert all(set(layout) == {-1} for layout, shape in layouts if 0 in shape)


@pytest.mark.parametrize(
    "title", ["columns of a product", "what a product contracts", "images", "hidden units of a step"]
)
def test_empty_arrays_run(title: str) -> None:
    fn, shapes = EMPTY[title]
    args = [array(*shape) for shape in shapes]
    pins = {f"arg:{i}": P("x") for i, shape in enumerate(shapes) if shape[0] % 8 == 0}
    for pinned in ({}, pins):
        assert_equal(parallelize(fn, mesh=(8,), donate_argnums=(), pins=pinned)(*args), jax.jit(fn)(*args))
