"""Roofline and flop counts, against hand counts and the compiler's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.compute import conv_flops, op_time
from autopar.hardware.description import Device
from autopar.ir.jaxpr.kernel_work import dot_flops

DEVICE = Device("d", {"float32": 1e12, "bfloat16": 2e12}, 1e11, 2**30, kernel_overhead=1e-6, efficiency=0.5)


@pytest.mark.parametrize(
    ("flops", "nbytes", "dtype", "launches", "expected"),
    [
        (1e9, 1e3, "float32", 0, 2e-3),
        (1e9, 1e3, "bfloat16", 0, 1e-3),
        (1e9, 1e3, "int32", 0, 2e-3),
        (1e3, 1e9, "float32", 0, 1e-2),
        (0, 0, "float32", 3, 3e-6),
    ],
)
def test_op_time(flops: float, nbytes: float, dtype: str, launches: int, expected: float) -> None:
    assert op_time(flops, nbytes, dtype, DEVICE, launches) == pytest.approx(expected)


def test_op_time_broadcasts() -> None:
    flops, nbytes = np.array([[1e9], [1e3]]), np.array([1e3, 1e9])
    times = op_time(flops, nbytes, "float32", DEVICE, 1)
    assert times.tolist() == [[op_time(float(f), float(b), "float32", DEVICE, 1) for b in nbytes] for (f,) in flops]


@pytest.mark.parametrize(
    ("dims", "lhs", "rhs", "expected"),
    [
        ((((1,), (0,)), ((), ())), (3, 5), (5, 7), 2 * 3 * 5 * 7),
        ((((2,), (1,)), ((0,), (0,))), (4, 3, 5), (4, 5, 7), 2 * 4 * 3 * 5 * 7),
        ((((0, 1), (1, 0)), ((), ())), (3, 5), (5, 3), 2 * 15),
        ((((), ()), ((), ())), (3,), (5,), 2 * 15),
        ((((0,), (0,)), ((), ())), (0,), (0,), 0),
    ],
)
def test_dot_flops(dims: Any, lhs: tuple[int, ...], rhs: tuple[int, ...], expected: int) -> None:
    assert dot_flops(dims, lhs, rhs) == expected


def conv_params(lhs: tuple[int, ...], rhs: tuple[int, ...], **kw: Any) -> tuple[dict[str, Any], float]:
    """Params of the equation of a convolution, and the flops that the compiler counts for it."""
    kw = {"window_strides": (1,), "padding": ((0, 0),), **kw}

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, **kw)

    args = jax.ShapeDtypeStruct(lhs, jnp.float32), jax.ShapeDtypeStruct(rhs, jnp.float32)
    cost = jax.jit(fn).lower(*args).cost_analysis() or {}
    return dict(jax.make_jaxpr(fn)(*args).eqns[0].params), cost.get("flops", 0)


@pytest.mark.parametrize(
    ("lhs", "rhs", "kw", "expected"),
    [
        # (batch, in, width), (out, in, taps): 6 outputs of 3 taps.
        ((2, 3, 8), (5, 3, 3), {}, 2 * 2 * 5 * 3 * 6 * 3),
        # SAME: 8 outputs, of the 24 taps the two at the border read padding.
        ((2, 3, 8), (5, 3, 3), {"padding": "SAME"}, 2 * 2 * 5 * 3 * 22),
        ((2, 3, 8), (5, 3, 3), {"window_strides": (2,)}, 2 * 2 * 5 * 3 * 3 * 3),
        ((2, 4, 8), (6, 2, 3), {"feature_group_count": 2}, 2 * 2 * 6 * 2 * 6 * 3),
        ((4, 3, 8), (6, 3, 3), {"batch_group_count": 2}, 2 * 2 * 6 * 3 * 6 * 3),
        ((2, 3, 8), (5, 3, 3), {"rhs_dilation": (2,)}, 2 * 2 * 5 * 3 * 4 * 3),
        # Input 8 spread to 15, 13 windows of 3 in a row: 7 of them hold two real elements, 6 hold one.
        ((2, 3, 8), (5, 3, 3), {"lhs_dilation": (2,)}, 2 * 2 * 5 * 3 * (7 * 2 + 6)),
    ],
)
def test_conv_flops(lhs: tuple[int, ...], rhs: tuple[int, ...], kw: dict[str, Any], expected: int) -> None:
    params, compiler = conv_params(lhs, rhs, **kw)
    assert conv_flops(lhs, rhs, **params) == expected == compiler


@settings(max_examples=15)
@given(
    size=st.integers(3, 9),
    taps=st.integers(1, 3),
    stride=st.integers(1, 3),
    pad=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.integers(1, 2),
)
def test_conv_flops_agree_with_the_compiler(
    size: int, taps: int, stride: int, pad: tuple[int, int], dilation: int
) -> None:
    lhs, rhs = (2, 4, 6, size), (3, 4, 2, taps)
    kw = {"window_strides": (1, stride), "padding": ((0, 0), pad), "lhs_dilation": (1, dilation)}
    params, compiler = conv_params(lhs, rhs, **kw)
    assert conv_flops(lhs, rhs, **params) == compiler


def test_conv_dimension_numbers_are_obeyed() -> None:
    """The same convolution, channels last."""
    params, _ = conv_params((2, 8, 3), (3, 3, 5), dimension_numbers=("NWC", "WIO", "NWC"))
    assert conv_flops((2, 8, 3), (3, 3, 5), **params) == 2 * 2 * 5 * 3 * 6 * 3
