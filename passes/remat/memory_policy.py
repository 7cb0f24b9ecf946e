"""Plans within the memory budget, and the error if there is none.

    a budget    the fastest plan whose predicted peak is within the budget (`autopar.passes.memory.budget`)
    "min"       the plan with the smallest peak (`autopar.passes.memory.min_memory`)
    none        within the device's memory less `MARGIN`, because a compiler may need more than predicted
    no plan     with a budget an error: the missing bytes, where the smallest plan peaks, the tensors that are live
      fits      there, and suggestions; without a budget the fastest plan, with a warning

Suggestions come from the smallest plan: m microbatches leave 1/m of the bytes that grow with the batch,
rematerialisation saves residuals, and n times the devices have 1/n of every sharded tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.report import Memory, report
from autopar.cost_models.memory.row import smallest as smallest_bytes
from autopar.errors import MemoryBudgetError
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.problem import Problem
from autopar.ir.text import missing_unit, size
from autopar.passes.memory.budget import FITTING, BudgetedSolution, Infeasible, optimize_within
from autopar.passes.memory.min_memory import LeastMemory, least_memory
from autopar.passes.solver.optimize import Solution, optimize

#: Share of a device's memory that plans leave free when no budget is given.
MARGIN = 0.1
#: Kinds of `autopar.cost_models.memory.report` of which a microbatch has its part. The batch itself is there whole, and
#: so are the temporaries of the update.
BATCH_KINDS = ("residuals", "temporaries")
UPDATE_KINDS = ("residuals",)
#: Tensors that an error lists.
SHOWN_TENSORS = 10
#: Microbatches that an error suggests, at most.
MAX_MICROBATCHES = 64
#: Relative gap to the lower bound on all plans at which the solver stops.
GAP = 0.005
#: Time limit (s) of a problem after the deadline, which is enough for both bounds but no search.
MIN_SECONDS = 1e-3


@dataclass(frozen=True)
class SolverOptions:
    """Options of the solver; see `autopar.passes.solver.optimize.optimize`.

    `time_limit` (s) applies to one problem, `deadline` (`time.monotonic()`) to all problems of one call. While no plan
    that fits is known, `first_deadline` takes its place if that is later; None gives each problem `FITTING` (s).
    """

    solver: str = "auto"
    time_limit: float = 60.0
    fold: bool = True
    presolve: bool = True
    gap: float = GAP
    deadline: float = math.inf
    first_deadline: float | None = None

    @property
    def patience(self) -> float:
        """Seconds that a search may take while no plan that fits is known."""
        return FITTING if self.first_deadline is None else max(self.first_deadline - time.monotonic(), 0.0)

    @property
    def seconds(self) -> float:
        """Time limit (s) of the next problem."""
        return min(self.time_limit, max(self.deadline - time.monotonic(), MIN_SECONDS))

    def keywords(self) -> dict[str, Any]:
        """Keywords of `optimize` and `optimize_within`."""
        return {
            "solver": self.solver,
            "time_limit": self.seconds,
            "fold": self.fold,
            "presolve": self.presolve,
            "gap": self.gap,
        }


def first_deadline() -> float:
    """The `SolverOptions.first_deadline` of a call that begins now."""
    return time.monotonic() + FITTING


@dataclass(frozen=True, slots=True)
class Remedies:
    """What an error may advise where no plan fits.

    Attributes:
        recomputes: layers are recomputed already, or where that saves memory.
        microbatches: of the program already.
        divides: whether the step falls into so many microbatches, with which it has not been planned.
    """

    recomputes: bool = False
    microbatches: int = 1
    divides: Callable[[int], bool] = lambda count: True


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """A memory budget as a share of a device's memory, such as 0.8."""

    share: float

    def __str__(self) -> str:
        return f"{100 * self.share:g}%"


Budget = float | str | MemoryShare | None
"""Bytes per device, "min", a share of the device's memory, or None for what is usable of it."""


def memory_limit(mesh: LogicalMesh, budget: Budget) -> float | str:
    """Bytes per device that a plan may use: the budget, without one the device's usable memory; or "min"."""
    if isinstance(budget, MemoryShare):
        return budget.share * mesh.device.memory_bytes
    return usable_bytes(mesh) if budget is None else budget


def memory_bytes(mesh: LogicalMesh, budget: Budget) -> float:
    """The same in bytes: `budget` is not "min"."""
    limit = memory_limit(mesh, budget)
    assert not isinstance(limit, str)
    return limit


def fits(peak_bytes: float, mesh: LogicalMesh, budget: Budget) -> bool:
    """Whether a plan with this peak is within the budget; any is for "min"."""
    limit = memory_limit(mesh, budget)
    return isinstance(limit, str) or peak_bytes <= limit


def usable_bytes(mesh: LogicalMesh) -> float:
    """Bytes of a device's memory, less `MARGIN`."""
    return mesh.device.memory_bytes * (1 - MARGIN)


def is_constrained(solution: Solution) -> bool:
    """Whether the budget changed a solution of `solve` that fits."""
    return isinstance(solution, BudgetedSolution) and bool(solution.points)


def solve(
    problem: Problem,
    source: Liveness,
    mesh: LogicalMesh,
    budget: float | str | None,
    options: SolverOptions,
    remedies: Remedies = Remedies(),
    fastest: Callable[[], Solution] | None = None,
    cutoff: float = math.inf,
) -> Solution:
    """The fastest plan within the budget (bytes per device, None: the device's memory), or for "min" the smallest plan.

    `remedies`: for the error; `fastest`: returns the fastest plan without a budget; `cutoff`: if that plan
    does not fit, slower ones of this many seconds or more may be missed.

    Raises:
        MemoryBudgetError: no plan fits into a budget that was given.
        Pruned: every plan that fits takes `cutoff` or longer.
    """
    if isinstance(budget, str):
        begin = time.monotonic()
        smallest_plan = least_memory(problem, source, deadline=begin + options.seconds)
        return smallest(problem, smallest_plan, time.monotonic() - begin)
    unconstrained = fastest() if fastest is not None else optimize(problem, **options.keywords())
    if budget is None:
        return _within_device(problem, source, usable_bytes(mesh), options, unconstrained, cutoff)
    try:
        return _within(problem, source, budget, options, unconstrained, cutoff)
    except Infeasible as infeasible:
        memory = report(source, infeasible.least.assignment)
        least_bytes, bound_bytes = math.ceil(infeasible.least.peak_bytes), math.ceil(infeasible.least.lower_bytes)
        message = _infeasible_message(memory, budget, bound_bytes, remedies)
        raise MemoryBudgetError(message, budget, least_bytes, bound_bytes) from None


def _within_device(
    problem: Problem,
    source: Liveness,
    usable: float,
    options: SolverOptions,
    unconstrained: Solution,
    cutoff: float,
) -> Solution:
    """The fastest plan that fits into the device's memory, else the fastest plan with a warning.

    If no plan fits, the smallest sizes of the tensors live at one program point mostly prove it already.
    """
    peak, row = source.peak(unconstrained.assignment)
    if peak <= usable:
        return unconstrained
    lower_bound = smallest_bytes(row)
    if lower_bound <= usable:
        try:
            return _within(problem, source, usable, options, unconstrained, cutoff, refutes=True)
        except Infeasible as infeasible:
            lower_bound = infeasible.least.lower_bytes
    warning = (
        f"the plan needs {size(peak)} per device, more than the {size(usable)} that are there, and no layouts of it "
        f"need less than {size(lower_bound)}; memory_budget='min' gives the smallest"
    )
    return replace(unconstrained, warnings=(*unconstrained.warnings, warning))


def _within(
    problem: Problem,
    source: Liveness,
    budget: float,
    options: SolverOptions,
    unconstrained: Solution,
    cutoff: float,
    *,
    refutes: bool = False,
) -> Solution:
    """The fastest plan within the budget (bytes). With a cutoff a plan that fits is known, and no time is added."""
    patience = 0.0 if math.isfinite(cutoff) else options.patience
    keywords = options.keywords()
    return optimize_within(
        problem, source, budget, free=unconstrained, cutoff=cutoff, refutes=refutes, patience=patience, **keywords
    )


def smallest(problem: Problem, least: LeastMemory, seconds: float) -> Solution:
    """The smallest plan as a solution; `gap` is the relative difference between its peak and the lower bound."""
    gap = (least.peak_bytes - least.lower_bytes) / max(least.peak_bytes, 1.0)
    return Solution(
        assignment=least.assignment,
        objective=least.seconds,
        lower_bound=0.0,
        gap=gap,
        status="least-memory",
        solver_used="dual ascent",
        warnings=(),
        phases={"fold": 0.0, "presolve": 0.0, "bound": seconds, "ilp": 0.0},
        variables=problem.variables,
        variables_unfolded=problem.variables,
        rows=0,
    )


def _infeasible_message(memory: Memory, budget: float, bound: int, remedies: Remedies) -> str:
    place = f"{memory.at} at {memory.source}" if memory.source else memory.at
    tensors = [
        f"  {size(t.nbytes):>9}  {t.kind}: {t.name} {t.type}" + (f" at {t.source}" if t.source else "")
        for t in memory.largest[:SHOWN_TENSORS]
    ]
    return "\n".join(
        [
            f"no plan fits into {size(budget)} per device: the smallest one found needs {size(memory.peak_bytes)}, "
            f"{size(memory.peak_bytes - budget)} more, at {place} (no plan needs less than {size(bound)}).",
            "Largest there:",
            *tensors,
            "What would fit: " + "; ".join(_suggestions(memory, budget, remedies)) + ".",
        ]
    )


def _suggestions(memory: Memory, budget: float, remedies: Remedies) -> Iterator[str]:
    """Changes that would make the smallest plan fit, the cheapest first."""
    kinds = UPDATE_KINDS if memory.phase == "update" else BATCH_KINDS
    batch_bytes = sum(memory.kinds.get(kind, 0) for kind in kinds)
    other_bytes = memory.peak_bytes - batch_bytes
    yield from missing_unit(budget)
    if memory.peak_bytes - memory.kinds.get("residuals", 0) <= budget:
        auto = "" if remedies.recomputes else "remat='auto', or "
        yield f"recompute what the backward pass keeps ({auto}jax.checkpoint around a layer)"
    times = 2 ** math.ceil(math.log2(batch_bytes / (budget - other_bytes))) if other_bytes < budget else math.inf
    while times <= MAX_MICROBATCHES and not remedies.divides(int(times) * remedies.microbatches):
        times *= 2
    if times <= MAX_MICROBATCHES:
        count = int(times) * remedies.microbatches
        yield f"num_microbatches={count}, which takes 1/{count} of the batch at a time"
    yield f"about {math.ceil(memory.peak_bytes / budget)} times the devices"
    yield f"memory_budget={memory.peak_bytes} on devices that have it"
