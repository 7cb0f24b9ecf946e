"""Seconds and bytes of many plans at once.

There are 1 + R quantities: seconds, then bytes at each of R program points. Each quantity is one row of a matrix whose
columns are the strategies of all nodes, then the table entries of all edges. The total of a plan is a sum of columns:

    total_q(x)  =  constant_q  +  sum_v nodes_q[v][x_v]  +  sum_e edges_q[e][gu(x_u), gv(x_v)]     -> Evaluator.totals

Most edges have no bytes in any row. Their tables have one row, for seconds only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.problem import Edge, Floats, Ints
from autopar.passes.memory.presolve import ConstrainedProblem


class Evaluator:
    """Evaluates plans of one problem with memory rows."""

    def __init__(self, constrained: ConstrainedProblem) -> None:
        problem = constrained.problem
        none = np.zeros((constrained.rows, 1))
        costs = [
            np.vstack([n.cost[None], constrained.nodes.get(v, none) + np.zeros(len(n.cost))])
            for v, n in enumerate(problem.nodes)
        ]
        self._constants = np.concatenate([[0.0], constrained.constants])
        self._flat = np.concatenate([np.zeros((1 + constrained.rows, 0)), *costs], axis=1)
        self._start = _starts([len(n.cost) for n in problem.nodes])
        bare = [e for i, e in enumerate(problem.edges) if i not in constrained.edges]
        usage = [problem.edges[i] for i in constrained.edges]
        self._bare = _Tables(bare, [e.table[None] for e in bare], 1)
        stacked = [np.concatenate([e.table[None], b]) for e, b in zip(usage, constrained.edges.values(), strict=True)]
        self._usage = _Tables(usage, stacked, 1 + constrained.rows)

    def totals(self, plans: Ints) -> Floats:
        """Seconds, then bytes at each program point, shape (plans, 1 + R), of plans of shape (plans, nodes)."""
        out = self._flat[:, self._start + plans].sum(axis=2) + self._constants[:, None]
        out[:1] += self._bare.totals(plans)
        return (out + self._usage.totals(plans)).T


class _Tables:
    """Tables of edges, flattened and concatenated, with one row per quantity."""

    def __init__(self, edges: Sequence[Edge], tables: Sequence[Floats], quantities: int) -> None:
        self._flat = np.concatenate([np.zeros((quantities, 0)), *(t.reshape(len(t), -1) for t in tables)], axis=1)
        self._start = _starts([t[0].size for t in tables])
        self._ends = np.array([(e.u, e.v) for e in edges], dtype=np.int64).reshape(-1, 2).T
        none = np.zeros(0, dtype=np.int64)
        self._gu = np.concatenate([none, *(e.gu * e.table.shape[1] for e in edges)])
        self._gv = np.concatenate([none, *(e.gv for e in edges)])
        self._gu_start = _starts([len(e.gu) for e in edges])
        self._gv_start = _starts([len(e.gv) for e in edges])

    def totals(self, plans: Ints) -> Floats:
        """Sums over the edges of each quantity, shape (quantities, plans), of plans of shape (plans, nodes)."""
        u, v = self._ends
        # `_gu` is multiplied by the number of columns, so the sum is the position in the flattened table
        pairs = self._gu[self._gu_start + plans[:, u]] + self._gv[self._gv_start + plans[:, v]]
        return self._flat[:, self._start + pairs].sum(axis=2)


def _starts(sizes: Sequence[int]) -> Ints:
    """Offset of each array in the concatenation of arrays of these sizes."""
    return np.cumsum([0, *sizes], dtype=np.int64)[:-1]
