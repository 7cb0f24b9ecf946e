"""From plans that treat equal layers alike to plans that do not.

Plans are grouped by what the hubs between the layers do: between plans with the same hubs layers can part ways one by
one -> mix. What is left of the budget goes to single nodes of the unfolded problem ->
polish.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Floats, Ints, Problem
from autopar.passes.memory.lagrangian import Pool
from autopar.passes.memory.local_search import LocalSearch
from autopar.passes.memory.path_relinking import relink
from autopar.passes.memory.presolve import PresolvedProblem, attach
from autopar.passes.memory.search_state import SearchState
from autopar.passes.solver.symmetry import fold

PLANS = 40  # plans of the pool to mix, best first at the present multipliers
GROUPS, OPTIONS = 6, 8  # groups of plans with equal hubs, and plans of each
SWEEPS = 2  # over the unfolded problem


def hubs(problem: Problem) -> NDArray[np.bool_]:
    """The nodes that are alone of their kind, before any row is looked at; shape (nodes,)."""
    folded = fold(problem)
    return folded.counts[folded.classes] == 1


def _joints(problem: Problem) -> NDArray[np.bool_]:
    """The hubs with at least an edge for each of the equal layers: where they differ, no layer stands alone."""
    folded = fold(problem)
    degree = np.bincount([w for e in problem.edges for w in (e.u, e.v)], minlength=len(problem.nodes))
    return (folded.counts[folded.classes] == 1) & (degree >= folded.counts.max(initial=1))


def mix(
    state: SearchState,
    presolved: PresolvedProblem,
    pool: Pool,
    rows: Sequence[Row],
    multipliers: Floats,
    pairs: Sequence[tuple[Ints, Ints]] = (),
) -> None:
    """Submit mixes of the incumbent, of the pool's best plans at these multipliers, and of `pairs` of plans."""
    near = np.argsort(pool.seconds + pool.usage @ multipliers, kind="stable")[:PLANS]
    plans = [pool.plans[i] for i in near if np.isfinite(pool.seconds[i])]
    plans += [plan for pair in pairs for plan in pair]
    lifted = ([] if state.plan is None else [state.plan]) + [presolved.lift(plan) for plan in plans]
    known = list(state.rows)
    constrained = attach(state.problem, known)
    names = [row.name for row in rows]
    weights = np.array([multipliers[names.index(row.name)] if row.name in names else 0.0 for row in known])
    for group in _groups(lifted, _joints(state.problem)):
        usage = np.array([row.value(state.problem, group[0]) for row in known])
        plan = relink(constrained, group[0], group[1:], usage, state.budget, weights)
        if plan is not None and state.problem.value(plan) < state.seconds:
            state.submit(plan)
        if state.done:
            return


def _groups(plans: Sequence[Ints], alone: NDArray[np.bool_]) -> list[list[Ints]]:
    """Distinct plans with equal hubs, groups in order of their first plan."""
    found: dict[bytes, dict[bytes, Ints]] = {}
    for plan in plans:
        found.setdefault(plan[alone].tobytes(), {})[plan.tobytes()] = plan
    groups = [list(group.values())[:OPTIONS] for group in found.values()]
    return [group for group in groups if len(group) > 1][:GROUPS]


def polish(state: SearchState) -> None:
    """One-swap descent of the best plan, unfolded: single layers use what is left of the budget."""
    if state.plan is None:
        return
    usage = np.array([row.value(state.problem, state.plan) for row in state.rows])
    plan = LocalSearch(attach(state.problem, state.rows)).descend(state.plan, usage, state.budget, SWEEPS)
    if not np.array_equal(plan, state.plan):
        state.submit(plan)
