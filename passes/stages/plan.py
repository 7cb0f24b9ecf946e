"""Layouts inside a pipeline stage: planned on its submesh by the intra-operator solver.

    stage      -> one flat graph                            passes/stages/graph.py
    graph      -> op groups, problem, memory rows         as for a whole step                      -> StageProblem
    problem    -> the fastest solution within a memory limit                                -> StageProblem.within
               -> solutions at penalty rates for bytes, which the search compares                 -> PenalisedPlans
    summary    its part of the plan of the step           passes/stages/summary.py

All stages of a step: `autopar.passes.stages.plan_all`.

Sums of gradients stay unreduced over all microbatches where that is cheaper (`autopar.passes.op_groups.unreduced`); the
update reduces them, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.cost_models import offload
from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.row import Row
from autopar.cost_models.sharding.groups import Model
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.collective import Collective
from autopar.ir.layout import Layout, ProgramLayouts
from autopar.passes.intra_op import build as intra_op
from autopar.passes.intra_op import extract
from autopar.passes.memory.budget import Infeasible, optimize_within
from autopar.passes.memory.penalised import penalised
from autopar.passes.memory.search_state import NONE_ACCEPTED, Acceptance
from autopar.passes.op_groups import merge as op_groups
from autopar.passes.op_groups.constraints import PinnedValue
from autopar.passes.remat.memory_policy import smallest
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import Pruned, Solution, optimize
from autopar.passes.stages.graph import StageGraph
from autopar.passes.stages.memory import StageLiveness
from autopar.passes.stages.summary import BoundaryLayouts, StageSummary, StageWithLayouts, boundary_layouts, summarize
from autopar.rules import Rule


@dataclass(frozen=True, slots=True)
class StageEffort:
    """How near its optimum a stage is planned."""

    # relative gap at which the search within a memory limit stops, if the option `gap` is smaller: most of it is the
    # distance of the lower bound (0.5% in place of 2%: MoE-70B is 0.3% faster in 1.7 times the time, GPT-39B equal in
    # 1.5 times, GPT-15B equal, GPT-6.7B 0.1% slower; 2026-11)
    gap_within: float = 0.02
    # plans are sought first among those that take at most so many times as long as without a limit, which saves the
    # search for the least memory (a quarter of the time on GPT-39B and MoE-70B; 2026-11)
    slower: float = 3.0


STAGE = StageEffort()


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that a stage may use.

    Attributes:
        nbytes: whole bytes per device; 0: the least that is found.
        in_flight: microbatches between F and the last pass.
        thorough: whether the search goes on where no plan that fits is quickly found.
    """

    nbytes: int
    in_flight: int
    thorough: bool = True


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
    liveness: StageLiveness
    layouts: ProgramLayouts

    @cached_property
    def boundary(self) -> BoundaryLayouts:
        """Layouts of values that cross its boundary."""
        return boundary_layouts(self)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Of all its programs, per step."""
        graph, chosen = self.graph, self.solution.assignment
        return extract.collectives(graph.graph, self.model, chosen, self.layouts, self.mesh, graph.program_of)

    @cached_property
    def summary(self) -> StageSummary:
        """Its part of the plan of the step."""
        return summarize(self)


@dataclass(eq=False)
class StageProblem:
    """The intra-operator problem of one stage and the memory of its plans.

    Passes run one after another: no value of a pass is live before the pass in front of it has ended.

    Attributes:
        graph: the stage, or one that is isomorphic to it.
        mesh: its submesh.
        rules: of the graph's operations.
        options: of planning; its pins, and its budget, are ignored.
        arguments, results: position -> the layout that an argument or a result of the graph must have.
        values: value of the graph -> the layout that it must have.
        offloaded: positions of the arguments of the graph that are in host memory between steps.
    """

    graph: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]
    options: Options
    arguments: Mapping[int, Layout] | None = None
    results: Mapping[int, Layout] | None = None
    offloaded: tuple[int, ...] = ()
    values: Mapping[int, PinnedValue] | None = None
    solved: dict[MemoryLimit, Solution] = field(default_factory=dict)

    def __post_init__(self) -> None:
        position = {v: i for i, v in enumerate(self.graph.graph.inputs)}
        received = [position[v] for v in self.graph.received.values()]
        graph, mesh = self.graph.graph, self.mesh
        even = self.graph.exchanged
        grouping = op_groups.group(
            graph, self.rules, mesh, self.arguments, self.results, received, even=even, pinned_values=self.values
        )
        self.model = offload.priced(intra_op.build(graph, grouping, mesh), graph, mesh, self.offloaded)
        backend = replace(backend_of(mesh.device), runs_eagerly=False)
        donated = sorted((graph.carried or {}).values())  # updates take over the state that they replace
        liveness = Liveness(graph, self.model, mesh, backend, donated, self.offloaded)
        self.liveness = StageLiveness(self.graph, self.model, mesh, liveness, self.offloaded)

    @cached_property
    def fastest(self) -> Solution:
        """The solution without a memory limit."""
        return optimize(self.model.problem, **self.options.keywords())

    def within(self, limit: MemoryLimit, accepted: Acceptance = NONE_ACCEPTED) -> Solution:
        """The fastest solution within a memory limit, or an accepted one.

        If none is found, the solution of the least peak that is found; for a limit that is not thorough, the fastest.
        """
        if limit not in self.solved:
            self.solved[limit] = self._within(limit, accepted)
        return self.solved[limit]

    def _within(self, limit: MemoryLimit, accepted: Acceptance) -> Solution:
        problem, options, rows = self.model.problem, self.options, self.liveness.rows(limit.in_flight)
        seeds = [solution.assignment for solution in self.solved.values()]
        slowest = STAGE.slower * self.fastest.objective
        is_thorough = limit.thorough or options.solver != "auto"
        ends: dict[str, Any] = {"ceiling": slowest} if is_thorough else {"cutoff": slowest, "least": False}
        keywords: dict[str, Any] = {**options.keywords(), "gap": max(options.gap, STAGE.gap_within), **ends}
        try:
            return optimize_within(
                problem, rows, limit.nbytes, free=self.fastest, seeds=seeds, accepted=accepted, **keywords
            )
        except Pruned:
            return self.fastest
        except Infeasible as infeasible:
            return smallest(problem, infeasible.least, 0.0)

    def plan(self, solution: Solution, graph: StageGraph | None = None) -> StagePlan:
        """The plan of this stage, or of an isomorphic one, that a solution describes."""
        layouts = extract.layouts(self.model, solution.assignment)
        return StagePlan(graph or self.graph, self.mesh, self.rules, self.model, solution, self.liveness, layouts)


@dataclass(eq=False)
class PenalisedPlans:
    """Solutions of a stage at rising penalty rates for memory, each computed on demand.

    At rate r the penalty is r x (seconds / bytes of the solution without a penalty) per byte.

    Attributes:
        stage: the stage.
        layers: as for `StageLiveness.penalised_row`.
        solver_options: further keywords of `optimize`.
        penalised_solver_options: further keywords with a penalty only.
        solved: rate -> solution.
    """

    stage: StageProblem
    layers: float = 1.0
    solver_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    penalised_solver_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    solved: dict[float, Solution] = field(default_factory=dict)

    def at(self, rate: float) -> Solution:
        """The solution at a rate; its objective is without the penalty."""
        if rate not in self.solved:
            multiplier = rate * self.unpenalised.objective / self.peak if rate and self.peak else 0.0
            solution = self._solve(multiplier) if multiplier else self.unpenalised
            cost = self.stage.model.problem.value(solution.assignment)
            self.solved[rate] = replace(solution, objective=cost, lower_bound=0.0, gap=1.0)
        return self.solved[rate]

    @cached_property
    def unpenalised(self) -> Solution:
        """The solution without a penalty, to whose seconds and bytes rates refer."""
        return self._solve(0.0)

    @cached_property
    def row(self) -> Row:
        """The bytes that have a penalty."""
        return self.stage.liveness.penalised_row(self.unpenalised.assignment, self.layers)

    @cached_property
    def peak(self) -> float:
        """These bytes of the solution without a penalty."""
        return self.row.value(self.stage.model.problem, self.unpenalised.assignment)

    def _solve(self, multiplier: float) -> Solution:
        problem = self.stage.model.problem
        with_penalty = penalised(problem, self.row, multiplier) if multiplier else problem
        penalised_options = self.penalised_solver_options if multiplier else {}
        return optimize(with_penalty, **{**self.stage.options.keywords(), **self.solver_options, **penalised_options})
