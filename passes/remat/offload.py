"""Which arguments may be offloaded to host memory between two steps.

An argument leaf qualifies if

    it is state        the step returns its successor (`autopar.ir.train_state.match_state`) and may reuse its buffer
    the update alone   an operation reads it, and no value of the backward pass depends on it       -> differentiated
      reads it
    it is an array     of rank 1 or more: offloading scalars and keys would free nothing

These are the optimizer's moments, averages of parameters, and in mixed precision float32 masters whose rounded copies
the forward pass reads; the operations that read them may be anywhere in the program. A parameter never qualifies, and
without a backward pass no argument does.
"""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.graph import Graph
from autopar.ir.train_state import differentiated, match_state


def offloadable(graph: Graph, donated: Collection[int]) -> tuple[int, ...]:
    """Positions of the arguments that may be offloaded, the largest first, among equals in order.

    `donated` are the positions whose buffers the step may reuse.
    """
    gradient = differentiated(graph.ops)
    if not gradient:
        return ()
    update_operands = {a for op in graph.ops for a in op.inputs} - gradient
    donated_state = sorted({*donated}.intersection(match_state(graph).values()))
    positions = [i for i in donated_state if graph.inputs[i] in update_operands and _is_array(graph, i)]
    return tuple(sorted(positions, key=lambda i: (-graph.types[graph.inputs[i]].nbytes, i)))


def _is_array(graph: Graph, position: int) -> bool:
    type_ = graph.types[graph.inputs[position]]
    return type_.rank > 0 and type_.size > 0 and not type_.dtype.startswith("key")
