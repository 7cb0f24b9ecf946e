"""Folding to the fixpoint, its lift, and what the folded bound is worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.problem import Problem
from autopar.passes.solver.dual_ascent import ascend
from autopar.passes.solver.optimize import optimize
from autopar.passes.solver.symmetry import Folded, fold, identity
from tests.passes.support.small_problems import brute, edge, layered, node, problems, twisted_ring


def shape(folded: Folded) -> str:
    """One line per folded node with its size, then per folded edge its ends and how many edges it stands for."""
    nodes = [f"{n.name} x{c}" for n, c in zip(folded.problem.nodes, folded.counts, strict=True)]
    edges = [
        f"{folded.problem.nodes[e.u].name}-{folded.problem.nodes[e.v].name} x{e.key[-1]}" for e in folded.problem.edges
    ]
    return ", ".join(nodes + edges)


FREE = [[0.0, 1.0], [1.0, 0.0]]


def star(leaves: int) -> Problem:
    nodes = [node("hub", 0.0, 0.0)] + [node(f"leaf{i}", 1.0, 2.0) for i in range(leaves)]
    return Problem(tuple(nodes), tuple(edge(0, 1 + i, FREE) for i in range(leaves)))


def path(n: int) -> Problem:
    return Problem(tuple(node(f"p{i}", 0.0, 1.0) for i in range(n)), tuple(edge(i, i + 1, FREE) for i in range(n - 1)))


def cycle(n: int) -> Problem:
    return Problem(
        tuple(node(f"c{i}", 0.0, 1.0) for i in range(n)), tuple(edge(i, (i + 1) % n, FREE) for i in range(n))
    )


@pytest.mark.parametrize(
    ("problem", "printed"),
    [
        pytest.param(star(3), "hub x1, leaf0 x3, hub-leaf0 x3", id="leaves fold"),
        pytest.param(path(3), "p0 x1, p1 x1, p2 x1, p0-p1 x1, p1-p2 x1", id="a directed path does not"),
        pytest.param(cycle(3), "c0 x1, c1 x1, c2 x1, c0-c1 x1, c1-c2 x1, c2-c0 x1", id="no edge inside a class"),
        pytest.param(
            layered(0, 4),
            "hub x1, a0 x4, b0 x4, c0 x4, hub-a0 x4, hub-c0 x4, a0-b0 x4, b0-c0 x4, a0-b0 x4",
            id="layers",
        ),
    ],
)
def test_classes(problem: Problem, printed: str) -> None:
    assert shape(fold(problem)) == printed


def test_a_long_path_is_refined_to_the_end() -> None:
    """Both ends of a symmetric path differ from its middle only after many rounds."""
    half = 40
    nodes = tuple(node(f"p{i}", 0.0, 1.0) for i in range(2 * half + 1))
    edges = [edge(i, i + 1, FREE) for i in range(half)] + [
        edge(2 * half - i, 2 * half - 1 - i, FREE) for i in range(half)
    ]
    folded = fold(Problem(nodes, tuple(edges)))
    assert folded.counts.tolist() == [2] * half + [1]
    assert folded.classes.tolist() == [*range(half), half, *reversed(range(half))]


def test_shifted_edges_have_another_pairing() -> None:
    straight, shifted = fold(layered(1, 4)), fold(layered(1, 4, shift=1))
    assert shape(straight) == shape(shifted)
    assert np.array_equal(straight.pairings[2], straight.pairings[4])
    assert not np.array_equal(shifted.pairings[2], shifted.pairings[4])


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(0, 2))
def test_a_folded_value_is_the_value_of_the_lifted_plan(seed: int, layers: int, shift: int) -> None:
    problem = layered(seed, layers, shift)
    folded = fold(problem)
    rng = np.random.default_rng(seed)
    plan = np.array([rng.integers(len(n.cost)) for n in folded.problem.nodes])
    assert folded.problem.value(plan) == pytest.approx(problem.value(folded.lift(plan)), rel=1e-12)


@settings(max_examples=60)
@given(problems)
def test_random_problems_fold_without_loss(problem: Problem) -> None:
    """Every node has a signature of its own, so nothing but self edges may change."""
    folded = fold(problem)
    assert not folded.tied
    assert brute(folded.problem) == pytest.approx(brute(problem), abs=1e-12)


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(0, 1))
def test_the_folded_bound_holds_unfolded(seed: int, shift: int) -> None:
    problem = layered(seed, 3, shift)
    assert ascend(fold(problem).problem).lower <= brute(problem) + 1e-12


def test_a_tied_optimum_is_not_taken_for_the_optimum() -> None:
    problem = twisted_ring(3)
    assert brute(fold(problem).problem) == 3.0
    assert brute(problem) == 1.0
    assert optimize(problem).objective == 1.0
    forced = optimize(problem, solver="cbc")
    assert (forced.objective, forced.status) == (3.0, "optimal-tied")
    assert forced.lower_bound <= 1.0
    assert forced.gap >= 2 / 3


def test_identity_folds_nothing() -> None:
    folded = identity(layered(0, 3))
    assert not folded.tied
    assert folded.lift(np.arange(10)).tolist() == list(range(10))
