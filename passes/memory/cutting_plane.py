"""Multipliers of memory rows from known plans, by cutting planes.

Plan k takes c_k seconds, and at row r it exceeds the budget by g_kr, as a share of the budget. The known plans give a
piecewise linear model of the dual function, whose maximiser is the vector of multipliers

    max_(lambda >= 0)  min_k  c_k + sum_r lambda_r g_kr

(J. E. Kelley, "The cutting-plane method for solving convex programs", SIAM J. 8, 1960). The dual of this linear program
is the master problem, whose solution is a convex combination of plans,

    min_a  sum_k a_k c_k      sum_k a_k g_kr + s_r = 0,   sum_k a_k = 1,   a, s >= 0                       -> within

It has one column per plan and R + 1 rows. The simplex method keeps a basis of R + 1 columns, and the duals of the basis
are the multipliers -> MasterProblem.solve. A new plan is a new column, so the last basis starts the next solve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import Floats, Ints


@dataclass(frozen=True, slots=True)
class SimplexEffort:
    """Limits of one solve of the master problem."""

    # most pivots of one solve; in the second half Bland's rule chooses columns, which cannot cycle (guards against
    # cycling; `bench sensitivity`, 2026-11: no effect on small programs)
    pivots: int = 500
    # reduced cost, as a share of the largest cost, that counts as zero (far above rounding, far below any gap; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    zero: float = 1e-9


SIMPLEX = SimplexEffort()


class MasterProblem:
    """A linear program min costs @ a, columns @ a = (0, ..., 0, 1), a >= 0, to which columns are added.

    Args:
        columns: shape (R + 1, n).
        costs: shape (n,).
        basis: indices of R + 1 columns that form a feasible basis.
    """

    def __init__(self, columns: Floats, costs: Floats, basis: list[int]) -> None:
        self._columns = columns
        self._costs = costs
        self._basis = basis

    def add(self, costs: Floats, entries: Floats) -> None:
        """Add plans: `costs` has shape (n,), `entries` in the R rows has shape (n, R)."""
        self._columns = np.column_stack([self._columns, np.vstack([entries.T, np.ones(len(costs))])])
        self._costs = np.append(self._costs, costs)

    def solve(self, effort: SimplexEffort = SIMPLEX) -> tuple[Floats, float]:
        """Multipliers of the rows, shape (R,), and the value of the model at these multipliers."""
        right = np.append(np.zeros(len(self._basis) - 1), 1.0)
        scale = effort.zero * max(1e-300, float(np.abs(self._costs).max()))
        duals = np.zeros(len(self._basis))
        for pivot in range(effort.pivots):
            inverse = np.linalg.inv(self._columns[:, self._basis]).astype(np.float64, copy=False)
            duals = self._costs[self._basis] @ inverse
            reduced = self._costs - duals @ self._columns
            entering = _entering(reduced, scale, first=2 * pivot >= effort.pivots)
            if entering < 0:
                break
            leaving = _leaving(inverse @ right, inverse @ self._columns[:, entering], self._basis)
            self._basis[leaving] = entering
        # the rows are "<= 0" with slack variables, so their duals are <= 0 in a minimisation, up to rounding
        return np.maximum(-duals[:-1], 0.0), float(duals[-1])


def within(rows: int, ceiling: float, relief: float) -> MasterProblem:
    """The master problem of the cheapest convex combination of plans that fits on all rows.

    Its costs are in seconds; its entries are the excess over the budget as a share of the budget. An artificial plan
    stays below the budget by the share `relief` on every row and costs `ceiling` seconds, so a feasible basis always
    exists. This plan limits the sum of the multipliers to about ceiling / relief.
    """
    columns = np.vstack([np.eye(rows, rows + 1), np.zeros((1, rows + 1))])
    columns[:, rows] = np.append(np.full(rows, -relief), 1.0)
    return MasterProblem(columns, np.append(np.zeros(rows), ceiling), list(range(rows + 1)))


def smallest(rows: int, ceiling: float) -> MasterProblem:
    """The master problem of the convex combination of plans with the least peak t.

        min t      sum_k a_k m_kr + s_r = t,   sum_k a_k = 1

    Plans cost nothing, and their entries m_kr are bytes (in any unit). The multipliers add up to one. An artificial
    plan of `ceiling` bytes on every row gives the first basis.
    """
    columns = np.vstack([np.eye(rows, rows + 2), np.zeros((1, rows + 2))])
    columns[:rows, rows] = -1.0
    columns[:, rows + 1] = np.append(np.full(rows, ceiling), 1.0)
    costs = np.zeros(rows + 2)
    costs[rows] = 1.0
    return MasterProblem(columns, costs, [*range(1, rows), rows, rows + 1])


def _entering(reduced: Floats, scale: float, first: bool) -> int:
    """The column that enters the basis: of least reduced cost, or the first with a negative one; -1 if none has."""
    helps: Ints = np.flatnonzero(reduced < -scale)
    if not len(helps):
        return -1
    return int(helps[0] if first else reduced.argmin())


def _leaving(values: Floats, direction: Floats, basis: list[int]) -> int:
    """The position in the basis that reaches zero first (ratio test); of several, the one with the lowest column."""
    ratios = np.full(len(values), np.inf)
    # What is zero but for rounding must not divide: the ratio test would leave the basis singular.
    falls = direction > 1e-12 * max(1.0, float(np.abs(direction).max()))
    ratios[falls] = np.maximum(values[falls], 0.0) / direction[falls]
    # Of equal ratios the lowest column leaves (Bland, 1977), so that the simplex method cannot cycle.
    ties = np.flatnonzero(ratios <= ratios.min() + 1e-15)
    return int(min(ties, key=lambda i: basis[i]))
