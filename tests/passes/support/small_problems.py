"""Small problems for the optimizer's tests: random ones, named graphs with a fractional relaxation, and brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from autopar.ir.problem import Edge, Floats, Ints, Node, Problem


def node(name: str, *costs: float) -> Node:
    """A node whose signature is its costs."""
    return Node(name, np.array(costs, dtype=float), costs)


def edge(u: int, v: int, table: Sequence[Sequence[float]], key: int = 0) -> Edge:
    """An edge whose classes are the strategies."""
    rows, cols = np.arange(len(table)), np.arange(len(table[0]))
    return Edge(u, v, rows, cols, np.array(table, dtype=float), (key,))


def all_values(problem: Problem) -> tuple[Ints, Floats]:
    """Every plan, shape (nodes, plans), and its value, shape (plans,)."""
    sizes = [len(n.cost) for n in problem.nodes]
    plans = np.indices(sizes).reshape(len(sizes), math.prod(sizes))
    values = np.zeros(plans.shape[1])
    for n, row in zip(problem.nodes, plans, strict=True):
        values += n.cost[row]
    for e in problem.edges:
        values += e.table[e.gu[plans[e.u]], e.gv[plans[e.v]]]
    return plans, values


def brute(problem: Problem) -> float:
    """The least value over all plans."""
    return float(all_values(problem)[1].min())


def random_problem(seed: int, nodes: int, edges: int, strategies: int = 4, forbidden: float = 0.0) -> Problem:
    """Costs are whole milliseconds, so that ties happen; edges may repeat, and may join a node to itself."""
    rng = np.random.default_rng(seed)
    drawn_nodes = [_random_node(rng, v, strategies, forbidden) for v in range(nodes)]
    return Problem(tuple(drawn_nodes), tuple(_random_edge(rng, drawn_nodes, i, forbidden) for i in range(edges)))


def _random_node(rng: np.random.Generator, v: int, strategies: int, forbidden: float) -> Node:
    cost = _random_costs(rng, (int(rng.integers(1, strategies + 1)),), forbidden / 4)
    return Node(f"n{v}", cost, v)


def _random_edge(rng: np.random.Generator, nodes: Sequence[Node], i: int, forbidden: float) -> Edge:
    u, v = (int(x) for x in rng.integers(0, len(nodes), 2))
    shape = tuple(int(x) for x in rng.integers(1, 4, 2))
    gu, gv = (rng.integers(0, n, len(nodes[w].cost)) for w, n in zip((u, v), shape, strict=True))
    return Edge(u, v, gu, gv, _random_costs(rng, shape, forbidden), (i,))


def _random_costs(rng: np.random.Generator, shape: tuple[int, ...], forbidden: float) -> Floats:
    cost = rng.integers(0, 20, shape) * 1e-3
    cost[rng.random(shape) < forbidden] = np.inf
    return cost


def layered(seed: int, layers: int, shift: int = 0) -> Problem:
    """A hub, and `layers` equal layers of three nodes around it; a second edge a-b ends `shift` layers further."""
    rng = np.random.default_rng(seed)
    kinds = [Node(k, _random_costs(rng, (3,), 0.0), k) for k in ("a", "b", "c")]
    nodes = [Node("hub", _random_costs(rng, (2,), 0.0), "hub")]
    nodes += [Node(f"{k.name}{i}", k.cost, k.name) for i in range(layers) for k in kinds]
    tables = [_random_costs(rng, (2 if hub else 3, 3), 0.0) for hub in (True, True, False, False, False)]
    edges: list[Edge] = []
    for i in range(layers):
        a, b, c, far = 1 + 3 * i, 2 + 3 * i, 3 + 3 * i, 2 + 3 * ((i + shift) % layers)
        ends = ((0, a), (0, c), (a, b), (b, c), (a, far))
        edges += [edge(u, v, t.tolist(), key) for key, ((u, v), t) in enumerate(zip(ends, tables, strict=True))]
    return Problem(tuple(nodes), tuple(edges))


def twisted_ring(rungs: int) -> Problem:
    """a_i = b_i and b_i != a_{i+1}, each at 1 s: all rungs alike must break `rungs` edges, in truth one is enough."""
    nodes = [Node(f"{k}{i}", np.zeros(2), k) for i in range(rungs) for k in ("a", "b")]
    equal, unequal = [[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]
    edges = [edge(2 * i, 2 * i + 1, equal, 0) for i in range(rungs)]
    edges += [edge(2 * i + 1, (2 * i + 2) % (2 * rungs), unequal, 1) for i in range(rungs)]
    return Problem(tuple(nodes), tuple(edges))


problems = st.builds(
    random_problem,
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 6),
    edges=st.integers(0, 14),
    forbidden=st.sampled_from([0.0, 0.1, 0.3]),
)
dense_problems = st.builds(random_problem, seed=st.integers(0, 10**6), nodes=st.just(6), edges=st.integers(12, 20))


def frustrated(name: str) -> Problem:
    """Neighbours want to differ, on a graph full of odd cycles: the relaxation is fractional and bounds do not meet.

    Names: complete-N, wheel-N, circulant-N, prism-N, petersen; "/3" appended gives three strategies instead of two.
    """
    graph, _, strategies = name.partition("/")
    kind, _, size = graph.partition("-")
    pairs = GRAPHS[kind](int(size or 0))
    count = 1 + max(max(p) for p in pairs)
    s = int(strategies or 2)
    rng = np.random.default_rng(len(name) * 1000 + count)
    nodes = tuple(Node(f"n{v}", rng.integers(0, 9, s) * 1e-4, v) for v in range(count))
    differ = np.eye(s)
    classes = np.arange(s)
    return Problem(nodes, tuple(Edge(u, v, classes, classes, differ * w, (w,)) for u, v, w in _weighted(pairs)))


def _weighted(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(u, v, 1 + (u * v) % 2) for u, v in pairs]


def _ring(n: int, start: int = 0) -> list[tuple[int, int]]:
    return [(start + i, start + (i + 1) % n) for i in range(n)]


GRAPHS = {
    "complete": lambda n: list(itertools.combinations(range(n), 2)),
    "wheel": lambda n: _ring(n) + [(i, n) for i in range(n)],
    "circulant": lambda n: _ring(n) + [(i, (i + 2) % n) for i in range(n)],
    "prism": lambda n: _ring(n) + _ring(n, n) + [(i, n + i) for i in range(n)],
    "petersen": lambda _: _ring(5) + [(5 + i, 5 + (i + 2) % 5) for i in range(5)] + [(i, 5 + i) for i in range(5)],
}
