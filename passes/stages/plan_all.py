"""Layouts inside all stages of a step: every stage planned on its submesh, after its neighbours.

    boundary   values that a forward pass sends keep their layout between submeshes of one shape, though a reader may
               reshard them (autopar/passes/op_groups/merge.py); values that a backward pass sends arrive in the layout
               that their reader wants, as stages are planned in order                  -> _Planner.boundary_pins
    isomorphic stages are traced once (passes/stages/isomorphism.py), and those with equal graphs, meshes and pins are
               solved once                                                                       -> _Planner.plan
    runs       stages of a large step are planned in two runs, by two processes where there are two. Stages with
               transfers between them on submeshes of one shape are in the same run, if that makes runs of about equal
               length. Otherwise the first run has the first half of the stages and the second run the second half,
               which does not know the layouts of values sent by the first; its stages are planned again where these
               turn out different                                                        -> planning_runs, _join

Runs depend on the stages and their submeshes alone, so that the plan is the same in any number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeAlias, TypeVar

import networkx as nx

from autopar import parallel_map
from autopar.cost_models.pipeline import Prices
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.layout import Layout, ProgramLayouts
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.op_groups import constraints
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import Solution
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.graph import StageGraph, stage_graph
from autopar.passes.stages.isomorphism import CanonicalForm, canonical_form, renamed
from autopar.passes.stages.plan import MemoryLimit, PenalisedPlans, StagePlan, plan_stage, planned
from autopar.passes.stages.summary import BoundaryLayouts, SavedStage, StageSummary, SummarizedStage
from autopar.rules import Rule, RuleReader


@dataclass(frozen=True, slots=True)
class RunEffort:
    """When and how stages are planned in two runs side by side."""

    # operations of a step from which its stages are planned in two runs (not measured)
    two_from: int = 5_000
    # share of all operations that the longer of two independent runs may have (not measured)
    longer: float = 0.85
    # relative cost of planning a stage with as many operations and a submesh of the same shape as an earlier one
    # (not measured)
    repeated: float = 0.2


RUNS = RunEffort()


PlanKey: TypeAlias = tuple[str, LogicalMesh, Hashable]
"""Determines the plan of a stage: a hash of its graph, its submesh, pins of arguments and of results."""


PlannedStage: TypeAlias = StagePlan | SummarizedStage
"""A planned stage, of this process or another."""
CodegenStage: TypeAlias = PlannedStage | SavedStage
"""A stage with layouts, from which programs are generated."""
S = TypeVar("S", bound=CodegenStage, covariant=True)


@dataclass(frozen=True, eq=False)
class StagePlans(Generic[S]):
    """The plans of all stages of a step.

    Attributes:
        stages: the step in stages.
        plans: of every stage.
        distinct: number of different problems that were solved; other stages share a solution.
    """

    stages: Stages
    plans: tuple[S, ...]
    distinct: int


@dataclass(frozen=True, eq=False)
class _PlannedStage:
    """A planned stage and the key of its plan."""

    plan: PlannedStage
    key: PlanKey


@dataclass(frozen=True, eq=False)
class _StageResult:
    """A planned stage as one process sends it to another."""

    solution: Solution
    layouts: ProgramLayouts
    summary: StageSummary
    key: PlanKey


def plan_stages(
    stages: Stages,
    avals: Sequence[Any],
    meshes: Sequence[LogicalMesh],
    options: Options | None = None,
    limits: Sequence[MemoryLimit] = (),
    effort: RunEffort = RUNS,
) -> StagePlans[PlannedStage]:
    """Plans every stage.

    Args:
        stages: the step in stages.
        avals: shape and dtype of every argument of the step.
        meshes: the submesh of every stage.
        options: of planning; `pins` are those of the step's arguments, by path, and apply to every stage that has them.
            Rematerialisation and donation are not among them.
        limits: memory limits of every stage; empty: the budget of the options, for one microbatch at a time.
        effort: when stages are planned in two runs.

    Returns:
        The plans. Those of another process are `SummarizedStage`, without the problem that they solve.

    Raises:
        PinError: a pin that fits no argument of the step, or not the mesh of its stage.
        MemoryBudgetError: no plan of a stage fits into the budget.
    """
    planner = _Planner(stages, tuple(avals), tuple(meshes), options or Options(), tuple(limits))
    runs = planning_runs(stages, meshes, effort)
    if parallel_map.runs_in_processes(len(runs)):
        results = parallel_map.results([partial(_results, planner, run) for run in runs])
        planned = {n: planner.recorded(n, result) for run in results for n, result in run.items()}
    else:
        planned = {n: stage for run in runs for n, stage in planner.run(run).items()}
    return _join(planner, runs, planned)


def pipeline_times(plans: StagePlans[PlannedStage]) -> Prices:
    """Times of all stages, as the simulator of schedules takes them, without times of transfers.

    Times of transfers depend on the links: `autopar.cost_models.pipeline.transfer_times` computes them from
    `Prices.border`, the bytes.
    """
    stages = [plan.summary.times for plan in plans.plans]
    bytes_sent: dict[tuple[int, int], float] = {}
    for transfer, values in plans.stages.transfers.items():
        pair = (transfer.source, transfer.target)
        bytes_sent[pair] = bytes_sent.get(pair, 0.0) + sum(stages[transfer.source].sent[v] for v in values)
    return Prices(
        forward=tuple(p.forward for p in stages),
        backward=tuple(p.backward for p in stages),
        weight=tuple(p.weight for p in stages),
        reduce=tuple(p.reduce for p in stages),
        update=tuple(p.update for p in stages),
        stash=tuple(plan.summary.memory.stash for plan in plans.plans),
        border=bytes_sent,
    )


def planning_runs(
    stages: Stages, meshes: Sequence[LogicalMesh], effort: RunEffort = RUNS
) -> tuple[tuple[int, ...], ...]:
    """Stages to be planned in parallel: two runs of about equal cost, or a single one of few operations."""
    operations, numbers = _operations(stages), range(len(meshes))
    if len(meshes) < 2 or sum(operations) < effort.two_from:
        return (tuple(numbers),)
    weights = _weights(operations, meshes, effort)
    first_run, second_run = set[int](), set[int]()
    components = _coupled(stages, meshes)
    for component in sorted(components, key=lambda numbers: (-sum(weights[n] for n in numbers), numbers)):
        min(first_run, second_run, key=lambda run: sum(weights[n] for n in run)).update(component)
    if max(sum(weights[n] for n in run) for run in (first_run, second_run)) <= effort.longer * sum(weights):
        return tuple(sorted(first_run)), tuple(sorted(second_run))
    cumulative = list(itertools.accumulate(weights))
    split_at = min(numbers[1:], key=lambda k: (max(cumulative[k - 1], cumulative[-1] - cumulative[k - 1]), k))
    return tuple(numbers[:split_at]), tuple(numbers[split_at:])


def _operations(stages: Stages) -> list[int]:
    """Number of operations of every stage."""
    updates = stages.updates.programs
    return [
        sum(len(pass_.ops) for pass_ in stage.passes.values()) + sum(len(u.ops) for u in updates if u.stage == s)
        for s, stage in enumerate(stages.stages)
    ]


def _weights(operations: Sequence[int], meshes: Sequence[LogicalMesh], effort: RunEffort) -> list[float]:
    """Estimated cost of planning every stage, in operations."""
    solved = set[tuple[int, tuple[int, ...]]]()
    weights: list[float] = []
    for count, mesh in zip(operations, meshes, strict=True):
        weights.append(count * (effort.repeated if (count, mesh.sizes) in solved else 1.0))
        solved.add((count, mesh.sizes))
    return weights


def _coupled(stages: Stages, meshes: Sequence[LogicalMesh]) -> list[list[int]]:
    """Connected components of stages whose boundary layouts are pinned by each other."""
    graph = nx.Graph()
    graph.add_nodes_from(range(len(meshes)))
    graph.add_edges_from(t[1:] for t in stages.transfers if meshes[t.source].sizes == meshes[t.target].sizes)
    return [sorted(component) for component in nx.connected_components(graph)]


def _results(planner: _Planner, run: Sequence[int]) -> dict[int, _StageResult]:
    planned = planner.run(run)
    return {n: _StageResult(m.plan.solution, m.plan.layouts, m.plan.summary, m.key) for n, m in planned.items()}


def _join(
    planner: _Planner, runs: Sequence[Sequence[int]], planned: dict[int, _PlannedStage]
) -> StagePlans[PlannedStage]:
    """All stages; those whose boundary changed in another run, or by planning a stage again, are planned again."""
    boundaries = {n: stage.plan.boundary for n, stage in planned.items()}
    changed = {n for run in runs[:-1] for n in run}
    for number in (n for run in runs[1:] for n in run):
        arguments, results = planner.boundary_pins(number, {n: boundaries[n] for n in sorted(changed)})
        boundary = boundaries[number]
        if any(boundary.received.get(v) != layout for v, layout in arguments.items()) or any(
            boundary.sent.get(v) != layout for v, layout in results.items()
        ):
            planned[number] = planner.plan(number, boundaries)
            boundaries[number] = planned[number].plan.boundary
            changed.add(number)
    in_order = [planned[n] for n in range(len(planned))]
    return StagePlans(planner.stages, tuple(stage.plan for stage in in_order), len({stage.key for stage in in_order}))


@dataclass(frozen=True, eq=False)
class _Program:
    """The graph of the first of isomorphic stages, its rules, and the hash that they share."""

    canonical_form: CanonicalForm
    graph: StageGraph
    rules: Mapping[int, Rule]
    hash: str


@dataclass(eq=False)
class _Planner:
    """Plans stages; isomorphic ones are solved once."""

    stages: Stages
    avals: tuple[Any, ...]
    meshes: tuple[LogicalMesh, ...]
    options: Options
    limits: tuple[MemoryLimit, ...] = ()
    programs_of: dict[Hashable, _Program] = field(default_factory=dict)
    solved: dict[PlanKey, StagePlan] = field(default_factory=dict)
    penalised: dict[PlanKey, PenalisedPlans] = field(default_factory=dict)

    @cached_property
    def programs(self) -> StepPrograms:
        return StepPrograms(self.stages.split)

    @cached_property
    def reader(self) -> RuleReader:
        return RuleReader(self.options.rules)

    def run(self, run: Sequence[int]) -> dict[int, _PlannedStage]:
        """The plans of stages in order, each pinned by those of the run before it."""
        boundaries: dict[int, BoundaryLayouts] = {}
        planned_stages: dict[int, _PlannedStage] = {}
        for number in run:
            planned_stages[number] = self.plan(number, boundaries)
            boundaries[number] = planned_stages[number].plan.boundary
        return planned_stages

    def recorded(self, number: int, result: _StageResult) -> _PlannedStage:
        """A planned stage from its result in another process."""
        mesh, rules = self.meshes[number], self.options.rules
        plan = SummarizedStage(
            self.stages, self.avals, number, mesh, result.solution, result.layouts, result.summary, rules
        )
        return _PlannedStage(plan, result.key)

    def plan(self, number: int, boundaries: Mapping[int, BoundaryLayouts]) -> _PlannedStage:
        """The plan of a stage next to planned ones; without a graph if it is isomorphic to an earlier stage."""
        form = canonical_form(self.stages, number, self.avals, self.programs)
        if form.key not in self.programs_of:
            graph = stage_graph(self.stages, number, self.avals, self.programs)
            self.programs_of[form.key] = _Program(form, graph, self.reader.read(graph.graph), _hash(graph.graph))
        program = self.programs_of[form.key]
        graph, rules, mesh = renamed(program.graph, program.canonical_form, form), program.rules, self.meshes[number]
        arguments, results = self._pinned(graph, boundaries)
        pins = tuple(sorted(arguments.items())), tuple(sorted(results.items()))
        key = (program.hash, mesh, pins)
        if self.limits:
            if key not in self.penalised:
                self.penalised[key] = PenalisedPlans(
                    graph, mesh, rules, self.options, arguments, results, rough_reference=True
                )
            plan = self.penalised[key].within(graph, rules, self.limits[number])
        elif key not in self.solved:
            plan = self.solved[key] = plan_stage(graph, mesh, rules, self.options, arguments, results)
        else:
            solved = self.solved[key]
            plan = planned(graph, mesh, rules, solved.model, solved.liveness, solved.solution)
        if program.canonical_form.stage == number:
            return _PlannedStage(plan, key)
        return self.recorded(number, _StageResult(plan.solution, plan.layouts, plan.summary, key))

    def boundary_pins(
        self, number: int, boundaries: Mapping[int, BoundaryLayouts]
    ) -> tuple[dict[int, Layout], dict[int, Layout]]:
        """Layouts of values that a stage receives and sends, where earlier stages on equal submeshes fix them."""
        arguments: dict[int, Layout] = {}
        results: dict[int, Layout] = {}
        for transfer, values in self.stages.transfers.items():
            neighbour = boundaries.get(min(transfer.source, transfer.target))
            if max(transfer.source, transfer.target) != number or neighbour is None:
                continue
            if neighbour.sizes != self.meshes[number].sizes:
                continue
            fixed, pins = (neighbour.sent, arguments) if transfer.target == number else (neighbour.received, results)
            pins.update((v, fixed[v]) for v in values if v in fixed)
        return arguments, results

    def _pinned(
        self, graph: StageGraph, boundaries: Mapping[int, BoundaryLayouts]
    ) -> tuple[dict[int, Layout], dict[int, Layout]]:
        """Layouts that the user or an earlier stage has fixed, by position of arguments and of results."""
        mesh, split = self.meshes[graph.stage], self.stages.split
        position = {v: i for i, v in enumerate(graph.graph.inputs)}
        result_position = {v: i for i, v in graph.sent.items()}
        pinned_arguments = constraints.resolve(self.options.pins, split.graph, mesh).arguments
        inputs = split.graph.inputs
        layouts = {v: layout for i, layout in pinned_arguments.items() if (v := inputs[i]) in graph.arguments}
        arguments = {position[graph.arguments[v]]: layout for v, layout in layouts.items()}
        read_whole = [v for v in graph.arguments if v in split.batch]
        arguments.update((position[graph.arguments[v]], (-1,) * len(mesh.sizes)) for v in read_whole)
        received, sent = self.boundary_pins(graph.stage, boundaries)
        arguments.update((position[graph.received[v]], layout) for v, layout in received.items())
        return arguments, {result_position[v]: layout for v, layout in sent.items()}


def _hash(graph: Graph) -> str:
    """A hash of the graph that does not depend on the names of its arguments."""
    paths = tuple(str(i) for i in range(len(graph.inputs)))
    return graph_hash(replace(graph, input_paths=paths))
