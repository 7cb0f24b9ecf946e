"""The price of a body is that of the same operations, laid out by the planner in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cost_models.compiler.manual import workspace_bytes
from autopar.cost_models.flops import model_flops
from autopar.ir.trace import trace
from autopar.rules.manual import call_of

MESH = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
X, W = jnp.zeros((1024, 512)), jnp.zeros((512, 256))


def mapped(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs)


PRODUCTS = {
    "rows": ((P("x"), P()), P("x"), jnp.matmul),
    "columns": ((P(), P(None, "x")), P(None, "x"), jnp.matmul),
    "contracted": ((P(None, "x"), P("x")), P(), lambda x, w: lax.psum(x @ w, "x")),
}


@pytest.mark.parametrize(("operands", "result", "body"), PRODUCTS.values(), ids=PRODUCTS)
def test_products_in_a_body_take_as_long_as_planned_ones(operands: Any, result: Any, body: Any) -> None:
    by_hand = autopar.plan(mapped(body, operands, result), X, W)
    pins = {"x": operands[0], "w": operands[1], "out:0": result}
    planned = autopar.plan(lambda x, w: x @ w, X, W, mesh={"x": 8}, pins=pins)
    # what a body sends is never hidden behind computation
    assert by_hand.step_time_s == pytest.approx(planned.step_time_s + planned.parts["hidden"])
    assert by_hand.mfu * by_hand.step_time_s == pytest.approx(planned.mfu * planned.step_time_s)  # FLOPs
    assert [(c.kind, c.bytes) for c in by_hand.collectives] == [(c.kind, c.bytes) for c in planned.collectives]


def test_a_loop_in_a_body_multiplies_its_flops_and_not_its_memory() -> None:
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w) @ w, x)

    square = jnp.zeros((512, 512))
    graph = trace(mapped(chain, (P("x"), P()), P("x")), X, square).graph
    body = call_of(graph.ops[0]).body
    assert model_flops(graph) == 5 * 2 * 2 * 1024 * 512 * 512
    once = trace(mapped(lambda x, w: jnp.tanh(x @ w) @ w, (P("x"), P()), P("x")), X, square).graph
    one_run = workspace_bytes(call_of(once.ops[0]).body)
    shard = 4 * 1024 // 8 * 512
    assert one_run == shard  # tanh overwrites the product
    assert one_run <= workspace_bytes(body) <= one_run + shard
