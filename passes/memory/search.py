"""The search for the cheapest plan within a memory budget.

    symmetric  plans with equal strategies for equal layers: presolve with the rows added so far, dual ascent and local
               search, repeated until the plans that fit do so on all rows                             -> _symmetric
    bound      dual ascent on a quotient that respects the rows with a positive multiplier, so that the bound is valid
               for all plans                                                                                -> _bound
    mix        combine plans that fit with cheaper plans that do not, layer by layer         -> symmetry_breaking.mix

The last two are repeated while they add rows -> search. The effort of a step is counted in changes of multipliers,
never in seconds. Only the deadline can therefore make two runs differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Floats
from autopar.passes.memory.lagrangian import BudgetObjective, Dual, Messages, Pool, ascend
from autopar.passes.memory.local_search import LocalSearch
from autopar.passes.memory.presolve import PresolvedProblem, SymmetryReduction, presolve
from autopar.passes.memory.search_state import SearchState
from autopar.passes.memory.symmetry_breaking import mix


@dataclass(frozen=True, slots=True, eq=False)
class _Relaxation:
    """A presolved problem with a dual ascent on it.

    Attributes:
        presolved: the problem.
        rows: its memory rows, in the order of the multipliers.
        pool: the plans that the ascent and the local search met.
        dual: the lower bound (s, without `presolved.constant`) and the multipliers where it was reached.
        rows_before: number of rows of the search before it.
    """

    presolved: PresolvedProblem
    rows: Sequence[Row]
    pool: Pool
    dual: Dual
    rows_before: int


def search(state: SearchState) -> None:
    """Search from the rows added so far, until the gap is small or a round adds no row.

    `state` is updated with rows, plans and bounds.
    """
    if state.done:
        return
    relaxation = _symmetric(state)
    for _ in range(state.effort.rounds):
        num_rows = len(state.rows)
        if not state.done and (state.fold or num_rows > relaxation.rows_before):
            relaxation = _bound(state, relaxation)
        if not state.done:
            mix(state, relaxation.presolved, relaxation.pool, relaxation.rows, relaxation.dual.multipliers)
        if state.done or len(state.rows) == num_rows:
            return


def _symmetric(state: SearchState) -> _Relaxation:
    """The relaxation with equal strategies for equal layers, repeated until no row is added."""
    how: SymmetryReduction = "tie" if state.fold else "none"
    rounds = 0
    while True:
        rows = tuple(state.rows)
        relaxation = _relax(state, presolve(state.problem, rows, how, full=state.full), rows)
        rounds += 1
        is_last = len(state.rows) == len(rows) or rounds == state.effort.relaxations
        if is_last or state.is_accepted or state.late:
            return relaxation


def _bound(state: SearchState, last: _Relaxation) -> _Relaxation:
    """The relaxation whose bound is valid for all plans, on the rows with a positive multiplier and new ones only.

    Fewer rows leave larger symmetry classes. A relaxation with fewer rows still bounds every plan.

    Args:
        state: updated.
        last: gives the rows, and the multipliers to start from.
    """
    multipliers = last.dual.multipliers
    positive = [r for r in range(len(multipliers)) if multipliers[r] > 0] or [0]
    new = state.rows[last.rows_before :]
    rows = [*(last.rows[r] for r in positive), *new]
    start = np.append(multipliers[positive], np.zeros(len(new)))
    how: SymmetryReduction = "bound" if state.fold else "none"
    return _relax(state, presolve(state.problem, rows, how, full=state.full), rows, start)


def _relax(
    state: SearchState, presolved: PresolvedProblem, rows: Sequence[Row], multipliers: Floats | None = None
) -> _Relaxation:
    """Dual ascent from these multipliers, local search, and evaluation on all rows; a valid bound is recorded."""
    pool, rows_before = _start(state, presolved), len(state.rows)
    dual = _ascend(state, presolved, pool, multipliers)
    if not presolved.symmetric:
        state.bound(dual.lower + presolved.constant, rows, dual.multipliers.tolist())
    _descend(state, presolved, pool, dual)
    _submit(state, presolved, pool)
    return _Relaxation(presolved, rows, pool, dual, rows_before)


def _ascend(state: SearchState, presolved: PresolvedProblem, pool: Pool, start: Floats | None) -> Dual:
    """A dual ascent to a quarter of the target gap, which leaves the rest of the target to later steps."""
    objective = BudgetObjective(presolved.constrained, state.budget, pool, state.seconds - presolved.constant)
    messages = Messages(presolved.constrained)
    return ascend(messages, pool, objective, start=start, target=state.target / 4, deadline=state.until)


def _start(state: SearchState, presolved: PresolvedProblem) -> Pool:
    """A pool of the incumbent and of `start_plans`, as far as the presolved problem contains them."""
    pool = Pool(presolved.constrained)
    plans = [presolved.project(a) for a in ([] if state.plan is None else [state.plan]) + state.start_plans]
    pool.add(plan for plan in plans if plan is not None)
    return pool


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
