"""Which stage runs each operation after the loop over microbatches: every stage updates the parameters that it stores.

Totals are in the stage that accumulates them, parameters in the first stage whose passes read them. From there,

    an operation runs in the stage of its heaviest operand, at equal weights in the earliest stage; one on scalars of
    several stages, such as the squares in a global norm, runs in stage 0               -> _place_with_operands
    an operation without a placed operand runs in the stage of its heaviest reader; moments and other arguments that no
    pass reads are stored there                                                         -> _place_with_readers
    scalar arguments that no parameter depends on, such as totals and counts of metrics, are stored in the last stage,
    so that users can compute with several of them                                                    -> _of_metrics

until every operation has a stage. The weight of a value is its bytes, but at most the weight of the operands that it is
computed from: a scalar broadcast to the shape of a gradient weighs as much as the scalar. Such a broadcast is
duplicated in every reader, and so are results of constants or of the batch alone       -> _duplicated

Transfers between stages here are scalars, the gradients of tied weights, and little else. An operation that reads a
value of another stage runs one round after it; a stage runs one program per round      -> Update.round
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Atom
from autopar.ir.op_sets import BROADCASTS, RESHAPES
from autopar.ir.train_state import match_state
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.programs import AccumulatedValue, PlacedOp
from autopar.passes.stages.assign import (
    NOT_DUPLICATED,
    PassAssignment,
    operand_values,
    persistent_arguments,
    with_duplicated,
)

#: Operations that change the shape or the type of a value, and may enlarge it.
SHAPE_OPS = (*BROADCASTS, *RESHAPES, "convert_element_type")


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The program that a stage runs once per step, in one round.

    Attributes:
        stage, round: the stage, and its turn: after the earlier rounds whose results it reads.
        ops: operations on whole values.
        arguments: arguments of the step that it reads.
        totals: totals of the loop that it reads, of any stage.
        reads: values of other updates.
        writes: values that other updates read, and results of the step.
    """

    stage: int
    round: int
    ops: tuple[PlacedOp, ...]
    arguments: tuple[int, ...]
    totals: tuple[AccumulatedValue, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Updates:
    """The updates of all stages, in an order in which they can run.

    Attributes:
        programs: by round, then by stage.
        owners: argument that is no batch -> the stage that stores it.
        computed_in: value -> the number of the program that computes it.
    """

    programs: tuple[Update, ...]
    owners: Mapping[int, int]
    computed_in: Mapping[int, int]


def assign(
    split: Microbatches, passes: PassAssignment, reading_stages: Mapping[int, Sequence[int]], stages: int
) -> Updates:
    """Assigns the operations after the loop to stages and rounds.

    Args:
        split: the step in microbatches, in one loop.
        passes: its loop by stages.
        reading_stages: argument -> stages whose passes read it.
        stages: number of stages.
    """
    ops = _needed(split, passes)
    arguments = persistent_arguments(split)
    stage_of = {t.value: passes.computed_in.get(t.value, (stages - 1, "F"))[0] for t in passes.totals}
    stage_of.update((v, stages - 1) for v in _of_metrics(split, ops, arguments, reading_stages))
    stage_of.update((v, min(reading_stages[v])) for v in sorted(arguments) if reading_stages.get(v))
    weight = _weights(split, ops, arguments, passes.totals)
    duplicated = _duplicated(split, ops, weight)
    placed_ops = [p for p in ops if not p.op.outputs or p.op.outputs[0] not in duplicated]
    reads = {p.op.index: _producers_behind(p.op.inputs, duplicated) for p in placed_ops}
    movable = arguments | {v for p in placed_ops for v in p.op.outputs} | stage_of.keys()
    placed_values = -1
    while len(stage_of) > placed_values:
        placed_values = len(stage_of)
        _place_with_operands(split, placed_ops, reads, weight, stage_of)
        if len(stage_of) == placed_values:
            _place_with_readers(placed_ops, reads, weight, movable, stage_of)
    owners = {v: stage_of.get(v, 0) for v in sorted(arguments)}
    return _programs(split, passes, placed_ops, duplicated, reads, stage_of, owners)


def _needed(split: Microbatches, passes: PassAssignment) -> list[PlacedOp]:
    """Operations after the loop, and those before it whose results they read or the step returns."""
    available = {t.value for t in passes.totals} | {v for v, _ in split.flat.constants} | {*split.graph.inputs}
    needed: set[Atom] = {a for a in split.flat.outputs if a not in available}
    ops: list[PlacedOp] = []
    by_index = {p.op.index: p for p in (*split.prologue, *passes.deferred_sums, *split.epilogue)}
    for index in sorted(by_index, reverse=True):
        placed = by_index[index]
        if placed.op.equation.effects or any(v in needed for v in placed.op.outputs):
            ops.append(placed)
            needed.update(a for a in placed.op.inputs if isinstance(a, int) and a not in available)
    return ops[::-1]


def _of_metrics(
    split: Microbatches, ops: Sequence[PlacedOp], arguments: frozenset[int], reading_stages: Mapping[int, Sequence[int]]
) -> list[int]:
    """Scalar arguments on which no new value of an argument that passes read depends."""
    graph = split.graph
    new_parameters = (out for out, i in match_state(graph).items() if reading_stages.get(graph.inputs[i]))
    needed: set[Atom] = {split.flat.outputs[out] for out in new_parameters}
    for placed in reversed(ops):
        if any(v in needed for v in placed.op.outputs):
            needed.update(placed.op.inputs)
    return [v for v in sorted(arguments) if v not in needed and not graph.types[v].rank]


def _weights(
    split: Microbatches, ops: Sequence[PlacedOp], arguments: frozenset[int], totals: Sequence[AccumulatedValue]
) -> Mapping[int, int]:
    """Value -> its bytes, at most the weight of the operands that it is computed from."""
    types = split.graph.types
    weight = {v: types[v].nbytes for v in (*arguments, *(t.value for t in totals))}
    for placed in ops:
        operand_bytes = sum(weight.get(a, 0) for a in placed.op.inputs if isinstance(a, int))
        weight.update((v, min(types[v].nbytes, operand_bytes)) for v in placed.op.outputs)
    return weight


def _duplicated(split: Microbatches, ops: Sequence[PlacedOp], weight: Mapping[int, int]) -> Mapping[int, PlacedOp]:
    """Value that every reader computes for itself -> its operation."""
    types = split.graph.types
    results = set(split.flat.outputs)
    duplicated: dict[int, PlacedOp] = {}
    for placed in ops:
        op = placed.op
        expands = op.name in SHAPE_OPS and all(2 * weight[v] <= types[v].nbytes for v in op.outputs)
        is_constant = op.name not in NOT_DUPLICATED and not op.regions and not any(weight[v] for v in op.outputs)
        if (expands or is_constant) and not op.equation.effects and not results & {*op.outputs}:
            duplicated.update(dict.fromkeys(op.outputs, placed))
    return duplicated


def _producers_behind(atoms: Sequence[Atom], duplicated: Mapping[int, PlacedOp]) -> tuple[int, ...]:
    """The values that operands are computed from by duplicated operations; other operands themselves."""
    seen: dict[int, None] = {}
    stack = [a for a in reversed(atoms) if isinstance(a, int)]
    while stack:
        value = stack.pop()
        if value not in seen and value in duplicated:
            stack.extend(a for a in reversed(duplicated[value].op.inputs) if isinstance(a, int))
        seen[value] = None
    return tuple(v for v in seen if v not in duplicated)


def _place_with_operands(
    split: Microbatches,
    ops: Sequence[PlacedOp],
    reads: Mapping[int, Sequence[int]],
    weight: Mapping[int, int],
    stage_of: dict[int, int],
) -> None:
    """Adds the stages of operations with an operand that has a stage."""
    for op in (placed.op for placed in ops):
        placed_operands = [v for v in reads[op.index] if v in stage_of]
        if not placed_operands or not op.outputs or op.outputs[0] in stage_of:
            continue
        scalars = not any(split.graph.types[v].rank for v in (*reads[op.index], *op.outputs))
        several_stages = len({stage_of[v] for v in placed_operands}) > 1
        stage = 0 if scalars and several_stages else min((-weight[v], stage_of[v]) for v in placed_operands)[1]
        stage_of.update(dict.fromkeys(op.outputs, stage))


def _place_with_readers(
    ops: Sequence[PlacedOp],
    reads: Mapping[int, Sequence[int]],
    weight: Mapping[int, int],
    movable: frozenset[int],
    stage_of: dict[int, int],
) -> None:
    """Adds the stages of other operations and arguments: that of the heaviest reader; stage 0 without readers."""
    heaviest: dict[int, tuple[int, int]] = {}
    for op in (placed.op for placed in reversed(ops)):
        reader_stages = [heaviest[v] for v in op.outputs if v in heaviest]
        if reader_stages and op.outputs[0] not in stage_of:
            stage_of.update(dict.fromkeys(op.outputs, min(reader_stages)[1]))
        if op.outputs and op.outputs[0] in stage_of:
            stage = (-max(weight[u] for u in op.outputs), stage_of[op.outputs[0]])
            heaviest.update((v, min(heaviest.get(v, stage), stage)) for v in reads[op.index] if v in movable)
    stage_of.update((v, stage) for v, (_, stage) in heaviest.items() if v not in stage_of)


def _programs(
    split: Microbatches,
    passes: PassAssignment,
    ops: Sequence[PlacedOp],
    duplicated: Mapping[int, PlacedOp],
    reads: Mapping[int, Sequence[int]],
    stage_of: Mapping[int, int],
    owners: Mapping[int, int],
) -> Updates:
    totals = {t.value: t for t in passes.totals}
    producers = {v: p for p in ops for v in p.op.outputs}
    position_of = _rounds(ops, reads, stage_of)
    results = dict.fromkeys(v for v in split.flat.outputs if isinstance(v, int))
    # a total that the step returns as it is needs no operation, but a program that returns it
    returned_totals = {v: (0, stage_of[v]) for v in results if v in totals}
    ops_at: dict[tuple[int, int], list[PlacedOp]] = {
        position: [] for position in sorted({*position_of.values(), *returned_totals.values()})
    }
    reading_positions: dict[int, dict[tuple[int, int], None]] = {}
    for p in ops:
        ops_at[position_of[p.op.index]].append(p)
        for v in reads[p.op.index]:
            reading_positions.setdefault(v, {})[position_of[p.op.index]] = None
    programs: list[Update] = []
    # one program for each stage in each round
    for (round_, stage), ops_here in ops_at.items():
        results_here = {v for p in ops_here for v in p.op.outputs}
        operands = sorted({v for p in ops_here for v in reads[p.op.index]} - results_here)
        # what the step returns, or a program of another round or stage reads
        writes = [
            v for v in sorted(results_here) if v in results or {*reading_positions.get(v, ())} - {(round_, stage)}
        ]
        writes += [v for v in results if returned_totals.get(v) == (round_, stage)]
        programs.append(
            Update(
                stage,
                round_,
                tuple(with_duplicated(ops_here, duplicated, operand_values)),
                tuple(v for v in operands if v in split.graph.names),
                tuple(totals[v] for v in dict.fromkeys((*operands, *writes)) if v in totals),
                tuple(v for v in operands if v in producers),
                tuple(writes),
            )
        )
    computed_in = {v: i for i, program in enumerate(programs) for v in program.writes}
    return Updates(tuple(programs), owners, computed_in)


def _rounds(
    ops: Sequence[PlacedOp], reads: Mapping[int, Sequence[int]], stage_of_value: Mapping[int, int]
) -> Mapping[int, tuple[int, int]]:
    """Index of an operation -> (round, stage): as late as readers allow, for few live values between rounds."""
    stage_of = {p.op.index: next((stage_of_value[v] for v in p.op.outputs if v in stage_of_value), 0) for p in ops}
    earliest: dict[int, int] = {}
    producer = {v: p.op.index for p in ops for v in p.op.outputs}
    for placed in ops:
        index = placed.op.index
        sources = [producer[v] for v in reads[index] if v in producer]
        earliest[index] = max((earliest[i] + (stage_of[i] != stage_of[index]) for i in sources), default=0)
    last_round: dict[int, int] = {}
    for index, round_ in earliest.items():
        last_round[stage_of[index]] = max(last_round.get(stage_of[index], 0), round_)
    latest = {index: last_round[stage] for index, stage in stage_of.items()}
    for placed in reversed(ops):
        index = placed.op.index
        for source in (producer[v] for v in reads[index] if v in producer):
            latest[source] = min(latest[source], latest[index] - (stage_of[source] != stage_of[index]))
    return {index: (latest[index], stage) for index, stage in stage_of.items()}
