"""Folding: equal layers share one decision.

Colour refinement (the Weisfeiler-Leman fixpoint) on

    colour_0(v)      =  signature of v
    colour_{k+1}(v)  =  (colour_k(v), multiset of (edge key, direction, colour_k(neighbour)))

ends in an equitable partition: every member of a class sees the same number of edges of each kind into each other
class. Then (Grohe, Kersting, Mladenov, Selman, "Dimension Reduction via Colour Refinement", ESA 2014) averaging an LP
solution over the classes keeps it feasible and at the same cost, so the LP bound of the folded problem, in which a
class has one variable and costs multiply by its size, is the LP bound of the unfolded one. Three constraints keep
that true:

    edges inside a class  -> _split_inner    (one variable would tie both ends; such classes are taken apart)
    stopping early        -> never           (a coarser partition than the fixpoint has no valid bound)
    who faces whom        -> Folded.pairings (two edges between the same classes may join other members: `contract`)

Colours are refined with a worklist: when a class splits, its largest part keeps the colour, and only neighbours of
nodes with a new colour are looked at again, O(edges log nodes) label sorts in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import Edge, Ints, Node, Problem, absorb_loops


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The quotient problem. `classes[v]` is the folded node of unfolded node v, `counts[c]` the size of class c.

    `pairings[i]` lists, for folded edge i, the joined (member of u, member of v) as sorted rows of ranks inside their
    classes, each once; None where some members are joined more often than others. `edges[i]` is the folded edge of
    unfolded edge i, self edges left out.
    """

    problem: Problem
    classes: Ints
    counts: Ints
    pairings: tuple[Ints | None, ...]
    edges: Ints

    def lift(self, assignment: Ints) -> Ints:
        """Strategy per unfolded node, shape (len(classes),), from one per class."""
        return np.asarray(assignment, dtype=np.int64)[self.classes]

    @property
    def tied(self) -> bool:
        """Whether any class has more than one member, so that folding may lose plans."""
        return bool((self.counts > 1).any())


def fold(problem: Problem) -> Folded:
    """Quotient of the problem by the coarsest equitable partition without edges inside a class."""
    problem = absorb_loops(problem)
    incident = _incident(problem)
    ids: dict[object, int] = {}
    colours = [ids.setdefault(n.signature, len(ids)) for n in problem.nodes]
    while True:
        colours = _refine(colours, incident)
        inner = {colours[e.u] for e in problem.edges if colours[e.u] == colours[e.v]}
        if not inner:
            return _quotient(problem, colours)
        colours = _split_inner(colours, inner)


def identity(problem: Problem) -> Folded:
    """The problem as it is, every node its own class (self edges absorbed)."""
    problem = absorb_loops(problem)
    n = len(problem.nodes)
    one = np.zeros((1, 2), dtype=np.int64)
    ones = np.ones(n, dtype=np.int64)
    return Folded(problem, np.arange(n), ones, (one,) * len(problem.edges), np.arange(len(problem.edges)))


def _incident(problem: Problem) -> list[list[tuple[int, int]]]:
    """Per node the (label, neighbour) of its edges; labels number (edge key, direction), in steps no colour reaches."""
    step = 2 * len(problem.nodes) + 2
    labels: dict[tuple[int, ...], int] = {}
    incident: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]
    for e in problem.edges:
        label = 2 * labels.setdefault(e.key, len(labels))
        incident[e.u].append((label * step, e.v))
        incident[e.v].append(((label + 1) * step, e.u))
    return incident


def _refine(colours: list[int], incident: list[list[tuple[int, int]]]) -> list[int]:
    """Colours at the fixpoint; new colours are numbered in order of their first member."""
    colours = list(colours)
    members: dict[int, list[int]] = {}
    for v, c in enumerate(colours):
        members.setdefault(c, []).append(v)
    dirty: Iterable[int] = range(len(colours))
    fresh = max(colours, default=-1) + 1
    while dirty:
        changed: list[int] = []
        for colour, parts in _signatures(dirty, colours, incident).items():
            for part in _new_parts(members, colour, parts):
                members[fresh] = part
                changed.extend(part)
                for v in part:
                    colours[v] = fresh
                fresh += 1
        dirty = sorted({w for v in changed for _, w in incident[v]})
    return colours


def _signatures(
    dirty: Iterable[int], colours: list[int], incident: list[list[tuple[int, int]]]
) -> dict[int, dict[tuple[int, ...], list[int]]]:
    """Colour -> multiset of (label, neighbour colour) -> the dirty nodes that have it."""
    found: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for v in dirty:
        around = tuple(sorted([label + colours[w] for label, w in incident[v]]))
        found.setdefault(colours[v], {}).setdefault(around, []).append(v)
    return found


def _new_parts(members: dict[int, list[int]], colour: int, parts: dict[tuple[int, ...], list[int]]) -> list[list[int]]:
    """The parts of class `colour` that get a colour of their own: all but the largest. Shrinks `members[colour]`.

    Nodes of the class that are not dirty saw no change around them, so they form one part, unlike every dirty part.
    """
    touched = sum(map(len, parts.values()))
    whole = members[colour]
    pieces = list(parts.values())
    if touched < len(whole):
        moved = {v for piece in pieces for v in piece}
        pieces.append([v for v in whole if v not in moved])
    if len(pieces) == 1:
        return []
    pieces.sort(key=lambda p: p[0])
    largest = max(range(len(pieces)), key=lambda i: (len(pieces[i]), -i))
    members[colour] = pieces.pop(largest)
    return pieces


def _split_inner(colours: list[int], inner: set[int]) -> list[int]:
    """Every member of a class in `inner` gets a colour of its own; the next refinement spreads that."""
    ids: dict[tuple[int, int], int] = {}
    return [ids.setdefault((c, v if c in inner else -1), len(ids)) for v, c in enumerate(colours)]


def _quotient(problem: Problem, colours: list[int]) -> Folded:
    ids: dict[int, int] = {}
    classes = np.array([ids.setdefault(c, len(ids)) for c in colours], dtype=np.int64)
    counts = np.bincount(classes, minlength=len(ids))
    rank = np.zeros(len(classes), dtype=np.int64)
    order = np.argsort(classes, kind="stable")
    rank[order] = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    nodes: list[Node] = []
    for node, c in zip(problem.nodes, classes, strict=True):
        if c == len(nodes):
            n = int(counts[c])
            nodes.append(Node(node.name, node.cost * n, (node.signature, n)))
    groups: dict[tuple[int, int, tuple[int, ...]], list[Edge]] = {}
    number: dict[tuple[int, int, tuple[int, ...]], int] = {}
    into: list[int] = []
    of = classes.tolist()
    for e in problem.edges:
        kind = (of[e.u], of[e.v], e.key)
        groups.setdefault(kind, []).append(e)
        into.append(number.setdefault(kind, len(number)))
    edges = tuple(_multiply(u, v, group) for (u, v, _), group in groups.items())
    pairings = tuple(_pairing(g, rank) for g in groups.values())
    return Folded(Problem(tuple(nodes), edges), classes, counts, pairings, np.array(into, dtype=np.int64))


def _multiply(u: int, v: int, group: list[Edge]) -> Edge:
    first, n = group[0], len(group)
    return Edge(u, v, first.gu, first.gv, first.table * n if n > 1 else first.table, (*first.key, n))


def _pairing(group: list[Edge], rank: Ints) -> Ints | None:
    pairs = np.array([(rank[e.u], rank[e.v]) for e in group], dtype=np.int64)
    if len(pairs) == 1:
        return pairs
    step = len(rank) + 1
    codes, times = np.unique(pairs[:, 0] * step + pairs[:, 1], return_counts=True)
    return np.stack(np.divmod(codes, step), axis=1) if (times == times[0]).all() else None
