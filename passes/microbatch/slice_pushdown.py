"""Slice pushdown: an invariant value that all readers slice alike is computed block by block by its producer.

What does not depend on the batch is invariant, and is sliced where it meets a split value: iotas over the batch, zeros
of the batch's shape, the bits of a dropout mask. Computed whole before the loop, such values would be live during all
of it. If all readers slice a value in the same way, the operation that computes it moves into the loop and reads
blocks itself. So slices are pushed from readers to producers                                      -> `push_down`

    operations with a rule       slices of operands, found by trying the rule on them              -> _try_backwards
    broadcasts, iotas            the dimension is created here                                     -> _DIM_CREATORS
    random bits                  likewise: bit i of a stream is a hash of its counter i, so that a block costs no more
                                 than its size, with the same bits

(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, for counters.) Other generators run whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from autopar import jax_compat
from autopar.ir.graph import Graph, Op
from autopar.passes.microbatch.rules.blockwise import split_after_reshape
from autopar.passes.microbatch.rules.table import apply_table
from autopar.passes.microbatch.rules.types import Operands, RuleResult
from autopar.passes.microbatch.states import INVARIANT, Split, State, divided, is_divisible

#: (graph, scan, its rule result, position of a result -> its block, microbatches) -> rule result with these blocks
NarrowScan = Callable[[Graph, Op, RuleResult, Mapping[int, Split], int], RuleResult | None]
#: value -> (index of the operation that reads it, position of the operand)
Readers = Mapping[int, Sequence[tuple[int, int]]]


def push_down(
    graph: Graph,
    candidates: Sequence[Op],
    rule_results: Mapping[int, RuleResult | None],
    readers: Readers,
    read_whole: Set[int],
    count: int,
    inputs: Sequence[int] = (),
    narrow_scan: NarrowScan | None = None,
) -> tuple[Mapping[int, RuleResult], Mapping[int, Split]]:
    """Push slices from readers to the operations that compute the sliced values.

    Args:
        candidates: operations on invariant operands, and scans, in program order.
        rule_results: index of a reader -> how it runs; None on whole values.
        readers: value -> its readers.
        read_whole: values that others than the readers need whole.
        count: number of microbatches.
        inputs: invariant values from outside that may come in blocks.
        narrow_scan: gives the rule result of a scan among the candidates of which only blocks of some results are read.

    Returns:
        New rule results, of candidates that now compute blocks and of readers that need no slice any more; and the
        inputs that come in blocks, with their states.
    """
    changed: dict[int, RuleResult] = {}

    def slice_of(reader: int, position: int) -> Split | None:
        result = changed.get(reader) or rule_results.get(reader)
        return None if result is None else result.slices.get(position)

    def wanted(value: int) -> Split | None:
        # all readers have to take the same block, and nobody the whole
        slices = {slice_of(*reader) for reader in readers.get(value, ())}
        return slices.pop() if len(slices) == 1 and value not in read_whole else None

    def drop_slices(value: int) -> None:
        for reader, position in readers[value]:
            before = changed.get(reader) or rule_results[reader]
            assert before is not None
            changed[reader] = replace(before, slices={i: s for i, s in before.slices.items() if i != position})

    # readers first, so that a slice that reaches an operation may go on to its operands
    for op in reversed(candidates):
        before = changed.get(op.index) or rule_results.get(op.index)
        if before is not None:
            # a scan in the loop, of some of whose results only blocks are read
            blocks = {i: s for i, v in enumerate(op.outputs) if (s := wanted(v)) is not None}
            narrowed = narrow_scan(graph, op, before, blocks, count) if narrow_scan and blocks else None
            if narrowed is not None:
                changed[op.index] = narrowed
                for i in blocks:
                    drop_slices(op.outputs[i])
            continue
        single = len(op.outputs) == 1 and not op.regions and not op.equation.effects
        state = wanted(op.outputs[0]) if single else None
        result = None if state is None else rule_for_block(graph, op, state, count)
        if result is not None:
            changed[op.index] = result
            drop_slices(op.outputs[0])
    sliced_inputs = {v: state for v in inputs if (state := wanted(v)) is not None}
    for value in sliced_inputs:
        drop_slices(value)
    return changed, sliced_inputs


def rule_for_block(graph: Graph, op: Op, state: Split, count: int) -> RuleResult | None:
    """How an operation on invariant operands computes a block of its result; None if it cannot."""
    shapes = tuple(graph.type_of(a).shape for a in op.inputs)
    operands = Operands(op, shapes, (graph.types[op.outputs[0]].shape,), (INVARIANT,) * len(shapes), count)
    creator = _DIM_CREATORS.get(op.name)
    created = None if creator is None else creator(graph, operands, state)
    if created is not None:
        return created if is_divisible(operands.result_shapes[0], state, count) else None
    candidates = (
        _try_backwards(operands, operand, slice_of) for operand, slice_of in _candidate_slices(operands, state)
    )
    return next((result for result in candidates if result is not None and result.results == (state,)), None)


def _candidate_slices(operands: Operands, state: Split) -> Iterator[tuple[int, Split]]:
    """Operands, and slices of them that may give the slice of the result: along dimensions of equal extent, and for
    reshapes.
    """
    for i, shape in enumerate(operands.shapes):
        if operands.op.name == "reshape":
            before = split_after_reshape(operands.result_shapes[0], shape, state, operands.count)
            yield from () if before is None else ((i, before),)
        elif isinstance(operands.op.inputs[i], int):
            extent = operands.result_shapes[0][state.dim]
            yield from ((i, Split(d, state.outer)) for d, n in enumerate(shape) if n == extent)


def _try_backwards(operands: Operands, operand: int, slice_of: Split) -> RuleResult | None:
    """The rule result if this operand is sliced so, and the other operands as the rule then needs."""
    if not is_divisible(operands.shapes[operand], slice_of, operands.count):
        return None
    states: list[State] = list(operands.states)
    states[operand] = slice_of
    result = apply_table(replace(operands, states=tuple(states)))
    if result is None or result.local_indices or not all(isinstance(operands.op.inputs[i], int) for i in result.slices):
        return None
    return replace(result, slices={**result.slices, operand: slice_of})


# Operations that create a dimension


def _broadcast(graph: Graph, operands: Operands, state: Split) -> RuleResult | None:
    """A new dimension, or one that the operand has with extent 1."""
    dims = tuple(operands.params["broadcast_dimensions"])
    if state.dim in dims and operands.shapes[0][dims.index(state.dim)] != 1:
        return None
    return RuleResult((state,), params={"shape": divided(operands.params["shape"], state.dim, operands.count)})


def _iota(graph: Graph, operands: Operands, state: Split) -> RuleResult | None:
    """Along the counted dimension the block's own numbers; along other dimensions an iota of fewer elements."""
    if operands.params["dimension"] == state.dim:
        return RuleResult((state,), result_block=state)
    return RuleResult((state,), params={"shape": divided(operands.params["shape"], state.dim, operands.count)})


def _random_bits(graph: Graph, operands: Operands, state: Split) -> RuleResult | None:
    """Bits of one key, by counter. More than 2^32 bits would need counters of 64 bits."""
    (key,) = operands.op.inputs
    by_counter = jax_compat.hashes_keys(graph.type_of(key).dtype)
    # `_random_bits` of `loop` counts elements in the low word of the counter alone.
    if operands.shapes[0] or not by_counter or graph.types[operands.op.outputs[0]].size >= 1 << 32:
        return None
    return RuleResult((state,), result_block=state)


_DIM_CREATORS: Mapping[str, Callable[[Graph, Operands, Split], RuleResult | None]] = {
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "random_bits": _random_bits,
}


def readers_of(ops: Sequence[Op]) -> dict[int, list[tuple[int, int]]]:
    """Value -> (index of an operation, position of the operand) of all its readers."""
    readers: dict[int, list[tuple[int, int]]] = {}
    for op in ops:
        for position, atom in enumerate(op.inputs):
            if isinstance(atom, int):
                readers.setdefault(atom, []).append((op.index, position))
    return readers
