"""A problem with memory rows attached, and how rows follow it through the presolve.

    self edges     their bytes go to the node                                                             -> attach
    folding        nodes and edges share a class only if they have equal bytes in every row; `mark` writes that into
                   signatures and keys, so colour refinement sees it. The quotient's LP bound then still is that of the
                   unfolded problem with the same rows. Liveness differs between equal layers, so a class comes apart
                   into what lives at a row's point, what does not, and the layer around it           -> mark, fold_rows
    elimination    a strategy goes only for one that needs no more bytes in any row                      -> restricted
    contraction    only of nodes and edges without bytes: their best choice depends on no multiplier      -> contracted

All of it holds for the rows attached and no others: a new row means a new presolve.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Floats, Ints, Problem, absorb_loops, used
from autopar.passes.solver import elimination
from autopar.passes.solver import symmetry as folding
from autopar.passes.solver.contraction import contract
from autopar.passes.solver.dead_end import Footprints, eliminate
from autopar.passes.solver.dual_ascent import reparametrise

Lift = Callable[[Ints], Ints]
SymmetryReduction = Literal["none", "tie", "bound"]
ROUNDS, LATER_ROUNDS = 4, 2  # sweeps of dead-end elimination at the start and after fixing


@dataclass(frozen=True, slots=True, eq=False)
class ConstrainedProblem:
    """A problem without self edges and what its plans hold at R program points.

    Attributes:
        problem: seconds.
        constants: bytes that no decision changes, shape (R,).
        nodes: node index -> bytes, shape (R, strategies); nodes without bytes are absent.
        edges: edge index -> bytes, shape (R, *table.shape); likewise.
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
        constrained: seconds and bytes are multiplied by class sizes.
        counts, pairings: as in `Folded`.
        constant: seconds already decided.
        lift: strategies of all unfolded nodes from those of the presolved.
        first: the first unfolded node of each class.
        keep: the strategies of that node that each class still has.
        alike: its plans treat several nodes alike, and its bounds are on such plans only.
    """

    constrained: ConstrainedProblem
    counts: Ints
    pairings: tuple[Ints | None, ...]
    constant: float
    lift: Lift
    first: Ints
    keep: tuple[Ints, ...]
    alike: bool = False

    def project(self, assignment: Ints) -> Ints | None:
        """The plan that takes, in each class, the strategy of the class's first member; None if that one is removed."""
        wanted = assignment[self.first]
        found = np.array([np.searchsorted(k, s) for k, s in zip(self.keep, wanted, strict=True)], dtype=np.int64)
        inside = all(i < len(k) and k[i] == s for i, k, s in zip(found, self.keep, wanted, strict=True))
        return found if inside else None


def attach(problem: Problem, rows: Sequence[Row]) -> ConstrainedProblem:
    """The problem, self edges absorbed, with these rows."""
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
    if index not in into:
        if not usage.any():
            return
        into[index] = np.zeros((rows, *usage.shape))
    into[index][row] += usage


def mark(constrained: ConstrainedProblem) -> Problem:
    """The problem with signatures and keys extended by a number for the bytes of each node and edge; 0 for none."""
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
    """The quotient, its bytes those of all members.

    "bound" respects bytes, so bounds hold for the unfolded problem; "tie" does not, and gives plans that treat equal
    layers alike, with bounds on such plans only; "none" leaves every node for itself.
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
    quotient = replace(quotient, problem=mark(quotient))  # elimination answers equal signatures once
    if how == "tie":  # a problem of its own: nobody's bounds are at stake
        ones, one = np.ones_like(folded.counts), np.zeros((1, 2), dtype=np.int64)
        return PresolvedProblem(
            quotient, ones, (one,) * len(folded.pairings), 0.0, folded.lift, first, keep, folded.tied
        )
    return PresolvedProblem(quotient, folded.counts, folded.pairings, 0.0, folded.lift, first, keep)


def _summed(usage: Mapping[int, Floats], into: Ints) -> dict[int, Floats]:
    """Bytes of the members of each class, added up."""
    out: dict[int, Floats] = {}
    for i, array in usage.items():
        c = int(into[i])
        out[c] = out[c] + array if c in out else array
    return dict(sorted(out.items()))


def restricted(presolved: PresolvedProblem, start: Sequence[Ints] | None, rounds: int) -> PresolvedProblem:
    """Without dead ends, from the strategies `start`, and during `rounds` sweeps without unneeded ones."""
    old = presolved.constrained
    reduced = eliminate(old.problem, rounds, None if start is None else tuple(start), Footprints(old.nodes, old.edges))
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
    """Bytes of an edge over the classes that are left, as `problem.restrict` cuts its table."""
    e = problem.edges[i]
    return usage[:, used(e.gu[keep[e.u]], usage.shape[1])[:, None], used(e.gv[keep[e.v]], usage.shape[2])]


def contracted(presolved: PresolvedProblem) -> PresolvedProblem:
    """Without the nodes of degree <= 2 that hold nothing in any row, nor do their edges."""
    constrained = presolved.constrained
    bare = contract(
        constrained.problem,
        presolved.pairings,
        presolved.counts,
        frozenset(constrained.nodes),
        frozenset(constrained.edges),
    )
    edges: dict[int, Floats] = {}
    for new, old in bare.held.items():
        turned = bare.nodes[bare.problem.edges[new].u] != constrained.problem.edges[old].u
        edges[new] = constrained.edges[old].transpose(0, 2, 1) if turned else constrained.edges[old]
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
        presolved.alike,
    )


def ordered(presolved: PresolvedProblem) -> PresolvedProblem:
    """With nodes in an order with a narrow frontier, in which ascents converge sooner."""
    constrained, lift = presolved.constrained, presolved.lift
    problem, nodes, place = elimination.ordered(constrained.problem)
    usage = {i: constrained.nodes[v] for i, v in enumerate(nodes) if v in constrained.nodes}
    return replace(
        presolved,
        constrained=replace(constrained, problem=problem, nodes=usage),
        counts=presolved.counts[nodes],
        lift=lambda plan: lift(plan[place]),
        first=presolved.first[nodes],
        keep=tuple(presolved.keep[v] for v in nodes),
    )


def fixed_by_bounds(
    presolved: PresolvedProblem, messages: Sequence[tuple[Floats, Floats]], keep: Sequence[Ints]
) -> PresolvedProblem:
    """The problem over the strategies `keep`, with `dual_ascent.Ascent.messages` moved into the costs."""
    moved = reparametrise(presolved.constrained.problem, messages)
    start = replace(presolved, constrained=replace(presolved.constrained, problem=moved))
    return restricted(contracted(restricted(start, keep, LATER_ROUNDS)), None, 0)


def presolve(
    problem: Problem, rows: Sequence[Row], how: SymmetryReduction, *, full: bool = True, rounds: int = ROUNDS
) -> PresolvedProblem:
    """Attach, fold, eliminate, contract. Unless `full` only infeasible strategies go, and nothing is contracted.

    Raises SolverError when a node has no strategy left.
    """
    presolved = fold_rows(attach(problem, rows), how)
    if not full:
        return restricted(presolved, None, 0)
    return ordered(restricted(contracted(restricted(presolved, None, rounds)), None, 0))
