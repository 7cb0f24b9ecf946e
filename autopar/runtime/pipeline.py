"""A train step run as a pipeline: every process walks the instruction lists of all ranks, and dispatches its own.

    build         stages, a schedule and submeshes become compiled programs               -> programs.py
    lower         the same programs for devices that need not be here, to look at them
    once          the schedule is lowered to calls of these programs                      -> lowered_schedule.py
    every step    the instructions are dispatched in order                                -> executor.py
                  arrays move between submeshes, of one process or of several            -> transport.py
    at its end    updates write new state into the buffers of old state                   -> donation.py

JAX's asynchronous dispatch makes this a pipeline: a call returns before its submesh is done, and submeshes run
concurrently. The state stays on the submesh of its stage from step to step, so the next step copies none of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from autopar.codegen.stages.planned import PlannedPrograms, local_mesh, planned_programs
from autopar.errors import ArgumentError, MeshError
from autopar.ir.trace import Traced
from autopar.passes.inter_op.pipelines import avals
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.plan_all import CodegenStage, StagePlans, plan_stages
from autopar.runtime.donation import donated_to_updates
from autopar.runtime.executor import FIRST_LOOP, PipelineStep
from autopar.runtime.programs import LoweredProgram, ProgramKey, compile_programs, lower_programs
from autopar.runtime.transport import Transport, place
from autopar.schedules.complete import forward_only
from autopar.schedules.pipeline import Schedule


def build(
    traced: Traced,
    stages: Stages,
    schedule: Schedule,
    meshes: Sequence[Mesh],
    *,
    plans: StagePlans[CodegenStage] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    blocking: bool = False,
    donated: Collection[int] = (),
    prefix: str = "",
    debug_nans: bool = False,
) -> PipelineStep:
    """Compile a step in stages for submeshes.

    Args:
        traced: the step.
        stages: its stages.
        schedule: instruction lists for as many stages and microbatches, with the borders of the stages.
        meshes: the submesh of every rank.
        plans: of its stages; None: planned here for local devices.
        compiler_options: of XLA.
        blocking: wait for every instruction.
        donated: positions of arguments whose buffers updates may reuse.
        prefix: of the names of compiled modules.
        debug_nans: search the results of every program for NaN; nothing is donated.

    Raises:
        ArgumentError: the schedule is not one for these stages.
        MeshError: there is not one submesh per rank, or submeshes share a device.
    """
    _check(stages, schedule, meshes)
    placement = schedule.pipeline.placement
    before = None
    if stages.first_loop is not None:
        first_schedule = forward_only(schedule.pipeline, stages.first_loop.borders)
        options: Any = {
            "compiler_options": compiler_options,
            "blocking": blocking,
            "prefix": FIRST_LOOP,
            "debug_nans": debug_nans,
        }
        before = build(traced, stages.first_loop, first_schedule, meshes, **options)
    types, submeshes = avals(traced, stages), [meshes[rank] for rank in placement]
    planned = planned_programs(plans or plan_stages(stages, types, [*map(local_mesh, submeshes)]), submeshes)
    stages = planned.stages
    donated_values = donated_to_updates(planned, placement, () if debug_nans else donated)
    compiled = compile_programs(planned, types, donated_values, compiler_options, prefix, debug_nans)
    indices = tuple(
        tuple(place(np.int32(i), planned.replicated(s)) for i in range(stages.split.count))
        for s in range(len(placement))
    )
    transport = Transport() if before is None else before.transport
    return PipelineStep(traced, stages, schedule, planned, compiled, indices, blocking, before, transport=transport)


def lower(
    traced: Traced, programs: PlannedPrograms, placement: Sequence[int], donated: Collection[int], platform: str
) -> Iterator[tuple[ProgramKey, LoweredProgram]]:
    """Every program of planned stages, lowered, without those of a loop that runs first.

    Args:
        traced: the step.
        programs: of its stages, on submeshes whose devices need not be here.
        placement: the rank of every stage.
        donated: positions of arguments whose buffers updates may reuse; without devices none is reused.
        platform: JAX's name of the platform to lower for.
    """
    have_devices = all(isinstance(mesh, Mesh) for mesh in programs.meshes)
    donated_values = donated_to_updates(programs, placement, donated if have_devices else ())
    return lower_programs(programs, avals(traced, programs.stages), donated_values, platform)


def _check(stages: Stages, schedule: Schedule, meshes: Sequence[Mesh]) -> None:
    pipeline = schedule.pipeline
    have = (len(stages.stages), stages.split.count)
    if (len(pipeline.placement), pipeline.microbatches) != have or pipeline.window != pipeline.microbatches:
        raise ArgumentError(
            f"schedule {schedule.name} is for {len(pipeline.placement)} stages and one batch in "
            f"{pipeline.microbatches} microbatches; the step has {have[0]} stages and {have[1]} microbatches"
        )
    missing = sorted({*stages.borders} - {*pipeline.borders})
    if missing:
        raise ArgumentError(
            f"schedule {schedule.name} lacks the border {missing[0]}; make it with borders=stages.borders"
        )
    used = {kind for stage in stages.stages for kind, pass_ in stage.passes.items() if pass_.ops}
    if not used <= {*pipeline.kinds}:
        raise ArgumentError(
            f"schedule {schedule.name} has passes {', '.join(pipeline.kinds)}, the step has {', '.join(sorted(used))}"
        )
    if len(meshes) != pipeline.ranks:
        raise MeshError(f"schedule {schedule.name} has {pipeline.ranks} ranks, and there are {len(meshes)} submeshes")
    devices = [d for mesh in meshes for d in mesh.devices.flat]
    if len({*devices}) < len(devices):
        shared = next(d for d in devices if devices.count(d) > 1)
        raise MeshError(f"submeshes share {shared}; give each rank devices of its own")
