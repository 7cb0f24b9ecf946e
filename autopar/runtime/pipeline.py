"""A train step run as a pipeline: one process walks the instruction lists of all ranks and dispatches.

    build         stages, a schedule and submeshes become compiled programs               -> programs.py
    once          the schedule is lowered to calls of these programs                      -> lowered_schedule.py
    every step    the instructions are dispatched in order                                -> executor.py
    at its end    updates write new state into the buffers of old state                   -> donation.py

JAX's asynchronous dispatch makes this a pipeline: a call returns before its submesh is done, and submeshes run
concurrently. The state stays on the submesh of its stage from step to step, so the next step copies none of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.codegen.layouts import Layouts
from autopar.codegen.planned_programs import programs_of
from autopar.codegen.stage_shardings import StageShardings
from autopar.errors import ArgumentError, MeshError
from autopar.ir.trace import Traced
from autopar.ir.train_state import match_state
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.plan_all import CodegenStage, StagePlans
from autopar.runtime.donation import donated_to_updates
from autopar.runtime.executor import Observer, StepExecution
from autopar.runtime.lowered_schedule import LoweredSchedule, lower_schedule
from autopar.runtime.programs import CompiledPrograms, compile_programs
from autopar.schedules.complete import forward_only
from autopar.schedules.pipeline import Schedule

#: Prefix of the names of programs of a loop that runs first.
FIRST_LOOP = "first loop, "


@dataclass(frozen=True, eq=False, repr=False)
class PipelineStep:
    """A step that runs as a pipeline, called as the step is.

    Attributes:
        traced: the step.
        stages: its stages.
        schedule: the order of its instructions.
        shardings: the submesh of every stage, and the shardings on it.
        compiled: its programs.
        indices: per stage, the number of every microbatch, on its devices.
        blocking: wait for every instruction. An error then names its instruction and, before the updates, leaves the
            state valid; measured times are those of single instructions.
        before: a loop over the microbatches that runs first; its results are further arguments.
        observer: called after every instruction that is dispatched, in order.
    """

    traced: Traced
    stages: Stages
    schedule: Schedule
    shardings: StageShardings
    compiled: CompiledPrograms
    indices: tuple[tuple[Any, ...], ...]
    blocking: bool = False
    before: PipelineStep | None = None
    observer: Observer | None = None

    @cached_property
    def lowered_schedule(self) -> LoweredSchedule:
        """The schedule, lowered to calls of the compiled programs."""
        return lower_schedule(self.shardings, self.schedule, self.compiled)

    @cached_property
    def argument_shardings(self) -> tuple[NamedSharding | None, ...]:
        """The sharding of every argument between steps; None for the batch."""
        batch, owners = self.stages.split.batch, self.stages.updates.owners
        return tuple(None if v in batch else self.shardings.argument(owners[v], v) for v in self.traced.graph.inputs)

    @cached_property
    def result_shardings(self) -> Mapping[int, NamedSharding]:
        """Position of a result that is state -> its sharding between steps, if another stage makes than stores it."""
        graph, updates = self.stages.split.graph, self.stages.updates
        carried = [(out, self.stages.split.flat.outputs[out], i) for out, i in match_state(graph).items()]
        new_state = [
            (out, updates.programs[updates.computed_in[v]].stage, i)
            for out, v, i in carried
            if isinstance(v, int) and v in updates.computed_in
        ]
        return {
            out: sharding
            for out, stage, i in new_state
            if (sharding := self.argument_shardings[i]) is not None and updates.owners[graph.inputs[i]] != stage
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the step.

        Raises:
            ArgumentError: the arguments differ from those that were traced.
            StageError: a stage failed. The arguments are still valid, except after an error in an update, whose message
                says that the state may be used up.
        """
        flat = self.traced.leaves(*args, **kwargs)
        for path, array, aval in zip(self.traced.graph.input_paths, flat, self.traced.in_avals, strict=True):
            if np.shape(array) != aval.shape:
                raise ArgumentError(
                    f"argument '{path}' has shape {np.shape(array)}, the step was traced for {aval.shape}"
                )
        return jax.tree.unflatten(self.traced.out_tree, self.results(flat))

    def results(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves of the results from those of the arguments; StageError as for a call."""
        first_loop = [] if self.before is None else self.before.results(leaves)
        return StepExecution(self, [*leaves, *first_loop]).results()

    @cached_property
    def programs(self) -> Mapping[str, Any]:
        """Name -> JAX's compiled object: "stage 0 begin", "stage 0 F", "stage 1 update 0", and so on."""
        programs: dict[str, Any] = {}
        if self.before is not None:
            programs.update((f"{FIRST_LOOP}{name}", program) for name, program in self.before.programs.items())
        for number, begin in enumerate(self.compiled.begin):
            programs[f"stage {number} begin"] = begin
            programs.update((f"stage {number} {kind}", one) for kind, one in self.compiled.passes[number].items())
        for number, (update, program) in enumerate(
            zip(self.stages.updates.programs, self.compiled.updates, strict=True)
        ):
            programs[f"stage {update.stage} update {number}"] = program
        return programs


def build(
    traced: Traced,
    stages: Stages,
    schedule: Schedule,
    meshes: Sequence[Mesh],
    *,
    layouts: Layouts | StagePlans[CodegenStage] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    blocking: bool = False,
    donated: Collection[int] = (),
) -> PipelineStep:
    """Compile a step in stages for submeshes.

    Args:
        traced: the step.
        stages: its stages.
        schedule: instruction lists for as many stages and microbatches, with the borders of the stages.
        meshes: the submesh of every rank.
        layouts: a function that gives the layouts of values on the submeshes, or planned stages; None: planned here for
            local devices.
        compiler_options: of XLA.
        blocking: wait for every instruction.
        donated: positions of arguments whose buffers updates may reuse.

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
            "layouts": layouts if callable(layouts) else None,
            "compiler_options": compiler_options,
            "blocking": blocking,
        }
        before = build(traced, stages.first_loop, first_schedule, meshes, **options)
    whole = StepPrograms(stages.split).avals if before else {}
    avals = (*traced.in_avals, *(whole[v] for v in stages.split.graph.inputs[len(traced.in_avals) :]))
    shardings = programs_of(stages, tuple(meshes[rank] for rank in placement), avals, layouts)
    stages = shardings.stages
    donated_values = donated_to_updates(shardings, placement, donated)
    compiled = compile_programs(shardings, shardings, avals, donated_values, compiler_options)
    indices = tuple(
        tuple(jax.device_put(np.int32(i), shardings.replicated(s)) for i in range(stages.split.count))
        for s in range(len(placement))
    )
    return PipelineStep(traced, stages, schedule, shardings, compiled, indices, blocking, before)


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
    used = {kind for stage in stages.stages for kind, one in stage.passes.items() if one.ops}
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
