"""FLOPs of products: of one operation, loops as often as they run, and of a whole program.

Products are matrix products and convolutions, those in kernels too: what the usual formulas for transformers count.
`flops` has the figures, `executed_flops` those of a backend that does more than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.cost_models.compute import conv_flops
from autopar.cost_models.kernels import KERNELS, kernel_flops
from autopar.ir.graph import UNKNOWN_TRIPS, Graph, Op, Type
from autopar.ir.jaxpr.kernel_work import dot_flops
from autopar.ir.keyed import totals
from autopar.ir.op_sets import ALL_PRODUCTS, RAGGED_PRODUCTS, XLA_RAGGED_PRODUCTS
from autopar.rules.manual import MANUAL, call_of
from autopar.rules.ragged import batches_rows


def flops(op: Op, operands: Sequence[Type], results: Sequence[Type]) -> float:
    """Floating-point operations of one execution: exact for products, one per element otherwise.

    A product over groups of rows multiplies each row with the matrix of its group alone. Of a kernel at least those of
    its products; of a `shard_map` those of its body on all devices.
    """
    if op.name == MANUAL:
        call = call_of(op)
        return call.devices * math.fsum(_executed(call.body))
    if op.name == "dot_general":
        return float(dot_flops(op.params["dimension_numbers"], operands[0].shape, operands[1].shape))
    if op.name in RAGGED_PRODUCTS:
        return float(_ragged_flops(op, operands))
    if op.name == "conv_general_dilated":
        names = ("dimension_numbers", "window_strides", "padding", "lhs_dilation", "rhs_dilation", "batch_group_count")
        return float(conv_flops(operands[0].shape, operands[1].shape, **{n: op.params[n] for n in names}))
    elements = float(max([t.size for t in (*operands, *results)], default=0))
    shapes = [t.shape for t in operands]
    return max(elements, kernel_flops(op.name, op.params, shapes)) if op.name in KERNELS else elements


def _ragged_flops(op: Op, operands: Sequence[Type]) -> int:
    numbers = op.params["ragged_dot_dimension_numbers"]
    of_one_group = [1 if d in numbers.rhs_group_dimensions else n for d, n in enumerate(operands[1].shape)]
    return dot_flops(numbers.dot_dimension_numbers, operands[0].shape, of_one_group)


def executed_flops(op: Op, operands: Sequence[Type], results: Sequence[Type], *, masks_groups: bool) -> float:
    """`flops` as a backend executes them.

    `masks_groups`: products over groups of rows multiply all rows once for each group, where no kernel does them.
    """
    masks = masks_groups and op.name in XLA_RAGGED_PRODUCTS and not batches_rows(op.params)
    return flops(op, operands, results) * (operands[2].shape[-1] if masks else 1)


def computing_dtype(op: Op, operands: Sequence[Type]) -> str:
    """The dtype that determines the peak rate: the first operand's, or that of a kernel's largest operand of floats."""
    if op.name not in KERNELS:
        return operands[0].dtype
    return max(operands, key=lambda t: ("float" in t.dtype, t.size)).dtype


def _executed(body: Graph) -> Iterator[float]:
    """FLOPs of all operations of a program without layouts, as often as they run."""
    for op in body.walk():
        if not op.regions:
            operands, results = [body.type_of(a) for a in op.inputs], [body.types[v] for v in op.outputs]
            yield body.runs[op.index] * flops(op, operands, results)


def work(graph: Graph, op: Op) -> float:
    """FLOPs of one operation on whole values."""
    if op.regions:
        return (op.trips or UNKNOWN_TRIPS) * sum(work(graph, inner) for region in op.regions for inner in region.ops)
    if op.name == MANUAL:
        call = call_of(op)
        return call.devices * model_flops(call.body)
    if op.name in KERNELS:
        return kernel_flops(op.name, op.params, [graph.type_of(a).shape for a in op.inputs])
    if op.name not in ALL_PRODUCTS:
        return 0.0
    return flops(op, [graph.type_of(a) for a in op.inputs], [graph.types[v] for v in op.outputs])


def model_flops(graph: Graph) -> float:
    """FLOPs of one run of a program on the whole mesh."""
    return sum(work(graph, op) for op in graph.ops)


def main_dtype(graph: Graph) -> str:
    """The dtype that most FLOPs are done in; float32 where there are none. Ties go to the first by name."""
    done = totals(_by_dtype(graph))
    return max(sorted(done), key=lambda d: done[d]) if done else "float32"


def _by_dtype(graph: Graph) -> Iterator[tuple[str, float]]:
    for op in graph.walk():
        if op.name == MANUAL:
            call = call_of(op)
            yield from ((dtype, call.devices * done) for dtype, done in _by_dtype(call.body))
        elif op.name in (*ALL_PRODUCTS, *KERNELS):
            yield computing_dtype(op, [graph.type_of(a) for a in op.inputs]), work(graph, op)
