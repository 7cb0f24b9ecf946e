"""Products that are made the other way round, where nothing reads them but a transpose.

    y = transpose(a b)      ->      y = b a, summed over the same dimensions, so that rows and columns change places

The gradient of every weight is such a product. XLA folds the transpose into it, unless a constraint stands between
them: then the whole update runs in the order of the product, and on TPU parameter and moments are copied into that and
back (jaxlib 0.12.0, libtpu 0.0.52). Code generation (`autopar.codegen.emit`) emits the one product, and predictions of
what its sums become (`autopar.verification.lowering_tpu`) look at what it makes.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, Op
from autopar.ir.layout import PARTIAL, Layout
from autopar.ir.swapped_products import swapped_products
from autopar.plans.plan import Stage


def turned(graph: Graph, stage: Stage) -> Mapping[int, Op]:
    """Product -> the transpose that alone reads it, and swaps its operands and nothing else.

    Args:
        graph: the program.
        stage: its layouts. A product and its transpose lie alike, and neither is left partial.
    """
    return {v: op for v, op in swapped_products(graph).items() if _stays(stage, v, op)}


def permuted(layout: Layout, transpose: Op) -> Layout:
    """The layout of the transpose of an array that lies so."""
    order = tuple(transpose.params["permutation"])
    return tuple(order.index(d) if d >= 0 else d for d in layout)


def _stays(stage: Stage, value: int, transpose: Op) -> bool:
    """Whether a value and its transpose lie alike, whole or summed."""
    home, found = (stage.values.get(v) for v in (value, transpose.outputs[0]))
    if home is None or found is None or PARTIAL in home:
        return False
    return found == permuted(home, transpose) and stage.uses.get(f"{transpose.tag}.in0", home) == home
