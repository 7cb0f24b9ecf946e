"""What would make a step faster, each with its price: the step is planned again under one other option.

    memory          twice the bytes per device, if recomputation, host memory or the limit itself cost time
    mesh            the best mesh of as many devices, if one was given
    microbatches    half as many on one mesh, twice as many in a pipeline, if their number was given
    schedule        ZB-H1, whose bubble is the smallest, in a pipeline with another one
    pins            none, if there are any

`hints` plans those that apply and keeps what gains `LEAST_GAIN` of the step or more, the most first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.ir.text import size
from autopar.options import Settings
from autopar.plans.origin import Hint
from autopar.plans.plan import Plan
from autopar.schedules import SCHEDULES

LEAST_GAIN = 0.01  # of the step time
FULL = 0.9  # share of the memory limit from which on the limit may cost time
MOST = 3  # hints
SMALLEST_BUBBLE = "zb-h1"


def _memory(plan: Plan, s: Settings) -> Mapping[str, Any]:
    is_short = plan.remat or plan.offloaded or plan.peak_memory_bytes > FULL * plan.memory_limit_bytes
    return {"memory_budget": 2.0 * plan.memory_limit_bytes} if is_short and plan.memory_limit_bytes else {}


def _mesh(plan: Plan, s: Settings) -> Mapping[str, Any]:
    is_free = s.mesh is not None and s.cluster is not None and not s.pins and not plan.pipelined
    return {"mesh": None, "stages": 1} if is_free else {}


def _microbatches(plan: Plan, s: Settings) -> Mapping[str, Any]:
    if s.num_microbatches == "auto" or (plan.num_microbatches == 1 and not plan.pipelined):
        return {}
    return {"num_microbatches": 2 * plan.num_microbatches if plan.pipelined else plan.num_microbatches // 2}


def _schedule(plan: Plan, s: Settings) -> Mapping[str, Any]:
    has_backward = plan.pipelined and SCHEDULES[plan.schedule].backward
    return {"schedule": SMALLEST_BUBBLE} if has_backward and plan.schedule != SMALLEST_BUBBLE else {}


def _pins(plan: Plan, s: Settings) -> Mapping[str, Any]:
    return {"pins": None} if s.pins else {}


#: (options that change, empty if it does not apply; what is said of them, by the plan under them).
CHANGES: tuple[tuple[Callable[[Plan, Settings], Mapping[str, Any]], Callable[[Plan], str]], ...] = (
    (_memory, lambda plan: f"memory_budget={plan.memory_limit_bytes}, {size(plan.memory_limit_bytes)} per device"),
    (_mesh, lambda plan: f"mesh={dict(plan.mesh)}"),
    (_microbatches, lambda plan: f"num_microbatches={plan.num_microbatches}"),
    (_schedule, lambda plan: f"schedule={plan.schedule!r}"),
    (_pins, lambda plan: "no pins"),
)


def hints(plan: Plan, options: Settings, replan: Callable[[Settings], Plan]) -> tuple[Hint, ...]:
    """The changes that make a step faster, the fastest first, `MOST` at most.

    Args:
        plan: the plan.
        options: those that it was planned with.
        replan: plans the step with other options.
    """
    ranked = sorted(_priced(plan, options, replan), key=lambda hint: hint.step_time_s)
    return tuple(ranked[:MOST])


def _priced(plan: Plan, options: Settings, replan: Callable[[Settings], Plan]) -> Iterator[Hint]:
    for applies, said in CHANGES:
        changes = applies(plan, options)
        if not changes:
            continue
        try:
            after = replan(replace(options, plan=None, **changes))
        except AutoparError:  # this change has no plan
            continue
        if after.step_time_s <= (1 - LEAST_GAIN) * plan.step_time_s:
            yield Hint(said(after), after.step_time_s, plan.step_time_s - after.step_time_s, after.peak_memory_bytes)
