"""Plans on one mesh: of all candidates, with the number of microbatches that the settings give.

Where they give none, that is one microbatch; if no plan fits so, the fewest with which one does     -> few_microbatches
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial

from autopar import argnums
from autopar.codegen.rewrites import accumulate_gradients, rewritten_hash
from autopar.compile.call import (
    Call,
    absolute_budget,
    default_time_limit,
    offload_option,
    state_leaves,
    wanted_mesh,
    warn_of,
)
from autopar.errors import AutoparError
from autopar.explain.surroundings import described
from autopar.hardware import meshes
from autopar.hardware.meshes import Target
from autopar.ir.graph import Graph, graph_hash
from autopar.options import Settings, name_of
from autopar.passes.mesh_search.planner import Parts
from autopar.passes.mesh_search.search import MeshSearch
from autopar.passes.remat import memory_policy
from autopar.passes.remat.choose import Unfit
from autopar.passes.remat.options import Options
from autopar.passes.remat.rewrite import rewrite
from autopar.plans import cache as plan_cache
from autopar.plans.builders import one_mesh
from autopar.plans.plan import Plan
from autopar.rules.registry import registered_rules
from autopar.runtime.planned_step import PlannedStep

#: Number of graphs whose rewriting into microbatches is cached: each mesh asks for the same rematerialised graphs.
SPLIT_CACHE_SIZE = 4


@dataclass(frozen=True, slots=True)
class OneMeshEffort:
    """How many microbatches are tried."""

    # most microbatches with which a step is planned on one mesh that does not fit with fewer, or beside a pipeline
    # (each doubling costs the bound of one mesh; an 8B transformer on 32 devices of TPU v5e fits with 2)
    most: int = 16
    # relative gain over a pipeline that the forecast of one mesh must promise before it is planned (forecasts are 2 to
    # 6% below the plans of GPT-2.6B, with 16 microbatches, and GPT-6.7B, with 8: GPT-2.6B on a p3 host takes 15 s more
    # for a step 0.2% shorter; 2026-11)
    promised: float = 0.03


ONE_MESH = OneMeshEffort()

#: Number of microbatches -> the planner on one mesh; AutoparError if the batch does not split into so many.
Planners = Callable[[int], "OneMeshPlanner"]


def plan_one_mesh(call: Call, s: Settings) -> PlannedStep:
    """The plan with the shortest step among the candidate meshes; prints its warnings."""
    try:
        best = few_microbatches(s, try_one_mesh(call, s), {1}, planners(call, s))
    except Unfit:
        best = few_microbatches(s, None, {1}, planners(call, s))
        if best is None:
            raise
    assert best is not None
    warn_of(call, best)
    return best


def try_one_mesh(call: Call, s: Settings, cutoff: float = math.inf) -> PlannedStep | None:
    """The plan with the shortest step among the candidate meshes; None if it takes `cutoff` (s) or longer. Silent."""
    return OneMeshPlanner(call, s).plan(cutoff)


def planners(call: Call, s: Settings) -> Planners:
    """The planners of a call, each made once."""
    return cache(lambda count: OneMeshPlanner(call, replace(s, num_microbatches=count)))


def few_microbatches(
    s: Settings, best: PlannedStep | None, tried: Collection[int], planner_for: Planners
) -> PlannedStep | None:
    """The better of a plan and a plan on one mesh with few microbatches.

    Numbers of microbatches are tried if the settings leave the number open, and the plan does not fit, is a pipeline,
    or has several. A number with which the step cannot be planned, because the batch does not divide or examples depend
    on each other, is left out.

    Args:
        s: the settings.
        best: the plan so far, if any.
        tried: numbers of microbatches with which one mesh is planned already.
        planner_for: the planners.
    """
    if s.num_microbatches != "auto" or s.memory_budget == "min":
        return best
    if best is None or not fits(best, s):
        return _first_that_fits(s, tried, planner_for) or best
    if best.plan.pipelined:
        return _beside_pipeline(s, best, tried, planner_for)
    return _fewer_microbatches(s, best, tried, planner_for)


def _counts(most: int, tried: Collection[int]) -> Iterator[int]:
    """Powers of two up to `most` that are not tried."""
    return (2**n for n in range(most.bit_length()) if 2**n not in tried)


def _first_that_fits(s: Settings, tried: Collection[int], planner_for: Planners) -> PlannedStep | None:
    """The plan with the fewest microbatches with which one fits."""
    for count in _counts(ONE_MESH.most, tried):
        with contextlib.suppress(AutoparError):
            step = planner_for(count).plan()
            if step is not None and fits(step, s):
                return step
    return None


def _beside_pipeline(s: Settings, best: PlannedStep, tried: Collection[int], planner_for: Planners) -> PlannedStep:
    """The better of a pipeline and the plan with the fewest microbatches that is forecast to fit.

    A pipeline is found with costs of each layer by itself; one mesh may take less. None is tried beside a pipeline that
    is faster than the quickly found plan with one microbatch, whatever memory that takes: more microbatches are slower.
    The forecast has to promise a gain; where no number is forecast to fit, the fewest microbatches are tried once.
    """
    limit, counts = best.plan.step_time_s, [*_counts(ONE_MESH.most, tried)]
    with contextlib.suppress(AutoparError):
        if planner_for(1).fastest() >= limit:
            return best
    expected, fewest = math.inf, next(iter(counts), None)
    for count in reversed(counts):
        with contextlib.suppress(AutoparError):
            seconds, _ = planner_for(count).expected()
            if math.isinf(seconds):
                break  # fewer microbatches take more memory
            expected, fewest = seconds, count
    if fewest is None or limit * (1 - ONE_MESH.promised) <= expected < math.inf:
        return best
    with contextlib.suppress(AutoparError):
        return faster(best, planner_for(fewest).plan(limit), s)
    return best


def _fewer_microbatches(s: Settings, best: PlannedStep, tried: Collection[int], planner_for: Planners) -> PlannedStep:
    """The better of a plan on one mesh that fits and the one with the fewer microbatches whose forecast is shortest.

    A search for stages adds up the memory of each layer by itself, and may choose more microbatches than needed. Half
    as many run with fewer launches and less traffic of weights, until they need recomputation. So numbers are forecast
    in falling order, while each promises a shorter step than the one before.
    """
    limit, chosen = best.plan.step_time_s, None
    for count in reversed([*_counts(best.plan.num_microbatches - 1, tried)]):
        with contextlib.suppress(AutoparError):
            expected, _ = planner_for(count).expected()
            if expected >= limit:
                break
            limit, chosen = expected, count
    if chosen is None:
        return best
    with contextlib.suppress(AutoparError):
        return faster(best, planner_for(chosen).plan(best.plan.step_time_s), s)
    return best


def faster(first: PlannedStep, second: PlannedStep | None, s: Settings) -> PlannedStep:
    """The faster of two plans that fit, or the one that fits; the second if neither does."""
    if second is None:
        return first
    if fits(first, s) and fits(second, s):
        return min(first, second, key=lambda step: step.plan.step_time_s)
    return first if fits(first, s) else second


def fits(step: PlannedStep, s: Settings) -> bool:
    """Whether the peak memory of every device is within the budget."""
    return memory_policy.fits(step.plan.peak_memory_bytes, step.target.logical, s.memory_budget)


def _divides(call: Call, s: Settings, count: int) -> bool:
    """Whether a step falls into so many microbatches, with which it is not planned where the number is left open."""
    if s.num_microbatches == "auto" and count <= ONE_MESH.most:
        return False
    try:
        OneMeshPlanner(call, replace(s, num_microbatches=count))
    except AutoparError:
        return False
    return True


class OneMeshPlanner:
    """Plans a step on the candidate meshes, with the number of microbatches that the settings give.

    Raises:
        ArgumentError, MicrobatchError: the batch does not split into microbatches, or divides by no axis of any mesh.
    """

    def __init__(self, call: Call, s: Settings) -> None:
        self._call, self._candidates = call, meshes.targets(wanted_mesh(call.traced, s), s.cluster, local=call.local)
        argnums.check_batch(name_of(call.fn), call.traced, s, self._candidates)
        self._count, self._batch = count, batch = argnums.microbatches(call.traced, s)
        devices, self._own = self._candidates[0].logical.size, s.per_microbatch

        @lru_cache(maxsize=SPLIT_CACHE_SIZE)
        def split(graph: Graph) -> Graph:
            return accumulate_gradients(
                replace(call.traced, graph=graph), count, batch, devices, s.per_microbatch
            ).graph

        self._parts = Parts(call.traced, split, count, partial(_divides, call, s))
        self._traced, self._rules = replace(call.traced, graph=split(call.traced.graph)), registered_rules()
        self._state = state_leaves(call, s)
        self._options = Options(
            solver=s.solver,
            time_limit=s.time_limit or default_time_limit(self._traced.graph),
            gap=s.gap,
            pins=s.pins,
            batch=argnums.named_batch(call.traced, s),
            donate=argnums.donated(call.traced, s),
            rules=self._rules,
            memory_budget=absolute_budget(s),
            remat=s.remat,
            offload=offload_option(s, self._candidates[0], call.local),
        )

    @cached_property
    def _search(self) -> MeshSearch:
        return MeshSearch(self._traced, self._candidates, self._options, self._parts, self._call.report)

    def fastest(self) -> float:
        """Step time (s) of the plan that is quickly found without regard to memory."""
        return self._search.fastest()

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
        if (answer := self._planned(cutoff)) is None:
            return None
        plan, graph, plan_warnings = answer
        step = self._parts.step
        if self._count > 1:
            own, batch = self._own, self._batch
            hashed = graph_hash(step.graph)
            plan = replace(plan, graph_hash=hashed, num_microbatches=self._count, batch=batch, per_microbatch=own)
        best = PlannedStep(replace(step, graph=graph), plan, self._target(plan), self._rules, plan_warnings)
        if rewritten := rewritten_hash(step, best.traced):
            (stage,) = best.plan.stages
            best = replace(best, plan=replace(best.plan, stages=(replace(stage, graph_hash=rewritten),)))
        return best

    def _target(self, plan: Plan) -> Target:
        """The candidate that a plan is for."""
        names, sizes = plan.mesh_names, plan.mesh_sizes
        (target,) = (t for t in self._candidates if t.logical.names == names and t.logical.sizes == sizes)
        return target

    def _planned(self, cutoff: float) -> tuple[Plan, Graph, tuple[str, ...]] | None:
        """The best plan of the candidate meshes, from the cache if it is there, its program, and its warnings."""
        begin = time.perf_counter()
        cached, cache_key = self._cached()
        if cached is not None:
            plan = replace(cached, phases={"trace": self._call.trace_s, "cache": time.perf_counter() - begin})
            return plan, self._parts.split(rewrite(self._parts.step.graph, plan.remat)), ()
        best = self._search.best(cutoff)
        if best is None:
            return None
        plan = one_mesh.export(best)
        plan = replace(plan, phases={"trace": self._call.trace_s, **plan.phases})
        plan = described(plan, self._traced.graph, self._target(plan), self._options.memory_budget, self._state)
        if cache_key is not None and math.isinf(cutoff):
            plan_cache.write(cache_key, plan, self._options.time_limit)
        return plan, best.draft.graph, best.solution.warnings

    def _cached(self) -> tuple[Plan | None, str | None]:
        """The plan in the cache, or None, and its key; both None without a cache."""
        if plan_cache.folder() is None:
            return None, None
        first, *further_candidates = self._candidates
        further = {"candidates": [candidate.logical for candidate in self._candidates]} if further_candidates else {}
        cache_key = plan_cache.question(self._traced, first.logical, first.cluster.name, self._options, further)
        return plan_cache.read(cache_key), cache_key
