"""The cheapest plan that fits into memory.

    free     the optimum without rows; if it fits, that is all                                       passes/optimize.py
    tied     equal layers alike: prices, pool, descent, rows learnt until the best plan truly fits          -> _tied
    bound    folding respects the rows that have a price: a bound on all plans, plans that tell layers apart -> _bound
    untie    layers part ways between plans that fit and cheaper ones that do not                 passes/untie.py
    branch   on decisions that stand for themselves                                                passes/branch.py
    ilp      the unfolded problem, where it is small                                                -> _by_ilp

The problem with some rows is a relaxation, so its bounds are valid for all; a plan counts once `RowSource.peak` says it
fits. Rows are learnt from plans that fail.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.errors import ArgumentError
from autopar.passes import ilp
from autopar.passes.branch import Tree
from autopar.passes.hunt import CLOSED, Hunt
from autopar.passes.lagrangian import Dual, Messages, Pool, Within, ascend
from autopar.passes.least import LeastMemory, least_memory
from autopar.passes.loaded import Core, Folding, narrowed, presolve
from autopar.passes.memory_rows import Row, RowSource
from autopar.passes.optimize import Solution, optimize
from autopar.passes.problem import Ints, Problem
from autopar.passes.swap import Swapper
from autopar.passes.untie import hubs, mix, polish

TARGET = 1e-3
ROUNDS = 20  # of learning rows with equal layers alike
AGAIN = 4  # times that rows learnt by untied plans start everything anew
DESCENTS = 6  # plans of the pool that descent starts from
OFFERS = 4  # plans of one pool that are judged exactly before rows are learnt
SETTLE = 4  # passes at the best prices before strategies are ruled out
KEPT = 0.75  # share of the strategies that may be left for another turn with the rest
SMALL, TINY, FEW = 4_000, 200, 2  # strategies that the ILP gets: at most; of many layers; times those of the folded
TOLERATED = 1e-6  # share of the budget that a solver's tolerance may cost
ENDS = {"optimal": "optimal", "infeasible": "optimal", "time-limit": "time-limit"}
STATUS = {True: "certified", False: "near-optimal"}


@dataclass(frozen=True, slots=True, eq=False)
class BudgetedSolution(Solution):
    """A `Solution` that fits.

    Attributes:
        peak_bytes: exact, per device.
        price: what one more byte of budget is worth, in seconds (s/byte); zero if the budget does not bind.
        points: names of the program points that were needed.
        prices: s/byte by program point, where positive; they add up to `price`.
    """

    peak_bytes: float
    price: float
    points: tuple[str, ...]
    prices: dict[str, float]


class Infeasible(Exception):
    """No plan fits. `least` is the plan with the least peak that was found, with a bound on all plans' peaks."""

    def __init__(self, least: LeastMemory) -> None:
        super().__init__(f"no plan was found within the budget; the least peak found is {least.peak_bytes} bytes")
        self.least = least


def optimize_within(
    problem: Problem,
    source: RowSource,
    budget: float,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    target_gap: float = TARGET,
    fold: bool = True,
    presolve: bool = True,
    free: Solution | None = None,
) -> BudgetedSolution:
    """The cheapest plan whose peak is at most `budget` (bytes per device), to a relative gap of `target_gap`.

    `free` is the solution without a budget, where it is known. The gap is certified against the unfolded problem with
    all rows. "cbc" and "highs" force the ILP, with rows added as they are needed.

    Raises:
        Infeasible: no plan fits, or none was found.
        SolverError: no plan exists whatever its memory.
        ArgumentError: an unknown solver, or a time limit that is not above zero, or a budget that is no number.
    """
    if np.isnan(budget):
        raise ArgumentError(f"budget={budget!r} must be a number of bytes")
    begin = time.monotonic()
    if free is None:
        free = optimize(problem, solver=solver, time_limit=time_limit, fold=fold, presolve=presolve)
    hunt = Hunt(problem, source, budget, target_gap, begin + time_limit, lower=free.lower_bound)
    hunt.seen.append(free.assignment)
    if hunt.offer(free.assignment):
        return _solution(free, hunt, free.status, free.solver_used, 0, begin)
    hunt.learn(source.rows())
    if solver != "auto":
        return _forced(hunt, free, solver, begin, "tie" if fold else "none", full=presolve)
    return _auto(hunt, free, begin, "tie" if fold else "none", full=presolve)


def _auto(hunt: Hunt, free: Solution, begin: float, how: Folding, *, full: bool) -> BudgetedSolution:
    least = _least(hunt)
    hunt.learn(least.rows)
    if least.peak_bytes > hunt.budget:
        raise Infeasible(least)
    hunt.offer(least.assignment)
    hunt.seen.append(least.assignment)
    for _ in range(AGAIN):
        known = len(hunt.rows)
        _search(hunt, how, full=full)
        if hunt.done or len(hunt.rows) == known:
            break
    if not hunt.done and free.variables < free.variables_unfolded <= FEW * free.variables and how != "none":
        _search(hunt, "none", full=full)  # few layers: every decision may be branched on
    status, used, rows = "", "dual ascent", 0
    if hunt.gap > hunt.target and not hunt.late and _small(free):
        status, used, rows = _by_ilp(hunt, "cbc", "none", full=full)
    if not status or hunt.gap <= CLOSED:
        status = _status(hunt)
    return _solution(free, hunt, status, used, rows, begin)


def _least(hunt: Hunt) -> LeastMemory:
    """A plan that fits, or the one with the least peak."""
    return least_memory(
        hunt.problem, hunt.source, rows=hunt.rows, seeds=hunt.seen, deadline=hunt.deadline, enough=hunt.budget
    )


def _small(free: Solution) -> bool:
    """Whether the unfolded problem is one for the ILP: few variables, and few layers, which it would permute."""
    return free.variables_unfolded <= min(SMALL, max(TINY, FEW * free.variables))


def _status(hunt: Hunt) -> str:
    if hunt.gap <= hunt.target:
        return STATUS[hunt.gap == 0.0]
    return "time-limit" if hunt.late else "open"


def _search(hunt: Hunt, how: Folding, *, full: bool) -> None:
    """One turn of everything but the ILP, with the rows known."""
    core, pool, dual, messages = _tied(hunt, how, full=full)
    rows = list(hunt.rows)
    unfolded = not core.alike
    if unfolded:
        hunt.bound(dual.lower + core.constant, rows, dual.prices.tolist())
    if hunt.done:
        return
    if not unfolded:
        core, pool, dual, messages, rows = _bound(hunt, rows, dual, full=full)
        mix(hunt, core, pool, rows, dual.prices)
    if hunt.done:
        return
    branchable = core.counts == 1 if unfolded else (core.counts == 1) & hubs(hunt.problem)[core.first]
    tree = Tree(messages, pool, hunt.budget, branchable)
    upper = hunt.seconds - core.constant
    lower = tree.run(dual, upper, hunt.target / 2, hunt.deadline)
    hunt.bound(lower + core.constant, rows, dual.prices.tolist())
    _offer(hunt, core, pool)
    if not hunt.done and not unfolded:
        mix(hunt, core, pool, rows, dual.prices, tree.pairs)
    if not hunt.done and not unfolded:
        polish(hunt)


def _start(hunt: Hunt, core: Core) -> Pool:
    """A pool of the plans known, as far as the core has them."""
    pool = Pool(core.loaded)
    plans = [core.project(a) for a in ([] if hunt.plan is None else [hunt.plan]) + hunt.seen]
    pool.add(plan for plan in plans if plan is not None)
    return pool


def _tied(hunt: Hunt, how: Folding, *, full: bool) -> tuple[Core, Pool, Dual, Messages]:
    """Rounds of ascent, descent and judgement until no row is new."""
    for _ in range(ROUNDS):
        core = presolve(hunt.problem, hunt.rows, how, full=full)
        pool, messages = _start(hunt, core), Messages(core.loaded, core.counts)
        aim = Within(core.loaded, hunt.budget, pool, hunt.seconds - core.constant)
        dual = ascend(messages, pool, aim, target=hunt.target / 4, deadline=hunt.deadline)
        _descend(hunt, core, pool, dual)
        known = len(hunt.rows)
        _offer(hunt, core, pool)
        if len(hunt.rows) == known or hunt.late:
            break
    return core, pool, dual, messages


def _bound(hunt: Hunt, rows: list[Row], dual: Dual, *, full: bool) -> tuple[Core, Pool, Dual, Messages, list[Row]]:
    """A bound on all plans from the rows that have a price."""
    priced = [r for r in range(len(rows)) if dual.prices[r] > 0] or [0]
    rows, prices = [rows[r] for r in priced], dual.prices[priced]
    core = presolve(hunt.problem, rows, "bound", full=full)
    pool, messages = _start(hunt, core), Messages(core.loaded, core.counts)
    aim = Within(core.loaded, hunt.budget, pool, hunt.seconds - core.constant)
    dual = ascend(messages, pool, aim, start=prices, target=hunt.target / 4, deadline=hunt.deadline)
    hunt.bound(dual.lower + core.constant, rows, dual.prices.tolist())
    _descend(hunt, core, pool, dual)
    _offer(hunt, core, pool)
    while not hunt.done:
        keep = _affordable(hunt, core, dual, messages)
        if sum(map(len, keep)) > KEPT * core.loaded.problem.variables:
            break
        core = narrowed(core, messages.pairs, keep)
        pool, messages = _start(hunt, core), Messages(core.loaded, core.counts)
        aim = Within(core.loaded, hunt.budget, pool, hunt.seconds - core.constant)
        dual = ascend(messages, pool, aim, start=dual.prices, target=hunt.target / 4, deadline=hunt.deadline)
        hunt.bound(dual.lower + core.constant, rows, dual.prices.tolist())
        _descend(hunt, core, pool, dual)
        _offer(hunt, core, pool)
    return core, pool, dual, messages, rows


def _affordable(hunt: Hunt, core: Core, dual: Dual, messages: Messages) -> list[Ints]:
    """Per class of the core the strategies that a plan better than the best may take, at one member at least."""
    messages.set(dual.prices)
    messages.run(SETTLE)
    spare = float(dual.prices @ (core.loaded.constants - hunt.budget))
    limit = hunt.seconds - core.constant - spare + CLOSED * abs(hunt.seconds)
    keep = [np.flatnonzero(bound <= limit) for bound in messages.bounds]
    plan = None if hunt.plan is None else core.project(hunt.plan)
    if plan is not None and np.array_equal(core.lift(plan), hunt.plan):
        assert all(s in k for s, k in zip(plan, keep, strict=True)), "a bound rules out the best plan"
    return keep


def _descend(hunt: Hunt, core: Core, pool: Pool, dual: Dual) -> None:
    """One-swap descent from the best plan that fits and from the best when bytes are paid for."""
    swapper = Swapper(core.loaded)
    near = np.argsort(pool.seconds + pool.held @ dual.prices, kind="stable")[:DESCENTS]
    first = pool.fitting(hunt.budget)[:1]
    starts = dict.fromkeys([*first.tolist(), *near.tolist()])
    pool.add([swapper.descend(pool.plans[i], pool.held[i], hunt.budget) for i in starts])


def _offer(hunt: Hunt, core: Core, pool: Pool) -> None:
    """Judge the plans that fit on the rows known, cheapest first, until one truly fits."""
    for i in pool.fitting(hunt.budget)[:OFFERS]:
        if pool.seconds[i] + core.constant >= hunt.seconds or hunt.offer(core.lift(pool.plans[i])):
            return


def _forced(hunt: Hunt, free: Solution, solver: str, begin: float, how: Folding, *, full: bool) -> BudgetedSolution:
    """The ILP and nothing else."""
    status, used, rows = _by_ilp(hunt, solver, how, full=full)
    if hunt.plan is None:
        least = _least(hunt)
        if not hunt.offer(least.assignment):
            raise Infeasible(least)
    return _solution(free, hunt, status, used, rows, begin)


def _by_ilp(hunt: Hunt, solver: str, how: Folding, *, full: bool) -> tuple[str, str, int]:
    """The ILP with the rows known, until its plan truly fits: status, solver, and rows of the ILP.

    What a solver takes for fitting may be over the budget by its tolerance; then it gets less. The bound is only taken
    where no plans are tied.
    """
    margin = 0.0
    while True:
        core = presolve(hunt.problem, hunt.rows, how, full=full)
        loaded = core.loaded
        memory = ilp.Memory(hunt.budget - margin, loaded.constants, loaded.nodes, loaded.edges)
        upper = hunt.seconds - core.constant
        answer = ilp.solve(
            loaded.problem, solver, time_limit=max(hunt.left, 0.1), upper=upper, cutoff=True, memory=memory
        )
        if not core.alike and not margin:
            none_better = answer.status == "infeasible"
            hunt.bound(hunt.seconds if none_better else min(hunt.seconds, answer.lower + core.constant))
        if answer.assignment is None:
            return ENDS.get(answer.status, "fallback"), solver, answer.rows
        known = len(hunt.rows)
        plan = core.lift(answer.assignment)
        if hunt.offer(plan):
            status = ENDS.get(answer.status, "fallback")
            tied = status == "optimal" and hunt.gap > CLOSED
            return "optimal-tied" if tied else status, solver, answer.rows
        if len(hunt.rows) == known:
            over = max(row.value(hunt.problem, plan) for row in hunt.rows) - hunt.budget
            if over <= 0 or margin > TOLERATED * hunt.budget:
                return "fallback", solver, answer.rows
            margin += 2 * over


def _solution(free: Solution, hunt: Hunt, status: str, used: str, rows: int, begin: float) -> BudgetedSolution:
    assert hunt.plan is not None
    lower = min(hunt.lower, hunt.seconds)
    return BudgetedSolution(
        assignment=hunt.plan,
        objective=hunt.seconds,
        lower_bound=lower,
        gap=hunt.gap,
        status=status,
        solver_used=used,
        warnings=free.warnings if not hunt.prices and hunt.gap > hunt.target else (),
        phases={**free.phases, "memory": max(0.0, time.monotonic() - begin - sum(free.phases.values()))},
        variables=free.variables,
        variables_unfolded=free.variables_unfolded,
        rows=rows,
        peak_bytes=hunt.peak,
        price=sum(hunt.prices.values()),
        points=tuple(row.name for row in hunt.rows),
        prices=hunt.prices,
    )
