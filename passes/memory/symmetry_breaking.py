"""Symmetry breaking: from plans with equal strategies for equal layers to plans in which equal layers differ.

Hubs are the nodes that connect the layers, such as an embedding that all layers read.

    mix       in a group of plans with equal strategies at the hubs, each layer can take its strategies from any of the
              plans                                                                              -> mix, _groups
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Floats, Ints, Problem
from autopar.passes.memory.lagrangian import Pool
from autopar.passes.memory.path_relinking import relink
from autopar.passes.memory.presolve import PresolvedProblem, attach
from autopar.passes.memory.search_state import SearchState
from autopar.passes.solver.symmetry import fold


@dataclass(frozen=True, slots=True)
class MixEffort:
    """How many plans are combined, layer by layer."""

    # most plans of the pool that are mixed, least penalised cost first (settled on the zoo; `bench sensitivity`,
    # 2026-11: no effect on small programs)
    plans: int = 40
    # most groups of plans with equal hubs (settled on the zoo; `bench sensitivity`, 2026-11: no effect on small
    # programs)
    groups: int = 6
    # most plans of one group (settled on the zoo; `bench sensitivity`, 2026-11: no effect on small programs)
    options: int = 8


MIX = MixEffort()


def _joints(problem: Problem) -> NDArray[np.bool_]:
    """The hubs with at least one edge per equal layer, as a mask, shape (nodes,).

    Layers are not independent of each other between plans in which these hubs differ.
    """
    folded = fold(problem)
    degree = np.bincount([w for e in problem.edges for w in (e.u, e.v)], minlength=len(problem.nodes))
    return (folded.counts[folded.classes] == 1) & (degree >= folded.counts.max(initial=1))


def mix(
    state: SearchState,
    presolved: PresolvedProblem,
    pool: Pool,
    rows: Sequence[Row],
    multipliers: Floats,
    effort: MixEffort = MIX,
) -> None:
    """Submit combinations of known plans in which equal layers may differ.

    Args:
        state: gives the incumbent; updated.
        presolved: the problem of the pool.
        pool: its plans of least penalised cost are combined.
        rows: the rows of `multipliers`.
        multipliers: s/byte, shape (len(rows),).
        effort: how many plans.
    """
    near = np.argsort(pool.seconds + pool.usage @ multipliers, kind="stable")[: effort.plans]
    plans = [pool.plans[i] for i in near if np.isfinite(pool.seconds[i])]
    lifted = ([] if state.plan is None else [state.plan]) + [presolved.lift(plan) for plan in plans]
    added = list(state.rows)
    constrained = attach(state.problem, added)
    names = [row.name for row in rows]
    weights = np.array([multipliers[names.index(row.name)] if row.name in names else 0.0 for row in added])
    for group in _groups(lifted, _joints(state.problem), effort):
        usage = np.array([row.value(state.problem, group[0]) for row in added])
        plan = relink(constrained, group[0], group[1:], usage, state.budget, weights)
        if plan is not None and state.problem.value(plan) < state.seconds:
            state.submit(plan)
        if state.done:
            return


def _groups(plans: Sequence[Ints], alone: NDArray[np.bool_], effort: MixEffort) -> list[list[Ints]]:
    """Groups of at least two distinct plans that are equal on the mask `alone`, in order of their first plan."""
    by_hubs: dict[bytes, dict[bytes, Ints]] = {}
    for plan in plans:
        by_hubs.setdefault(plan[alone].tobytes(), {})[plan.tobytes()] = plan
    groups = [list(group.values())[: effort.options] for group in by_hubs.values()]
    return [group for group in groups if len(group) > 1][: effort.groups]
