"""From a function and its arguments to the plan that runs: trace, plan every candidate mesh, keep the best.

trace      in the mesh that the user has set, types included
plan       for each candidate mesh with Auto axes, or read from the cache     -> _best, _planned
check      a plan from elsewhere against this function and mesh               -> _loaded
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import argnums, jax_compat
from autopar.codegen import emit as codegen
from autopar.codegen.accumulate import accumulated
from autopar.errors import (
    ArgumentError,
    AutoparError,
    AutoparWarning,
    GraphError,
    MicrobatchError,
    PlanMismatchError,
    ScheduleError,
)
from autopar.hardware import meshes
from autopar.hardware.cluster import Cluster
from autopar.hardware.meshes import Target
from autopar.ir.graph import Graph
from autopar.ir.graph import verify as verify_graph
from autopar.ir.layout import from_spec
from autopar.ir.text import seconds
from autopar.ir.trace import Traced, trace
from autopar.ir.train_state import match_state
from autopar.options import Settings
from autopar.passes.inter_op import pipelines
from autopar.passes.inter_op import plan as pipeline_plan
from autopar.passes.inter_op.pipelines import Pipelined
from autopar.passes.intra_op.mesh_search import MeshSearch
from autopar.passes.intra_op.plan import Options, Parts, collector_paused
from autopar.passes.remat import choose_offload, memory_policy
from autopar.passes.remat import rewrite as remat
from autopar.passes.stages.plan_all import CodegenStage, StagePlans
from autopar.plans import cache as plan_cache
from autopar.plans.checks import mismatches
from autopar.plans.layout_checks import check_arguments, check_layouts
from autopar.plans.plan import Plan, check_matches, graph_hash
from autopar.plans.schema import FieldError
from autopar.progress import Progress, told
from autopar.rules import Rule, rules_of
from autopar.rules.registry import registered_rules
from autopar.runtime import PipelineStep, build
from autopar.runtime.failures import CALLBACKS

MOST_BYTES = 2**53  # of one array: sums of a thousand such are below 2**63

#: Seconds that planning may take where no time limit is given: about as long as compiling, by operations.
LEAST_SECONDS, SECONDS = 5.0, 2e-3
SEARCH_SECONDS = 60.0  # of each problem in a search for stages
#: Share of the seconds that a search expects of stages that they may take once they are planned: 0.94 to 1.05 on T5,
#: BERT, Conformer, a speech model and GPT-39B on p3.16xlarge and TPU v5e.
PLANNED = 0.9
#: How often the memory a step may need, counted without fusion, for its plan on one mesh to be looked for at once.
#: Chosen on BERT-large, whose plan peaks at a third of that count.
FUSED = 3.0
#: Programs in microbatches that are kept: recomputation asks for the same ones on every mesh.
SPLIT = 4

#: How an argument lies on an Explicit mesh: its pin (None if it is not cut) and the mesh.
Pin = tuple[PartitionSpec | None, Any]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plan with the trace it belongs to, the mesh it is for, the rules then registered, and what to warn of.

    The graph of the trace is the one that is executed: with what the plan recomputes. `pipeline`: it in stages, and
    `layouts`: the layouts inside these, where the plan has several.
    """

    traced: Traced
    plan: Plan
    target: Target
    registered: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    pipeline: Pipelined | None = None
    layouts: StagePlans[CodegenStage] | None = None

    def rules(self) -> Mapping[int, Rule]:
        """What code generation needs beside the plan; read once per graph."""
        return rules_of(self.traced.graph, self.registered)

    def mesh(self) -> Mesh:
        """The devices, with Auto axes."""
        return jax_compat.auto_mesh(meshes.concrete(self.target), self.target.logical.names)

    def homes(self) -> tuple[NamedSharding, ...]:
        """Where the plan holds every argument leaf; what no stage of a pipeline holds, where the first stage is."""
        pieces = (self.mesh(),) if self.pipeline is None else self.submeshes()
        rank = {i: stage.rank for stage in self.plan.stages for i in stage.arguments}
        homes = [codegen.in_shardings(self.plan, piece) for piece in pieces]
        return tuple(homes[rank.get(i, 0)][i] for i in range(len(self.plan.inputs)))

    def submeshes(self) -> tuple[Mesh, ...]:
        """The devices of every rank of a pipeline, with Auto axes."""
        assert self.pipeline is not None
        devices, names = meshes.concrete(self.target), self.target.logical.names
        extents = self.pipeline.choice.extents
        pieces = [devices[end - n : end] for n, end in zip(extents, itertools.accumulate(extents), strict=True)]
        shapes = [mesh.sizes for mesh in self.pipeline.meshes]
        return tuple(jax_compat.auto_mesh(p.reshape(n), names) for p, n in zip(pieces, shapes, strict=True))

    def build(self, compiler_options: Mapping[str, Any] | None = None) -> PipelineStep:
        """A pipeline compiled for the devices at hand."""
        assert self.pipeline is not None
        found = self.pipeline
        with jax_compat.automatic_axes():
            # what fails on the host fails later than its call, unless that is waited for
            blocking = any(op.name in CALLBACKS for op in self.traced.graph.walk())
            submeshes = self.submeshes()
            needed = codegen.kernel_options(self.traced.graph, submeshes[0].devices.flat[0].platform)
            options: Any = {
                "layouts": self.layouts,
                "compiler_options": {**needed, **(compiler_options or {})},
                "blocking": blocking,
                "donated": self.plan.donated,
            }
            return build(self.traced, found.stages, found.schedule, submeshes, **options)

    def keeps(self, pins: Sequence[Pin | None], within: bool) -> bool:
        """True if the plan keeps the types of these arguments; `within`: they, or the call, are on an Explicit mesh."""
        return within == (self.traced.mesh is not None) and all(
            dict(pin[1].shape) == self.target.logical.shape and from_spec(pin[0], self.plan.mesh_names) == layout
            for pin, layout in zip(pins, self.plan.inputs, strict=True)
            if pin is not None and pin[0] is not None
        )


def prepare(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], s: Settings, local: bool
) -> Prepared:
    """Trace and plan; `local`: the plan is to run here. For the errors see `autopar.parallelize`."""
    with collector_paused(), told(name_of(fn), s.progress) as tell:
        begin = time.perf_counter()
        tell("tracing")
        traced = trace(fn, *args, static_argnums=s.static_argnums, **kwargs)
        _check_sizes(name_of(fn), verify_graph(traced.graph))
        call = _Call(fn, traced, args, local, time.perf_counter() - begin, tell)
        with jax_compat.automatic_axes():
            if s.plan is not None:
                return _loaded(fn, traced, replace(s, plan=argnums.donating_no_more(s.plan, args, s)))
            if s.pipelined:
                return _in_stages(call, s)
            if not traced.pins and pipelines.is_open(s, traced.graph):
                return _searched(call, s)
            return _best(call, s)


@dataclass(frozen=True, eq=False)
class _Call:
    """What is planned.

    Attributes:
        fn, traced, args: the function, its trace and the arguments.
        local: the plan is to run here.
        trace_s: seconds that tracing took.
        report: says what is done.
    """

    fn: Callable[..., Any]
    traced: Traced
    args: Sequence[Any]
    local: bool
    trace_s: float
    report: Progress


def _check_sizes(name: str, graph: Graph) -> None:
    """ArgumentError for the first value whose bytes cannot be counted."""
    if max((t.nbytes for t in graph.types), default=0) <= MOST_BYTES:
        return
    paths = {v: f"argument '{path}'" for v, path in graph.names.items()}
    made = {v: f"the result of {op.name} at {op.source}" for op in graph.walk() for v in op.outputs}
    value = next(v for v, t in enumerate(graph.types) if t.nbytes > MOST_BYTES)
    what = {**made, **paths}.get(value, "a value")
    raise ArgumentError(
        f"{what} of {name} is {graph.types[value]}, more than the {MOST_BYTES:.1e} bytes an array may have"
    )


def _best(call: _Call, s: Settings) -> Prepared:
    """The plan with the shortest step among the candidate meshes."""
    best = _on_one_mesh(call, s)
    assert best is not None
    for warning in best.warnings:
        warn(f"{name_of(call.fn)}: {warning}")
    return best


def _on_one_mesh(call: _Call, s: Settings, cutoff: float = math.inf) -> Prepared | None:
    """The same without a word; None if it takes `cutoff` (s) or longer."""
    return _OneMesh(call, s).plan(cutoff)


class _OneMesh:
    """The plans of a step on the candidate meshes, in so many microbatches as the settings say.

    Raises:
        ArgumentError, MicrobatchError: the batch does not fall into microbatches, or divides by no axis of any mesh.
    """

    def __init__(self, call: _Call, s: Settings) -> None:
        self._call, self._candidates = call, meshes.targets(_mesh(call.traced, s), s.cluster, local=call.local)
        argnums.check_batch(name_of(call.fn), call.traced, call.args, s, self._candidates)
        self._count, self._batch = count, batch = argnums.microbatches(call.traced.graph, call.args, s)
        devices, self._own = self._candidates[0].logical.size, s.per_microbatch

        @lru_cache(maxsize=SPLIT)
        def split(graph: Graph) -> Graph:
            return accumulated(replace(call.traced, graph=graph), count, batch, devices, s.per_microbatch).graph

        self._parts = Parts(call.traced, split, count)
        self._traced, self._rules = replace(call.traced, graph=split(call.traced.graph)), registered_rules()
        self._options = Options(
            solver=s.solver,
            time_limit=s.time_limit or _time_limit(self._traced.graph),
            gap=s.gap,
            pins=s.pins,
            donate=argnums.donated(call.traced, call.args, s),
            rules=self._rules,
            memory_budget=s.memory_budget,
            remat=s.remat,
            offload=_offload(s, self._candidates[0], call.local),
        )

    @cached_property
    def _search(self) -> MeshSearch:
        return MeshSearch(self._traced, self._candidates, self._options, self._parts, self._call.report)

    def expected(self) -> tuple[float, bool]:
        """About the seconds of the best plan, of what is quickly found; and whether that is of the step as written."""
        kept, _ = self._kept()
        if kept is None:
            return self._search.expected()
        fits = memory_policy.fits(
            kept.stages[0].peak_memory_bytes, self._candidates[0].logical, self._options.memory_budget
        )
        return (kept.step_time_s, not kept.remat and not kept.offloaded) if fits else (math.inf, False)

    def plan(self, cutoff: float = math.inf) -> Prepared | None:
        """The plan with the shortest step; None if it takes `cutoff` (s) or longer."""
        answer = self._planned(cutoff)
        if answer is None:
            return None
        plan, found = answer
        names, sizes = plan.mesh_names, plan.mesh_sizes
        (target,) = (t for t in self._candidates if t.logical.names == names and t.logical.sizes == sizes)
        step = self._parts.step
        if self._count > 1:
            own, batch = self._own, self._batch
            hashed = graph_hash(step.graph)
            plan = replace(plan, graph_hash=hashed, num_microbatches=self._count, batch=batch, per_microbatch=own)
        best = Prepared(self._traced, plan, target, self._rules, found)
        if best.plan.remat:
            best = replace(best, traced=executed(step, best.plan))
        if changed := _changed(step, best.traced):
            (stage,) = best.plan.stages
            best = replace(best, plan=replace(best.plan, stages=(replace(stage, graph_hash=changed),)))
        return best

    def _planned(self, cutoff: float) -> tuple[Plan, tuple[str, ...]] | None:
        """The best plan of the candidate meshes, from the cache if it is there, and what to warn of."""
        begin = time.perf_counter()
        kept, asked = self._kept()
        if kept is not None:
            return replace(kept, phases={"trace": self._call.trace_s, "cache": time.perf_counter() - begin}), ()
        made = self._search.best(cutoff)
        if made is None:
            return None
        made = replace(made, plan=replace(made.plan, phases={"trace": self._call.trace_s, **made.plan.phases}))
        if asked is not None and math.isinf(cutoff):
            plan_cache.write(asked, made.plan, self._options.time_limit)
        return made.plan, made.solution.warnings

    def _kept(self) -> tuple[Plan | None, str | None]:
        """The plan in the cache, if there is one, and what it answers, if there is a cache."""
        if plan_cache.folder() is None:
            return None, None
        first, *others = self._candidates
        further = {"candidates": [one.logical for one in self._candidates]} if others else {}
        asked = plan_cache.question(self._traced, first.logical, first.cluster.name, self._options, further)
        return plan_cache.read(asked), asked


def _time_limit(graph: Graph) -> float:
    """Seconds that planning may take where nobody says: about as long as compiling, by operations."""
    return max(LEAST_SECONDS, SECONDS * sum(1 for _ in graph.walk()))


def _offload(s: Settings, target: Target, local: bool) -> str:
    """The option `offload`, "none" where it is free and the devices that the plan is to run on have no host memory.

    ArgumentError where state is to go there nevertheless.
    """
    kinds = _memory_kinds(target) if local else (jax_compat.HOST_MEMORY,)
    if jax_compat.HOST_MEMORY in kinds:
        return s.offload
    if s.offload == choose_offload.ALL:
        raise ArgumentError(
            f"offload='all' needs devices that can address memory of the kind '{jax_compat.HOST_MEMORY}'; those here "
            f"have {', '.join(map(repr, kinds)) or 'none that JAX tells apart'}. Use offload='auto' or 'none'."
        )
    return choose_offload.NONE


def _memory_kinds(target: Target) -> tuple[str, ...]:
    return jax_compat.memory_kinds(meshes.concrete(target).flat[0])


def _searched(call: _Call, s: Settings) -> Prepared:
    """The plan of the best pipeline, or on one mesh where that is no slower; from the cache if it is there."""
    cluster = s.cluster or Cluster.local()
    begin = time.perf_counter()
    options = _options_of_stages(s)
    asked = None
    if plan_cache.folder() is not None:
        whole = cluster.logical_mesh((cluster.num_devices,))
        asked = plan_cache.question(call.traced, whole, repr(cluster), options, _asked(s))
        kept = plan_cache.read(asked)
        if kept is not None:
            kept = replace(kept, phases={"trace": call.trace_s, "cache": time.perf_counter() - begin})
            with contextlib.suppress(PlanMismatchError):  # devices here may lack what those had that it was made on
                return _from_cache(call.fn, call.traced, replace(s, plan=kept), call.local)
    step = pipelines.opening(call.traced, argnums.named_batch(call.args, s), cluster, s)
    laps = {"trace": call.trace_s, "inter_op": time.perf_counter() - begin}
    one_mesh, known, as_written = _one_microbatch(call, s, cluster, alone=step is None or step.is_whole)

    def way(count: int | str) -> Callable[[float], Prepared | None]:
        """The plan on one mesh in so many microbatches."""
        if count in (1, "auto") and one_mesh is not None:
            return one_mesh.plan
        return partial(_on_one_mesh, call, replace(s, num_microbatches=count))

    found, tried = None, set[int | str]()
    promised = () if step is None or math.isinf(known) else (known / PLANNED,)
    for limit in (*promised, math.inf):
        call.report(f"searching stages, microbatches and schedules for {cluster.num_devices} devices of {cluster.name}")
        searching, fewest = time.perf_counter(), 2 if as_written else 1
        choice = None if step is None else pipelines.searched(step, cluster, options, limit, fewest)
        stages = _assembled_choice(call, s, choice, cluster)
        laps["inter_op"] += time.perf_counter() - searching
        if stages is not None:
            staged = _staged(call, s, *stages, laps)
            laps = dict(staged.plan.phases)
            found = staged if found is None else _better(staged, found, s)
        if found is None or s.schedule == "auto":
            counts = (1,) if as_written else _counts(s, choice, call.traced.graph, cluster)
            counts = counts if found is not None else counts or (s.num_microbatches,)
            try:
                found = _on_meshes(s, [way(n) for n in counts if n not in tried], found)
            except AutoparError:
                if as_written or math.isinf(limit):
                    raise
                continue
            tried.update(counts)
        if as_written or (_fits(found, s) and found.plan.step_time_s < limit):
            break  # otherwise it was forecast to take less, and what takes as long was not looked for
    assert found is not None
    laps["one_mesh"] = time.perf_counter() - begin + call.trace_s - sum(laps.values())
    found = replace(found, plan=replace(found.plan, phases=laps))
    for warning in found.warnings:
        warn(f"{name_of(call.fn)}: {warning}")
    if asked is not None:
        plan_cache.write(asked, found.plan, options.time_limit)
    return found


def _one_microbatch(call: _Call, s: Settings, cluster: Cluster, *, alone: bool) -> tuple[_OneMesh | None, float, bool]:
    """Plans on one mesh in one microbatch, about the seconds of the best, and whether that is of the step as written.

    They are quickly found, and few pipelines promise to be better. None for a step that is too large, unless it runs in
    one microbatch `alone`; inf if nothing is known to fit.
    """
    may = s.num_microbatches in ("auto", 1) and (alone or pipelines.fits_evenly(call.traced.graph, cluster, FUSED))
    if s.schedule == "auto" and may:
        with contextlib.suppress(AutoparError):  # what one mesh refuses is no matter where there are stages
            found = _OneMesh(call, replace(s, num_microbatches=1))
            return (found, *found.expected())
    return None, math.inf, False


def _assembled_choice(
    call: _Call, s: Settings, choice: pipelines.StageChoice | None, cluster: Cluster
) -> tuple[Target, Pipelined] | None:
    """The stages that were chosen, on a mesh of all devices; None where none were, or none has a backward pass.

    That is so where all of the backward pass needs the whole batch. ScheduleError where a schedule was asked for.
    """
    if choice is None or not choice.borders:
        return None
    sizes = (cluster.num_devices, *[1] * (len(choice.shapes[0]) - 1))
    target = Target(cluster.logical_mesh(sizes), cluster)
    try:
        return target, pipelines.assemble(call.traced.graph, choice, target)
    except ScheduleError:
        if s.schedule != "auto":
            raise
        return None


def _options_of_stages(s: Settings) -> Options:
    """How stages are solved."""
    limit, rules = s.time_limit or SEARCH_SECONDS, registered_rules()
    return Options(solver=s.solver, time_limit=limit, gap=s.gap, pins=s.pins, rules=rules)


def _counts(s: Settings, choice: pipelines.StageChoice | None, graph: Graph, cluster: Cluster) -> tuple[int | str, ...]:
    """Numbers of microbatches to plan one mesh with.

    That of the search where it is for one stage; and one where that may fit, first if it does as it is written.
    """
    if choice is None or isinstance(s.num_microbatches, int):
        return (s.num_microbatches,)
    found = () if choice.borders else (choice.microbatches,)
    if pipelines.fits_evenly(graph, cluster):
        return tuple(dict.fromkeys((1, *found)))
    return tuple(dict.fromkeys((*found, 1))) if pipelines.may_fit(graph, cluster, s.remat) else found


def _on_meshes(s: Settings, ways: Sequence[Callable[[float], Prepared | None]], found: Prepared | None) -> Prepared:
    """The best of what is found and several plans on one mesh; those that fit into memory first.

    What one mesh refuses, such as a batch that its axes do not divide, is no matter where another plan is found.

    Args:
        s: the settings.
        ways: the plan that takes less than a cutoff in seconds, None if there is none.
        found: the stages that were chosen, if any.

    Raises:
        AutoparError: the first refusal, where there is no plan at all.
    """
    refusals = list[AutoparError]()
    for plan in ways:
        try:
            one = plan(found.plan.step_time_s if found is not None and _fits(found, s) else math.inf)
        except AutoparError as error:
            refusals.append(error)
        else:
            found = one if found is None else _better(found, one, s)
    if found is None:
        raise refusals[0]
    return found


def _better(found: Prepared, other: Prepared | None, s: Settings) -> Prepared:
    """The shorter of two plans that fit, or the one that does; of others the latter."""
    if other is None:
        return found
    if _fits(found, s) and _fits(other, s):
        return min(found, other, key=lambda one: one.plan.step_time_s)
    return found if _fits(found, s) else other


def _fits(found: Prepared, s: Settings) -> bool:
    """Whether every device has memory for its part."""
    peak = max(stage.peak_memory_bytes for stage in found.plan.stages)
    return memory_policy.fits(peak, found.target.logical, s.memory_budget)


#: Settings that a search for a pipeline depends on, besides those that are `Options`.
_OF_THE_SEARCH = (
    *("batch_argnums", "donate_argnums", "memory_budget", "remat", "offload", "num_microbatches", "stages", "schedule"),
    "per_microbatch",
)


def _asked(s: Settings) -> Mapping[str, object]:
    return {f"search {name}": getattr(s, name) for name in _OF_THE_SEARCH}


def _from_cache(fn: Callable[..., Any], traced: Traced, s: Settings, local: bool) -> Prepared:
    """A plan that is kept: made ready to run only where it is to."""
    assert s.plan is not None
    if local:
        return _loaded(fn, traced, s)
    (target,) = meshes.targets(s.plan.mesh, s.cluster, local=False)
    return Prepared(traced, s.plan, target, registered_rules())


def _in_stages(call: _Call, s: Settings) -> Prepared:
    """The plan of a pipeline of so many stages, on the mesh given or on one axis of all devices."""
    pipelines.check_options(s, bool(call.traced.pins), call.traced.graph)
    target = meshes.targets(s.mesh, s.cluster, local=call.local)[0]
    found = pipelines.pipelined(call.traced.graph, argnums.named_batch(call.args, s), target, s)
    return _staged(call, s, target, found, {"trace": call.trace_s})


def _staged(call: _Call, s: Settings, target: Target, found: Pipelined, laps: Mapping[str, float]) -> Prepared:
    """The plan of a step in stages."""
    begin = time.perf_counter()
    call.report(f"planning {len(found.stages.stages)} stages in {found.choice.microbatches} microbatches")
    traced, donated = call.traced, argnums.donated(call.traced, call.args, s)
    state = tuple(sorted(match_state(traced.graph).values())) if isinstance(donated, str) else donated
    run, rules = replace(traced, graph=found.layers.graph), registered_rules()
    whole = s.time_limit or _time_limit(traced.graph)
    options = replace(_options_of_stages(s), time_limit=whole / len(found.stages.stages))
    layouts = pipeline_plan.plan_layouts(run, found, options)
    made = pipeline_plan.make_plan(traced.graph, found, layouts, target, state, 0.0)
    made = replace(made, phases={**laps, "stages": time.perf_counter() - begin})
    call.report(f"{len(made.stages)} stages take {seconds(made.step_time_s)}")
    return Prepared(run, made, target, rules, pipeline=found, layouts=layouts)


def _mesh(traced: Traced, s: Settings) -> Any:
    """The mesh to plan for: the one given, or an Explicit one that something is to be cut over; None searches."""
    asked = traced.pins or any(op.name == "sharding_constraint" for op in traced.graph.walk())
    return traced.mesh if s.mesh is None and asked else s.mesh


def warn(message: str) -> None:
    """An AutoparWarning that points to the user's line."""
    warnings.warn(message, AutoparWarning, stacklevel=_user_stacklevel())


def _user_stacklevel() -> int:
    """The `stacklevel` at which a warning of the caller points to the user's line."""
    files = [frame.f_code.co_filename for frame in jax_compat.frames()]
    # `warnings.warn` counts from `warn`, one frame above this one, as 1
    return next((level for level, file in enumerate(files) if jax_compat.is_own(file)), len(files) - 1)


def name_of(fn: Callable[..., Any]) -> str:
    """The function's name, for people."""
    return getattr(fn, "__name__", type(fn).__name__)


def _loaded(fn: Callable[..., Any], traced: Traced, s: Settings) -> Prepared:
    """A plan from elsewhere, checked against this function and, if one is given, this mesh."""
    assert s.plan is not None
    check_matches(s.plan, traced.graph, name_of(fn))
    (target,) = meshes.targets(s.plan.mesh if s.mesh is None else s.mesh, s.cluster, local=True)
    if (target.logical.sizes, target.logical.names) != (s.plan.mesh_sizes, s.plan.mesh_names):
        raise PlanMismatchError(
            f"the plan is for the mesh {s.plan.mesh}, "
            f"but mesh {target.logical.shape} was given. Plan again, or leave out mesh."
        )
    if s.plan.offloaded and jax_compat.HOST_MEMORY not in (kinds := _memory_kinds(target)):
        raise PlanMismatchError(
            f"the plan keeps state in memory of the kind '{jax_compat.HOST_MEMORY}', and the devices here have "
            f"{', '.join(map(repr, kinds)) or 'none that JAX tells apart'}. Plan again."
        )
    rules = registered_rules()
    if s.plan.pipelined:
        found = _assembled(traced, s.plan, target)
        run = replace(traced, graph=found.layers.graph)
        layouts = pipeline_plan.kept(s.plan, run, found, rules)
        return Prepared(run, s.plan, target, rules, pipeline=found, layouts=layouts)
    return Prepared(carried_out(traced, s.plan, rules), s.plan, target, rules)


def _assembled(traced: Traced, plan: Plan, target: Target) -> Pipelined:
    """The stages of a plan; PlanMismatchError where there are other layers."""
    with _as_mismatch("has other stages"):
        return pipelines.assemble(traced.graph, pipelines.choice_of(plan), target)


@contextlib.contextmanager
def _as_mismatch(what: str) -> Iterator[None]:
    """Errors about choices that a plan has made are about the plan."""
    try:
        yield
    except (ArgumentError, MicrobatchError, ScheduleError, GraphError) as error:
        raise PlanMismatchError(f"the plan {what} than this autopar finds: {error}. Plan again.") from None


def carried_out(traced: Traced, plan: Plan, registered: Mapping[str, str]) -> Traced:
    """The trace as a plan from elsewhere, one without stages, executes it.

    Raises:
        PlanMismatchError: the plan's layouts are of another program, or do not fit this one.
    """
    with _as_mismatch("recomputes other layers, or has other microbatches,"):
        run = executed(traced, plan)
    with mismatches():
        if plan.stages[0].graph_hash != _changed(traced, run):
            made = "that of the program that its remat, num_microbatches, batch and per_microbatch make"
            raise FieldError(made, repr(plan.stages[0].graph_hash), "stages[0].graph_hash")
        check_arguments(plan, run.graph)
        check_layouts(plan, 0, run.graph, plan.mesh_sizes, registered)
    return run


def _changed(written: Traced, run: Traced) -> str:
    """A hash of the program that is executed; "" if it is the one that was written."""
    return "" if run.graph is written.graph else graph_hash(run.graph)


def executed(traced: Traced, plan: Plan) -> Traced:
    """The trace with what the plan recomputes, in the plan's microbatches; for a pipeline as it is.

    Raises:
        ArgumentError, MicrobatchError: it was made for other layers, or for another batch.
    """
    if plan.pipelined:
        return traced
    run = replace(traced, graph=remat.rewrite(traced.graph, plan.remat))
    return accumulated(run, plan.num_microbatches, plan.batch, math.prod(plan.mesh_sizes), plan.per_microbatch)
