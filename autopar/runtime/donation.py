"""Which arguments the updates take over: new state is written where old state was, so that it is not there twice.

An update takes over an argument, for the new value that it makes of it, if

    the caller gives the argument up
    the stage that holds it makes the new value, and that lies as the old one did
    no later update reads it, nor another stage on the same devices, where a copy may share its memory
    it is no result itself
    neither the update nor a later one calls the host back, where a user's own error may end the step

Updates run when all passes of all stages are dispatched, so that no pass reads what they have taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.codegen.stage_shardings import Places
from autopar.ir.train_state import match_state
from autopar.passes.stages.divide import Stages
from autopar.runtime.failures import CALLBACKS


def taken_over(places: Places, placement: Sequence[int], donated: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """For each update, the arguments that it takes over.

    Args:
        places: the step, and where values lie.
        placement: the rank of every stage.
        donated: positions of the arguments that the caller gives up.
    """
    stages, updates = places.stages, places.stages.updates
    given = {stages.split.graph.inputs[i] for i in donated}
    results = {a for a in stages.split.flat.outputs if isinstance(a, int)}
    readers, last, callbacks = _readers(stages), _last(stages), _callbacks(stages)
    found: dict[int, int] = {}
    for new, old in _replaced(stages).items():
        number, home = updates.computed_in.get(new), updates.owners.get(old)
        if old not in given - results or number is None or home is None or last.get(old) != number:
            continue
        if number < callbacks:
            continue
        beside = any(placement[s] == placement[home] for s in readers.get(old, set[int]()) - {home})
        alike = places.result(number, new).is_equivalent_to(
            places.argument(home, old), stages.split.graph.types[old].rank
        )
        if updates.programs[number].stage == home and alike and not beside:
            found[old] = number
    return tuple(
        tuple(v for v in update.arguments if found.get(v) == number) for number, update in enumerate(updates.programs)
    )


def _replaced(stages: Stages) -> Mapping[int, int]:
    """New value of an argument -> the argument; a new value of several is that of the first."""
    graph, outputs = stages.split.graph, stages.split.flat.outputs
    carried = ((outputs[out], graph.inputs[i]) for out, i in sorted(match_state(graph).items(), reverse=True))
    return {new: old for new, old in carried if isinstance(new, int)}


def _last(stages: Stages) -> Mapping[int, int]:
    """Argument -> the last update that reads it."""
    return {v: number for number, update in enumerate(stages.updates.programs) for v in update.arguments}


def _callbacks(stages: Stages) -> int:
    """How many updates there are up to the last one that calls the host back."""
    calling = (
        number + 1
        for number, update in enumerate(stages.updates.programs)
        if any(op.name in CALLBACKS for placed in update.ops for op in placed.op.walk())
    )
    return max(calling, default=0)


def _readers(stages: Stages) -> Mapping[int, set[int]]:
    """Argument -> the stages that read it."""
    found: dict[int, set[int]] = {}
    for number, stage in enumerate(stages.stages):
        for v in (*stage.arguments, *(v for one in stage.passes.values() for v in (*one.whole, *one.blocks))):
            found.setdefault(v, set()).add(number)
    for update in stages.updates.programs:
        for v in update.arguments:
            found.setdefault(v, set()).add(update.stage)
    return found
