"""FLOPs of kernels: their own estimate, or the products of the body at every point of the grid."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention

from autopar.cost_models.flops import computing_dtype, flops, model_flops
from autopar.cost_models.kernels import kernel_flops
from autopar.ir.graph import Graph, Op
from autopar.ir.trace import trace
from tests.rules.test_pallas import array, matmul, prefetched_scale, with_estimate

pytestmark = pytest.mark.core


def kernels(fn: Any, *args: Any) -> tuple[Graph, list[Op]]:
    graph = trace(fn, *args).graph
    return graph, [op for op in graph.walk() if op.name == "pallas_call"]


def test_products_of_the_body_at_every_point() -> None:
    graph, (op,) = kernels(matmul, array(32, 64), array(64, 16))
    assert kernel_flops(op.name, op.params) == 2 * 32 * 64 * 16
    assert model_flops(graph) == 2 * 32 * 64 * 16


def test_the_estimate_of_the_kernel() -> None:
    _, (op,) = kernels(with_estimate()[0], array(32, 8))
    assert kernel_flops(op.name, op.params) == 1024


def test_backward_passes_of_flash_attention() -> None:
    """Forward 2 products, dK and dV 4, dQ 3: the scores are computed again."""
    batch, heads, seq, width = 8, 4, 256, 128
    q = jax.ShapeDtypeStruct((batch, heads, seq, width), jnp.float32)
    kernel = partial(flash_attention.flash_attention, causal=True)
    _, ops = kernels(jax.grad(lambda q, k, v: kernel(q, k, v).sum(), (0, 1, 2)), q, q, q)
    product = 2 * batch * heads * seq * seq * width
    assert [round(kernel_flops(op.name, op.params) / product, 1) for op in ops] == [2.0, 4.0, 3.0]


def test_branches_loops_and_calls() -> None:
    def body(x: Any, out: Any) -> None:
        @jax.jit
        def twice(a: jax.Array) -> jax.Array:
            return a @ a

        def step(_: Any, a: jax.Array) -> jax.Array:
            return a @ a

        out[...] = twice(x[...]) + jax.lax.fori_loop(0, 5, step, x[...], unroll=False)
        pl.when(pl.program_id(0) == 0)(lambda: out.__setitem__(..., x[...] @ x[...] @ x[...]))

    def run(x: jax.Array) -> jax.Array:
        spec = pl.BlockSpec((8, 8), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, grid=(3,), in_specs=[spec], out_specs=spec, out_shape=shape, interpret=True)(x)

    _, (op,) = kernels(run, array(24, 8))
    assert kernel_flops(op.name, op.params) == 3 * (1 + 5 + 2) * 2 * 8**3


def test_light_kernels_and_prefetched_scalars() -> None:
    fn, args = prefetched_scale()
    graph, (op,) = kernels(fn, *args)
    operands = [graph.type_of(a) for a in op.inputs]
    results = [graph.types[v] for v in op.outputs]
    assert (kernel_flops(op.name, op.params), flops(op, operands, results)) == (0, 32 * 8)
    assert computing_dtype(op, operands) == "float32"
