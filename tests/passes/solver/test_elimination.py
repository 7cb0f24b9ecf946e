"""Elimination against brute force: plans, proofs, and what a narrow width gives up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.problem import Problem, absorb_loops
from autopar.passes.solver import elimination
from autopar.passes.solver.dead_end import eliminate
from autopar.passes.solver.dual_ascent import AscentEffort, ascend
from tests.passes.support.small_problems import (
    all_values,
    brute,
    dense_problems,
    edge,
    frustrated,
    node,
    random_problem,
)

pytestmark = pytest.mark.core
WIDE = 10_000


def feasible(problem: Problem) -> Problem:
    """As `ascend` wants it."""
    return eliminate(absorb_loops(problem), rounds=0).problem


@settings(max_examples=100)
@given(dense_problems, st.integers(2, 20))
def test_without_a_limit_it_is_exact(problem: Problem, passes: int) -> None:
    problem = feasible(problem)
    search_result = elimination.search(problem, ascend(problem, effort=AscentEffort(passes=passes)), np.inf, WIDE)
    assert search_result.plan is not None
    assert problem.value(search_result.plan) == pytest.approx(search_result.value, abs=1e-12)
    assert search_result.value == search_result.lower == pytest.approx(brute(problem), abs=1e-12)


@settings(max_examples=100)
@given(dense_problems, st.integers(1, 6), st.floats(0.5, 1.5))
def test_a_narrow_width_is_honest(problem: Problem, width: int, share: float) -> None:
    """The bound holds for all plans up to the limit, and the plan costs what it says."""
    problem = feasible(problem)
    best = brute(problem)
    limit = share * best
    search_result = elimination.search(problem, ascend(problem, effort=AscentEffort(passes=4)), limit, width)
    assert search_result.lower <= max(best, limit) + 1e-12
    if best <= limit:
        assert search_result.lower <= best + 1e-12
    if search_result.plan is not None:
        assert best - 1e-12 <= problem.value(search_result.plan) <= limit + 1e-12


def test_at_the_deadline_nothing_is_found_and_nothing_proven() -> None:
    problem = feasible(frustrated("petersen"))
    search_result = elimination.search(problem, ascend(problem), np.inf, WIDE, deadline=0.0)
    assert (search_result.plan, search_result.lower) == (None, -np.inf)


@pytest.mark.parametrize("name", ["complete-7", "wheel-9", "circulant-9/3", "petersen"])
def test_frustrated_graphs_are_proven(name: str) -> None:
    """Where the relaxation is fractional the bound of the ascent is not met; that of the elimination is."""
    problem = feasible(frustrated(name))
    ascent, best = ascend(problem), brute(problem)
    assert ascent.lower < best - 1e-9
    search_result = elimination.search(problem, ascent, np.inf, WIDE)
    assert search_result.lower == search_result.value == pytest.approx(best, abs=1e-12)


def test_below_the_limit_there_may_be_nothing() -> None:
    problem = feasible(frustrated("complete-7"))
    best = brute(problem)
    search_result = elimination.search(problem, ascend(problem), best - 1e-6, WIDE)
    assert search_result.plan is None
    assert search_result.lower == pytest.approx(best - 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_an_order_has_every_node_once_and_changes_no_plan(seed: int) -> None:
    problem = feasible(random_problem(seed, 8, 14))
    order = elimination.order(problem)
    assert sorted(order) == list(range(len(problem.nodes)))
    assert order == elimination.order(problem)


def test_a_chain_is_eliminated_along_itself() -> None:
    """Given out of order, a chain has a frontier of one node."""
    ends = [(3, 0), (0, 4), (4, 1), (1, 2)]
    nodes = tuple(node(f"n{i}", 1.0, 2.0, 3.0) for i in range(5))
    table = (1.0 - np.eye(3)).tolist()
    chain = Problem(nodes, tuple(edge(u, v, table, i) for i, (u, v) in enumerate(ends)))
    assert elimination.order(chain) in ([3, 0, 4, 1, 2], [2, 1, 4, 0, 3])


def test_states_that_no_edge_tells_apart_are_one() -> None:
    """Two ends that a node in the middle cannot tell apart leave one state, so that a width of one is exact."""
    same = np.zeros((3, 1), dtype=np.int64)
    nodes = (node("a", 3.0, 1.0, 2.0), node("b", 0.0, 5.0), node("c", 0.0, 5.0))
    ends = [edge(0, 1, [[0.0, 1.0]]), edge(0, 2, [[0.0, 1.0]])]
    blind = tuple(type(e)(e.u, e.v, same[:, 0], e.gv, e.table, (i,)) for i, e in enumerate(ends))
    problem = Problem(nodes, blind)
    search_result = elimination.search(problem, ascend(problem, effort=AscentEffort(passes=2)), np.inf, 1)
    assert search_result.value == search_result.lower == float(all_values(problem)[1].min()) == 1.0


def test_the_empty_problem() -> None:
    empty = Problem((), ())
    search_result = elimination.search(empty, ascend(empty), np.inf, WIDE)
    assert (search_result.value, search_result.lower, elimination.order(empty)) == (0.0, 0.0, [])
