"""Programs parts of which stay as they are: side effects, programs that are sharded by hand, kernels.

`KEPT` is the table of them, each with a note of its plan. A program is a function without arguments that returns
(function, arguments); `test_real_programs` runs them on eight devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback, pallas
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.programs.steps import array


def prints_and_callbacks() -> Any:
    def step(x: jax.Array) -> Any:
        jax.debug.print("the sum is {s}", s=x.sum())
        jax.debug.callback(lambda v: print("row", v.shape), x[0])
        return lax.scan(lambda c, _: (jax.debug.print("looped {c}", c=c), (c + x.sum(), None))[1], 0.0, length=2)[0]

    return step, (array(16, 8),)


def pure_callback() -> Any:
    def step(x: jax.Array, w: jax.Array) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential") @ w

    return step, (array(16, 8), array(8, 8))


def callback_in_a_branch() -> Any:
    """A callback without operands, of whose results only one is read, as in `equinox.error_if` of several arrays."""

    def step(x: jax.Array, w: jax.Array) -> Any:
        y = jnp.tanh(x @ w)
        shapes = jax.ShapeDtypeStruct(y.shape, y.dtype), jax.ShapeDtypeStruct((), y.dtype)

        def called(y: jax.Array, _: jax.Array) -> Any:
            return jax.pure_callback(lambda: (np.ones(y.shape, y.dtype), np.ones((), y.dtype)), shapes)

        y, _ = lax.cond(jnp.isnan(w[0, 0]), called, lambda y, first: (y, first), y, w[0, 0])
        return y @ w

    return step, (array(16, 8), array(8, 8))


def unordered_io_callback() -> Any:
    def step(x: jax.Array, w: jax.Array) -> Any:
        return io_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ w, ordered=False) @ w

    return step, (array(16, 8), array(8, 8))


def shard_map_inside() -> Any:
    mesh = Mesh(np.array(jax.devices()), ("p",))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("p"), P(None, "p")), out_specs=P(None, "p"))
    def mixed(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(x.T @ x, "p") @ w

    return lambda x, w: (mixed(x @ w, w), jax.grad(lambda w: mixed(x, w).sum())(w)), (array(16, 8), array(8, 8))


def pallas_kernel() -> Any:
    def twice(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def step(x: jax.Array, w: jax.Array) -> Any:
        rows = pallas.BlockSpec((8, 8), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        kernel = pallas.pallas_call(
            twice, shape, grid=(2,), in_specs=[rows], out_specs=rows, interpret=True, name="twice"
        )
        return kernel(x @ w) @ w

    return step, (array(16, 8), array(8, 8))


def user_constraint() -> Any:
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    return lambda x, w: lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, "x"))) @ w, (
        array(16, 8),
        array(8, 8),
    )


KEPT: tuple[tuple[str, Callable[[], Any], str], ...] = (
    ("prints and callbacks", prints_and_callbacks, "side effect kept as it is: Debug"),
    (
        "pure callback",
        pure_callback,
        r"pure_callback runs replicated \(1 times, first at kept_programs.py:\d+\): it runs on the host",
    ),
    ("unordered io callback", unordered_io_callback, "side effect kept as it is: IO"),
    ("shard_map", shard_map_inside, ""),
    (
        "pallas_call",
        pallas_kernel,
        r"more than an even share per device: whole along x=8: 2 do not divide: .* \(pallas_call; .*",
    ),
    ("with_sharding_constraint", user_constraint, ""),
)
