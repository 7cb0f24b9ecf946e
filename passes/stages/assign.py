"""Which stage runs each operation of the loop over microbatches, and in which of its passes.

A step is divided between layers; stage k has consecutive layers. Its forward pass F sends activations to later stages,
its backward pass B sends cotangents to earlier ones, and W computes gradients of weights that B leaves for later.

    cheap results of arguments      duplicated in every pass that reads them: broadcasts, casts, masks  -> _duplicated
    cheap results of much smaller   duplicated in every other pass that reads them: a residual, or a value that is sent
      values                        to another stage, is the operand of the broadcast or cast, not its result
                                                                                                    -> _expanded
    forward                         F of the stage of its layer
    backward                        B of the latest of these stages, but of no later one than any cotangent that it
                                    reads: stages that produce or read a forward value it reads; that alone read a
                                    parameter it reads; that alone read the parameter whose gradient it computes. An
                                    operation with none of these goes to the earliest stage of the cotangents it reads
                                    or, if its results are no smaller than its operands, to its latest reader. What
                                    adds parts of sums, or lays one out anew, stays with them       -> _is_of_parts
    rematerialised                  B of the latest stage that reads it, so that no stage recomputes for another;
                                    likewise barriers, whose results count as their operands               -> _backward
    a sum of partial sums of        once after the loop: each stage accumulates its own, as with tied weights
      different stages                                                                              -> _deferred
    W, if asked for                 operations that make partial sums which no pass B reads (Qi et al., 2023, "Zero
                                    bubble pipeline parallelism", section 2), and operations that only these read
                                                                                             -> _weight_pass_ops

A backward operation runs at its latest residual by Alpa's rule (Zheng et al., 2022, section 5.2). Parameters count as
well: the first and the last operations of a layer's backward pass may read nothing else of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar import jax_compat
from autopar.cost_models.kernels import KERNELS
from autopar.errors import GraphError
from autopar.ir.graph import Op
from autopar.ir.op_sets import ADDITIONS, ALL_PRODUCTS, RELAYOUTS
from autopar.passes.layers.find import BARRIER, Layers, gradients
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.programs import AccumulatedValue, PlacedOp
from autopar.passes.microbatch.states import Partial
from autopar.schedules.instructions import Kind

StagePass = tuple[int, Kind]
"""(stage, pass)."""

Roots = Mapping[int, frozenset[int]]
"""Whole value -> the arguments that it is computed from."""

#: Operations that are not duplicated in the passes that read their results, however small their operands.
NOT_DUPLICATED = (
    *(*ALL_PRODUCTS, "random_bits", "threefry2x32", "sort", "scatter-add", "scatter", "gather", "cumsum", *KERNELS),
)


@dataclass(frozen=True, slots=True, eq=False)
class PassAssignment:
    """The operations of a loop, by pass.

    Attributes:
        pass_of: index of an operation -> its (stage, pass), without duplicated operations.
        computed_in: value -> the (stage, pass) that computes it, without results of duplicated operations.
        duplicated: value -> the operation, which every pass that reads the value repeats.
        expanded: value more than twice as large as its operands -> the operation. It runs in its pass of `pass_of`, and
            every other pass that reads the value repeats it.
        deferred_sums: sums of partial sums of several stages, which run after the loop, in order.
        totals: the results of the loop.
    """

    pass_of: Mapping[int, StagePass]
    computed_in: Mapping[int, StagePass]
    duplicated: Mapping[int, PlacedOp]
    expanded: Mapping[int, PlacedOp]
    deferred_sums: tuple[PlacedOp, ...]
    totals: tuple[AccumulatedValue, ...]


def assign(
    split: Microbatches, layers: Layers, first_layers: Sequence[int], *, weights: bool = False
) -> PassAssignment:
    """Assigns every operation of the loop to a stage and a pass.

    Args:
        split: the step in microbatches, in one loop.
        layers: its layers.
        first_layers: the first layer of every stage; the first of them is 0.
        weights: gradients of weights get a pass W of their own.

    Raises:
        GraphError: the forward pass of an earlier stage needs a result of a later one.
    """
    roots = argument_roots(split)
    duplicated = _duplicated(split, roots)
    loop = [p for p in split.body if not p.op.outputs or p.op.outputs[0] not in duplicated]
    forward_ops, backward_ops = _by_phase(split, loop)
    stages = _forward(split, layers, first_layers, forward_ops)
    sole_reader = _sole_readers(split, forward_ops, duplicated, stages, roots)
    stages.update(
        _backward(
            split,
            backward_ops,
            stages,
            {**roots, **_roots_of_duplicated(duplicated, roots)},
            sole_reader,
            len(first_layers) - 1,
        )
    )
    deferred, totals = _deferred(loop, stages, split.totals)
    summed_after_loop = {p.op.index for p in deferred}
    backward_ops = [p for p in backward_ops if p.op.index not in summed_after_loop]
    weight_pass = (
        _weight_pass_ops(split, backward_ops, stages, {t.value for t in totals}) if weights else frozenset[int]()
    )
    pass_of: dict[int, StagePass] = {p.op.index: (stages[p.op.index], "F") for p in forward_ops}
    pass_of.update((p.op.index, (stages[p.op.index], "W" if p.op.index in weight_pass else "B")) for p in backward_ops)
    computed_in = {v: pass_of[p.op.index] for p in loop if p.op.index not in summed_after_loop for v in p.op.outputs}
    return PassAssignment(pass_of, computed_in, duplicated, _expanded(split, forward_ops), deferred, totals)


def transferred_values(split: Microbatches, layers: Layers) -> tuple[frozenset[int], ...]:
    """Per border between layers, the values that a stage in front of it sends to one behind it; no duplicated ones."""
    duplicated = _duplicated(split, argument_roots(split))
    forward_ops, _ = _by_phase(split, [p for p in split.body if not p.op.outputs or p.op.outputs[0] not in duplicated])
    expanded = _expanded(split, forward_ops)

    def sources(value: int) -> frozenset[int]:
        if value in duplicated or value in split.batch:
            return frozenset()
        return (
            frozenset([value])
            if value not in expanded
            else frozenset().union(*map(sources, block_operands(expanded[value])))
        )

    return tuple(frozenset[int]().union(*map(sources, operand_values)) for operand_values in layers.crossing)


def block_operands(placed: PlacedOp) -> list[int]:
    """Operands of which an operation reads the microbatch's block."""
    return [a for i, a in enumerate(placed.op.inputs) if isinstance(a, int) and i not in placed.outer]


def operand_values(placed: PlacedOp) -> list[int]:
    """All values that an operation reads."""
    return [a for a in placed.op.inputs if isinstance(a, int)]


def whole_operands(placed: PlacedOp) -> list[int]:
    """Operands that an operation reads whole: the same for every microbatch."""
    return [a for i, a in enumerate(placed.op.inputs) if isinstance(a, int) and i in placed.outer]


# What every reader repeats


def is_cheap(op: Op) -> bool:
    """Whether passes may repeat an operation rather than keep or send its result."""
    return op.name not in NOT_DUPLICATED and not op.regions and not op.equation.effects


def persistent_arguments(split: Microbatches) -> frozenset[int]:
    """Arguments that stages store between steps: all but the batch."""
    return frozenset(v for v in split.graph.inputs if v not in split.batch)


def argument_roots(split: Microbatches) -> Roots:
    """Whole value known before the loop -> the arguments that it is computed from."""
    roots_of = {v: frozenset([v]) for v in split.graph.inputs}
    roots_of.update((v, frozenset[int]()) for v, _ in split.flat.constants)
    for placed in split.prologue:
        read = frozenset[int]().union(*(roots_of[a] for a in placed.op.inputs if isinstance(a, int)))
        roots_of.update(dict.fromkeys(placed.op.outputs, read))
    return roots_of


def _duplicated(split: Microbatches, roots: Roots) -> Mapping[int, PlacedOp]:
    """Value computed cheaply from parameters alone, or from the batch alone -> its operation."""
    persistent = persistent_arguments(split)
    batch_roots = {v: frozenset([v]) for v in split.batch}
    duplicated: dict[int, PlacedOp] = {}
    for placed in split.body:
        op = placed.op
        if not is_cheap(op) or any(a not in batch_roots for a in block_operands(placed)):
            continue
        read = frozenset[int]().union(
            *(roots[a] for a in whole_operands(placed)), *(batch_roots[a] for a in block_operands(placed))
        )
        if read <= persistent or not read & persistent:
            batch_roots.update(dict.fromkeys(op.outputs, read))
            duplicated.update(dict.fromkeys(op.outputs, placed))
    return duplicated


def _roots_of_duplicated(duplicated: Mapping[int, PlacedOp], roots: Roots) -> Roots:
    """Result of a duplicated operation -> the arguments that it is computed from."""
    result: dict[int, frozenset[int]] = {}
    for v, placed in duplicated.items():
        read = (result.get(a) or roots.get(a, frozenset[int]()) for a in operand_values(placed))
        result[v] = frozenset[int]().union(*read)
    return result


def _expanded(split: Microbatches, forward_ops: Sequence[PlacedOp]) -> Mapping[int, PlacedOp]:
    """Value of the forward pass, computed without products from values of at most half its bytes -> its operation."""
    nbytes = [type_.nbytes for type_ in split.graph.types]
    source_values: dict[int, frozenset[int]] = {}
    expanded: dict[int, PlacedOp] = {}
    for placed in forward_ops:
        op = placed.op
        sources = frozenset[int]().union(*(source_values.get(a, frozenset([a])) for a in block_operands(placed)))
        cheap = is_cheap(op) and len(op.outputs) == 1
        if cheap and sources and 2 * sum(nbytes[v] for v in sources) <= nbytes[op.outputs[0]]:
            source_values[op.outputs[0]] = sources
            expanded[op.outputs[0]] = placed
    return expanded


# The forward pass


def _by_phase(split: Microbatches, loop: Sequence[PlacedOp]) -> tuple[list[PlacedOp], list[PlacedOp]]:
    """Operations of the forward and of the backward pass; readers of a cotangent belong to the latter."""
    backward_indices = {inner.index for op in split.graph.ops if op.phase == "backward" for inner in op.walk()}
    forward_ops: list[PlacedOp] = []
    backward_ops: list[PlacedOp] = []
    cotangents: set[int] = set()
    for placed in loop:
        is_backward = placed.op.index in backward_indices or any(a in cotangents for a in block_operands(placed))
        (backward_ops if is_backward else forward_ops).append(placed)
        cotangents.update(placed.op.outputs if is_backward else ())
    return forward_ops, backward_ops


def _stage_of_layer_ops(layers: Layers, first_layers: Sequence[int]) -> Mapping[int, int]:
    """Index of an operation in a layer, regions included -> the stage of the layer."""
    return {
        inner.index: sum(layer >= a for a in first_layers) - 1
        for layer in range(len(layers.layers))
        for op in layers.ops(layer)
        for inner in op.walk()
    }


def _forward(
    split: Microbatches, layers: Layers, first_layers: Sequence[int], forward_ops: Sequence[PlacedOp]
) -> dict[int, int]:
    """Index of a forward operation -> its stage: that of its layer, or the latest stage of its operands."""
    stage_of = _stage_of_layer_ops(layers, first_layers)
    stages: dict[int, int] = {}
    stage_of_value: dict[int, int] = {}
    for placed in forward_ops:
        op = placed.op
        operand_stages = [stage_of_value[a] for a in block_operands(placed) if a in stage_of_value]
        stage = stages[op.index] = stage_of.get(op.index, max(operand_stages, default=0))
        stage_of_value.update(dict.fromkeys(op.outputs, stage))
        latest = max(operand_stages, default=0)
        if latest > stage:
            raise GraphError(f"{op.name} in stage {stage} reads what stage {latest} makes; {op.source or 'no line'}")
    return stages


def _sole_readers(
    split: Microbatches,
    forward_ops: Sequence[PlacedOp],
    duplicated: Mapping[int, PlacedOp],
    stages: Mapping[int, int],
    roots: Roots,
) -> Mapping[int, int]:
    """Argument that only one stage reads in its forward pass -> that stage."""
    persistent = persistent_arguments(split)
    readers: dict[int, set[int]] = {}
    for placed in forward_ops:
        operands = {v for p in with_duplicated([placed], duplicated) for v in whole_operands(p)}
        for leaf in {leaf for v in operands for leaf in roots[v] & persistent}:
            readers.setdefault(leaf, set()).add(stages[placed.op.index])
    return {leaf: min(readers[leaf]) for leaf in sorted(readers) if len(readers[leaf]) == 1}


def with_duplicated(
    placed: Sequence[PlacedOp],
    duplicated: Mapping[int, PlacedOp],
    operands_of: Callable[[PlacedOp], Sequence[int]] = block_operands,
) -> list[PlacedOp]:
    """Operations and the duplicated ones that they need, in program order; `operands_of`: the operands that count."""
    by_index = {p.op.index: p for p in placed}
    waiting = list(placed)
    while waiting:
        for a in operands_of(waiting.pop()):
            if a in duplicated and duplicated[a].op.index not in by_index:
                by_index[duplicated[a].op.index] = duplicated[a]
                waiting.append(duplicated[a])
    return [by_index[i] for i in sorted(by_index)]


# The backward pass


def _backward(
    split: Microbatches,
    backward_ops: Sequence[PlacedOp],
    forward: Mapping[int, int],
    roots: Roots,
    sole_reader: Mapping[int, int],
    last_stage: int,
) -> dict[int, int]:
    """Index of an operation of the backward pass -> its stage."""
    ops = [p.op for p in (*split.body, *split.epilogue)]
    loop_values = {v for p in split.body for v in p.op.outputs}
    gradient_stage = gradients(split.graph, ops, split.flat.outputs, loop_values, sole_reader)
    stage_of_body = _stage_of_bodies(split, backward_ops, roots, sole_reader)
    forward_ops = [p for p in split.body if p.op.index in forward]
    made_in = {v: forward[p.op.index] for p in forward_ops for v in p.op.outputs}
    last_reader = dict(made_in)
    for placed in forward_ops:
        last_reader.update(
            (a, max(made_in[a], forward[placed.op.index])) for a in block_operands(placed) if a in made_in
        )
    recomputed_in: dict[int, int] = {}
    cotangent_stage: dict[int, int] = {}
    stages: dict[int, int] = {}
    before_barrier: dict[int, int] = {}  # result of a barrier -> its operand
    latest_stage: dict[int, int] = {}  # op that may move to its readers -> the last stage that has its operands
    for placed in backward_ops:
        op = placed.op
        is_repeated = op.name == BARRIER or _is_recomputed(op)
        operands = operand_values(placed) if is_repeated else [before_barrier.get(a, a) for a in operand_values(placed)]
        at_least = [sole_reader[leaf] for v in operands for leaf in sorted(roots.get(v, ())) if leaf in sole_reader]
        residual_stage = made_in if is_repeated and at_least else last_reader
        at_least += [
            stage for a in operands for table in (residual_stage, recomputed_in) if (stage := table.get(a)) is not None
        ]
        at_most = [cotangent_stage[a] for a in operands if a in cotangent_stage]
        if is_repeated and not at_most:
            at_least += stage_of_body.get(_innermost_body(split, op), ())
        at_least += [gradient_stage[v] for v in op.outputs if v in gradient_stage]
        if of_parts := _is_of_parts(split, placed):
            at_least = []
        stages[op.index] = min([max(at_least), *at_most]) if at_least else min(at_most, default=last_stage)
        if op.name == BARRIER:
            pairs = zip(op.outputs, op.inputs, strict=True)
            before_barrier.update((v, before_barrier.get(a, a)) for v, a in pairs if isinstance(a, int))
            latest_stage[op.index] = min(at_most, default=last_stage)
        elif not at_least and not of_parts and _nbytes(split, op.outputs) >= _nbytes(split, block_operands(placed)):
            latest_stage[op.index] = min(at_most, default=last_stage)
        if at_most or not is_repeated:
            cotangent_stage.update(dict.fromkeys(op.outputs, stages[op.index]))
        elif at_least:
            recomputed_in.update(dict.fromkeys(op.outputs, stages[op.index]))
    return _moved_to_last_reader(backward_ops, stages, recomputed_in, latest_stage)


def _is_of_parts(split: Microbatches, placed: PlacedOp) -> bool:
    """Whether an operation adds parts of sums, or lays one out anew: it belongs where they are accumulated."""
    operands = block_operands(placed)
    is_linear = placed.op.name in (*ADDITIONS, *RELAYOUTS)
    return is_linear and bool(operands) and all(isinstance(split.states[a], Partial) for a in operands)


def _nbytes(split: Microbatches, values: Sequence[int]) -> int:
    return sum(split.graph.types[v].nbytes for v in {*values})


def _is_recomputed(op: Op) -> bool:
    return jax_compat.is_rematted(op.name_stack)


def _innermost_body(split: Microbatches, op: Op) -> int:
    """Index of the innermost rematerialised region around an operation, -1 if there is none."""
    enclosing = split.flat.remat.get(op.index, ())
    return enclosing[-1].index if enclosing else -1


def _stage_of_bodies(
    split: Microbatches, backward_ops: Sequence[PlacedOp], roots: Roots, sole_reader: Mapping[int, int]
) -> Mapping[int, tuple[int, ...]]:
    """Rematerialised region that reads parameters of one stage only -> that stage."""
    stages_read: dict[int, set[int]] = {}
    for placed in backward_ops:
        if _is_recomputed(placed.op):
            read = {sole_reader[leaf] for v in whole_operands(placed) for leaf in roots[v] if leaf in sole_reader}
            stages_read.setdefault(_innermost_body(split, placed.op), set()).update(read)
    return {body: tuple(stages) for body, stages in stages_read.items() if len(stages) == 1}


def _moved_to_last_reader(
    backward_ops: Sequence[PlacedOp],
    stages: dict[int, int],
    recomputed_in: Mapping[int, int],
    latest_stage: Mapping[int, int],
) -> dict[int, int]:
    """The stages, with rematerialised and untied operations moved to their last reader."""
    readers: dict[int, int] = {}
    for placed in reversed(backward_ops):
        op = placed.op
        if read_in := [readers[v] for v in op.outputs if v in readers]:
            if op.index in latest_stage:
                stages[op.index] = min(latest_stage[op.index], max(read_in))
            elif any(v in recomputed_in for v in op.outputs):
                stages[op.index] = max(stages[op.index], *read_in)
            elif _is_recomputed(op):
                stages[op.index] = min(stages[op.index], max(read_in))
        for a in block_operands(placed):
            readers[a] = max(readers.get(a, 0), stages[op.index])
    return stages


def _deferred(
    loop: Sequence[PlacedOp], stages: Mapping[int, int], totals: Sequence[AccumulatedValue]
) -> tuple[tuple[PlacedOp, ...], tuple[AccumulatedValue, ...]]:
    """Sums of totals of different stages, which run after the loop, and the totals that the loop then gives.

    A sum that the loop reads stays in it, as where the one microbatch of a step has the update in its loop.
    """
    made_in = {v: stages[p.op.index] for p in loop for v in p.op.outputs}
    spans_stages: set[int] = set()
    # sums of values of different stages, and sums of such sums
    for op in (p.op for p in loop if p.op.name in ADDITIONS):
        parts = [a for a in op.inputs if a in made_in]
        if len({made_in[a] for a in parts if isinstance(a, int)}) > 1 or any(a in spans_stages for a in parts):
            spans_stages.update(op.outputs)
    totals_left = {t.value: t for t in totals}
    deferred: list[PlacedOp] = []
    read_in_loop: set[int] = set()
    # readers first: a deferred sum makes totals of its operands, which may be such sums themselves
    for placed in reversed(loop):
        op = placed.op
        if (
            op.outputs
            and op.outputs[0] in spans_stages
            and op.outputs[0] in totals_left
            and totals_left[op.outputs[0]].combine == "sum"
            and op.outputs[0] not in read_in_loop
        ):
            del totals_left[op.outputs[0]]
            totals_left.update((a, AccumulatedValue(a, "sum")) for a in op.inputs if isinstance(a, int))
            deferred.append(PlacedOp(op, frozenset(range(len(op.inputs)))))
        else:
            read_in_loop.update(block_operands(placed))
    return tuple(deferred[::-1]), tuple(totals_left[v] for v in sorted(totals_left))


def _weight_pass_ops(
    split: Microbatches, backward_ops: Sequence[PlacedOp], stages: Mapping[int, int], totals: set[int]
) -> frozenset[int]:
    """Indices of the operations that make partial sums, or values that only these read within their stage."""
    put_off: set[int] = set()
    reader_stages: dict[int, set[int]] = {}
    read_by_b = -1
    # readers first, since it depends on them whether an operation can wait
    for placed in reversed(backward_ops):
        op, stage = placed.op, stages[placed.op.index]
        partial = any(isinstance(split.states[v], Partial) for v in op.outputs)
        light = op.name not in NOT_DUPLICATED and not op.regions and not totals & {*op.outputs}
        read = set[int]().union(*(reader_stages.get(v, set()) for v in op.outputs))
        # a partial sum waits if no other stage reads it; what else waits is read by what waits alone
        is_put_off = (partial and read <= {stage}) or (light and read == {stage})
        if is_put_off:
            put_off.add(op.index)
        for a in block_operands(placed):
            reader_stages.setdefault(a, set()).add(stage if is_put_off else read_by_b)
    return frozenset(put_off)
