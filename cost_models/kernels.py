"""FLOPs of kernels.

    Pallas kernels         products in the body at the points that compute them -> `autopar.ir.jaxpr.kernel_work`,
                           or the kernel's own `cost_estimate`, if it has one with fewer, or all branches are taken
    custom_partitioning    products in its function
    cuDNN's attention      by shapes                                                           -> `autopar.rules.cudnn`

Blocks that a mask leaves out are not counted where the mask is known: a branch by places in the grid, or by prefetched
constants. Any other branch counts as if it always ran, the dearest of several. A loop whose number of iterations is not
a constant counts once. Operations that are no products count one FLOP per element of the operands and results of the
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.ir.jaxpr.kernel_work import kernel_products, products
from autopar.ir.op_sets import ATTENTION
from autopar.rules import cudnn

#: Operations that are kernels with FLOPs of their own.
KERNELS = ("pallas_call", "custom_partitioning", *ATTENTION)


def kernel_flops(name: str, params: Mapping[str, Any], operands: Sequence[tuple[int, ...]] = ()) -> float:
    """FLOPs of the products of one of `KERNELS`, with these parameters and shapes of operands."""
    if name in ATTENTION:
        return cudnn.flops(name, params, operands)
    if name == "custom_partitioning":
        return products(params["call"])
    estimate = params["cost_estimate"]
    return float(estimate.flops) if estimate is not None else kernel_products(params)
