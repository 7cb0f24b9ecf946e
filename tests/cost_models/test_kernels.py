"""FLOPs of kernels: their own estimate, or the products of the body at every point of the grid."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention

from autopar.cost_models.flops import computing_dtype, flops, model_flops
from autopar.cost_models.kernels import kernel_flops
from autopar.ir.graph import Graph, Op, Type
from autopar.ir.trace import trace
from autopar.zoo.layers import attention
from tests.rules.kernels import array, matmul, prefetched_scale, with_estimate

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


def test_passes_of_flash_attention() -> None:
    """Forward 2 products, dK and dV 4, dQ 3: the scores are computed again.

    The mask leaves 3 of 4 blocks, though JAX's own estimate of the forward pass counts all of them.
    """
    batch, heads, seq, width = 8, 4, 256, 128
    q = jax.ShapeDtypeStruct((batch, heads, seq, width), jnp.float32)
    kernel = partial(flash_attention.flash_attention, causal=True)
    _, ops = kernels(jax.grad(lambda q, k, v: kernel(q, k, v).sum(), (0, 1, 2)), q, q, q)
    product = 2 * batch * heads * seq * seq * width
    assert [round(kernel_flops(op.name, op.params) / product, 1) for op in ops] == [1.5, 3.0, 2.2]


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
    assert kernel_flops(op.name, op.params) == (3 * (1 + 5) + 2) * 2 * 8**3


def test_light_kernels_and_prefetched_scalars() -> None:
    fn, args = prefetched_scale()
    graph, (op,) = kernels(fn, *args)
    operands = [graph.type_of(a) for a in op.inputs]
    results = [graph.types[v] for v in op.outputs]
    assert computing_dtype(op, [Type((4096,), "int32", 4), *operands]) == "float32"
    assert (kernel_flops(op.name, op.params), flops(op, operands, results)) == (0, 32 * 8)
    assert computing_dtype(op, operands) == "float32"


# Branches


def product_where(condition: Any, table: Any = None) -> Any:
    """A kernel with one product at the points (i, j) of a grid of 3 x 4 where a condition of i, j and a table holds."""

    def body(table: Any, x: Any, out: Any) -> None:
        out[...] = jnp.zeros_like(out)
        holds = condition(pl.program_id(0), pl.program_id(1), table)
        pl.when(holds)(lambda: out.__setitem__(..., x[...] @ x[...]))

    spec = pl.BlockSpec((8, 8), lambda i, j, table: (i, j))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(3, 4), in_specs=[spec], out_specs=spec, scratch_shapes=[]
    )

    def run(x: jax.Array, entries: Any = table) -> jax.Array:
        entries = np.zeros((3, 4), np.int32) if entries is None else entries
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, grid_spec=grid_spec, out_shape=shape, interpret=True)(entries, x)

    return run


PRODUCT = 2 * 8**3
TABLE = np.arange(12, dtype=np.int32).reshape(3, 4) % 5


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        (lambda i, j, _: i <= j, 4 + 3 + 2),
        (lambda i, j, _: (i + j) % 2 == 0, 6),
        (lambda i, j, _: jnp.logical_or(i == 1, j // 2 == 0), 4 + 2 + 2),
        (lambda i, _, __: i.astype(jnp.float32) / 2 > 0.4, 4 + 4),
        (lambda i, _, __: i == pl.num_programs(0) - 1, 4),
        (lambda i, j, table: table[i, j] > 2, int((TABLE > 2).sum())),
        (lambda i, j, table: jnp.where(i == 0, table[i, j], table[i, 0]) == 0, 1 + int((TABLE[1:, 0] == 0).sum()) * 4),
    ],
)
@pytest.mark.parametrize("examples", [0, 2])
def test_a_branch_counts_at_the_points_that_take_it(condition: Any, count: int, examples: int) -> None:
    """Also under vmap, which puts an axis in front of the grid."""
    run = product_where(condition, TABLE)
    run, x = (jax.vmap(run), jnp.stack([array(24, 32)] * examples)) if examples else (run, array(24, 32))
    _, (op,) = kernels(run, x)
    assert kernel_flops(op.name, op.params) == (examples or 1) * count * PRODUCT


def test_a_branch_by_values_that_the_step_computes_counts_at_every_point() -> None:
    run = product_where(lambda i, j, table: table[i, j] > 2)
    _, (op,) = kernels(lambda x, table: run(x, table + 1), array(24, 32), TABLE)
    assert op.params["cost_estimate"] is None
    assert kernel_flops(op.name, op.params) == 12 * PRODUCT


def test_a_constant_table_is_known_in_loops_and_in_rematerialised_bodies() -> None:
    run = jax.checkpoint(product_where(lambda i, j, table: table[i, j] > 2, TABLE))

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (run(carry), None), x, None, length=5)[0]

    graph, (op,) = kernels(step, array(24, 32))
    assert kernel_flops(op.name, op.params) == int((TABLE > 2).sum()) * PRODUCT
    assert model_flops(graph) == 5 * kernel_flops(op.name, op.params)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_splash_attention_computes_the_blocks_that_its_mask_leaves(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of b x b blocks b (b + 1) / 2; forward 2 products, dK and dV 4, dQ 3."""
    monkeypatch.setattr(attention, "BLOCK", 128)
    batch, heads, seq, width = 2, 4, 128 * blocks, 64
    q = jax.ShapeDtypeStruct((batch, seq, heads, width), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((batch, seq, 2, width), jnp.bfloat16)
    kernel = attention.kernel_of("splash", causal=True)
    assert kernel is not None
    _, ops = kernels(jax.grad(lambda q, k, v: kernel(q, k, v).astype(jnp.float32).sum(), (0, 1, 2)), q, k, k)
    product = 2 * batch * heads * seq * seq * width * (blocks + 1) / (2 * blocks)
    assert [kernel_flops(op.name, op.params) / product for op in ops] == [2.0, 4.0, 3.0]
