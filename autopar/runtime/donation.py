"""Which arguments are donated to the updates: new state is written into the buffers of old state.

An argument is donated to the update that makes its new value if

    the caller donates the argument
    the stage that stores it makes the new value, with the same sharding
    no later update reads it, nor another stage on the same devices, where a copy may share its memory
    it is not itself a result of the step
    neither the update nor a later one has a host callback, in which an error of the user's may end the step

Updates run after all passes of all stages are dispatched, so no pass reads a donated buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.codegen.stages.planned import PlannedPrograms
from autopar.ir.op_sets import CALLBACKS
from autopar.ir.train_state import in_place
from autopar.passes.stages.divide import Stages


def donated_to_updates(
    planned: PlannedPrograms, placement: Sequence[int], donated: Collection[int]
) -> tuple[tuple[int, ...], ...]:
    """The arguments that are donated to each update, as values of the graph.

    Args:
        planned: the step and the shardings of its values.
        placement: the rank of every stage.
        donated: positions of the arguments that the caller donates.
    """
    stages, updates = planned.stages, planned.stages.updates
    donated_values = {stages.split.graph.inputs[i] for i in donated}
    results = {a for a in stages.split.flat.outputs if isinstance(a, int)}
    readers, last, callbacks = _readers(stages), _last(stages), _callbacks(stages)
    update_of: dict[int, int] = {}
    for new, old in _replaced(stages).items():
        number, owner = updates.computed_in.get(new), updates.owners.get(old)
        if old not in donated_values - results or number is None or owner is None or last.get(old) != number:
            continue
        if number < callbacks:
            continue
        shared = any(placement[s] == placement[owner] for s in readers.get(old, set[int]()) - {owner})
        same_sharding = planned.update_result(number, new).is_equivalent_to(
            planned.argument(owner, old), stages.split.graph.types[old].rank
        )
        if updates.programs[number].stage == owner and same_sharding and not shared:
            update_of[old] = number
    return tuple(
        tuple(v for v in update.arguments if update_of.get(v) == number)
        for number, update in enumerate(updates.programs)
    )


def _replaced(stages: Stages) -> Mapping[int, int]:
    """New value of an argument -> the argument; the first one if a value is the new value of several."""
    graph, outputs = stages.split.graph, stages.split.flat.outputs
    carried = ((outputs[out], graph.inputs[i]) for out, i in sorted(in_place(graph).items(), reverse=True))
    return {new: old for new, old in carried if isinstance(new, int)}


def _last(stages: Stages) -> Mapping[int, int]:
    """Argument -> the last update that reads it."""
    return {v: number for number, update in enumerate(stages.updates.programs) for v in update.arguments}


def _callbacks(stages: Stages) -> int:
    """Number of updates up to and including the last one with a host callback."""
    calling = (
        number + 1
        for number, update in enumerate(stages.updates.programs)
        if any(op.name in CALLBACKS for placed in update.ops for op in placed.op.walk())
    )
    return max(calling, default=0)


def _readers(stages: Stages) -> Mapping[int, set[int]]:
    """Argument -> the stages that read it."""
    readers: dict[int, set[int]] = {}
    for number, stage in enumerate(stages.stages):
        for v in (*stage.arguments, *(v for pass_ in stage.passes.values() for v in (*pass_.whole, *pass_.blocks))):
            readers.setdefault(v, set()).add(number)
    for update in stages.updates.programs:
        for v in update.arguments:
            readers.setdefault(v, set()).add(update.stage)
    return readers
