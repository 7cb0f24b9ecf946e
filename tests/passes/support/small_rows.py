"""Small memory models for the optimizer's tests: every program point a row, whole bytes, and brute force."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Floats, Ints, Problem
from tests.passes.support.small_problems import all_values


class Points:
    """A `RowSource` over all its points; tells `shown` of them at the start."""

    def __init__(self, problem: Problem, points: Sequence[Row], shown: int = 0) -> None:
        self.problem = problem
        self.points = tuple(points)
        self.shown = shown

    def peak(self, assignment: Ints) -> tuple[float, Row]:
        held = [row.value(self.problem, assignment) for row in self.points]
        at = int(np.argmax(held))
        return held[at], self.points[at]

    def over(self, assignment: Ints, nbytes: float) -> Sequence[Row]:
        held = [(row.value(self.problem, assignment), row) for row in self.points]
        return [row for value, row in sorted(held, key=lambda h: -h[0]) if value > nbytes][:3]

    def rows(self) -> Sequence[Row]:
        return self.points[: self.shown]


def random_points(problem: Problem, seed: int, points: int, edges: bool = True, shown: int = 0) -> Points:
    """Each point holds about half of the nodes and a third of the edges; 0 to 15 bytes a strategy, so ties happen."""
    rng = np.random.default_rng(seed)
    return Points(problem, [_random_row(rng, problem, p, edges) for p in range(points)], shown)


def _random_row(rng: np.random.Generator, problem: Problem, point: int, edges: bool) -> Row:
    nodes = {
        v: rng.integers(0, 16, len(n.cost)).astype(float) for v, n in enumerate(problem.nodes) if rng.random() < 0.6
    }
    held = {
        i: rng.integers(0, 8, e.table.shape).astype(float)
        for i, e in enumerate(problem.edges)
        if edges and rng.random() < 0.3
    }
    return Row(f"point {point}", float(rng.integers(0, 5)), nodes, held)


def layered_points(problem: Problem, layers: int, seed: int) -> Points:
    """For `layered` problems: at point i the layers up to i hold their a, and layer i its b; the hub always counts."""
    rng = np.random.default_rng(seed)
    hub, a, b = (rng.integers(0, 9, n).astype(float) for n in (2, 3, 3))
    rows = [
        Row(f"layer {i}", 1.0, {0: hub, **{1 + 3 * j: a for j in range(i + 1)}, 2 + 3 * i: b}, {})
        for i in range(layers)
    ]
    return Points(problem, rows)


def all_peaks(problem: Problem, source: Points) -> tuple[Floats, Floats]:
    """Seconds and peak of every plan, shape (plans,) each, by adding up rows without any of the code under test."""
    plans, values = all_values(problem)
    peaks = np.full(plans.shape[1], -np.inf)
    for row in source.points:
        held = np.full(plans.shape[1], row.constant)
        for v, b in row.nodes.items():
            held += b[plans[v]]
        for i, b in row.edges.items():
            e = problem.edges[i]
            held += b[e.gu[plans[e.u]], e.gv[plans[e.v]]]
        peaks = np.maximum(peaks, held)
    return values, peaks


def brute_within(problem: Problem, source: Points, budget: float) -> float:
    """The least value of all plans that fit, inf if none does."""
    values, peaks = all_peaks(problem, source)
    return float(values[peaks <= budget].min(initial=np.inf))


def brute_least(problem: Problem, source: Points) -> float:
    """The least peak of all plans that are not forbidden."""
    values, peaks = all_peaks(problem, source)
    return float(peaks[np.isfinite(values)].min(initial=np.inf))
