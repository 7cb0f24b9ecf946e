"""Which stage runs an operation after the loop over microbatches: every stage updates the parameters that it holds.

Totals lie where they were accumulated, parameters in the first stage whose passes read them. From there,

    an operation runs where its weightiest operand lies, at equal weights in the earliest stage; scalars of several
    stages, such as the squares in a global norm, meet in stage 0                                   -> _ahead
    what reads nothing that has a place runs where its weightiest reader does, and so lie moments and other arguments
    that no pass reads                                                                              -> _behind

until all have one. A value weighs its bytes, and no more than all that it was made of: a scalar spread over a gradient
weighs what the scalar does, and is spread where it is read. What is so spread is repeated by every reader, and so is
what is made of constants or the batch                                                          -> _free

What crosses between stages here are scalars, the gradients of tied weights, and little else. An operation that reads
something from another stage stands one round after it; a stage runs one program per round          -> Update.round
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Atom
from autopar.passes.microbatch.analysis import Microbatches
from autopar.passes.microbatch.programs import Placed, Total
from autopar.passes.stages.assign import KEPT, Passes, cone, held, values

#: Operations that show a value in another shape or type, and may make more of it.
SPREAD = ("broadcast_in_dim", "iota", "convert_element_type", "reshape", "squeeze", "expand_dims")


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What a stage runs once per step, in one round.

    Attributes:
        stage, round: whose it is, and when: after what it reads of earlier rounds.
        ops: operations on whole values.
        arguments: arguments of the step that it reads.
        totals: totals of the loop that it reads, of any stage.
        reads: values of other updates.
        writes: values that others read, and results of the step.
    """

    stage: int
    round: int
    ops: tuple[Placed, ...]
    arguments: tuple[int, ...]
    totals: tuple[Total, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Updates:
    """The updates of all stages, in an order in which they can run.

    Attributes:
        programs: by round, then by stage.
        homes: argument that is no batch -> the stage that holds it.
        made: value -> the number of the program that makes it.
    """

    programs: tuple[Update, ...]
    homes: Mapping[int, int]
    made: Mapping[int, int]


def assign(split: Microbatches, passes: Passes, read_in: Mapping[int, Sequence[int]], stages: int) -> Updates:
    """Where the operations after the loop run.

    Args:
        split: the step in microbatches, in one loop.
        passes: its loop by stages.
        read_in: argument -> stages whose passes read it.
        stages: how many there are.
    """
    ops = _needed(split, passes)
    arguments = held(split)
    at = {t.value: passes.made.get(t.value, (stages - 1, "F"))[0] for t in passes.totals}
    at.update((v, min(read_in[v])) for v in sorted(arguments) if read_in.get(v))
    weight = _weights(split, ops, arguments, passes.totals)
    free = _free(split, ops, weight)
    fixed = [p for p in ops if not p.op.outputs or p.op.outputs[0] not in free]
    reads = {p.op.index: _through(p.op.inputs, free) for p in fixed}
    movable = arguments | {v for p in fixed for v in p.op.outputs} | at.keys()
    before = -1
    while len(at) > before:
        before = len(at)
        _ahead(split, fixed, reads, weight, at)
        if len(at) == before:
            _behind(fixed, reads, weight, movable, at)
    homes = {v: at.get(v, 0) for v in sorted(arguments)}
    return _programs(split, passes, fixed, free, reads, at, homes)


def _needed(split: Microbatches, passes: Passes) -> list[Placed]:
    """Operations after the loop, with those before it whose results they read or hand out."""
    known = {t.value for t in passes.totals} | {v for v, _ in split.flat.constants} | {*split.graph.inputs}
    wanted: set[Atom] = {a for a in split.flat.outputs if a not in known}
    found: list[Placed] = []
    everything = {p.op.index: p for p in (*split.prologue, *passes.deferred, *split.epilogue)}
    for index in sorted(everything, reverse=True):
        placed = everything[index]
        if placed.op.equation.effects or any(v in wanted for v in placed.op.outputs):
            found.append(placed)
            wanted.update(a for a in placed.op.inputs if isinstance(a, int) and a not in known)
    return found[::-1]


def _weights(
    split: Microbatches, ops: Sequence[Placed], arguments: frozenset[int], totals: Sequence[Total]
) -> Mapping[int, int]:
    """Bytes of a value, and no more than what it was made of."""
    types = split.graph.types
    found = {v: types[v].nbytes for v in (*arguments, *(t.value for t in totals))}
    for placed in ops:
        read = sum(found.get(a, 0) for a in placed.op.inputs if isinstance(a, int))
        found.update((v, min(types[v].nbytes, read)) for v in placed.op.outputs)
    return found


def _free(split: Microbatches, ops: Sequence[Placed], weight: Mapping[int, int]) -> Mapping[int, Placed]:
    """Values that every reader makes for itself, and how."""
    types = split.graph.types
    results = set(split.flat.outputs)
    free: dict[int, Placed] = {}
    for placed in ops:
        op = placed.op
        spread = op.name in SPREAD and all(2 * weight[v] <= types[v].nbytes for v in op.outputs)
        of_nothing = op.name not in KEPT and not op.regions and not any(weight[v] for v in op.outputs)
        if (spread or of_nothing) and not op.equation.effects and not results & {*op.outputs}:
            free.update(dict.fromkeys(op.outputs, placed))
    return free


def _through(atoms: Sequence[Atom], free: Mapping[int, Placed]) -> tuple[int, ...]:
    """The values behind operands, free operations looked through."""
    seen: dict[int, None] = {}
    waiting = [a for a in reversed(atoms) if isinstance(a, int)]
    while waiting:
        value = waiting.pop()
        if value not in seen and value in free:
            waiting.extend(a for a in reversed(free[value].op.inputs) if isinstance(a, int))
        seen[value] = None
    return tuple(v for v in seen if v not in free)


def _ahead(
    split: Microbatches,
    ops: Sequence[Placed],
    reads: Mapping[int, Sequence[int]],
    weight: Mapping[int, int],
    at: dict[int, int],
) -> None:
    """Place what reads something that has a place."""
    types = split.graph.types
    for placed in ops:
        op = placed.op
        known = [v for v in reads[op.index] if v in at]
        if not known or not op.outputs or op.outputs[0] in at:
            continue
        scalars = not any(types[v].rank for v in (*reads[op.index], *op.outputs))
        several = len({at[v] for v in known}) > 1
        stage = 0 if scalars and several else min((-weight[v], at[v]) for v in known)[1]
        at.update(dict.fromkeys(op.outputs, stage))


def _behind(
    ops: Sequence[Placed],
    reads: Mapping[int, Sequence[int]],
    weight: Mapping[int, int],
    movable: frozenset[int],
    at: dict[int, int],
) -> None:
    """Place what has none where its weightiest reader is; where nothing reads it, in stage 0."""
    best: dict[int, tuple[int, int]] = {}
    for placed in reversed(ops):
        op = placed.op
        if op.outputs and op.outputs[0] not in at:
            claims = [best[v] for v in op.outputs if v in best]
            if claims:
                at.update(dict.fromkeys(op.outputs, min(claims)[1]))
        for v in reads[op.index]:
            if op.outputs and op.outputs[0] in at and v in movable:
                claim = (-max(weight[u] for u in op.outputs), at[op.outputs[0]])
                best[v] = min(best.get(v, claim), claim)
    at.update((v, stage) for v, (_, stage) in best.items() if v not in at)


def _programs(
    split: Microbatches,
    passes: Passes,
    ops: Sequence[Placed],
    free: Mapping[int, Placed],
    reads: Mapping[int, Sequence[int]],
    at: Mapping[int, int],
    homes: Mapping[int, int],
) -> Updates:
    totals = {t.value: t for t in passes.totals}
    made_by = {v: p for p in ops for v in p.op.outputs}
    place = _rounds(ops, reads, at)
    results = dict.fromkeys(v for v in split.flat.outputs if isinstance(v, int))
    direct = {v: (0, at[v]) for v in results if v in totals}
    by_spot: dict[tuple[int, int], list[Placed]] = {spot: [] for spot in sorted({*place.values(), *direct.values()})}
    read_at: dict[int, dict[tuple[int, int], None]] = {}
    for p in ops:
        by_spot[place[p.op.index]].append(p)
        for v in reads[p.op.index]:
            read_at.setdefault(v, {})[place[p.op.index]] = None
    programs: list[Update] = []
    for (when, stage), mine in by_spot.items():
        own = {v for p in mine for v in p.op.outputs}
        behind = sorted({v for p in mine for v in reads[p.op.index]} - own)
        given = [v for v in sorted(own) if v in results or {*read_at.get(v, ())} - {(when, stage)}]
        given += [v for v in results if direct.get(v) == (when, stage)]
        programs.append(
            Update(
                stage,
                when,
                tuple(cone(mine, free, values)),
                tuple(v for v in behind if v in split.graph.names),
                tuple(totals[v] for v in dict.fromkeys((*behind, *given)) if v in totals),
                tuple(v for v in behind if v in made_by),
                tuple(given),
            )
        )
    made = {v: i for i, program in enumerate(programs) for v in program.writes}
    return Updates(tuple(programs), homes, made)


def _rounds(
    ops: Sequence[Placed], reads: Mapping[int, Sequence[int]], at: Mapping[int, int]
) -> Mapping[int, tuple[int, int]]:
    """(round, stage) of every operation, by index: as late as its readers allow, so that little is held between."""
    stage_of = {p.op.index: next((at[v] for v in p.op.outputs if v in at), 0) for p in ops}
    soonest: dict[int, int] = {}
    maker = {v: p.op.index for p in ops for v in p.op.outputs}
    for placed in ops:
        index = placed.op.index
        sources = [maker[v] for v in reads[index] if v in maker]
        soonest[index] = max((soonest[i] + (stage_of[i] != stage_of[index]) for i in sources), default=0)
    last: dict[int, int] = {}
    for index, when in soonest.items():
        last[stage_of[index]] = max(last.get(stage_of[index], 0), when)
    latest = {index: last[stage] for index, stage in stage_of.items()}
    for placed in reversed(ops):
        index = placed.op.index
        for source in (maker[v] for v in reads[index] if v in maker):
            latest[source] = min(latest[source], latest[index] - (stage_of[source] != stage_of[index]))
    return {index: (latest[index], stage) for index, stage in stage_of.items()}
