"""Which arguments may be offloaded to host memory between two steps.

An argument leaf qualifies if

    it is state        the step returns its successor (`autopar.ir.train_state.match_state`) and may reuse its buffer
    the update alone   an operation reads it, and no value of the backward pass depends on it       -> _differentiated
      reads it
    it is an array     of rank 1 or more: offloading scalars and keys would free nothing

These are the optimizer's moments, averages of parameters, and in mixed precision float32 masters whose rounded copies
the forward pass reads; the operations that read them may be anywhere in the program. A parameter never qualifies, and
without a backward pass no argument does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.train_state import match_state


def offloadable(graph: Graph, donated: Collection[int]) -> tuple[int, ...]:
    """Positions of the arguments that may be offloaded, the largest first, among equals in order.

    `donated` are the positions whose buffers the step may reuse.
    """
    differentiated = _differentiated(graph.ops)
    if not differentiated:
        return ()
    update_operands = {a for op in graph.ops for a in op.inputs} - differentiated
    donated_state = sorted({*donated}.intersection(match_state(graph).values()))
    positions = [i for i in donated_state if graph.inputs[i] in update_operands and _is_array(graph, i)]
    return tuple(sorted(positions, key=lambda i: (-graph.types[graph.inputs[i]].nbytes, i)))


def _differentiated(ops: Sequence[Op]) -> set[Atom]:
    """Operands of operations of the backward pass, and all values that these are computed from."""
    values: set[Atom] = set()
    for op in reversed(ops):
        if any(v in values for v in op.outputs) or any(inner.phase == "backward" for inner in op.walk()):
            values.update(op.inputs)
    return values


def _is_array(graph: Graph, position: int) -> bool:
    type_ = graph.types[graph.inputs[position]]
    return type_.rank > 0 and type_.size > 0 and not type_.dtype.startswith("key")
