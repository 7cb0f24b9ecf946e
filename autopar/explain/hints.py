"""What would make a step faster, each with its price: the step is planned again under one other option.

    memory          twice the bytes per device, if recomputation, host memory or the limit itself cost time
    mesh            the best mesh of as many devices, if one was given
    microbatches    half as many on one mesh, twice as many in a pipeline, if their number was given
    schedule        ZB-H1, whose bubble is the smallest, in a pipeline with another one
    pins            none, if there are any
    batch           twice the examples, for which the step is traced again; compared by the time of an example
    attention       that of cuDNN, on GPUs, in place of XLA's in `jax.nn.dot_product_attention`; traced again as well

`hints` plans those that apply and keeps what fits and gains `LEAST_GAIN` of the step or more, the most first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autopar.cost_models.compiler.backends import backend_of
from autopar.errors import AutoparError, AutoparWarning
from autopar.ir.text import size
from autopar.options import Settings
from autopar.plans.origin import Hint
from autopar.plans.plan import Plan
from autopar.schedules import SCHEDULES

LEAST_GAIN = 0.01  # of the step time
FULL = 0.9  # share of the memory limit from which on the limit may cost time
MOST = 3  # hints
SMALLEST_BUBBLE = "zb-h1"


class Replan(Protocol):
    """Plans the step with other options, `batches` times its batch, or attention of cuDNN in place of XLA's.

    AutoparError if that has no plan.
    """

    def __call__(self, changed: Settings, batches: int = 1, fused_attention: bool = False) -> Plan: ...


@dataclass(frozen=True)
class Change:
    """A kind of hint.

    Attributes:
        applies: the options that change; None if it does not apply.
        said: what is said of them, by the plan under them.
        batches: how many times the batch is planned.
        fused_attention: attention of cuDNN is planned.
    """

    applies: Callable[[Plan, Settings], Mapping[str, Any] | None]
    said: Callable[[Plan], str]
    batches: int = 1
    fused_attention: bool = False


def _memory(plan: Plan, s: Settings) -> Mapping[str, Any] | None:
    is_short = plan.remat or plan.offloaded or plan.peak_memory_bytes > FULL * plan.memory_limit_bytes
    return {"memory_budget": 2.0 * plan.memory_limit_bytes} if is_short and plan.memory_limit_bytes else None


def _mesh(plan: Plan, s: Settings) -> Mapping[str, Any] | None:
    is_free = s.mesh is not None and s.cluster is not None and not s.pins and not plan.pipelined
    return {"mesh": None, "stages": 1} if is_free else None


def _microbatches(plan: Plan, s: Settings) -> Mapping[str, Any] | None:
    if s.num_microbatches == "auto" or (plan.num_microbatches == 1 and not plan.pipelined):
        return None
    return {"num_microbatches": 2 * plan.num_microbatches if plan.pipelined else plan.num_microbatches // 2}


def _schedule(plan: Plan, s: Settings) -> Mapping[str, Any] | None:
    has_backward = plan.pipelined and SCHEDULES[plan.schedule].backward
    return {"schedule": SMALLEST_BUBBLE} if has_backward and plan.schedule != SMALLEST_BUBBLE else None


def _pins(plan: Plan, s: Settings) -> Mapping[str, Any] | None:
    return {"pins": None} if s.pins else None


def _attention(plan: Plan, s: Settings) -> Mapping[str, Any] | None:
    return {} if s.cluster is not None and backend_of(s.cluster.device).name == "gpu" else None


CHANGES = (
    Change(_memory, lambda plan: f"memory_budget={plan.memory_limit_bytes}, {size(plan.memory_limit_bytes)} a device"),
    Change(_mesh, lambda plan: f"mesh={dict(plan.mesh)}"),
    Change(_microbatches, lambda plan: f"num_microbatches={plan.num_microbatches}"),
    Change(_schedule, lambda plan: f"schedule={plan.schedule!r}"),
    Change(_pins, lambda plan: "no pins"),
    Change(lambda plan, s: {}, lambda plan: "twice the batch", batches=2),
    Change(
        _attention,
        lambda plan: 'implementation="cudnn" in jax.nn.dot_product_attention',
        fused_attention=True,
    ),
)


def hints(plan: Plan, options: Settings, replan: Replan, examples: int) -> tuple[Hint, ...]:
    """The changes that make a step faster, those that save most first, `MOST` at most.

    Args:
        plan: the plan.
        options: those that it was planned with.
        replan: plans the step with other options.
        examples: the examples of the batch; 0: the step has none.
    """
    ranked = sorted(_priced(plan, options, replan, examples), key=lambda hint: -hint.saved_s)
    return tuple(ranked[:MOST])


def _priced(plan: Plan, options: Settings, replan: Replan, examples: int) -> Iterator[Hint]:
    for change in CHANGES:
        options_of = change.applies(plan, options)
        if options_of is None or (change.batches > 1 and not examples):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AutoparWarning)  # of a plan that the user did not ask for
                after = replan(replace(options, plan=None, **options_of), change.batches, change.fused_attention)
        except AutoparError:  # this change has no plan
            continue
        saved_s = plan.step_time_s - after.step_time_s / change.batches
        if saved_s >= LEAST_GAIN * plan.step_time_s and not _exceeds(after):
            counted = change.batches * examples if change.batches > 1 else 0
            yield Hint(change.said(after), after.step_time_s, saved_s, after.peak_memory_bytes, counted, change.batches)


def _exceeds(plan: Plan) -> bool:
    """Whether a plan needs more memory than there is, because none needs less."""
    return 0 < plan.memory_limit_bytes < plan.peak_memory_bytes
