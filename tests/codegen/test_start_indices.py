"""Windows that start out of range, where XLA's simplifier and partitioner lose the clamp of their start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autopar import parallelize

STARTS = (-100, -3, 0, 2, 5, 100)


def first(start: int) -> int:
    """Where a window of 6 in 8 starts; what is negative counts from the end."""
    return int(np.clip(start + 8 if start < 0 else start, 0, 2))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_a_window_of_a_window_cut_over_examples(dtype: str) -> None:
    """A roll is a window too; where every device has one example, both are cut by one kernel."""
    x = np.arange(8 * 3 * 2, dtype=np.float32).reshape(8, 3, 2)
    starts = np.arange(8).astype(dtype)

    def windows(x: jax.Array, starts: jax.Array) -> jax.Array:
        rolled = jax.vmap(lambda a, i: jnp.roll(a, i.astype(jnp.int32) % 3, axis=0))(x, starts)
        return jax.vmap(lambda a, i: lax.dynamic_slice_in_dim(a, i, 2, axis=0))(rolled, starts)

    step = parallelize(windows, mesh=(8,), pins={"x": P("x"), "starts": P("x"), "out:0": P("x")}, donate_argnums=())
    rolled = [np.roll(a, i % 3, axis=0) for a, i in zip(x, starts.astype(int), strict=True)]
    expected = [a[min(i, 1) :][:2] for a, i in zip(rolled, starts.astype(int), strict=True)]
    np.testing.assert_array_equal(step(x, starts), np.stack(expected))


#: Operations between a window and what is scattered into it, which leave its elements as they are.
MOVED: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda x: x,
    "reshape": lambda x: x.reshape(8, 2, 3, 1)[..., 0],
    "broadcast": lambda x: lax.broadcast_in_dim(x, (8, 2, 3, 1), (0, 1, 2))[..., 0],
    "transpose": lambda x: lax.optimization_barrier(x.transpose(2, 1, 0)).transpose(2, 1, 0),
    "rows": lambda x: jnp.concatenate([x, x], 1)[:, :2],
    "copy": lambda x: x.copy(),
}


@pytest.mark.parametrize("move", MOVED)
@pytest.mark.parametrize("places", [(0, 1, 2, 5, -1, 2, 0, 2), (2,) * 8])
@pytest.mark.parametrize("kind", ["add", "set", "max"])
def test_an_update_of_a_window_that_is_dropped(kind: str, places: tuple[int, ...], move: str) -> None:
    """Where every device has one example, an update out of range leaves the window as it is."""
    x = np.arange(8 * 2 * 3, dtype=np.float32).reshape(8, 2, 3)
    starts, at = np.arange(8).astype(np.int32), np.array(places, np.int32)

    def updated(x: jax.Array, starts: jax.Array, at: jax.Array) -> jax.Array:
        rolled = jax.vmap(lambda a, i: jnp.roll(a, i % 2, axis=0))(x, starts)
        rolled = MOVED[move](rolled)
        return jax.vmap(lambda a, i: getattr(a.at[i], kind)(100, mode="drop"))(rolled, at)

    pins = {name: P("x") for name in ("x", "starts", "at", "out:0")}
    step = parallelize(updated, mesh=(8,), pins=pins, donate_argnums=())
    expected = np.stack([np.roll(a, i % 2, axis=0) for a, i in zip(x, starts, strict=True)])
    for row, i in zip(expected, places, strict=True):
        if i < 2:  # -1 counts from the end
            row[i] = {"add": row[i] + 100, "set": 100, "max": 100}[kind]
    np.testing.assert_array_equal(step(x, starts, at), expected)


def test_an_update_of_a_window_that_is_dropped_in_microbatches_of_one_example() -> None:
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(8, 2, 3)), np.arange(8, dtype=np.int32), np.full(8, 2, np.int32)

    def step(w: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        x, shifts, at = batch

        def loss(w: jax.Array) -> jax.Array:
            rolled = jax.vmap(lambda a, i: jnp.roll(a, i % 2, axis=0))(x, shifts)
            updated = jax.vmap(lambda a, i: a.at[i].add(100, mode="drop"))(rolled, at)
            return jnp.mean(jnp.tanh(updated.reshape(8, -1) / 100 @ w) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    with jax.enable_x64(True):
        w = rng.normal(size=(6, 4))
        expected = jax.jit(step)(w, batch)
        got = parallelize(step, mesh=(1,), num_microbatches=8, donate_argnums=())(w, batch)
        for ours, plain in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, plain, 1e-12)


@pytest.mark.parametrize("start", STARTS)
def test_a_window_that_is_cut_itself(start: int) -> None:
    x = np.arange(4 * 8, dtype=np.float32).reshape(4, 8)
    step = parallelize(
        lambda x, start: lax.dynamic_slice_in_dim(x, start, 6, axis=1),
        mesh=(2,), pins={"x": P(), "out:0": P(None, "x")}, donate_argnums=(),
    )  # fmt: skip
    at = first(start)
    np.testing.assert_array_equal(step(x, np.int32(start)), x[:, at : at + 6])


@pytest.mark.parametrize("start", STARTS)
def test_an_update_that_is_cut(start: int) -> None:
    x, update = np.zeros((4, 8), np.float32), np.arange(1, 25, dtype=np.float32).reshape(4, 6)
    step = parallelize(
        lambda x, update, start: lax.dynamic_update_slice_in_dim(x, update, start, axis=1),
        mesh=(2,), pins={"x": P(None, "x"), "update": P(None, "x"), "out:0": P(None, "x")}, donate_argnums=(),
    )  # fmt: skip
    at = first(start)
    expected = x.copy()
    expected[:, at : at + 6] = update
    np.testing.assert_array_equal(step(x, update, np.int32(start)), expected)
