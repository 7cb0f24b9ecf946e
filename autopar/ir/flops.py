"""FLOPs of products: of one operation, loops as often as they run, and of a whole program.

Products are matrix products and convolutions, what the usual formulas for transformers count; see
`autopar.passes.op_groups.merge.flops` for the figures.
"""

from __future__ import annotations

from autopar.ir.graph import Graph, Op
from autopar.passes.op_groups.bindings import UNKNOWN_TRIPS
from autopar.passes.op_groups.merge import PRODUCTS, flops


def work(graph: Graph, op: Op) -> float:
    """FLOPs of one operation on whole values."""
    if op.regions:
        return (op.trips or UNKNOWN_TRIPS) * sum(work(graph, inner) for region in op.regions for inner in region.ops)
    if op.name not in PRODUCTS:
        return 0.0
    return flops(op, [graph.type_of(a) for a in op.inputs], [graph.types[v] for v in op.outputs])


def model_flops(graph: Graph) -> float:
    """FLOPs of one run of a program on the whole mesh."""
    return sum(work(graph, op) for op in graph.ops)


def main_dtype(graph: Graph) -> str:
    """The dtype that most FLOPs are done in; float32 where there are none. Ties go to the first by name."""
    done: dict[str, float] = {}
    for op in graph.walk():
        if op.name in PRODUCTS:
            dtype = graph.type_of(op.inputs[0]).dtype
            done[dtype] = done.get(dtype, 0.0) + work(graph, op)
    return max(sorted(done), key=lambda d: done[d]) if done else "float32"
