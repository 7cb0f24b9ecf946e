"""Options that name arguments (`static_argnums`, `donate_argnums`, `batch_argnums`), for arguments given by keyword."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal

W, X = array(8, 8), array(16, 8)


def layers(w: Any, x: Any, n: int = 1, *, flag: bool = False) -> Any:
    for _ in range(n):
        x = jnp.tanh(x @ w)
    return (w, -x if flag else x)


def step(w: Any, x: Any, y: Any) -> Any:
    value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    return w - 0.1 * grad, value


def parallel(fn: Callable[..., Any], **options: Any) -> Any:
    return autopar.parallelize(fn, mesh=(8,), **{"donate_argnums": (), **options})


@pytest.mark.parametrize("options", [{"static_argnums": 2}, {"static_argnums": -1}, {"static_argnames": "n"}], ids=str)
def test_a_static_argument_is_static_by_position_and_by_keyword(options: Any) -> None:
    run = parallel(layers, **options)
    for n in (1, 3, 1):
        expected = layers(W, X, n)
        assert_equal(run(W, X, n), expected)
        assert_equal(run(W, X, n=n), expected)
        assert_equal(run(n=n, w=W, x=X), expected)
    assert_equal(run(W, X), layers(W, X))
    assert_equal(run.compiled(W, X, n=3)(W, X), layers(W, X, 3))
    assert run.plan(W, X, n=2).input_paths == ("w", "x")


def test_a_parameter_that_is_keyword_only_is_static_by_name() -> None:
    run = parallel(layers, static_argnames=["flag", "n"])
    assert_equal(run(W, X, flag=True, n=2), layers(W, X, 2, flag=True))
    assert_equal(run(W, X, 2, flag=False), layers(W, X, 2))


def test_a_method_has_static_arguments_by_keyword() -> None:
    class Model:
        @autopar.parallelize(mesh=(8,), donate_argnums=(), static_argnums=3)
        def apply(self, w: Any, x: Any, n: int) -> Any:
            return layers(w, x, n)

    assert_equal(Model().apply(W, X, n=2), layers(W, X, 2))


def test_verify_takes_static_arguments_by_keyword() -> None:
    run = parallel(layers, static_argnums=2)
    assert autopar.verify(run.plan(W, X, n=2), run, W, X, n=2).ok


def test_a_static_argument_by_keyword_must_be_hashable() -> None:
    with pytest.raises(ArgumentError, match="static argument n of layers must be hashable, it is list"):
        parallel(layers, static_argnums=2)(W, X, n=[3])


@pytest.mark.parametrize("position", [7, -4])
def test_a_position_outside_of_the_signature_is_refused(position: int) -> None:
    with pytest.raises(ArgumentError, match=rf"\({position},\): step has 3 positional parameters, and none {position}"):
        parallel(step, static_argnums=position)
    with pytest.raises(ArgumentError, match="has 3 positional parameters"):
        autopar.plan(step, W, X, X, mesh=(8,), static_argnums=position)


def test_positions_of_any_number_of_arguments_count_from_the_first() -> None:
    assert_equal(parallel(lambda *args: layers(*args), static_argnums=2)(W, X, 2), layers(W, X, 2))
    with pytest.raises(ArgumentError, match=r"static_argnums=\(-1,\) counts from the last parameter"):
        parallel(lambda *args: layers(*args), static_argnums=-1)


def test_a_name_that_no_parameter_has_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"static_argnames=\('m',\): layers has no parameter 'm'; it has w, x, n"):
        parallel(layers, static_argnames="m")
    with pytest.raises(ArgumentError, match="static_argnames=3 must be names of parameters"):
        parallel(layers, static_argnames=3)


def test_what_is_donated_may_be_given_by_keyword() -> None:
    run = parallel(step, donate_argnums=0)
    assert_equal(run(y=X, x=X, w=W), jax.jit(step)(W, X, X))
    plan = run.plan(y=X, x=X, w=W)
    assert [plan.input_paths[i] for i in plan.donated] == ["w"]


def test_the_batch_may_be_given_by_keyword() -> None:
    run = parallel(step, batch_argnums=(1, 2), num_microbatches=2)
    by_keyword, by_position = run.plan(W, y=X, x=X), run.plan(W, X, X)
    names = [{plan.input_paths[i] for i in plan.batch} for plan in (by_keyword, by_position)]
    assert names == [{"x", "y"}, {"x", "y"}]


def test_scalars_of_numpy_are_numbers() -> None:
    two = np.int64(2)
    run = autopar.parallelize(step, mesh=(two, 4 * two // 2), num_microbatches=two, batch_argnums=[two - 1, two])
    plan = run.plan(W, X, X)
    assert (plan.mesh_sizes, plan.num_microbatches) == ((2, 4), 2)
    assert autopar.plan(step, W, X, X, mesh={"x": 4 * two}, gap=np.float32(0.01)).mesh_sizes == (8,)
