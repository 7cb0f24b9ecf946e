"""Local search (1-opt) under a budget: change the strategy of one node at a time.

Given the strategies of all other nodes, the best strategy of a node minimises, in this order,

    excess     sum_r max(0, bytes_r - budget)
    seconds    the cost of the plan                                                            -> LocalSearch._improve

A plan that fits stays within the budget and gets cheaper. A plan that does not fit first comes closer to the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import Floats, Ints
from autopar.passes.memory.presolve import ConstrainedProblem
from autopar.passes.solver.dual_ascent import ROUNDING, End, ends_of


@dataclass(frozen=True, slots=True)
class LocalSearchEffort:
    """Limits of one local search."""

    # most sweeps over all nodes; a search ends earlier if no change improves the plan (settled on the zoo; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    sweeps: int = 6


LOCAL_SEARCH = LocalSearchEffort()


class LocalSearch:
    """Local search on one problem with rows."""

    def __init__(self, constrained: ConstrainedProblem) -> None:
        self._constrained = constrained
        self._ends = ends_of(constrained.problem)
        self._usage: list[list[tuple[End, Floats]]] = [[] for _ in constrained.problem.nodes]
        for i, usage in constrained.edges.items():
            e = constrained.problem.edges[i]
            for v, of_rows in ((e.u, usage), (e.v, usage.transpose(0, 2, 1))):
                self._usage[v].append((next(x for x in self._ends[v] if x.edge == i), of_rows))

    def descend(
        self,
        plan: Ints,
        usage: Floats,
        budget: float,
        effort: LocalSearchEffort = LOCAL_SEARCH,
    ) -> Ints:
        """A plan that is at least as good. No change of one node improves it, unless `effort` ended the search.

        Args:
            plan: strategy per node, shape (nodes,).
            usage: bytes of the plan in each row, shape (R,).
            budget: bytes.
            effort: most sweeps over all nodes.
        """
        plan, usage = plan.copy(), usage.copy()
        for _ in range(effort.sweeps):
            if not sum([self._improve(v, plan, usage, budget) for v in range(len(plan))]):
                break
        return plan

    def _improve(self, v: int, plan: Ints, usage: Floats, budget: float) -> bool:
        """Change `plan` and `usage` in place to the best strategy of v. Returns whether the plan changed."""
        seconds = self._seconds(v, plan)
        now = plan[v]
        bytes_ = self._bytes(v, plan)
        after = None if bytes_ is None else usage[:, None] + bytes_ - bytes_[:, [now]]
        excess = np.zeros(len(seconds)) if after is None else np.maximum(after - budget, 0.0).sum(axis=0)
        excess[~np.isfinite(seconds)] = np.inf
        best = int(np.where(excess <= excess.min(), seconds, np.inf).argmin())
        if excess[best] == excess[now] and seconds[best] + ROUNDING * abs(seconds[best]) >= seconds[now]:
            return False
        if after is not None:
            usage[:] = after[:, best]
        plan[v] = best
        return best != now

    def _seconds(self, v: int, plan: Ints) -> Floats:
        """Cost (s) of v and its edges for each strategy of v, given the strategies of the other nodes."""
        score = self._constrained.problem.nodes[v].cost
        for x in self._ends[v]:
            score = score + x.table[:, x.other_classes[plan[x.other]]][x.classes]
        return score

    def _bytes(self, v: int, plan: Ints) -> Floats | None:
        """Bytes of v and its edges, shape (R, strategies); None if neither v nor an edge of v has bytes."""
        own = self._constrained.nodes.get(v)
        for x, table in self._usage[v]:
            part = table[:, :, x.other_classes[plan[x.other]]][:, x.classes]
            own = part if own is None else own + part
        return own
