"""Which results of a step are its next state, also where the step changes their types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import autopar
from autopar.ir.trace import trace
from autopar.ir.train_state import in_place, match_state, parameter_copies
from autopar.passes.microbatch.batch import infer_batch
from tests.programs.steps import array, loss, sgd, two_layers


def demoting(state: Any, x: jax.Array) -> Any:
    """A step that gives parameters back in bfloat16, however they came, and a counter that becomes weakly typed."""
    params, count = state
    value, grads = jax.value_and_grad(loss)(params, x)
    new = jax.tree.map(lambda p: p.astype(jnp.bfloat16), sgd(params, grads))
    return (new, jnp.where(value > 0, 1, 0) + 0 * count), value


ARGS = (two_layers(), jnp.zeros((), jnp.int32)), array(8, 8)


def test_state_whose_dtype_changes_is_state_but_not_in_place() -> None:
    graph = trace(demoting, *ARGS).graph
    assert match_state(graph) == {0: 0, 1: 1, 2: 2}
    assert in_place(graph) == {2: 2}
    assert [graph.input_paths[i] for i in infer_batch(graph)] == ["x"]


def test_it_keeps_its_sharding_and_nothing_of_it_is_donated() -> None:
    plan = autopar.plan(demoting, *ARGS, mesh=(2,), pins={"state/0/up": PartitionSpec(None, "x")})
    assert plan.out_specs()[1] == plan.in_specs()[1] == PartitionSpec(None, "x")
    assert plan.donated == (2,)


def test_a_result_of_another_name_or_shape_is_no_state() -> None:
    graph = trace(lambda params, x: ({"up": params["up"].sum()}, params["down"] + 1), two_layers(), ARGS[1]).graph
    assert match_state(graph) == {}


def mixed(params: Any, master: Any, x: jax.Array) -> Any:
    """A step in bfloat16 that updates float32 masters."""
    grads = jax.grad(loss)(params, x)
    master = jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), master, grads)
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), master), master


def test_masters_are_copies_of_the_parameters_that_the_gradient_reads() -> None:
    half = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), two_layers())
    graph = trace(mixed, half, two_layers(), array(8, 8)).graph
    copies = {graph.input_paths[i]: graph.input_paths[j] for i, j in parameter_copies(graph).items()}
    assert copies == {"master/down": "params/down", "master/up": "params/up"}


def test_parameters_that_the_gradient_reads_are_no_copies() -> None:
    def step(params: Any, other: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: loss(p, x) * loss(other, x))(params)
        return sgd(params, grads), jax.tree.map(lambda p: 2 * p, other)

    def rounded(master: Any, x: jax.Array) -> Any:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)
        return sgd(master, jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(half, x)))

    assert not parameter_copies(trace(step, two_layers(), two_layers(), array(8, 8)).graph)
    assert not parameter_copies(trace(rounded, two_layers(), array(8, 8)).graph)


def test_without_a_gradient_there_are_no_copies() -> None:
    def average(params: Any, mean: Any, x: jax.Array) -> Any:
        return params, jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, mean, params), loss(params, x)

    assert not parameter_copies(trace(average, two_layers(), two_layers(), array(8, 8)).graph)
