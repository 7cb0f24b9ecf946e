"""Products whose only reader is a transpose, where swapping the operands gives the transposed result directly."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, Op


def swapped_products(graph: Graph) -> Mapping[int, Op]:
    """Product -> its only reader, a transpose that swaps the dimensions of the two operands and nothing else."""
    products = {op.outputs[0]: op for op in graph.walk() if op.name == "dot_general"}
    only_uses = {v: graph.uses[v][0].op for v in products if len(graph.uses.get(v, ())) == 1}
    transposes = {v: op for v, op in only_uses.items() if op is not None and op.name == "transpose"}
    return {v: op for v, op in transposes.items() if _swaps(graph, products[v], op)}


def _swaps(graph: Graph, product: Op, transpose: Op) -> bool:
    """Whether a transpose puts the dimensions of the second operand of a product before those of the first."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    rank = graph.types[product.outputs[0]].rank
    first = graph.type_of(product.inputs[0]).rank - len(contracted)  # result dimensions of batch and first operand
    swapped = (*range(len(batch)), *range(first, rank), *range(len(batch), first))
    return tuple(transpose.params["permutation"]) == swapped
