"""What default precision does to the operands of products.

A matrix unit for bfloat16 rounds float32 operands unless a product asks for more (`jax.lax.Precision`). A compiler that
rounds them before it moves them moves half the bytes: `Device.rounds_operands` prices that, and
`autopar.verification.lowering.narrow_types` expects it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar import jax_compat
from autopar.ir.graph import Graph, Op, Type
from autopar.ir.op_sets import PRODUCTS, XLA_RAGGED_PRODUCTS


def rounds(op: Op, operand: Type) -> bool:
    """True if default precision rounds this operand of an operation to bfloat16."""
    if op.name not in (*PRODUCTS, *XLA_RAGGED_PRODUCTS) or operand.dtype != "float32":
        return False
    precision = op.params["precision"]
    return all(p is None or p.name == "DEFAULT" for p in (precision if isinstance(precision, tuple) else (precision,)))


def rounds_read(graph: Graph, op: Op, position: int) -> bool:
    """True if default precision rounds what an operation reads there to bfloat16, whatever the operation is.

    Of a constant of a scan, whatever reads it in the body does.
    """
    atom = op.inputs[position]
    if op.name != "scan" or position >= jax_compat.scan_counts(op.params)[0]:
        return rounds(op, graph.type_of(atom))
    uses = graph.uses_of(op.regions[0].inputs[position])
    return bool(uses) and all(use.op is not None and rounds_read(graph, use.op, use.position) for use in uses)


def rounded(type_: Type) -> Type:
    """The type that such an operand is rounded to."""
    return replace(type_, dtype="bfloat16", itemsize=2)
