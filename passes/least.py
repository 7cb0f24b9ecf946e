"""The plan with the least peak.

    t(x)  =  max_r bytes_r(x)            bound  =  max_mu  min_x  sum_r mu_r bytes_r(x),   mu >= 0, sum mu = 1

Plans come from the problem with seconds at a tiny price, equal layers alike: bytes decide, and where they do not, what
is fast stays as it is, so that no program point that is not yet a row runs away. The bound comes from the problem
without seconds, folded with respect to the rows that have a price. Where the two do not meet and the problem is small,
the ILP decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes import ilp
from autopar.passes.hunt import CLOSED
from autopar.passes.lagrangian import Messages, Pool, Smallest, ascend
from autopar.passes.loaded import Loaded, presolve
from autopar.passes.memory_rows import Row, RowSource
from autopar.passes.optimize import optimize
from autopar.passes.problem import Floats, Ints, Problem
from autopar.passes.swap import Swapper

ROUNDS = 20
LIGHT = 1e-6  # of all bytes: what all seconds may weigh
SMALL, TINY = 2_000, 200  # strategies up to which the ILP closes the gap; though nothing fits anyhow
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

    Raises SolverError when no plan exists at all.
    """
    state = _State(problem, source, deadline)
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

    def __init__(self, problem: Problem, source: RowSource, deadline: float) -> None:
        self.problem = problem
        self.source = source
        self.deadline = deadline
        self.rows: list[Row] = []
        self.plan: Ints | None = None
        self.peak = np.inf
        self.seeds: list[Ints] = []
        self._weightless = _scaled(problem, 0.0)

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

    def found(self, lower: float) -> LeastMemory:
        assert self.plan is not None
        return LeastMemory(self.plan, self.problem.value(self.plan), self.peak, lower, tuple(self.rows))

    def alike(self) -> Floats:
        """A plan that treats equal layers alike; returns the prices of the rows."""
        rows = list(self.rows)
        core = presolve(_scaled(self.problem, self._light()), rows, "tie")
        pool = Pool(core.loaded)
        pool.add(plan for plan in map(core.project, self.seeds) if plan is not None)
        aim = Smallest(core.loaded, pool)
        dual = ascend(Messages(core.loaded, core.counts), pool, aim, target=CLOSED, deadline=self.deadline)
        _descend(core.loaded, pool)
        ranked = _by_peak(pool)
        if len(ranked):
            self.offer(core.lift(pool.plans[ranked[0]]))
        return dual.prices

    def _light(self) -> float:
        """Bytes that a second may weigh."""
        held = sum(
            max((float(b.max()) for b in (*r.nodes.values(), *r.edges.values())), default=0.0) for r in self.rows
        )
        costs = [n.cost for n in self.problem.nodes] + [e.table for e in self.problem.edges]
        most = sum(float(a[np.isfinite(a)].max(initial=0.0)) for a in costs)
        return LIGHT * (held or 1.0) / (most or 1.0)

    def bound(self, prices: Floats) -> float:
        """No plan's peak on the rows with a price is below this (bytes)."""
        rows = [row for row, p in zip(self.rows, prices, strict=False) if p > 0] or self.rows[:1]
        if not rows:
            return 0.0
        core = presolve(self._weightless, rows, "bound")
        pool = Pool(core.loaded)
        aim = Smallest(core.loaded, pool)
        dual = ascend(Messages(core.loaded, core.counts), pool, aim, target=CLOSED, deadline=self.deadline)
        return dual.lower + 0.0

    def by_ilp(self) -> float:
        """The bound that CBC proves; its plans are judged, and rows learnt until none is new."""
        lower = -np.inf
        while time.monotonic() < self.deadline:
            core = presolve(self._weightless, self.rows, "none")
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


def _scaled(problem: Problem, factor: float) -> Problem:
    """Finite costs times `factor`; what is forbidden stays so."""
    nodes = tuple(replace(n, cost=_times(n.cost, factor)) for n in problem.nodes)
    return Problem(nodes, tuple(replace(e, table=_times(e.table, factor)) for e in problem.edges))


def _times(array: Floats, factor: float) -> Floats:
    return np.where(np.isfinite(array), np.where(np.isfinite(array), array, 0.0) * factor, np.inf)


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
