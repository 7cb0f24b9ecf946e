"""The best plan among candidate meshes: branch and bound over meshes.

    bound    per mesh, a plan of the program as written and a lower bound on all such plans, without the ILP. Meshes
             with fewer axes come first. A mesh with more axes has all plans of a coarser mesh and many more, so its
             problem is harder. It is pruned as soon as its bound is within the tolerance of the best plan
                                                                                                    -> MeshSearch.bound
    plan     the meshes in the order of these plans' step times. A mesh is pruned if its bound, plus a surcharge, is
             within the tolerance of the best plan that fits. The surcharge is the time of the rematerialisation that
             plans need to fit; it is taken from the first mesh pruned for it. A mesh has half of the time left while
             others wait. After the time limit no other mesh is planned, if there is a plan that fits -> MeshSearch.best

The gap is relative to the bounds of all candidates, not only to that of the mesh chosen:

    gap  =  (seconds of the plan - least lower bound of all candidates) / seconds of the plan        -> _Best.answer

A plan that fits into memory is preferred to one that does not, whatever their times. If a mesh has no plan that fits,
other meshes on which a simple bound excludes such a plan are dropped, and their bounds do not count.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar import parallel_map
from autopar.errors import MemoryBudgetError, PinError
from autopar.hardware.meshes import Target
from autopar.ir import text
from autopar.ir.trace import Traced
from autopar.passes.mesh_search.planner import MeshSolution, Parts, Planner
from autopar.passes.remat import memory_policy
from autopar.passes.remat.choose import Unfit
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import Pruned, Solution
from autopar.passes.solver.reduced_problem import CLOSED

SHOWN = 0.01  # least time (s) of a phase that a report mentions


@dataclass(eq=False)
class _Candidate:
    """A mesh and its planner; `quick` is the solution of the program as written, once bounded."""

    target: Target
    planner: Planner
    quick: Solution | None = None

    @property
    def title(self) -> str:
        """The sizes of the mesh, such as "2x4"."""
        return "x".join(map(str, self.target.logical.sizes))

    @property
    def seconds(self) -> float:
        """Step time (s) of the quick solution, inf without one below the cutoff."""
        return math.inf if self.quick is None or self.quick.status == "cutoff" else self.quick.objective

    @property
    def fits(self) -> bool:
        """Whether the quick solution fits into memory."""
        return self.quick is not None and math.isfinite(self.seconds) and self.planner.fits(self.quick)

    @property
    def lower(self) -> float:
        """Lower bound (s) on all plans of the mesh, 0 if it is not bounded yet."""
        return 0.0 if self.quick is None else self.quick.lower_bound


class MeshSearch:
    """Plans one program on candidate meshes, within `options.time_limit` seconds in all.

    Args:
        traced: the program.
        candidates: the meshes.
        options: as in `autopar.parallelize`.
        parts: the step of which the program runs microbatches.
        report: called with a line of text before and after every mesh.
    """

    def __init__(
        self,
        traced: Traced,
        candidates: Sequence[Target],
        options: Options,
        parts: Parts,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        coarse_first = sorted(candidates, key=lambda target: len(target.logical.sizes))
        self._candidates = [
            _Candidate(target, Planner(traced, target.logical, options, parts)) for target in coarse_first
        ]
        self._options, self._report = options, report
        self._left = options.time_limit
        self._surcharge = 0.0  # s; `Planner.surcharge` of the first mesh pruned

    def expected(self) -> tuple[float, bool]:
        """An estimate of the step time (s) on the coarsest mesh, and whether the program as written fits there.

        If it does not fit, the estimate includes the rematerialisation that is forecast to suffice.
        """
        self.bound(most=1)
        first = self._candidates[0]
        return (math.inf if first.quick is None else first.planner.expected(first.quick)), first.fits

    def fastest(self) -> float:
        """Step time (s) of the quickly found plan on the coarsest mesh, whether it fits or not; inf without one."""
        self.bound(most=1)
        return self._candidates[0].seconds

    def bound(self, cutoff: float = math.inf, most: int | None = None) -> None:
        """Bound the program as written on the meshes that are not bounded yet.

        The coarsest mesh comes first. The others run in parallel if there are several processors.

        Args:
            cutoff: s; plans that take as long need not be found.
            most: most meshes to bound now; all when absent.
        """
        deadline = self._begin()
        waiting = [candidate for candidate in self._candidates if candidate.quick is None][:most]
        while waiting:
            first = all(candidate.quick is None for candidate in self._candidates)
            batch = waiting[: 1 if first else parallel_map.ABREAST]
            del waiting[: len(batch)]
            self._report(f"bounding mesh {', '.join(candidate.title for candidate in batch)}")
            least = min(cutoff, *(candidate.seconds for candidate in self._candidates))
            tasks, begin = [partial(_bounded, candidate.planner, least) for candidate in batch], time.perf_counter()
            bounds = [task() for task in tasks] if first else parallel_map.results(tasks)
            together = sum(sum(laps.values()) for _, laps in bounds)
            # wall-clock time per second of work: less than 1 if tasks run in parallel
            share = min(1.0, (time.perf_counter() - begin) / (together or 1.0))
            for candidate, (quick, laps) in zip(batch, bounds, strict=True):
                if quick is not None:
                    candidate.quick = quick
                    candidate.planner.learn(quick, {name: share * seconds for name, seconds in laps.items()})
        self._left = deadline - time.monotonic()

    def best(self, cutoff: float = math.inf) -> MeshSolution | None:
        """The plan with the shortest step; None if no plan is below `cutoff` (s) by more than the gap asked for.

        Raises:
            PinError: a pin names axes that none of the meshes has.
            Unfit: no mesh has a plan that fits; the error for the user is that of the mesh with the smallest plan.
        """
        best = _Best(self._options, cutoff)
        if len(self._candidates) > 1 and not isinstance(self._options.memory_budget, str):
            self.bound(cutoff)
        deadline = self._begin()
        first_deadline = memory_policy.first_deadline()
        # in the order of the plans that were found quickly: a good plan prunes the others
        waiting = sorted(self._candidates, key=lambda candidate: (candidate.seconds, candidate.lower))
        while waiting:
            # the time is over, and meshes that are not planned count with their bounds
            if best.fits and time.monotonic() > deadline:
                best.lower = min(best.lower, *(candidate.lower for candidate in waiting))
                break
            candidate = waiting.pop(0)
            candidate.planner.options = replace(
                candidate.planner.options, deadline=_share(deadline, len(waiting)), first_deadline=first_deadline
            )
            self._report(f"planning mesh {candidate.title}{best.summary()}")
            try:
                mesh_solution = self._planned(candidate, best)
            except PinError as error:
                best.errors.append(error)
            except Unfit as error:
                best.errors.append(error)
                waiting = self._that_may_fit(candidate, waiting)
            except Pruned as pruned:
                least = pruned.lower_bound
                best.lower = min(best.lower, least)
                self._surcharge = self._surcharge or candidate.planner.surcharge()
                bound = f"no plan takes less than {text.seconds(least)}, or " if math.isfinite(least) else ""
                self._report(f"mesh {candidate.title}: {bound}none that fits is better than the best")
            else:
                best.lower = min(best.lower, mesh_solution.solution.lower_bound)
                best.choose(candidate.target, mesh_solution)
                self._report(f"mesh {candidate.title}: {_described(mesh_solution)}")
                if best.must_fit:
                    waiting = self._that_may_fit(candidate, waiting)
        for candidate in self._candidates:
            for name, seconds in candidate.planner.laps.items():
                best.phases[name] = best.phases.get(name, 0.0) + seconds
        best.phases["inter_op"] = 0.0
        return best.answer(deadline)

    def _planned(self, candidate: _Candidate, best: _Best) -> MeshSolution:
        """The plan of one mesh. Raises Pruned if its bound, plus the surcharge, exceeds the step time to beat."""
        beat = best.step_to_beat
        if candidate.lower + self._surcharge >= beat * (1 - self._options.gap):
            raise Pruned(candidate.lower)
        return candidate.planner.plan(candidate.target.cluster.name, beat)

    def _that_may_fit(self, planned: _Candidate, waiting: Sequence[_Candidate]) -> list[_Candidate]:
        """The other meshes that may have a plan that fits, given that the planned mesh has none."""
        if planned.planner.cannot_fit(anywhere=True):
            return []
        hopeless = parallel_map.results([partial(_cannot_fit, candidate.planner) for candidate in waiting])
        return [candidate for candidate, cannot in zip(waiting, hopeless, strict=True) if not cannot]

    def _begin(self) -> float:
        """Give all planners the time left. Returns the deadline, on the clock of `time.monotonic()`."""
        deadline = time.monotonic() + self._left
        for candidate in self._candidates:
            candidate.planner.options = replace(candidate.planner.options, deadline=deadline)
        return deadline


def _share(deadline: float, waiting: int) -> float:
    """The deadline of one mesh: half of the time left while others wait."""
    left = deadline - time.monotonic()
    return deadline - left / 2 if waiting and left > 0 else deadline


def _bounded(planner: Planner, cutoff: float) -> tuple[Solution | None, Mapping[str, float]]:
    """The quick solution of a mesh, None if a pin is not valid there, and the seconds of each phase."""
    try:
        solution = planner.bound(cutoff)
    except PinError:  # reported when the mesh is planned
        solution = None
    return solution, dict(planner.laps)


def _cannot_fit(planner: Planner) -> bool:
    """Whether a simple bound shows that a mesh has no plan that fits; False if a pin is not valid there."""
    with contextlib.suppress(PinError):  # reported when the mesh is planned
        return planner.cannot_fit()
    return False


def _smallest(unfit: Sequence[Unfit]) -> MemoryBudgetError:
    """The error of the mesh with the smallest plan."""
    return min((error.prove() for error in unfit), key=lambda error: error.least_bytes)


def _described(solution: MeshSolution) -> str:
    """A solution in one line of text."""
    laps = ", ".join(f"{phase} {lap:.2f} s" for phase, lap in solution.phases.items() if lap >= SHOWN)
    return f"{text.seconds(solution.solution.objective)} per step, gap {solution.solution.gap:.2%} ({laps})"


@dataclass
class _Best:
    """The best plan so far, and the results of all meshes.

    Attributes:
        options: as in `autopar.parallelize`.
        cutoff: s; plans that take as long are of no use to the caller.
        planned: the best plan.
        fits: whether it fits into memory.
        lower: least lower bound (s) of the meshes planned or pruned.
        phases: phase -> seconds, summed over all meshes.
        errors: errors of meshes without a plan.
    """

    options: Options
    cutoff: float
    planned: MeshSolution | None = None
    fits: bool = False
    lower: float = math.inf
    phases: dict[str, float] = field(default_factory=dict[str, float])
    errors: list[PinError | Unfit] = field(default_factory=list[PinError | Unfit])

    @property
    def step_to_beat(self) -> float:
        """Step time (s) that a plan of another mesh has to beat; inf if memory matters more than time."""
        if isinstance(self.options.memory_budget, str):
            return math.inf
        return self.planned.solution.objective if self.planned is not None and self.fits else self.cutoff

    @property
    def must_fit(self) -> bool:
        """Whether the best plan does not fit, so that only plans that fit can be better."""
        return self.planned is not None and not self.fits and self.options.memory_budget is None

    def summary(self) -> str:
        """The best step time so far, as text for people."""
        return "" if self.planned is None else f"; best so far {text.seconds(self.planned.solution.objective)} per step"

    def choose(self, target: Target, mesh_solution: MeshSolution) -> None:
        """Replace the best plan if the new one is better: it fits and the other does not, or it is faster."""
        fits = memory_policy.fits(mesh_solution.memory.peak_bytes, target.logical, self.options.memory_budget)
        shorter = self.planned is None or mesh_solution.solution.objective < self.planned.solution.objective * (
            1 - CLOSED
        )
        if (fits and not self.fits) or (fits == self.fits and shorter):
            self.planned, self.fits = mesh_solution, fits

    def answer(self, deadline: float) -> MeshSolution | None:
        """The best plan, with the gap and the phases of all candidates. Raises as `MeshSearch.best`."""
        if self.planned is None and math.isfinite(self.lower):
            return None
        if self.planned is None:
            unfit = [error for error in self.errors if isinstance(error, Unfit)]
            raise Unfit(partial(_smallest, unfit)) if unfit else self.errors[0]
        best = self.planned.solution
        if not isinstance(self.options.memory_budget, str) and self.lower < best.lower_bound * (1 - CLOSED):
            gap = 1 - self.lower / best.objective
            best = replace(best, lower_bound=self.lower, gap=gap, status=self._status(best, gap, deadline))
        return replace(self.planned, solution=best, phases=self.phases)

    def _status(self, best: Solution, gap: float, deadline: float) -> str:
        """The status of the best plan if the bounds of other meshes leave a wider gap than its own."""
        enough = self.options.gap + CLOSED
        if gap <= enough:
            return "near-optimal"
        if best.gap > enough:
            return best.status
        return "time-limit" if time.monotonic() > deadline else "open"
