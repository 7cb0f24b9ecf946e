"""The discrete problem that the intra-operator pass gives to its solvers.

    minimise   sum_v  cost_v[x_v]  +  sum_(u,v)  table_uv[ gu[x_u], gv[x_v] ]        over x_v in strategies(v)

A node is one decision (the strategy of an op group, or the layout of an argument or of a shared copy). An edge is one
tensor: `gu` maps each strategy of its producer to the layout class that the tensor then has, `gv` each strategy of its
consumer to the class that the consumer needs, and `table` gives the seconds from one to the other. `inf` forbids.

Edges with equal `key` have equal projections and tables, nodes with equal `signature` equal costs. Therefore symmetry
reduction and dead-end elimination work once per distinct layer and not once per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SolverError

MAX_NUMBERED = 1 << 31  # combinations of classes up to which all are numbered, whether they occur or not

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A decision with `len(cost)` strategies; `cost` in seconds per step."""

    name: str
    cost: Floats
    signature: Hashable


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A tensor between nodes `u` and `v` (indices); `table[gu[i], gv[j]]` in seconds per step."""

    u: int
    v: int
    gu: Ints
    gv: Ints
    table: Floats
    key: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Nodes and edges; see the module's formula."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @property
    def variables(self) -> int:
        """Number of binary variables: one per node and strategy."""
        return sum(len(n.cost) for n in self.nodes)

    def value(self, assignment: Ints) -> float:
        """Seconds per step of one full assignment (strategy index per node), shape (len(nodes),)."""
        chosen = [int(s) for s in assignment]
        nodes = sum([n.cost.item(s) for n, s in zip(self.nodes, chosen, strict=True)])
        return nodes + sum([e.table.item(e.gu.item(chosen[e.u]), e.gv.item(chosen[e.v])) for e in self.edges])


def check(problem: Problem, *, thorough: bool = True) -> None:
    """Raise SolverError if shapes or indices are invalid, or if arrays with equal keys or signatures differ.

    Unless `thorough`, arrays with equal keys are compared by shape only.
    """
    equal = _equal if thorough else _equal_shapes
    _check_nodes(problem, equal)
    first_edges: dict[tuple[int, ...], Edge] = {}
    for edge in problem.edges:
        other = first_edges.setdefault(edge.key, edge)
        if other is edge:
            _check_edge(problem, edge)
        elif not (equal(other.gu, edge.gu) and equal(other.gv, edge.gv) and equal(other.table, edge.table)):
            raise SolverError(f"edge {_title(problem, edge)} has the key of an edge with another table: {edge.key}")
        _check_lengths(problem, edge)


def _check_nodes(problem: Problem, equal: Callable[[Any, Any], bool]) -> None:
    costs: dict[Hashable, Floats] = {}
    for node in problem.nodes:
        first = costs.setdefault(node.signature, node.cost)
        if first is node.cost and (node.cost.ndim != 1 or not len(node.cost) or np.isnan(node.cost).any()):
            raise SolverError(f"node {node.name!r} needs a vector of costs without nan, not one of {node.cost.shape}")
        if not equal(first, node.cost):
            raise SolverError(f"node {node.name!r} has the signature of a node with other costs: {node.signature!r}")


def _check_lengths(problem: Problem, edge: Edge) -> None:
    for node, classes in ((edge.u, edge.gu), (edge.v, edge.gv)):
        if not 0 <= node < len(problem.nodes):
            raise SolverError(f"an edge with key {edge.key} names node {node}, but there are {len(problem.nodes)}")
        count = len(problem.nodes[node].cost)
        if classes.shape != (count,):
            raise SolverError(
                f"edge {_title(problem, edge)}: the {count} strategies of {problem.nodes[node].name!r} need one class "
                f"each, not an array of shape {classes.shape}"
            )


def _check_edge(problem: Problem, edge: Edge) -> None:
    _check_lengths(problem, edge)
    for classes, size in zip((edge.gu, edge.gv), edge.table.shape, strict=True):
        if classes.min() < 0 or classes.max() >= size:
            raise SolverError(
                f"edge {_title(problem, edge)}: classes run from {classes.min()} to {classes.max()}, "
                f"but its table has shape {edge.table.shape}"
            )
    if np.isnan(edge.table).any():
        raise SolverError(f"edge {_title(problem, edge)} has nan in its table of shape {edge.table.shape}")


def _title(problem: Problem, edge: Edge) -> str:
    return f"{problem.nodes[edge.u].name!r} -> {problem.nodes[edge.v].name!r}"


def _equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a is b or np.array_equal(a, b)


def _equal_shapes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a is b or a.shape == b.shape


def absorb_loops(problem: Problem) -> Problem:
    """The same problem with every edge from a node to itself added to that node's cost."""
    self_edges = [e for e in problem.edges if e.u == e.v]
    if not self_edges:
        return problem
    nodes = list(problem.nodes)
    for e in self_edges:
        old = nodes[e.u]
        nodes[e.u] = Node(old.name, old.cost + e.table[e.gu, e.gv], (old.signature, e.key))
    return Problem(tuple(nodes), tuple(e for e in problem.edges if e.u != e.v))


def restrict(problem: Problem, keep: Sequence[Ints]) -> Problem:
    """The problem over the strategies `keep[v]` (ascending indices) of each node; tables keep only classes in use.

    Signatures become numbers. They and the keys are extended by a number for `keep[v]`, so that equal ones still mean
    equal arrays.
    """
    numbers: dict[bytes, int] = {}
    numbers_kept = [numbers.setdefault(k.tobytes(), len(numbers)) for k in keep]
    costs: dict[Hashable, int] = {}
    nodes = tuple(
        Node(n.name, n.cost[k], (costs.setdefault(n.signature, len(costs)), i))
        for n, k, i in zip(problem.nodes, keep, numbers_kept, strict=True)
    )
    return Problem(nodes, tuple(_restricted_edges(problem.edges, keep, numbers_kept)))


def _restricted_edges(edges: Sequence[Edge], keep: Sequence[Ints], numbers: Sequence[int]) -> Iterator[Edge]:
    """The edges over the strategies `keep[v]`, which have these numbers; equal edges share their arrays."""
    compacted: dict[tuple[int, ...], tuple[Ints, Ints, Floats]] = {}
    for e in edges:
        key = (*e.key, numbers[e.u], numbers[e.v])
        if key not in compacted:
            compacted[key] = compact(e.gu[keep[e.u]], e.gv[keep[e.v]], e.table)
        yield Edge(e.u, e.v, *compacted[key], key)


def compact(gu: Ints, gv: Ints, table: Floats) -> tuple[Ints, Ints, Floats]:
    """Projections renumbered to the classes in use, and the table restricted to them."""
    rows, cols = used(gu, table.shape[0]), used(gv, table.shape[1])
    if table.shape == (len(rows), len(cols)):
        return gu, gv, table
    return renumber(gu, rows, table.shape[0]), renumber(gv, cols, table.shape[1]), table[rows[:, None], cols]


def used(classes: Ints, size: int) -> Ints:
    """The classes below `size` that occur, ascending."""
    return np.bincount(classes, minlength=size).nonzero()[0]


def runs(classes: Ints) -> tuple[Ints, Ints]:
    """Strategies sorted by class, and where in them the strategies of each class that occurs start."""
    order = np.argsort(classes, kind="stable")
    of_order = classes[order]
    begins = np.ones(len(order), dtype=bool)
    np.not_equal(of_order[1:], of_order[:-1], out=begins[1:])
    return order, begins.nonzero()[0]


def renumber(classes: Ints, present: Ints, size: int) -> Ints:
    """Classes as positions in `present`, the ascending classes in use out of `size`."""
    position = np.zeros(size, dtype=np.int64)
    position[present] = np.arange(len(present))
    return position[classes]


def by_strategy(problem: Problem) -> Problem:
    """The problem in which class i of an edge is that of strategy i, where each strategy has a class of its own.

    Costs of plans and the order of edges stay; a dual ascent need not look classes up (`autopar.passes.solver`).
    """
    renumbered: dict[tuple[int, int, int], Edge] = {}  # equal edges share their arrays: by identity
    edges: list[Edge] = []
    for e in problem.edges:
        key = id(e.table), id(e.gu), id(e.gv)
        if key not in renumbered:
            renumbered[key] = _by_strategy(e)
        first = renumbered[key]
        edges.append(replace(e, gu=first.gu, gv=first.gv, table=first.table))
    return Problem(problem.nodes, tuple(edges))


def _by_strategy(edge: Edge) -> Edge:
    rows, columns = classes_by_strategy(edge)
    gu = edge.gu if rows is not edge.gu else np.arange(len(rows))
    gv = edge.gv if columns is not edge.gv else np.arange(len(columns))
    return replace(edge, gu=gu, gv=gv, table=edge.table[rows[:, None], columns])


def classes_by_strategy(edge: Edge) -> tuple[Ints, Ints]:
    """The classes at both ends in the order that `by_strategy` gives them."""
    rows, columns = (
        classes if len(used(classes, size)) == len(classes) == size else np.arange(size)
        for classes, size in zip((edge.gu, edge.gv), edge.table.shape, strict=True)
    )
    return rows, columns


def cheapest(cost: Floats, classes: Sequence[Ints]) -> Ints:
    """The first cheapest strategy of every combination of classes, ascending."""
    if not classes:
        return np.array([cost.argmin()])
    group, span = np.zeros(len(cost), dtype=np.int64), 1
    for node_classes in classes:
        size = int(node_classes.max()) + 1
        if span * size > MAX_NUMBERED:
            group = np.unique(group, return_inverse=True)[1].ravel()
            span = len(cost)
        group, span = group * size + node_classes, span * size
    order = np.lexsort((cost, group))
    first = np.ones(len(order), dtype=bool)
    first[1:] = group[order][1:] != group[order][:-1]
    return np.sort(order[first])
