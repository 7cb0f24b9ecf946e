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
from autopar.passes.memory.lagrangian import FIRST, NEXT, Messages, Pool, Smallest, ascend
from autopar.passes.memory.local_search import Swapper
from autopar.passes.memory.presolve import Core, Loaded, presolve
from autopar.passes.memory.search_state import CLOSED
from autopar.passes.solver import ilp
from autopar.passes.solver.optimize import optimize

ROUNDS = 20
LIGHT = 1e-6  # of all bytes: what all seconds may weigh
SMALL, TINY = 2_000, 200  # strategies up to which the ILP closes the gap; though nothing fits anyhow
QUICK = 4, 2  # passes at the first prices, and after each change of prices, on a problem that is given
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
    core: Core | None = None,
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
        core: the problem presolved with `rows`, where that is at hand; one whose bounds hold for all plans.

    Raises SolverError when no plan exists at all.
    """
    state = _State(problem, source, deadline, core)
    state.learn([*rows, *source.rows()])
    for plan in seeds or [optimize(problem).assignment]:
        state.offer(plan)
    lower, prices = -np.inf, np.zeros(0)
    for _ in range(ROUNDS):
        known = len(state.rows)
        prices = state.alike()
        if state.suffices(asked) or len(state.rows) == known or time.monotonic() > deadline:
            break
    if state.suffices(asked):
        return state.found(-np.inf)
    lower = state.bound(prices)
    most = SMALL if asked is None or lower <= asked else TINY
    if exact and state.peak > lower * (1 + CLOSED) and problem.variables <= most:
        lower = max(lower, state.by_ilp())
    return state.found(min(lower, state.peak))


class _State:
    """The best plan so far and the rows met."""

    def __init__(self, problem: Problem, source: RowSource, deadline: float, core: Core | None) -> None:
        self.problem = problem
        self.source = source
        self.deadline = deadline
        self.rows: list[Row] = []
        self.plan: Ints | None = None
        self.peak = np.inf
        self.seeds: list[Ints] = []
        self._core = core
        self._warm: tuple[list[list[Floats]], list[Ints]] = [], []

    def learn(self, rows: Sequence[Row]) -> None:
        names = {row.name for row in self.rows}
        for row in rows:
            if row.name not in names:
                names.add(row.name)
                self.rows.append(row)

    def offer(self, plan: Ints) -> None:
        """Judge a feasible plan; where it peaks becomes a row."""
        peak, row = self.source.peak(plan)
        self.learn([row])
        self.seeds.append(plan)
        if peak < self.peak:
            self.plan, self.peak = plan, peak

    def suffices(self, asked: float | None) -> bool:
        """Whether a plan is known whose peak is within the bytes asked for."""
        return asked is not None and self.peak <= asked

    @property
    def _usable(self) -> Core | None:
        """The presolved problem given, if it has all rows known."""
        return self._core if self._core is not None and self._core.loaded.rows == len(self.rows) else None

    @property
    def _passes(self) -> tuple[int, int]:
        """Fewer where a problem is given: many more ascents follow on it."""
        return (FIRST, NEXT) if self._usable is None else QUICK

    def found(self, lower: float) -> LeastMemory:
        assert self.plan is not None
        return LeastMemory(self.plan, self.problem.value(self.plan), self.peak, lower, tuple(self.rows))

    def alike(self) -> Floats:
        """A plan that treats equal layers alike; returns the prices of the rows."""
        core = self._with_light_seconds()
        pool, messages = Pool(core.loaded), Messages(core.loaded, core.counts)
        pool.add(plan for plan in map(core.project, self.seeds) if plan is not None)
        aim = Smallest(core.loaded, pool)
        dual = ascend(messages, pool, aim, target=CLOSED, deadline=self.deadline, adapt=True, passes=self._passes)
        _descend(core.loaded, pool)
        ranked = _by_peak(pool)
        self._warm = messages.copy(), [pool.plans[i] for i in ranked[:1]]
        for plan in self._warm[1]:
            self.offer(core.lift(plan))
        return dual.prices

    def _with_light_seconds(self) -> Core:
        light, core = self._light(), self._usable
        if core is not None:
            return _weighed(core, light)
        return presolve(_scaled(self.problem, light), self.rows, "tie")

    def _light(self) -> float:
        """Bytes that a second may weigh."""
        held = sum(
            max((float(b.max()) for b in (*r.nodes.values(), *r.edges.values())), default=0.0) for r in self.rows
        )
        most = {id(a): float(a[np.isfinite(a)].max(initial=0.0)) for a in _distinct(self.problem)}
        stake = sum(most[id(n.cost)] for n in self.problem.nodes) + sum(most[id(e.table)] for e in self.problem.edges)
        return LIGHT * (held or 1.0) / (stake or 1.0)

    def bound(self, prices: Floats) -> float:
        """No plan's peak on the rows with a price is below this (bytes)."""
        if not self.rows:
            return 0.0
        if self._usable is not None:
            return self._bound_again(_weighed(self._usable, 0.0), prices)
        rows = [row for row, p in zip(self.rows, prices, strict=False) if p > 0] or self.rows[:1]
        core = presolve(_scaled(self.problem, 0.0), rows, "bound")
        return self._bound(core, Pool(core.loaded), Messages(core.loaded, core.counts))

    def _bound_again(self, core: Core, prices: Floats) -> float:
        """From the messages, the plan and the prices of `alike`, where seconds had almost no weight."""
        pool, messages = Pool(core.loaded), Messages(core.loaded, core.counts)
        sent, plans = self._warm
        pool.add(plans)
        messages.restore(sent, {})
        return self._bound(core, pool, messages, prices)

    def _bound(self, core: Core, pool: Pool, messages: Messages, start: Floats | None = None) -> float:
        aim = Smallest(core.loaded, pool)
        effort: Mapping[str, Any] = {"target": CLOSED, "deadline": self.deadline, "adapt": True, "passes": self._passes}
        return ascend(messages, pool, aim, start=start, **effort).lower + 0.0

    def by_ilp(self) -> float:
        """The bound that CBC proves; its plans are judged, and rows learnt until none is new."""
        lower = -np.inf
        while time.monotonic() < self.deadline:
            core = presolve(_scaled(self.problem, 0.0), self.rows, "none")
            loaded = core.loaded
            memory = ilp.Memory(max(self.peak, 1.0), loaded.constants, loaded.nodes, loaded.edges)
            limit = min(30.0, max(self.deadline - time.monotonic(), 0.1))
            answer = ilp.least(memory, loaded.problem, "cbc", time_limit=limit)
            lower = max(lower, answer.lower * (1 - ilp.ACCURACY))
            known = len(self.rows)
            if answer.assignment is not None:
                plan = core.lift(answer.assignment)
                self.offer(plan)
                self.learn(self.source.over(plan, lower))
            if len(self.rows) == known:
                break
        return lower


def _weighed(core: Core, factor: float) -> Core:
    return replace(core, loaded=replace(core.loaded, problem=_scaled(core.loaded.problem, factor)))


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
    peaks = pool.held[feasible].max(axis=1, initial=-np.inf)
    return feasible[np.lexsort((pool.seconds[feasible], peaks))]


def _descend(loaded: Loaded, pool: Pool) -> None:
    """Descent to below any budget: less excess over nothing."""
    swapper = Swapper(loaded)
    for i in _by_peak(pool)[:DESCENTS].tolist():
        peak = float(pool.held[i].max(initial=0.0))
        pool.add([swapper.descend(pool.plans[i], pool.held[i], 0.999 * peak)])
