"""Presolve of a problem with memory rows: how each reduction treats the bytes of nodes and edges.

    self edges     their bytes are added to the node                                                      -> attach
    folding        nodes and edges share a symmetry class only if they have equal bytes in every row. `mark` writes the
                   bytes into signatures and keys, where colour refinement sees them. The LP bound of the quotient is
                   then that of the unfolded problem with the same rows. Equal layers are live at different program
                   points, so a class splits into the layers that are live at the point of a row, those that are not,
                   and the layer around the point                                                 -> mark, fold_rows
    elimination    a strategy is removed only if one that dominates it has no more bytes in any row      -> restricted
    contraction    only nodes without bytes, whose edges have none either, are contracted: their best strategy does not
                   depend on the multipliers                                                             -> contracted

A presolved problem is valid for the rows attached to it and for no others. A new row requires a new presolve.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Floats, Ints, Problem, absorb_loops, classes_by_strategy, used
from autopar.passes.solver import elimination
from autopar.passes.solver import symmetry as folding
from autopar.passes.solver.contraction import contract
from autopar.passes.solver.dead_end import Footprints, eliminate

Lift = Callable[[Ints], Ints]
SymmetryReduction = Literal["none", "tie", "bound"]


@dataclass(frozen=True, slots=True)
class PresolveEffort:
    """Limits of dead-end elimination, which under a memory budget removes less and takes longer."""

    # most sweeps over all nodes (settled on the zoo; `bench sensitivity`, 2026-11: no effect on small programs)
    rounds: int = 4


PRESOLVE = PresolveEffort()


@dataclass(frozen=True, slots=True, eq=False)
class ConstrainedProblem:
    """A problem without self edges, and the bytes that its plans need at R program points.

    Attributes:
        problem: costs in seconds.
        constants: bytes that no decision changes, shape (R,).
        nodes: node index -> bytes, shape (R, strategies); nodes without bytes are absent.
        edges: edge index -> bytes, shape (R, *table.shape); edges without bytes are absent.
    """

    problem: Problem
    constants: Floats
    nodes: Mapping[int, Floats]
    edges: Mapping[int, Floats]

    @property
    def rows(self) -> int:
        """Number of program points R."""
        return len(self.constants)


@dataclass(frozen=True, slots=True, eq=False)
class PresolvedProblem:
    """A presolved problem with its rows.

    Attributes:
        constrained: the problem and its rows; seconds and bytes are multiplied by class sizes.
        counts: members of each class, as in `symmetry.Folded`; ones if `symmetric`.
        pairings: which members each edge joins, as in `symmetry.Folded`.
        constant: seconds of the nodes that presolve has removed.
        lift: plan of the presolved problem -> plan of the unfolded problem.
        first: the first unfolded node of each class, shape (nodes,).
        keep: per class, the strategies of its first unfolded node that are left, ascending.
        symmetric: plans have equal strategies for equal layers, and bounds are valid for such plans only.
    """

    constrained: ConstrainedProblem
    counts: Ints
    pairings: tuple[Ints | None, ...]
    constant: float
    lift: Lift
    first: Ints
    keep: tuple[Ints, ...]
    symmetric: bool = False

    def project(self, assignment: Ints) -> Ints | None:
        """The plan that takes in each class the strategy of its first member; None if presolve removed that strategy.

        `lift` of the result differs from `assignment` where members of a class have different strategies.
        """
        wanted = assignment[self.first]
        positions = np.array([np.searchsorted(k, s) for k, s in zip(self.keep, wanted, strict=True)], dtype=np.int64)
        inside = all(i < len(k) and k[i] == s for i, k, s in zip(positions, self.keep, wanted, strict=True))
        return positions if inside else None


def attach(problem: Problem, rows: Sequence[Row]) -> ConstrainedProblem:
    """The problem with these rows, where the costs and bytes of self edges are added to their nodes."""
    # index of each edge once self edges are gone
    place = np.cumsum([e.u != e.v for e in problem.edges], dtype=np.int64) - 1
    nodes: dict[int, Floats] = {}
    edges: dict[int, Floats] = {}
    for r, row in enumerate(rows):
        for v, usage in row.nodes.items():
            _add(nodes, v, r, len(rows), usage)
        for i, usage in row.edges.items():
            e = problem.edges[i]
            if e.u == e.v:
                _add(nodes, e.u, r, len(rows), usage[e.gu, e.gv])
            else:
                _add(edges, int(place[i]), r, len(rows), usage)
    constants = np.array([row.constant for row in rows], dtype=np.float64)
    return ConstrainedProblem(
        absorb_loops(problem), constants, dict(sorted(nodes.items())), dict(sorted(edges.items()))
    )


def _add(into: dict[int, Floats], index: int, row: int, rows: int, usage: Floats) -> None:
    """Add the bytes of one of `rows` rows to the array of a node or edge, which is created when it gets any."""
    if index not in into:
        if not usage.any():
            return
        into[index] = np.zeros((rows, *usage.shape))
    into[index][row] += usage


def mark(constrained: ConstrainedProblem) -> Problem:
    """The problem with each signature and key extended by a number for the bytes; 0 for no bytes."""
    ids: dict[Hashable, int] = {}

    def number(usage: Floats | None) -> int:
        return 0 if usage is None else ids.setdefault((usage.shape, usage.tobytes()), len(ids) + 1)

    nodes = (
        replace(n, signature=(n.signature, number(constrained.nodes.get(v))))
        for v, n in enumerate(constrained.problem.nodes)
    )
    edges = (
        replace(e, key=(*e.key, number(constrained.edges.get(i)))) for i, e in enumerate(constrained.problem.edges)
    )
    return Problem(tuple(nodes), tuple(edges))


def fold_rows(constrained: ConstrainedProblem, how: SymmetryReduction) -> PresolvedProblem:
    """The quotient by symmetry classes, whose bytes are the sums over the members.

    "bound" refines the classes by bytes, so that bounds are valid for the unfolded problem. "tie" does not: its plans
    have equal strategies for equal layers, and its bounds are valid for such plans only. "none" gives every node a
    class of its own.
    """
    folded = {
        "none": lambda: folding.identity(constrained.problem),
        "tie": lambda: folding.fold(constrained.problem),
        "bound": lambda: folding.fold(mark(constrained)),
    }[how]()
    first = np.unique(folded.classes, return_index=True)[1]
    keep = tuple(np.arange(len(n.cost)) for n in folded.problem.nodes)
    nodes = _summed(constrained.nodes, folded.classes)
    quotient = ConstrainedProblem(
        folded.problem, constrained.constants, nodes, _summed(constrained.edges, folded.edges)
    )
    # dead-end elimination works once per signature and key, so these have to include the bytes
    quotient = replace(quotient, problem=mark(quotient))
    if how == "tie":  # bounds need not hold for the unfolded problem, so every class counts as one node
        ones, pairing = np.ones_like(folded.counts), np.zeros((1, 2), dtype=np.int64)
        return PresolvedProblem(
            quotient, ones, (pairing,) * len(folded.pairings), 0.0, folded.lift, first, keep, folded.tied
        )
    return PresolvedProblem(quotient, folded.counts, folded.pairings, 0.0, folded.lift, first, keep)


def _summed(usage: Mapping[int, Floats], into: Ints) -> dict[int, Floats]:
    """Class -> sum of the bytes of its members, where `into[i]` is the class of member i."""
    out: dict[int, Floats] = {}
    for i, array in usage.items():
        c = int(into[i])
        out[c] = out[c] + array if c in out else array
    return dict(sorted(out.items()))


def restricted(presolved: PresolvedProblem, rounds: int) -> PresolvedProblem:
    """The problem after dead-end elimination.

    Args:
        rounds: sweeps that also remove dominated strategies; with 0 only infeasible ones are removed.
    """
    old = presolved.constrained
    reduced = eliminate(old.problem, rounds, footprints=Footprints(old.nodes, old.edges))
    keep = reduced.keep
    nodes = {v: usage[:, keep[v]] for v, usage in old.nodes.items()}
    edges = {i: _cut(usage, old.problem, i, keep) for i, usage in old.edges.items()}
    lift = presolved.lift
    return replace(
        presolved,
        constrained=ConstrainedProblem(reduced.problem, old.constants, nodes, edges),
        lift=lambda plan: lift(reduced.lift(plan)),
        keep=tuple(k[left] for k, left in zip(presolved.keep, keep, strict=True)),
    )


def _cut(usage: Floats, problem: Problem, i: int, keep: Sequence[Ints]) -> Floats:
    """Bytes of edge i over the classes that are left, in the order of the table that `problem.restrict` makes."""
    e = problem.edges[i]
    return usage[:, used(e.gu[keep[e.u]], usage.shape[1])[:, None], used(e.gv[keep[e.v]], usage.shape[2])]


def contracted(presolved: PresolvedProblem) -> PresolvedProblem:
    """The problem without its nodes of degree <= 2 that have no bytes in any row and whose edges have none either."""
    constrained = presolved.constrained
    bare = contract(
        constrained.problem,
        presolved.pairings,
        presolved.counts,
        frozenset(constrained.nodes),
        frozenset(constrained.edges),
    )
    edges: dict[int, Floats] = {}
    for new, old in bare.preserved.items():
        # contraction may have swapped the ends of the edge
        transposed = bare.nodes[bare.problem.edges[new].u] != constrained.problem.edges[old].u
        edges[new] = constrained.edges[old].transpose(0, 2, 1) if transposed else constrained.edges[old]
    nodes = {i: constrained.nodes[v] for i, v in enumerate(bare.nodes) if v in constrained.nodes}
    lift = presolved.lift
    return PresolvedProblem(
        ConstrainedProblem(bare.problem, constrained.constants, nodes, edges),
        bare.counts,
        bare.pairings,
        presolved.constant + bare.constant,
        lambda plan: lift(bare.lift(plan)),
        presolved.first[list(bare.nodes)],
        tuple(presolved.keep[v] for v in bare.nodes),
        presolved.symmetric,
    )


def ordered(presolved: PresolvedProblem) -> PresolvedProblem:
    """The problem with its nodes in an order of narrow frontier, in which dual ascents converge sooner."""
    constrained, lift = presolved.constrained, presolved.lift
    problem, nodes, place = elimination.ordered(constrained.problem)
    edges: dict[int, Floats] = {}
    for i, by_class in constrained.edges.items():
        rows, columns = classes_by_strategy(constrained.problem.edges[i])
        edges[i] = by_class[:, rows[:, None], columns]
    usage = {i: constrained.nodes[v] for i, v in enumerate(nodes) if v in constrained.nodes}
    return replace(
        presolved,
        constrained=ConstrainedProblem(problem, constrained.constants, usage, edges),
        counts=presolved.counts[nodes],
        lift=lambda plan: lift(plan[place]),
        first=presolved.first[nodes],
        keep=tuple(presolved.keep[v] for v in nodes),
    )


def presolve(
    problem: Problem,
    rows: Sequence[Row],
    how: SymmetryReduction,
    *,
    full: bool = True,
    effort: PresolveEffort = PRESOLVE,
) -> PresolvedProblem:
    """Attach the rows, fold, eliminate, contract, and eliminate infeasible strategies again.

    Args:
        problem: the unfolded problem.
        rows: the memory rows added so far.
        how: the symmetry reduction -> fold_rows.
        full: otherwise only infeasible strategies are removed, and nothing is contracted.
        effort: sweeps of dead-end elimination.

    Raises:
        SolverError: a node has no strategy left.
    """
    presolved = fold_rows(attach(problem, rows), how)
    if not full:
        return restricted(presolved, 0)
    return ordered(restricted(contracted(restricted(presolved, effort.rounds)), 0))
