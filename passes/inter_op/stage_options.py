"""Ways to run one stage on one submesh: time against memory, by the Lagrangian.

The bytes that a stage holds, and those alive where the cheapest plan peaks, are charged at a rate,

    seconds(x) + rate bytes(x),      rate = share x (seconds / bytes of the cheapest plan)

for the shares of `SHARES`. Each is one more solution of the same problem, without memory rows; those that are as dear
in both as another are dropped. That is quick enough to be asked hundreds of times (`autopar.passes.inter_op.search`).
The plan of a stage that is chosen is made with rows, within the budget (`autopar.passes.stages.plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.hardware.cluster import LogicalMesh
from autopar.passes.intra_op.plan import Options
from autopar.passes.stages.cost import StageMemory, StagePrices, even, held, least_memory, stage_memory, stage_prices
from autopar.passes.stages.graph import StageGraph
from autopar.passes.stages.plan import Charges, StagePlan, planned
from autopar.rules import Rule

#: Shares of the seconds that a plan may take more for as large a share less of its bytes.
SHARES = (0.3, 6.0)
#: How often what a layer holds counts against what one microbatch needs: stages have several layers.
LAYERS = 4.0
#: Relative gap at which a way to run a stage is priced as it is.
ENOUGH = 0.03
#: Relative gap at which the ascent towards one that is charged for ends.
NEAR = 0.01
#: Strategies left above which the ILP, which takes half a minute then, is not asked for that.
LARGEST = 2_000


@dataclass(frozen=True, slots=True)
class Trade:
    """One way to run a stage.

    Attributes:
        prices, memory: what it costs, and what it holds.
        entering: bytes per device of what a microbatch's forward pass is given by other stages.
        share: what it was found for; 0: the cheapest.
    """

    prices: StagePrices
    memory: StageMemory
    entering: float
    share: float = 0.0

    def scaled(self, share: float) -> Trade:
        """So much of its seconds and bytes."""
        return Trade(self.prices.scaled(share), self.memory.scaled(share), share * self.entering, self.share)

    def recomputed(self) -> Trade:
        """The same where the backward pass begins by running the forward pass again, from what entered it."""
        again = replace(self.prices, backward=self.prices.backward + self.prices.forward)
        saved = max(0.0, self.memory.stash - self.entering)
        less = replace(self.memory, stash=self.memory.stash - saved, temporaries=self.memory.temporaries + saved)
        return replace(self, prices=again, memory=less)


class _Found(NamedTuple):
    """A way to run a stage, its price in seconds, and its bytes as far as they are charged for."""

    seconds: float
    nbytes: float
    trade: Trade


@dataclass(frozen=True, eq=False)
class Trades:
    """Ways to run a stage on a submesh, each found when it is asked for.

    Attributes:
        graph: the stage.
        mesh: where it runs.
        rules: of the graph's operations.
        options: how to solve; nothing else of them is looked at.
        entering: values of the graph that the forward pass is given by other stages.
        shares: rates to try besides none.
    """

    graph: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]
    options: Options
    entering: Sequence[int]
    shares: Sequence[float] = SHARES
    found: dict[float, _Found] = field(default_factory=dict[float, "_Found"])  # by rate

    @cached_property
    def charges(self) -> Charges:
        """The plans at rising rates for memory."""
        how = {"gap": ENOUGH, "largest": LARGEST, "fold": False, "rounds": 0}
        return Charges(
            self.graph, self.mesh, self.rules, self.options, layers=LAYERS, how=how, charged_how={"until": NEAR}
        )

    @cached_property
    def cheapest(self) -> Trade:
        """The way without a charge."""
        return self._at(0.0).trade

    @cached_property
    def open(self) -> Sequence[float]:
        """The rates that may bring something: on one device there is one way."""
        return self.shares if self.mesh.size > 1 and self.charges.peak > 0 else ()

    @property
    def all(self) -> tuple[Trade, ...]:
        """All ways."""
        return self.ways(len(self.shares))

    def ways(self, charged: int) -> tuple[Trade, ...]:
        """The cheapest way first, each with fewer bytes than those before, of so many rates besides none.

        Where there are more rates, the last is not priced, but what their ways hold and take at least: everything in
        even pieces, in the time of the dearest one that is priced.
        """
        found = sorted((self._at(share) for share in (0.0, *self.open[:charged])), key=_order)
        ways = tuple(_nondominated(found))
        return ways if charged >= len(self.open) else (*ways, replace(self._least, prices=found[-1].trade.prices))

    @cached_property
    def _least(self) -> Trade:
        plan = self._plan(0.0)
        return Trade(self.cheapest.prices, least_memory(plan), sum(even(plan, v) for v in self.entering))

    def _at(self, share: float) -> _Found:
        if share not in self.found:
            problem, plan = self.charges.model.problem, self._plan(share)
            entering = sum(held(plan, v) for v in self.entering)
            seconds = problem.value(plan.solution.assignment)
            nbytes = self.charges.row.value(problem, plan.solution.assignment)
            self.found[share] = _Found(seconds, nbytes, Trade(stage_prices(plan), stage_memory(plan), entering, share))
        return self.found[share]

    def _plan(self, share: float) -> StagePlan:
        c = self.charges
        return planned(self.graph, self.mesh, self.rules, c.model, c.liveness, c.at(share))


def too_large(nbytes: float) -> Trade:
    """Stands for ways that are not priced, since all of them hold so many bytes, which is too much."""
    return Trade(StagePrices(0.0, 0.0, 0.0, 0.0, 0.0, {}), StageMemory(nbytes, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0)


def _order(found: _Found) -> tuple[float, float, float]:
    return found.seconds, found.nbytes, found.trade.share


def _nondominated(ordered: Sequence[_Found]) -> Iterator[Trade]:
    least = np.inf
    for one in ordered:
        if one.nbytes < least:
            least = one.nbytes
            yield one.trade
