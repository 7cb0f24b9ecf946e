"""The best plan among candidate meshes, the coarse ones first.

A mesh with more axes has every plan of a coarser one and many more, so that its problem is the harder. Coarse meshes
are planned first, and each mesh after them only has to be bounded: it is left as soon as its bound is within the
tolerance of the best plan so far. What the answer may lack is measured against the bounds of all meshes,

    gap  =  (seconds of the plan - least lower bound of all candidates) / seconds of the plan

and not against its own alone. Plans that fit into memory come first, whatever they take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar import fitting
from autopar.errors import MemoryBudgetError, PinError
from autopar.meshes import Target
from autopar.passes.core import CLOSED
from autopar.planning import Beaten, Options, Parts, Planned, plan_below
from autopar.report import text
from autopar.trace import Traced

SHOWN = 0.01  # s of a phase that is told of


def best(
    traced: Traced,
    candidates: Sequence[Target],
    options: Options,
    trace_s: float,
    parts: Parts,
    tell: Callable[[str], None] = lambda line: None,
    below: float = math.inf,
) -> Planned | None:
    """The plan with the shortest step, None if none takes less than `below` (s) by more than the gap.

    `tell` hears of every mesh before and after.

    Raises:
        PinError: a pin names axes that none of the meshes has.
        MemoryBudgetError: none has a plan that fits; the one with the smallest plan.
    """
    found = _Best(options, below)
    for target in sorted(candidates, key=lambda one: len(one.logical.sizes)):
        tell(f"planning mesh {shown(target)}{found.so_far()}")
        try:
            made = plan_below(found.bar, traced, target.logical, target.cluster.name, options, trace_s, parts)
        except (PinError, MemoryBudgetError) as error:
            found.errors.append(error)
            continue
        tell(f"mesh {shown(target)}: {told(made)}")
        found.hear(target, made)
    return found.answer(trace_s)


def shown(target: Target) -> str:
    """A mesh for people."""
    return "x".join(map(str, target.logical.sizes))


def told(made: Planned | Beaten) -> str:
    """What a mesh came to, for people."""
    if isinstance(made, Beaten):
        return f"no plan takes less than {text.seconds(made.lower_bound)}, or none that fits is better than the best"
    laps = ", ".join(f"{phase} {lap:.2f} s" for phase, lap in made.plan.phases.items() if lap >= SHOWN)
    return f"{text.seconds(made.plan.step_time_s)} per step, gap {made.plan.gap:.2%} ({laps})"


@dataclass
class _Best:
    """What is known so far."""

    options: Options
    below: float
    planned: Planned | None = None
    fits: bool = False
    lower: float = math.inf
    phases: dict[str, float] = field(default_factory=dict[str, float])
    errors: list[PinError | MemoryBudgetError] = field(default_factory=list[PinError | MemoryBudgetError])

    @property
    def bar(self) -> float:
        """Seconds that a plan of another mesh has to stay below; inf where it may be of interest all the same."""
        if isinstance(self.options.memory_budget, str):
            return math.inf
        return self.planned.plan.step_time_s if self.planned is not None and self.fits else self.below

    def so_far(self) -> str:
        """The best step so far, for people."""
        return "" if self.planned is None else f"; best so far {text.seconds(self.planned.plan.step_time_s)} per step"

    def hear(self, target: Target, made: Planned | Beaten) -> None:
        """Count one mesh in."""
        phases = made.plan.phases if isinstance(made, Planned) else made.phases
        for name, seconds in phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + (seconds if name != "trace" else 0.0)
        if isinstance(made, Beaten):
            self.lower = min(self.lower, made.lower_bound)
            return
        self.lower = min(self.lower, made.plan.lower_bound_s)
        allowed = fitting.allowed(target.logical, self.options.memory_budget)
        fits = isinstance(allowed, str) or made.plan.stages[0].peak_memory_bytes <= allowed
        shorter = self.planned is None or made.plan.step_time_s < self.planned.plan.step_time_s * (1 - CLOSED)
        if (fits and not self.fits) or (fits == self.fits and shorter):
            self.planned, self.fits = made, fits

    def answer(self, trace_s: float) -> Planned | None:
        """The best plan, with its gap against all candidates and the seconds of all of them."""
        if self.planned is None and math.isfinite(self.lower):
            return None
        if self.planned is None:
            tight = [error for error in self.errors if isinstance(error, MemoryBudgetError)]
            raise min(tight, key=lambda error: error.least_bytes) if tight else self.errors[0]
        plan = replace(self.planned.plan, phases={**self.phases, "trace": trace_s})
        if not isinstance(self.options.memory_budget, str) and self.lower < plan.lower_bound_s * (1 - CLOSED):
            gap = 1 - self.lower / plan.step_time_s
            status = "near-optimal" if gap <= self.options.gap + CLOSED else "open"
            status = plan.solver_status if plan.gap > self.options.gap + CLOSED else status
            plan = replace(plan, lower_bound_s=self.lower, gap=gap, solver_status=status)
        return replace(self.planned, plan=plan)
