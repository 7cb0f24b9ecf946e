"""Which communication has time: what is moved long before it is read, or read long after it was made.

Two kinds of collectives need not be waited for where they stand in the program:

    early   values that depend on no batch, such as weights and their casts: they can be gathered while earlier
            layers compute (prefetching, as in FSDP: Zhao et al., 2023, section 3.3)                     -> _early
    late    results that only the update reads, such as gradients: they can be reduced while the backward pass goes
            on (Li et al., 2020, "PyTorch Distributed", section 3.2)                                     -> _late

How much of the time of such a collective is hidden, and how many share one latency, the device says
(`Device.overlap`, `Device.bucket_bytes`); here is only who has the time. What a loop carries is never early.
Where passes repeat (`Graph.repeats`) nothing is late: the next pass of the stage waits for the sum of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar import jax_compat
from autopar.ir.graph import Graph, Op
from autopar.ir.train_state import match_state


@dataclass(frozen=True, slots=True)
class Slack:
    """Attributes:
    early: values that depend on no batch.
    late: indices of operations whose results only the update or the caller reads.
    update: indices of operations of the update.
    """

    early: frozenset[int]
    late: frozenset[int]
    update: frozenset[int]

    def moves(self, value: int, reader: int) -> bool:
        """Moving `value` to the operation `reader` (-1: the caller) has time."""
        return reader < 0 or value in self.early or reader in self.update

    def sums(self, op: Op) -> bool:
        """Summing the partial results of `op` has time."""
        return op.index in self.late


@lru_cache(maxsize=4)  # the same for every mesh
def find(graph: Graph) -> Slack:
    """Who has time in this program."""
    update = frozenset(op.index for op in graph.walk() if op.phase == "update")
    late = frozenset[int]() if graph.repeats is not None else frozenset(_late(graph, update))
    return Slack(frozenset(_early(graph)), late, update)


def _early(graph: Graph) -> set[int]:
    early = {graph.inputs[position] for position in match_state(graph).values()}
    early |= {value for value, _ in graph.constants}
    for op, inputs in _leaves(graph.ops, early):
        if all(not isinstance(atom, int) or atom in early for atom in inputs):
            early.update(op.outputs)
    return early


def _leaves(ops: Sequence[Op], early: set[int]) -> Iterator[tuple[Op, Sequence[object]]]:
    """Operations without regions, in order; on the way what enters a region early is early inside."""
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
    """Positions among a loop body's inputs that change from one iteration to the next."""
    if op.name == "scan":
        first, count = jax_compat.scan_counts(op.params)
        return range(first, first + count)
    return range(len(op.inputs)) if op.name == "while" else range(0)


def _late(graph: Graph, update: frozenset[int]) -> Iterator[int]:
    readers: dict[int, list[int]] = {}
    leaves: dict[int, list[int]] = {}  # what a body returns -> the results that it becomes
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
