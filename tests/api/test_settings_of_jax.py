"""Settings of JAX that are in force at a call: `jax.disable_jit`, `jax.enable_x64`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal

W, X = array(8, 8), array(16, 8)
STAGES = {"mesh": (2,), "cluster": dear((2,)), "stages": 2, "schedule": "1f1b", "num_microbatches": 4}


def step(w: Any, x: Any) -> Any:
    value, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ w - 1) ** 2))(w)
    return w - 0.1 * grad, value


class Doubling:
    """An object whose method is parallelized."""

    @autopar.parallelize(mesh=(8,))
    def run(self, x: Any) -> Any:
        return 2 * x if float(x[0, 0]) != 0 else x


@pytest.mark.parametrize("options", [{"mesh": (8,)}, STAGES], ids=["one mesh", "stages"])
def test_without_jit_a_call_runs_the_function_as_written(options: Any) -> None:
    traced: list[bool] = []

    def printing(w: Any, x: Any) -> Any:
        traced.append(isinstance(w, jax.core.Tracer))
        return step(w, x)

    run = autopar.parallelize(printing, **options)
    with jax.disable_jit():
        results = run(W, x=X)
    assert traced == [False]
    assert run.last_plan is None
    assert_equal(results, step(W, X))
    assert_equal(run(W + 0, X), step(W, X))  # planned once jit is back
    assert len(results[1].devices()) == 1
    assert run.last_plan is not None


def test_without_jit_a_method_may_read_values() -> None:
    with jax.disable_jit():
        assert_equal(Doubling().run(X), 2 * X)


@pytest.mark.parametrize("options", [{"mesh": (8,)}, STAGES], ids=["one mesh", "stages"])
def test_without_jit_it_is_planned_and_compiled_as_with_it(options: Any) -> None:
    def looped(w: Any, x: Any) -> Any:
        return step(w, jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x))

    run = autopar.parallelize(looped, donate_argnums=(), **options)
    with jax.disable_jit():
        plan, executable = run.plan(W, X), run.compiled(W, X)
        results = executable(W, X)
        assert autopar.plan(looped, W, X, **options).input_types == plan.input_types
        assert autopar.check(run, W, X).ok
        assert run.lower(W, X).compile().plan is plan
    assert run.plan(W, X) is plan
    assert_equal(results, looped(W, X))
    assert_equal(run(W, X), results)


@pytest.mark.parametrize(("dtype", "narrower"), [("float64", "float32"), ("int64", "int32")])
def test_arrays_of_64_bits_are_refused_where_jax_computes_in_32(dtype: str, narrower: str) -> None:
    run = autopar.parallelize(lambda data: data["x"] * 2, mesh=(8,), donate_argnums=())
    with jax.enable_x64(True):
        x = jnp.ones((16, 8), dtype)
        assert run({"x": x}).dtype == dtype
    with jax.enable_x64(False):
        message = rf"argument 'data/x' is \w+\[16,8\], and jax_enable_x64 is off.*\.astype\('{narrower}'\)"
        for call in (run, run.plan, lambda data: autopar.check(run, data)):
            with pytest.raises(ArgumentError, match=message):
                call({"x": x})
        again = autopar.parallelize(run.__wrapped__, mesh=(8,))
        assert again({"x": x.astype(narrower)}).dtype == narrower
        assert again({"x": np.ones((16, 8), dtype)}).dtype == narrower  # as with jax.jit
