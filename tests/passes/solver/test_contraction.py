"""Contraction of low degrees keeps the optimum, its plan and, for folded problems, an honest bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.problem import Problem, absorb_loops
from autopar.passes.solver.contraction import ContractionEffort, contract, min_plus
from autopar.passes.solver.dual_ascent import ascend
from autopar.passes.solver.symmetry import fold
from tests.passes.support.small_problems import all_values, brute, edge, frustrated, layered, node, problems

FREE = [[0.0, 1.0], [1.0, 0.0]]


def ring(n: int) -> Problem:
    nodes = tuple(node(f"n{i}", 0.1 * i, 0.3) for i in range(n))
    return Problem(nodes, tuple(edge(i, (i + 1) % n, FREE) for i in range(n)))


@settings(max_examples=150)
@given(problems)
def test_optimum_and_lift(problem: Problem) -> None:
    problem = absorb_loops(problem)
    done = contract(problem)
    plans, values = all_values(done.problem)
    best = brute(problem)
    assert values.min(initial=np.inf) + done.constant == pytest.approx(best, abs=1e-12)
    if np.isfinite(best):
        assert problem.value(done.lift(plans[:, values.argmin()])) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(
    "problem", [ring(3), ring(7), Problem((node("a", 2.0, 1.0),), ())], ids=["triangle", "ring", "one"]
)
def test_width_two_is_solved_outright(problem: Problem) -> None:
    done = contract(problem)
    assert done.problem.nodes == ()
    assert done.constant == pytest.approx(brute(problem))
    assert problem.value(done.lift(np.zeros(0, dtype=np.int64))) == pytest.approx(done.constant)


def test_degree_three_stays() -> None:
    assert [n.name for n in contract(frustrated("complete-4")).problem.nodes] == ["n0", "n1", "n2", "n3"]


def test_an_excessive_table_is_left_alone() -> None:
    assert len(contract(ring(5), effort=ContractionEffort(work=1)).problem.nodes) == 5


def test_parallel_edges_add_up() -> None:
    twice = Problem(ring(3).nodes[:2], (edge(0, 1, FREE), edge(1, 0, [[0.0, 0.0], [5.0, 0.0]], 1)))
    assert contract(twice).constant == pytest.approx(brute(twice))


def test_a_folded_problem_keeps_apart_what_faces_other_members() -> None:
    straight, shifted = fold(layered(2, 4)), fold(layered(2, 4, shift=1))
    assert not contract(straight.problem, straight.pairings, straight.counts).problem.nodes
    left = contract(shifted.problem, shifted.pairings, shifted.counts)
    names = [left.problem.nodes[e.u].name + left.problem.nodes[e.v].name for e in left.problem.edges]
    assert names == ["huba0", "hubb0", "a0b0", "a0b0"]
    assert left.counts.tolist() == [1, 4, 4]


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(0, 2))
def test_the_bound_of_a_contracted_folded_problem_holds_unfolded(seed: int, shift: int) -> None:
    problem = layered(seed, 3, shift)
    folded = fold(problem)
    left = contract(folded.problem, folded.pairings, folded.counts)
    bound = left.constant + ascend(left.problem, counts=left.counts).lower
    assert bound <= brute(problem) + 1e-12


def test_min_plus_in_chunks() -> None:
    a, b = np.arange(12.0).reshape(4, 3) % 5, np.arange(6.0).reshape(3, 2) % 4
    expected = [[min(a[x, k] + b[k, y] for k in range(3)) for y in range(2)] for x in range(4)]
    assert min_plus(a, b).tolist() == expected
    assert min_plus(a, b, ContractionEffort(chunk=1)).tolist() == expected
