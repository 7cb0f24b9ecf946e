"""Numbers of microbatches that are forecast and planned on one mesh, beside a plan that is there already."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.compile.one_mesh import OneMeshPlanner, few_microbatches
from autopar.errors import MicrobatchError
from autopar.hardware.cluster import Cluster
from autopar.options import Settings

MESH = Cluster.custom((4,), 1e-6, 1e-9, 1e12, 1e11, 10**9).logical_mesh((4,))


def planned(seconds: float, count: int, *, pipelined: bool = False, peak: int = 10**6) -> Any:
    plan = SimpleNamespace(
        step_time_s=seconds, num_microbatches=count, pipelined=pipelined, peak_memory_bytes=peak, memory_budget=None
    )
    return SimpleNamespace(plan=plan, target=SimpleNamespace(logical=MESH))


@dataclass
class Planners:
    """Planners with these forecasts by number of microbatches, each a twentieth below its plan.

    Attributes:
        forecasts: s; inf: does not fit, None: the step does not fall into so many.
        fastest: s of the plan with one microbatch, whatever memory that takes.
        forecast, planned: numbers of microbatches, in the order in which they were asked for.
    """

    forecasts: Mapping[int, float | None]
    fastest: float = 0.0
    forecast: list[int] = field(default_factory=list[int])
    planned: list[int] = field(default_factory=list[int])

    def __call__(self, count: int) -> OneMeshPlanner:
        seconds = self.forecasts.get(count)
        if seconds is None:
            raise MicrobatchError(f"the batch does not divide by {count}")

        def expected() -> tuple[float, bool]:
            self.forecast.append(count)
            return seconds, True

        def plan(cutoff: float = math.inf) -> Any:
            self.planned.append(count)
            return planned(1.05 * seconds, count) if 1.05 * seconds < cutoff else None

        return cast(OneMeshPlanner, SimpleNamespace(expected=expected, plan=plan, fastest=lambda: self.fastest))


def best(of: Planners, step: Any) -> Any:
    return few_microbatches(Settings(), step, (), of)


def test_fewer_microbatches_are_forecast_while_each_is_faster() -> None:
    of = Planners({1: 0.1, 2: 9.0, 4: 5.0, 8: 6.0, 16: 7.0, 32: 8.0})
    assert best(of, planned(10.0, 64)).plan.num_microbatches == 4
    assert (of.forecast, of.planned) == ([32, 16, 8, 4, 2], [4])


@pytest.mark.parametrize("longer", [10.0, math.inf])
def test_no_fewer_are_planned_where_half_as_many_are_slower(longer: float) -> None:
    of, step = Planners({1: 0.1, 2: 0.1, 4: longer}), planned(10.0, 8)
    assert best(of, step) is step
    assert (of.forecast, of.planned) == ([4], [])


def test_numbers_that_do_not_divide_the_batch_are_left_out() -> None:
    of = Planners({1: 4.0, 2: 5.0})
    assert best(of, planned(10.0, 12)).plan.num_microbatches == 1


def test_a_faster_forecast_may_be_a_slower_plan() -> None:
    step = planned(10.0, 2)
    assert best(Planners({1: 9.9}), step) is step


def test_beside_a_pipeline_the_fewest_that_fit_are_planned() -> None:
    of = Planners({1: math.inf, 2: math.inf, 4: 8.0, 8: 8.5, 16: 9.0})
    assert best(of, planned(10.0, 64, pipelined=True)).plan.num_microbatches == 4
    assert (of.forecast, of.planned) == ([16, 8, 4, 2], [4])


@pytest.mark.parametrize(("forecast", "counts"), [(9.65, [16]), (9.75, []), (11.0, [])])
def test_one_mesh_is_planned_where_it_promises_a_gain(forecast: float, counts: list[int]) -> None:
    of, pipeline = Planners({1: 1.0, 8: math.inf, 16: forecast}), planned(10.0, 64, pipelined=True)
    assert best(of, pipeline) is pipeline, "one mesh takes 10.1 s or more"
    assert of.planned == counts


def test_the_fewest_microbatches_are_tried_where_none_is_forecast_to_fit() -> None:
    of, pipeline = Planners(dict.fromkeys((1, 2, 4, 8, 16), math.inf)), planned(10.0, 64, pipelined=True)
    assert best(of, pipeline) is pipeline
    assert (of.forecast, of.planned) == ([16], [1])


def test_no_number_is_forecast_beside_a_pipeline_that_is_faster_than_any_plan_on_one_mesh() -> None:
    of, pipeline = Planners({1: 1.0, 16: 1.0}, fastest=10.0), planned(10.0, 64, pipelined=True)
    assert best(of, pipeline) is pipeline
    assert (of.forecast, of.planned) == ([], [])
