"""The best plan among candidate meshes, the coarse ones first.

A mesh with more axes has every plan of a coarser one and many more, so that its problem is the harder. Coarse meshes
are planned first, and each mesh after them only has to be bounded: it is left as soon as its bound is within the
tolerance of the best plan so far. What the answer may lack is measured against the bounds of all meshes,

    gap  =  (seconds of the plan - least lower bound of all candidates) / seconds of the plan

and not against its own alone. Plans that fit into memory come first, whatever they take. Where the first mesh has none,
the others are left as soon as it is plain that they have none either; their bounds do not count then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar import fitting
from autopar.errors import MemoryBudgetError, PinError
from autopar.meshes import Target
from autopar.passes.core import CLOSED
from autopar.passes.optimize import Pruned
from autopar.planning import Options, Parts, Planned, make_plan
from autopar.plans import Plan
from autopar.report import text
from autopar.trace import Traced

SHOWN = 0.01  # s of a phase that is told of


def best(
    traced: Traced,
    candidates: Sequence[Target],
    options: Options,
    parts: Parts,
    report: Callable[[str], None] = lambda line: None,
    cutoff: float = math.inf,
) -> Planned | None:
    """The plan with the shortest step, None if none takes less than `cutoff` (s) by more than the gap.

    `report` is called before and after every mesh.

    Raises:
        PinError: a pin names axes that none of the meshes has.
        MemoryBudgetError: none has a plan that fits; the one with the smallest plan.
    """
    found = _Best(options, cutoff)
    for target in sorted(candidates, key=lambda one: len(one.logical.sizes)):
        title = "x".join(map(str, target.logical.sizes))
        report(f"planning mesh {title}{found.summary()}")
        try:
            made = make_plan(
                traced,
                target.logical,
                target.cluster.name,
                options,
                parts=parts,
                cutoff=found.step_to_beat,
                must_fit=found.must_fit,
            )
        except (PinError, MemoryBudgetError) as error:
            found.errors.append(error)
        except Pruned as pruned:
            found.add(pruned.lower_bound, pruned.phases)
            least = pruned.lower_bound
            bound = f"no plan takes less than {text.seconds(least)}, or " if math.isfinite(least) else ""
            report(f"mesh {title}: {bound}none that fits is better than the best")
        else:
            found.add(made.plan.lower_bound_s, made.plan.phases)
            found.choose(target, made)
            report(f"mesh {title}: {_described(made.plan)}")
    return found.answer()


def _described(plan: Plan) -> str:
    """A plan in one line."""
    laps = ", ".join(f"{phase} {lap:.2f} s" for phase, lap in plan.phases.items() if lap >= SHOWN)
    return f"{text.seconds(plan.step_time_s)} per step, gap {plan.gap:.2%} ({laps})"


@dataclass
class _Best:
    """The best plan so far, and what is known of all meshes."""

    options: Options
    cutoff: float
    planned: Planned | None = None
    fits: bool = False
    lower: float = math.inf
    phases: dict[str, float] = field(default_factory=dict[str, float])
    errors: list[PinError | MemoryBudgetError] = field(default_factory=list[PinError | MemoryBudgetError])

    @property
    def step_to_beat(self) -> float:
        """Seconds that a plan of another mesh has to stay below; inf where it may be of interest all the same."""
        if isinstance(self.options.memory_budget, str):
            return math.inf
        return self.planned.plan.step_time_s if self.planned is not None and self.fits else self.cutoff

    @property
    def must_fit(self) -> bool:
        """Whether a plan that does not fit is known already, so that no other such is of interest."""
        return self.planned is not None and not self.fits and self.options.memory_budget is None

    def summary(self) -> str:
        """The best step so far, for people."""
        return "" if self.planned is None else f"; best so far {text.seconds(self.planned.plan.step_time_s)} per step"

    def add(self, lower_bound: float, phases: Mapping[str, float]) -> None:
        """Count the bound and the seconds of one mesh."""
        self.lower = min(self.lower, lower_bound)
        for name, seconds in phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds

    def choose(self, target: Target, made: Planned) -> None:
        """Keep the better of the best plan and this one."""
        fits = fitting.fits(made.plan.stages[0].peak_memory_bytes, target.logical, self.options.memory_budget)
        shorter = self.planned is None or made.plan.step_time_s < self.planned.plan.step_time_s * (1 - CLOSED)
        if (fits and not self.fits) or (fits == self.fits and shorter):
            self.planned, self.fits = made, fits

    def answer(self) -> Planned | None:
        """The best plan, with its gap against all candidates and the seconds of all of them."""
        if self.planned is None and math.isfinite(self.lower):
            return None
        if self.planned is None:
            tight = [error for error in self.errors if isinstance(error, MemoryBudgetError)]
            raise min(tight, key=lambda error: error.least_bytes) if tight else self.errors[0]
        plan = replace(self.planned.plan, phases=self.phases)
        if not isinstance(self.options.memory_budget, str) and self.lower < plan.lower_bound_s * (1 - CLOSED):
            gap = 1 - self.lower / plan.step_time_s
            plan = replace(plan, lower_bound_s=self.lower, gap=gap, solver_status=self._status(plan, gap))
        return replace(self.planned, plan=plan)

    def _status(self, plan: Plan, gap: float) -> str:
        """What is proven of the choice, where the bounds of other meshes leave a wider gap than the plan's own."""
        enough = self.options.gap + CLOSED
        if gap <= enough:
            return "near-optimal"
        if plan.gap > enough:
            return plan.solver_status
        return "time-limit" if time.monotonic() > self.options.deadline else "open"
