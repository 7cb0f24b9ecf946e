"""Checks that a compiler emits what the plans of pipeline stages predict.

A stage's passes run once per microbatch, its other programs once per step. The collectives of all of them are compared
with those of the stage's plan, as `autopar.verification.verify` does for one program. Transfers between stages are
copies, not collectives. The programs of a loop that runs first have no prediction: they are only counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar import jax_compat
from autopar.codegen.context import AnyMesh
from autopar.codegen.emit import kernel_options
from autopar.codegen.stages.planned import PlannedPrograms, planned_programs
from autopar.hardware.meshes import submeshes
from autopar.ir.collective import Collective
from autopar.ir.trace import Traced
from autopar.passes.stages.divide import PASS_KINDS
from autopar.plans import comparison
from autopar.plans.plan import Plan
from autopar.runtime.load import load
from autopar.runtime.pipeline import lower
from autopar.runtime.planned_step import PlannedStep
from autopar.runtime.programs import program_order
from autopar.verification import exceptions as known_exceptions
from autopar.verification import lowering
from autopar.verification.dataflow import Context
from autopar.verification.targets import BACKENDS, Axes, Backend, Emitted

UNPREDICTED = "program of a loop that runs first, which has no prediction"


@dataclass(frozen=True)
class EmittedByStages:
    """Collectives and statistics of the programs of all stages.

    Attributes:
        collectives: of every stage, with their executions per step.
        comparisons: per stage.
        memory: kind of memory -> bytes per device, of the program that needs most of it, if the target reports it.
        flops: floating-point operations per device and step, of the stage with most, if the target reports them.
        accessed: bytes that a device reads and writes per step, of the stage with most, if the target reports them.
        exceptions: programs that are not compared, and known deviations of the compiler -> their number.
        predicted: collectives that the plan predicts for every stage, as the compiler is known to lower them.
    """

    collectives: tuple[Collective, ...]
    comparisons: tuple[comparison.Comparison, ...]
    memory: Mapping[str, int]
    flops: float
    accessed: float
    exceptions: Mapping[str, int]
    predicted: tuple[Collective, ...]

    @property
    def comparison(self) -> comparison.Comparison:
        """The comparison of all stages together."""
        comparisons = self.comparisons
        return comparison.Comparison(
            sum(c.matched for c in comparisons),
            sum(c.joined for c in comparisons),
            tuple(x for c in comparisons for x in c.predicted_only),
            tuple(x for c in comparisons for x in c.emitted_only),
            math.fsum(c.predicted_wire_bytes for c in comparisons),
            math.fsum(c.emitted_wire_bytes for c in comparisons),
        )


def emitted(plan: Plan, name: str, traced: Traced, target: str) -> EmittedByStages:
    """Lower the programs of a plan's stages for a target, and read their collectives.

    Args:
        plan: the plan of a pipeline.
        name, traced: the step.
        target: as of `autopar.verify`.

    Raises:
        ArgumentError: the topology of the target is unknown, or its compiler is not installed.
        MeshError: the target has another number of devices than the plan.
        PlanMismatchError: the plan is for another step.
    """
    platform, _, topology = target.partition(":")
    axes, backend = Axes(plan.mesh_names, plan.mesh_sizes), BACKENDS[platform]
    with jax_compat.automatic_axes():
        planned = load(name, traced, plan, local=False)
        programs = _planned_programs(planned, backend.mesh(axes, planned.traced.graph, topology))
        emitted_by = _emitted(planned, programs, backend)
    stages = [_stage(planned, platform, programs, of_stage, number) for number, of_stage in enumerate(emitted_by)]
    names = dict.fromkeys(name for stage in stages for name in stage.exceptions)
    exceptions = {name: sum(stage.exceptions.get(name, 0) for stage in stages) for name in names}
    return EmittedByStages(
        tuple(c for stage in stages for c in stage.collectives),
        tuple(stage.comparison for stage in stages),
        _most(program.memory for of_stage in emitted_by for program in of_stage.values()),
        max(stage.flops for stage in stages),
        max(stage.accessed for stage in stages),
        {**exceptions, **_unpredicted(planned)},
        tuple(c for stage in stages for c in stage.predicted),
    )


def _planned_programs(planned: PlannedStep, mesh: AnyMesh) -> PlannedPrograms:
    """The programs of all stages, on submeshes of a mesh of all devices."""
    pipeline, layouts = planned.pipeline, planned.layouts
    assert pipeline is not None
    assert layouts is not None
    ranks = submeshes(mesh, [rank.sizes for rank in pipeline.meshes])
    return planned_programs(layouts, [ranks[rank] for rank in pipeline.schedule.pipeline.placement])


def _emitted(planned: PlannedStep, programs: PlannedPrograms, backend: Backend) -> list[dict[str | int, Emitted]]:
    """Per stage, what the target emits for each program."""
    pipeline, traced = planned.pipeline, planned.traced
    assert pipeline is not None
    needed = kernel_options(traced.graph, backend.platform)
    by_stage: list[dict[str | int, Emitted]] = [{} for _ in programs.emitters]
    placement = pipeline.schedule.pipeline.placement
    for (stage, part), program in lower(traced, programs, placement, planned.plan.donated, backend.platform):
        axes = Axes(planned.plan.mesh_names, pipeline.mesh(stage).sizes)
        by_stage[stage][part] = backend.emit(program.lowered, axes, programs.graph(stage), needed)
    return by_stage


def _unpredicted(planned: PlannedStep) -> Mapping[str, int]:
    first = planned.pipeline.stages.first_loop if planned.pipeline is not None else None
    return {} if first is None else {UNPREDICTED: len(program_order(first))}


@dataclass(frozen=True)
class _Stage:
    """Collectives and costs of the programs of one stage."""

    predicted: tuple[Collective, ...]
    collectives: tuple[Collective, ...]
    comparison: comparison.Comparison
    exceptions: Mapping[str, int]
    flops: float
    accessed: float


def _stage(
    planned: PlannedStep, platform: str, programs: PlannedPrograms, emitted: Mapping[str | int, Emitted], number: int
) -> _Stage:
    plan, stage, graph = planned.plan, planned.plan.stages[number], programs.emitters[number].graph
    runs = [(plan.num_microbatches if part in PASS_KINDS else 1, program) for part, program in emitted.items()]
    collectives = [replace(c, count=times * c.count) for times, program in runs for c in program.collectives]
    names, sizes = tuple(stage.submesh), tuple(stage.submesh.values())
    one_stage = replace(plan, stages=(stage,), collectives=stage.collectives, mesh_names=names, mesh_sizes=sizes)
    program_of = programs.emitters[number].plan.graph.program_of
    context = Context(graph, one_stage, programs.stored(number), program_of)
    predicted = lowering.lower_collectives(platform, context)
    compared = comparison.compare(predicted, collectives, stage.submesh)
    compared, exceptions = known_exceptions.apply_exceptions(platform, compared, predicted, context)
    flops, accessed = (math.fsum(n * getattr(p, what) for n, p in runs) for what in ("flops", "accessed"))
    return _Stage(predicted, tuple(collectives), compared, exceptions, flops, accessed)


def _most(memories: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    """Kind of memory -> the most bytes of any program."""
    most: dict[str, int] = {}
    for memory in memories:
        most = {kind: max(most.get(kind, 0), nbytes) for kind, nbytes in memory.items()}
    return most
