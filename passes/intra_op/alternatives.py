"""What other layouts of a value cost: a bound at once from dual ascent, and the exact cost by solving again.

A layout of a value is a class of strategies of the group that decides it (`autopar.cost_models.sharding.groups`). The
plans in which some values have given layouts are those of the problem restricted to these strategies -> restricted.

A dual ascent of the folded problem bounds each of its strategies (`autopar.passes.solver.dual_ascent`). If k of the n
members of a symmetry class have strategy a, the average over the class has it with weight k / n, and costs at least

    least  +  (theta(a) - min theta) k / n                                                              -> bounds

The bounds ignore memory, which only excludes plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.cost_models.sharding.groups import Model, projection
from autopar.ir.layout import PARTIAL, Layout
from autopar.ir.problem import Floats, Ints, Problem
from autopar.passes.solver import elimination, symmetry
from autopar.passes.solver.dead_end import Reduced, eliminate
from autopar.passes.solver.dual_ascent import ASCENT, ascend, reparametrise
from autopar.passes.solver.symmetry import Folded

#: An ascent that does not stop for strategies that cost more than the best plan: they are the ones that are asked for.
WHOLE = replace(ASCENT, shrink=1.0)
#: One that goes on from converged messages: a pass in each direction, and two in which bounds are compared.
AGAIN = replace(WHOLE, passes=4)


@dataclass(frozen=True, eq=False)
class Alternatives:
    """The layouts that values may have in the plans of one problem, and what they cost.

    Attributes:
        model: the problem.
        objective: cost of the best plan that is known (s per step), at which a dual ascent may stop.
    """

    model: Model
    objective: float = np.inf
    _bounds: dict[tuple[tuple[int, int], ...], tuple[Floats, ...]] = field(default_factory=dict)

    def layouts(self, values: Sequence[int]) -> tuple[Layout, ...]:
        """The layouts that all of these values can have, in the order of their codes.

        Empty if a value has no group, or is the view of another.
        """
        if not values or any((b := self._bindings.get(v)) is None or b.view is not None for v in values):
            return ()
        first, *further = ([tuple(map(int, layout)) for layout in self._classes(v)[1]] for v in values)
        common = (layout for layout in first if PARTIAL not in layout and all(layout in other for other in further))
        return tuple(layout for layout in common if all(map(len, self.strategies(values, layout).values())))

    def strategies(self, values: Sequence[int], layout: Layout) -> Mapping[int, Ints]:
        """Node -> the strategies, ascending, that give all of these values this layout. `layouts` has the layout."""
        allowed: dict[int, Ints] = {}
        for value in values:
            classes, layouts = self._classes(value)
            (number,) = np.flatnonzero((layouts == np.array(layout)).all(1))
            group, mine = self._bindings[value].group, np.flatnonzero(classes == number)
            allowed[group] = np.intersect1d(allowed[group], mine) if group in allowed else mine
        return allowed

    def restricted(self, values: Sequence[int], layout: Layout) -> Problem:
        """The problem whose plans give all of these values this layout. `layouts` has the layout."""
        nodes = list(self.model.problem.nodes)
        for v, allowed in self.strategies(values, layout).items():
            cost = np.full(len(nodes[v].cost), np.inf)
            cost[allowed] = nodes[v].cost[allowed]
            nodes[v] = replace(nodes[v], cost=cost, signature=(nodes[v].signature, "only", tuple(map(int, allowed))))
        return Problem(tuple(nodes), self.model.problem.edges)

    def bound(self, values: Sequence[int], layout: Layout) -> float:
        """A lower bound (s per step) on all plans that give all of these values this layout."""
        allowed, classes = self.strategies(values, layout), self._folded.classes
        members = Counter(int(classes[v]) for v in allowed)
        bounds = self._strategy_bounds(tuple(sorted(members.items())))
        of_class: dict[int, Ints] = {}
        for v, mine in allowed.items():  # members that may have different strategies have one of all of these
            c = int(classes[v])
            of_class[c] = np.union1d(of_class[c], mine) if c in of_class else mine
        return max(float(bounds[c][mine].min(initial=np.inf)) for c, mine in of_class.items())

    @cached_property
    def _folded(self) -> Folded:
        return symmetry.fold(self.model.problem)

    @cached_property
    def _feasible(self) -> Reduced:
        return eliminate(self._folded.problem, rounds=0)

    @property
    def _bindings(self) -> Mapping[int, Any]:
        return self.model.grouping.bindings

    def _classes(self, value: int) -> tuple[Ints, Any]:
        binding = self._bindings[value]
        return projection(self.model.grouping.groups[binding.group].strategies, binding.dims, assigned=False)

    def _strategy_bounds(self, members: tuple[tuple[int, int], ...]) -> tuple[Floats, ...]:
        """[c][a] is a lower bound (s) on the plans in which so many members of symmetry class c have strategy a.

        Args:
            members: (class, number of its members), ascending; for other classes the bounds are of no use.
        """
        counts = self._folded.counts
        partial = tuple((c, n) for c, n in members if n < counts[c])
        if partial not in self._bounds:
            shares = np.ones(len(counts))
            for c, n in partial:
                shares[c] = counts[c] / n
            self._bounds[partial] = self._ascended(shares)
        return self._bounds[partial]

    def _ascended(self, shares: Floats) -> tuple[Floats, ...]:
        """The bounds of `_strategy_bounds`, shares n / k: from the messages of an ascent that has converged."""
        problem, nodes, place = self._converged
        ascent = ascend(problem, counts=shares[nodes], upper=self.objective, effort=AGAIN)
        bounds = [np.full(len(node.cost), np.inf) for node in self._folded.problem.nodes]
        for c, kept in enumerate(self._feasible.keep):
            bounds[c][kept] = np.maximum(ascent.strategy_bounds[place[c]], ascent.lower)
        return tuple(bounds)

    @cached_property
    def _converged(self) -> tuple[Problem, Ints, Ints]:
        """The folded problem after a dual ascent, its nodes in their order, and the place of each node in it."""
        problem, nodes, place = elimination.ordered(self._feasible.problem)
        return reparametrise(problem, ascend(problem, upper=self.objective, effort=WHOLE).messages), nodes, place
