"""A train step run as a pipeline: one process walks the instruction lists of all ranks and dispatches.

    run           call the compiled pass; what later passes of the stage read stays in the stash    -> _Run.run
    send          copy to the submesh of the reader, into its stash; `recv` is then nothing to do   -> _Run.send
    free          give up the stash                                                                 -> _Run.free
    accumulate    part of the pass
    update        run those updates whose operands are there; the last ones wait for other stages   -> _Run.update

JAX's asynchronous dispatch makes this a pipeline: a call returns before its submesh is done, and submeshes work side by
side. The state stays where its stage is from step to step; a step called on it again copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.errors import ArgumentError, MeshError, StageError
from autopar.microbatches import Programs
from autopar.passes.stages import KINDS, Hand, Stages
from autopar.runtime.layouts import Layouts, data_parallel
from autopar.runtime.programs import Compiled, Places, compile_programs, needed
from autopar.schedules.complete import complete
from autopar.schedules.instructions import Instruction, Kind
from autopar.schedules.orders import Pass
from autopar.schedules.pipeline import Pipeline, Schedule
from autopar.trace import Traced


@dataclass(frozen=True, eq=False, repr=False)
class PipelineStep:
    """A step that runs as a pipeline, called as the step is.

    Attributes:
        traced, stages, schedule: what it computes, in which parts, in which order.
        places: the submesh of every stage, and layouts on it.
        compiled: its programs.
        blocking: every pass and every update is waited for, so that an error names the instruction it comes from and
            times are those of single instructions.
        before: a loop over the microbatches that runs first; its results are further arguments.
    """

    traced: Traced
    stages: Stages
    schedule: Schedule
    places: Places
    compiled: Compiled
    indices: tuple[tuple[Any, ...], ...]
    routes: Mapping[Hand, tuple[NamedSharding, ...]]
    blocking: bool = False
    before: PipelineStep | None = None

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """Argument value -> its position."""
        return {v: i for i, v in enumerate(self.stages.split.graph.inputs)}

    @cached_property
    def begins(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """What the first program of every stage reads and gives; see `needed`."""
        return tuple(needed(self.stages, s) for s in range(len(self.stages.stages)))

    @cached_property
    def kept(self) -> Mapping[tuple[int, Kind], frozenset[int]]:
        """What passes after this one read."""
        return {(s, kind): stage.kept(kind) for s, stage in enumerate(self.stages.stages) for kind in KINDS}

    @cached_property
    def outgoing(self) -> Mapping[tuple[Kind, int], tuple[Hand, ...]]:
        """What a pass of a stage hands over."""
        keys: list[tuple[Kind, int]] = [(kind, s) for kind in KINDS for s in range(len(self.stages.stages))]
        return {key: tuple(h for h in self.stages.hands if (h.kind, h.source) == key) for key in keys}

    @cached_property
    def sources(self) -> Mapping[int, tuple[int, Kind, int]]:
        """Total -> the stage and pass that add it up, and its position among their totals."""
        return {
            total.value: (s, kind, position)
            for s, stage in enumerate(self.stages.stages)
            for kind, one in stage.passes.items()
            for position, total in enumerate(one.totals)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the step.

        Raises:
            ArgumentError: arguments unlike those that were traced.
            StageError: something failed in a stage; the arguments are as they were.
        """
        flat = self.traced.leaves(*args, **kwargs)
        for path, array, aval in zip(self.traced.graph.input_paths, flat, self.traced.in_avals, strict=True):
            if np.shape(array) != aval.shape:
                raise ArgumentError(
                    f"argument '{path}' has shape {np.shape(array)}, the step was traced for {aval.shape}"
                )
        return jax.tree.unflatten(self.traced.out_tree, self._results(flat))

    def _results(self, leaves: list[Any]) -> list[Any]:
        further = [] if self.before is None else self.before._results(leaves)
        return _Run(self, [*leaves, *further]).results()


def build(
    traced: Traced,
    stages: Stages,
    schedule: Schedule,
    meshes: Sequence[Mesh],
    *,
    layouts: Layouts | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    blocking: bool = False,
) -> PipelineStep:
    """Compile a step in stages for submeshes.

    Args:
        traced: the step.
        stages: its stages.
        schedule: instruction lists for as many stages and microbatches, with the borders of the stages.
        meshes: the submesh of every rank.
        layouts: how values lie on the submeshes; None: data parallel along the first axis of each.
        compiler_options: of XLA.
        blocking: wait for every pass.

    Raises:
        ArgumentError: a schedule that is not for these stages.
        MeshError: not one submesh per rank, or submeshes that share a device.
    """
    _check(stages, schedule, meshes)
    placement = schedule.pipeline.placement
    before = None
    if stages.before is not None:
        ahead = forward_only(schedule.pipeline, stages.before.borders)
        options: Any = {"layouts": layouts, "compiler_options": compiler_options, "blocking": blocking}
        before = build(traced, stages.before, ahead, meshes, **options)
    layouts = layouts or data_parallel(stages.split, meshes, placement)
    places = Places(stages, tuple(meshes[rank] for rank in placement), layouts)
    whole = Programs(stages.split).avals if before else {}
    avals = (*traced.in_avals, *(whole[v] for v in stages.split.graph.inputs[len(traced.in_avals) :]))
    compiled = compile_programs(stages, places, avals, compiler_options)
    indices = tuple(
        tuple(jax.device_put(np.int32(i), places.everywhere(s)) for i in range(stages.split.count))
        for s in range(len(placement))
    )
    routes = {hand: tuple(places.value(hand.target, v) for v in values) for hand, values in stages.hands.items()}
    return PipelineStep(traced, stages, schedule, places, compiled, indices, routes, blocking, before)


def forward_only(pipeline: Pipeline, borders: Sequence[tuple[int, int]]) -> Schedule:
    """Forward passes alone on the ranks of another pipeline: microbatch i of stage s at tick s + i."""
    ahead = Pipeline(pipeline.placement, pipeline.microbatches, tuple(borders), pipeline.microbatches, backward=False)
    stages = range(len(pipeline.placement))
    ticks = sorted((s + i, s, i) for s in stages for i in range(pipeline.microbatches))
    orders: list[tuple[Pass, ...]] = [
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


@dataclass(eq=False)
class _Run:
    """One step under way.

    Attributes:
        whole: per stage, whole values that its passes read.
        blocks: per stage, the batch in microbatches.
        sums: per stage and kind of pass.
        parts: per stage and kind, what each microbatch gave for totals that are stacked.
        stash: per stage and microbatch, values that later passes read.
        sent: values on their way to a stage on another rank.
        ended: stages whose passes are all done.
        made: results of updates.
    """

    step: PipelineStep
    leaves: list[Any]
    whole: list[dict[int, Any]] = field(default_factory=list)
    blocks: list[dict[int, Any]] = field(default_factory=list)
    sums: dict[tuple[int, Kind], Any] = field(default_factory=dict)
    parts: dict[tuple[int, Kind], dict[int, Any]] = field(default_factory=dict)
    stash: dict[tuple[int, int], dict[int, Any]] = field(default_factory=dict)
    sent: dict[tuple[Hand, int], list[Any]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    made: dict[int, Any] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def results(self) -> list[Any]:
        """Run everything."""
        for stage in range(len(self.step.stages.stages)):
            self._guard(stage, "its prologue", lambda stage=stage: self.begin(stage))
        for rank, position in self.step.schedule.order:
            i = self.step.schedule.lists[rank][position]
            act = _ACTIONS.get(i.op)
            if act is not None:
                self._guard(i.stage, str(i), lambda act=act, i=i: act(self, i))
        arguments = dict(zip(self.step.stages.split.graph.inputs, self.leaves, strict=True))
        flat = self.step.stages.split.flat
        known = {**arguments, **dict(flat.constants), **self.made}
        return [known[a] if isinstance(a, int) else jnp.asarray(a.value) for a in flat.outputs]

    def _guard(self, stage: int, what: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            said = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
            raise StageError(f"stage {stage} failed in {what}: {said}") from error

    def argument(self, stage: int, value: int) -> Any:
        """An argument on the submesh of a stage; copied once per step if it is not there."""
        found = self.whole[stage].get(value)
        if found is None:
            array = self.leaves[self.step.positions[value]]
            wanted = self.step.places.argument(stage, value)
            lies = getattr(array, "sharding", None) == wanted
            found = self.whole[stage][value] = array if lies else jax.device_put(array, wanted)
        return found

    def begin(self, stage: int) -> None:
        reads, whole, blocks = self.step.begins[stage]
        self.whole.append({})
        given, cut, sums = self.step.compiled.begin[stage](*(self.argument(stage, v) for v in reads))
        for v in self.step.stages.stages[stage].arguments:
            self.argument(stage, v)
        self.whole[stage].update(zip(whole, given, strict=True))
        self.blocks.append(dict(zip(blocks, cut, strict=True)))
        self.sums.update(((stage, kind), found) for kind, found in sums.items())

    # Instructions

    def run(self, i: Instruction) -> None:
        """A pass of one microbatch."""
        one = self.step.stages.stages[i.stage].passes[i.kind]
        function = self.step.compiled.passes[i.stage].get(i.kind)
        values = self.stash.setdefault((i.stage, i.microbatch), {})
        if function is not None:
            sums, parts, written = function(
                self.sums[i.stage, i.kind],
                self.step.indices[i.stage][i.microbatch],
                tuple(self.whole[i.stage][v] for v in one.whole),
                tuple(self.blocks[i.stage][v] for v in one.blocks),
                tuple(values[v] for v in one.reads),
            )
            self.sums[i.stage, i.kind] = sums
            self.parts.setdefault((i.stage, i.kind), {})[i.microbatch] = parts
            values.update(zip(one.writes, written, strict=True))
            if self.step.blocking:
                jax.block_until_ready((sums, parts, written))
        placement = self.step.schedule.pipeline.placement
        for hand in self.step.outgoing[i.kind, i.stage]:
            given = [values[v] for v in self.step.stages.hands[hand]]
            if placement[hand.target] == placement[i.stage]:
                self._hand_over(hand, i.microbatch, given)
            else:
                self.sent[hand, i.microbatch] = given
        kept = self.step.kept[i.stage, i.kind]
        self.stash[i.stage, i.microbatch] = {v: a for v, a in values.items() if v in kept}

    def _hand_over(self, hand: Hand, microbatch: int, arrays: Sequence[Any]) -> None:
        target = self.stash.setdefault((hand.target, microbatch), {})
        target.update(zip(self.step.stages.hands[hand], arrays, strict=True))

    def send(self, i: Instruction) -> None:
        """Copy to the submesh of the stage that reads."""
        hand = Hand(i.kind, i.stage, i.to)
        if hand in self.step.routes:
            arrays = self.sent.pop((hand, i.microbatch))
            self._hand_over(hand, i.microbatch, jax.device_put(arrays, list(self.step.routes[hand])))

    def free(self, i: Instruction) -> None:
        """Keep what the pass after the next still reads."""
        kept = self.step.kept[i.stage, "B" if i.kind == "F" else "W"]
        left = {v: a for v, a in self.stash.pop((i.stage, i.microbatch)).items() if v in kept}
        if left:
            self.stash[i.stage, i.microbatch] = left

    def update(self, i: Instruction) -> None:
        """All updates that can run now."""
        self.ended.add(i.stage)
        for number, update in enumerate(self.step.stages.updates.programs):
            sources = {update.stage, *(self.step.sources[t.value][0] for t in update.totals)}
            if number in self.done or not sources <= self.ended or any(v not in self.made for v in update.reads):
                continue
            everywhere = self.step.places.everywhere(update.stage)
            made = self.step.compiled.updates[number](
                tuple(self.argument(update.stage, v) for v in update.arguments),
                jax.device_put(tuple(self._total(t.value) for t in update.totals), everywhere),
                jax.device_put(tuple(self.made[v] for v in update.reads), everywhere),
            )
            if self.step.blocking:
                jax.block_until_ready(made)
            self.made.update(zip(update.writes, made, strict=True))
            self.done.add(number)

    def _total(self, value: int) -> Any:
        """A sum, or the parts of a total that is stacked."""
        stage, kind, position = self.step.sources[value]
        found = self.sums[stage, kind][position]
        if found is not None:
            return found
        parts = self.parts[stage, kind]
        return tuple(parts[i][position] for i in range(self.step.stages.split.count))


_ACTIONS: Mapping[str, Callable[[_Run, Instruction], None]] = {
    "run": _Run.run,
    "send": _Run.send,
    "free": _Run.free,
    "update": _Run.update,
}
"""What this process does for an instruction; the others come with these."""
