"""The error for plans in stages that do not fit into a memory budget, with what would fit.

Every stage of the smallest plan found that does not fit has the least peak that was found for it
(`autopar.passes.stages.plan.StageProblem.within`). No plan needs less than the arguments that a rank stores, evenly
sharded over its devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.errors import MemoryBudgetError
from autopar.ir.graph import Graph
from autopar.ir.text import missing_unit, size
from autopar.plans.record import PlanRecord, Stage


def budget_error(plan: PlanRecord, graph: Graph, budget: float) -> MemoryBudgetError:
    """The error for the smallest plan that was found.

    Args:
        plan: of a step in stages.
        graph: the step.
        budget: bytes per device, less than the plan's peak.
    """
    least, bound = plan.peak_memory_bytes, _stored(plan, graph)
    rank = max(plan.ranks, key=lambda stages: sum(stage.peak_memory_bytes for stage in stages))
    stage = max(rank, key=lambda stage: stage.peak_memory_bytes)
    kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in stage.memory.items())
    shared = ", which shares its devices with other stages" if len(rank) > 1 else ""
    message = (
        f"no plan in {len(plan.stages)} stages fits into {size(budget)} per device: the smallest one found needs "
        f"{size(least)}, {size(least - budget)} more, in {stage.name}{shared} ({kinds}). "
        f"What would fit: {'; '.join(_suggestions(plan, rank, budget))}."
    )
    return MemoryBudgetError(message, budget, least, min(bound, least))


def _stored(plan: PlanRecord, graph: Graph) -> int:
    """Bytes per device of the arguments that a rank stores, evenly sharded; of the rank with most."""
    nbytes = [graph.types[v].nbytes for v in graph.inputs]
    return max(
        sum(math.floor(sum(nbytes[i] for i in stage.arguments) / stage.devices) for stage in stages)
        for stages in plan.ranks
    )


def _suggestions(plan: PlanRecord, rank: Sequence[Stage], budget: float) -> Iterator[str]:
    """Changes that would make the plan fit, the cheapest first; `rank`: the stages of the devices with most."""
    memory = Counter[str]()
    for stage in rank:
        memory.update(stage.memory)
    yield from missing_unit(budget)
    if not plan.remat and memory["residuals"]:
        yield "recompute what the backward pass keeps (remat='full')"
    if plan.schedule == "gpipe":
        yield "schedule='1f1b', which keeps fewer microbatches"
    # under gpipe all microbatches are in flight, so that halves of them keep as many bytes
    halved = memory["temporaries"] + (memory["residuals"] if plan.schedule != "gpipe" else 0)
    if plan.batch and sum(memory.values()) - halved / 2 <= budget:
        yield f"num_microbatches={2 * plan.num_microbatches}, of half the size"
    yield f"about {math.ceil(plan.peak_memory_bytes / budget)} times the devices"
    yield f"memory_budget={plan.peak_memory_bytes} on devices that have it"
