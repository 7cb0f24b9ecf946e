"""The driver: from a function and its arguments to a plan that can be executed.

trace      in the mesh that the user has set, types included
plan       for candidate meshes with Auto axes, and for pipelines   -> _plan_one_mesh, _search_pipelines
           for stages as the user gives them                        -> _StagesAsGiven
load       a given plan, checked against the function and mesh      -> autopar/runtime/load.py
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from autopar import argnums, jax_compat
from autopar.codegen.accumulate import accumulate_gradients
from autopar.codegen.rewrites import apply_rewrites, rewritten_hash
from autopar.errors import ArgumentError, AutoparError, AutoparWarning, PlanMismatchError, ScheduleError
from autopar.hardware import meshes
from autopar.hardware.cluster import Cluster
from autopar.hardware.meshes import Target
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.graph import verify as verify_graph
from autopar.ir.text import seconds, size
from autopar.ir.trace import Traced, trace
from autopar.ir.train_state import match_state
from autopar.options import Settings, check_one_stage, name_of
from autopar.passes.inter_op import pipelines, savings
from autopar.passes.inter_op.pipelines import Pipelined, PipelineOptions
from autopar.passes.inter_op.savings import Attempt, Savings, SavingsSearch
from autopar.passes.mesh_search.planner import Parts, collector_paused
from autopar.passes.mesh_search.search import MeshSearch
from autopar.passes.remat import choose, choose_offload, memory_policy
from autopar.passes.remat.choose_offload import OffloadCandidates
from autopar.passes.remat.options import Options
from autopar.passes.stages.offload import offloadable_in_stages
from autopar.plans import cache as plan_cache
from autopar.plans import one_mesh
from autopar.plans import pipeline as pipeline_plan
from autopar.plans.plan import Plan
from autopar.plans.stage_budget import budget_error
from autopar.progress import Progress, reporting
from autopar.rules.registry import registered_rules
from autopar.runtime.load import load
from autopar.runtime.planned_step import PlannedStep

MAX_ARRAY_BYTES = 2**53  # of one array, so that the sum over a thousand of them is below 2**63


@dataclass(frozen=True, slots=True)
class DriverEffort:
    """Which of the two compilers is asked, and how long planning may take."""

    # default time limit of planning (s), at least (not measured)
    planning_seconds: float = 5.0
    # the same per operation (s), which is about the time that compilation takes; the larger of both counts (not
    # measured)
    seconds_per_op: float = 2e-3
    # default time limit of one problem in a search for stages (s; guards against rare problems)
    stage_solver_seconds: float = 60.0
    # assumed least ratio of the step time of planned stages to the step time that the inter-operator search forecasts
    # (0.94 to 1.05 on T5, BERT, Conformer, a speech model and GPT-39B on p3.16xlarge and TPU v5e; `bench sensitivity`,
    # 2026-11: no effect on small programs)
    planned_over_forecast: float = 0.9
    # a step is planned on one mesh before the search for stages, if the memory that it needs without fusion is at most
    # this many times that of the cluster (chosen on BERT-large, whose plan peaks at a third of its memory without
    # fusion; `bench sensitivity`, 2026-11: no effect on small programs)
    unfused_over_peak: float = 3.0
    # how many times the memory of all devices a step as written must need for stages to be searched even on one host
    # (not measured)
    far: float = 2.0


DRIVER = DriverEffort()

#: Number of graphs whose rewriting into microbatches is cached: each mesh asks for the same rematerialised graphs.
SPLIT_CACHE_SIZE = 4


def plan_step(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], s: Settings, local: bool
) -> PlannedStep:
    """Trace and plan a step.

    Args:
        fn: the step.
        args: its positional arguments, or their shapes.
        kwargs: its keyword arguments.
        s: the settings.
        local: the plan is to run on the devices of this process.

    Raises:
        AutoparError: for its subclasses see `autopar.parallelize`.
    """
    with collector_paused(), reporting(name_of(fn), s.progress) as report:
        begin = time.perf_counter()
        report("tracing")
        traced = trace(fn, *args, static_argnums=s.static_argnums, **kwargs)
        _check_sizes(name_of(fn), verify_graph(traced.graph))
        call = _Call(fn, traced, args, local, time.perf_counter() - begin, report)
        with jax_compat.automatic_axes():
            if s.plan is not None:
                given_plan = argnums.donating_no_more(s.plan, args, s)
                return load(name_of(fn), traced, given_plan, s.mesh, s.cluster)
            if s.pipelined:
                return _StagesAsGiven(call, s).plan()
            if not traced.pins and _searches_stages(s, traced.graph):
                return _search_pipelines(call, s)
            check_one_stage(s)
            return _plan_one_mesh(call, s)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call to be planned.

    Attributes:
        fn, traced, args: the function, its trace and the arguments.
        local: the plan is to run on the devices of this process.
        trace_s: seconds that tracing took.
        report: prints progress.
    """

    fn: Callable[..., Any]
    traced: Traced
    args: Sequence[Any]
    local: bool
    trace_s: float
    report: Progress


def _check_sizes(name: str, graph: Graph) -> None:
    """ArgumentError for the first value of more than `MAX_ARRAY_BYTES`."""
    if max((t.nbytes for t in graph.types), default=0) <= MAX_ARRAY_BYTES:
        return
    value = next(v for v, t in enumerate(graph.types) if t.nbytes > MAX_ARRAY_BYTES)
    op, path = graph.producers.get(value), graph.names.get(value)
    what = f"the result of {op.name} at {op.source}" if op is not None else f"argument '{path}'" if path else "a value"
    raise ArgumentError(
        f"{what} of {name} is {graph.types[value]}, more than the {MAX_ARRAY_BYTES:.1e} bytes an array may have"
    )


def _plan_one_mesh(call: _Call, s: Settings) -> PlannedStep:
    """The plan with the shortest step among the candidate meshes; prints its warnings."""
    best = _try_one_mesh(call, s)
    assert best is not None
    for warning in best.warnings:
        warn(f"{name_of(call.fn)}: {warning}")
    return best


def _try_one_mesh(call: _Call, s: Settings, cutoff: float = math.inf) -> PlannedStep | None:
    """The plan with the shortest step among the candidate meshes; None if it takes `cutoff` (s) or longer. Silent."""
    return _OneMeshPlanner(call, s).plan(cutoff)


class _OneMeshPlanner:
    """Plans a step on the candidate meshes, with the number of microbatches that the settings give.

    Raises:
        ArgumentError, MicrobatchError: the batch does not split into microbatches, or divides by no axis of any mesh.
    """

    def __init__(self, call: _Call, s: Settings) -> None:
        self._call, self._candidates = call, meshes.targets(_mesh(call.traced, s), s.cluster, local=call.local)
        argnums.check_batch(name_of(call.fn), call.traced, call.args, s, self._candidates)
        self._count, self._batch = count, batch = argnums.microbatches(call.traced.graph, call.args, s)
        devices, self._own = self._candidates[0].logical.size, s.per_microbatch

        @lru_cache(maxsize=SPLIT_CACHE_SIZE)
        def split(graph: Graph) -> Graph:
            return accumulate_gradients(
                replace(call.traced, graph=graph), count, batch, devices, s.per_microbatch
            ).graph

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
        """Step time (s) of the best plan that is quickly found, and whether it has no remat and no offload."""
        cached, _ = self._cached()
        if cached is None:
            return self._search.expected()
        fits = memory_policy.fits(
            cached.stages[0].peak_memory_bytes, self._candidates[0].logical, self._options.memory_budget
        )
        return (cached.step_time_s, not cached.remat and not cached.offloaded) if fits else (math.inf, False)

    def plan(self, cutoff: float = math.inf) -> PlannedStep | None:
        """The plan with the shortest step; None if it takes `cutoff` (s) or longer."""
        answer = self._planned(cutoff)
        if answer is None:
            return None
        plan, plan_warnings = answer
        names, sizes = plan.mesh_names, plan.mesh_sizes
        (target,) = (t for t in self._candidates if t.logical.names == names and t.logical.sizes == sizes)
        step = self._parts.step
        if self._count > 1:
            own, batch = self._own, self._batch
            hashed = graph_hash(step.graph)
            plan = replace(plan, graph_hash=hashed, num_microbatches=self._count, batch=batch, per_microbatch=own)
        best = PlannedStep(self._traced, plan, target, self._rules, plan_warnings)
        if best.plan.remat:
            best = replace(best, traced=apply_rewrites(step, best.plan))
        if rewritten := rewritten_hash(step, best.traced):
            (stage,) = best.plan.stages
            best = replace(best, plan=replace(best.plan, stages=(replace(stage, graph_hash=rewritten),)))
        return best

    def _planned(self, cutoff: float) -> tuple[Plan, tuple[str, ...]] | None:
        """The best plan of the candidate meshes, from the cache if it is there, and its warnings."""
        begin = time.perf_counter()
        cached, cache_key = self._cached()
        if cached is not None:
            return replace(cached, phases={"trace": self._call.trace_s, "cache": time.perf_counter() - begin}), ()
        best = self._search.best(cutoff)
        if best is None:
            return None
        plan = one_mesh.export(best)
        plan = replace(plan, phases={"trace": self._call.trace_s, **plan.phases})
        if cache_key is not None and math.isinf(cutoff):
            plan_cache.write(cache_key, plan, self._options.time_limit)
        return plan, best.solution.warnings

    def _cached(self) -> tuple[Plan | None, str | None]:
        """The plan in the cache, or None, and its key; both None without a cache."""
        if plan_cache.folder() is None:
            return None, None
        first, *further_candidates = self._candidates
        further = {"candidates": [candidate.logical for candidate in self._candidates]} if further_candidates else {}
        cache_key = plan_cache.question(self._traced, first.logical, first.cluster.name, self._options, further)
        return plan_cache.read(cache_key), cache_key


def _time_limit(graph: Graph) -> float:
    """Default time limit of planning in seconds."""
    return max(DRIVER.planning_seconds, DRIVER.seconds_per_op * sum(1 for _ in graph.walk()))


def _offload(s: Settings, target: Target, local: bool) -> str:
    """The option `offload`; "none" in place of "auto" where the devices here cannot address host memory.

    Raises:
        ArgumentError: the option is "all", and the devices here cannot address host memory.
    """
    kinds = meshes.memory_kinds(target) if local else (jax_compat.HOST_MEMORY,)
    if jax_compat.HOST_MEMORY in kinds:
        return s.offload
    if s.offload == choose_offload.ALL:
        raise ArgumentError(
            f"offload='all' needs devices that can address memory of the kind '{jax_compat.HOST_MEMORY}'; those here "
            f"have {', '.join(map(repr, kinds)) or 'none that JAX tells apart'}. Use offload='auto' or 'none'."
        )
    return choose_offload.NONE


def _searches_stages(s: Settings, graph: Graph) -> bool:
    """Whether stages and microbatches are to be searched.

    They are with "search", and with "auto" if links between hosts are slow, or if a step as written is far too large.
    A step with a `shard_map` has one stage, because the map runs over the user's own mesh.
    """
    if s.mesh is not None or s.plan is not None or s.memory_budget == "min" or s.offload == choose_offload.ALL:
        return False
    if pipelines.shard_map_of(graph) is not None:
        return False
    if s.stages == "search":
        return True
    if s.stages != "auto" or s.schedule == "none":
        return False
    return (s.cluster is not None and s.cluster.hosts > 1) or _is_far_too_large(s, graph)


def _is_far_too_large(s: Settings, graph: Graph) -> bool:
    """Whether a step needs more than `DRIVER.far` times the memory of all devices, without options for it."""
    if s.memory_budget is not None or s.num_microbatches != "auto" or not pipelines.has_backward(graph):
        return False
    return not pipelines.fits_evenly(graph, s.cluster or Cluster.local(), DRIVER.far)


def _pipeline_options(s: Settings) -> PipelineOptions:
    return PipelineOptions(s.stages, s.schedule, s.num_microbatches, s.per_microbatch, s.remat, s.memory_budget)


def _search_pipelines(call: _Call, s: Settings) -> PlannedStep:
    """The plan of the best pipeline, or on one mesh where that is no slower; from the cache if it is there."""
    cluster = s.cluster or Cluster.local()
    begin = time.perf_counter()
    options = _stage_options(s)
    cache_key = None
    if plan_cache.folder() is not None:
        whole = cluster.logical_mesh((cluster.num_devices,))
        cache_key = plan_cache.question(call.traced, whole, repr(cluster), options, _search_settings(s))
        cached = plan_cache.read(cache_key)
        if cached is not None:
            cached = replace(cached, phases={"trace": call.trace_s, "cache": time.perf_counter() - begin})
            with contextlib.suppress(PlanMismatchError):  # the devices here may lack the host memory that it needs
                return _load_cached(call, s, cached)
    step = pipelines.opening(call.traced, argnums.named_batch(call.args, s), cluster, _pipeline_options(s))
    phases = {"trace": call.trace_s, "inter_op": time.perf_counter() - begin}
    one_mesh, expected, as_written = _one_microbatch(call, s, cluster, indivisible=step is None or step.is_whole)

    def planner_for(count: int | str) -> Callable[[float], PlannedStep | None]:
        """A function from a cutoff (s) to the plan on one mesh in `count` microbatches, or None."""
        if count in (1, "auto") and one_mesh is not None:
            return one_mesh.plan
        return partial(_try_one_mesh, call, replace(s, num_microbatches=count))

    search = None if step is None else pipelines.search_of(step, cluster, options)
    best, tried = None, set[int | str]()
    # forecasts above the first limit (s) cannot beat the plan on one mesh; the second round has no limit
    first_limit = () if step is None or math.isinf(expected) else (expected / DRIVER.planned_over_forecast,)
    for limit in (*first_limit, math.inf):
        call.report(f"searching stages, microbatches and schedules for {cluster.num_devices} devices of {cluster.name}")
        searching, fewest = time.perf_counter(), 2 if as_written else 1
        choice = None if step is None or search is None else pipelines.searched(step, search, limit, fewest)
        stages = _assemble_choice(call, s, choice, cluster)
        phases["inter_op"] += time.perf_counter() - searching
        if stages is not None:
            staged = _plan_stages(call, s, *stages, phases)
            phases = dict(staged.plan.phases)
            best = staged if best is None else _faster(staged, best, s)
        if best is None or s.schedule == "auto":
            counts = (1,) if as_written else _microbatch_counts(s, choice, call.traced.graph, cluster)
            counts = counts if best is not None else counts or (s.num_microbatches,)
            try:
                best = _best_on_one_mesh(s, [planner_for(n) for n in counts if n not in tried], best)
            except AutoparError:
                if as_written or math.isinf(limit):
                    raise
                continue
            tried.update(counts)
        if as_written or (_fits(best, s) and best.plan.step_time_s < limit):
            break  # otherwise the plan is slower than its forecast, and the search left out pipelines above the limit
    assert best is not None
    if isinstance(s.memory_budget, float) and not _fits(best, s):
        raise budget_error(best.plan, call.traced.graph, s.memory_budget)
    phases["one_mesh"] = time.perf_counter() - begin + call.trace_s - sum(phases.values())
    plan = replace(best.plan, phases=phases)
    if step is not None and search is not None and plan.pipelined and _fits(best, s):
        call.report("bounding the step of every pipeline")
        bounding = time.perf_counter()
        plan = pipeline_plan.bounded_by(plan, pipelines.least_seconds(step, search, plan.step_time_s))
        plan = replace(plan, phases={**phases, "lower_bound": time.perf_counter() - bounding})
    best = replace(best, plan=plan)
    for warning in best.warnings:
        warn(f"{name_of(call.fn)}: {warning}")
    if cache_key is not None:
        plan_cache.write(cache_key, best.plan, options.time_limit)
    return best


def _one_microbatch(
    call: _Call, s: Settings, cluster: Cluster, *, indivisible: bool
) -> tuple[_OneMeshPlanner | None, float, bool]:
    """Planner on one mesh with one microbatch, the expected step time (s), and whether that has no remat or offload.

    This plan is quickly found, and few pipelines are forecast to beat it.

    Args:
        call: the step.
        s: the settings.
        cluster: its devices.
        indivisible: the step cannot be split into microbatches, so that its size does not matter.

    Returns:
        None and inf, if the step is too large or the settings exclude such a plan; inf also if no plan is known to fit.
    """
    tried = s.num_microbatches in ("auto", 1) and (
        indivisible or pipelines.fits_evenly(call.traced.graph, cluster, DRIVER.unfused_over_peak)
    )
    if s.schedule == "auto" and tried:
        with contextlib.suppress(AutoparError):  # a step that cannot be planned on one mesh may still have stages
            planner = _OneMeshPlanner(call, replace(s, num_microbatches=1))
            return (planner, *planner.expected())
    return None, math.inf, False


def _assemble_choice(
    call: _Call, s: Settings, choice: pipelines.StageChoice | None, cluster: Cluster
) -> tuple[Target, Pipelined] | None:
    """The stages that the search chose, on a mesh of all devices; None if it chose one stage.

    None also if no stage has a backward pass, because the whole backward pass needs the whole batch.

    Raises:
        ScheduleError: no stage has a backward pass, and the settings ask for a schedule.
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


def _stage_options(s: Settings) -> Options:
    """The solver options for the layouts of stages."""
    limit, rules = s.time_limit or DRIVER.stage_solver_seconds, registered_rules()
    return Options(solver=s.solver, time_limit=limit, gap=s.gap, pins=s.pins, rules=rules)


def _microbatch_counts(
    s: Settings, choice: pipelines.StageChoice | None, graph: Graph, cluster: Cluster
) -> tuple[int | str, ...]:
    """Numbers of microbatches with which to plan one mesh.

    The number that the search chose, if it chose one stage; and 1 if the step may fit so, first if the step fits
    without remat.
    """
    if choice is None or isinstance(s.num_microbatches, int):
        return (s.num_microbatches,)
    chosen = () if choice.borders else (choice.microbatches,)
    if pipelines.fits_evenly(graph, cluster):
        return tuple(dict.fromkeys((1, *chosen)))
    return tuple(dict.fromkeys((*chosen, 1))) if pipelines.may_fit(graph, cluster, s.remat) else chosen


def _best_on_one_mesh(
    s: Settings, planners: Sequence[Callable[[float], PlannedStep | None]], staged: PlannedStep | None
) -> PlannedStep:
    """The best of a pipeline and several plans on one mesh; plans that fit into memory come first.

    An error of one planner, such as a batch that the mesh axes do not divide, is ignored if there is another plan.

    Args:
        s: the settings.
        planners: functions from a cutoff (s) to a plan that takes less; None if there is none.
        staged: the best pipeline, if any.

    Raises:
        AutoparError: the first error, if there is no plan at all.
    """
    errors, best = list[AutoparError](), staged
    for plan in planners:
        try:
            one_mesh = plan(best.plan.step_time_s if best is not None and _fits(best, s) else math.inf)
        except AutoparError as error:
            errors.append(error)
        else:
            best = one_mesh if best is None else _faster(best, one_mesh, s)
    if best is None:
        raise errors[0]
    return best


def _faster(first: PlannedStep, second: PlannedStep | None, s: Settings) -> PlannedStep:
    """The faster of two plans that fit, or the one that fits; the second if neither does."""
    if second is None:
        return first
    if _fits(first, s) and _fits(second, s):
        return min(first, second, key=lambda step: step.plan.step_time_s)
    return first if _fits(first, s) else second


def _fits(step: PlannedStep, s: Settings) -> bool:
    """Whether the peak memory of every device is within the budget."""
    return memory_policy.fits(step.plan.peak_memory_bytes, step.target.logical, s.memory_budget)


#: Settings that the search for a pipeline depends on, besides those in `Options`.
_SEARCH_SETTINGS = (
    *("batch_argnums", "donate_argnums", "memory_budget", "remat", "offload", "num_microbatches", "stages", "schedule"),
    "per_microbatch",
)


def _search_settings(s: Settings) -> Mapping[str, object]:
    return {f"search {name}": getattr(s, name) for name in _SEARCH_SETTINGS}


def _load_cached(call: _Call, s: Settings, cached: Plan) -> PlannedStep:
    """A plan from the cache; checked and prepared for execution only if it is to run here."""
    if call.local:
        return load(name_of(call.fn), call.traced, cached, s.mesh, s.cluster)
    (target,) = meshes.targets(cached.mesh, s.cluster, local=False)
    return PlannedStep(call.traced, cached, target, registered_rules())


class _StagesAsGiven:
    """Plans a pipeline with as many stages as the settings say, on the given mesh or one axis of all devices.

    With remat="auto" and offload="auto", stages that do not fit into memory rematerialise layers or offload state,
    whichever takes less time. With memory_budget="min" the limit is the least peak that is found.
    """

    def __init__(self, call: _Call, s: Settings) -> None:
        asked, self._graph = _pipeline_options(s), call.traced.graph
        pipelines.check_options(asked, self._graph)
        candidates = meshes.targets(_mesh(call.traced, s), s.cluster, local=call.local)
        self._call, self._s, self._target = call, s, candidates[0]
        pipeline = pipelines.pipelined(self._graph, argnums.named_batch(call.args, s), self._target, asked)
        option = _offload(s, self._target, call.local)
        positions = choose_offload.allowed(self._graph, self._target.logical.device, _donated(call, s), option)
        self._offloadable = offloadable_in_stages(pipeline.stages, positions)
        always = self._offloadable if option == choose_offload.ALL else ()
        self._pipeline = replace(pipeline, choice=replace(pipeline.choice, offloaded=always))
        self._planned: list[PlannedStep] = []

    def plan(self) -> PlannedStep:
        """The plan.

        Raises:
            MemoryBudgetError: none fits into the budget. Without a budget, the smallest is the plan, with a warning.
        """
        if self._s.memory_budget == "min":
            least = savings.smallest(*self._can_save, partial(self._attempt, 0.0))
            return self._fastest(least.peak) or least.plan
        nbytes = memory_policy.memory_bytes(self._target.logical, self._s.memory_budget)
        return self._fastest(nbytes) or _closest(self._call, self._s, self._planned)

    def _fastest(self, nbytes: float) -> PlannedStep | None:
        """The fastest plan within a limit in bytes per device; None if none is found."""
        return SavingsSearch(nbytes, *self._can_save, partial(self._attempt, nbytes), self._seconds_copying).best()

    def _seconds_copying(self, stage: int, nbytes: float) -> float:
        """Seconds in which a stage copies so many bytes to a device and back."""
        return self._state[stage].seconds(nbytes)

    @cached_property
    def _can_save(self) -> tuple[tuple[int, ...], Sequence[Sequence[float]]]:
        """Of every stage, the number of layers that may be recomputed, and the bytes of the steps of its state."""
        return tuple(map(len, self._layers)), [candidates.step_bytes() for candidates in self._state]

    @cached_property
    def _layers(self) -> Sequence[Sequence[int]]:
        """The layers of every stage that may be recomputed."""
        layers = pipelines.recomputable_layers(self._graph, self._pipeline) if self._s.remat == choose.AUTO else ()
        return layers or [()] * len(self._pipeline.stages.stages)

    @cached_property
    def _state(self) -> Sequence[OffloadCandidates]:
        """The state of every stage that may be offloaded, besides what is in any case."""
        positions = () if self._pipeline.choice.offloaded else self._offloadable
        return pipelines.offload_candidates(self._pipeline, positions)

    def _attempt(self, nbytes: float, saved: Savings) -> Attempt[PlannedStep]:
        """The plan with these savings and a limit in bytes per device; 0: of least memory."""
        pipeline = self._pipeline
        recomputed = {layer for layers, n in zip(self._layers, saved.layers, strict=True) for layer in layers[:n]}
        if recomputed:
            pipeline = pipelines.recomputing(self._graph, pipeline, self._target, recomputed)
        offloaded = [i for state, n in zip(self._state, saved.state, strict=True) if n for i in state.steps()[n]]
        if offloaded:
            pipeline = replace(pipeline, choice=replace(pipeline.choice, offloaded=tuple(offloaded)))
        # where more layers can be recomputed, that is quicker to try than layouts of the least memory
        thorough = [n == len(layers) or not nbytes for layers, n in zip(self._layers, saved.layers, strict=True)]
        pipeline = pipeline.within(nbytes, thorough)
        phases = self._planned[-1].plan.phases if self._planned else {"trace": self._call.trace_s}
        step = _plan_stages(self._call, self._s, self._target, pipeline, phases)
        self._planned.append(step)
        stages = step.plan.stages
        peaks, ranks = [stage.peak_memory_bytes for stage in stages], [stage.rank for stage in stages]
        return Attempt(step, step.plan.step_time_s, peaks, ranks)


def _closest(call: _Call, s: Settings, attempts: Sequence[PlannedStep]) -> PlannedStep:
    """The smallest of plans in stages that do not fit, with a warning; MemoryBudgetError if a budget was given."""
    smallest = min(attempts, key=lambda step: step.plan.peak_memory_bytes)
    if isinstance(s.memory_budget, float):
        budget = memory_policy.memory_bytes(smallest.target.logical, s.memory_budget)
        raise budget_error(smallest.plan, call.traced.graph, budget)
    warn(
        f"{name_of(call.fn)}: the plan needs {size(smallest.plan.peak_memory_bytes)} per device, more than the "
        f"{size(memory_policy.usable_bytes(smallest.target.logical))} that are there, and none in "
        f"{len(smallest.plan.stages)} stages that was found needs less"
    )
    return smallest


def _plan_stages(
    call: _Call, s: Settings, target: Target, pipeline: Pipelined, phases: Mapping[str, float]
) -> PlannedStep:
    """The plan of a step whose stages are known; `phases`: seconds of planning so far, by phase."""
    begin = time.perf_counter()
    call.report(f"planning {len(pipeline.stages.stages)} stages in {pipeline.choice.microbatches} microbatches")
    traced = call.traced
    run, rules = replace(traced, graph=pipeline.layers.graph), registered_rules()
    time_limit = s.time_limit or _time_limit(traced.graph)
    options = replace(_stage_options(s), time_limit=time_limit / len(pipeline.stages.stages))
    layouts = pipelines.plan_layouts(run, pipeline, options)
    plan = pipeline_plan.make_plan(traced.graph, pipeline, layouts, target, _donated(call, s), 0.0)
    plan = replace(plan, phases={**phases, "stages": phases.get("stages", 0.0) + time.perf_counter() - begin})
    call.report(f"{len(plan.stages)} stages take {seconds(plan.step_time_s)}")
    return PlannedStep(run, plan, target, rules, pipeline=pipeline, layouts=layouts)


def _donated(call: _Call, s: Settings) -> tuple[int, ...]:
    """Positions of the argument leaves whose buffers the step may reuse."""
    donated = argnums.donated(call.traced, call.args, s)
    return tuple(sorted(match_state(call.traced.graph).values())) if isinstance(donated, str) else donated


def _mesh(traced: Traced, s: Settings) -> Any:
    """The mesh to plan for: the given one, or an Explicit one if the step constrains shardings; None: search."""
    constrained = traced.pins or any(op.name == "sharding_constraint" for op in traced.graph.walk())
    return traced.mesh if s.mesh is None and constrained else s.mesh


def warn(message: str) -> None:
    """An AutoparWarning that points to the user's line."""
    warnings.warn(message, AutoparWarning, stacklevel=_user_stacklevel())


def _user_stacklevel() -> int:
    """The `stacklevel` at which a warning of the caller points to the user's line."""
    files = [frame.f_code.co_filename for frame in jax_compat.frames()]
    # `warnings.warn` counts from `warn`, one frame above this one, as 1
    return next((level for level, file in enumerate(files) if jax_compat.is_own(file)), len(files) - 1)
