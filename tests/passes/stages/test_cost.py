"""Times of planned stages add up to the optimizer's objective; bytes to those of the arrays."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cost_models.pipeline import simulate
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.passes.stages.cost import stage_times
from autopar.passes.stages.plan_all import StagePlans, pipeline_times, plan_stages
from autopar.schedules import Size, make
from tests.passes.stages.test_graph import COUNT, staged


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
