"""Memory as a price: a problem in which every byte of a row costs time.

    minimise  seconds(x) + rate bytes(x)

The minimiser is on the lower convex hull of (bytes, seconds) over all plans (Everett, 1963, "Generalized Lagrange
multiplier method"): no plan with as few bytes is faster. It is one more problem of the same form, with no memory rows.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Edge, Node, Problem


def together(one: Row, other: Row, weight: float) -> Row:
    """A row and `weight` times another."""
    nodes = {v: one.nodes.get(v, 0.0) + weight * other.nodes.get(v, 0.0) for v in sorted({*one.nodes, *other.nodes})}
    edges = {e: one.edges.get(e, 0.0) + weight * other.edges.get(e, 0.0) for e in sorted({*one.edges, *other.edges})}
    return Row(f"{one.name} + {weight:g} {other.name}", one.constant + weight * other.constant, nodes, edges)


def charged(problem: Problem, row: Row, rate: float) -> Problem:
    """The problem with `rate` seconds added for every byte of a row."""
    kinds: dict[tuple[tuple[int, ...], bytes], int] = {}

    def node(i: int, n: Node) -> Node:
        extra = row.nodes.get(i)
        if extra is None:
            return replace(n, signature=(n.signature, b""))
        return replace(n, cost=n.cost + rate * extra, signature=(n.signature, extra.tobytes()))

    def edge(i: int, e: Edge) -> Edge:
        extra = row.edges.get(i)
        key = (e.key, b"" if extra is None else extra.tobytes())
        number = kinds.setdefault(key, len(kinds))
        return replace(e, key=(number,), table=e.table if extra is None else e.table + rate * extra)

    nodes, edges = enumerate(problem.nodes), enumerate(problem.edges)
    return Problem(tuple(node(i, n) for i, n in nodes), tuple(edge(i, e) for i, e in edges))
