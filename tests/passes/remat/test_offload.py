"""Which state may be offloaded to host memory: programs small enough to tell by eye."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar import zoo
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.ir.train_state import match_state
from autopar.passes.remat.offload import offloadable
from tests.support.traces import traced

RATE = 0.1


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def paths(graph: Graph, donated: tuple[int, ...] | None = None) -> list[str]:
    donated_positions = tuple(match_state(graph).values()) if donated is None else donated
    return [graph.input_paths[i] for i in offloadable(graph, donated_positions)]


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.square(x @ w.astype(x.dtype)).astype(jnp.float32))


def momentum(state: Any, x: Any) -> Any:
    """The moment is read before the forward pass begins, and only the update reads what is made of it."""
    m = 0.9 * state["m"] + jax.grad(loss)(state["w"], x)
    return {"w": state["w"] - RATE * m, "m": m, "count": state["count"] + 1}


def masters(state: Any, x: Any) -> Any:
    """The forward pass reads rounded copies, and the update the masters."""
    gradient = jax.grad(loss)(state["low"], x).astype(jnp.float32)
    master = state["master"] - RATE * gradient
    return {"master": master, "low": master.astype(jnp.bfloat16)}


def rounding(state: Any, x: Any) -> Any:
    """The forward pass rounds the masters itself."""
    return {"master": state["master"] - RATE * jax.grad(lambda w: loss(w.astype(jnp.bfloat16), x))(state["master"])}


def averaged(state: Any, x: Any) -> Any:
    w = state["w"] - RATE * jax.grad(loss)(state["w"], x)
    return {"w": w, "mean": 0.99 * state["mean"] + 0.01 * w, "frozen": state["frozen"]}


def switched(state: Any, x: Any) -> Any:
    """An update that is left out where a gradient is not finite."""
    g = jax.grad(loss)(state["w"], x)
    m = jax.lax.cond(jnp.isfinite(g).all(), lambda m: 0.9 * m + g, lambda m: m, state["m"])
    return {"w": state["w"] - RATE * m, "m": m}


W, X, SMALL = array(8, 8), array(4, 8), array(4)
LOW = array(8, 8, dtype=jnp.bfloat16)
CASES = {
    "momentum": (momentum, {"w": W, "m": W, "count": array(dtype=jnp.int32)}, X, ["state/m"]),
    "masters": (masters, {"master": W, "low": LOW}, array(4, 8, dtype=jnp.bfloat16), ["state/master"]),
    "masters that are read": (rounding, {"master": W}, array(4, 8, dtype=jnp.bfloat16), []),
    "an average, and nothing that is only kept": (averaged, {"w": W, "mean": W, "frozen": SMALL}, X, ["state/mean"]),
    "inside a branch": (switched, {"w": W, "m": W}, X, ["state/m"]),
    "no state": (lambda w, x: loss(w, x), W, X, []),
}


@pytest.mark.parametrize("case", CASES)
def test_state_that_only_the_update_reads_is_offloadable(case: str) -> None:
    fn, state, x, expected = CASES[case]
    assert paths(trace(lambda state, x: fn(state, x), state, x).graph) == expected


@pytest.mark.parametrize("name", ["mlp-toy", "gpt-toy-scan", "flax-linen-toy"])
def test_moments_of_adam_are_offloadable_the_largest_first(name: str) -> None:
    graph = traced(name).graph
    positions = offloadable(graph, tuple(match_state(graph).values()))
    names = [graph.input_paths[i] for i in positions]
    assert all("/mu/" in path or "/nu/" in path for path in names)
    sizes = [graph.types[graph.inputs[i]].nbytes for i in positions]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 2 * 4 * zoo.build(name).parameters()


def test_arguments_that_are_not_donated_stay_on_the_device() -> None:
    fn, state, x, _ = CASES["momentum"]
    graph = trace(fn, state, x).graph
    assert paths(graph, ()) == []
    assert paths(graph, (graph.input_paths.index("state/w"),)) == []
