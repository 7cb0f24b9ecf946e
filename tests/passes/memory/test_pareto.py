"""The Pareto front against brute force: every point is real, and no plan lies below the envelope."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.ir.problem import Problem
from autopar.passes.memory.min_memory import least_memory
from autopar.passes.memory.pareto import front
from tests.passes.support.small_problems import layered, problems, random_problem
from tests.passes.support.small_rows import Points, all_peaks, layered_points, random_points

pytestmark = pytest.mark.core


def holds(problem: Problem, source: Points) -> None:
    """Points are what they say and ordered; the envelope is below every plan; the ends are the optima."""
    pareto = front(problem, source, points=4)
    values, peaks = all_peaks(problem, source)
    feasible = np.isfinite(values)
    for point in pareto.points:
        assert point.seconds == pytest.approx(problem.value(point.assignment), abs=1e-12)
        assert point.peak_bytes == source.peak(point.assignment)[0]
    for before, after in zip(pareto.points, pareto.points[1:], strict=False):
        assert before.seconds < after.seconds
        assert before.peak_bytes > after.peak_bytes
    for budget in np.unique(peaks[feasible]):
        fastest = values[feasible & (peaks <= budget)].min()
        assert pareto.lower(budget) <= fastest + 1e-12
        best = pareto.best(budget)
        assert best is None or best.seconds >= fastest - 1e-12
    assert pareto.points[0].seconds == pytest.approx(values[feasible].min(), abs=1e-12)
    assert pareto.least_bytes <= peaks[feasible].min() + 1e-9


@settings(max_examples=40)
@given(problem=problems, seed=st.integers(0, 10**6), points=st.integers(1, 5))
def test_every_point_is_real_and_no_plan_lies_below_the_envelope(problem: Problem, seed: int, points: int) -> None:
    source = random_points(problem, seed, points)
    assume(np.isfinite(all_peaks(problem, source)[0]).any())
    holds(problem, source)


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), shift=st.integers(0, 1))
def test_equal_layers(seed: int, shift: int) -> None:
    problem = layered(seed, 3, shift)
    holds(problem, layered_points(problem, 3, seed))


@settings(max_examples=40)
@given(problem=problems, seed=st.integers(0, 10**6), points=st.integers(1, 4), shown=st.integers(1, 4))
def test_the_least_peak_and_its_bound_without_an_ilp(problem: Problem, seed: int, points: int, shown: int) -> None:
    source = random_points(problem, seed, points, shown=shown)
    values, peaks = all_peaks(problem, source)
    assume(np.isfinite(values).any())
    least_peak = least_memory(problem, source, rows=source.rows(), exact=False)
    fewest = peaks[np.isfinite(values)].min()
    assert least_peak.peak_bytes == source.peak(least_peak.assignment)[0]
    assert least_peak.lower_bytes <= fewest + 1e-9 <= least_peak.peak_bytes + 2e-9
    assert np.isfinite(least_peak.seconds)


def test_a_budget_below_every_plan_has_no_point_and_no_finite_bound() -> None:
    problem = random_problem(3, 4, 6)
    pareto = front(problem, random_points(problem, 3, 2), points=3)
    assert pareto.best(-1.0) is None
    assert pareto.lower(-1.0) == np.inf


def test_the_same_front_every_time() -> None:
    problem = layered(4, 6)
    source = layered_points(problem, 6, 4)
    first, two = front(problem, source), front(problem, source)
    assert [(p.seconds, p.peak_bytes, p.assignment.tolist()) for p in first.points] == [
        (p.seconds, p.peak_bytes, p.assignment.tolist()) for p in two.points
    ]
    assert first.bounds == two.bounds
