"""The plan with the least peak.

    t(x)  =  max_r bytes_r(x)            bound  =  max_mu  min_x  sum_r mu_r bytes_r(x),   mu >= 0, sum mu = 1

Plans come from the problem with seconds at a tiny price, equal layers alike: bytes decide, and where they do not, what
is fast stays as it is, so that no program point that is not yet a row runs away. The bound comes from the problem
without seconds, folded with respect to the rows that have a price. Where the two do not meet and the problem is small,
the ILP decides.

A problem that is presolved already, with bounds that hold for all plans, serves for both: what presolving took out is
replaced by something that takes no more seconds and no more bytes in any row, so the least peak stays -> _usable.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cost_models.memory.row import Row, RowSource
from autopar.ir.problem import Floats, Ints, Problem
from autopar.passes.memory.lagrangian import FIRST, NEXT, Messages, PeakObjective, Pool, ascend
from autopar.passes.memory.local_search import LocalSearch
from autopar.passes.memory.presolve import ConstrainedProblem, PresolvedProblem, presolve
from autopar.passes.memory.search_state import CLOSED
from autopar.passes.solver import ilp
from autopar.passes.solver.optimize import optimize

ROUNDS = 20
LIGHT = 1e-6  # of all bytes: what all seconds may weigh
SMALL, TINY = 2_000, 200  # strategies up to which the ILP closes the gap; though nothing fits anyhow
QUICK = 4, 2  # passes at the first multipliers, and after each change of multipliers, on a problem that is given
DESCENTS = 4  # plans that descent starts from


@dataclass(frozen=True, slots=True, eq=False)
class LeastMemory:
    """A plan with the least peak found.

    Attributes:
        assignment: strategy per node.
        seconds: its value, s.
        peak_bytes: exact, per device.
        lower_bytes: no plan's peak is below; -inf where the search ended early.
        rows: program points met.
    """

    assignment: Ints
    seconds: float
    peak_bytes: float
    lower_bytes: float
    rows: tuple[Row, ...]


def least_memory(
    problem: Problem,
    source: RowSource,
    *,
    rows: Sequence[Row] = (),
    seeds: Sequence[Ints] = (),
    deadline: float = np.inf,
    exact: bool = True,
    asked: float | None = None,
    presolved: PresolvedProblem | None = None,
) -> LeastMemory:
    """The plan with the least peak, and a certified bound on every plan's.

    Args:
        problem, source: unfolded.
        rows: program points known; those of the source when empty.
        seeds: feasible plans known; the fastest plan when empty.
        deadline: of `time.monotonic()`.
        exact: let the ILP decide small problems.
        asked: bytes; a plan whose peak is no higher ends the search, without a bound, and a higher bound ends it but
            for tiny problems.
        presolved: the problem presolved with `rows`, where that is at hand; one whose bounds hold for all plans.

    Raises SolverError when no plan exists at all.
    """
    state = _State(problem, source, deadline, presolved)
    state.add_rows([*rows, *source.rows()])
    for plan in seeds or [optimize(problem).assignment]:
        state.submit(plan)
    lower, multipliers = -np.inf, np.zeros(0)
    for _ in range(ROUNDS):
        known = len(state.rows)
        multipliers = state.alike()
        if state.suffices(asked) or len(state.rows) == known or time.monotonic() > deadline:
            break
    if state.suffices(asked):
        return state.found(-np.inf)
    lower = state.bound(multipliers)
    most = SMALL if asked is None or lower <= asked else TINY
    if exact and state.peak > lower * (1 + CLOSED) and problem.variables <= most:
        lower = max(lower, state.by_ilp())
    return state.found(min(lower, state.peak))


class _State:
    """The best plan so far and the rows met."""

    def __init__(
        self, problem: Problem, source: RowSource, deadline: float, presolved: PresolvedProblem | None
    ) -> None:
        self.problem = problem
        self.source = source
        self.deadline = deadline
        self.rows: list[Row] = []
        self.plan: Ints | None = None
        self.peak = np.inf
        self.seeds: list[Ints] = []
        self._core = presolved
        self._warm: tuple[list[list[Floats]], list[Ints]] = [], []

    def add_rows(self, rows: Sequence[Row]) -> None:
        names = {row.name for row in self.rows}
        for row in rows:
            if row.name not in names:
                names.add(row.name)
                self.rows.append(row)

    def submit(self, plan: Ints) -> None:
        """Judge a feasible plan; where it peaks becomes a row."""
        peak, row = self.source.peak(plan)
        self.add_rows([row])
        self.seeds.append(plan)
        if peak < self.peak:
            self.plan, self.peak = plan, peak

    def suffices(self, asked: float | None) -> bool:
        """Whether a plan is known whose peak is within the bytes asked for."""
        return asked is not None and self.peak <= asked

    @property
    def _usable(self) -> PresolvedProblem | None:
        """The presolved problem given, if it has all rows known."""
        return self._core if self._core is not None and self._core.constrained.rows == len(self.rows) else None

    @property
    def _passes(self) -> tuple[int, int]:
        """Fewer where a problem is given: many more ascents follow on it."""
        return (FIRST, NEXT) if self._usable is None else QUICK

    def found(self, lower: float) -> LeastMemory:
        assert self.plan is not None
        return LeastMemory(self.plan, self.problem.value(self.plan), self.peak, lower, tuple(self.rows))

    def alike(self) -> Floats:
        """A plan that treats equal layers alike; returns the multipliers of the rows."""
        presolved = self._with_light_seconds()
        pool, messages = Pool(presolved.constrained), Messages(presolved.constrained, presolved.counts)
        pool.add(plan for plan in map(presolved.project, self.seeds) if plan is not None)
        objective = PeakObjective(presolved.constrained, pool)
        dual = ascend(messages, pool, objective, target=CLOSED, deadline=self.deadline, adapt=True, passes=self._passes)
        _descend(presolved.constrained, pool)
        ranked = _by_peak(pool)
        self._warm = messages.copy(), [pool.plans[i] for i in ranked[:1]]
        for plan in self._warm[1]:
            self.submit(presolved.lift(plan))
        return dual.multipliers

    def _with_light_seconds(self) -> PresolvedProblem:
        light, presolved = self._light(), self._usable
        if presolved is not None:
            return _weighed(presolved, light)
        return presolve(_scaled(self.problem, light), self.rows, "tie")

    def _light(self) -> float:
        """Bytes that a second may weigh."""
        usage = sum(
            max((float(b.max()) for b in (*r.nodes.values(), *r.edges.values())), default=0.0) for r in self.rows
        )
        most = {id(a): float(a[np.isfinite(a)].max(initial=0.0)) for a in _distinct(self.problem)}
        stake = sum(most[id(n.cost)] for n in self.problem.nodes) + sum(most[id(e.table)] for e in self.problem.edges)
        return LIGHT * (usage or 1.0) / (stake or 1.0)

    def bound(self, multipliers: Floats) -> float:
        """No plan's peak on the rows with a price is below this (bytes)."""
        if not self.rows:
            return 0.0
        if self._usable is not None:
            return self._bound_again(_weighed(self._usable, 0.0), multipliers)
        rows = [row for row, p in zip(self.rows, multipliers, strict=False) if p > 0] or self.rows[:1]
        presolved = presolve(_scaled(self.problem, 0.0), rows, "bound")
        return self._bound(presolved, Pool(presolved.constrained), Messages(presolved.constrained, presolved.counts))

    def _bound_again(self, presolved: PresolvedProblem, multipliers: Floats) -> float:
        """From the messages, the plan and the multipliers of `alike`, where seconds had almost no weight."""
        pool, messages = Pool(presolved.constrained), Messages(presolved.constrained, presolved.counts)
        sent, plans = self._warm
        pool.add(plans)
        messages.restore(sent, {})
        return self._bound(presolved, pool, messages, multipliers)

    def _bound(self, presolved: PresolvedProblem, pool: Pool, messages: Messages, start: Floats | None = None) -> float:
        objective = PeakObjective(presolved.constrained, pool)
        effort: Mapping[str, Any] = {"target": CLOSED, "deadline": self.deadline, "adapt": True, "passes": self._passes}
        return ascend(messages, pool, objective, start=start, **effort).lower + 0.0

    def by_ilp(self) -> float:
        """The bound that CBC proves; its plans are judged, and rows learnt until none is new."""
        lower = -np.inf
        while time.monotonic() < self.deadline:
            presolved = presolve(_scaled(self.problem, 0.0), self.rows, "none")
            constrained = presolved.constrained
            memory = ilp.Memory(max(self.peak, 1.0), constrained.constants, constrained.nodes, constrained.edges)
            limit = min(30.0, max(self.deadline - time.monotonic(), 0.1))
            answer = ilp.least(memory, constrained.problem, "cbc", time_limit=limit)
            lower = max(lower, answer.lower * (1 - ilp.ACCURACY))
            known = len(self.rows)
            if answer.assignment is not None:
                plan = presolved.lift(answer.assignment)
                self.submit(plan)
                self.add_rows(self.source.over(plan, lower))
            if len(self.rows) == known:
                break
        return lower


def _weighed(presolved: PresolvedProblem, factor: float) -> PresolvedProblem:
    return replace(
        presolved, constrained=replace(presolved.constrained, problem=_scaled(presolved.constrained.problem, factor))
    )


def _scaled(problem: Problem, factor: float) -> Problem:
    """Finite costs times `factor`; what is forbidden stays so."""
    times = {id(a): _times(a, factor) for a in _distinct(problem)}
    nodes = tuple(replace(n, cost=times[id(n.cost)]) for n in problem.nodes)
    return Problem(nodes, tuple(replace(e, table=times[id(e.table)]) for e in problem.edges))


def _distinct(problem: Problem) -> Iterable[Floats]:
    """The arrays of costs; equal layers share theirs."""
    return {id(a): a for a in (*(n.cost for n in problem.nodes), *(e.table for e in problem.edges))}.values()


def _times(array: Floats, factor: float) -> Floats:
    finite = np.isfinite(array)
    return np.where(finite, np.where(finite, array, 0.0) * factor, np.inf)


def _by_peak(pool: Pool) -> Ints:
    """Feasible plans, least peak first, then fewest seconds."""
    feasible = np.flatnonzero(np.isfinite(pool.seconds))
    peaks = pool.usage[feasible].max(axis=1, initial=-np.inf)
    return feasible[np.lexsort((pool.seconds[feasible], peaks))]


def _descend(constrained: ConstrainedProblem, pool: Pool) -> None:
    """Descent to below any budget: less excess over nothing."""
    local_search = LocalSearch(constrained)
    for i in _by_peak(pool)[:DESCENTS].tolist():
        peak = float(pool.usage[i].max(initial=0.0))
        pool.add([local_search.descend(pool.plans[i], pool.usage[i], 0.999 * peak)])
