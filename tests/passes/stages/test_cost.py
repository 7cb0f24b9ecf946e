"""Times of planned stages add up to the optimizer's objective; bytes to those of the arrays."""

from __future__ import annotations

from typing import Any

import pytest

from autopar import api, zoo
from autopar.cost_models.pipeline import simulate
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.passes.layers import find as layers_pass
from autopar.passes.microbatch import split as split_pass
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.remat.options import Options
from autopar.passes.stages.cost import stage_times
from autopar.passes.stages.divide import divide
from autopar.passes.stages.graph import stage_graph
from autopar.passes.stages.plan import StageProblem
from autopar.passes.stages.plan_all import StagePlans, pipeline_times, plan_stages
from autopar.rules import rules_of
from autopar.schedules import Size, make
from tests.passes.stages.test_graph import COUNT, staged
from tests.support.traces import traced


def mesh(shape: tuple[int, ...] = (2, 2), beta: float = 1e-9) -> LogicalMesh:
    return Cluster.custom(shape, 1e-7, beta, 1e10, 1e11, 10**10).logical_mesh(shape)


def plans_of(name: str, on: LogicalMesh, **options: Any) -> StagePlans:
    stages, _, traced = staged(name, batch=32, **options)
    return plan_stages(stages, traced.in_avals, [on] * len(stages.stages))


@pytest.mark.parametrize(
    ("name", "beta", "weights"),
    [("mlp-toy", 1e-8, True), ("gpt-toy", 1e-11, False), ("gpt-toy", 1e-8, True), ("gpt-toy-remat", 1e-9, False)],
)
def test_passes_and_updates_add_up_to_the_objective(name: str, beta: float, weights: bool) -> None:
    for plan in plans_of(name, mesh(beta=beta), weights=weights).plans:
        assert stage_times(plan).seconds(COUNT) == pytest.approx(plan.solution.objective, rel=0.01)
        assert stage_times(plan).seconds(COUNT) <= plan.solution.objective * (1 + 1e-9)


def test_gradients_are_reduced_in_the_update() -> None:
    """With all else replicated or cut by the batch, what an update communicates is its gradients, once."""
    for plan in plans_of("mlp-toy", mesh((4,), beta=1e-8)).plans:
        times = stage_times(plan)
        sums = [v for v in plan.graph.completed_in if -2 in (plan.layout(plan.graph.local[v]) or ())]  # pyright: ignore[reportArgumentType]
        assert bool(times.reduce) == bool(sums)


def test_one_device_has_no_one_to_talk_to() -> None:
    times = pipeline_times(plans_of("gpt-toy", mesh((1,))))
    assert times.reduce == (0, 0)
    assert min(times.forward) > 0
    assert min(times.backward) > 0
    assert {*times.border} == {(0, 1), (1, 0)}


def test_the_simulator_takes_them() -> None:
    plans = plans_of("gpt-toy", mesh())
    times = pipeline_times(plans)
    schedule = make("1f1b", Size(2, COUNT), plans.stages.borders)
    seconds = simulate(schedule, times).seconds
    alone = [stage_times(plan).seconds(COUNT) for plan in plans.plans]
    assert max(alone) <= seconds <= sum(alone)


@pytest.mark.parametrize("name", ["gpt-toy", "moe-toy", "t5-toy"])
def test_a_step_in_one_stage_takes_what_it_takes_on_one_mesh(name: str) -> None:
    """Sums of gradients, which both read and write in every microbatch, included."""
    count, on = 8, mesh((4,))
    model = zoo.build(name)
    step = traced(name)
    batch = batch_leaves(step.graph, 1)
    split = split_pass.split(step.graph, count, batch)
    graph = stage_graph(divide(split, layers_pass.find(step.graph), []), 0, step.in_avals, StepPrograms(split))
    stage = StageProblem(graph, on, rules_of(graph.graph), Options(gap=0.0))
    cluster = Cluster.custom((4,), 1e-7, 1e-9, 1e10, 1e11, 10**10)
    plan = api.plan(
        model.step, *model.abstract_args(), cluster=cluster, mesh=(4,), num_microbatches=count, batch_argnums=1, gap=0.0
    )
    assert stage.fastest.objective == pytest.approx(plan.step_time_s, rel=5e-3)
