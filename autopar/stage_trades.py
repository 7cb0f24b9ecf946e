"""Ways to run one stage on one submesh: time against memory, by the Lagrangian.

The bytes that a stage holds, and those alive where the cheapest plan peaks, are charged at a rate,

    seconds(x) + rate bytes(x),      rate = share x (seconds / bytes of the cheapest plan)

for the shares of `SHARES`. Each is one more solution of the same problem, without memory rows; those that are as dear
in both as another are dropped. That is quick enough to be asked hundreds of times (`autopar.stage_search`). The plan of
a stage that is chosen is made with rows, within the budget (`autopar.stage_planning`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.passes.charged import charged
from autopar.passes.optimize import Solution, optimize
from autopar.planning import Options
from autopar.rules import Rule
from autopar.stage_graphs import StageGraph
from autopar.stage_planning import memory_row, planned, problem_of
from autopar.stage_prices import StageMemory, StagePrices, held, stage_memory, stage_prices

#: Shares of the seconds that a plan may take more for as large a share less of its bytes.
SHARES = (0.3, 6.0)
#: How often what a layer holds counts against what one microbatch needs: stages have several layers.
LAYERS = 4.0
#: Relative gap at which a way to run a stage is priced as it is.
ENOUGH = 0.1
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

    def recomputed(self) -> Trade:
        """The same where the backward pass begins by running the forward pass again, from what entered it."""
        again = replace(self.prices, backward=self.prices.backward + self.prices.forward)
        saved = max(0.0, self.memory.stash - self.entering)
        less = replace(self.memory, stash=self.memory.stash - saved, temporaries=self.memory.temporaries + saved)
        return replace(self, prices=again, memory=less)


def trades(
    graph: StageGraph,
    mesh: LogicalMesh,
    rules: Mapping[int, Rule],
    options: Options,
    entering: Sequence[int] = (),
    shares: Sequence[float] = SHARES,
) -> tuple[Trade, ...]:
    """Ways to run a stage on a mesh, the cheapest first, each with fewer bytes than those before.

    Args:
        graph: the stage.
        mesh: where it runs.
        rules: of the graph's operations.
        options: how to solve; nothing else of them is looked at.
        entering: values of the graph that the forward pass is given by other stages.
        shares: rates to try besides none.
    """
    model, liveness = problem_of(graph, mesh, rules)
    how: Mapping[str, Any] = {**options.keywords(), "enough": ENOUGH, "largest": LARGEST, "fold": False}
    free = optimize(model.problem, **how)
    row = memory_row(graph, liveness, free.assignment, LAYERS)
    peak = row.value(model.problem, free.assignment)

    def trade(solution: Solution, share: float) -> tuple[float, float, Trade]:
        plan = planned(graph, mesh, rules, model, liveness, solution)
        return (
            model.problem.value(solution.assignment),
            row.value(model.problem, solution.assignment),
            Trade(stage_prices(plan), stage_memory(plan), sum(held(plan, v) for v in entering), share),
        )

    found = [trade(free, 0.0)]
    for share in shares if peak > 0 else ():
        problem = charged(model.problem, row, share * free.objective / peak)
        found.append(trade(optimize(problem, **how), share))
    return tuple(_nondominated(found))


def _nondominated(found: Sequence[tuple[float, float, Trade]]) -> Iterator[Trade]:
    least = np.inf
    for _, nbytes, one in sorted(found, key=lambda f: (f[0], f[1], f[2].share)):
        if nbytes < least:
            least = nbytes
            yield one
