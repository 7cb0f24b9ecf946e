"""Layouts inside all stages of a step: every stage planned on its submesh, after the one before it.

boundary   values that a forward pass sends keep their layout between submeshes of one shape, though a reader may
           reshard them (autopar/passes/op_groups/merge.py); values that a backward pass sends arrive in the layout
           that their reader wants, as stages are planned in order                         -> _Planner.boundary_pins
problems   isomorphic stages are traced once (passes/stages/isomorphism.py). Those with equal graphs, meshes and
           pins are one problem; its search begins with the solutions for other stages              -> _Planner.plan
effort     a stage need not be faster than the slowest before it                               -> _Planner._accepted
memory     stages of one rank share its limit: passes/stages/shares.py
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

from jax.sharding import PartitionSpec

from autopar.cost_models.pipeline import Prices
from autopar.errors import PinError
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.layout import Layout
from autopar.ir.train_state import match_state
from autopar.passes.memory.search_state import Acceptance
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.op_groups import constraints, pin_keys
from autopar.passes.remat.options import Options
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.graph import StageGraph, stage_graph
from autopar.passes.stages.isomorphism import CanonicalForm, canonical_form, renamed
from autopar.passes.stages.plan import MemoryLimit, StagePlan, StageProblem
from autopar.passes.stages.shares import planned_within
from autopar.passes.stages.summary import BoundaryLayouts, SavedStage, SummarizedStage
from autopar.rules import Rule, rules_of

PlanKey: TypeAlias = tuple[str, LogicalMesh, Hashable, tuple[int, ...]]
"""Determines the plan of a stage: a hash of its graph, its submesh, pins of arguments and of results, and the positions
of its arguments in host memory."""


PlannedStage: TypeAlias = StagePlan | SummarizedStage
"""A planned stage: with its problem, or isomorphic to an earlier one."""
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
        offloaded: the arguments of the step that are in host memory between steps.
    """

    stages: Stages
    plans: tuple[S, ...]
    distinct: int
    offloaded: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TypedArguments:
    """Types of arguments on an Explicit mesh.

    Attributes:
        specs: position of an argument of the step -> the spec of its type.
        axes: axis -> size of the Explicit mesh.
    """

    specs: Mapping[int, PartitionSpec]
    axes: Mapping[str, int]


UNTYPED = TypedArguments({}, {})


def plan_stages(
    stages: Stages,
    avals: Sequence[Any],
    meshes: Sequence[LogicalMesh],
    options: Options | None = None,
    limits: Sequence[MemoryLimit] = (),
    placement: Sequence[int] = (),
    offloaded: Sequence[int] = (),
    types: TypedArguments = UNTYPED,
) -> StagePlans[PlannedStage]:
    """Plans every stage.

    Args:
        stages: the step in stages.
        avals: shape and dtype of every argument of the step.
        meshes: the submesh of every stage.
        options: of planning; `pins` are those of the step's arguments, by path, and apply to every stage that has them.
            Rematerialisation and donation are not among them.
        limits: memory limit of every stage, those of one rank even; empty: none.
        placement: of every stage, its rank; empty: every stage has its own.
        offloaded: positions of the arguments in host memory between steps.
        types: of arguments on an Explicit mesh, which are pins in every stage that has them.

    Returns:
        The plans. Those of stages that are isomorphic to an earlier one are `SummarizedStage`, without a graph.

    Raises:
        PinError: a pin that fits no argument of the step, or not the mesh of its stage.
    """
    in_host_memory = frozenset(stages.split.graph.inputs[i] for i in offloaded)
    planner = _Planner(stages, tuple(avals), tuple(meshes), options or Options(), in_host_memory, types)
    if limits:
        planned = planned_within(limits, placement or range(len(limits)), planner.plan_all)
    else:
        planned = planner.plan_all([None] * len(meshes))
    return StagePlans(stages, tuple(planned), len(planner.problems), in_host_memory)


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
        update=tuple(p.update + p.host for p in stages),
        stash=tuple(plan.summary.memory.stash for plan in plans.plans),
        border=bytes_sent,
    )


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
    offloaded: frozenset[int]
    types: TypedArguments
    programs_of: dict[Hashable, _Program] = field(default_factory=dict)
    problems: dict[PlanKey, StageProblem] = field(default_factory=dict)

    @cached_property
    def programs(self) -> StepPrograms:
        return StepPrograms(self.stages.split)

    def plan_all(self, limits: Sequence[MemoryLimit | None]) -> list[PlannedStage]:
        """Plans of all stages within their memory limits."""
        # In order: a stage takes over the layouts of the values that it exchanges with earlier stages on equal
        # submeshes, so that transfers between them move shards as they are.
        boundaries: dict[int, BoundaryLayouts] = {}
        planned: list[PlannedStage] = []
        for number, limit in enumerate(limits):
            slowest = max((stage.solution.objective for stage in planned), default=0.0)
            planned.append(self.plan(number, boundaries, slowest, limit))
            boundaries[number] = planned[-1].boundary
        return planned

    def plan(
        self, number: int, boundaries: Mapping[int, BoundaryLayouts], slowest: float, limit: MemoryLimit | None
    ) -> PlannedStage:
        """The plan of a stage next to planned ones; without a graph if it is isomorphic to an earlier stage.

        `slowest`: seconds of the slowest stage so far.
        """
        form = canonical_form(self.stages, number, self.avals, self.programs)
        if form.key not in self.programs_of:
            graph = stage_graph(self.stages, number, self.avals, self.programs)
            self.programs_of[form.key] = _Program(
                form, graph, rules_of(graph.graph, self.options.rules), _hash(graph.graph)
            )
        program = self.programs_of[form.key]
        graph, rules, mesh = renamed(program.graph, program.canonical_form, form), program.rules, self.meshes[number]
        arguments, results = self._pinned(graph, boundaries)
        values = self._pinned_values(graph)
        pins = tuple(tuple(sorted(fixed.items())) for fixed in (arguments, results, values))
        offloaded = self._offloaded(graph)
        # all that the solution depends on: what differs among stages of one program is what is pinned or offloaded
        key = (program.hash, mesh, pins, offloaded)
        if key not in self.problems:
            problem = StageProblem(graph, mesh, rules, self.options, arguments, results, offloaded, values)
            self.problems[key] = problem
        problem = self.problems[key]
        solution = problem.within(limit, self._accepted(slowest)) if limit else problem.fastest
        plan = problem.plan(solution, graph)
        leader = program.canonical_form.stage
        if leader == number:
            return plan
        return SummarizedStage(
            self.stages, self.avals, number, leader, mesh, solution, plan.layouts, plan.summary, self.options.rules
        )

    def _offloaded(self, graph: StageGraph) -> tuple[int, ...]:
        """Positions of the arguments of a stage's graph that it has in host memory between steps."""
        owners = self.stages.updates.owners
        own = {a for v, a in graph.arguments.items() if v in self.offloaded and owners[v] == graph.stage}
        return tuple(i for i, a in enumerate(graph.graph.inputs) if a in own)

    def _accepted(self, slowest: float) -> Acceptance:
        """Plans of a stage that need not be faster.

        A stage that takes no longer than the slowest adds 1/m of its seconds to a step of m microbatches, when the
        pipeline fills and drains. All stages together then add at most the tolerance `gap` to the step.
        """
        stages = self.stages
        excess = self.options.gap * slowest * stages.split.count / len(stages.stages)
        return Acceptance(slowest, excess)

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
        resolved = self._resolved(graph.stage)
        pinned_arguments = resolved.arguments
        inputs = split.graph.inputs
        self._check_stored(graph)
        self._check_results(resolved)
        layouts = {v: layout for i, layout in pinned_arguments.items() if (v := inputs[i]) in graph.arguments}
        arguments = {position[graph.arguments[v]]: layout for v, layout in layouts.items()}
        # Where a stage reads the whole batch, as for a mask count, its blocks are cut from it without communication.
        read_whole = [v for v in graph.arguments if v in split.batch]
        arguments.update((position[graph.arguments[v]], (-1,) * len(mesh.sizes)) for v in read_whole)
        received, sent = self.boundary_pins(graph.stage, boundaries)
        arguments.update((position[graph.received[v]], layout) for v, layout in received.items())
        return arguments, {result_position[v]: layout for v, layout in sent.items()}

    @cached_property
    def _pins(self) -> tuple[constraints.Pins, constraints.Pins]:
        """The pins of arguments and results, and those of values inside the step."""
        of_leaves, of_values = dict[str, PartitionSpec](), dict[str, PartitionSpec]()
        for key, spec in (self.options.pins or {}).items():
            named = pin_keys.matches(pin_keys.by_stage(key)[1], self.stages.split.graph, self.options.batch)
            (of_values if any(of.kind == "value" for of in named) else of_leaves)[key] = spec
        return of_leaves, of_values

    def _resolved(self, stage: int) -> constraints.Pinned:
        """The pins of arguments and results that hold in a stage."""
        batch, types, graph, mesh = self.options.batch, self.types, self.stages.split.graph, self.meshes[stage]
        return constraints.resolve(self._pins[0], graph, mesh, types.specs, types.axes, batch, stage, len(self.meshes))

    def _check_results(self, resolved: constraints.Pinned) -> None:
        """PinError for a pin of a result that a pipeline returns in another layout."""
        graph = self.stages.split.graph
        state = match_state(graph)
        for i, layout in resolved.results.items():
            path = graph.output_paths[i]
            if i in state:
                argument = graph.input_paths[state[i]]
                raise PinError(
                    f"pin 'out:{i}': a pipeline returns '{path}' as it stores '{argument}'; pin that instead"
                )
            if any(dim >= 0 for dim in layout):
                raise PinError(
                    f"pin 'out:{i}': a pipeline returns '{path}', which is no state, whole; the nearest: P()"
                )

    def _pinned_values(self, graph: StageGraph) -> Mapping[int, constraints.PinnedValue]:
        """Values of a stage's graph whose layouts the user has fixed."""
        stage, count = graph.stage, len(self.meshes)
        of_values = self._pins[1].items()
        here = {key: spec for key, spec in of_values if pin_keys.matches(pin_keys.by_stage(key)[1], graph.graph)}
        return constraints.resolve(here, graph.graph, self.meshes[stage], stage=stage, stages=count).values

    def _check_stored(self, graph: StageGraph) -> None:
        """PinError for a pin of this stage alone, none of whose arguments the stage reads."""
        split, owners = self.stages.split, self.stages.updates.owners
        for key in self._pins[0]:
            stage, name = pin_keys.by_stage(key)
            named = pin_keys.matches(name, split.graph, self.options.batch) if stage == graph.stage else ()
            values = [split.graph.inputs[of.number] for of in named if of.kind == "arg"]
            if values and not any(v in graph.arguments for v in values):
                stored = f"stored by stage {owners[values[0]]}" if values[0] in owners else "part of the batch"
                raise PinError(
                    f"pin '{key}': stage {stage} does not read '{split.graph.names[values[0]]}', which is {stored}"
                )


def _hash(graph: Graph) -> str:
    """A hash of the graph that does not depend on the names of its arguments."""
    paths = tuple(str(i) for i in range(len(graph.inputs)))
    return graph_hash(replace(graph, input_paths=paths))
