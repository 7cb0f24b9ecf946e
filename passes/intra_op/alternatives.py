"""What other layouts of a value cost: a bound at once from dual ascent, and the exact cost by solving again.

A layout of a value is a class of strategies of the group that decides it (`autopar.cost_models.sharding.groups`). The
plans in which some values have given layouts are those of the problem restricted to these strategies -> restricted.

A dual ascent of the folded problem bounds each of its strategies (`autopar.passes.solver.dual_ascent`). If k of the n
members of a symmetry class have strategy a, the average over the class has it with weight k / n, and costs at least

    least  +  (theta(a) - min theta) k / n                                                              -> bound

with theta and least of one pass of the ascent; the largest of a few passes is the bound.

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
from autopar.passes.solver.dual_ascent import ASCENT, Gap, ascend, ends_of, initial, reparametrise, sweep
from autopar.passes.solver.symmetry import Folded

#: An ascent that does not stop for strategies that cost more than the best plan: they are the ones that are asked for.
WHOLE = replace(ASCENT, shrink=1.0)
#: Share of the best plan's cost that the bound of the ascent may be below it; layouts that differ by less are told as
#: equal (gap on wresnet-1b after 26 of 124 passes, a quarter of the time; 2026-11).
ENOUGH = Gap(share=1e-4)
#: Passes in which bounds are compared, after one from converged messages: further ones hardly raise them.
PASSES = 3


@dataclass(frozen=True, eq=False)
class Alternatives:
    """The layouts that values may have in the plans of one problem, and what they cost.

    Attributes:
        model: the problem.
        objective: cost of the best plan that is known (s per step), at which a dual ascent may stop.
    """

    model: Model
    objective: float = np.inf
    _known: dict[tuple[int, tuple[int, ...]], Mapping[Layout, Ints]] = field(default_factory=dict)

    def layouts(self, values: Sequence[int]) -> tuple[Layout, ...]:
        """The layouts that all of these values can have, in the order of their codes.

        Empty if a value has no group, or is the view of another.
        """
        if not values or any((b := self._bindings.get(v)) is None or b.view is not None for v in values):
            return ()
        first, *further = map(self._by_layout, values)
        common = (layout for layout in first if PARTIAL not in layout and all(layout in other for other in further))
        return tuple(layout for layout in common if all(map(len, self.strategies(values, layout).values())))

    def strategies(self, values: Sequence[int], layout: Layout) -> Mapping[int, Ints]:
        """Node -> the strategies, ascending, that give all of these values this layout. `layouts` has the layout."""
        allowed: dict[int, Ints] = {}
        for value in values:
            group, mine = self._bindings[value].group, self._by_layout(value)[layout]
            before = allowed.get(group, mine)
            allowed[group] = mine if before is mine else np.intersect1d(before, mine)
        return allowed

    def _by_layout(self, value: int) -> Mapping[Layout, Ints]:
        """Layout of a value -> the strategies of its group, ascending, that give it this layout."""
        binding = self._bindings[value]
        key = binding.group, binding.dims
        if key not in self._known:
            classes, layouts = self._classes(value)
            named = enumerate(tuple(map(int, layout)) for layout in layouts)
            self._known[key] = {layout: np.flatnonzero(classes == number) for number, layout in named}
        return self._known[key]

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
        members, counts = Counter(int(classes[v]) for v in allowed), self._folded.counts
        of_class: dict[int, Ints] = {}
        for v, mine in allowed.items():  # members that may have different strategies have one of all of these
            c = int(classes[v])
            of_class[c] = np.union1d(of_class[c], mine) if c in of_class else mine
        bounds = {c: self._strategy_bounds(c, members[c] / float(counts[c])) for c in of_class}
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

    def _strategy_bounds(self, number: int, share: float) -> Floats:
        """[a] is a lower bound (s) on the plans in which this share of a symmetry class has strategy a."""
        lower, passes = self._passes
        bounds = np.full(len(self._folded.problem.nodes[number].cost), np.inf)
        whole = [of_pass[number] for of_pass in passes]  # all members have the strategy
        of_share = [b.min() + (b - b.min()) * share for b in whole]
        bounds[self._feasible.keep[number]] = np.maximum(np.maximum.reduce(of_share), lower)
        return bounds

    @cached_property
    def _passes(self) -> tuple[float, tuple[tuple[Floats, ...], ...]]:
        """A lower bound (s) on all plans; and [pass][c][a], one on those in which all of class c has strategy a."""
        problem, place = self._converged
        ends, lower = ends_of(problem), -np.inf
        state = initial(problem, ends, None, bounded=False)
        passes: list[tuple[Floats, ...]] = []
        for number in range(1 + PASSES):
            if number:  # the first pass has no messages of one before it
                state.bounds = [np.full(len(node.cost), -np.inf) for node in problem.nodes]
            lower = max(lower, sweep(ends, state, decode=False)[0])
            if state.bounds is not None:
                passes.append(tuple(state.bounds[v] for v in place))
        return lower, tuple(passes)

    @cached_property
    def _converged(self) -> tuple[Problem, Ints]:
        """The folded problem after a dual ascent, in an order of its own, and the place of each node in it."""
        problem, _, place = elimination.ordered(self._feasible.problem)
        ascent = ascend(problem, upper=self.objective, enough=ENOUGH, effort=WHOLE, bounded=False)
        return reparametrise(problem, ascent.messages), place
