"""A train step as programs of stages, run before the loop over microbatches, per microbatch, and after it.

    prologue    once: values that are the same for all microbatches, for the passes -> Stage.prologue
    F, B, W     per microbatch: forward and backward pass, and gradients of weights -> Stage.passes, assign.py
    update      once: operations on totals                                          -> Stages.updates, updates.py

A value of the microbatch that F leaves for B or W of the same stage is its stash. A value for another stage is sent
with the pass that computes it, or with B, which has it in its stash:

    F of stage a to F, B or W of stage b, a < b     sent with F of a; it stays in the stash until B of b
    B of stage b to B or W of stage a, a < b        sent with B of b
    F of stage b to B of stage a, a < b             sent with B of b

It goes from producer to reader directly, however many stages are between them: skip connections are borders of their
own, as in `autopar.schedules`. Any other transfer would make an earlier stage wait for a later one and raises an error
                                                                                                    -> _routes
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from autopar.errors import ArgumentError, MicrobatchError
from autopar.ir.graph import Op
from autopar.ir.keyed import grouped
from autopar.passes.layers.find import Layers
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.programs import AccumulatedValue, PlacedOp
from autopar.passes.stages import accumulation_loop
from autopar.passes.stages import assign as stage_passes
from autopar.passes.stages import updates as stage_updates
from autopar.passes.stages.assign import PassAssignment, StagePass
from autopar.passes.stages.updates import Updates
from autopar.schedules.instructions import Kind

PASS_KINDS: tuple[Kind, ...] = ("F", "B", "W")


class Transfer(NamedTuple):
    """Values that one stage sends another with a pass; `kind` is F or B, as in an instruction `F0.2>1`."""

    kind: Kind
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One pass of a stage over one microbatch.

    Attributes:
        ops: operations on blocks, duplicated ones included.
        whole: values that it reads whole, without constants.
        blocks: arguments of which it reads the microbatch's block.
        reads: values of the microbatch that other passes compute.
        writes: values that other passes read.
        totals: sums, and other totals, to which it contributes a part.
    """

    ops: tuple[PlacedOp, ...]
    whole: tuple[int, ...]
    blocks: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    totals: tuple[AccumulatedValue, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One stage.

    Attributes:
        prologue: operations on whole values, once per step.
        arguments: arguments that prologue and passes read whole.
        passes: by kind.
    """

    prologue: tuple[PlacedOp, ...]
    arguments: tuple[int, ...]
    passes: Mapping[Kind, Pass]

    def live_after(self, kind: Kind) -> frozenset[int]:
        """Values of a microbatch that are live after a pass: later passes of the stage read them."""
        return frozenset(v for later in PASS_KINDS[PASS_KINDS.index(kind) + 1 :] for v in self.passes[later].reads)


@dataclass(frozen=True, eq=False)
class Stages:
    """A step divided into stages.

    Attributes:
        split: the step in microbatches.
        stages: in the order of the forward pass.
        transfers: values that stages send each other per microbatch.
        updates: operations that run once per step, and the stage that stores each argument.
        first_loop: a loop over the microbatches that runs first; its totals are further arguments of this step.
    """

    split: Microbatches
    stages: tuple[Stage, ...]
    transfers: Mapping[Transfer, tuple[int, ...]]
    updates: Updates
    first_loop: Stages | None = None

    @cached_property
    def borders(self) -> tuple[tuple[int, int], ...]:
        """(a, b), a < b: pairs of stages with a transfer between them, as `autopar.schedules.make` takes them."""
        chain = [(a, a + 1) for a in range(len(self.stages) - 1)]
        return tuple(sorted({*chain, *((min(h[1:]), max(h[1:])) for h in self.transfers)}))

    def __str__(self) -> str:
        return "\n".join(_print(self)) + "\n"


def divide(split: Microbatches, layers: Layers, borders: Sequence[int], *, weights: bool = False) -> Stages:
    """Divides a step into stages.

    Args:
        split: the step in microbatches.
        layers: its layers.
        borders: the first layer of every stage but the first, ascending.
        weights: gradients of weights get a pass W of their own.

    Raises:
        ArgumentError: borders that are not ascending layers.
        MicrobatchError: the step needs two loops over its microbatches, the first with a backward pass, or an operation
            ties gradients of several stages together.
        GraphError: an earlier stage would read a value that a later one computes.
    """
    first_layers = (0, *borders)
    count = len(layers.layers)
    if any(a >= b for a, b in itertools.pairwise((*first_layers, count))):
        raise ArgumentError(f"borders {tuple(borders)} do not cut {count} layers: use ascending numbers 1..{count - 1}")
    if len(split.loops) == 1:
        return _divide(split, layers, first_layers, weights)
    before, after = accumulation_loop.separate_loops(split)
    first_loop = _divide(before, layers, first_layers, False)
    if _has_backward(first_loop):
        totals = after.graph.inputs[len(split.graph.inputs) :]
        if _has_backward(_divide(after, layers, (0,), False)):
            passes, instead = "two backward passes", "write the step with one backward pass"
        else:
            passes, instead = "a backward pass and a second pass", "leave the second pass to a function of its own"
        raise MicrobatchError(
            f"a step with {passes} over its {split.count} microbatches cannot be cut into {len(first_layers)} stages: "
            f"{_second_pass(after, totals)}. Use one mesh with num_microbatches={split.count} (leave out stages and "
            f"schedule), or {instead}."
        )
    return replace(_divide(after, layers, first_layers, weights), first_loop=first_loop)


def needs_two_backward_passes(split: Microbatches, layers: Layers) -> bool:
    """Whether a step needs two loops over its microbatches, both with backward passes, which no stages have."""
    if len(split.loops) == 1:
        return False
    before, _ = accumulation_loop.separate_loops(split)
    return _has_backward(_divide(before, layers, (0,), False))


def _has_backward(stages: Stages) -> bool:
    return any(stage.passes["B"].ops for stage in stages.stages)


def _second_pass(after: Microbatches, totals: Sequence[int]) -> str:
    """The first operation of the second loop that reads a total of the first, in words, if one has a source line."""
    from_totals = {*totals}
    for placed in after.prologue:
        if not from_totals.isdisjoint(a for a in placed.op.inputs if isinstance(a, int)):
            from_totals.update(placed.op.outputs)
    readers = (p.op for p in after.body if not from_totals.isdisjoint(stage_passes.whole_operands(p)))
    op = next((op for op in readers if op.source), None)
    reader = "the second" if op is None else f"{op.name} at {op.source}, in the second,"
    return f"{reader} reads what the first gives for the whole batch"


def _divide(split: Microbatches, layers: Layers, first_layers: Sequence[int], weights: bool) -> Stages:
    passes = stage_passes.assign(split, layers, first_layers, weights=weights)
    keys: list[StagePass] = [(stage, kind) for stage in range(len(first_layers)) for kind in PASS_KINDS]
    own: dict[StagePass, list[PlacedOp]] = {key: [] for key in keys}
    for placed in split.body:
        if (key := passes.pass_of.get(placed.op.index)) is not None:
            own[key].append(placed)
    ops = {key: _ops(passes, key, own[key], len(first_layers) - 1) for key in keys}
    transfers, reads, writes = _routes(passes, ops)
    pass_at = {
        (s, k): _pass(split, passes, ops[s, k], reads[s, k], writes[s, k], s, k, len(first_layers)) for s, k in keys
    }
    stages = tuple(_stage(split, {k: pass_at[s, k] for k in PASS_KINDS}) for s in range(len(first_layers)))
    reading_stages = grouped((v, s) for s, stage in enumerate(stages) for v in stage.arguments)
    return Stages(split, stages, transfers, stage_updates.assign(split, passes, reading_stages, len(first_layers)))


def _ops(passes: PassAssignment, key: StagePass, own: Sequence[PlacedOp], last: int) -> list[PlacedOp]:
    """Operations of one pass, which has these of its own; the last stage computes totals that are duplicated ones."""
    ops = [*own]
    if key == (last, "F"):
        duplicated = {
            passes.duplicated[t.value].op.index: passes.duplicated[t.value]
            for t in passes.totals
            if t.value in passes.duplicated
        }
        ops.extend(duplicated[i] for i in sorted(duplicated))
    return stage_passes.with_duplicated(ops, {**passes.expanded, **passes.duplicated})


def _routes(
    passes: PassAssignment, ops: Mapping[StagePass, Sequence[PlacedOp]]
) -> tuple[Mapping[Transfer, tuple[int, ...]], Mapping[StagePass, set[int]], Mapping[StagePass, set[int]]]:
    """The transfers, and the values that every pass reads of others and writes for others."""
    transfers: dict[Transfer, set[int]] = {}
    reads: dict[StagePass, set[int]] = {key: set() for key in ops}
    writes: dict[StagePass, set[int]] = {key: set() for key in ops}
    for key, placed in ops.items():
        own_results = {v for p in placed for v in p.op.outputs}
        for value in sorted(
            {a for p in placed for a in stage_passes.block_operands(p) if a in passes.computed_in} - own_results
        ):
            source = passes.computed_in[value]
            reads[key].add(value)
            writes[source].add(value)
            if source[0] != key[0]:
                transfer = _transfer(source, key)
                if transfer is None:
                    raise MicrobatchError(_made_later(ops, source, key, value))
                transfers.setdefault(transfer, set()).add(value)
                if source[1] == "F" and source[0] > key[0]:
                    reads[source[0], "B"].add(value)
    return {transfer: tuple(sorted(transfers[transfer])) for transfer in sorted(transfers)}, reads, writes


def _transfer(source: StagePass, target: StagePass) -> Transfer | None:
    """The transfer by which a value reaches another stage; None where the other stage's pass runs first."""
    (a, produced), (b, read) = source, target
    if produced == "F" and a < b:
        return Transfer("F", a, b)
    if produced != "W" and read != "F" and a > b:
        return Transfer("B", a, b)
    return None


def _made_later(ops: Mapping[StagePass, Sequence[PlacedOp]], source: StagePass, target: StagePass, value: int) -> str:
    """Why a step has no such stages, with the operation that reads a value too early and the one that makes it."""
    maker = next(p.op for p in ops[source] if value in p.op.outputs)
    reader = next(p.op for p in ops[target] if value in stage_passes.block_operands(p))
    (a, produced), (b, read) = source, target
    return (
        f"the step cannot be cut into stages here: {_at(reader)}, in pass {read} of stage {b}, reads what {_at(maker)} "
        f"makes, in pass {produced} of stage {a}, which runs later. An operation with several results, such as "
        "jax.lax.optimization_barrier, makes them in one stage: give values of several layers one each, use another "
        "number of stages, or one mesh (leave out stages and schedule)."
    )


def _at(op: Op) -> str:
    return f"{op.name} at {op.source}" if op.source else op.name


def _pass(
    split: Microbatches,
    passes: PassAssignment,
    ops: Sequence[PlacedOp],
    reads: set[int],
    writes: set[int],
    stage: int,
    kind: Kind,
    stages: int,
) -> Pass:
    constants = {v for v, _ in split.flat.constants}
    whole = {v for p in ops for v in stage_passes.whole_operands(p)} - constants
    blocks = {v for p in ops for v in stage_passes.block_operands(p) if v in split.batch}
    totals = [t for t in passes.totals if passes.computed_in.get(t.value, (stages - 1, "F")) == (stage, kind)]
    return Pass(
        tuple(ops),
        tuple(sorted(whole)),
        tuple(sorted(blocks)),
        tuple(sorted(reads)),
        tuple(sorted(writes)),
        tuple(totals),
    )


def _stage(split: Microbatches, passes: Mapping[Kind, Pass]) -> Stage:
    """A stage with the prologue that its passes need."""
    needed = {v for pass_ in passes.values() for v in pass_.whole}
    prologue: list[PlacedOp] = []
    for placed in reversed(split.prologue):
        if any(v in needed for v in placed.op.outputs):
            prologue.append(placed)
            needed.update(a for a in placed.op.inputs if isinstance(a, int))
    return Stage(tuple(prologue[::-1]), tuple(v for v in split.graph.inputs if v in needed), passes)


# Printing


def _values(values: Sequence[int]) -> str:
    return ", ".join(f"%{v}" for v in values) or "nothing"


def _names(ops: Sequence[PlacedOp]) -> str:
    return " ".join(p.op.name for p in ops) or "nothing"


def _print(step: Stages) -> Iterator[str]:
    names = step.split.graph.names
    for number, stage in enumerate(step.stages):
        stored = [v for v, owner in step.updates.owners.items() if owner == number]
        yield f"stage {number} holds {', '.join(names[v] for v in stored) or 'nothing'}"
        if stage.prologue:
            yield f"  once: {_names(stage.prologue)}"
        for kind, pass_ in stage.passes.items():
            if pass_.ops or pass_.totals:
                yield f"  {kind}: {_names(pass_.ops)}"
                yield f"    reads {', '.join(names[v] for v in pass_.blocks) or 'no batch'}; {_values(pass_.reads)}"
                yield f"    leaves {_values(pass_.writes)}; adds up {_values([t.value for t in pass_.totals])}"
    for transfer, values in step.transfers.items():
        yield f"{transfer.kind} of stage {transfer.source} to stage {transfer.target}: {_values(values)}"
    for update in step.updates.programs:
        yield f"update of stage {update.stage}, round {update.round}: {_names(update.ops)}"
        yield f"  reads {_values((*(t.value for t in update.totals), *update.reads))}; makes {_values(update.writes)}"
