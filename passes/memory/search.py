"""One round of the search for the cheapest plan within a memory budget.

    symmetric  dual ascent and local search over plans with equal strategies for equal layers; rows are added until the
               best plan fits on all rows                                                              -> _symmetric
    bound      dual ascent on a quotient that respects the rows with a positive multiplier, so that the bound is valid
               for all plans                                                                           -> _bound
    mix        combine plans that fit with cheaper plans that do not, layer by layer     -> symmetry_breaking.mix
    explore    branch and bound over plans with equal strategies for equal layers. It serves to find plans: its bound
               is not valid for other plans                                                            -> _explore
    deepen     a longer dual ascent, where the short one left a gap                                    -> _deepen
    branch     branch on nodes whose symmetry class has one member                       -> _branch_and_mix

Programs with few equal layers run "explore" and a long "bound" without symmetry reduction in place of "deepen"
-> search. Each step runs only if the steps before it left a gap above the target. The effort of a step is counted in
changes of multipliers and in tree nodes, never in seconds. Only the deadline can therefore make two runs differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Floats, Ints
from autopar.passes.memory.branch_and_bound import MOST, Tree
from autopar.passes.memory.lagrangian import BudgetObjective, Dual, Messages, Pool, ascend
from autopar.passes.memory.local_search import LocalSearch
from autopar.passes.memory.presolve import PresolvedProblem, SymmetryReduction, fixed_by_bounds, presolve
from autopar.passes.memory.search_state import CLOSED, SearchState
from autopar.passes.memory.symmetry_breaking import hubs, mix, polish

# All limits of effort are settled on the zoo.
ROUNDS = 20  # most rounds of presolve and ascent that add rows, in `_symmetric`
DESCENTS = 6  # most plans of a pool from which local search starts, besides the cheapest that fits
SUBMITTED = 4  # most plans of one pool that are evaluated on all rows before the presolve runs again
SETTLE = 4  # message passes at the best multipliers before strategies are fixed
KEPT = 0.75  # fixing by bounds is repeated while it leaves at most this share of the strategies
EXPLORED = 12  # most tree nodes of a search among plans with equal strategies for equal layers
WORK = 100_000  # most strategies that one search tree visits, summed over its tree nodes
PER_NODE = 8  # fixed cost of visiting one node of the problem, counted in strategies
FEWEST = 10  # tree nodes that a search tree may visit whatever `WORK` says
# Arguments of `lagrangian.ascend` for a long ascent.
LONG: Mapping[str, Any] = {"changes": 150, "patience": 25, "enough": 0.05, "adapt": True, "scan": False}


def search(state: SearchState, how: SymmetryReduction, few: bool, *, full: bool) -> None:
    """Run one round of all steps of the module docstring, from the rows added so far.

    Args:
        state: updated with rows, plans and bounds.
        how: the symmetry reduction of the first step.
        few: the program has so few equal layers that the last steps give each its own strategies.
        full: eliminate dominated strategies as well, not only infeasible ones.
    """
    presolved, pool, dual, messages = _symmetric(state, how, full=full)
    rows, individual = state.rows[: len(dual.multipliers)], not presolved.symmetric
    if individual:
        state.bound(dual.lower + presolved.constant, rows, dual.multipliers.tolist())
    if state.done:
        return
    symmetric = presolved, pool, dual, messages
    if not individual:
        presolved, pool, dual, messages, rows = _bound(state, rows, dual, "bound", full=full)
        mix(state, presolved, pool, rows, dual.multipliers)
    if state.done:
        return
    if few:
        if not individual:
            _explore(state, *symmetric)
        presolved, pool, dual, messages, rows = _bound(state, rows, dual, "none", full=full, patient=True)
    else:
        dual = _deepen(state, presolved, pool, dual, messages, rows)
        presolved, pool, dual, messages = _fix_by_bounds(state, presolved, pool, dual, messages, rows)
    if not state.done:
        _branch_and_mix(state, presolved, pool, dual, messages, rows, individual or few)


def _branch_and_mix(
    state: SearchState,
    presolved: PresolvedProblem,
    pool: Pool,
    dual: Dual,
    messages: Messages,
    rows: list[Row],
    individual: bool,
) -> None:
    """Branch on nodes whose symmetry class has one member, then mix the plans that the tree met, then polish.

    With `individual`, every class of one member may be branched on. Otherwise only hubs may be, whose class has one
    member even before memory rows split the classes.
    """
    branchable = presolved.counts == 1 if individual else (presolved.counts == 1) & hubs(state.problem)[presolved.first]
    lower, pairs = _branch(state, presolved, pool, dual, messages, branchable)
    state.bound(lower + presolved.constant, rows, dual.multipliers.tolist())
    if not state.done:
        mix(state, presolved, pool, rows, dual.multipliers, pairs)
    if not state.done:
        polish(state)


def _explore(state: SearchState, presolved: PresolvedProblem, pool: Pool, dual: Dual, messages: Messages) -> None:
    """Branch and bound over plans with equal strategies for equal layers. Its bound holds only for these plans."""
    dual = _deepen(state, presolved, pool, dual, messages)
    if not state.late:
        _branch(state, presolved, pool, dual, messages, presolved.counts > 0, EXPLORED)


def _branch(
    state: SearchState,
    presolved: PresolvedProblem,
    pool: Pool,
    dual: Dual,
    messages: Messages,
    branchable: NDArray[np.bool_],
    most: int = MOST,
) -> tuple[float, list[tuple[Ints, Ints]]]:
    """Run a search tree and submit the plans that fit.

    Args:
        branchable: the nodes of the presolved problem that may be branched on, shape (nodes,).
        most: most tree nodes.

    Returns:
        The lower bound of the tree (s, without `presolved.constant`), and the pairs of plans that it met.
    """
    problem = presolved.constrained.problem
    able = WORK // (problem.variables + PER_NODE * len(problem.nodes))
    most = min(most, max(FEWEST, able))
    tree = Tree(messages, pool, state.budget, branchable)
    lower = tree.run(dual, state.seconds - presolved.constant, state.target / 2, state.deadline, most)
    _submit(state, presolved, pool)
    return lower, tree.pairs


def _start(state: SearchState, presolved: PresolvedProblem) -> Pool:
    """A pool of the incumbent and of `start_plans`, as far as the presolved problem contains them."""
    pool = Pool(presolved.constrained)
    plans = [presolved.project(a) for a in ([] if state.plan is None else [state.plan]) + state.start_plans]
    pool.add(plan for plan in plans if plan is not None)
    return pool


def _symmetric(
    state: SearchState, how: SymmetryReduction, *, full: bool
) -> tuple[PresolvedProblem, Pool, Dual, Messages]:
    """Presolve, dual ascent, local search and exact evaluation, repeated until no row is added."""
    rounds = 0
    while True:
        presolved = presolve(state.problem, state.rows, how, full=full)
        pool, messages = _start(state, presolved), Messages(presolved.constrained, presolved.counts)
        objective = BudgetObjective(presolved.constrained, state.budget, pool, state.seconds - presolved.constant)
        dual = _ascend(state, messages, pool, objective)
        _descend(state, presolved, pool, dual)
        rows_before = len(state.rows)
        _submit(state, presolved, pool)
        rounds += 1
        if len(state.rows) == rows_before or state.late or rounds == ROUNDS:
            return presolved, pool, dual, messages


def _bound(
    state: SearchState, rows: list[Row], dual: Dual, how: SymmetryReduction, *, full: bool, patient: bool = False
) -> tuple[PresolvedProblem, Pool, Dual, Messages, list[Row]]:
    """A dual ascent whose bound is valid for all plans, on the rows with a positive multiplier only.

    Fewer rows leave larger symmetry classes. A relaxation with fewer rows still bounds every plan.

    Args:
        rows: the rows of `dual.multipliers`, in the same order.
        dual: gives the multipliers to start from.
        how: "bound" or "none", the symmetry reductions with valid bounds.
        patient: run long ascents.

    Returns:
        The presolved problem, its pool, the bound, the messages, and the rows used.
    """
    priced = [r for r in range(len(dual.multipliers)) if dual.multipliers[r] > 0] or [0]
    rows, multipliers = [rows[r] for r in priced], dual.multipliers[priced]
    presolved = presolve(state.problem, rows, how, full=full)
    return *_fix_by_bounds(state, *_ascended(state, presolved, multipliers, rows, patient), rows, patient), rows


def _fix_by_bounds(
    state: SearchState,
    presolved: PresolvedProblem,
    pool: Pool,
    dual: Dual,
    messages: Messages,
    rows: list[Row],
    patient: bool = False,
) -> tuple[PresolvedProblem, Pool, Dual, Messages]:
    """Remove strategies whose lower bound exceeds the incumbent and ascend again, while that removes many of them."""
    while not state.done:
        keep = _within_bound(state, presolved, dual, messages)
        if sum(map(len, keep)) > KEPT * presolved.constrained.problem.variables:
            break
        presolved = fixed_by_bounds(presolved, messages.pairs, keep)
        presolved, pool, dual, messages = _ascended(state, presolved, dual.multipliers, rows, patient)
    return presolved, pool, dual, messages


def _ascended(
    state: SearchState, presolved: PresolvedProblem, multipliers: Floats, rows: list[Row], patient: bool = False
) -> tuple[PresolvedProblem, Pool, Dual, Messages]:
    """Dual ascent from these multipliers, local search, and exact evaluation. The bound is recorded."""
    pool, messages = _start(state, presolved), Messages(presolved.constrained, presolved.counts)
    objective = BudgetObjective(presolved.constrained, state.budget, pool, state.seconds - presolved.constant)
    dual = _ascend(state, messages, pool, objective, multipliers, patient)
    state.bound(dual.lower + presolved.constant, rows, dual.multipliers.tolist())
    _descend(state, presolved, pool, dual)
    _submit(state, presolved, pool)
    return presolved, pool, dual, messages


def _deepen(
    state: SearchState,
    presolved: PresolvedProblem,
    pool: Pool,
    dual: Dual,
    messages: Messages,
    rows: list[Row] | None = None,
) -> Dual:
    """The better of `dual` and a long ascent from it, then local search. With `rows`, the bound is recorded."""
    objective = BudgetObjective(presolved.constrained, state.budget, pool, state.seconds - presolved.constant)
    longer = _ascend(state, messages, pool, objective, dual.multipliers, True)
    dual = longer if longer.lower > dual.lower else dual
    if rows is not None:
        state.bound(dual.lower + presolved.constant, rows, dual.multipliers.tolist())
    _descend(state, presolved, pool, dual)
    _submit(state, presolved, pool)
    return dual


def _ascend(
    state: SearchState,
    messages: Messages,
    pool: Pool,
    objective: BudgetObjective,
    start: Floats | None = None,
    patient: bool = False,
) -> Dual:
    """A dual ascent to a quarter of the target gap, which leaves the rest of the target to later steps."""
    effort: Mapping[str, Any] = LONG if patient else {}
    return ascend(messages, pool, objective, start=start, target=state.target / 4, deadline=state.deadline, **effort)


def _within_bound(state: SearchState, presolved: PresolvedProblem, dual: Dual, messages: Messages) -> list[Ints]:
    """Per node of the presolved problem, the strategies that a plan better than the incumbent may take.

    A strategy is kept if its bound on the penalised cost, plus the constant terms of the Lagrangian, is at most the
    cost of the incumbent.
    """
    messages.set(dual.multipliers)
    messages.run(SETTLE)
    # lambda (constants - budget): `messages.bounds` has neither the constant bytes nor the budget
    spare = float(dual.multipliers @ (presolved.constrained.constants - state.budget))
    limit = state.seconds - presolved.constant - spare + CLOSED * abs(state.seconds)
    keep = [np.flatnonzero(bound <= limit) for bound in messages.bounds]
    plan = None if state.plan is None else presolved.project(state.plan)
    if plan is not None and state.plan is not None and np.array_equal(presolved.lift(plan), state.plan):
        assert all(s in k for s, k in zip(plan, keep, strict=True)), "a bound rules out the best plan"
    return keep


def _descend(state: SearchState, presolved: PresolvedProblem, pool: Pool, dual: Dual) -> None:
    """Local search from the cheapest plan that fits, and from the plans of least penalised cost. Extends the pool."""
    local_search = LocalSearch(presolved.constrained)
    near = np.argsort(pool.seconds + pool.usage @ dual.multipliers, kind="stable")[:DESCENTS]
    first = pool.fitting(state.budget)[:1]
    starts = dict.fromkeys([*first.tolist(), *near.tolist()])
    pool.add([local_search.descend(pool.plans[i], pool.usage[i], state.budget) for i in starts])


def _submit(state: SearchState, presolved: PresolvedProblem, pool: Pool) -> None:
    """Submit the plans that fit on the known rows, cheapest first, until one fits on all or none can be better."""
    for i in pool.fitting(state.budget)[:SUBMITTED]:
        if pool.seconds[i] + presolved.constant >= state.seconds or state.submit(presolved.lift(pool.plans[i])):
            return
