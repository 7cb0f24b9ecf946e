"""A train step as programs of stages: what each runs before the loop over microbatches, per microbatch, and after it.

    prologue    once: whole values that passes read                                 -> Stage.prologue
    F, B, W     per microbatch: forward and backward pass, and gradients of weights -> Stage.passes, assign.py
    update      once: what the stage does with totals                               -> Stages.updates, updates.py

A value of the microbatch that F leaves for B or W of the same stage is its stash. A value for another stage is handed
over by the pass that makes it,

    F of stage a to F, B or W of stage b, a < b     with F of a, and B of b keeps it until then
    B of stage b to B or W of stage a, a < b        with B of b
    F of stage b to B of stage a, a < b             with B of b, which had it in its stash

from producer to reader directly, however many stages are between: skip connections are borders of their own, as in
`autopar.schedules`. Anything else would need an earlier stage to wait for a later one and is refused       -> _routes
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from autopar.errors import ArgumentError, GraphError, MicrobatchError
from autopar.passes.layers.find import Layers
from autopar.passes.microbatch.analysis import Microbatches
from autopar.passes.microbatch.programs import Placed, Total
from autopar.passes.stages import accumulation_loop
from autopar.passes.stages import assign as stage_passes
from autopar.passes.stages import updates as stage_updates
from autopar.passes.stages.assign import Passes, Place
from autopar.passes.stages.updates import Updates
from autopar.schedules.instructions import Kind

KINDS: tuple[Kind, ...] = ("F", "B", "W")


class Hand(NamedTuple):
    """What a pass hands over: `kind` is F or B, as in an instruction `F0.2>1`."""

    kind: Kind
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What a stage runs per microbatch in one of its passes.

    Attributes:
        ops: operations on blocks, those that every reader repeats included.
        whole: whole values that it reads; constants are not among them.
        blocks: arguments of which it reads the microbatch's block.
        reads: values of the microbatch that other passes make.
        writes: values that other passes read.
        totals: what it gives a part of.
    """

    ops: tuple[Placed, ...]
    whole: tuple[int, ...]
    blocks: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    totals: tuple[Total, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One stage.

    Attributes:
        prologue: operations on whole values, once per step.
        arguments: arguments that prologue and passes read whole.
        passes: by kind.
    """

    prologue: tuple[Placed, ...]
    arguments: tuple[int, ...]
    passes: Mapping[Kind, Pass]

    def kept(self, kind: Kind) -> frozenset[int]:
        """Values of a microbatch that passes after this one read."""
        return frozenset(v for later in KINDS[KINDS.index(kind) + 1 :] for v in self.passes[later].reads)


@dataclass(frozen=True, eq=False)
class Stages:
    """A step in stages.

    Attributes:
        split: the step in microbatches.
        stages: in the order of the forward pass.
        hands: what is handed over per microbatch.
        updates: what runs once per step, and which stage holds which argument.
        before: a loop over the microbatches that comes first, and gives totals that are further arguments of this one.
    """

    split: Microbatches
    stages: tuple[Stage, ...]
    hands: Mapping[Hand, tuple[int, ...]]
    updates: Updates
    before: Stages | None = None

    @cached_property
    def borders(self) -> tuple[tuple[int, int], ...]:
        """(a, b), a < b: stages between which something is handed over, as `autopar.schedules.make` takes them."""
        chain = [(a, a + 1) for a in range(len(self.stages) - 1)]
        return tuple(sorted({*chain, *((min(h[1:]), max(h[1:])) for h in self.hands)}))

    def __str__(self) -> str:
        return "\n".join(_print(self)) + "\n"


def divide(split: Microbatches, layers: Layers, borders: Sequence[int], *, weights: bool = False) -> Stages:
    """A step in stages.

    Args:
        split: the step in microbatches.
        layers: its layers.
        borders: the first layer of every stage but the first, ascending.
        weights: gradients of weights get a pass W of their own.

    Raises:
        ArgumentError: borders that are no ascending layers.
        MicrobatchError: the step needs two loops over its microbatches, both with backward passes.
        GraphError: an earlier stage would need what a later one makes.
    """
    first = (0, *borders)
    count = len(layers.layers)
    if any(a >= b for a, b in itertools.pairwise((*first, count))):
        raise ArgumentError(f"borders {tuple(borders)} do not cut {count} layers: use ascending numbers 1..{count - 1}")
    if len(split.sweeps) == 1:
        return _divide(split, layers, first, weights)
    before, after = accumulation_loop.apart(split)
    found = _divide(before, layers, first, False)
    if any(stage.passes["B"].ops for stage in found.stages):
        raise MicrobatchError("a step with two backward passes over its microbatches cannot be cut into stages")
    return replace(_divide(after, layers, first, weights), before=found)


def _divide(split: Microbatches, layers: Layers, first: Sequence[int], weights: bool) -> Stages:
    passes = stage_passes.assign(split, layers, first, weights=weights)
    keys: list[Place] = [(stage, kind) for stage in range(len(first)) for kind in KINDS]
    ops = {key: _ops(split, passes, key, len(first) - 1) for key in keys}
    hands, reads, writes = _routes(passes, ops)
    stages = tuple(
        _stage(split, {k: _pass(split, passes, ops[s, k], reads[s, k], writes[s, k], s, k, len(first)) for k in KINDS})
        for s in range(len(first))
    )
    read_in = {v: [s for s, stage in enumerate(stages) if v in stage.arguments] for v in split.graph.inputs}
    return Stages(split, stages, hands, stage_updates.assign(split, passes, read_in, len(first)))


def _ops(split: Microbatches, passes: Passes, key: Place, last: int) -> list[Placed]:
    """Operations of one pass; totals that anyone could make are the last stage's."""
    mine = [p for p in split.loop if passes.places.get(p.op.index) == key]
    if key == (last, "F"):
        extra = {passes.free[t.value].op.index: passes.free[t.value] for t in passes.totals if t.value in passes.free}
        mine.extend(extra[i] for i in sorted(extra))
    return stage_passes.cone(mine, {**passes.thin, **passes.free})


def _routes(
    passes: Passes, ops: Mapping[Place, Sequence[Placed]]
) -> tuple[Mapping[Hand, tuple[int, ...]], Mapping[Place, set[int]], Mapping[Place, set[int]]]:
    """What is handed over, and what every pass reads of others and leaves to others."""
    hands: dict[Hand, set[int]] = {}
    reads: dict[Place, set[int]] = {key: set() for key in ops}
    writes: dict[Place, set[int]] = {key: set() for key in ops}
    for key, placed in ops.items():
        own = {v for p in placed for v in p.op.outputs}
        for value in sorted({a for p in placed for a in stage_passes.local(p) if a in passes.made} - own):
            source = passes.made[value]
            reads[key].add(value)
            writes[source].add(value)
            if source[0] != key[0]:
                hands.setdefault(_hand(source, key, value), set()).add(value)
                if source[1] == "F" and source[0] > key[0]:
                    reads[source[0], "B"].add(value)
    return {hand: tuple(sorted(hands[hand])) for hand in sorted(hands)}, reads, writes


def _hand(source: Place, target: Place, value: int) -> Hand:
    """The transfer by which a value reaches another stage."""
    (a, made), (b, read) = source, target
    if made == "F" and a < b:
        return Hand("F", a, b)
    if made != "W" and read != "F" and a > b:
        return Hand("B", a, b)
    raise GraphError(f"pass {read} of stage {b} reads %{value}, which pass {made} of stage {a} makes later")


def _pass(
    split: Microbatches,
    passes: Passes,
    ops: Sequence[Placed],
    reads: set[int],
    writes: set[int],
    stage: int,
    kind: Kind,
    stages: int,
) -> Pass:
    constants = {v for v, _ in split.flat.constants}
    whole = {v for p in ops for v in stage_passes.whole(p)} - constants
    blocks = {v for p in ops for v in stage_passes.local(p) if v in split.batch}
    totals = [t for t in passes.totals if passes.made.get(t.value, (stages - 1, "F")) == (stage, kind)]
    return Pass(
        tuple(ops),
        tuple(sorted(whole)),
        tuple(sorted(blocks)),
        tuple(sorted(reads)),
        tuple(sorted(writes)),
        tuple(totals),
    )


def _stage(split: Microbatches, passes: Mapping[Kind, Pass]) -> Stage:
    """A stage with what its passes need before the loop."""
    wanted = {v for one in passes.values() for v in one.whole}
    found: list[Placed] = []
    for placed in reversed(split.prologue):
        if any(v in wanted for v in placed.op.outputs):
            found.append(placed)
            wanted.update(a for a in placed.op.inputs if isinstance(a, int))
    return Stage(tuple(found[::-1]), tuple(v for v in split.graph.inputs if v in wanted), passes)


# Printing


def _values(values: Sequence[int]) -> str:
    return ", ".join(f"%{v}" for v in values) or "nothing"


def _names(ops: Sequence[Placed]) -> str:
    return " ".join(p.op.name for p in ops) or "nothing"


def _print(found: Stages) -> Iterator[str]:
    names = found.split.graph.names
    for number, stage in enumerate(found.stages):
        held = [v for v, home in found.updates.homes.items() if home == number]
        yield f"stage {number} holds {', '.join(names[v] for v in held) or 'nothing'}"
        if stage.prologue:
            yield f"  once: {_names(stage.prologue)}"
        for kind, one in stage.passes.items():
            if one.ops or one.totals:
                yield f"  {kind}: {_names(one.ops)}"
                yield f"    reads {', '.join(names[v] for v in one.blocks) or 'no batch'}; {_values(one.reads)}"
                yield f"    leaves {_values(one.writes)}; adds up {_values([t.value for t in one.totals])}"
    for hand, values in found.hands.items():
        yield f"{hand.kind} of stage {hand.source} to stage {hand.target}: {_values(values)}"
    for update in found.updates.programs:
        yield f"update of stage {update.stage}, round {update.round}: {_names(update.ops)}"
        yield f"  reads {_values((*(t.value for t in update.totals), *update.reads))}; makes {_values(update.writes)}"
