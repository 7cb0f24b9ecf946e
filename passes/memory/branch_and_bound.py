"""Branch and bound on nodes whose symmetry class has one member (A. H. Land, A. G. Doig, Econometrica 28, 1960).

A plan that fits and a cheaper plan that does not may differ in the layout of a hub, a node with edges to many layers.
No multipliers close the gap between them, because the relaxation takes a convex combination of both -> Tree.

    tree node   allows only some strategies at some nodes of the problem                            -> _Leaf
    bound       dual ascent, where a forbidden strategy costs a penalty. The penalised problem is a relaxation of the
                one without these strategies, so the bound is valid                                 -> Tree._bound
    branch      on the node of the problem that contributes most to the difference of the two plans -> Tree._split

Children inherit messages and multipliers from their parent. In a folded problem only classes of one member are branched
on. A branch on a class of 32 layers, "all 32 layers take these strategies, or none does", does not cover the plans of
the unfolded problem in which some layers do, so its bound would not hold for them.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir.problem import Floats, Ints
from autopar.passes.memory.lagrangian import BudgetObjective, Dual, Messages, MultiplierEffort, Pool, ascend
from autopar.passes.memory.local_search import QUICK, LocalSearch
from autopar.passes.memory.presolve import ConstrainedProblem


@dataclass(frozen=True, slots=True)
class TreeEffort:
    """Limits of one search tree."""

    # most tree nodes (settled on the zoo)
    most: int = 40
    # splits within which the gap has to shrink by the share `progress`, else the search ends (settled on the zoo)
    stale: int = 8
    # share of the gap that counts as progress over `stale` splits (settled on the zoo)
    progress: float = 0.1
    # least difference between two plans at a node that is branched on, as a share of the gap (settled on the zoo)
    matters: float = 0.02
    # plans of the pool, least penalised cost first, from which a tree node starts its cutting-plane model (settled on
    # the zoo)
    pooled: int = 64
    # cost of a forbidden strategy, as a multiple of the best plan's cost: dearer than any plan of interest (settled on
    # the zoo)
    penalty: float = 4.0


TREE = TreeEffort()

#: The ascent at one tree node: short, because it goes on from the multipliers and messages of its parent.
AT_TREE_NODE = MultiplierEffort(changes=8, adapt=True, scans=0)


Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """A tree node that is not split yet.

    Attributes:
        allowed: node branched on -> mask of the strategies allowed there, shape (strategies,).
        dual: lower bound (s), and multipliers to go on from.
        messages: messages to go on from.
        decoded: the plans of the last two passes, one in each direction; empty at the root.
    """

    allowed: dict[int, Mask]
    dual: Dual
    messages: list[list[Floats]]
    decoded: list[Ints]

    def admits(self, plan: Ints) -> bool:
        """Whether all strategies of a plan are allowed."""
        return all(mask[plan[v]] for v, mask in self.allowed.items())

    def child(self, v: int, mask: Mask) -> _Leaf:
        """This leaf with the strategies of node v restricted to a mask. Its bound still is that of the parent."""
        return replace(self, allowed={**self.allowed, v: mask})


class _LeafPool(Pool):
    """The plans that a leaf admits. All plans added, admitted or not, are added to the pool of the tree as well."""

    def __init__(self, constrained: ConstrainedProblem, leaf: _Leaf, every: Pool) -> None:
        super().__init__(constrained)
        self._leaf = leaf
        self._every = every

    def add(self, plans: Iterable[Ints]) -> None:
        new_plans = list(plans)
        self._every.add(new_plans)
        super().add(plan for plan in new_plans if self._leaf.admits(plan))


class Tree:
    """Branch and bound on one problem with rows.

    Args:
        messages: of the problem, at the root.
        pool: known plans; extended by the plans found.
        budget: bytes.
        branchable: the nodes that may be branched on, shape (nodes,).
        effort: when the search ends with a gap.

    Attributes:
        pairs: for each leaf that was split, the best plan inside it that fits and the best that does not.
        visited: tree nodes bounded so far.
    """

    def __init__(
        self, messages: Messages, pool: Pool, budget: float, branchable: Mask, effort: TreeEffort = TREE
    ) -> None:
        self._effort = effort
        self._messages = messages
        self._constrained = messages.constrained
        self._pool = pool
        self._budget = budget
        self._local_search = LocalSearch(messages.constrained)
        self._branchable = np.flatnonzero(branchable)
        self.pairs: list[tuple[Ints, Ints]] = []
        self.visited = 0

    def run(self, root: Dual, upper: float, target: float, deadline: float) -> float:
        """Split the leaf of least bound until the bound is within `target` of the best plan.

        Args:
            root: bound and multipliers of the root.
            upper: cost (s) of a known plan that need not be in the pool.
            target: relative gap at which to stop.
            deadline: on the clock of `time.monotonic()`.

        Returns:
            A lower bound (s) on all plans that fit: the least bound of the leaves, at most the cost of the best plan.
        """
        # (bound, number, leaf); the number settles ties in the order in which leaves were made
        heap = [(root.lower, 0, _Leaf({}, root, self._messages.copy(), []))]
        effort = self._effort
        closed, number, gaps = np.inf, 0, list[float]()
        while heap:
            best = min(upper, self._best())
            slack = target * abs(best) if np.isfinite(best) else 0.0
            if heap[0][0] >= best - slack or time.monotonic() > deadline or self.visited >= effort.most:
                break
            gaps.append(best - heap[0][0])
            if len(gaps) > effort.stale and gaps[-1] > gaps[-1 - effort.stale] * (1 - effort.progress):
                break
            _, _, leaf = heapq.heappop(heap)
            children = self._split(
                leaf, effort.matters * max(0.0, best - leaf.dual.lower) if np.isfinite(best) else 0.0
            )
            if not children:  # the leaf cannot be split further, so its bound limits that of the tree
                closed = min(closed, leaf.dual.lower)
            for child in children:
                bounded = self._bound(child, min(upper, self._best()), target, deadline)
                number += 1
                heapq.heappush(heap, (bounded.dual.lower, number, bounded))
        return min([closed, min(upper, self._best()), *(lower for lower, _, _ in heap)])

    def _best(self) -> float:
        """Cost (s) of the cheapest plan of the pool that fits, inf without one."""
        fitting = self._pool.fitting(self._budget)
        return float(self._pool.seconds[fitting[0]]) if len(fitting) else np.inf

    def _bound(self, leaf: _Leaf, best: float, target: float, deadline: float) -> _Leaf:
        """Dual ascent at a leaf, from the multipliers and messages of its parent: the leaf with a bound of its own."""
        self.visited += 1
        finite = self._pool.seconds[np.isfinite(self._pool.seconds)]
        scale = self._effort.penalty * (best if np.isfinite(best) else float(finite.max(initial=1.0)))
        penalty = {v: np.where(mask, 0.0, scale) for v, mask in leaf.allowed.items()}
        inside = _LeafPool(self._constrained, leaf, self._pool)
        inside.add(self._forced(leaf))
        inside.add(self._pool.plans[i] for i in self._near(leaf.dual.multipliers)[: self._effort.pooled])
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
            effort=AT_TREE_NODE,
        )
        self._messages.set(dual.multipliers)
        bound, decoded = self._messages.run(2)  # two passes: one in each direction
        self._polish(inside, leaf)
        lower = max(dual.lower, leaf.dual.lower, objective.lower(bound, dual.multipliers))
        return _Leaf(leaf.allowed, Dual(lower, dual.multipliers), self._messages.copy(), decoded)

    def _forced(self, leaf: _Leaf) -> list[Ints]:
        """The best plan that fits and the best that does not, changed so that the leaf admits them.

        The cutting-plane model of the leaf needs both kinds. A plan that the leaf admits unchanged is left out.
        """
        forced: list[Ints] = []
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
            forced.append(self._local_search.descend(bent, pool.usage[0], self._budget, leaf.allowed, QUICK))
        return forced

    def _near(self, multipliers: Floats) -> Ints:
        """Indices of all plans of the pool, least penalised cost first."""
        return np.argsort(self._pool.seconds + self._pool.usage @ multipliers, kind="stable")

    def _polish(self, inside: Pool, leaf: _Leaf) -> None:
        """Local search inside the leaf, from its cheapest plan that fits."""
        fitting = inside.fitting(self._budget)
        if len(fitting):
            plan, usage = inside.plans[fitting[0]], inside.usage[fitting[0]]
            inside.add([self._local_search.descend(plan, usage, self._budget, leaf.allowed, QUICK)])

    def _split(self, leaf: _Leaf, least: float) -> list[_Leaf]:
        """Two leaves that separate the best plan that fits from the best that does not.

        If no node can be branched on between these two, the plans of the last two passes are separated. The list is
        empty if these agree as well at every node that may be branched on, up to `least` seconds. The gap is then
        between plans that differ in symmetry classes of several members.
        """
        a, b = self._pair(leaf)
        if a is not None and b is not None:
            self.pairs.append((a, b))
        for plan, other in ((a, b), tuple(leaf.decoded) or (None, None)):
            if plan is None or other is None:
                continue
            scored = {int(v): self._sides(int(v), plan, other, leaf) for v in self._branchable if plan[v] != other[v]}
            able = [v for v, (worth, side, rest) in scored.items() if worth >= least and side.any() and rest.any()]
            if able:
                v = max(able, key=lambda v: (scored[v][0], -v))
                return [leaf.child(v, part) for part in scored[v][1:]]
        return []

    def _pair(self, leaf: _Leaf) -> tuple[Ints | None, Ints | None]:
        """The plan inside the leaf that fits, and the one that does not, of least penalised cost each."""
        best: dict[bool, Ints] = {}
        fits: list[bool] = [bool((used <= self._budget).all()) for used in self._pool.usage]
        for i in self._near(leaf.dual.multipliers):
            if fits[i] not in best and np.isfinite(self._pool.seconds[i]) and leaf.admits(self._pool.plans[i]):
                best[fits[i]] = self._pool.plans[i]
                if len(best) == 2:
                    break
        return best.get(True), best.get(False)

    def _sides(self, v: int, a: Ints, b: Ints, leaf: _Leaf) -> tuple[float, Mask, Mask]:
        """How much node v contributes to the difference of plans a and b, and a partition of its allowed strategies.

        Returns:
            The change (s) when v alone moves from one plan to the other: absolute seconds plus absolute penalty. The
            two do not cancel this way: at good multipliers their sum is about zero just where a branch is needed. Then
            the strategies of v that are cheaper in the surroundings of a than of b, and the others.
        """
        side = np.zeros(len(self._constrained.problem.nodes[v].cost))
        moved = 0.0
        for sign, plan, other in ((1.0, a, b), (-1.0, b, a)):
            # a limit instead of inf, whose difference would be nan
            scores = self._local_search.scores(v, plan, leaf.dual.multipliers)
            seconds, priced = (np.minimum(score, 1e300) for score in scores)
            moved += sum(min(abs(float(s[other[v]] - s[plan[v]])), 1e300) for s in (seconds, priced))
            total = seconds + priced
            side += sign * np.minimum(total - total[plan[v]], 1e300)
        nearer = side <= 0.0
        nearer[a[v]], nearer[b[v]] = True, False
        allowed = leaf.allowed.get(v, np.ones_like(nearer))
        return moved, nearer & allowed, ~nearer & allowed
