"""Convolutions in groups, and what a device runs of one.

Of g groups, which p devices share, each has g / p; of other dimensions it has its part. XLA partitions few of them, so
that they are bound per device (`autopar.rules.runs_per_device`). On jaxlib 0.10.2 and 0.12.0 it

    gathers what they read                              where a group has several input features
    adds partial sums of too many devices               in gradients of kernels
    computes zeros on all devices but the first         where a group has one input feature, and operand and result have
                                                        their features at other places, as under `jax.vmap`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.ir.graph import Op
from autopar.rules.notation import Rule

CONVOLUTION = "conv_general_dilated"
#: Parameters of a convolution that count groups: of features, or of the batch in gradients of kernels.
COUNTS = ("feature_group_count", "batch_group_count")


def is_grouped(op: Op) -> bool:
    """Whether an operation is a convolution in groups."""
    return op.name == CONVOLUTION and any(op.params[name] > 1 for name in COUNTS)


def group_factor(op: Op, rule: Rule) -> int:
    """The factor of a convolution that is its groups: that of the kernel's output features."""
    return rule.operands[1][op.params["dimension_numbers"].rhs_spec[0]]


def part(params: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The parameters of what a device runs of a convolution in groups that so many devices share."""
    return {**params, **{name: params[name] // devices for name in COUNTS if params[name] > 1}}
