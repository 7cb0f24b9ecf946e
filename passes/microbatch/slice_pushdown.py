"""Invariant values of which every reader wants one block are made block by block.

What does not depend on the batch is invariant, and is cut where it meets a split value: iotas over the batch, zeros of
the batch's shape, the bits of a dropout mask. Made whole before the loop they would be held through all of it. Where
all readers cut a value alike, the operation that makes it moves into the loop and reads blocks itself, so that the cut
wanders up                                                                                                -> `sink`

    anything with a rule                      to the operands: the rule is tried backwards                -> _probed
    broadcasts, iotas                         the dimension begins here                                   -> _begun
    random bits                               likewise: bit i of a stream is a hash of its counter i, so that a block
                                              costs no more than its size, bit for bit the same

(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, for counters.) Other generators stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from autopar import jax_compat
from autopar.ir.graph import Graph, Op
from autopar.passes.microbatch.rule_types import Case, Outcome
from autopar.passes.microbatch.rules import reshaped
from autopar.passes.microbatch.states import INVARIANT, Split, State, divided, fits
from autopar.passes.microbatch.table import outcome

#: (graph, scan, its outcome, result -> block, microbatches) -> its outcome with these blocks
Narrow = Callable[[Graph, Op, Outcome, Mapping[int, Split], int], Outcome | None]
#: value -> (index of the operation that reads it, position of the operand)
Readers = Mapping[int, Sequence[tuple[int, int]]]


def sink(
    graph: Graph,
    candidates: Sequence[Op],
    outcomes: Mapping[int, Outcome | None],
    readers: Readers,
    kept: Set[int],
    count: int,
    inputs: Sequence[int] = (),
    narrow: Narrow | None = None,
) -> tuple[Mapping[int, Outcome], Mapping[int, Split]]:
    """Outcomes of those candidates that make blocks, and of the readers that need not cut any more; cuts of inputs.

    Args:
        candidates: operations on invariant operands, in program order.
        outcomes: how every reader runs, by index; None on whole values.
        kept: values that are wanted whole by others than the readers.
        inputs: invariant values from outside that may come in blocks.
        narrow: the outcome of a scan among the candidates, of some of whose results blocks do.
    """
    changed: dict[int, Outcome] = {}

    def cut(reader: int, position: int) -> Split | None:
        found = changed.get(reader) or outcomes.get(reader)
        return None if found is None else found.cuts.get(position)

    def wanted(value: int) -> Split | None:
        cuts = {cut(*reader) for reader in readers.get(value, ())}
        return cuts.pop() if len(cuts) == 1 and value not in kept else None

    def drop_cuts(value: int) -> None:
        for reader, position in readers[value]:
            before = changed.get(reader) or outcomes[reader]
            assert before is not None
            changed[reader] = replace(before, cuts={i: s for i, s in before.cuts.items() if i != position})

    for op in reversed(candidates):
        before = changed.get(op.index) or outcomes.get(op.index)
        if before is not None:
            blocks = {i: s for i, v in enumerate(op.outputs) if (s := wanted(v)) is not None}
            found = narrow(graph, op, before, blocks, count) if narrow and blocks else None
            if found is not None:
                changed[op.index] = found
                for i in blocks:
                    drop_cuts(op.outputs[i])
            continue
        single = len(op.outputs) == 1 and not op.regions and not op.equation.effects
        state = wanted(op.outputs[0]) if single else None
        found = None if state is None else in_blocks(graph, op, state, count)
        if found is not None:
            changed[op.index] = found
            drop_cuts(op.outputs[0])
    cut_inputs = {v: state for v in inputs if (state := wanted(v)) is not None}
    for value in cut_inputs:
        drop_cuts(value)
    return changed, cut_inputs


def in_blocks(graph: Graph, op: Op, state: Split, count: int) -> Outcome | None:
    """How an operation on invariant operands makes blocks of its result."""
    operands = tuple(graph.type_of(a).shape for a in op.inputs)
    case = Case(op, operands, (graph.types[op.outputs[0]].shape,), (INVARIANT,) * len(operands), count)
    begun = _BEGUN.get(op.name)
    found = None if begun is None else begun(graph, case, state)
    if found is not None:
        return found if fits(case.results[0], state, count) else None
    candidates = (_probed(case, operand, cut) for operand, cut in _possible(case, state))
    return next((made for made in candidates if made is not None and made.results == (state,)), None)


def _possible(case: Case, state: Split) -> Iterator[tuple[int, Split]]:
    """Operands and cuts of them that may give the cut of the result: along dimensions of its extent, and reshapes."""
    for i, shape in enumerate(case.operands):
        if case.op.name == "reshape":
            before = reshaped(case.results[0], shape, state, case.count)
            yield from () if before is None else ((i, before),)
        elif isinstance(case.op.inputs[i], int):
            extent = case.results[0][state.dim]
            yield from ((i, Split(d, state.outer)) for d, n in enumerate(shape) if n == extent)


def _probed(case: Case, operand: int, cut: Split) -> Outcome | None:
    """The outcome if this operand is cut so, the others as the rule then asks."""
    if not fits(case.operands[operand], cut, case.count):
        return None
    states: list[State] = list(case.states)
    states[operand] = cut
    made = outcome(replace(case, states=tuple(states)))
    if made is None or made.columns or not all(isinstance(case.op.inputs[i], int) for i in made.cuts):
        return None
    return replace(made, cuts={**made.cuts, operand: cut})


# Where a dimension begins


def _broadcast(graph: Graph, case: Case, state: Split) -> Outcome | None:
    dims = tuple(case.params["broadcast_dimensions"])
    if state.dim in dims and case.operands[0][dims.index(state.dim)] != 1:
        return None
    return Outcome((state,), params={"shape": divided(case.params["shape"], state.dim, case.count)})


def _iota(graph: Graph, case: Case, state: Split) -> Outcome | None:
    if case.params["dimension"] == state.dim:
        return Outcome((state,), block=state)
    return Outcome((state,), params={"shape": divided(case.params["shape"], state.dim, case.count)})


def _random_bits(graph: Graph, case: Case, state: Split) -> Outcome | None:
    (key,) = case.op.inputs
    by_counter = jax_compat.hashes_keys(graph.type_of(key).dtype)
    if case.operands[0] or not by_counter or graph.types[case.op.outputs[0]].size >= 1 << 32:
        return None
    return Outcome((state,), block=state)


_BEGUN: Mapping[str, Callable[[Graph, Case, Split], Outcome | None]] = {
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "random_bits": _random_bits,
}


def readers_of(ops: Sequence[Op]) -> dict[int, list[tuple[int, int]]]:
    """Who reads each value."""
    found: dict[int, list[tuple[int, int]]] = {}
    for op in ops:
        for position, atom in enumerate(op.inputs):
            if isinstance(atom, int):
                found.setdefault(atom, []).append((op.index, position))
    return found
