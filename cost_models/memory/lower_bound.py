"""Memory that a step needs as it is written, in even pieces: before anything is planned.

    alive(t)  =  arguments and constants  +  values that are made before moment t and read after it
    bytes     =  max over t of alive(t)

of all devices together, in program order, whatever a compiler fuses. A plan with nothing recomputed holds about as
much, and more where it keeps copies; that is enough to tell a step that fits from one that is far too large.
"""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.ir.on_graph import cached_on_graph


@cached_on_graph
def written_bytes(graph: Graph) -> int:
    """Most bytes alive at once, of all devices together."""
    arguments = {*graph.inputs, *(v for v, _ in graph.constants)}
    last = {a: t for t, op in enumerate(graph.ops) for a in op.inputs if isinstance(a, int)}
    last.update({a: len(graph.ops) for a in graph.outputs if isinstance(a, int)})
    added, freed = [0] * len(graph.ops), [0] * (len(graph.ops) + 1)  # bytes that each operation makes, and reads last
    for t, op in enumerate(graph.ops):
        for v in op.outputs:
            nbytes = graph.types[v].nbytes
            added[t] += nbytes
            freed[last.get(v, t)] += nbytes
    alive = most = sum(graph.types[v].nbytes for v in arguments)
    for more, less in zip(added, freed, strict=False):
        alive += more
        most = max(most, alive)
        alive -= less
    return most
