"""Which arguments of a step hold its batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.trace import trace
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.microbatch.loop import split_step
from tests.passes.microbatch import batch_programs as programs


def test_the_batch_is_not_state() -> None:
    step = programs.EXACT["dropout"]
    graph = trace(step, *programs.arguments("dropout", step)).graph
    assert [graph.input_paths[i] for i in batch_leaves(graph, 2)] == ["b/mask", "b/x", "b/y"]


def test_scalars_of_the_batch_are_the_same_for_all() -> None:
    args = jnp.ones(()), {"x": jnp.arange(8.0), "scale": 3.0}
    traced = trace(lambda p, b: p * b["scale"] * b["x"].sum(), *args)
    assert split_step(traced, 2, (1,))(*args) == 84


def test_raw_keys_beside_the_batch_are_no_batch() -> None:
    def step(state: Any, b: Any, key: jax.Array) -> Any:
        noise = jax.random.normal(jax.random.wrap_key_data(key), b["x"].shape)
        return state - jnp.mean(b["x"] + noise), jnp.sum(b["y"])

    graph = trace(step, jnp.ones(()), {"x": jnp.ones((8, 2)), "y": jnp.ones(8)}, jnp.zeros(2, jnp.uint32)).graph
    assert [graph.input_paths[i] for i in batch_leaves(graph, 2)] == ["b/x", "b/y"]


def test_more_raw_keys_than_arrays_are_no_batch() -> None:
    def step(state: Any, x: Any, dropout: jax.Array, noise: jax.Array, unused: jax.Array) -> Any:
        kept = jax.random.bernoulli(jax.random.wrap_key_data(dropout), 0.9, x.shape)
        return state - jnp.mean(jnp.where(kept, x, 0) + jax.random.normal(noise, x.shape))

    keys = [jax.random.PRNGKey(i) for i in range(3)]
    graph = trace(step, jnp.ones(()), jnp.ones((8, 2)), *keys).graph
    assert [graph.input_paths[i] for i in batch_leaves(graph, 2)] == ["x"]
