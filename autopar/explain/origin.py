"""The step that a plan was made for, kept to price other layouts and to plan under other options.

other layouts    the problem of the executed program on the mesh of the plan, built when it is first asked for
                                                                          -> autopar/passes/intra_op/alternatives.py
memory           a plan with another layout that does not fit is solved again within the budget    -> _exact
other options    the step is planned again from its trace                                          -> replanned
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar import jax_compat
from autopar.cost_models import offload
from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.memory.liveness import Liveness
from autopar.errors import ArgumentError, MemoryBudgetError, SolverError
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.options import Settings, settings
from autopar.passes.intra_op.alternatives import Alternatives
from autopar.passes.mesh_search.planner import collector_paused, make_model
from autopar.passes.op_groups.constraints import resolve
from autopar.passes.remat import memory_policy
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import Solution, optimize
from autopar.plans.origin import Alternative
from autopar.plans.plan import Plan
from autopar.runtime.planned_step import PlannedStep

#: Time limit (s) of solving the problem again for one layout.
EXACT_SECONDS = 10.0
#: Options that `replanned` does not take: they say what the arguments are, or give a plan instead of making one.
KEPT = ("static_argnums", "plan")


@dataclass(frozen=True, eq=False)
class StepOrigin:
    """The planned step, its options, and a way to plan it again.

    Attributes:
        step: the planned step.
        settings: the options that it was planned with.
        replan: plans the same step with other options.
    """

    step: PlannedStep
    settings: Settings
    replan: Callable[[Settings], Plan]

    @property
    def graph(self) -> Graph | None:
        """See `autopar.plans.origin.Origin`."""
        return None if self.step.plan.pipelined else self.step.traced.graph

    def alternatives(
        self, values: Sequence[int], *, exact: bool = False, layouts: Sequence[Layout] | None = None
    ) -> Sequence[Alternative]:
        """See `autopar.plans.origin.Origin`."""
        if self.graph is None:
            return ()
        if (priced_on := self.step.target.cluster.name) != self.step.plan.cluster:
            raise ArgumentError(
                f"the plan was priced on the cluster '{self.step.plan.cluster}', and its step is loaded with "
                f"'{priced_on}': give cluster= as it was then"
            )
        with collector_paused(), jax_compat.automatic_axes():
            priced = self._alternatives
            priced_layouts = [
                replace(
                    Alternative(layout, max(priced.bound(values, layout), 0.0)),
                    **(self._exact(values, layout) if exact else {}),
                )
                for layout in priced.layouts(values)
                if layouts is None or layout in layouts
            ]
        return sorted(priced_layouts, key=lambda a: (a.seconds, a.at_least_s))

    def pinned(self, position: int) -> str:
        """See `autopar.plans.origin.Origin`."""
        traced, mesh = self.step.traced, self.step.target.logical
        if position in traced.pins:
            return "the type of the argument, on an Explicit mesh"
        matching = (
            pattern
            for pattern, spec in (self.settings.pins or {}).items()
            if not pattern.startswith("out:") and position in resolve({pattern: spec}, traced.graph, mesh).arguments
        )
        pattern = max(matching, default="")
        return f"the pin '{pattern}'" if pattern else ""

    def replanned(self, changes: Mapping[str, Any]) -> Plan:
        """See `autopar.plans.origin.Origin`.

        Raises:
            ArgumentError: an option is unknown, has an invalid value, or is one of `KEPT`.
        """
        for name in KEPT:
            if name in changes:
                raise ArgumentError(f"what_if plans the same step again; {name}= cannot be another")
        pins = {**(self.settings.pins or {}), **(changes.get("pins") or {})}
        checked = settings({**changes, **({"pins": pins} if "pins" in changes else {})})
        return self.replan(replace(self.settings, **{name: getattr(checked, name) for name in changes}))

    @cached_property
    def _alternatives(self) -> Alternatives:
        step, plan = self.step, self.step.plan
        options = Options(pins=self.settings.pins, rules=step.registered)
        model = make_model(step.traced, step.target.logical, options)
        model = offload.priced(model, step.traced.graph, step.target.logical, plan.offloaded)
        return Alternatives(model, plan.step_time_s)

    @cached_property
    def _liveness(self) -> Liveness:
        step, mesh = self.step, self.step.target.logical
        backend = backend_of(mesh.device)
        backend = replace(backend, keeps_barriers=True) if step.plan.remat else backend
        model = self._alternatives.model
        return Liveness(step.traced.graph, model, mesh, backend, step.plan.donated, step.plan.offloaded)

    def _exact(self, values: Sequence[int], layout: Layout) -> dict[str, Any]:
        """`exact_s` and `proven` of a layout."""
        problem = self._alternatives.restricted(values, layout)
        options = memory_policy.SolverOptions(self.settings.solver, EXACT_SECONDS, gap=0.0)
        budget, mesh = self.settings.memory_budget, self.step.target.logical
        try:
            solution: Solution = optimize(problem, **options.keywords())
            if not memory_policy.fits(self._liveness.peak(solution.assignment)[0], mesh, budget):
                solution = memory_policy.solve(problem, self._liveness, mesh, budget, options, fastest=lambda: solution)
        except (MemoryBudgetError, SolverError):
            return {"exact_s": math.inf}
        return {"exact_s": solution.objective, "proven": solution.gap == 0.0}
