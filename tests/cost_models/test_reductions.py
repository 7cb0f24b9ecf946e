"""The table of reductions against XLA:CPU, and plans that keep to it on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar import jax_compat
from autopar.api import parallelize
from autopar.cost_models.reductions import KNOWN, REDUCTIONS, combines, family
from autopar.hardware.cluster import Cluster
from tests.programs.test_real_programs import assert_equal

pytestmark = pytest.mark.core

DTYPES = (
    "bool",
    "int2",
    "int4",
    "uint8",
    "int16",
    "uint32",
    "int32",
    "float8_e5m2",
    "bfloat16",
    "float32",
    "complex64",
)
#: Reduction over the first dimension; operations that reduce otherwise end in the same kinds.
OVER_ROWS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda x: lax.reduce_sum(x, (0,)),
    "gather": lambda x: x[jnp.array([1, 15, 3])],
    **{name: lambda x, name=name: getattr(lax, name)(x, (0,)) for name in REDUCTIONS},
}


def numbers(dtype: str) -> jax.Array:
    """Sixteen rows without zeros that use the highest bit, the sums and products of which are exact in any type."""
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return jnp.asarray(rng.integers(0, 2, (16, 8)), bool)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        integers = rng.integers(int(info.min), int(info.max), (16, 8), endpoint=True)
        return jnp.asarray(np.where(integers == 0, 1, integers)).astype(dtype)
    signs = rng.choice([-1.0, 1.0], (16, 8))
    return jnp.asarray(signs * (1j ** rng.integers(0, 4, (16, 8))) if dtype == "complex64" else signs).astype(dtype)


def taken(operation: str) -> list[jax.Array]:
    """Numbers of the types that JAX has this operation for."""
    arrays: list[jax.Array] = []
    for dtype in DTYPES:
        try:
            jax.eval_shape(OVER_ROWS[operation], numbers(dtype))
        except TypeError:
            continue
        arrays.append(numbers(dtype))
    return arrays


def in_pieces(operation: str, arrays: list[jax.Array]) -> tuple[list[Any], str]:
    """What eight devices make of arrays, each of which is cut by rows, and the compiled program."""
    mesh = jax_compat.auto_mesh(np.array(jax.devices()), ("x",))
    run = jax.jit(lambda xs: [OVER_ROWS[operation](x) for x in xs], out_shardings=NamedSharding(mesh, P()))
    placed = jax.device_put(arrays, NamedSharding(mesh, P("x")))
    return run(placed), str(run.lower(placed).compile().as_text())


@pytest.mark.parametrize("operation", OVER_ROWS)
def test_cpus_combine_what_the_table_says(operation: str) -> None:
    arrays = [x for x in taken(operation) if combines("cpu", operation, str(x.dtype))]
    if not arrays:
        assert operation == "reduce_xor"
        return
    totals, text = in_pieces(operation, arrays)
    assert "all-gather" not in text
    for x, got in zip(arrays, totals, strict=True):
        np.testing.assert_array_equal(got, OVER_ROWS[operation](x), err_msg=f"{operation} of {x.dtype}")


@pytest.mark.parametrize("operation", OVER_ROWS)
def test_what_the_table_leaves_out_fails_on_cpus(operation: str) -> None:
    for x in taken(operation):
        if not combines("cpu", operation, str(x.dtype)):
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"UNIMPLEMENTED"):
                in_pieces(operation, [x])


def test_every_type_has_a_family() -> None:
    families = {name for table in KNOWN.values() for types in table.values() for name in types}
    assert {family(d) for d in DTYPES} - families == {"int2"}
    assert family("float0") == "float"


PROGRAMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "or of integers": (lambda x: lax.reduce_or(x, (0,)), "int32"),
    "and of bytes": (lambda x: lax.reduce_and(x, (0,)), "uint8"),
    "xor": (lambda x: lax.reduce_xor(x, (0,)), "int32"),
    "parity": (lambda x: lax.reduce_xor(x, (0,)), "bool"),
    "max of complex numbers": (lambda x: lax.reduce_max(x, (0,)), "complex64"),
    "sum of two bits": (lambda x: lax.reduce_sum(x, (0,)), "int2"),
}


@pytest.mark.parametrize("title", [title for title in PROGRAMS if title != "sum of two bits"])
def test_what_devices_cannot_combine_is_gathered(title: str) -> None:
    fn, dtype = PROGRAMS[title]
    x = numbers(dtype)
    run = parallelize(lambda x: (fn(x), x), mesh=(8,), pins={"x": P("x")}, donate_argnums=())
    assert "all-reduce" not in {c.kind for c in run.plan(x).collectives}
    assert_equal(run(x), jax.jit(lambda x: (fn(x), x))(x))


@pytest.mark.parametrize("title", PROGRAMS)
@pytest.mark.parametrize(("preset", "backend"), [("dgx-h100", "gpu"), ("tpu-v5e", "tpu")])
def test_plans_sum_where_the_target_can(preset: str, backend: str, title: str) -> None:
    fn, dtype = PROGRAMS[title]
    x = jax.ShapeDtypeStruct((1 << 20, 8), dtype)
    plan = autopar.plan(fn, x, mesh=(8,), cluster=Cluster.preset(preset), pins={"x": P("x")})
    able = backend == "tpu" and title != "sum of two bits"
    assert [c.kind for c in plan.collectives] == ["all-reduce" if able else "all-to-all"]


@pytest.mark.parametrize("operation", ["reduce_max", "reduce_min"])
def test_nan_is_not_lost_among_the_devices(operation: str) -> None:
    """XLA's all-reduce on CPU drops it in some orders: one element of each column is NaN, on another device each."""
    x = jnp.where(jnp.eye(8, dtype=bool), jnp.nan, jnp.arange(64.0).reshape(8, 8))
    step = parallelize(OVER_ROWS[operation], mesh=(8,), pins={"x": P("x")}, donate_argnums=())
    assert step.plan(x).collectives
    assert np.isnan(step(x)).all()
    assert_equal(step(jnp.nan_to_num(x)), OVER_ROWS[operation](jnp.nan_to_num(x)))
