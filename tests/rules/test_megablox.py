"""Products over groups of rows by JAX's megablox: which kernels are known, and any plan of them against one device."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox import ops

import autopar
from autopar.api import parallelize
from autopar.bench.equal.case import dear
from autopar.cost_models.flops import executed_flops, model_flops
from autopar.errors import MicrobatchError, TraceError
from autopar.ir.trace import trace
from autopar.jax_compat import megablox
from autopar.rules import rules_of
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal

backend = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

ROWS, WIDTH, OUT, GROUPS = 64, 16, 24, 4
TILING = (8, 8, 16)  # the last tile of columns is half a tile
SIZES = jnp.array([13, 0, 34, 17], jnp.int32)
MATRICES = array(GROUPS, WIDTH, OUT)
ARGUMENTS = array(ROWS, WIDTH), MATRICES, SIZES


def gmm(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, **changed: Any) -> jax.Array:
    keywords = {"preferred_element_type": jnp.float32, "tiling": TILING, "interpret": True}
    return backend.gmm(rows, matrices, sizes, **{**keywords, **changed})


def tgmm(rows: jax.Array, results: jax.Array, sizes: jax.Array, **changed: Any) -> jax.Array:
    keywords = {"preferred_element_type": jnp.float32, "tiling": TILING, "interpret": True}
    return backend.tgmm(rows.T, results, sizes, **{**keywords, **changed})


def gradients(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> Any:
    def loss(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(ops.gmm(rows, matrices, sizes, jnp.float32, TILING, interpret=True)))

    return jax.grad(loss, (0, 1))(rows, matrices)


def without_group(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows behind the last group are not computed."""
    return jnp.where(jnp.arange(ROWS)[:, None] < sizes.sum(), gmm(rows, matrices, sizes), 0)


def of_some_groups(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return gmm(rows, matrices, sizes, group_offset=jnp.int32(1))


def added(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return gmm(rows, matrices, sizes, existing_out=jnp.ones((ROWS, OUT)))


PRODUCT = "a b, c b d, c, e -> a d | reduce b | keep c e"
TRANSPOSED = "a b, c d b, c, e -> a d | reduce b | keep c e"
CONTRACTED = "a b, a c, d, e -> d b c | reduce a | keep d e"

#: title -> function, arguments, the rules of its products
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "product": (gmm, ARGUMENTS, (PRODUCT,)),
    "transposed": (
        partial(gmm, transpose_rhs=True),
        (array(ROWS, WIDTH), array(GROUPS, OUT, WIDTH), SIZES),
        (TRANSPOSED,),
    ),
    "contracted": (tgmm, (array(ROWS, WIDTH), array(ROWS, OUT), SIZES), (CONTRACTED,)),
    "gradients": (gradients, ARGUMENTS, (PRODUCT, TRANSPOSED, CONTRACTED)),
    "rows without a group": (without_group, (*ARGUMENTS[:2], SIZES - 3 * (SIZES > 0)), (PRODUCT,)),
    "one group has all rows": (
        gradients,
        (*ARGUMENTS[:2], jnp.array([0, 0, ROWS, 0], jnp.int32)),
        (PRODUCT, TRANSPOSED, CONTRACTED),
    ),
    "one tile of rows": (partial(gmm, tiling=(ROWS, 8, 16)), ARGUMENTS, (PRODUCT,)),
    "matrices of some groups": (of_some_groups, (array(ROWS, WIDTH), MATRICES[1:3], SIZES), ()),
    "added to an array": (added, ARGUMENTS, ()),
}


def products(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return [op for op in trace(fn, *args).graph.walk() if op.name == "megablox_product"]


@pytest.mark.core
@pytest.mark.parametrize("title", CASES)
def test_every_dimension_but_the_groups_may_be_sharded(title: str) -> None:
    fn, args, expected = CASES[title]
    graph = trace(fn, *args).graph
    rules = rules_of(graph)
    assert tuple(str(rules[op.signature]) for op in products(fn, *args)) == expected
    kernels = [op for op in graph.walk() if op.name == "pallas_call"]
    assert len(kernels) == (not expected)
    assert not any(rules[op.signature].free for op in kernels)


@pytest.mark.core
def test_the_tables_of_a_kernel_are_no_part_of_the_program() -> None:
    assert [op.name for op in trace(gmm, *ARGUMENTS).graph.walk()] == ["megablox_product"]


@pytest.mark.parametrize(("tile", "parts"), [(8, 64), (128, 4), (256, 4), (192, 8)])
def test_rows_are_cut_in_tiles_or_in_parts_of_128_rows(tile: int, parts: int) -> None:
    rows = tile * (3 if tile == 192 else 512 // tile)
    fn = partial(gmm, tiling=(tile, 8, 16))
    (op,) = products(fn, array(rows, WIDTH), MATRICES, SIZES)
    rule = rules_of(trace(fn, array(rows, WIDTH), MATRICES, SIZES).graph)[op.signature]
    assert rule.sizes[rule.results[0][0]] == rows // np.gcd(tile, 128) == (parts if tile != 192 else 9)


# Which kernels


def kernel_of(fn: Callable[..., Any], *args: Any) -> Any:
    """The equation of the kernel in a function's only call."""
    (call,) = [e for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns if e.params.get("name") == "gmm"]
    (kernel,) = [e for e in call.params["jaxpr"].jaxpr.eqns if e.primitive.name == "pallas_call"]
    return kernel


def with_another_body(params: Any) -> Any:
    return {**params, "jaxpr": params["jaxpr"].replace(eqns=params["jaxpr"].eqns[:-1])}


def from_another_file(params: Any) -> Any:
    body = params["jaxpr"]
    debug = body.debug_info._replace(func_src_info="kernel at /theirs/megablox/gmm.py:393")
    return {**params, "jaxpr": body.replace(debug_info=debug)}


def with_another_index_map(params: Any) -> Any:
    left, right, out = params["grid_mapping"].block_mappings
    blocks = left, right, out.replace(index_map_jaxpr=left.index_map_jaxpr)
    return {**params, "grid_mapping": params["grid_mapping"].replace(block_mappings=blocks)}


def with_another_block(params: Any) -> Any:
    left, right, out = params["grid_mapping"].block_mappings
    blocks = left, right, out.replace(block_shape=left.block_shape)
    return {**params, "grid_mapping": params["grid_mapping"].replace(block_mappings=blocks)}


def with_another_compiler_parameter(params: Any) -> Any:
    changed = dataclasses.replace(params["compiler_params"], dimension_semantics=("arbitrary",) * 3)
    return {**params, "compiler_params": changed}


@pytest.mark.core
def test_a_kernel_that_differs_in_anything_is_not_known() -> None:
    kernel = kernel_of(gmm, *ARGUMENTS)
    assert megablox.as_product(kernel, {}) is not None
    changes = (
        *(with_another_body, from_another_file, with_another_index_map, with_another_block),
        with_another_compiler_parameter,
    )
    for change in changes:
        assert megablox.as_product(kernel.replace(params=change(kernel.params)), {}) is None, change.__name__


def test_the_sizes_follow_from_the_ends_where_they_are_not_found() -> None:
    call = megablox.as_product(kernel_of(gmm, *ARGUMENTS), {})
    assert call is not None
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(SIZES)])
    product = jex.jaxpr_as_fun(call.params["call_jaxpr"])
    (result,) = product(*ARGUMENTS[:2], ends, jnp.zeros(1, jnp.int32))
    assert_equal(result, gmm(*ARGUMENTS))


def test_a_plan_for_gpus_is_refused() -> None:
    with pytest.raises(TraceError, match=r"uses a Pallas kernel for TPUs at test_megablox\.py:\d+"):
        autopar.plan(partial(gmm, interpret=False), *ARGUMENTS, mesh=(8,), cluster="dgx-h100")


# What it costs


def test_flops_are_those_of_every_row_once() -> None:
    graph = trace(gmm, *ARGUMENTS).graph
    (op,) = graph.ops
    operands, results = [graph.type_of(a) for a in op.inputs], [graph.types[v] for v in op.outputs]
    assert model_flops(graph) == 2 * ROWS * WIDTH * OUT
    assert executed_flops(op, operands, results, masks_groups=True) == 2 * ROWS * WIDTH * OUT


# Microbatches and stages


def mixture(params: Any, batch: Any) -> Any:
    """Two layers of experts, one expert for each row, under gradient descent."""

    def layer(x: jax.Array, layer: Any) -> jax.Array:
        chosen = jnp.argmax(x @ layer["gate"], -1)
        order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=GROUPS).astype(jnp.int32)
        y = ops.gmm(x[order], layer["experts"], sizes, jnp.float32, TILING, interpret=True)
        return x + jnp.zeros_like(x).at[order].add(jnp.tanh(y))

    def loss(params: Any) -> jax.Array:
        x = batch["x"]
        for each in params:
            x = layer(x, each)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


LAYERS = [{"gate": array(WIDTH, GROUPS) + i, "experts": array(GROUPS, WIDTH, WIDTH) / (3 + i)} for i in range(2)]
BATCH = {"x": array(ROWS, WIDTH), "y": jnp.cos(array(ROWS, WIDTH))}


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"num_microbatches": 2, "stages": 2}], ids=str)
def test_a_mixture_of_experts_runs_in_microbatches_and_stages(options: dict[str, Any]) -> None:
    step = parallelize(mixture, mesh=(4,), cluster=dear((4,)), donate_argnums=(), **options)
    assert_equal(step(LAYERS, BATCH), jax.jit(mixture)(LAYERS, BATCH))


def test_microbatches_with_parts_of_a_tile_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TILING", (ROWS, 8, 16))
    with pytest.raises(MicrobatchError, match=r"test_megablox\.py:\d+ combines examples of the whole batch"):
        autopar.plan(mixture, LAYERS, BATCH, mesh=(4,), cluster=dear((4,)), num_microbatches=2)
