"""The error for plans in stages that do not fit into a memory budget, with what would fit.

The smallest plan found is that of the highest penalty for memory (`autopar.passes.stages.plan.PenalisedPlans`). No plan
needs less than the arguments that a rank stores, evenly sharded over its devices.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.errors import MemoryBudgetError
from autopar.ir.text import size
from autopar.plans.record import PlanRecord, Stage


def budget_error(plan: PlanRecord, budget: float) -> MemoryBudgetError:
    """The error for the smallest plan that was found; `budget`: bytes per device, less than its peak."""
    least, bound = plan.peak_memory_bytes, _stored(plan)
    rank = max(_ranks(plan), key=lambda stages: sum(stage.peak_memory_bytes for stage in stages))
    stage = max(rank, key=lambda stage: stage.peak_memory_bytes)
    kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in stage.memory.items())
    shared = ", which shares its devices with other stages" if len(rank) > 1 else ""
    message = (
        f"no plan in {len(plan.stages)} stages fits into {size(budget)} per device: the smallest one found needs "
        f"{size(least)}, {size(least - budget)} more, in {stage.name}{shared} ({kinds}). "
        f"What would fit: {'; '.join(_suggestions(plan, rank, budget))}."
    )
    return MemoryBudgetError(message, budget, least, min(bound, least))


def _ranks(plan: PlanRecord) -> list[list[Stage]]:
    """The stages of every rank."""
    return [[stage for stage in plan.stages if stage.rank == rank] for rank in sorted({s.rank for s in plan.stages})]


def _stored(plan: PlanRecord) -> int:
    """Bytes per device of the arguments that a rank stores, evenly sharded; of the rank with most."""
    return max(sum(_even_state(plan, stage) for stage in stages) for stages in _ranks(plan))


def _even_state(plan: PlanRecord, stage: Stage) -> int:
    nbytes = sum(math.prod(plan.input_shapes[i]) * _itemsize(plan.input_types[i]) for i in stage.arguments)
    return math.floor(nbytes / stage.devices)


def _itemsize(text: str) -> float:
    """Bytes per element of a type such as "f32[8,16]" or "bf16[4]"; 1 if the type names no number of bits."""
    bits = re.match(r"[a-z]+(\d+)", text)
    return int(bits[1]) / 8 if bits else 1.0


def _suggestions(plan: PlanRecord, rank: Sequence[Stage], budget: float) -> Iterator[str]:
    """Changes that would make the plan fit, the cheapest first; `rank`: the stages of the devices with most."""
    memory = Counter[str]()
    for stage in rank:
        memory.update(stage.memory)
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
