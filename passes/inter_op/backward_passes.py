"""Which schedules suit the stages of a step: those with backward passes if the stages have some, else the others."""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.ir.graph import Graph
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.stages.divide import Stages
from autopar.schedules import SCHEDULES


def has_backward(graph: Graph) -> bool:
    """Whether a step has operations of a backward pass."""
    return any(op.phase == "backward" for op in graph.ops)


def have_backward(stages: Stages) -> bool:
    """Whether some stage has a backward pass."""
    return any(stage.passes["B"].ops for stage in stages.stages)


def check_fits(name: str, stages: Stages) -> None:
    """Raises ScheduleError if the schedule has backward passes and the step has none, or the reverse."""
    works = have_backward(stages)
    if SCHEDULES[name].backward != works:
        raise ScheduleError(f"schedule '{name}' {HAS_BACKWARD if works else _lacks_backward(stages)}")


def _usable(backward: bool) -> str:
    """The schedules with, or without, passes B and no passes W."""
    rows = [(n, row) for n, row in SCHEDULES.items() if row.executable and not row.split]
    return ", ".join(repr(n) for n, row in rows if row.backward == backward)


#: What is wrong with a schedule without backward passes for a step that has them.
HAS_BACKWARD = f"has no backward passes and the step has; use {_usable(True)}"


def _lacks_backward(stages: Stages) -> str:
    """What is wrong with a schedule with passes B for stages that have none."""
    if any(stage.passes["W"].ops for stage in stages.stages):
        kinds = "gradients that stages send to each other, and gradients of weights"
        return f"splits backward passes into {kinds}; no stage of this step sends a gradient; use {_usable(True)}"
    return (
        "has backward passes, and the step has none that runs microbatch by microbatch: "
        f"{_why_no_backward(stages.split)}; use {_usable(False)}, or one mesh (leave out stages and schedule)"
    )


def _why_no_backward(parts: Microbatches) -> str:
    """Why no operation of the backward pass is in the loop over microbatches."""
    if not has_backward(parts.graph):
        inside = next((op for op in parts.graph.ops if any(inner.phase == "backward" for inner in op.walk())), None)
        if inside is None:
            return "it has no gradient"
        at = f" at {inside.source}" if inside.source else ""
        return f"its gradients are made inside of the {inside.name}{at}, forward and backward pass in each iteration"
    if parts.reasons:
        return f"its gradient needs the whole batch at once, as {parts.reasons[0]}"
    return (
        "what its gradient needs of the batch is cheap, as elementwise work is, and is computed once for all examples"
    )
