"""The problem behind a plan, on one mesh or of one stage: what its layouts cost, within memory.

    one mesh    the executed program, with the pins of the user                                          -> whole_step
    a stage     its program, with what it receives and sends in the layouts of the plan                  -> of_stage

A layout whose best plan does not fit into memory is solved again within the budget                  -> Subject.exact_s
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from autopar.cost_models import offload
from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.row import RowSource
from autopar.errors import MemoryBudgetError, SolverError
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout, local_shape
from autopar.options import Settings
from autopar.passes.inter_op.pipelines import avals
from autopar.passes.intra_op.alternatives import Alternatives
from autopar.passes.memory.budget import Infeasible, optimize_within
from autopar.passes.mesh_search.planner import make_model
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.remat import memory_policy
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import Pruned, optimize
from autopar.passes.stages.graph import StageGraph, stage_graph
from autopar.passes.stages.plan import StageProblem
from autopar.plans.record import Stage
from autopar.rules import rules_of
from autopar.runtime.planned_step import PlannedStep

#: Time limit (s) of solving the problem again for one layout.
EXACT_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class Subject:
    """A problem whose layouts are priced.

    Attributes:
        name: "step", or the name of a stage.
        seconds: what it takes as planned (s per step).
        alternatives: its layouts.
        graph: the program.
        mesh: the mesh of the step, or of the stage.
        values: position of an argument leaf of the step -> its value in `graph`.
        make_memory: makes the memory of its plans, which exact prices alone need.
        limit: bytes per device that a plan may use; inf: any.
        solver: of the user's options.
    """

    name: str
    seconds: float
    alternatives: Alternatives
    graph: Graph
    mesh: LogicalMesh
    values: Mapping[int, int]
    make_memory: Callable[[], RowSource]
    limit: float
    solver: str

    @cached_property
    def memory(self) -> RowSource:
        """The memory of its plans."""
        return self.make_memory()

    def local_bytes(self, value: int, layout: Layout) -> int:
        """Bytes of a value on a device."""
        of_type = self.graph.types[value]
        return math.prod(local_shape(layout, of_type.shape, self.mesh.sizes)) * of_type.itemsize

    def exact_s(self, values: Sequence[int], layout: Layout) -> tuple[float, bool]:
        """What the best plan with a layout that fits takes (s per step; inf if none does), and whether it is proven."""
        problem = self.alternatives.restricted(values, layout)
        keywords = memory_policy.SolverOptions(self.solver, EXACT_SECONDS, gap=0.0).keywords()
        try:
            solution = optimize(problem, **keywords)
            if self.memory.peak(solution.assignment)[0] > self.limit:
                solution = optimize_within(problem, self.memory, self.limit, free=solution, **keywords)
        except (Infeasible, MemoryBudgetError, Pruned, SolverError):
            return math.inf, False
        return solution.objective, solution.gap == 0.0


def _limit(step: PlannedStep, settings: Settings) -> float:
    """Bytes per device that a plan may use: a plan that needs more as it is, for want of a smaller, may go on to."""
    limit = memory_policy.memory_limit(step.target.logical, settings.memory_budget)
    return math.inf if isinstance(limit, str) else max(limit, step.plan.peak_memory_bytes)


def whole_step(step: PlannedStep, settings: Settings, batch: tuple[int, ...] | None) -> Subject:
    """The problem of a step on one mesh; `batch`: argument leaves that hold the batch, if the user names them."""
    plan, graph, mesh = step.plan, step.traced.graph, step.target.logical
    model = make_model(step.traced, mesh, Options(pins=settings.pins, batch=batch, rules=step.registered))
    model = offload.priced(model, graph, mesh, plan.offloaded)
    backend = backend_of(mesh.device)
    backend = replace(backend, keeps_barriers=True) if plan.remat else backend
    memory = partial(Liveness, graph, model, mesh, backend, plan.donated, plan.offloaded)
    alternatives = Alternatives(model, plan.step_time_s)
    values, limit = dict(enumerate(graph.inputs)), _limit(step, settings)
    return Subject("step", plan.step_time_s, alternatives, graph, mesh, values, memory, limit, settings.solver)


def of_stage(step: PlannedStep, settings: Settings, number: int, fixed: Sequence[int]) -> Subject:
    """The problem of a stage; `fixed` are the positions of the argument leaves whose layouts the user has fixed."""
    pipeline = step.pipeline
    assert pipeline is not None
    stage, stages, mesh = step.plan.stages[number], pipeline.stages, pipeline.mesh(number)
    graph = stage_graph(stages, number, avals(step.traced, stages), StepPrograms(stages.split))
    inputs = stages.split.graph.inputs
    values = {i: graph.arguments[v] for i, v in enumerate(inputs) if v in graph.arguments}
    arguments, results = _boundary(graph, stage, stages.split.batch)
    at = {v: k for k, v in enumerate(graph.graph.inputs)}
    arguments |= {at[values[i]]: stage.values[values[i]] for i in fixed if values.get(i) in stage.values}
    rules = rules_of(graph.graph, step.registered)
    hosted = tuple(at[values[i]] for i in step.plan.offloaded if i in stage.arguments)
    problem = StageProblem(graph, mesh, rules, Options(solver=settings.solver), arguments, results, hosted)
    busy = math.fsum(stage.busy(step.plan.num_microbatches).values())
    beside = [s for s in step.plan.stages if s.rank == stage.rank and s is not stage]
    limit = _limit(step, settings) - sum(s.peak_memory_bytes for s in beside)
    in_flight, alternatives = pipeline.in_flight(number), Alternatives(problem.model, busy)
    return Subject(
        stage.name,
        busy,
        alternatives,
        graph.graph,
        mesh,
        values,
        lambda: problem.liveness.rows(in_flight),
        limit,
        settings.solver,
    )


def _boundary(graph: StageGraph, stage: Stage, batch: Collection[int]) -> tuple[dict[int, Layout], dict[int, Layout]]:
    """Positions of arguments and of results of a stage's graph that cross its boundary -> their layouts in the plan."""
    at = {v: k for k, v in enumerate(graph.graph.inputs)}
    arguments = {at[v]: stage.values[v] for v in graph.received.values() if v in stage.values}
    arguments |= {at[graph.arguments[v]]: (-1,) * len(stage.submesh) for v in batch if v in graph.arguments}
    results: dict[int, Layout] = {}
    for k in graph.sent:
        atom = graph.graph.outputs[k]
        layout = stage.uses.get(f"out{k}", stage.values.get(atom) if isinstance(atom, int) else None)
        if layout is not None:
            results[k] = layout
    return arguments, results
