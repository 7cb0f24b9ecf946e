"""Branch and bound on decisions that stand for themselves.

Where hub layouts differ between the plan that fits and the cheaper one that does not, no multipliers close the gap: the
relaxation mixes the two. A node of the search tree allows some strategies at some decisions only; the others cost a
penalty, which bounds from below what forbidding them would cost. Children inherit messages and multipliers (A. H. Land,
A. G. Doig, Econometrica 28, 1960; the bound is the ascent's).

In a folded problem only classes of one member are branched on: "all 32 layers do, or none does" is no partition of the
plans of the unfolded problem, so a bound found that way would not hold there.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir.problem import Floats, Ints
from autopar.passes.memory.lagrangian import BudgetObjective, Dual, Messages, Pool, ascend
from autopar.passes.memory.local_search import LocalSearch
from autopar.passes.memory.presolve import ConstrainedProblem

CHANGES = 8  # changes of multipliers per tree node
PENALTY = 4.0  # times the value of the best plan: dearer than any plan of interest
MOST = 40  # tree nodes
STALE, PROGRESS = 8, 0.1  # times that a leaf is split, within which the gap has to shrink by that share
MATTERS = 0.02  # share of the gap below which a difference between plans is not worth branching on
POOLED = 64  # plans of the pool, best first at the present multipliers, that a tree node starts its model from

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """allowed: strategies (masks) of the decisions branched on; messages and multipliers to go on from.

    decoded: what the last two passes, there and back, made of it.
    """

    allowed: dict[int, Mask]
    dual: Dual
    messages: list[list[Floats]]
    decoded: list[Ints]

    def admits(self, plan: Ints) -> bool:
        return all(mask[plan[v]] for v, mask in self.allowed.items())

    def child(self, v: int, mask: Mask) -> _Leaf:
        return replace(self, allowed={**self.allowed, v: mask})


class _LeafPool(Pool):
    """The plans that a leaf admits; what is decoded goes to the search's pool as well."""

    def __init__(self, constrained: ConstrainedProblem, leaf: _Leaf, every: Pool) -> None:
        super().__init__(constrained)
        self._leaf = leaf
        self._every = every

    def add(self, plans: Iterable[Ints]) -> None:
        given = list(plans)
        self._every.add(given)
        super().add(plan for plan in given if self._leaf.admits(plan))


class Tree:
    """The search on one problem with rows; plans found go to the pool.

    `branchable` marks the decisions that may be branched on. `pairs` collects, leaf by leaf, a plan that fits and a
    cheaper one that does not.
    """

    def __init__(self, messages: Messages, pool: Pool, budget: float, branchable: Mask) -> None:
        self._messages = messages
        self._constrained = messages.constrained
        self._pool = pool
        self._budget = budget
        self._local_search = LocalSearch(messages.constrained)
        self._branchable = np.flatnonzero(branchable)
        self.pairs: list[tuple[Ints, Ints]] = []
        self.visited = 0

    def run(self, root: Dual, upper: float, target: float, deadline: float, most: int = MOST) -> float:
        """The bound (s) on all plans that fit: that of the worst leaf left, at most the best value.

        `upper` (s) is the value of a plan known elsewhere; the search ends when no leaf is further than `target`,
        relative, below the best, after `most` tree nodes, or at the deadline.
        """
        heap = [(root.lower, 0, _Leaf({}, root, self._messages.copy(), []))]
        closed, made, gaps = np.inf, 0, list[float]()
        while heap:
            best = min(upper, self._best())
            slack = target * abs(best) if np.isfinite(best) else 0.0
            if heap[0][0] >= best - slack or time.monotonic() > deadline or self.visited >= most:
                break
            gaps.append(best - heap[0][0])
            if len(gaps) > STALE and gaps[-1] > gaps[-1 - STALE] * (1 - PROGRESS):
                break
            _, _, leaf = heapq.heappop(heap)
            children = self._split(leaf, MATTERS * max(0.0, best - leaf.dual.lower) if np.isfinite(best) else 0.0)
            if not children:
                closed = min(closed, leaf.dual.lower)
            for child in children:
                found = self._bound(child, min(upper, self._best()), target, deadline)
                made += 1
                heapq.heappush(heap, (found.dual.lower, made, found))
        return min([closed, min(upper, self._best()), *(lower for lower, _, _ in heap)])

    def _best(self) -> float:
        fitting = self._pool.fitting(self._budget)
        return float(self._pool.seconds[fitting[0]]) if len(fitting) else np.inf

    def _bound(self, leaf: _Leaf, best: float, target: float, deadline: float) -> _Leaf:
        """The leaf with its own bound, multipliers and messages."""
        self.visited += 1
        finite = self._pool.seconds[np.isfinite(self._pool.seconds)]
        scale = PENALTY * (best if np.isfinite(best) else float(finite.max(initial=1.0)))
        penalty = {v: np.where(mask, 0.0, scale) for v, mask in leaf.allowed.items()}
        inside = _LeafPool(self._constrained, leaf, self._pool)
        inside.add(self._forced(leaf))
        inside.add(self._pool.plans[i] for i in self._near(leaf.dual.multipliers)[:POOLED])
        objective = BudgetObjective(self._constrained, self._budget, inside, best)
        self._messages.restore(leaf.messages, penalty)
        start = leaf.dual.multipliers
        dual = ascend(
            self._messages,
            inside,
            objective,
            start=start,
            target=target,
            deadline=deadline,
            changes=CHANGES,
            scan=False,
            adapt=True,
        )
        self._messages.set(dual.multipliers)
        bound, decoded = self._messages.run(2)
        self._polish(inside, leaf)
        lower = max(dual.lower, leaf.dual.lower, objective.lower(bound, dual.multipliers))
        return _Leaf(leaf.allowed, Dual(lower, dual.multipliers), self._messages.copy(), decoded)

    def _forced(self, leaf: _Leaf) -> list[Ints]:
        """The best plan that fits, and the best that does not, made to obey the leaf: its multipliers need both."""
        found: list[Ints] = []
        for plan in self._pair(_Leaf({}, leaf.dual, leaf.messages, [])):
            if plan is None or leaf.admits(plan):
                continue
            bent = plan.copy()
            for v, mask in leaf.allowed.items():
                if not mask[bent[v]]:
                    score = sum(self._local_search.scores(v, bent, leaf.dual.multipliers))
                    bent[v] = int(np.where(mask, score, np.inf).argmin())
            pool = Pool(self._constrained)
            pool.add([bent])
            found.append(self._local_search.descend(bent, pool.usage[0], self._budget, 2, leaf.allowed))
        return found

    def _near(self, multipliers: Floats) -> Ints:
        """All plans, cheapest first when bytes are paid for."""
        return np.argsort(self._pool.seconds + self._pool.usage @ multipliers, kind="stable")

    def _polish(self, inside: Pool, leaf: _Leaf) -> None:
        """Descent from the best plan of the leaf that fits."""
        fitting = inside.fitting(self._budget)
        if len(fitting):
            plan, usage = inside.plans[fitting[0]], inside.usage[fitting[0]]
            inside.add([self._local_search.descend(plan, usage, self._budget, 2, leaf.allowed)])

    def _split(self, leaf: _Leaf, least: float) -> list[_Leaf]:
        """Two leaves that part the plan that fits from the one that does not, or what two passes make of the leaf.

        None if those agree, up to `least` seconds, wherever may be branched: then the gap is between plans of classes
        of several members.
        """
        a, b = self._pair(leaf)
        if a is not None and b is not None:
            self.pairs.append((a, b))
        for one, other in ((a, b), tuple(leaf.decoded) or (None, None)):
            if one is None or other is None:
                continue
            scored = {int(v): self._sides(int(v), one, other, leaf) for v in self._branchable if one[v] != other[v]}
            able = [v for v, (worth, side, rest) in scored.items() if worth >= least and side.any() and rest.any()]
            if able:
                v = max(able, key=lambda v: (scored[v][0], -v))
                return [leaf.child(v, part) for part in scored[v][1:]]
        return []

    def _pair(self, leaf: _Leaf) -> tuple[Ints | None, Ints | None]:
        """The best plan inside the leaf that fits, and the best that does not, bytes paid for."""
        found: dict[bool, Ints] = {}
        fits: list[bool] = [bool((used <= self._budget).all()) for used in self._pool.usage]
        for i in self._near(leaf.dual.multipliers):
            if fits[i] not in found and np.isfinite(self._pool.seconds[i]) and leaf.admits(self._pool.plans[i]):
                found[fits[i]] = self._pool.plans[i]
                if len(found) == 2:
                    break
        return found.get(True), found.get(False)

    def _sides(self, v: int, a: Ints, b: Ints, leaf: _Leaf) -> tuple[float, Mask, Mask]:
        """What it moves when v alone goes from one plan to the other, and the strategies that suit a or b better.

        Seconds and priced bytes count apart: at good multipliers they cancel, and that is where to branch.
        """
        side = np.zeros(len(self._constrained.problem.nodes[v].cost))
        moved = 0.0
        for sign, plan, other in ((1.0, a, b), (-1.0, b, a)):
            seconds, priced = self._local_search.scores(v, plan, leaf.dual.multipliers)
            moved += sum(min(abs(float(s[other[v]] - s[plan[v]])), 1e300) for s in (seconds, priced))
            total = seconds + priced
            side += sign * np.minimum(total - total[plan[v]], 1e300)
        nearer = side <= 0.0
        nearer[a[v]], nearer[b[v]] = True, False
        allowed = leaf.allowed.get(v, np.ones_like(nearer))
        return moved, nearer & allowed, ~nearer & allowed
