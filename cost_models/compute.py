"""Seconds of an operation on one device: the roofline of Williams, Waterman and Patterson (2009).

    t = max(flops / (peak(dtype) efficiency e), bytes / memory_bandwidth) + launches * kernel_overhead   -> op_time

Matrix units fill slowly: a product of m x k by k x n that is small along one of the three runs below the peak. Each
extent has a half-rate size, Hockney's n_1/2 (Hockney and Jesshope, "Parallel Computers", 1981), where it alone halves
the rate:

    e = 1 / ((1 + m_half / m) (1 + n_half / n) (1 + k_half / k))                                -> product_efficiency

A convolution is the product of its patches by its kernel: m counts output positions of all images, n output features,
k kernel taps times input features.

Flops are exact for the two operations that carry nearly all of them, two per multiply-add:

    dot    2 |batch| |lhs free| |contracted| |rhs free|                     -> `autopar.ir.jaxpr.kernel_work.dot_flops`
    conv   2 |out batch| |out features| |in features per group| prod_d pairs_d                    -> conv_flops

where pairs_d counts the (output position, kernel tap) pairs of spatial dimension d that read a real input element, not
padding and not the zeros between the elements of a dilated input. XLA's own cost analysis counts the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.hardware.description import Device


class ConvDims(Protocol):
    """`jax.lax.ConvDimensionNumbers`: each spec is (batch, feature, *spatial), the kernel's (out, in, *spatial)."""

    @property
    def lhs_spec(self) -> Sequence[int]: ...
    @property
    def rhs_spec(self) -> Sequence[int]: ...
    @property
    def out_spec(self) -> Sequence[int]: ...


def op_time(
    flops: ArrayLike, nbytes: ArrayLike, dtype: str, device: Device, launches: float = 0, efficiency: ArrayLike = 1.0
) -> NDArray[np.float64]:
    """Seconds of `flops` operations that read and write `nbytes` bytes on one device.

    Numbers or arrays that broadcast. `launches` counts kernels: 1 for an operation that is a kernel of its own (dot,
    conv, gather, sort), 0 for one that is fused into its neighbour. `efficiency` is the share of the device's rate
    that the operation's extents allow.
    """
    compute = np.asarray(flops, np.float64) / (device.peak(dtype) * device.efficiency * np.asarray(efficiency))
    traffic = np.asarray(nbytes, np.float64) / device.memory_bandwidth
    return np.maximum(compute, traffic) + launches * device.kernel_overhead


def product_efficiency(
    rows: ArrayLike, columns: ArrayLike, contracted: ArrayLike, device: Device
) -> NDArray[np.float64]:
    """Share of the device's rate at which a product of rows x contracted by contracted x columns runs, 0 to 1.

    An empty extent counts as 1: the product has no FLOPs, and 0 of them at a rate of 0 would take nan seconds.
    """
    extents = (np.maximum(np.asarray(n, np.float64), 1.0) for n in (rows, columns, contracted))
    losses = [1.0 + half / n for n, half in zip(extents, device.half_rate_extents, strict=True)]
    return 1.0 / (losses[0] * losses[1] * losses[2])


def _real_pairs(
    size: int, taps: int, stride: int, padding: tuple[int, int], lhs_dilation: int, rhs_dilation: int
) -> int:
    """(output position, kernel tap) pairs of one spatial dimension that read a real element of the input."""
    dilated = (size - 1) * lhs_dilation + 1 if size else 0
    window = (taps - 1) * rhs_dilation + 1
    outputs = max(0, (dilated + sum(padding) - window) // stride + 1)
    reads = (np.arange(outputs) * stride)[:, None] + np.arange(taps) * rhs_dilation - padding[0]
    return int(np.count_nonzero((reads >= 0) & (reads < dilated) & (reads % lhs_dilation == 0)))


def conv_flops(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    *,
    dimension_numbers: ConvDims,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    batch_group_count: int = 1,
    **_: object,
) -> int:
    """Flops of a `conv_general_dilated`: `conv_flops(lhs_shape, rhs_shape, **eqn.params)`.

    Params that do not change the count are ignored, `feature_group_count` among them: the kernel's input features
    are already per group.
    """
    lhs, rhs = dimension_numbers.lhs_spec, dimension_numbers.rhs_spec
    ones = (1,) * len(window_strides)
    dims = zip(lhs[2:], rhs[2:], window_strides, padding, lhs_dilation or ones, rhs_dilation or ones, strict=True)
    pairs = [_real_pairs(lhs_shape[i], rhs_shape[k], stride, pad, *dil) for i, k, stride, pad, *dil in dims]
    out_batch = lhs_shape[lhs[0]] // batch_group_count
    return 2 * out_batch * rhs_shape[rhs[0]] * rhs_shape[rhs[1]] * math.prod(pairs)
