"""A problem with memory rows attached, and how rows follow it through the presolve.

    self edges     their bytes go to the node                                                             -> attach
    folding        nodes and edges share a class only if they have equal bytes in every row; `mark` writes that into
                   signatures and keys, so colour refinement sees it. The quotient's LP bound then still is that of the
                   unfolded problem with the same rows. Liveness differs between equal layers, so a class comes apart
                   into what lives at a row's point, what does not, and the layer around it           -> mark, fold_rows
    elimination    a strategy goes only for one that needs no more bytes in any row                      -> restricted
    contraction    only of nodes and edges without bytes: their best choice does not depend on any price  -> contracted

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
Folding = Literal["none", "tie", "bound"]
ROUNDS, LATER_ROUNDS = 4, 2  # sweeps of dead-end elimination at the start and after fixing


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
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
class Core:
    """A presolved problem with its rows.

    Attributes:
        loaded: seconds and bytes are multiplied by class sizes.
        counts, pairings: as in `Folded`.
        constant: seconds already decided.
        lift: strategies of all unfolded nodes from those of the core.
        first: the first unfolded node of each class.
        keep: the strategies of that node that each class still has.
        alike: its plans treat several nodes alike, and its bounds are on such plans only.
    """

    loaded: Loaded
    counts: Ints
    pairings: tuple[Ints | None, ...]
    constant: float
    lift: Lift
    first: Ints
    keep: tuple[Ints, ...]
    alike: bool = False

    def project(self, assignment: Ints) -> Ints | None:
        """The core's plan that an unfolded one follows at the first member of each class; None if that is ruled out."""
        wanted = assignment[self.first]
        found = np.array([np.searchsorted(k, s) for k, s in zip(self.keep, wanted, strict=True)], dtype=np.int64)
        inside = all(i < len(k) and k[i] == s for i, k, s in zip(found, self.keep, wanted, strict=True))
        return found if inside else None


def attach(problem: Problem, rows: Sequence[Row]) -> Loaded:
    """The problem, self edges absorbed, with these rows."""
    place = np.cumsum([e.u != e.v for e in problem.edges], dtype=np.int64) - 1
    nodes: dict[int, Floats] = {}
    edges: dict[int, Floats] = {}
    for r, row in enumerate(rows):
        for v, held in row.nodes.items():
            _add(nodes, v, r, len(rows), held)
        for i, held in row.edges.items():
            e = problem.edges[i]
            if e.u == e.v:
                _add(nodes, e.u, r, len(rows), held[e.gu, e.gv])
            else:
                _add(edges, int(place[i]), r, len(rows), held)
    constants = np.array([row.constant for row in rows], dtype=np.float64)
    return Loaded(absorb_loops(problem), constants, dict(sorted(nodes.items())), dict(sorted(edges.items())))


def _add(into: dict[int, Floats], index: int, row: int, rows: int, held: Floats) -> None:
    if index not in into:
        if not held.any():
            return
        into[index] = np.zeros((rows, *held.shape))
    into[index][row] += held


def mark(loaded: Loaded) -> Problem:
    """The problem with signatures and keys extended by a number for the bytes of each node and edge; 0 for none."""
    ids: dict[Hashable, int] = {}

    def number(held: Floats | None) -> int:
        return 0 if held is None else ids.setdefault((held.shape, held.tobytes()), len(ids) + 1)

    nodes = (
        replace(n, signature=(n.signature, number(loaded.nodes.get(v)))) for v, n in enumerate(loaded.problem.nodes)
    )
    edges = (replace(e, key=(*e.key, number(loaded.edges.get(i)))) for i, e in enumerate(loaded.problem.edges))
    return Problem(tuple(nodes), tuple(edges))


def fold_rows(loaded: Loaded, how: Folding) -> Core:
    """The quotient, its bytes those of all members.

    "bound" respects bytes, so bounds hold for the unfolded problem; "tie" does not, and gives plans that treat equal
    layers alike, with bounds on such plans only; "none" leaves every node for itself.
    """
    folded = {
        "none": lambda: folding.identity(loaded.problem),
        "tie": lambda: folding.fold(loaded.problem),
        "bound": lambda: folding.fold(mark(loaded)),
    }[how]()
    first = np.unique(folded.classes, return_index=True)[1]
    keep = tuple(np.arange(len(n.cost)) for n in folded.problem.nodes)
    nodes = _summed(loaded.nodes, folded.classes)
    quotient = Loaded(folded.problem, loaded.constants, nodes, _summed(loaded.edges, folded.edges))
    quotient = replace(quotient, problem=mark(quotient))  # elimination answers equal signatures once
    if how == "tie":  # a problem of its own: nobody's bounds are at stake
        ones, one = np.ones_like(folded.counts), np.zeros((1, 2), dtype=np.int64)
        return Core(quotient, ones, (one,) * len(folded.pairings), 0.0, folded.lift, first, keep, folded.tied)
    return Core(quotient, folded.counts, folded.pairings, 0.0, folded.lift, first, keep)


def _summed(held: Mapping[int, Floats], into: Ints) -> dict[int, Floats]:
    """Bytes of the members of each class, added up."""
    out: dict[int, Floats] = {}
    for i, array in held.items():
        c = int(into[i])
        out[c] = out[c] + array if c in out else array
    return dict(sorted(out.items()))


def restricted(core: Core, start: Sequence[Ints] | None, rounds: int) -> Core:
    """Without dead ends, from the strategies `start`, and during `rounds` sweeps without unneeded ones."""
    old = core.loaded
    reduced = eliminate(old.problem, rounds, None if start is None else tuple(start), Footprints(old.nodes, old.edges))
    keep = reduced.keep
    nodes = {v: held[:, keep[v]] for v, held in old.nodes.items()}
    edges = {i: _cut(held, old.problem, i, keep) for i, held in old.edges.items()}
    lift = core.lift
    return replace(
        core,
        loaded=Loaded(reduced.problem, old.constants, nodes, edges),
        lift=lambda plan: lift(reduced.lift(plan)),
        keep=tuple(k[left] for k, left in zip(core.keep, keep, strict=True)),
    )


def _cut(held: Floats, problem: Problem, i: int, keep: Sequence[Ints]) -> Floats:
    """Bytes of an edge over the classes that are left, as `problem.restrict` cuts its table."""
    e = problem.edges[i]
    return held[:, used(e.gu[keep[e.u]], held.shape[1])[:, None], used(e.gv[keep[e.v]], held.shape[2])]


def contracted(core: Core) -> Core:
    """Without the nodes of degree <= 2 that hold nothing in any row, nor do their edges."""
    loaded = core.loaded
    bare = contract(loaded.problem, core.pairings, core.counts, frozenset(loaded.nodes), frozenset(loaded.edges))
    edges: dict[int, Floats] = {}
    for new, old in bare.held.items():
        turned = bare.nodes[bare.problem.edges[new].u] != loaded.problem.edges[old].u
        edges[new] = loaded.edges[old].transpose(0, 2, 1) if turned else loaded.edges[old]
    nodes = {i: loaded.nodes[v] for i, v in enumerate(bare.nodes) if v in loaded.nodes}
    lift = core.lift
    return Core(
        Loaded(bare.problem, loaded.constants, nodes, edges),
        bare.counts,
        bare.pairings,
        core.constant + bare.constant,
        lambda plan: lift(bare.lift(plan)),
        core.first[list(bare.nodes)],
        tuple(core.keep[v] for v in bare.nodes),
        core.alike,
    )


def ordered(core: Core) -> Core:
    """With nodes in an order with a narrow frontier, in which ascents converge sooner."""
    loaded, lift = core.loaded, core.lift
    problem, nodes, place = elimination.ordered(loaded.problem)
    held = {i: loaded.nodes[v] for i, v in enumerate(nodes) if v in loaded.nodes}
    return replace(
        core,
        loaded=replace(loaded, problem=problem, nodes=held),
        counts=core.counts[nodes],
        lift=lambda plan: lift(plan[place]),
        first=core.first[nodes],
        keep=tuple(core.keep[v] for v in nodes),
    )


def narrowed(core: Core, messages: Sequence[tuple[Floats, Floats]], keep: Sequence[Ints]) -> Core:
    """The core over the strategies `keep`, with `dual_ascent.Ascent.messages` moved into costs; plans cost the same."""
    moved = reparametrise(core.loaded.problem, messages)
    start = replace(core, loaded=replace(core.loaded, problem=moved))
    return restricted(contracted(restricted(start, keep, LATER_ROUNDS)), None, 0)


def presolve(problem: Problem, rows: Sequence[Row], how: Folding, *, full: bool = True, rounds: int = ROUNDS) -> Core:
    """Attach, fold, eliminate, contract. Unless `full` only infeasible strategies go, and nothing is contracted.

    Raises SolverError when a node has no strategy left.
    """
    core = fold_rows(attach(problem, rows), how)
    if not full:
        return restricted(core, None, 0)
    return ordered(restricted(contracted(restricted(core, None, rounds)), None, 0))
