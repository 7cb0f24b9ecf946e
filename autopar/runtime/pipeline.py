"""A train step run as a pipeline: one process walks the instruction lists of all ranks and dispatches.

    build         stages, a schedule and submeshes become compiled programs               -> programs.py
    once          what every instruction does is worked out                               -> lowered_schedule.py
    every step    the instructions are walked                                             -> executor.py
    at its end    updates take over the state that they replace                           -> donation.py

JAX's asynchronous dispatch makes this a pipeline: a call returns before its submesh is done, and submeshes work side by
side. The state stays where its stage is from step to step; a step called on it again copies nothing.
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
from autopar.codegen.planned_programs import placed
from autopar.codegen.stage_shardings import Places
from autopar.errors import ArgumentError, MeshError
from autopar.ir.trace import Traced
from autopar.ir.train_state import match_state
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.plan_all import CodegenStage, StagePlans
from autopar.runtime.donation import taken_over
from autopar.runtime.executor import Run, Watch
from autopar.runtime.lowered_schedule import Script, script
from autopar.runtime.programs import Compiled, compile_programs
from autopar.schedules.complete import complete
from autopar.schedules.orders import PassId
from autopar.schedules.pipeline import Pipeline, Schedule

#: How names of programs of a loop that runs first begin.
FIRST_LOOP = "first loop, "


@dataclass(frozen=True, eq=False, repr=False)
class PipelineStep:
    """A step that runs as a pipeline, called as the step is.

    Attributes:
        traced, stages, schedule: what it computes, in which parts, in which order.
        places: the submesh of every stage, and layouts on it.
        compiled: its programs.
        indices: per stage, the number of every microbatch, on its devices.
        blocking: every instruction is waited for, so that an error names the one it comes from and leaves the state as
            it was until the updates, and times are those of single instructions.
        first_loop: a loop over the microbatches that runs first; its results are further arguments.
        watch: hears of every instruction that is dispatched, in order.
    """

    traced: Traced
    stages: Stages
    schedule: Schedule
    places: Places
    compiled: Compiled
    indices: tuple[tuple[Any, ...], ...]
    blocking: bool = False
    first_loop: PipelineStep | None = None
    watch: Watch | None = None

    @cached_property
    def script(self) -> Script:
        """What every instruction does."""
        return script(self.places, self.schedule, self.compiled)

    @cached_property
    def homes(self) -> tuple[NamedSharding | None, ...]:
        """Where every argument is held between steps; None for the batch."""
        batch, homes = self.stages.split.batch, self.stages.updates.owners
        return tuple(None if v in batch else self.places.argument(homes[v], v) for v in self.traced.graph.inputs)

    @cached_property
    def returns(self) -> Mapping[int, NamedSharding]:
        """Position of a result that is state -> its place, where another stage than the one that holds it makes it."""
        graph, updates = self.stages.split.graph, self.stages.updates
        carried = [(out, self.stages.split.flat.outputs[out], i) for out, i in match_state(graph).items()]
        made = [
            (out, updates.programs[updates.computed_in[v]].stage, i)
            for out, v, i in carried
            if isinstance(v, int) and v in updates.computed_in
        ]
        return {
            out: where
            for out, stage, i in made
            if (where := self.homes[i]) is not None and updates.owners[graph.inputs[i]] != stage
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the step.

        Raises:
            ArgumentError: arguments unlike those that were traced.
            StageError: something failed in a stage. The arguments are as they were, but for an error in an update,
                which says that the state may be used up.
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
        further = [] if self.first_loop is None else self.first_loop.results(leaves)
        return Run(self, [*leaves, *further]).results()

    @cached_property
    def programs(self) -> Mapping[str, Any]:
        """Name -> JAX's compiled object: "stage 0 begin", "stage 0 F", "stage 1 update 0", and so on."""
        found: dict[str, Any] = {}
        if self.first_loop is not None:
            found.update((f"{FIRST_LOOP}{name}", program) for name, program in self.first_loop.programs.items())
        for number, begin in enumerate(self.compiled.begin):
            found[f"stage {number} begin"] = begin
            found.update((f"stage {number} {kind}", one) for kind, one in self.compiled.passes[number].items())
        for number, (update, program) in enumerate(
            zip(self.stages.updates.programs, self.compiled.updates, strict=True)
        ):
            found[f"stage {update.stage} update {number}"] = program
        return found


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
        layouts: how values lie on the submeshes, by a function or planned; None: planned for local devices.
        compiler_options: of XLA.
        blocking: wait for every instruction.
        donated: positions of arguments whose memory updates may take over.

    Raises:
        ArgumentError: a schedule that is not for these stages.
        MeshError: not one submesh per rank, or submeshes that share a device.
    """
    _check(stages, schedule, meshes)
    placement = schedule.pipeline.placement
    before = None
    if stages.first_loop is not None:
        ahead = forward_only(schedule.pipeline, stages.first_loop.borders)
        options: Any = {
            "layouts": layouts if callable(layouts) else None,
            "compiler_options": compiler_options,
            "blocking": blocking,
        }
        before = build(traced, stages.first_loop, ahead, meshes, **options)
    whole = StepPrograms(stages.split).avals if before else {}
    avals = (*traced.in_avals, *(whole[v] for v in stages.split.graph.inputs[len(traced.in_avals) :]))
    places = placed(stages, tuple(meshes[rank] for rank in placement), avals, layouts)
    stages = places.stages
    taken = taken_over(places, placement, donated)
    compiled = compile_programs(places, places, avals, taken, compiler_options)
    indices = tuple(
        tuple(jax.device_put(np.int32(i), places.everywhere(s)) for i in range(stages.split.count))
        for s in range(len(placement))
    )
    return PipelineStep(traced, stages, schedule, places, compiled, indices, blocking, before)


def forward_only(pipeline: Pipeline, borders: Sequence[tuple[int, int]]) -> Schedule:
    """Forward passes alone on the ranks of another pipeline: microbatch i of stage s at tick s + i."""
    ahead = Pipeline(pipeline.placement, pipeline.microbatches, tuple(borders), pipeline.microbatches, backward=False)
    stages = range(len(pipeline.placement))
    ticks = sorted((s + i, s, i) for s in stages for i in range(pipeline.microbatches))
    orders: list[tuple[PassId, ...]] = [
        tuple(("F", s, i) for _, s, i in ticks if pipeline.placement[s] == rank) for rank in range(pipeline.ranks)
    ]
    return Schedule("forward", ahead, complete(ahead, tuple(orders)))


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
        raise MeshError("submeshes share a device; give each rank devices of its own")
