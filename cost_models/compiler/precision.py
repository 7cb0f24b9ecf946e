"""What default precision does to the operands of products.

A matrix unit for bfloat16 rounds float32 operands unless a product asks for more (`jax.lax.Precision`). A compiler that
rounds them before it moves them moves half the bytes: `Device.rounds_operands` prices that, and
`autopar.verification.lowering.narrow_types` expects it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Op, Type
from autopar.ir.op_sets import ALL_PRODUCTS


def rounds(op: Op, operand: Type) -> bool:
    """True if default precision rounds this operand of an operation to bfloat16."""
    if op.name not in ALL_PRODUCTS or operand.dtype != "float32":
        return False
    precision = op.params["precision"]
    return all(p is None or p.name == "DEFAULT" for p in (precision if isinstance(precision, tuple) else (precision,)))


def rounded(type_: Type) -> Type:
    """The type that such an operand is rounded to."""
    return replace(type_, dtype="bfloat16", itemsize=2)
