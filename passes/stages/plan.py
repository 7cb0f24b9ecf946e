"""Layouts inside a pipeline stage: planned on its submesh by the intra-operator solver.

    stage      -> one flat graph                            passes/stages/graph.py
    graph      -> op groups, problem, solution, layouts   as for a whole step                  -> plan_stage
    memory     within the memory limit, by rising Lagrangian penalties for bytes               -> PenalisedPlans
    summary    its part of the plan of the step           passes/stages/summary.py

All stages of a step: `autopar.passes.stages.plan_all`.

Sums of gradients stay unreduced over all microbatches where that is cheaper (`autopar.passes.op_groups.unreduced`); the
update reduces them, once.
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
from autopar.cost_models.sharding.groups import Model
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.collective import Collective
from autopar.ir.layout import Layout, ProgramLayouts
from autopar.ir.problem import Ints
from autopar.passes.intra_op import build as intra_op
from autopar.passes.intra_op import extract
from autopar.passes.memory.penalised import penalised, together
from autopar.passes.op_groups import merge as op_groups
from autopar.passes.remat.memory_policy import solve
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import Solution, optimize
from autopar.passes.stages.cost import stage_memory
from autopar.passes.stages.graph import StageGraph
from autopar.passes.stages.summary import BoundaryLayouts, StageSummary, StageWithLayouts, boundary_layouts, summarize
from autopar.rules import Rule


@dataclass(frozen=True, slots=True)
class PenaltyEffort:
    """At which penalty rates a stage is planned, and how well."""

    # rates that are tried in ascending order: at rate r a plan may take r x share more seconds for a share fewer bytes,
    # both relative to the reference plan (not measured)
    rates: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0, 6.0, 30.0)
    # if the plan at the lowest fitting rate takes more than this share longer than that below, a rate between is tried
    # (not measured)
    refine_above: float = 0.05
    # the rate between two others is their geometric mean, where the lower one counts as at least the higher one
    # divided by this, as it may be 0 (not measured)
    zero_rate_divisor: float = 16
    # relative gap at which the solver stops on a penalised problem (not measured)
    gap: float = 0.02


PENALTIES = PenaltyEffort()


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes per device that a stage may use with `in_flight` microbatches; `rate`: the penalty rate to start near."""

    nbytes: float
    in_flight: int
    rate: float = 0.0


@dataclass(frozen=True, eq=False)
class StagePlan(StageWithLayouts):
    """The plan of one stage.

    Attributes:
        graph: the stage.
        mesh: its submesh, with link costs.
        rules: of the graph's operations.
        model, solution: the optimization problem and its solution.
        liveness: the memory of its plans.
        layouts: of every value, site and copy of the graph.
    """

    graph: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]
    model: Model
    solution: Solution
    liveness: Liveness
    layouts: ProgramLayouts

    @cached_property
    def boundary(self) -> BoundaryLayouts:
        """Layouts of values that cross its boundary."""
        return boundary_layouts(self)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Of all its programs, per step."""
        return extract.collectives(self.graph.graph, self.model, self.solution.assignment, self.layouts, self.mesh)

    @cached_property
    def summary(self) -> StageSummary:
        """Its part of the plan of the step."""
        return summarize(self)


def plan_stage(
    graph: StageGraph,
    mesh: LogicalMesh,
    rules: Mapping[int, Rule],
    options: Options,
    arguments: Mapping[int, Layout] | None = None,
    results: Mapping[int, Layout] | None = None,
) -> StagePlan:
    """Plans one stage by itself.

    Args:
        graph: the stage.
        mesh: its submesh.
        rules: of the graph's operations.
        options: of planning; its pins are ignored.
        arguments, results: position -> the layout that an argument or a result of the graph must have.
    """
    model, liveness = problem_of(graph, mesh, rules, arguments, results)
    solution = solve(model.problem, liveness, mesh, options.memory_budget, options)
    return planned(graph, mesh, rules, model, liveness, solution)


@dataclass(eq=False)
class PenalisedPlans:
    """Plans of one stage at rising penalty rates for memory, each solved on demand.

    At rate r the penalty is r x (seconds / bytes of the reference plan) per byte.

    Attributes:
        graph, mesh, rules: the stage, its submesh, and the rules of its operations.
        options: of planning; its pins and its budget are ignored.
        arguments, results: as for `plan_stage`.
        layers: as for `memory_row`.
        solver_options: further keywords of `optimize`.
        penalised_solver_options: further keywords with a penalty only.
        rough_reference: whether the seconds and bytes that rates refer to may be those of dual ascent and local search,
            without the ILP.
        solved: rate -> solution.
    """

    graph: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]
    options: Options
    arguments: Mapping[int, Layout] | None = None
    results: Mapping[int, Layout] | None = None
    layers: float = 1.0
    solver_options: Mapping[str, Any] = field(default_factory=lambda: {"gap": PENALTIES.gap, "rounds": 0})
    penalised_solver_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rough_reference: bool = False
    solved: dict[float, Solution] = field(default_factory=dict)
    effort: PenaltyEffort = PENALTIES

    def __post_init__(self) -> None:
        self.model, self.liveness = problem_of(self.graph, self.mesh, self.rules, self.arguments, self.results)

    def within(self, graph: StageGraph, rules: Mapping[int, Rule], limit: MemoryLimit) -> StagePlan:
        """The plan of a stage isomorphic to this one, at the lowest rate at which it fits.

        The search starts at the rate below that of the limit: layers by themselves may need a higher rate than the
        whole stage. It goes down from a rate that fits, and up from one that does not. If the lowest fitting rate costs
        much more than the one below it, a rate between the two is tried. If no rate fits, the plan is that of the last
        of `effort.rates`.
        """
        plans: dict[float, StagePlan] = {}
        excess: dict[float, float] = {}

        def fits(rate: float) -> bool:
            plans[rate] = planned(graph, self.mesh, rules, self.model, self.liveness, self.at(rate))
            excess[rate] = stage_memory(plans[rate]).peak(limit.in_flight) - limit.nbytes
            return excess[rate] <= 0

        def seconds(rate: float) -> float:
            return plans[rate].solution.objective

        rates = sorted({limit.rate, *self.effort.rates})
        start = max(rates.index(limit.rate) - 1, 0)
        if fits(rates[start]):
            for rate in reversed(rates[:start]):
                if seconds(min(plans)) <= (1 + self.effort.gap) * self.reference.objective or not fits(rate):
                    break
        elif not any(map(fits, rates[start + 1 :])):
            return plans[rates[-1]]
        lowest_fitting = min(rate for rate, nbytes in excess.items() if nbytes <= 0)
        highest_below = max((rate for rate in plans if rate < lowest_fitting), default=lowest_fitting)
        if seconds(lowest_fitting) > (1 + self.effort.refine_above) * seconds(highest_below):
            fits(math.sqrt(max(highest_below, lowest_fitting / self.effort.zero_rate_divisor) * lowest_fitting))
        return plans[min((rate for rate, nbytes in excess.items() if nbytes <= 0), key=seconds)]

    def at(self, rate: float) -> Solution:
        """The solution at a rate; its objective is without the penalty."""
        if rate not in self.solved:
            if rate and self.peak:
                solution = self._solve(rate * self.reference.objective / self.peak)
            else:
                solution = self.unpenalised
            cost = self.model.problem.value(solution.assignment)
            self.solved[rate] = replace(solution, objective=cost, lower_bound=0.0, gap=1.0)
        return self.solved[rate]

    @cached_property
    def unpenalised(self) -> Solution:
        """The solution without a penalty."""
        return self._solve(0.0) if not self.rough_reference or self.reference.status == "open" else self.reference

    @cached_property
    def reference(self) -> Solution:
        """The solution whose seconds and bytes rates refer to: the unpenalised one, or nearly."""
        return self._solve(0.0, {"largest": 0}) if self.rough_reference else self.unpenalised

    @cached_property
    def row(self) -> Row:
        """The bytes that have a penalty."""
        return memory_row(self.graph, self.liveness, self.reference.assignment, self.layers)

    @cached_property
    def peak(self) -> float:
        """These bytes of the reference solution."""
        return self.row.value(self.model.problem, self.reference.assignment)

    def _solve(self, multiplier: float, extra: Mapping[str, Any] | None = None) -> Solution:
        problem = penalised(self.model.problem, self.row, multiplier) if multiplier else self.model.problem
        penalised_options = self.penalised_solver_options if multiplier else {}
        keywords = {**self.options.keywords(), **self.solver_options, **penalised_options, **(extra or {})}
        return optimize(problem, **keywords)


def memory_row(graph: StageGraph, liveness: Liveness, assignment: Ints, layers: float = 1.0) -> Row:
    """Bytes of a stage with a penalty: those live at the peak of one microbatch, and `layers` times persistent ones.

    Persistent are the state, accumulators of gradients, and values that passes share.
    """
    whole = {a for a in graph.whole.values() if isinstance(a, int)}
    sums = {a for v in graph.summed_in if isinstance(a := graph.local.get(v), int)}
    persistent = {
        "argument": {*graph.arguments.values()},
        "value": whole | sums,
        "copy": whole | {*graph.arguments.values()},
    }
    persistent_row = liveness.row_of("held", lambda buffer: buffer.value in persistent.get(buffer.what, ()))
    return together(liveness.peak(assignment)[1], persistent_row, layers)


def problem_of(
    graph: StageGraph,
    mesh: LogicalMesh,
    rules: Mapping[int, Rule],
    arguments: Mapping[int, Layout] | None = None,
    results: Mapping[int, Layout] | None = None,
) -> tuple[Model, Liveness]:
    """The intra-operator problem of a stage and the memory of its solutions; arguments as for `plan_stage`.

    Passes run one after another: no value of a pass is live before the pass in front of it has ended.
    """
    position = {v: i for i, v in enumerate(graph.graph.inputs)}
    received = [position[v] for v in graph.received.values()]
    grouping = op_groups.group(graph.graph, rules, mesh, arguments, results, received)
    model = intra_op.build(graph.graph, grouping, mesh)
    backend = replace(backend_of(mesh.device), runs_eagerly=False)
    donated = sorted((graph.graph.carried or {}).values())  # updates take over the state that they replace
    return model, Liveness(graph.graph, model, mesh, backend, donated)


def planned(
    graph: StageGraph,
    mesh: LogicalMesh,
    rules: Mapping[int, Rule],
    model: Model,
    liveness: Liveness,
    solution: Solution,
) -> StagePlan:
    """The plan that a solution of `problem_of` describes."""
    return StagePlan(graph, mesh, rules, model, solution, liveness, extract.layouts(model, solution.assignment))
