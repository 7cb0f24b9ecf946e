"""Overlap: the collectives that can run beside computation.

Two kinds of collectives need not be waited for at their place in the program:

    early   all-gathers of values that do not depend on the batch, such as weights and their casts, can be prefetched
            while earlier layers compute (FSDP: Zhao et al., 2023, section 3.3)                          -> _early
    late    reductions of results that only the update reads, such as gradients, can be deferred while the backward
            pass continues (Li et al., 2020, "PyTorch Distributed", section 3.2)                         -> _late

This module only finds these collectives. The device determines how much of their time is hidden and how many share one
latency (`Device.overlap`, `Device.bucket_bytes`). A value that a loop carries is never early, nor one inside a
`while` loop that comes from outside. If passes of the program repeat (`Graph.repeats`), no reduction is late, because
the next pass of the stage waits for the sum of each pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost_models.sharding.groups import Overlap
from autopar.ir.control_flow import entries, num_carries
from autopar.ir.graph import Graph
from autopar.ir.on_graph import cached_on_graph
from autopar.ir.train_state import match_state


@cached_on_graph
def find(graph: Graph) -> Overlap:
    """The collectives of a program that can overlap: all-gathers to prefetch and reductions to defer."""
    update = frozenset(op.index for op in graph.walk() if op.phase == "update")
    late = frozenset[int]() if graph.repeats is not None else frozenset(_late(graph, update))
    return Overlap(frozenset(_early(graph)), late, update)


def _early(graph: Graph) -> set[int]:
    """The values that depend on the train state and on constants only, but not on what a loop carries."""
    early = {graph.inputs[position] for position in match_state(graph).values()}
    early |= {value for value, _ in graph.constants}
    for op in graph.walk():  # an operation comes before its regions
        if not op.regions and early.issuperset([atom for atom in op.inputs if isinstance(atom, int)]):
            early.update(op.outputs)
        if op.regions and op.name != "while":
            early.update(e.value for e in entries(op) if e.operand in early and e.kind != "carry")
    return early


def _late(graph: Graph, update: frozenset[int]) -> Iterator[int]:
    """Indices of the operations whose results only the update or the caller reads, directly or through regions."""
    carried: dict[int, list[int]] = {}  # output of a region -> loops whose next iteration reads it
    leaves: dict[int, list[int]] = {}  # output of a region -> results of its operation
    read = {a for op in graph.walk() if op.index not in update for a in op.inputs if isinstance(a, int)}
    for op in graph.walk():
        for region in op.regions:
            for i, (atom, result) in enumerate(zip(region.outputs, op.outputs, strict=False)):
                if isinstance(atom, int) and i < num_carries(op):
                    carried.setdefault(atom, []).append(op.index)
                elif isinstance(atom, int):
                    leaves.setdefault(atom, []).append(result)

    def is_late(value: int) -> bool:
        if value in read or not update.issuperset(carried.get(value, ())):
            return False
        return all(map(is_late, leaves.get(value, ())))

    return (op.index for op in graph.walk() if op.outputs and all(map(is_late, op.outputs)))
