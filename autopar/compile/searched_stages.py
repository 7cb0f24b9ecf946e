"""The best pipeline that the inter-op search finds, or one mesh where that is no slower.

one mesh, one microbatch     quickly forecast, where the step may fit; few pipelines promise less    -> _one_microbatch
stages                       searched below that forecast, and planned as a whole
one mesh                     with the numbers of microbatches that the search leaves                -> _best_on_one_mesh
once more without a limit    if the plan takes longer than its forecast
one mesh                     with few microbatches, if a pipeline is best or no plan fits            -> few_microbatches
a bound on all of these      the plan's gap
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar import argnums
from autopar.compile.call import Call, warn_of
from autopar.compile.one_mesh import Planners, faster, few_microbatches, fits, planners
from autopar.compile.stages import pipeline_options, plan_stages, stage_options
from autopar.errors import AutoparError, PlanMismatchError, ScheduleError
from autopar.hardware import meshes
from autopar.hardware.cluster import Cluster
from autopar.hardware.meshes import Target
from autopar.ir.graph import Graph
from autopar.ir.trace import Traced
from autopar.options import Settings, name_of
from autopar.passes.inter_op import pipelines
from autopar.passes.inter_op.backward_passes import has_backward
from autopar.passes.inter_op.lower_bound import PIPELINE_BOUND
from autopar.passes.inter_op.pipelines import Pipelined
from autopar.passes.remat import choose_offload
from autopar.plans import cache as plan_cache
from autopar.plans.builders import pipeline as pipeline_plan
from autopar.plans.plan import Plan
from autopar.plans.stage_budget import budget_error
from autopar.rules import manual
from autopar.rules.registry import registered_rules
from autopar.runtime.load import load
from autopar.runtime.planned_step import PlannedStep


@dataclass(frozen=True, slots=True)
class SearchedStagesEffort:
    """Whether stages or one mesh are planned first, and how long each may take."""

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


SEARCHED_STAGES = SearchedStagesEffort()


def excludes_search(s: Settings, traced: Traced) -> str | None:
    """What excludes a search for stages, in words; None: nothing.

    A step with a `shard_map` has one stage, because the map runs over the user's own mesh.
    """
    reasons = {
        "mesh=": s.mesh is not None,
        "memory_budget='min'": s.memory_budget == "min",
        f"offload='{choose_offload.ALL}'": s.offload == choose_offload.ALL,
        "arguments on an Explicit mesh": bool(traced.pins),
        "a shard_map in the step": manual.first_call(traced.graph) is not None,
    }
    return next((reason for reason, excludes in reasons.items() if excludes), None)


def searches_stages(s: Settings, graph: Graph) -> bool:
    """Whether stages and microbatches are to be searched, if nothing excludes it.

    They are with "search", and with "auto" if links between hosts are slow, or if a step as written is far too large.
    """
    if s.stages == "search":
        return True
    if s.stages != "auto" or s.schedule == "none":
        return False
    return (s.cluster is not None and s.cluster.hosts > 1) or _is_far_too_large(s, graph)


def _is_far_too_large(s: Settings, graph: Graph) -> bool:
    """Whether a step needs more than `SEARCHED_STAGES.far` times the memory of all devices, without options for it."""
    if s.memory_budget is not None or s.num_microbatches != "auto" or not has_backward(graph):
        return False
    return not pipelines.fits_evenly(graph, s.cluster or Cluster.local(), SEARCHED_STAGES.far)


def search_stages(call: Call, s: Settings) -> PlannedStep:
    """The plan of the best pipeline, or on one mesh where that is no slower; from the cache if it is there."""
    cluster = s.cluster or Cluster.local()
    begin = time.perf_counter()
    options = stage_options(call, s, s.time_limit or SEARCHED_STAGES.stage_solver_seconds)
    cache_key = None
    if plan_cache.folder() is not None:
        whole = cluster.logical_mesh((cluster.num_devices,))
        cache_key = plan_cache.question(call.traced, whole, repr(cluster), options, _search_settings(s))
        cached = plan_cache.read(cache_key)
        if cached is not None:
            cached = replace(cached, phases={"trace": call.trace_s, "cache": time.perf_counter() - begin})
            with contextlib.suppress(PlanMismatchError):  # the devices here may lack the host memory that it needs
                return _load_cached(call, s, cached)
    step = pipelines.opening(call.traced, argnums.named_batch(call.traced, s), cluster, pipeline_options(s))
    phases = {"trace": call.trace_s, "inter_op": time.perf_counter() - begin}
    planner_for, graph = planners(call, s), call.traced.graph
    expected, as_written = _one_microbatch(s, graph, cluster, planner_for, step is None or step.is_whole)
    search = None if step is None else pipelines.search_of(step, cluster, options)
    best, failed, tried = None, None, set[int]()
    # forecasts above the first limit (s) cannot beat the plan on one mesh; the second round has no limit
    first_limit = () if step is None or math.isinf(expected) else (expected / SEARCHED_STAGES.planned_over_forecast,)
    for limit in (*first_limit, math.inf):
        call.report(f"searching stages, microbatches and schedules for {cluster.num_devices} devices of {cluster.name}")
        searching, fewest = time.perf_counter(), 2 if as_written else 1
        choice = None if step is None or search is None else pipelines.searched(step, search, limit, fewest)
        stages = _assemble_choice(call, s, choice, cluster)
        phases["inter_op"] += time.perf_counter() - searching
        if stages is not None:
            staged = plan_stages(call, s, *stages, phases)
            phases = dict(staged.plan.phases)
            best = staged if best is None else faster(staged, best, s)
        if best is None or s.schedule == "auto":
            counts = (1,) if as_written else _microbatch_counts(s, choice, graph, cluster)
            counts = counts if best is not None else counts or (_given_count(s),)
            untried = [n for n in counts if n not in tried]
            tried.update(counts)
            try:
                best = _best_on_one_mesh(s, untried, planner_for, best) if untried else best
            except AutoparError as error:
                failed = error
        if as_written or (best is not None and fits(best, s) and best.plan.step_time_s < limit):
            break  # otherwise the plan is slower than its forecast, and the search left out pipelines above the limit
    if s.schedule == "auto":
        best = few_microbatches(s, best, tried, planner_for)
    if best is None:
        assert failed is not None
        raise failed
    if isinstance(s.memory_budget, float) and not fits(best, s):
        raise budget_error(best.plan, graph, s.memory_budget)
    phases["one_mesh"] = time.perf_counter() - begin + call.trace_s - sum(phases.values())
    plan = replace(best.plan, phases=phases)
    # the gap of one mesh is that of its layouts; where it is small, pipelines are not bounded
    is_open = plan.pipelined or plan.gap > PIPELINE_BOUND.gap
    if step is not None and search is not None and is_open and fits(best, s):
        call.report("bounding the step of every pipeline")
        bounding = time.perf_counter()
        bounded = pipeline_plan.bounded_by(plan, pipelines.least_seconds(step, search, plan.step_time_s))
        plan = min(bounded, plan, key=lambda p: p.gap)
        plan = replace(plan, phases={**phases, "lower_bound": time.perf_counter() - bounding})
    best = replace(best, plan=plan)
    warn_of(call, best)
    if cache_key is not None:
        plan_cache.write(cache_key, best.plan, options.time_limit)
    return best


def _one_microbatch(
    s: Settings, graph: Graph, cluster: Cluster, planner_for: Planners, indivisible: bool
) -> tuple[float, bool]:
    """Expected step time (s) on one mesh with one microbatch, and whether the plan has no remat or offload.

    This plan is quickly found, and few pipelines are forecast to beat it.

    Args:
        s: the settings.
        graph: the step.
        cluster: its devices.
        planner_for: planners on one mesh.
        indivisible: the step cannot be split into microbatches, so that its size does not matter.

    Returns:
        inf, if the step is too large, the settings exclude such a plan, or no plan is known to fit.
    """
    tried = s.num_microbatches in ("auto", 1) and (
        indivisible or pipelines.fits_evenly(graph, cluster, SEARCHED_STAGES.unfused_over_peak)
    )
    if s.schedule == "auto" and tried:
        with contextlib.suppress(AutoparError):  # a step that cannot be planned on one mesh may still have stages
            return planner_for(1).expected()
    return math.inf, False


def _assemble_choice(
    call: Call, s: Settings, choice: pipelines.StageChoice | None, cluster: Cluster
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


def _microbatch_counts(
    s: Settings, choice: pipelines.StageChoice | None, graph: Graph, cluster: Cluster
) -> tuple[int, ...]:
    """Numbers of microbatches with which to plan one mesh.

    The number that the search chose, if it chose one stage; and 1 if the step may fit so, first if the step fits
    without remat.
    """
    if choice is None or isinstance(s.num_microbatches, int):
        return (_given_count(s),)
    chosen = () if choice.borders else (choice.microbatches,)
    if pipelines.fits_evenly(graph, cluster):
        return tuple(dict.fromkeys((1, *chosen)))
    return tuple(dict.fromkeys((*chosen, 1))) if pipelines.may_fit(graph, cluster, s.remat) else chosen


def _given_count(s: Settings) -> int:
    """The number of microbatches on one mesh that the settings give."""
    return s.num_microbatches if isinstance(s.num_microbatches, int) else 1


def _best_on_one_mesh(
    s: Settings, counts: Sequence[int], planner_for: Planners, staged: PlannedStep | None
) -> PlannedStep:
    """The best of a pipeline and several plans on one mesh; plans that fit into memory come first.

    An error of one planner, such as a batch that the mesh axes do not divide, is ignored if there is another plan.

    Args:
        s: the settings.
        counts: numbers of microbatches.
        planner_for: planners on one mesh.
        staged: the best pipeline, if any.

    Raises:
        AutoparError: the first error, if there is no plan at all.
    """
    errors, best = list[AutoparError](), staged
    for count in counts:
        cutoff = best.plan.step_time_s if best is not None and fits(best, s) else math.inf
        try:
            one_mesh = planner_for(count).plan(cutoff)
        except AutoparError as error:
            errors.append(error)
        else:
            best = one_mesh if best is None else faster(best, one_mesh, s)
    if best is None:
        raise errors[0]
    return best


#: Settings that the search for a pipeline depends on, besides those in `Options`.
_SEARCH_SETTINGS = (
    *("batch_argnums", "donate_argnums", "memory_budget", "remat", "offload", "num_microbatches", "stages", "schedule"),
    "per_microbatch",
)


def _search_settings(s: Settings) -> Mapping[str, object]:
    return {f"search {name}": getattr(s, name) for name in _SEARCH_SETTINGS}


def _load_cached(call: Call, s: Settings, cached: Plan) -> PlannedStep:
    """A plan from the cache; checked and prepared for execution only if it is to run here."""
    if call.local:
        return load(name_of(call.fn), call.traced, cached, s.mesh, s.cluster)
    (target,) = meshes.targets(cached.mesh, s.cluster, local=False)
    return PlannedStep(call.traced, cached, target, registered_rules())
