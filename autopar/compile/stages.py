"""From a step in stages to its plan, for given and searched stages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from autopar import argnums
from autopar.compile.call import Call, absolute_budget, default_time_limit, donated_leaves, state_leaves
from autopar.explain.surroundings import described
from autopar.hardware.meshes import Target
from autopar.ir.text import seconds
from autopar.options import Settings
from autopar.passes.inter_op import pipelines
from autopar.passes.inter_op.pipelines import Pipelined, PipelineOptions
from autopar.passes.remat.options import Options
from autopar.plans.builders import pipeline as pipeline_plan
from autopar.rules.registry import registered_rules
from autopar.runtime.planned_step import PlannedStep


def pipeline_options(s: Settings) -> PipelineOptions:
    return PipelineOptions(s.stages, s.schedule, s.num_microbatches, s.per_microbatch, s.remat, absolute_budget(s))


def stage_options(call: Call, s: Settings, time_limit: float) -> Options:
    """The solver options for the layouts of stages; `time_limit`: seconds for one stage."""
    return Options(
        solver=s.solver,
        time_limit=time_limit,
        gap=s.gap,
        pins=s.pins,
        batch=argnums.named_batch(call.traced, s),
        rules=registered_rules(),
    )


def plan_stages(
    call: Call, s: Settings, target: Target, pipeline: Pipelined, phases: Mapping[str, float]
) -> PlannedStep:
    """The plan of a step whose stages are known; `phases`: seconds of planning so far, by phase."""
    begin = time.perf_counter()
    call.report(f"planning {len(pipeline.stages.stages)} stages in {pipeline.choice.microbatches} microbatches")
    traced = call.traced
    run, rules = replace(traced, graph=pipeline.layers.graph), registered_rules()
    time_limit = s.time_limit or default_time_limit(traced.graph)
    options = stage_options(call, s, time_limit / len(pipeline.stages.stages))
    layouts = pipelines.plan_layouts(run, pipeline, options)
    plan = pipeline_plan.make_plan(traced.graph, pipeline, layouts, target, donated_leaves(call, s), 0.0)
    plan = replace(plan, phases={**phases, "stages": phases.get("stages", 0.0) + time.perf_counter() - begin})
    plan = described(plan, traced.graph, target, absolute_budget(s), state_leaves(call, s))
    call.report(f"{len(plan.stages)} stages take {seconds(plan.step_time_s)}")
    return PlannedStep(run, plan, target, rules, pipeline=pipeline, layouts=layouts)
