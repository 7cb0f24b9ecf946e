"""In whose memory results are made, as XLA's CPU compiler shares it; programs small enough to count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_models.compiler.backends import CPU, Backend
from autopar.cost_models.compiler.flatten import flatten
from autopar.cost_models.compiler.in_place import overwritten
from autopar.cost_models.compiler.lifetimes import lifetimes
from autopar.cost_models.compiler.written_values import written
from autopar.ir.trace import trace

LOOSELY = replace(CPU, shares_strictly=False)


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def taken_over(fn: Callable[..., Any], args: Sequence[Any], backend: Backend = CPU) -> list[str]:
    """Names of the steps whose results' memory is taken over, in their order."""
    program = flatten(trace(fn, *args).graph, backend, {})
    w = written(program)
    shared = overwritten(program, w, lives := lifetimes(program, w), ())
    return [step.name for step in lives.moments if not shared.isdisjoint(step.outputs)]


def product(x: Any, w: Any, last: Callable[[Any], Any]) -> Any:
    return jnp.sort(last(x @ w), 0)


@pytest.mark.parametrize(
    ("name", "last", "shared"),
    [
        ("elementwise", lambda y: jnp.exp(y) + 1.0, True),
        ("reversed", lambda y: jnp.exp(jnp.flip(y)), False),
        ("transposed", lambda y: jnp.exp(y).T, False),
        ("twice, once elsewhere", lambda y: jnp.exp(y) * jnp.flip(y), False),
    ],
)
def test_a_kernel_works_in_the_memory_of_what_it_reads_at_its_own_index(
    name: str, last: Callable[[Any], Any], shared: bool
) -> None:
    def fn(x: Any, w: Any) -> Any:
        return product(x, w, last)

    args = array(64, 64), array(64, 64)
    assert ("dot_general" in taken_over(fn, args)) == shared
    assert "dot_general" in taken_over(fn, args, LOOSELY)


def test_results_have_memory_of_their_own() -> None:
    args = array(64, 64), array(64, 64)
    assert taken_over(lambda x, w: jnp.exp(x @ w), args) == []
    assert taken_over(lambda x, w: jnp.exp(x @ w), args, LOOSELY) == ["dot_general"]


def test_what_a_scatter_goes_on_in_is_not_taken_over_by_arithmetic() -> None:
    """Between two scatters the product is made anew: the first's memory is one with its operand's."""

    def fn(x: Any, w: Any) -> Any:
        return (x @ w).at[:, ::2].set(0.0) * 2.0

    def twice(x: Any, w: Any) -> Any:
        return jnp.sort(fn(x, w).at[:, ::2].set(1.0), 0)

    args = array(64, 64), array(64, 64)
    assert taken_over(twice, args) == ["dot_general", "mul"]
    assert taken_over(twice, args, LOOSELY) == ["dot_general", "scatter", "mul"]


def test_a_product_over_several_dimensions_is_a_matrix() -> None:
    """Arithmetic with others reshapes it; alone it stays a matrix, as the next product reads it."""

    def alone(x: Any, w: Any, y: Any) -> Any:
        return jnp.exp(x @ w) @ w

    def with_others(x: Any, w: Any, y: Any) -> Any:
        return jnp.sort(jnp.exp(x @ w - y), 0)

    args = array(16, 8, 64), array(64, 64), array(16, 8, 64)
    assert taken_over(alone, args) == ["dot_general"]
    assert taken_over(with_others, args) == []
    assert taken_over(with_others, [array(128, 64), array(64, 64), array(128, 64)]) == ["dot_general"]


def test_what_products_alone_read_as_a_matrix_is_made_as_one() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jnp.exp(jnp.sort(x, 0)) @ w

    assert taken_over(fn, (array(16, 8, 64), array(64, 64))) == []
    assert taken_over(fn, (array(128, 64), array(64, 64))) == ["sort"]


def test_a_kernel_of_a_library_works_in_no_operands_memory() -> None:
    """The last step of a kernel that sums first."""

    def fn(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.flip(y.sum(1)[:, None] + y)

    args = array(4096, 64), array(64, 64)
    assert "dot_general" not in taken_over(fn, args)
