"""From options, or from a plan, to a step in stages: layers, stages, microbatches, a schedule, and submeshes.

    submeshes       the devices of every rank, slices of the mesh along its first axis              -> submeshes
    layers          at least as many as stages, and each scan over layers split into as many        -> layers_for
    decisions       with a given number of stages: stages of balanced FLOPs, twice as many microbatches
                                                                                                    -> stage_choice
                    otherwise the result of `autopar.passes.inter_op.search`                        -> opening, searched
    the step        in microbatches, in stages, with checked instruction lists                      -> assemble

All decisions are in a `StageChoice`; a plan contains one, so that the same step can be assembled from it again.

A *rank* is a submesh with its instruction list. Every rank has one stage, under interleaved-1f1b several
(`PipelineEffort.chunks`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_models.memory.lower_bound import written_bytes
from autopar.errors import ArgumentError, ClusterError, MeshError, MicrobatchError, PinError, ScheduleError
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.hardware.meshes import Target
from autopar.ir.graph import Graph
from autopar.ir.trace import Traced
from autopar.passes.inter_op import search as stage_search
from autopar.passes.inter_op.backward_passes import HAS_BACKWARD, check_fits, has_backward, have_backward
from autopar.passes.inter_op.lower_bound import PipelineBound
from autopar.passes.inter_op.search import InterOpSearch
from autopar.passes.inter_op.simulate import FoundPipeline
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers import partition as layer_partition
from autopar.passes.layers import split_scan
from autopar.passes.layers.find import Layers
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.split import split
from autopar.passes.remat import choose as recomputation
from autopar.passes.remat import rewrite as remat
from autopar.passes.remat.choose_offload import OffloadCandidates
from autopar.passes.remat.memory_policy import usable_bytes
from autopar.passes.remat.options import Options
from autopar.passes.stages.divide import Stages, divide, needs_two_backward_passes
from autopar.passes.stages.plan import MemoryLimit
from autopar.passes.stages.plan_all import UNTYPED, PlannedStage, StagePlans, TypedArguments, plan_stages
from autopar.rules import manual
from autopar.schedules import REPEATING, SCHEDULES, Schedule, Size, bounds, check, make, peak_stash
from autopar.schedules.table import groups_needed


@dataclass(frozen=True, slots=True)
class PipelineEffort:
    """Which pipelines are opened to the search."""

    # stages per rank, for schedules with several (by definition of the plan that a user gets without options)
    chunks: int = 2
    # microbatches per rank by default (by definition of the plan that a user gets without options)
    per_rank: int = 2
    # most pieces of a scan over layers, each of which may be on its own submesh (not recorded; `bench sensitivity`,
    # 2026-11: no effect on small programs)
    pieces: int = 16


PIPELINES = PipelineEffort()


@dataclass(frozen=True)
class PipelineOptions:
    """The options of the user that concern stages; see `autopar.parallelize`."""

    stages: int | str
    schedule: str
    num_microbatches: int | str
    per_microbatch: tuple[str, ...]
    remat: str
    memory_budget: float | str | None


@dataclass(frozen=True)
class StageChoice:
    """Decisions about a pipeline.

    Attributes:
        borders: the first layer of every stage but the first, of `layers_for(graph, number of stages, ...)`.
        extents: of every rank, its part of the mesh's first axis.
        shapes: of every rank, sizes of the axes of its submesh; empty: slices of the mesh.
        pieces: number of scans into which each scan over layers is split; 0: the number of stages.
        limits: memory limit of every stage; empty: the device's memory, with one microbatch at a time.
        seconds: step time by the search; infinite without a search.
        offloaded: positions of the argument leaves that are in host memory between steps.
        schedule: a name of `autopar.schedules.SCHEDULES`.
        microbatches: number of parts of the batch.
        batch: positions of the argument leaves that are divided into microbatches.
        per_microbatch: globs of totals that may be those of a microbatch; see `autopar.passes.microbatch.split.split`.
        remat: rematerialisation policy of each layer, before layers are subdivided; see `autopar.passes.remat.rewrite`.
        notes: for the user.
    """

    borders: tuple[int, ...]
    extents: tuple[int, ...]
    schedule: str
    microbatches: int
    batch: tuple[int, ...]
    per_microbatch: tuple[str, ...] = ()
    remat: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    pieces: int = 0
    limits: tuple[MemoryLimit, ...] = ()
    seconds: float = math.inf
    offloaded: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Pipelined:
    """A step in stages.

    Attributes:
        choice: the decisions.
        layers: the layers that `choice.borders` refer to, and the graph that runs.
        stages: programs of every stage.
        schedule: the order of passes.
        meshes: the submesh of every rank.
    """

    choice: StageChoice
    layers: Layers
    stages: Stages
    schedule: Schedule
    meshes: tuple[LogicalMesh, ...]

    @property
    def first(self) -> tuple[int, ...]:
        """The first layer of every stage, and the number of layers."""
        return (0, *self.choice.borders, len(self.layers.layers))

    def mesh(self, stage: int) -> LogicalMesh:
        """The submesh of a stage."""
        return self.meshes[self.schedule.pipeline.placement[stage]]

    def in_flight(self, stage: int) -> int:
        """The most microbatches between the first and the last pass of a stage."""
        placement = self.schedule.pipeline.placement
        return -(-peak_stash(self.schedule)[placement[stage]] // placement.count(placement[stage]))

    def within(self, nbytes: float, thorough: Sequence[bool] = ()) -> Pipelined:
        """The same step with a memory limit, bytes per device, that the stages of one rank share evenly.

        `thorough`: of every stage, as of `MemoryLimit`; (): all are.
        """
        placement = self.schedule.pipeline.placement
        limits = (
            MemoryLimit(int(nbytes // placement.count(rank)), self.in_flight(s), thorough[s] if thorough else True)
            for s, rank in enumerate(placement)
        )
        return replace(self, choice=replace(self.choice, limits=tuple(limits)))


def pipelined(graph: Graph, leaves: Sequence[int] | None, target: Target, s: PipelineOptions) -> Pipelined:
    """The step in as many stages as the settings say.

    Args:
        graph: the step.
        leaves: positions of the argument leaves that hold the batch; None: those that look like it.
        target: the mesh of all devices.
        s: the options.

    Raises:
        ArgumentError: fewer operations than stages.
        MeshError: the devices cannot be divided into as many submeshes.
        MicrobatchError: the given number of microbatches does not fit the step.
        ScheduleError: the schedule does not fit the step or its sizes.
    """
    choice = stage_choice(graph, leaves, target, s)
    try:
        return _scheduled(graph, choice, target, s)
    except MicrobatchError as error:
        if s.num_microbatches != "auto":
            raise
        note = f"one microbatch, so that no two stages work at a time: {error}"
        return _scheduled(graph, replace(choice, microbatches=1, notes=(*choice.notes, note)), target, s)


def recomputable_layers(graph: Graph, pipeline: Pipelined) -> tuple[tuple[int, ...], ...]:
    """Layers of every stage whose rematerialisation frees memory; () if layers were divided further for the stages.

    `graph`: the step that `pipeline` divides.
    """
    choice, first = pipeline.choice, pipeline.first
    frees = remat.recomputable(split_scan.split_scans(graph, choice.pieces or len(choice.borders) + 1, choice.batch))
    if len(frees) != len(pipeline.layers.layers):
        return ()
    return tuple(tuple(i for i in range(a, b) if frees[i]) for a, b in itertools.pairwise(first))


def recomputing(graph: Graph, pipeline: Pipelined, target: Target, layers: Collection[int]) -> Pipelined:
    """The same stages with these of their layers rematerialised, as `recomputable_layers` numbers them."""
    policies = tuple(remat.FULL if i in layers else remat.NONE for i in range(len(pipeline.layers.layers)))
    return assemble(graph, replace(pipeline.choice, remat=policies), target)


def offload_candidates(pipeline: Pipelined, positions: Sequence[int]) -> tuple[OffloadCandidates, ...]:
    """Of every stage, those of these arguments that it stores, as far as its share of the host's memory has room."""
    graph, owners = pipeline.stages.split.graph, pipeline.stages.updates.owners
    placement = pipeline.schedule.pipeline.placement
    return tuple(
        OffloadCandidates.of(
            graph,
            pipeline.mesh(stage),
            tuple(i for i in positions if owners[graph.inputs[i]] == stage),
            1 / placement.count(rank),
        )
        for stage, rank in enumerate(placement)
    )


def _scheduled(graph: Graph, choice: StageChoice, target: Target, s: PipelineOptions) -> Pipelined:
    """`assemble`; "auto" means "inference" also if no operation of the backward pass depends on a microbatch."""
    divided = _divided(graph, choice)
    if s.schedule == "auto" and not have_backward(divided[1]):
        choice = replace(choice, schedule="inference")
    return _assembled(choice, *divided, target)


def stage_choice(graph: Graph, leaves: Sequence[int] | None, target: Target, s: PipelineOptions) -> StageChoice:
    """Decisions that the options leave open, without a search; errors and arguments as of `pipelined`."""
    assert isinstance(s.stages, int)
    ranks = s.stages
    extents = _extents(target.logical, ranks)
    name = s.schedule if s.schedule != "auto" else "1f1b" if has_backward(graph) else "inference"
    stages = ranks * _chunks(name)
    count, batch = _microbatches(graph, leaves, s.num_microbatches, ranks, name)
    policies = _policies(split_scan.split_scans(graph, stages, batch), s.remat)
    borders = layer_partition.borders(layers_for(graph, stages, batch, policies), stages)
    return StageChoice(borders, extents, name, count, batch, s.per_microbatch, policies)


def _policies(graph: Graph, asked: str) -> tuple[str, ...]:
    """Rematerialisation policy of each layer; "auto" means none."""
    if asked in (recomputation.AUTO, remat.NONE):
        return ()
    return recomputation.uniform(asked, remat.recomputable(graph))


def layers_for(
    graph: Graph, stages: int, batch: Sequence[int], policies: Sequence[str] = (), pieces: int = 0
) -> Layers:
    """The layers of a step that gets `stages` stages; in their graph scans over layers are split into pieces.

    Args:
        graph: the step.
        stages: number of stages.
        batch: positions of the argument leaves that hold the batch.
        policies: rematerialisation policy of each layer.
        pieces: of every scan over layers; 0: one for each stage.
    """
    shorter = split_scan.split_scans(graph, pieces or stages, batch)
    layers = layers_pass.find(shorter)
    if policies:
        layers = layers_pass.same_layers(layers, remat.rewrite(shorter, policies))
    return layer_partition.subdivide(layers, stages)


def assemble(graph: Graph, choice: StageChoice, target: Target) -> Pipelined:
    """The step in stages by a choice; errors as of `pipelined`."""
    return _assembled(choice, *_divided(graph, choice), target)


def _divided(graph: Graph, choice: StageChoice) -> tuple[Layers, Stages]:
    """The layers of a step, and its stages by a choice."""
    layers = layers_for(graph, len(choice.borders) + 1, choice.batch, choice.remat, choice.pieces)
    own = ("*",) if choice.microbatches == 1 else choice.per_microbatch  # its totals are those of the batch
    parts = split(layers.graph, choice.microbatches, choice.batch, per_microbatch=own)
    return layers, divide(parts, layers, choice.borders, weights=SCHEDULES[choice.schedule].split)


def _assembled(choice: StageChoice, layers: Layers, stages: Stages, target: Target) -> Pipelined:
    """Stages under the schedule of the choice, on their submeshes."""
    check_fits(choice.schedule, stages)
    size = Size(len(choice.extents), choice.microbatches, _chunks(choice.schedule))
    return Pipelined(
        choice, layers, stages, _schedule(choice.schedule, size, stages.borders), submeshes(target, choice)
    )


def _schedule(name: str, size: Size, borders: Sequence[tuple[int, int]]) -> Schedule:
    """A checked schedule; it repeats itself after `REPEATING` microbatches per rank, and only so many are checked."""
    few = replace(size, microbatches=min(size.microbatches, REPEATING * size.ranks))
    checked = check(make(name, few, borders), bounds(name, few))
    return checked if few == size else make(name, size, borders)


def plan_layouts(traced: Traced, pipelined: Pipelined, options: Options) -> StagePlans[PlannedStage]:
    """Plans every stage of a step.

    Args:
        traced: the step.
        pipelined: the step in stages.
        options: pins and solver options.

    Raises:
        PinError: a pin that fits no argument, or not the mesh of its stage; a type that is sharded over the axis along
            which stages divide the mesh.
    """
    stages, placement = pipelined.stages, pipelined.schedule.pipeline.placement
    meshes = [pipelined.mesh(s) for s in range(len(stages.stages))]
    choice = pipelined.choice
    types = _types(traced, pipelined)
    return plan_stages(
        stages, avals(traced, stages), meshes, options, choice.limits, placement, choice.offloaded, types
    )


def _types(traced: Traced, pipelined: Pipelined) -> TypedArguments:
    """The types of arguments on an Explicit mesh that are pins; those of the batch are not, as no stage stores it."""
    if traced.mesh is None:
        return UNTYPED
    specs = {i: spec for i, spec in traced.pins.items() if i not in pipelined.choice.batch}
    first = pipelined.meshes[0].names[0]
    for i, spec in specs.items():
        if any(first in (entry if isinstance(entry, tuple) else (entry,)) for entry in spec):
            path = traced.graph.input_paths[i]
            raise PinError(
                f"'{path}', on the Explicit mesh {dict(traced.mesh.shape)}: its type {spec} is sharded over the axis "
                f"'{first}', along which stages divide the mesh. Move it with jax.device_put to a sharding over other "
                f"axes; pins={{'{path}': {spec}}} shards it over the part of '{first}' that its stage has."
            )
    return TypedArguments(specs, dict(traced.mesh.shape))


def avals(traced: Traced, stages: Stages) -> tuple[Any, ...]:
    """Shapes and dtypes of the arguments of a step in stages, including totals of a loop that runs first."""
    return StepPrograms(stages.split).avals(traced.in_avals)


# The search


def fits_evenly(graph: Graph, cluster: Cluster, times: float = 1.0) -> bool:
    """Whether a step as written fits into `times` the memory of all devices, evenly sharded."""
    return written_bytes(graph) <= times * _memory(cluster)


def may_fit(graph: Graph, cluster: Cluster, asked: str) -> bool:
    """The same with all layers rematerialised that the option `remat` allows."""
    policy = remat.FULL if asked == recomputation.AUTO else asked
    return fits_evenly(remat.rewrite(graph, recomputation.uniform(policy, remat.recomputable(graph))), cluster)


def _memory(cluster: Cluster) -> float:
    """Usable bytes of all devices together."""
    return cluster.num_devices * usable_bytes(cluster.logical_mesh((cluster.num_devices,)))


@dataclass(frozen=True, eq=False)
class Opening:
    """A step whose stages can be searched.

    Attributes:
        graph: the step, with scans over layers split into pieces.
        avals: shape and dtype of every argument.
        choice: the search space.
        splits: number of microbatches -> the step split into them, where that is known already.
        per_microbatch: as in the settings.
        pieces: of a scan over layers.
        notes: of the plan.
    """

    graph: Graph
    avals: tuple[Any, ...]
    choice: stage_search.SearchSpace
    splits: Mapping[int, Microbatches]
    per_microbatch: tuple[str, ...]
    pieces: int
    notes: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the batch is not divided."""
        return self.choice.counts == (1,)


def opening(traced: Traced, leaves: Sequence[int] | None, cluster: Cluster, s: PipelineOptions) -> Opening | None:
    """The search space of stages; None without a batch, or a single backward pass that can run in microbatches.

    Args:
        traced: the step.
        leaves: positions of the argument leaves that hold the batch; None: those that look like it.
        cluster: the devices.
        s: fixed options: microbatches, schedule, rematerialisation, memory.

    Raises:
        MicrobatchError: the given number of microbatches does not fit the step.
        ScheduleError: a schedule that the search does not support.
    """
    if _chunks(s.schedule) > 1:
        raise ScheduleError(f"schedule='{s.schedule}' is not searched in this version; give stages=2 or more with it")
    graph = traced.graph
    if not has_backward(graph):
        return None
    if s.schedule in SCHEDULES and not SCHEDULES[s.schedule].backward:
        raise ScheduleError(f"schedule '{s.schedule}' {HAS_BACKWARD}")
    try:
        batch = batch_leaves(graph, 1, "auto" if leaves is None else leaves)
    except MicrobatchError:
        return None
    if not batch:  # batch_argnums=(): no argument holds one
        return None
    extent = math.gcd(*(graph.types[graph.inputs[i]].shape[0] for i in batch))
    pieces = min(cluster.num_devices, PIPELINES.pieces)
    shorter = split_scan.split_scans(graph, pieces, batch)
    counts = (s.num_microbatches,) if isinstance(s.num_microbatches, int) else stage_search.microbatch_counts(extent)
    own, notes = s.per_microbatch, ()
    splits: dict[int, Microbatches] = {}
    try:
        several = stage_search.splittable_counts(shorter, [n for n in counts if n > 1] or counts, batch, own, splits)
        counts = tuple(n for n in counts if n == 1 or n in several)
    except MicrobatchError as error:
        if s.num_microbatches != "auto":
            raise
        counts, own, notes = (1,), ("*",), (f"one microbatch: {error}",)
    layers = layers_pass.find(shorter)
    if any(needs_two_backward_passes(parts, layers) for parts in splits.values()):
        return None
    if counts == (1,):
        splits[1] = split(shorter, 1, batch, per_microbatch=("*",))
        if not any(p.op.phase == "backward" for p in splits[1].body):
            return None  # all of the backward pass needs the whole batch
    choice = stage_search.SearchSpace(
        batch,
        counts,
        schedules=stage_search.OPEN if s.schedule == "auto" else (s.schedule,),
        policies=(remat.NONE, remat.FULL) if s.remat == recomputation.AUTO else (s.remat,),
        memory=s.memory_budget if isinstance(s.memory_budget, float) else None,
        per_microbatch=own,
    )
    return Opening(shorter, tuple(traced.in_avals), choice, splits, s.per_microbatch, pieces, notes)


def search_of(step: Opening, cluster: Cluster, options: Options) -> InterOpSearch:
    """The search for the stages of a step on a cluster."""
    per_microbatch = step.choice.per_microbatch
    return InterOpSearch(step.graph, step.avals, cluster, step.choice.batch, options, per_microbatch, step.splits)


def searched(step: Opening, search: InterOpSearch, limit: float = math.inf, fewest: int = 1) -> StageChoice | None:
    """The best pipeline of at least `fewest` stages that takes less than `limit` seconds; None if none fits."""
    pipeline = search.best(replace(step.choice, limit=limit, fewest=fewest))
    return None if pipeline is None else _chosen(step, pipeline)


def least_seconds(step: Opening, search: InterOpSearch, planned: float) -> float:
    """Lower bound (s) on the step of every pipeline, and of every plan on one mesh; inf if none can fit.

    `planned`: step time (s) of a plan.
    """
    return PipelineBound(search, step.choice, planned).least()


def _chosen(step: Opening, pipeline: FoundPipeline) -> StageChoice:
    axes = max(len(stage.shape) for stage in pipeline.stages)
    frees = remat.recomputable(step.graph)
    policies = tuple(p if free else remat.NONE for p, free in zip(pipeline.remat, frees, strict=True))
    return StageChoice(
        tuple(stage.first for stage in pipeline.stages[1:]),
        tuple(stage.devices for stage in pipeline.stages),
        pipeline.schedule,
        pipeline.microbatches,
        step.choice.batch,
        step.per_microbatch,
        () if set(policies) == {remat.NONE} else policies,
        step.notes,
        tuple((1,) * (axes - len(stage.shape)) + stage.shape for stage in pipeline.stages),
        step.pieces,
        pipeline.limits,
        pipeline.seconds,
    )


# Devices


def _extents(mesh: LogicalMesh, ranks: int) -> tuple[int, ...]:
    """Each rank's part of the mesh's first axis; on a mesh of one axis parts may differ by one device."""
    extent = mesh.sizes[0]
    if len(mesh.sizes) > 1 and extent % ranks:
        fitting = ", ".join(str(n) for n in range(1, extent + 1) if extent % n == 0)
        raise MeshError(
            f"stages={ranks} submeshes are cut from the first axis of mesh {mesh.shape}, whose {extent} devices do not "
            f"divide by it; use stages of {fitting}, another mesh, or one axis, which need not divide"
        )
    if extent < ranks:
        raise MeshError(f"stages={ranks} need as many devices at least, mesh {mesh.shape} has {extent} to divide")
    return tuple(extent // ranks + (rank < extent % ranks) for rank in range(ranks))


def submeshes(target: Target, choice: StageChoice) -> tuple[LogicalMesh, ...]:
    """The mesh of every rank, in order, with the links of its part of the cluster."""
    mesh = target.logical
    inner = math.prod(mesh.sizes[1:])
    ends = itertools.accumulate(choice.extents)
    firsts = [(end - extent) * inner for end, extent in zip(ends, choice.extents, strict=True)]
    shapes = choice.shapes or [(extent, *mesh.sizes[1:]) for extent in choice.extents]
    return tuple(_part(target.cluster, mesh, first, shape) for first, shape in zip(firsts, shapes, strict=True))


def _part(cluster: Cluster, mesh: LogicalMesh, first: int, sizes: tuple[int, ...]) -> LogicalMesh:
    try:
        return cluster.part(first, math.prod(sizes)).logical_mesh(sizes, mesh.names)
    except ClusterError:  # neither whole hosts nor devices of one host: links of the whole mesh
        return replace(mesh, sizes=sizes, levels=())


# Microbatches and schedules


def _chunks(schedule: str) -> int:
    return PIPELINES.chunks if schedule in SCHEDULES and "chunks" in SCHEDULES[schedule].several else 1


def _microbatches(
    graph: Graph, leaves: Sequence[int] | None, asked: int | str, ranks: int, schedule: str
) -> tuple[int, tuple[int, ...]]:
    """The number of microbatches, and the argument leaves that are divided into them."""
    chosen = "auto" if leaves is None else leaves
    given = asked if isinstance(asked, int) else None
    try:
        batch = batch_leaves(graph, given or 1, chosen)
    except MicrobatchError:
        if given:
            raise
        return 1, ()  # no argument holds a batch

    def fits(count: int) -> bool:
        return not SCHEDULES[schedule].size_error(Size(ranks, count, _chunks(schedule)))

    if given and fits(given):
        return given, batch
    extent = math.gcd(*(graph.types[graph.inputs[i]].shape[0] for i in batch))
    number = next(_numbers(extent, given or PIPELINES.per_rank * ranks, fits), None)
    needs = f"schedule {schedule} {groups_needed(ranks)}"
    if number is None:
        raise ScheduleError(
            f"{needs} no multiple of {ranks} divides the batch of {extent}; use a batch or stages with one, or "
            "schedule 1f1b, which takes any number"
        )
    if given:
        raise ScheduleError(f"{needs} got {given}; use {number}, or schedule 1f1b, which takes any number")
    return number, batch


def _numbers(extent: int, wanted: int, fits: Callable[[int], bool]) -> Iterator[int]:
    """Divisors of the batch that fit, in ascending order from `wanted`, then in descending order below it."""
    order = (*range(wanted, extent + 1), *range(min(wanted - 1, extent), 0, -1))
    return (m for m in order if extent % m == 0 and fits(m))


def check_options(s: PipelineOptions, graph: Graph) -> None:
    """ArgumentError for a step that stages do not support: one with a `shard_map`."""
    op = manual.first_call(graph)
    if op is not None:
        sizes = dict(manual.call_of(op).mesh)
        raise ArgumentError(
            f"shard_map at {manual.line(op)} runs over the mesh {sizes}, and a stage is on some of the "
            f"devices only: it is not available with stages={s.stages}. Leave out stages, or write it without "
            "shard_map: the devices of each stage then share it."
        )
