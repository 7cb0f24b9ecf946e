"""The penalised problem: every byte of a memory row adds to the cost.

    minimise  seconds(x) + rate * bytes(x)                                                              -> penalised

`rate` is a fixed Lagrange multiplier (s/byte). The minimiser is on the lower convex hull of (bytes, seconds) over all
plans (Everett, 1963, "Generalized Lagrange multiplier method"): no plan with as few bytes is faster. The penalised
problem has the form of the original problem and needs no memory rows.
"""

from __future__ import annotations

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Edge, Node, Problem


def penalised(problem: Problem, row: Row, rate: float) -> Problem:
    """The problem with `rate` (s/byte) times the bytes of `row` added to its costs; `row.constant` is left out.

    Signatures and keys include the bytes, so that equal ones still imply equal costs.
    """
    kinds: dict[tuple[tuple[int, ...], bytes], int] = {}

    def node(i: int, n: Node) -> Node:
        extra = row.nodes.get(i)
        if extra is None:
            return Node(n.name, n.cost, (n.signature, b""))
        return Node(n.name, n.cost + rate * extra, (n.signature, extra.tobytes()))

    def edge(i: int, e: Edge) -> Edge:
        extra = row.edges.get(i)
        key = (e.key, b"" if extra is None else extra.tobytes())
        number = kinds.setdefault(key, len(kinds))
        return Edge(e.u, e.v, e.gu, e.gv, e.table if extra is None else e.table + rate * extra, (number,))

    nodes, edges = enumerate(problem.nodes), enumerate(problem.edges)
    return Problem(tuple(node(i, n) for i, n in nodes), tuple(edge(i, e) for i, e in edges))
