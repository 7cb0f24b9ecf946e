"""Plans that fit: the optimum within a memory budget, and what to say when there is none.

    given       the cheapest plan whose predicted peak is within the budget (`autopar.passes.memory.budget`)
    "min"       the plan with the least peak (`autopar.passes.memory.min_memory`)
    none        within the device's memory less `MARGIN`, since a compiler may need more than predicted
    none fits   an error: the shortfall, where the smallest plan peaks, what lives there, what would help; unless nobody
                gave a budget: then the cheapest plan, with a warning that says the same

What would help is read off the smallest plan: dividing the batch into m microbatches leaves 1/m of what grows with the
batch, recomputation saves what the backward pass keeps, and n times the devices hold 1/n of everything that is cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.report import Memory, report
from autopar.cost_models.memory.row import smallest
from autopar.errors import MemoryBudgetError
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.problem import Problem
from autopar.ir.text import size
from autopar.passes.memory.budget import BudgetedSolution, Infeasible, optimize_within
from autopar.passes.memory.min_memory import LeastMemory, least_memory
from autopar.passes.solver.optimize import Solution, optimize

#: Share of a device's memory that is kept free when no budget is given.
MARGIN = 0.1
#: What grows with the batch, by kind of `autopar.cost_models.memory.report`.
OF_THE_BATCH = ("residuals", "temporaries", "arguments")
SHOWN = 10  # tensors that an error lists
MOST_PARTS = 64  # microbatches that an error suggests
GAP = 0.005  # share of a step time that a plan may lie above the bound on all plans
NO_TIME = 1e-3  # s that a problem gets after the deadline: both bounds, and no search


@dataclass(frozen=True)
class Search:
    """How to solve: see `autopar.passes.solver.optimize.optimize`.

    `time_limit` holds for one problem, `deadline` (`time.monotonic()`) for all that are solved in one call.
    """

    solver: str = "auto"
    time_limit: float = 60.0
    fold: bool = True
    presolve: bool = True
    gap: float = GAP
    deadline: float = math.inf

    @property
    def seconds(self) -> float:
        """What the next problem may take."""
        return min(self.time_limit, max(self.deadline - time.monotonic(), NO_TIME))

    def keywords(self) -> dict[str, Any]:
        """What `optimize` and `optimize_within` are called with."""
        return {
            "solver": self.solver,
            "time_limit": self.seconds,
            "fold": self.fold,
            "presolve": self.presolve,
            "gap": self.gap,
        }


def allowed(mesh: LogicalMesh, budget: float | str | None) -> float | str:
    """Bytes that a device may hold: the budget, or what the device has if there is none; or "min"."""
    return usable(mesh) if budget is None else budget


def fits(peak_bytes: float, mesh: LogicalMesh, budget: float | str | None) -> bool:
    """Whether a device may hold so much; any plan fits where the smallest is asked for."""
    within = allowed(mesh, budget)
    return isinstance(within, str) or peak_bytes <= within


def usable(mesh: LogicalMesh) -> float:
    """Bytes of a device's own memory, less `MARGIN`."""
    return mesh.device.memory_bytes * (1 - MARGIN)


def is_pressed(solution: Solution) -> bool:
    """Whether memory had a say in a solution of `solve` that fits."""
    return isinstance(solution, BudgetedSolution) and bool(solution.points)


def solve(
    problem: Problem,
    source: Liveness,
    mesh: LogicalMesh,
    budget: float | str | None,
    how: Search,
    microbatches: int = 1,
    fastest: Callable[[], Solution] | None = None,
    cutoff: float = math.inf,
) -> Solution:
    """The cheapest plan within the budget (bytes per device, None: the device's own), or for "min" the smallest plan.

    `microbatches`: those that the program runs its step in already; `fastest`: knows the cheapest plan of all;
    `cutoff`: of the plans that have to be looked for, those that take so many seconds or longer are of no interest.

    Raises:
        MemoryBudgetError: no plan fits into a budget that was given.
        Pruned: none that fits is of interest.
    """
    if isinstance(budget, str):
        begin = time.monotonic()
        least = least_memory(problem, source, deadline=begin + how.seconds)
        return _smallest(problem, least, time.monotonic() - begin)
    free = fastest() if fastest is not None else optimize(problem, **how.keywords())
    if budget is None:
        return _by_default(problem, source, usable(mesh), how, free, cutoff)
    try:
        return optimize_within(problem, source, budget, free=free, cutoff=cutoff, **how.keywords())
    except Infeasible as none:
        found = report(source, none.least.assignment)
        least, bound = math.ceil(none.least.peak_bytes), math.ceil(none.least.lower_bytes)
        refusal = _refusal(found, budget, bound, microbatches)
        raise MemoryBudgetError(refusal, budget, least, bound) from None


def _by_default(
    problem: Problem,
    source: Liveness,
    within: float,
    how: Search,
    free: Solution,
    cutoff: float,
) -> Solution:
    """The cheapest plan that the device has memory for, else the cheapest with a warning.

    Where nothing fits is mostly plain from one program point: the smallest that each tensor there can be is too much.
    """
    peak, row = source.peak(free.assignment)
    if peak <= within:
        return free
    least = smallest(row)
    if least <= within:
        try:
            keywords = how.keywords()
            return optimize_within(problem, source, within, free=free, cutoff=cutoff, patience=0.0, **keywords)
        except Infeasible as none:
            least = none.least.lower_bytes
    warning = (
        f"the plan needs {size(peak)} per device, more than the {size(within)} that are there, and no layouts of it "
        f"need less than {size(least)}; memory_budget='min' gives the smallest"
    )
    return replace(free, warnings=(*free.warnings, warning))


def _smallest(problem: Problem, least: LeastMemory, seconds: float) -> Solution:
    """`gap` is how much less than this plan's peak any plan might need."""
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


def _refusal(found: Memory, budget: float, bound: int, microbatches: int) -> str:
    where = f"{found.at} at {found.source}" if found.source else found.at
    tensors = [
        f"  {size(t.nbytes):>9}  {t.kind}: {t.name} {t.type}" + (f" at {t.source}" if t.source else "")
        for t in found.largest[:SHOWN]
    ]
    return "\n".join(
        [
            f"no plan fits into {size(budget)} per device: the smallest one found needs {size(found.peak_bytes)}, "
            f"{size(found.peak_bytes - budget)} more, at {where} (no plan needs less than {size(bound)}).",
            "Largest there:",
            *tensors,
            "What would fit: " + "; ".join(_changes(found, budget, microbatches)) + ".",
        ]
    )


def _changes(found: Memory, budget: float, microbatches: int) -> Iterator[str]:
    """Changes that would make the smallest plan fit, the cheapest first."""
    growing = sum(found.kinds.get(kind, 0) for kind in OF_THE_BATCH)
    fixed = found.peak_bytes - growing
    if found.peak_bytes - found.kinds.get("residuals", 0) <= budget:
        yield "recompute what the backward pass keeps (remat='auto', or jax.checkpoint around a layer)"
    times = 2 ** math.ceil(math.log2(growing / (budget - fixed))) if fixed < budget else math.inf
    if times <= MOST_PARTS:
        parts = int(times) * microbatches
        yield f"num_microbatches={parts}, which takes 1/{parts} of the batch at a time"
    yield f"about {math.ceil(found.peak_bytes / budget)} times the devices"
    yield f"memory_budget={found.peak_bytes} on devices that have it"
