"""Plans that people know, of the same step on the same mesh, beside which a plan is shown.

    data parallel     the batch over all axes                                             `autopar.pins.data_parallel`
    ZeRO-1            the optimizer's state besides                                       `autopar.pins.zero1`
    FSDP (ZeRO-3)     the parameters besides                                              `autopar.pins.fsdp`
    Megatron          tensor parallelism over the last axis, the batch over the others    `autopar.pins.megatron`

The planner chooses what a strategy leaves open, so that each is the best plan of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from jax.sharding import PartitionSpec as P

from autopar.errors import AutoparError
from autopar.options import Settings
from autopar.plans.plan import Plan


def strategies(mesh: Mapping[str, int]) -> Mapping[str, Mapping[str, P]]:
    """Name of a baseline -> its pins, for the axes of a mesh with more than one device."""
    axes = tuple(axis for axis, size in mesh.items() if size > 1)
    if not axes:
        return {}
    *outer, last = axes
    batch = {"data_parallel": P(tuple(outer))} if outer else {}
    return {
        "data parallel": {"data_parallel": P(axes)},
        "ZeRO-1": {"zero1": P(axes)},
        "FSDP (ZeRO-3)": {"fsdp": P(axes)},
        f"Megatron over {last}": {"megatron": P(last), **batch},
    }


def baselines(plan: Plan, options: Settings, replan: Callable[[Settings], Plan]) -> Mapping[str, Plan | str]:
    """Name of a baseline -> its plan on one mesh, or why there is none.

    Args:
        plan: the plan to compare with, for its mesh.
        options: those of the plan; pins, stages and schedule are those of the baseline instead.
        replan: plans the step with other options.
    """
    on_mesh = replace(options, plan=None, mesh=plan.mesh, stages=1, schedule="auto")
    plans: dict[str, Plan | str] = {}
    for name, pins in strategies(plan.mesh).items():
        try:
            plans[name] = replan(replace(on_mesh, pins=pins))
        except AutoparError as error:
            plans[name] = str(error).partition("\n")[0]
    return plans
