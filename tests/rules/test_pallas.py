"""Rules derived from Pallas kernels: cut kernels give the whole result; what depends on order or place is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention

import autopar
from autopar.bench.equal.case import dear
from autopar.ir.trace import trace
from autopar.rules import pallas, rules_of
from autopar.rules.pallas import axes as axes_module
from autopar.rules.pallas import places
from tests.rules.kernels import (
    CARELESS,
    CUT,
    LIKE,
    REFUSED,
    SCRATCH,
    array,
    assert_cut_is_whole,
    axes,
    call_of,
    calls,
    dynamic_grid,
    matmul,
    of_rows,
    reset_unless_a_narrow_number_wraps,
    running_sum,
    with_estimate,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", CUT)
def test_kernels_that_are_cut(name: str) -> None:
    make, free = CUT[name]
    assert tuple(i for i, axis in enumerate(axes(make())) if not axis.obstacle) == free
    assert assert_cut_is_whole(make()) >= len(free)


def test_the_rule_of_a_matmul() -> None:
    x, w = array(32, 32), array(32, 16)
    graph = trace(matmul, x, w).graph
    (op,) = (op for op in graph.walk() if op.name == "pallas_call")
    rule = rules_of(graph)[op.signature]
    assert str(rule) == "a c, d b -> a b | keep c d"
    assert rule.sizes == (4, 2, 32, 32)  # blocks of rows and columns


def test_the_estimate_is_that_of_the_part() -> None:
    (op,) = calls(with_estimate()[0], array(32, 8))
    jaxpr = jax.make_jaxpr(lambda x: pallas.bind_part(op.equation, [(8, 8)], [x]))(array(8, 8))
    (equation,) = jaxpr.eqns
    assert (equation.params["cost_estimate"].flops, equation.params["cost_estimate"].bytes_accessed) == (256, 512)
    assert equation.params["grid_mapping"].grid == (1,)


def test_numbers_wrap_as_in_the_kernel() -> None:
    spec = pl.BlockSpec((8, 8), lambda i, k: (i, 0))
    kernel = of_rows(reset_unless_a_narrow_number_wraps, spec, spec, (4, 2), **SCRATCH)
    assert "reads scratch memory" in axes(kernel)[0].obstacle


@pytest.mark.parametrize("name", REFUSED)
def test_kernels_that_are_refused(name: str) -> None:
    make, why = REFUSED[name]
    kernel = make()
    (axis,) = axes(kernel)
    assert why in axis.obstacle
    assert not rules_of(trace(kernel[0], *kernel[1]).graph)[call_of(kernel).signature].free


def test_grids_known_at_run_time_are_refused() -> None:
    kernel = dynamic_grid()
    op = call_of(kernel)
    assert pallas.grid_axes(op.params) == ()
    assert pallas.obstacles(op.params) == "its grid is known at run time only"
    assert not rules_of(trace(kernel[0], *kernel[1]).graph)[op.signature].free


def test_grids_known_at_run_time_run_whole() -> None:
    run, arguments = dynamic_grid()
    step = autopar.parallelize(run, mesh=(4,), cluster=dear((4,)), donate_argnums=())
    np.testing.assert_array_equal(step(*arguments), jax.jit(run)(*arguments))


def test_a_prefetched_table_of_a_grid_known_at_run_time_is_read_whole() -> None:
    def body(table: Any, x: Any, out: Any) -> None:
        out[...] = x[...] + table[pl.program_id(0)]

    def run(n: jax.Array, table: jax.Array, x: jax.Array) -> Any:
        rows = pl.BlockSpec((8, 8), lambda i, _: (i, 0))
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(n,), in_specs=[rows], out_specs=rows)
        return pl.pallas_call(body, grid_spec=spec, out_shape=LIKE, interpret=True)(table, x)

    arguments = jnp.int32(4), jnp.arange(4, dtype=jnp.int32), array(32, 8)
    step = autopar.parallelize(run, mesh=(4,), cluster=dear((4,)), donate_argnums=())
    np.testing.assert_array_equal(step(*arguments), jax.jit(run)(*arguments))


@pytest.mark.parametrize("name", CARELESS.split("; "))
def test_a_derivation_that_looks_less_closely_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = REFUSED[name][0]()
    monkeypatch.setattr(axes_module, "_obstacle_of_body", lambda *_: "")
    plain = places._Walk.run
    monkeypatch.setattr(places._Walk, "run", lambda *given: [_guessed(origin) for origin in plain(*given)])
    with pytest.raises(AssertionError):
        assert_cut_is_whole(kernel)


def _guessed(origin: places.Origin) -> places.Origin:
    """What depends on one axis is taken for that axis."""
    return places.place(min(origin.depends_on)) if origin.depends_on else origin


# Kernels of JAX


HEADS, SEQ, WIDTH = 4, 256, 128


def attention(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a sum over attention, which runs the kernels of both passes."""
    return jax.grad(lambda q, k, v: kernel(q, k, v).sum(), (0, 1, 2))


def doubled_and_kept(x: Any, out: Any, kept: Any) -> None:
    kept[...] = 2 * x[...]
    out[...] = kept[...] + 1


def summed_and_kept(x: Any, out: Any, kept: Any) -> None:
    kept[...] += x[...]
    out[...] = kept[...]


def keeping(body: Any) -> Callable[..., Any]:
    """A kernel of rows whose second result has one block, which all runs share."""
    rows, shared = pl.BlockSpec((8, 8), lambda i: (i, 0)), pl.BlockSpec((8, 8), lambda i: (0, 0))
    like = jax.ShapeDtypeStruct((32, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return pl.pallas_call(body, like, grid=(4,), in_specs=[rows], out_specs=[rows, shared], interpret=True)


kept = keeping(doubled_and_kept)
UNREAD = {
    "overwritten first": (lambda x: kept(jnp.sin(x))[0] * 2, True),
    "read": (lambda x: kept(jnp.sin(x)), False),
    "read elsewhere": (
        lambda x: (kept(jnp.sin(x))[0], kept(jnp.cos(x))[1]),
        False,
    ),
    "not overwritten first": (lambda x: keeping(summed_and_kept)(jnp.sin(x))[0], False),
}


@pytest.mark.parametrize("name", UNREAD)
def test_results_that_nothing_reads_are_scratch_memory(name: str) -> None:
    fn, is_cut = UNREAD[name]
    x = array(32, 8)
    graph = trace(fn, x).graph
    rules = [rules_of(graph)[op.signature] for op in graph.walk() if op.name == "pallas_call"]
    assert all(bool(rule.free) == is_cut for rule in rules)
    parallel = autopar.parallelize(fn, mesh=(4,), cluster=dear((4,)))
    for ours, theirs in zip(jax.tree.leaves(parallel(x)), jax.tree.leaves(jax.jit(fn)(x)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_flash_attention_is_cut_by_batch_and_heads() -> None:
    q = jax.ShapeDtypeStruct((8, HEADS, SEQ, WIDTH), jnp.float32)
    kernels = calls(attention(partial(flash_attention.flash_attention, causal=True)), q, q, q)
    assert len(kernels) == 3
    for op in kernels:
        assert [axis.size for axis in pallas.grid_axes(op.params) if not axis.obstacle] == [8, HEADS]


# In plans


@pytest.mark.parametrize("mesh", [(8,), (2, 4), (2, 2, 2)])
def test_planned_kernels_equal_the_whole(mesh: tuple[int, ...]) -> None:
    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul(x, w)

    product.defvjp(lambda x, w: (matmul(x, w), (x, w)), lambda kept, g: (matmul(g, kept[1].T), matmul(kept[0].T, g)))

    def step(w: jax.Array, x: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(product(x, w)) ** 2).mean())(w)
        return w - grad, loss

    w, x = array(32, 64) / 10, array(64, 32) / 10
    parallel = autopar.parallelize(step, mesh=mesh, cluster=dear(mesh), donate_argnums=())
    plan = parallel.plan(w, x)
    assert not any("pallas_call runs replicated" in note for note in plan.notes)
    (note,) = [note for note in plan.notes if "pallas_call" in note]
    assert "is not cut (2 times, first at kernels.py:" in note
    assert "along grid axis 2: result 0 has no dimension of it: it accumulates over this axis" in note
    assert autopar.verify(plan, step, w, x, target="cpu").ok
    for ours, theirs in zip(parallel(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_kernel_that_is_not_cut_runs_on_every_device() -> None:
    def step(x: jax.Array) -> Any:
        return of_rows(running_sum, **SCRATCH)[0](jnp.sin(x)) * 2

    x = array(32, 8)
    parallel = autopar.parallelize(step, mesh=(4,), cluster=dear((4,)))
    (note,) = [note for note in parallel.plan(x).notes if "pallas_call" in note and "replicated" in note]
    assert "grid axis 0: the kernel reads scratch memory that a run before has written" in note
    np.testing.assert_allclose(parallel(x), jax.jit(step)(x), rtol=1e-6)
