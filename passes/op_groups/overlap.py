"""Overlap: the collectives that can run beside computation.

Two kinds of collectives need not be waited for at their place in the program:

    early   all-gathers of values that do not depend on the batch, such as weights and their casts, can be prefetched
            while earlier layers compute (FSDP: Zhao et al., 2023, section 3.3)                          -> _early
    late    reductions of results that only the update reads, such as gradients, can be deferred while the backward
            pass continues (Li et al., 2020, "PyTorch Distributed", section 3.2)                         -> _late

This module only finds these collectives. The device determines how much of their time is hidden and how many share one
latency (`Device.overlap`, `Device.bucket_bytes`). A value that a loop carries is never early. If passes of the program
repeat (`Graph.repeats`), no reduction is late, because the next pass of the stage waits for the sum of each pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar import jax_compat
from autopar.ir.graph import Graph, Op
from autopar.ir.train_state import match_state


@dataclass(frozen=True, slots=True)
class Overlap:
    """The values and operations whose communication can overlap with computation.

    Attributes:
        early: values that do not depend on the batch.
        late: indices of operations whose results only the update or the caller reads.
        update: indices of operations of the update.
    """

    early: frozenset[int]
    late: frozenset[int]
    update: frozenset[int]

    def moves(self, value: int, reader: int) -> bool:
        """Whether resharding `value` for the operation `reader` (-1: the caller) can overlap."""
        return reader < 0 or value in self.early or reader in self.update

    def sums(self, op: Op) -> bool:
        """Whether reducing the partial results of `op` can overlap."""
        return op.index in self.late


@lru_cache(maxsize=4)  # the same for every mesh
def find(graph: Graph) -> Overlap:
    """The collectives of a program that can overlap: all-gathers to prefetch and reductions to defer."""
    update = frozenset(op.index for op in graph.walk() if op.phase == "update")
    late = frozenset[int]() if graph.repeats is not None else frozenset(_late(graph, update))
    return Overlap(frozenset(_early(graph)), late, update)


def _early(graph: Graph) -> set[int]:
    """The values that depend on the train state and on constants only, but not on what a loop carries."""
    early = {graph.inputs[position] for position in match_state(graph).values()}
    early |= {value for value, _ in graph.constants}
    for op, inputs in _leaves(graph.ops, early):
        if all(not isinstance(atom, int) or atom in early for atom in inputs):
            early.update(op.outputs)
    return early


def _leaves(ops: Sequence[Op], early: set[int]) -> Iterator[tuple[Op, Sequence[object]]]:
    """Operations without regions, in program order. Adds to `early` the region inputs that are early outside."""
    for op in ops:
        if not op.regions:
            yield op, op.inputs
            continue
        carried = _carried(op)
        for region in op.regions:
            outside = op.inputs[len(op.inputs) - len(region.inputs) :]
            early.update(
                inner
                for i, (atom, inner) in enumerate(zip(outside, region.inputs, strict=True))
                if isinstance(atom, int) and atom in early and i not in carried
            )
            yield from _leaves(region.ops, early)


def _carried(op: Op) -> range:
    """Positions of the inputs of a loop body that change from one iteration to the next."""
    if op.name == "scan":
        first, count = jax_compat.scan_counts(op.params)
        return range(first, first + count)
    return range(len(op.inputs)) if op.name == "while" else range(0)


def _late(graph: Graph, update: frozenset[int]) -> Iterator[int]:
    """Indices of the operations whose results only the update or the caller reads, directly or through regions."""
    readers: dict[int, list[int]] = {}
    leaves: dict[int, list[int]] = {}  # output of a region -> results of its operation
    for op in graph.walk():
        for atom in op.inputs:
            if isinstance(atom, int):
                readers.setdefault(atom, []).append(op.index)
        for region in op.regions:
            carries = jax_compat.scan_counts(op.params)[1] if op.name == "scan" else 0
            carried = len(op.outputs) if op.name == "while" else carries
            for i, (atom, result) in enumerate(zip(region.outputs, op.outputs, strict=False)):
                if isinstance(atom, int) and i < carried:
                    readers.setdefault(atom, []).append(op.index)  # the next iteration reads it
                elif isinstance(atom, int):
                    leaves.setdefault(atom, []).append(result)

    def is_late(value: int) -> bool:
        return all(reader in update for reader in readers.get(value, ())) and all(map(is_late, leaves.get(value, ())))

    return (op.index for op in graph.walk() if op.outputs and all(map(is_late, op.outputs)))
