"""The plan with the least peak, and a lower bound on the peak of every plan.

    peak(x)  =  max_r bytes_r(x)         bound  =  max_mu  min_x  sum_r mu_r bytes_r(x),   mu >= 0, sum_r mu_r = 1

    plans    from the problem with costs of bytes plus a tiny weight on seconds, with equal strategies for equal layers.
             Where bytes do not decide, the fast strategy stays. Program points that are not rows yet would otherwise
             grow unnoticed. Each plan adds the rows of its highest peaks                 -> _State.with_equal_layers
    bound    from the problem without seconds, in symmetry classes that respect the rows with a positive multiplier
                                                                                                    -> _State.bound
    ilp      if plan and bound differ and the problem is small                                      -> _State.by_ilp

Presolve removes a strategy only for one with no more seconds and no more bytes in any row, so the least peak does not
change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models.memory.row import Row, RowSource
from autopar.ir.problem import Floats, Ints, Problem
from autopar.passes.memory.lagrangian import Dual, Messages, PeakObjective, Pool, ascend
from autopar.passes.memory.presolve import PresolvedProblem, presolve
from autopar.passes.solver import ilp
from autopar.passes.solver.optimize import optimize
from autopar.passes.solver.reduced_problem import CLOSED


@dataclass(frozen=True, slots=True)
class LeastMemoryEffort:
    """Limits of the search for the least peak."""

    # most rounds that look for plans and add rows (settled on the zoo; `bench sensitivity`, 2026-11: no effect on small
    # programs)
    rounds: int = 20
    # weight of all seconds at stake, as a share of all bytes at stake (settled on the zoo; `bench sensitivity`,
    # 2026-11: no effect on small programs)
    light: float = 1e-6
    # most strategies of a problem for which the ILP closes the gap (settled on the zoo)
    small: int = 2_000
    # the same if the bound already shows that no plan fits (settled on the zoo)
    tiny: int = 200
    # most time (s) of one ILP (not measured)
    ilp_seconds: float = 30.0


LEAST_MEMORY = LeastMemoryEffort()


@dataclass(frozen=True, slots=True, eq=False)
class LeastMemory:
    """The plan with the least peak that was found.

    Attributes:
        assignment: strategy per node, shape (nodes,).
        seconds: cost of the plan (s per step).
        peak_bytes: exact peak of the plan (bytes per device).
        lower_bytes: lower bound on the peak of every plan (bytes per device); -inf if a plan below the bytes asked for
            ended the search before a bound was computed.
        rows: the memory rows added.
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
    refutes: bool = False,
    effort: LeastMemoryEffort = LEAST_MEMORY,
) -> LeastMemory:
    """The plan with the least peak, and a certified lower bound on the peak of every plan.

    Args:
        problem: the unfolded problem.
        source: its memory rows.
        rows: rows to start from, besides the first rows of the source.
        seeds: known feasible plans; the fastest plan when empty.
        deadline: on the clock of `time.monotonic()`.
        exact: let the ILP close the gap of small problems.
        asked: bytes; a plan with a peak of at most this ends the search without a bound. A bound above it ends the
            search before the ILP, except on tiny problems.
        refutes: a bound above `asked` ends the search as soon as it is found, whatever the least peak so far.
        effort: limits of the search.

    Raises:
        SolverError: no feasible plan exists.
    """
    state = _State(problem, source, deadline, effort)
    state.add_rows([*rows, *source.rows()])
    for plan in seeds or [optimize(problem).assignment]:
        state.submit(plan)
    limit = asked if refutes and asked is not None else np.inf
    dual, lower, highest = Dual(-np.inf, np.zeros(0)), -np.inf, limit
    for _ in range(effort.rounds):
        rows_before = len(state.rows)
        dual = state.with_equal_layers()
        if state.suffices(asked) or len(state.rows) == rows_before or time.monotonic() > deadline:
            break
        # the bound on all plans is mostly a little below that on plans with equal strategies for equal layers
        if dual.lower > highest:
            highest, lower = dual.lower, max(lower, state.bound(dual.multipliers))
        if lower > limit:
            return state.result(min(lower, state.peak))
    if state.suffices(asked):
        return state.result(-np.inf)
    lower = max(lower, state.bound(dual.multipliers))
    most = effort.small if asked is None or lower <= asked else effort.tiny
    if exact and state.peak > lower * (1 + CLOSED) and problem.variables <= most:
        lower = max(lower, state.by_ilp())
    return state.result(min(lower, state.peak))


class _State:
    """The plan with the least peak so far, the rows added, and the plans to start from."""

    def __init__(self, problem: Problem, source: RowSource, deadline: float, effort: LeastMemoryEffort) -> None:
        self._effort = effort
        self.problem = problem
        self.source = source
        self.deadline = deadline
        self.rows: list[Row] = []
        self.plan: Ints | None = None
        self.peak = np.inf
        self.seeds: list[Ints] = []

    def add_rows(self, rows: Sequence[Row]) -> None:
        """Add the rows whose names are new."""
        names = {row.name for row in self.rows}
        for row in rows:
            if row.name not in names:
                names.add(row.name)
                self.rows.append(row)

    def submit(self, plan: Ints, lower: float = 0.0) -> None:
        """Evaluate a feasible plan on all rows, and add the rows of its highest peaks above `lower` (bytes)."""
        peak, row = self.source.peak(plan)
        self.add_rows([row, *self.source.over(plan, lower)])
        self.seeds.append(plan)
        if peak < self.peak:
            self.plan, self.peak = plan, peak

    def suffices(self, asked: float | None) -> bool:
        """Whether the best plan has a peak of at most `asked` (bytes)."""
        return asked is not None and self.peak <= asked

    def result(self, lower: float) -> LeastMemory:
        """The result with this bound (bytes)."""
        assert self.plan is not None
        return LeastMemory(self.plan, self.problem.value(self.plan), self.peak, lower, tuple(self.rows))

    def with_equal_layers(self) -> Dual:
        """Submit a plan of small peak with equal strategies for equal layers; returns the bound on such plans."""
        presolved = presolve(_scaled(self.problem, self._light()), self.rows, "tie")
        pool = Pool(presolved.constrained)
        pool.add(plan for plan in map(presolved.project, self.seeds) if plan is not None)
        dual = self._ascend(presolved, pool)
        for i in _by_peak(pool)[:1].tolist():
            self.submit(presolved.lift(pool.plans[i]), dual.lower)
        return dual

    def bound(self, multipliers: Floats) -> float:
        """A lower bound (bytes) on the peak of every plan, from the rows with a positive multiplier."""
        if not self.rows:
            return 0.0
        # not strict: rows may have been added since the multipliers were computed
        rows = [row for row, p in zip(self.rows, multipliers, strict=False) if p > 0] or self.rows[:1]
        presolved = presolve(_scaled(self.problem, 0.0), rows, "bound")
        return self._ascend(presolved, Pool(presolved.constrained)).lower + 0.0  # makes 0.0 of -0.0

    def _ascend(self, presolved: PresolvedProblem, pool: Pool) -> Dual:
        messages = Messages(presolved.constrained)
        objective = PeakObjective(presolved.constrained, pool)
        return ascend(messages, pool, objective, target=CLOSED, deadline=self.deadline)

    def _light(self) -> float:
        """Weight of a second, in bytes: all seconds at stake weigh the share `light` of all bytes at stake."""
        usage = sum(
            max((float(b.max()) for b in (*r.nodes.values(), *r.edges.values())), default=0.0) for r in self.rows
        )
        most = {id(a): float(a[np.isfinite(a)].max(initial=0.0)) for a in _distinct(self.problem)}
        stake = sum(most[id(n.cost)] for n in self.problem.nodes) + sum(most[id(e.table)] for e in self.problem.edges)
        return self._effort.light * (usage or 1.0) / (stake or 1.0)

    def by_ilp(self) -> float:
        """The bound (bytes) that CBC proves, solved again until its plan adds no row. Its plans are submitted."""
        lower = -np.inf
        while time.monotonic() < self.deadline:
            presolved = presolve(_scaled(self.problem, 0.0), self.rows, "none")
            constrained = presolved.constrained
            memory = ilp.Memory(max(self.peak, 1.0), constrained.constants, constrained.nodes, constrained.edges)
            limit = min(self._effort.ilp_seconds, max(self.deadline - time.monotonic(), 0.1))  # s
            answer = ilp.least(memory, constrained.problem, "cbc", time_limit=limit)
            lower = max(lower, answer.lower * (1 - ilp.ACCURACY))
            rows_before = len(self.rows)
            if answer.assignment is not None:
                plan = presolved.lift(answer.assignment)
                self.submit(plan)
                self.add_rows(self.source.over(plan, lower))
            if len(self.rows) == rows_before:
                break
        return lower


def _scaled(problem: Problem, factor: float) -> Problem:
    """The problem with finite costs times `factor`; infinite costs stay infinite."""
    times = {id(a): _times(a, factor) for a in _distinct(problem)}
    nodes = tuple(replace(n, cost=times[id(n.cost)]) for n in problem.nodes)
    return Problem(nodes, tuple(replace(e, table=times[id(e.table)]) for e in problem.edges))


def _distinct(problem: Problem) -> Iterable[Floats]:
    """The distinct arrays of costs. Equal layers share their arrays, so that each is processed once."""
    return {id(a): a for a in (*(n.cost for n in problem.nodes), *(e.table for e in problem.edges))}.values()


def _times(array: Floats, factor: float) -> Floats:
    """The finite entries times `factor`. Infinite entries stay infinite even if `factor` is zero."""
    finite = np.isfinite(array)
    return np.where(finite, np.where(finite, array, 0.0) * factor, np.inf)


def _by_peak(pool: Pool) -> Ints:
    """Feasible plans, least peak first, then fewest seconds."""
    feasible = np.flatnonzero(np.isfinite(pool.seconds))
    peaks = pool.usage[feasible].max(axis=1, initial=-np.inf)
    return feasible[np.lexsort((pool.seconds[feasible], peaks))]
