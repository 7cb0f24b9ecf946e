"""Dual ascent: valid bounds, for the whole and for every strategy, and plans that are what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.errors import SolverError
from autopar.ir.problem import Problem, absorb_loops, by_strategy
from autopar.passes.solver.dead_end import eliminate
from autopar.passes.solver.dual_ascent import AscentEffort, ascend, reparametrise
from autopar.passes.solver.symmetry import fold
from tests.passes.support.small_problems import (
    all_values,
    brute,
    dense_problems,
    edge,
    frustrated,
    layered,
    node,
    problems,
)

FREE = [[0.0, 1.0], [1.0, 0.0]]


def feasible(problem: Problem) -> Problem:
    try:
        return eliminate(absorb_loops(problem), rounds=0).problem
    except SolverError:
        assume(False)
        raise


def lowered(problem: Problem, by: float) -> Problem:
    nodes = tuple(replace(n, cost=n.cost - by) for n in problem.nodes)
    return Problem(nodes, tuple(replace(e, table=e.table - by) for e in problem.edges))


@settings(max_examples=100)
@given(problems)
def test_bounds_enclose_the_optimum(problem: Problem) -> None:
    problem = feasible(problem)
    ascent, best = ascend(problem), brute(problem)
    assert ascent.lower <= best + 1e-12
    assert ascent.value >= best - 1e-12
    if ascent.assignment is not None:
        assert problem.value(ascent.assignment) == ascent.value


@settings(max_examples=100)
@given(problems)
def test_classes_by_strategy_and_no_strategy_bounds_change_no_step_of_an_ascent(problem: Problem) -> None:
    problem = feasible(problem)
    renumbered = by_strategy(problem)
    whole = AscentEffort(shrink=1.0)
    plain, quick = ascend(problem, effort=whole), ascend(renumbered, effort=whole, bounded=False)
    assert (quick.passes, quick.lower, quick.value) == (plain.passes, plain.lower, plain.value)
    assert (quick.assignment is None) == (plain.assignment is None)
    np.testing.assert_array_equal(quick.assignment, plain.assignment)
    assert not quick.strategy_bounds
    for e, quick_messages, messages in zip(problem.edges, quick.messages, plain.messages, strict=True):
        ends = (e.gu, e.gv) if e.u < e.v else (e.gv, e.gu)
        now = renumbered.edges[problem.edges.index(e)]
        ends_now = (now.gu, now.gv) if e.u < e.v else (now.gv, now.gu)
        for mine, mine_now, into, into_now in zip(ends, ends_now, messages, quick_messages, strict=True):
            np.testing.assert_array_equal(into[mine], into_now[mine_now])


@settings(max_examples=100)
@given(dense_problems, st.integers(2, 9))
def test_a_strategy_bound_never_exceeds_the_best_plan_with_that_strategy(problem: Problem, passes: int) -> None:
    """Below zero, too: reparametrised costs go there, and then edges that jump over a node count."""
    problem = lowered(feasible(problem), 0.01)
    bounds = ascend(problem, effort=AscentEffort(passes=passes)).strategy_bounds
    plans, values = all_values(problem)
    for v, bound in enumerate(bounds):
        for s in range(len(bound)):
            assert bound[s] <= values[plans[v] == s].min() + 1e-9


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(0, 1))
def test_with_counts_strategy_bounds_hold_for_a_single_member(seed: int, shift: int) -> None:
    problem = layered(seed, 3, shift)
    folded = fold(problem)
    bounds = ascend(folded.problem, counts=folded.counts, effort=AscentEffort(passes=7)).strategy_bounds
    plans, values = all_values(problem)
    for v, c in enumerate(folded.classes):
        for s in range(len(bounds[c])):
            assert bounds[c][s] <= values[plans[v] == s].min() + 1e-9


@settings(max_examples=40)
@given(dense_problems)
def test_messages_move_costs_and_change_no_plan(problem: Problem) -> None:
    problem = feasible(problem)
    moved = reparametrise(problem, ascend(problem, effort=AscentEffort(passes=4)).messages)
    np.testing.assert_allclose(all_values(moved)[1], all_values(problem)[1], atol=1e-10)


@settings(max_examples=40)
@given(dense_problems)
def test_another_ascent_starts_where_the_first_ended(problem: Problem) -> None:
    problem = feasible(problem)
    first = ascend(problem, effort=AscentEffort(passes=6))
    again = ascend(reparametrise(problem, first.messages), effort=AscentEffort(passes=2))
    assert again.lower >= first.lower - 1e-9


def test_a_tree_closes_in_two_passes() -> None:
    nodes = tuple(node(f"n{i}", 0.3 * (i % 2), 0.2) for i in range(7))
    tree = Problem(nodes, tuple(edge((i - 1) // 2, i, FREE) for i in range(1, 7)))
    ascent = ascend(tree, effort=AscentEffort(passes=2))
    assert ascent.lower == pytest.approx(brute(tree))
    assert ascent.value == pytest.approx(brute(tree))


def test_bounds_rise_from_pass_to_pass() -> None:
    problem = frustrated("circulant-9")
    lowers = [ascend(problem, effort=AscentEffort(passes=p)).lower for p in range(2, 12)]
    assert lowers == sorted(lowers)
    assert lowers[0] < lowers[-1] < brute(problem)


def test_no_plan_is_made_up_where_none_exists() -> None:
    """Three nodes that must all differ, with two strategies."""
    inf = float("inf")
    differ = [[inf, 0.0], [0.0, inf]]
    triangle = Problem(
        tuple(node(f"n{i}", 0.0, 0.0) for i in range(3)), tuple(edge(i, (i + 1) % 3, differ) for i in range(3))
    )
    ascent = ascend(triangle)
    assert ascent.assignment is None
    assert ascent.value == inf


def test_the_empty_problem() -> None:
    ascent = ascend(Problem((), ()))
    assert (ascent.lower, ascent.value) == (0.0, 0.0)


def test_a_deadline_in_the_past_still_gives_both_bounds() -> None:
    problem = frustrated("complete-6")
    ascent = ascend(problem, deadline=0.0)
    assert ascent.passes == 2
    assert -np.inf < ascent.lower <= ascent.value < np.inf


def test_the_same_problem_gives_the_same_answer() -> None:
    first, two = ascend(frustrated("petersen")), ascend(frustrated("petersen"))
    assert (first.lower, first.value, first.passes) == (two.lower, two.value, two.passes)
    assert first.assignment is not None
    assert np.array_equal(first.assignment, two.assignment)
