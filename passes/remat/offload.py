"""Which arguments may wait in the host's memory between two steps.

An argument leaf qualifies if

    it is state        the step returns its successor (`autopar.ir.train_state.match_state`) and may reuse its buffer
    it can wait        something reads it, and nothing of the backward pass follows from it          -> _differentiated
    it is large        of rank 1 or more: scalars and keys free nothing

That is what the update alone reads, wherever in the program it stands: the optimizer's moments, averages of parameters,
and in mixed precision float32 masters whose rounded copies the forward pass reads. A parameter never qualifies, and
without a backward pass nothing does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.train_state import match_state


def waiting(graph: Graph, donated: Collection[int]) -> tuple[int, ...]:
    """Positions of the arguments that may wait in the host's memory, the largest first, of equals in their order.

    `donated` are the positions whose buffers the step may reuse.
    """
    needed = _differentiated(graph.ops)
    if not needed:
        return ()
    waits = {a for op in graph.ops for a in op.inputs} - needed
    kept = sorted(i for i in match_state(graph).values() if i in donated)
    found = [i for i in kept if graph.inputs[i] in waits and _is_array(graph, i)]
    return tuple(sorted(found, key=lambda i: (-graph.types[graph.inputs[i]].nbytes, i)))


def _differentiated(ops: Sequence[Op]) -> set[Atom]:
    """What operations of the backward pass read, and all that this is computed from."""
    needed: set[Atom] = set()
    for op in reversed(ops):
        if any(v in needed for v in op.outputs) or any(inner.phase == "backward" for inner in op.walk()):
            needed.update(op.inputs)
    return needed


def _is_array(graph: Graph, position: int) -> bool:
    type_ = graph.types[graph.inputs[position]]
    return type_.rank > 0 and type_.size > 0 and not type_.dtype.startswith("key")
