"""Symmetry reduction (folding): the members of a symmetry class, such as equal layers, share one decision.

Colour refinement (the Weisfeiler-Leman fixpoint)

    colour_0(v)      =  signature of v
    colour_{k+1}(v)  =  (colour_k(v), multiset of (edge key, direction, colour_k(neighbour)))          -> _refine

ends in an equitable partition: every member of a class has the same number of edges of each key into each other class.
The average of an LP solution over the classes is then feasible and has the same cost (Grohe, Kersting, Mladenov,
Selman, "Dimension Reduction via Colour Refinement", ESA 2014). In the folded problem, the quotient, a class has one
variable, and its costs are multiplied by its size -> _quotient. The LP bound of the folded problem is therefore the LP
bound of the unfolded problem, under three conditions:

    no edge joins two members of one class, since one variable would decide both ends; such classes are split
                                                                                                     -> _split_inner
    refinement runs to the fixpoint, since a coarser partition gives no valid bound                  -> _refine
    reductions know which members an edge joins, since two edges between the same classes may join different members
                                                                                     -> Folded.pairings, contraction

Refinement uses a worklist: when a class splits, its largest part keeps the colour, and only neighbours of nodes with a
new colour are visited again, with O(edges log nodes) label sorts in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.keyed import grouped
from autopar.ir.problem import Edge, Ints, Node, Problem, absorb_loops


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The quotient of a problem by its symmetry classes.

    Attributes:
        problem: the folded problem, one node per class.
        classes: folded node of each unfolded node, shape (unfolded nodes,).
        counts: number of members of each class, shape (classes,).
        pairings: per folded edge, the pairs (member of u, member of v) that it joins: sorted rows of ranks inside the
            classes, each once. None if some pairs are joined more often than others.
        edges: folded edge of each unfolded edge, self edges left out.
    """

    problem: Problem
    classes: Ints
    counts: Ints
    pairings: tuple[Ints | None, ...]
    edges: Ints

    def lift(self, assignment: Ints) -> Ints:
        """Strategy per unfolded node, shape (unfolded nodes,), from one per class."""
        return np.asarray(assignment, dtype=np.int64)[self.classes]

    @property
    def tied(self) -> bool:
        """Whether any class has more than one member. The folded problem then lacks plans in which members differ."""
        return bool((self.counts > 1).any())


def fold(problem: Problem) -> Folded:
    """The quotient of the problem by an equitable partition without edges inside a class; self edges are absorbed."""
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
    """The problem without symmetry reduction: every node is a class of its own; self edges are absorbed."""
    problem = absorb_loops(problem)
    n = len(problem.nodes)
    pairing = np.zeros((1, 2), dtype=np.int64)
    ones = np.ones(n, dtype=np.int64)
    return Folded(problem, np.arange(n), ones, (pairing,) * len(problem.edges), np.arange(len(problem.edges)))


def _incident(problem: Problem) -> list[list[tuple[int, int]]]:
    """Per node, (label, neighbour) for each of its edges. Labels number the pairs (edge key, direction).

    Labels are multiples of a step above every colour, so that label + colour identifies both.
    """
    step = 2 * len(problem.nodes) + 2
    labels: dict[tuple[int, ...], int] = {}
    incident: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]
    for e in problem.edges:
        label = 2 * labels.setdefault(e.key, len(labels))
        incident[e.u].append((label * step, e.v))
        incident[e.v].append(((label + 1) * step, e.u))
    return incident


def _refine(colours: list[int], incident: list[list[tuple[int, int]]]) -> list[int]:
    """The colours at the fixpoint, per node. New colours are numbered in the order of their first member."""
    colours = list(colours)
    members = grouped((c, v) for v, c in enumerate(colours))
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
    """Colour -> sorted multiset of label + neighbour's colour -> the dirty nodes with this colour and multiset."""
    parts: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for v in dirty:
        around = tuple(sorted([label + colours[w] for label, w in incident[v]]))
        parts.setdefault(colours[v], {}).setdefault(around, []).append(v)
    return parts


def _new_parts(members: dict[int, list[int]], colour: int, parts: dict[tuple[int, ...], list[int]]) -> list[list[int]]:
    """The parts of class `colour` that get a new colour: all but the largest, to which `members[colour]` is reduced.

    The nodes of the class that are not dirty have no neighbour whose colour changed. They form one part.
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
    """Colours in which every member of a class in `inner` has its own. The next refinement propagates the split."""
    ids: dict[tuple[int, int], int] = {}
    return [ids.setdefault((c, v if c in inner else -1), len(ids)) for v, c in enumerate(colours)]


def _quotient(problem: Problem, colours: list[int]) -> Folded:
    """The quotient by these colours. Classes are numbered in the order of their first member."""
    ids: dict[int, int] = {}
    classes = np.array([ids.setdefault(c, len(ids)) for c in colours], dtype=np.int64)
    counts = np.bincount(classes, minlength=len(ids))
    # rank of each node inside its class
    rank = np.zeros(len(classes), dtype=np.int64)
    order = np.argsort(classes, kind="stable")
    rank[order] = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    nodes: list[Node] = []
    for node, c in zip(problem.nodes, classes, strict=True):
        if c == len(nodes):
            n = int(counts[c])
            nodes.append(Node(node.name, node.cost * n, (node.signature, n)))
    of = classes.tolist()
    kinds = [(of[e.u], of[e.v], e.key) for e in problem.edges]
    groups = grouped(zip(kinds, problem.edges, strict=True))
    number = {kind: i for i, kind in enumerate(groups)}
    edges = tuple(_multiply(u, v, group) for (u, v, _), group in groups.items())
    ranks = rank.tolist()
    pairings = tuple([_pairing(g, ranks) for g in groups.values()])
    into = np.array([number[kind] for kind in kinds], dtype=np.int64)
    return Folded(Problem(tuple(nodes), edges), classes, counts, pairings, into)


def _multiply(u: int, v: int, group: list[Edge]) -> Edge:
    """The folded edge of equal edges between two classes, with their costs added up."""
    first, n = group[0], len(group)
    return Edge(u, v, first.gu, first.gv, first.table * n if n > 1 else first.table, (*first.key, n))


def _pairing(group: list[Edge], rank: Sequence[int]) -> Ints | None:
    """The pairs of members that the edges of a group join, as in `Folded.pairings`."""
    pairs = np.array([(rank[e.u], rank[e.v]) for e in group], dtype=np.int64)
    if len(pairs) == 1:
        return pairs
    step = len(rank) + 1
    codes, times = np.unique(pairs[:, 0] * step + pairs[:, 1], return_counts=True)
    return np.stack(np.divmod(codes, step), axis=1) if (times == times[0]).all() else None
