"""Layouts inside a pipeline stage: planned on its submesh by the intra-op optimizer.

    stage      -> one flat graph                            passes/stages/graph.py
    graph      -> groups, problem, solution, layouts      as for a whole step                  -> plan_stage
    memory     within what a device has left, by charging for bytes ever more                    -> PenalisedPlans
    account    all that a plan needs to know of it         passes/stages/summary.py

All stages of a step: `autopar.passes.stages.plan_all`.

Sums of gradients stay partial over all microbatches where that is cheaper (`autopar.passes.op_groups.unreduced`), and
are read whole once, by the update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.row import Row
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.collective import Collective
from autopar.ir.layout import Layout
from autopar.ir.problem import Ints
from autopar.ir.text import size
from autopar.passes.intra_op import build as intra_op
from autopar.passes.intra_op import extract
from autopar.passes.intra_op.plan import Options
from autopar.passes.memory.penalised import penalised, together
from autopar.passes.op_groups import merge as op_groups
from autopar.passes.remat.memory_policy import solve
from autopar.passes.solver.optimize import Solution, optimize
from autopar.passes.stages.cost import stage_memory
from autopar.passes.stages.graph import StageGraph
from autopar.passes.stages.summary import Account, Border, Placed, account, border
from autopar.plans.plan import Stage
from autopar.rules import Rule

#: Shares of the seconds that a plan may take more, for as large a share less of its bytes, that are tried in turn.
RATES = (0.0, 0.1, 0.3, 1.0, 6.0, 30.0)
#: Share by which a plan that fits is dearer than one that does not, above which a rate between theirs is tried.
DEAR = 0.05
#: The rate between none and another is this one's share of it, squared.
SPREAD = 16
#: Relative gap at which such a plan is taken.
ENOUGH = 0.02


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes per device that a stage may hold with so many microbatches in flight; `share`: the first of `RATES`."""

    nbytes: float
    in_flight: int
    share: float = 0.0


@dataclass(frozen=True, eq=False)
class StagePlan(Placed):
    """The plan of one stage.

    Attributes:
        graph: the stage.
        mesh: its submesh, with prices.
        rules: of the graph's operations.
        model, solution: the optimization problem, and what solves it.
        liveness: the memory of its plans.
        layouts: of every value, site and copy of the graph.
    """

    graph: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]
    model: intra_op.Model
    solution: Solution
    liveness: Liveness
    layouts: Stage

    @cached_property
    def border(self) -> Border:
        """Layouts of what crosses its borders."""
        return border(self)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Of all its programs, per step."""
        found = extract.Layouts(self.layouts.values, self.layouts.uses, self.layouts.copies)
        return tuple(extract.collectives(self.graph.graph, self.model, self.solution.assignment, found, self.mesh))

    @cached_property
    def account(self) -> Account:
        """What it comes down to."""
        return account(self)


def plan_stage(
    graph: StageGraph,
    mesh: LogicalMesh,
    rules: Mapping[int, Rule],
    options: Options,
    arguments: Mapping[int, Layout] | None = None,
    results: Mapping[int, Layout] | None = None,
) -> StagePlan:
    """Plan one stage by itself.

    Args:
        graph: the stage.
        mesh: its submesh.
        rules: of the graph's operations.
        options: of planning; its pins are not looked at.
        arguments, results: position -> the layout that an argument or a result of the graph must have.
    """
    model, liveness = problem_of(graph, mesh, rules, arguments, results)
    solution = solve(model.problem, liveness, mesh, options.memory_budget, options)
    return planned(graph, mesh, rules, model, liveness, solution)


@dataclass(eq=False)
class PenalisedPlans:
    """Plans of one stage at rising rates for memory, each solved when it is first asked for.

    A rate is a share: so much more of the cheapest plan's seconds is worth as large a share less of its bytes.

    Attributes:
        graph, mesh, rules: the stage, its submesh, and the rules of its operations.
        options: of planning; its pins and its budget are not looked at.
        arguments, results: as for `plan_stage`.
        layers: as for `memory_row`.
        how: further keywords of `optimize`; `penalised_how`: those with a charge alone.
        rough: whether what the cheapest plan takes and holds, which rates go by, may be what bounds alone find.
    """

    graph: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]
    options: Options
    arguments: Mapping[int, Layout] | None = None
    results: Mapping[int, Layout] | None = None
    layers: float = 1.0
    how: Mapping[str, Any] = field(default_factory=lambda: {"gap": ENOUGH, "rounds": 0})
    penalised_how: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rough: bool = False
    solved: dict[float, Solution] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model, self.liveness = problem_of(self.graph, self.mesh, self.rules, self.arguments, self.results)

    def within(self, graph: StageGraph, rules: Mapping[int, Rule], limit: Limit) -> StagePlan:
        """The plan of a stage like this one, at the lowest rate at which it fits, looked for about that of the limit.

        Layers by themselves may have to be charged more than the whole stage: the rate below that of the limit is the
        first, then those below it or above. If the first that fits costs much more than the last that does not, one
        between them is tried. With the last rate of `RATES` it is as small as such plans get; a warning says by how
        much it does not fit.
        """
        made: dict[float, StagePlan] = {}
        over: dict[float, float] = {}

        def fits(share: float) -> bool:
            made[share] = planned(graph, self.mesh, rules, self.model, self.liveness, self.at(share))
            over[share] = stage_memory(made[share]).peak(limit.in_flight) - limit.nbytes
            return over[share] <= 0

        def seconds(share: float) -> float:
            return made[share].solution.objective

        rates = sorted({limit.share, *RATES})
        first = max(rates.index(limit.share) - 1, 0)
        if fits(rates[first]):
            for share in reversed(rates[:first]):
                if seconds(min(made)) <= (1 + ENOUGH) * self.base.objective or not fits(share):
                    break
        elif not any(map(fits, rates[first + 1 :])):
            least, needs = made[rates[-1]], size(over[rates[-1]])
            warning = f"stage {graph.stage} needs {needs} more than the {size(limit.nbytes)} that a device has for it"
            return replace(least, solution=replace(least.solution, warnings=(*least.solution.warnings, warning)))
        high = min(share for share, nbytes in over.items() if nbytes <= 0)
        low = max((share for share in made if share < high), default=high)
        if seconds(high) > (1 + DEAR) * seconds(low):
            fits(math.sqrt(max(low, high / SPREAD) * high))
        return made[min((share for share, nbytes in over.items() if nbytes <= 0), key=seconds)]

    def at(self, share: float) -> Solution:
        """The solution at a rate, valued without the charge."""
        if share not in self.solved:
            found = self._solve(share * self.base.objective / self.peak) if share and self.peak else self.free
            cost = self.model.problem.value(found.assignment)
            self.solved[share] = replace(found, objective=cost, lower_bound=0.0, gap=1.0)
        return self.solved[share]

    @cached_property
    def free(self) -> Solution:
        """Without a charge."""
        return self._solve(0.0) if not self.rough or self.base.status == "open" else self.base

    @cached_property
    def base(self) -> Solution:
        """About the same, which rates go by."""
        return self._solve(0.0, {"largest": 0}) if self.rough else self.free

    @cached_property
    def row(self) -> Row:
        """The bytes that are charged for."""
        return memory_row(self.graph, self.liveness, self.base.assignment, self.layers)

    @cached_property
    def peak(self) -> float:
        """These bytes of that plan."""
        return self.row.value(self.model.problem, self.base.assignment)

    def _solve(self, rate: float, further: Mapping[str, Any] | None = None) -> Solution:
        problem = penalised(self.model.problem, self.row, rate) if rate else self.model.problem
        how = {**self.how, **(self.penalised_how if rate else {}), **(further or {})}
        return optimize(problem, **{**self.options.keywords(), **how})


def memory_row(graph: StageGraph, liveness: Liveness, assignment: Ints, layers: float = 1.0) -> Row:
    """The bytes that a stage is charged for: what lives where one microbatch peaks, and `layers` times what is held.

    Held are the state, what gradients are summed in, and what passes share.
    """
    whole = {a for a in graph.whole.values() if isinstance(a, int)}
    sums = {a for v in graph.marked if isinstance(a := graph.local.get(v), int)}
    held = {
        "argument": {*graph.arguments.values()},
        "value": whole | sums,
        "copy": whole | {*graph.arguments.values()},
    }
    besides = liveness.row_of("held", lambda buffer: buffer.value in held.get(buffer.what, ()))
    return together(liveness.peak(assignment)[1], besides, layers)


def problem_of(
    graph: StageGraph,
    mesh: LogicalMesh,
    rules: Mapping[int, Rule],
    arguments: Mapping[int, Layout] | None = None,
    results: Mapping[int, Layout] | None = None,
) -> tuple[intra_op.Model, Liveness]:
    """The problem whose solutions are the plans of a stage, and their memory; arguments as for `plan_stage`.

    Passes run one after another, so that nothing of one is there before the one in front of it has ended.
    """
    position = {v: i for i, v in enumerate(graph.graph.inputs)}
    handed = [position[v] for v in graph.received.values()]
    grouping = op_groups.group(graph.graph, rules, mesh, arguments, results, handed)
    model = intra_op.build(graph.graph, grouping, mesh)
    backend = replace(backend_of(mesh.device), runs_eagerly=False)
    given = sorted((graph.graph.carried or {}).values())  # updates take over the state that they replace
    return model, Liveness(graph.graph, model, mesh, backend, given)


def planned(
    graph: StageGraph,
    mesh: LogicalMesh,
    rules: Mapping[int, Rule],
    model: intra_op.Model,
    liveness: Liveness,
    solution: Solution,
) -> StagePlan:
    """The plan that a solution of `problem_of` stands for."""
    found = extract.layouts(model, solution.assignment)
    submesh = dict(zip(mesh.names, mesh.sizes, strict=True))
    layouts = Stage(f"stage {graph.stage}", submesh, mesh.size, found.values, found.uses, found.copies)
    return StagePlan(graph, mesh, rules, model, solution, liveness, layouts)
