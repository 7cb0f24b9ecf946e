"""The cheapest plan within a budget by HiGHS alone: the unfolded problem and rows of memory, written out as they stand.

    x_vs in {0, 1}, sum_s x_vs = 1              one strategy per node
    y_ekl >= 0, sum_l y_ekl = sum_{s in k} x_us   what flows out of each class of an edge's tail; likewise its head
    constant + sum b x + sum b y <= budget      for each program point that was learnt

It shares no code with `autopar.passes`: no presolve, no folding, no bounds. Program points are learnt from the answers
that do not fit, so that the last answer, which does, is the optimum, and HiGHS' bound holds all the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
from scipy.sparse import coo_array

from autopar.cost_models.memory.row import Row, RowSource
from autopar.ir.problem import Floats, Ints, Problem

highs: Any = scipy.optimize  # whose stubs know numbers only where arrays are meant
SCALE = 1e4  # of the objective and of the budget: HiGHS' absolute tolerances are then 1e-10 of either


@dataclass(frozen=True)
class Answer:
    """What HiGHS says, in seconds per step.

    Attributes:
        optimum: the least price of all plans that fit; None if it found none in its time.
        bound: no plan that fits is cheaper.
        rows: program points that were needed.
    """

    optimum: float | None
    bound: float
    rows: int


def within(problem: Problem, source: RowSource, budget: float, seconds: float) -> Answer:
    """The cheapest plan whose peak is at most `budget` bytes, in at most about so many seconds.

    AssertionError where HiGHS says that none fits.
    """
    deadline = time.monotonic() + seconds
    columns = _Columns.of(problem)
    rows = {row.name: row for row in source.rows()}
    bound = -np.inf
    while time.monotonic() < deadline:
        chosen, lower = columns.solve(list(rows.values()), budget, deadline - time.monotonic())
        bound = max(bound, lower)
        if chosen is None:
            break
        peak, row = source.peak(chosen)
        if peak <= budget:
            return Answer(problem.value(chosen), bound, len(rows))
        assert row.name not in rows, f"HiGHS passes over {row.name}: {peak} bytes of {budget}"
        rows[row.name] = row
    return Answer(None, bound, len(rows))


@dataclass(frozen=True, eq=False)
class _Columns:
    """Variables: all strategies of all nodes, then all pairs of classes of all edges."""

    problem: Problem
    nodes: Sequence[int]
    edges: Sequence[int]
    cost: Floats
    unit: float

    @staticmethod
    def of(problem: Problem) -> _Columns:
        sizes = [len(n.cost) for n in problem.nodes] + [e.table.size for e in problem.edges]
        starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        cost = np.concatenate([*(n.cost for n in problem.nodes), *(e.table.ravel() for e in problem.edges)])
        finite = cost[np.isfinite(cost)]
        unit = max(float(finite.max()), 1e-300) / SCALE
        return _Columns(problem, starts[: len(problem.nodes)], starts[len(problem.nodes) : -1], cost, unit)

    def solve(self, rows: Sequence[Row], budget: float, seconds: float) -> tuple[Ints | None, float]:
        """A full assignment, if one was found, and a bound in seconds per step."""
        allowed = np.isfinite(self.cost)
        count = int(self.nodes[-1]) + len(self.problem.nodes[-1].cost)
        integral = np.arange(len(self.cost)) < count
        milp_result: Any = highs.milp(
            np.where(allowed, self.cost, 0.0) / self.unit,
            integrality=integral.astype(int),
            bounds=highs.Bounds(np.zeros(len(self.cost)), allowed.astype(float)),
            constraints=[self._flows(), *self._memory(rows, budget)],
            options={"time_limit": max(seconds, 0.1), "mip_rel_gap": 0.0},
        )
        assert milp_result.status in (0, 1), milp_result.message
        bound = -np.inf if milp_result.mip_dual_bound is None else float(milp_result.mip_dual_bound) * self.unit
        if milp_result.status == 1 or milp_result.x is None:
            return None, bound
        pieces = [milp_result.x[a : a + len(n.cost)] for a, n in zip(self.nodes, self.problem.nodes, strict=True)]
        return np.array([int(p.argmax()) for p in pieces], np.int64), bound

    def _flows(self) -> Any:
        """One strategy per node, and flows that agree with it."""
        entries: list[tuple[int, int, float]] = []
        right: list[float] = []
        for start, node in zip(self.nodes, self.problem.nodes, strict=True):
            entries += [(len(right), start + s, 1.0) for s in range(len(node.cost))]
            right.append(1.0)
        for start, e in zip(self.edges, self.problem.edges, strict=True):
            flow = start + np.arange(e.table.size).reshape(e.table.shape)
            for end, classes, flows in ((e.u, e.gu, flow), (e.v, e.gv, flow.T)):
                for k, group in enumerate(flows):
                    entries += [(len(right), int(y), 1.0) for y in group]
                    entries += [(len(right), self.nodes[end] + int(s), -1.0) for s in np.flatnonzero(classes == k)]
                    right.append(0.0)
        at, columns, values = map(np.array, zip(*entries, strict=True))
        matrix: Any = coo_array((values, (at, columns)), shape=(len(right), len(self.cost)))
        return highs.LinearConstraint(matrix.tocsr(), right, right)

    def _memory(self, rows: Sequence[Row], budget: float) -> list[Any]:
        unit = budget / SCALE
        matrix = np.zeros((len(rows), len(self.cost)))
        for r, row in enumerate(rows):
            for v, held in row.nodes.items():
                matrix[r, self.nodes[v] : self.nodes[v] + len(held)] += held
            for i, held in row.edges.items():
                matrix[r, self.edges[i] : self.edges[i] + held.size] += held.ravel()
        room = np.array([budget - row.constant for row in rows])
        return [highs.LinearConstraint(matrix / unit, -np.inf, room / unit)] if rows else []
