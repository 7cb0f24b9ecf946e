"""Folds a transpose into the product that it alone reads, by swapping the operands of the product.

    y = transpose(a b)      ->      y = b a, contracted over the same dimensions; rows and columns change places

The gradient of every weight is such a product. XLA folds the transpose by itself, unless a sharding constraint is
between them. Then the whole update runs in the dimension order of the product, and on TPU the parameter and its moments
are copied into that order and back (jaxlib 0.12.0, libtpu 0.0.52). Code generation (`autopar.codegen.emit`) emits the
swapped product alone, and `autopar.verification.lowering_tpu` predicts the reduction of that product.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_models.compiler.swapped_products import swapped_products
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import PARTIAL, Layout, ProgramLayouts
from autopar.plans.record import Stage


def folded_transposes(graph: Graph, stage: Stage | ProgramLayouts) -> Mapping[int, Op]:
    """Product -> the transpose that can be folded into it: its only reader, which only swaps the operands' dimensions.

    Args:
        graph: the program.
        stage: its layouts. That of the transpose must be the transposed layout of the product, and not partial.
    """
    return {v: op for v, op in swapped_products(graph).items() if _layouts_match(stage, v, op)}


def transposed_layout(layout: Layout, transpose: Op) -> Layout:
    """The layout of the transpose of an array with this layout."""
    order = tuple(transpose.params["permutation"])
    return tuple(order.index(d) if d >= 0 else d for d in layout)


def _layouts_match(stage: Stage | ProgramLayouts, value: int, transpose: Op) -> bool:
    """Whether a transpose has the transposed layout of its operand, and neither is a partial sum."""
    layout, result = (stage.values.get(v) for v in (value, transpose.outputs[0]))
    if layout is None or result is None or PARTIAL in layout:
        return False
    return result == transposed_layout(layout, transpose) and stage.uses.get(f"{transpose.tag}.in0", layout) == layout
