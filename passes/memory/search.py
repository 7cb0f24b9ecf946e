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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Floats, Ints
from autopar.passes.memory.branch_and_bound import TREE, Tree, TreeEffort
from autopar.passes.memory.lagrangian import (
    MULTIPLIERS,
    BudgetObjective,
    Dual,
    Messages,
    MultiplierEffort,
    Pool,
    ascend,
)
from autopar.passes.memory.local_search import LocalSearch
from autopar.passes.memory.presolve import PresolvedProblem, SymmetryReduction, fixed_by_bounds, presolve
from autopar.passes.memory.search_state import SearchState
from autopar.passes.memory.symmetry_breaking import hubs, mix, polish
from autopar.passes.solver.reduced_problem import CLOSED

#: A long ascent, where a short one left a gap.
LONG = MultiplierEffort(changes=150, patience=25, enough=0.05, adapt=True, scans=0)


@dataclass(frozen=True, slots=True, eq=False)
class _Relaxation:
    """A presolved problem with the last dual ascent on it.

    Attributes:
        presolved: the problem.
        rows: its memory rows, in the order of the multipliers.
        pool: its plans met so far; grows.
        messages: of the dual ascent, at `dual`.
        dual: the lower bound (s, without `presolved.constant`) and the multipliers where it was reached.
    """

    presolved: PresolvedProblem
    rows: Sequence[Row]
    pool: Pool
    messages: Messages
    dual: Dual

    def record(self, state: SearchState) -> None:
        """Record the bound, unless it is valid only for plans with equal strategies for equal layers."""
        if not self.presolved.symmetric:
            state.bound(self.dual.lower + self.presolved.constant, self.rows, self.dual.multipliers.tolist())


def search(state: SearchState, how: SymmetryReduction, few: bool, *, full: bool) -> None:
    """Run one round of all steps of the module docstring, from the rows added so far.

    Args:
        state: updated with rows, plans and bounds.
        how: the symmetry reduction of the first step.
        few: the program has so few equal layers that the last steps give each its own strategies.
        full: eliminate dominated strategies as well, not only infeasible ones.
    """
    first = relaxation = _symmetric(state, how, full=full)
    first.record(state)
    individual = not first.presolved.symmetric
    if state.done:
        return
    if not individual:
        relaxation = _bound(state, first, "bound", full=full)
        mix(state, relaxation.presolved, relaxation.pool, relaxation.rows, relaxation.dual.multipliers)
    if state.done:
        return
    if few:
        if not individual:
            _explore(state, first)
        relaxation = _bound(state, relaxation, "none", full=full, patient=True)
    else:
        relaxation = _fix_by_bounds(state, _deepen(state, relaxation))
    if not state.done:
        _branch_and_mix(state, relaxation, individual or few)


def _branch_and_mix(state: SearchState, relaxation: _Relaxation, individual: bool) -> None:
    """Branch on nodes whose symmetry class has one member, then mix the plans that the tree met, then polish.

    With `individual`, every class of one member may be branched on. Otherwise only hubs may be, whose class has one
    member even before memory rows split the classes.
    """
    presolved, rows, multipliers = relaxation.presolved, relaxation.rows, relaxation.dual.multipliers
    branchable = presolved.counts == 1 if individual else (presolved.counts == 1) & hubs(state.problem)[presolved.first]
    lower, pairs = _branch(state, relaxation, branchable)
    state.bound(lower + presolved.constant, rows, multipliers.tolist())
    if not state.done:
        mix(state, presolved, relaxation.pool, rows, multipliers, pairs)
    if not state.done:
        polish(state)


def _explore(state: SearchState, relaxation: _Relaxation) -> None:
    """Branch and bound over plans with equal strategies for equal layers. Its bound holds only for these plans."""
    deeper = _deepen(state, relaxation)
    if not state.late:
        _branch(state, deeper, deeper.presolved.counts > 0, replace(TREE, most=state.effort.explored))


def _branch(
    state: SearchState, relaxation: _Relaxation, branchable: NDArray[np.bool_], tree: TreeEffort = TREE
) -> tuple[float, list[tuple[Ints, Ints]]]:
    """Run a search tree and submit the plans that fit.

    Args:
        branchable: the nodes of the presolved problem that may be branched on, shape (nodes,).
        tree: when the search tree ends with a gap.

    Returns:
        The lower bound of the tree (s, without `presolved.constant`), and the pairs of plans that it met.
    """
    presolved, problem = relaxation.presolved, relaxation.presolved.constrained.problem
    able = state.effort.work // (problem.variables + state.effort.per_node * len(problem.nodes))
    effort = replace(tree, most=min(tree.most, max(state.effort.fewest, able)))
    search_tree = Tree(relaxation.messages, relaxation.pool, state.budget, branchable, effort)
    upper = state.seconds - presolved.constant
    lower = search_tree.run(relaxation.dual, upper, state.target / 2, state.deadline)
    _submit(state, presolved, relaxation.pool)
    return lower, search_tree.pairs


def _start(state: SearchState, presolved: PresolvedProblem) -> Pool:
    """A pool of the incumbent and of `start_plans`, as far as the presolved problem contains them."""
    pool = Pool(presolved.constrained)
    plans = [presolved.project(a) for a in ([] if state.plan is None else [state.plan]) + state.start_plans]
    pool.add(plan for plan in plans if plan is not None)
    return pool


def _symmetric(state: SearchState, how: SymmetryReduction, *, full: bool) -> _Relaxation:
    """Presolve, dual ascent, local search and exact evaluation, repeated until no row is added."""
    rounds = 0
    while True:
        rows = tuple(state.rows)
        relaxation = _relax(state, presolve(state.problem, rows, how, full=full), rows)
        rounds += 1
        if len(state.rows) == len(rows) or state.is_accepted or state.late or rounds == state.effort.rounds:
            return relaxation


def _bound(
    state: SearchState, last: _Relaxation, how: SymmetryReduction, *, full: bool, patient: bool = False
) -> _Relaxation:
    """A dual ascent whose bound is valid for all plans, on the rows with a positive multiplier only.

    Fewer rows leave larger symmetry classes. A relaxation with fewer rows still bounds every plan.

    Args:
        last: gives the rows, and the multipliers to start from.
        how: "bound" or "none", the symmetry reductions with valid bounds.
        patient: run long ascents.
    """
    multipliers = last.dual.multipliers
    priced = [r for r in range(len(multipliers)) if multipliers[r] > 0] or [0]
    rows = [last.rows[r] for r in priced]
    presolved = presolve(state.problem, rows, how, full=full)
    relaxation = _relax(state, presolved, rows, multipliers[priced], patient)
    relaxation.record(state)
    return _fix_by_bounds(state, relaxation, patient)


def _fix_by_bounds(state: SearchState, relaxation: _Relaxation, patient: bool = False) -> _Relaxation:
    """Remove strategies whose lower bound exceeds the incumbent and ascend again, while that removes many of them."""
    while not state.done:
        keep = _within_bound(state, relaxation)
        if sum(map(len, keep)) > state.effort.kept * relaxation.presolved.constrained.problem.variables:
            break
        smaller = fixed_by_bounds(relaxation.presolved, relaxation.messages.pairs, keep)
        relaxation = _relax(state, smaller, relaxation.rows, relaxation.dual.multipliers, patient)
        relaxation.record(state)
    return relaxation


def _relax(
    state: SearchState,
    presolved: PresolvedProblem,
    rows: Sequence[Row],
    multipliers: Floats | None = None,
    patient: bool = False,
) -> _Relaxation:
    """Dual ascent from these multipliers, local search, and exact evaluation."""
    pool, messages = _start(state, presolved), Messages(presolved.constrained, presolved.counts)
    dual = _ascend(state, presolved, pool, messages, multipliers, patient)
    _descend(state, presolved, pool, dual)
    _submit(state, presolved, pool)
    return _Relaxation(presolved, rows, pool, messages, dual)


def _deepen(state: SearchState, relaxation: _Relaxation) -> _Relaxation:
    """The better of the last ascent and a long one from it, then local search. The bound is recorded."""
    presolved, pool, dual = relaxation.presolved, relaxation.pool, relaxation.dual
    longer = _ascend(state, presolved, pool, relaxation.messages, dual.multipliers, True)
    deeper = replace(relaxation, dual=longer) if longer.lower > dual.lower else relaxation
    deeper.record(state)
    _descend(state, presolved, pool, deeper.dual)
    _submit(state, presolved, pool)
    return deeper


def _ascend(
    state: SearchState,
    presolved: PresolvedProblem,
    pool: Pool,
    messages: Messages,
    start: Floats | None,
    patient: bool,
) -> Dual:
    """A dual ascent to a quarter of the target gap, which leaves the rest of the target to later steps."""
    objective = BudgetObjective(presolved.constrained, state.budget, pool, state.seconds - presolved.constant)
    effort = LONG if patient else MULTIPLIERS
    return ascend(
        messages, pool, objective, start=start, target=state.target / 4, deadline=state.deadline, effort=effort
    )


def _within_bound(state: SearchState, relaxation: _Relaxation) -> list[Ints]:
    """Per node of the presolved problem, the strategies that a plan better than the incumbent may take.

    A strategy is kept if its bound on the penalised cost, plus the constant terms of the Lagrangian, is at most the
    cost of the incumbent.
    """
    presolved, messages, multipliers = relaxation.presolved, relaxation.messages, relaxation.dual.multipliers
    messages.set(multipliers)
    messages.run(state.effort.settle)
    # lambda (constants - budget): `messages.bounds` has neither the constant bytes nor the budget
    spare = float(multipliers @ (presolved.constrained.constants - state.budget))
    limit = state.seconds - presolved.constant - spare + CLOSED * abs(state.seconds)
    keep = [np.flatnonzero(bound <= limit) for bound in messages.bounds]
    plan = None if state.plan is None else presolved.project(state.plan)
    if plan is not None and state.plan is not None and np.array_equal(presolved.lift(plan), state.plan):
        assert all(s in k for s, k in zip(plan, keep, strict=True)), "a bound rules out the best plan"
    return keep


def _descend(state: SearchState, presolved: PresolvedProblem, pool: Pool, dual: Dual) -> None:
    """Local search from the cheapest plan that fits, and from the plans of least penalised cost. Extends the pool."""
    local_search = LocalSearch(presolved.constrained)
    near = np.argsort(pool.seconds + pool.usage @ dual.multipliers, kind="stable")[: state.effort.descents]
    first = pool.fitting(state.budget)[:1]
    starts = dict.fromkeys([*first.tolist(), *near.tolist()])
    pool.add([local_search.descend(pool.plans[i], pool.usage[i], state.budget) for i in starts])


def _submit(state: SearchState, presolved: PresolvedProblem, pool: Pool) -> None:
    """Submit the plans that fit on the known rows, cheapest first, until one fits on all or none can be better."""
    for i in pool.fitting(state.budget)[: state.effort.submitted]:
        if pool.seconds[i] + presolved.constant >= state.seconds or state.submit(presolved.lift(pool.plans[i])):
            return
