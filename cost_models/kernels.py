"""FLOPs of kernels.

    Pallas kernels         the kernel's own `cost_estimate`, where it has one
                           else (points of the grid) x (products in the body)
    custom_partitioning    products in its function
    cuDNN's attention      by shapes                                                           -> `autopar.rules.cudnn`

A branch counts as if it always ran, the dearest of several: blocks that a mask leaves out are counted. A loop whose
number of iterations is not a constant counts once. Operations that are no products count one FLOP per element of the
operands and results of the call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cost_models.compute import dot_flops
from autopar.ir.op_sets import ATTENTION
from autopar.rules import cudnn

#: Operations that are kernels with FLOPs of their own.
KERNELS = ("pallas_call", "custom_partitioning", *ATTENTION)


def kernel_flops(name: str, params: Mapping[str, Any], operands: Sequence[tuple[int, ...]] = ()) -> float:
    """FLOPs of the products of one of `KERNELS`, with these parameters and shapes of operands."""
    if name in ATTENTION:
        return cudnn.flops(name, params, operands)
    if name == "custom_partitioning":
        return _products(params["call"])
    estimate = params["cost_estimate"]
    if estimate is not None:
        return float(estimate.flops)
    points = math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
    return points * _products(params["jaxpr"])


def _products(jaxpr: Any) -> float:
    return sum(_of_equation(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        lhs, rhs = (atom.aval.shape for atom in equation.invars[:2])
        return float(dot_flops(params["dimension_numbers"], lhs, rhs))
    if name == "cond":
        return max(map(_products, params["branches"]))
    bodies = (params[key] for key in ("jaxpr", "call_jaxpr", "body_jaxpr") if hasattr(params.get(key), "eqns"))
    return params.get("length", 1) * sum(map(_products, bodies))
