"""The error for plans in stages that do not fit into a memory budget, with what would fit.

Every stage of the smallest plan found that does not fit has the least peak that was found for it
(`autopar.passes.stages.plan.StageProblem.within`). No plan needs less than the arguments that a rank stores, evenly
sharded over its devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from autopar.errors import MemoryBudgetError
from autopar.ir.graph import Graph
from autopar.ir.text import missing_unit, size
from autopar.plans.record import PlanRecord


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
        f"What would fit: {'; '.join(_suggestions(plan, graph, budget))}."
    )
    return MemoryBudgetError(message, budget, least, min(bound, least))


def _stored(plan: PlanRecord, graph: Graph) -> int:
    """Bytes per device of the arguments that a rank stores, evenly sharded; of the rank with most."""
    nbytes = [graph.types[v].nbytes for v in graph.inputs]
    return max(
        sum(math.floor(sum(nbytes[i] for i in stage.arguments) / stage.devices) for stage in stages)
        for stages in plan.ranks
    )


def _suggestions(plan: PlanRecord, graph: Graph, budget: float) -> Iterator[str]:
    """Changes that would make the plan fit, the cheapest first."""
    count, ranks = plan.num_microbatches, len(plan.ranks)
    yield from missing_unit(budget)
    if not plan.remat and _fits(plan, budget, lambda rank: {"residuals": 0.0}):
        yield "recompute what the backward pass keeps (remat='full')"
    # under 1f1b rank i has the residuals of ranks - i microbatches, under gpipe of all
    fewer = plan.schedule == "gpipe" and count > 1
    if fewer and _fits(plan, budget, lambda rank: {"residuals": min(ranks - rank, count) / count}):
        yield "schedule='1f1b', which keeps fewer microbatches"
    # under gpipe all microbatches are in flight, so that halves of them keep as many bytes
    halved = {"temporaries": 0.5} if plan.schedule == "gpipe" else {"temporaries": 0.5, "residuals": 0.5}
    divides = all(graph.types[graph.inputs[i]].shape[0] % (2 * count) == 0 for i in plan.batch)
    if plan.batch and divides and _fits(plan, budget, lambda rank: halved):
        yield f"num_microbatches={2 * count}, of half the size"
    yield f"about {math.ceil(plan.peak_memory_bytes / budget)} times the devices"
    yield f"memory_budget={plan.peak_memory_bytes} on devices that have it"


def _fits(plan: PlanRecord, budget: float, left: Callable[[int], Mapping[str, float]]) -> bool:
    """Whether all ranks fit into the budget if these shares of some kinds of memory are left. `left`: of a rank."""
    return all(
        sum(nbytes * left(number).get(kind, 1.0) for stage in rank for kind, nbytes in stage.memory.items()) <= budget
        for number, rank in enumerate(plan.ranks)
    )
