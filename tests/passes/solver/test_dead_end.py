"""Dead-end elimination keeps an optimum, and says who stands in the way when nothing is left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import SolverError
from autopar.ir.problem import Problem, absorb_loops, check
from autopar.passes.solver import dead_end
from autopar.passes.solver.dead_end import DeadEndEffort, eliminate
from tests.passes.support.small_problems import brute, dense_problems, edge, layered, node, problems

INF = float("inf")


def kept(problem: Problem, rounds: int = 8) -> str:
    return " ".join("".join(map(str, k)) for k in eliminate(problem, rounds).keep)


@pytest.mark.parametrize(
    ("problem", "left"),
    [
        pytest.param(Problem((node("a", 3.0, 1.0, 1.0),), ()), "1", id="alone: the first cheapest"),
        pytest.param(
            Problem((node("a", 2.0, 1.0), node("b", 0.0, 0.0)), (edge(0, 1, [[0.0, 0.5], [0.9, 0.2]]),)),
            "1 1",
            id="dominated, and then its neighbour",
        ),
        pytest.param(
            Problem((node("a", 0.0, 1.0), node("b", 0.0, 1.0)), (edge(0, 1, [[INF, INF], [0.0, 0.0]]),)),
            "1 0",
            id="a forbidden row",
        ),
        pytest.param(
            Problem(
                (node("a", 1.0, 0.0, 0.5), node("b", 0.0, 0.0)), (edge(0, 1, [[INF, 0.0], [INF, 0.0], [0.0, 9.0]]),)
            ),
            "12 01",
            id="what both forbid says nothing",
        ),
        pytest.param(
            Problem((node("a", 0.0, 0.0), node("b", 0.0, 0.0)), (edge(0, 1, [[1.0, 0.0], [0.0, 1.0]]),)),
            "01 01",
            id="nothing to drop",
        ),
        pytest.param(
            Problem((node("a", INF, 0.0), node("b", 0.0, 0.0)), (edge(0, 1, [[0.0, INF], [INF, INF]]),)),
            "no plan exists: none of the 1 strategies left of 'a' fits with 'b'",
            id="infeasible edge",
        ),
        pytest.param(
            Problem((node("a", INF, INF),), ()),
            "no plan exists: all 2 strategies of 'a' are forbidden",
            id="infeasible node",
        ),
    ],
)
def test_what_is_left(problem: Problem, left: str) -> None:
    if not left.startswith("no plan"):
        assert kept(problem) == left
        return
    with pytest.raises(SolverError, match=left):
        kept(problem)


def test_without_rounds_only_the_infeasible_go() -> None:
    problem = Problem((node("a", INF, 5.0, 1.0), node("b", 0.0, 9.0)), (edge(0, 1, [[0.0, 0.0]] * 3),))
    assert kept(problem, rounds=0) == "12 01"
    assert kept(problem) == "2 0"


@settings(max_examples=150)
@given(problems)
def test_an_optimum_survives(problem: Problem) -> None:
    problem, best = absorb_loops(problem), brute(problem)
    try:
        reduced = eliminate(problem)
    except SolverError:
        assert best == INF
        return
    check(reduced.problem)
    assert brute(reduced.problem) == pytest.approx(best, abs=1e-12)
    plan = np.zeros(len(problem.nodes), dtype=np.int64)
    assert reduced.problem.value(plan) == problem.value(reduced.lift(plan))


@settings(max_examples=60)
@given(dense_problems)
def test_few_leaders_drop_less_but_never_the_optimum(problem: Problem) -> None:
    problem = absorb_loops(problem)
    few = eliminate(problem, effort=DeadEndEffort(full=2, leaders=2)).problem
    assert brute(few) == pytest.approx(brute(problem), abs=1e-12)
    assert few.variables >= eliminate(problem).problem.variables


def test_what_both_strategies_forbid_says_nothing_of_them() -> None:
    table = np.array([[0.0, 3.0, INF], [1.0, INF, INF], [2.0, 1.0, 5.0]])
    pairs = [[(x, y) for x, y in zip(a, b, strict=True) if (x, y) != (INF, INF)] for a in table for b in table]
    least = np.reshape([min(x - y for x, y in pair) for pair in pairs], (3, 3))
    np.testing.assert_array_equal(dead_end._differences(table, np.arange(3)), least)


def test_equal_layers_are_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = dead_end._undominated

    def counting(*args: object) -> object:
        calls.append(1)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(dead_end, "_undominated", counting)
    eliminate(layered(3, 4))
    few = len(calls)
    calls.clear()
    eliminate(layered(3, 40))
    assert len(calls) <= few + 2


def test_strategies_can_be_ruled_out_beforehand() -> None:
    problem = Problem((node("a", 0.0, 1.0), node("b", 0.0, 0.0)), (edge(0, 1, [[0.0, 0.0], [1.0, 0.0]]),))
    reduced = eliminate(problem, start=(np.array([1]), np.arange(2)))
    assert [k.tolist() for k in reduced.keep] == [[1], [1]]
