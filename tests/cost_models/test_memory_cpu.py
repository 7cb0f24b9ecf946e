"""What XLA's CPU compiler makes of half floats and of maxima over windows; programs small enough to count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_models.backends import CPU, GPU, Backend
from autopar.cost_models.fusion import written
from autopar.cost_models.steps import flatten
from autopar.trace import trace


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def kept(fn: Callable[..., Any], args: Sequence[Any], backend: Backend = CPU) -> Counter[str]:
    """How many arrays of each type are written, arguments and what is smaller than they are left out."""
    program = flatten(trace(fn, *args).graph, backend, {})
    types = [program.type_of(v) for v in written(program).values if v not in program.graph.names]
    return Counter(str(t) for t in types if t.size >= 64 * 64)


def product(x: Any, w: Any) -> Any:
    return x @ w


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_reads_copies_in_float32_and_writes_float32(dtype: str) -> None:
    args = array(dtype, 64, 64), array(dtype, 64, 64)
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    assert kept(product, args) == {"f32[64,64]": 3, f"{short}[64,64]": 1}
    assert kept(product, args, GPU) == {f"{short}[64,64]": 1}


def test_products_share_a_copy_in_float32() -> None:
    args = array("bfloat16", 64, 64), array("bfloat16", 64, 64)
    assert kept(lambda x, w: (x @ w, w @ x), args)["f32[64,64]"] == 2 + 2


@pytest.mark.parametrize(("dtype", "short", "count"), [("bfloat16", "bf16", 3), ("float16", "f16", 2)])
def test_what_is_rounded_to_bfloat16_is_not_repeated(dtype: str, short: str, count: int) -> None:
    """A sum with two readers is written besides the results, though adding again would be cheap."""

    def fn(x: Any, b: Any) -> Any:
        y = x + b
        return 2.0 * y, jnp.flip(3.0 * y)

    assert kept(fn, (array(dtype, 64, 64), array(dtype, 64)))[f"{short}[64,64]"] == count


@pytest.mark.parametrize(("dtype", "stacks"), [("bfloat16", 1), ("float16", 0)])
def test_a_loop_slices_a_copy_of_a_bfloat16_stack_in_float32(dtype: str, stacks: int) -> None:
    def fn(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (c @ w, None), x, ws)[0]

    found = kept(fn, (array(dtype, 64, 64), array(dtype, 4, 64, 64)))
    assert found["f32[4,64,64]"] == stacks


def test_the_gradient_of_a_maximum_over_windows_finds_places_first() -> None:
    """An array of places per dimension, made once for both; the scatter goes into zeros, which it takes over."""

    def pooled(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")

    def fn(x: Any, y: Any) -> Any:
        return jax.grad(lambda x, y: (pooled(x) ** 2).sum() + (pooled(y) ** 3).sum(), (0, 1))(x, y)

    args = array("float32", 128, 128), array("float32", 128, 128)
    found = kept(fn, args)
    assert found["i32[128,128]"] == 2
    assert found["f32[128,128]"] == 2 * 2
    assert found["i32[64,64]"] == 2 * (2 + 2)
    assert not any(name.startswith("i32") for name in kept(fn, args, GPU))
