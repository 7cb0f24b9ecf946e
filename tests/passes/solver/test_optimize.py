"""The whole optimizer against brute force, against each of its own shortcuts, and with the solver taken away."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ArgumentError, SolverError
from autopar.ir.problem import Problem
from autopar.passes.solver import backends as solvers
from autopar.passes.solver import elimination
from autopar.passes.solver.optimize import OptimizerEffort, Solution, bound, finish, optimize
from tests.passes.support.small_problems import (
    brute,
    dense_problems,
    edge,
    frustrated,
    layered,
    node,
    problems,
    random_problem,
    twisted_ring,
)
from tests.support.effort import sample
from tests.support.processes import printed_twice

pytestmark = pytest.mark.core
INF = float("inf")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "unfolded": {"fold": False},
    "raw": {"presolve": False},
    "raw, unfolded": {"fold": False, "presolve": False},
}
FRACTIONAL = (
    *(f"complete-{n}" for n in range(4, 10)),
    *(f"complete-{n}/3" for n in range(4, 7)),
    *(f"wheel-{n}" for n in (4, 5, 6, 7, 9)),
    *(f"wheel-{n}/3" for n in (5, 7)),
    *(f"circulant-{n}" for n in (5, 6, 7, 9)),
    *(f"circulant-{n}/3" for n in (5, 7, 8)),
    *(f"prism-{n}" for n in (5, 7)),
    "petersen",
)


@pytest.fixture
def no_elimination(monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds leave open is left to the ILP."""
    monkeypatch.setattr(elimination, "search", lambda *how: elimination.Found(None, np.inf, -np.inf))


def proven(solution: Solution, problem: Problem, best: float) -> None:
    """The plan has the value it claims, the value is the optimum, and the optimizer knows that it is."""
    assert solution.objective == problem.value(solution.assignment)
    assert solution.objective == pytest.approx(best, abs=1e-12)
    assert solution.gap == 0.0
    assert solution.lower_bound <= solution.objective
    assert solution.warnings == ()


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60)
@given(problem=problems)
def test_equals_brute_force(way: str, problem: Problem) -> None:
    best = brute(problem)
    if best == INF:
        with pytest.raises(SolverError, match="no plan exists"):
            optimize(problem, **WAYS[way])
        return
    proven(optimize(problem, **WAYS[way]), problem, best)


@settings(max_examples=25)
@given(dense_problems)
def test_dense_problems(problem: Problem) -> None:
    proven(optimize(problem), problem, brute(problem))


@pytest.mark.parametrize("way", ["default", "unfolded", "raw"])
@settings(max_examples=25)
@given(seed=st.integers(0, 1000), shift=st.integers(0, 1))
def test_layers(way: str, seed: int, shift: int) -> None:
    """Folded or not, the optimum is that of the unfolded problem."""
    problem = layered(seed, 3, shift)
    proven(optimize(problem, **WAYS[way]), problem, brute(problem))


@pytest.mark.parametrize("solver", [s for s in ("cbc", "highs") if s in solvers.available()])
@pytest.mark.parametrize("presolve", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_certificate_and_solvers_agree(solver: str, presolve: bool, seed: int) -> None:
    problem = random_problem(seed, nodes=7, edges=16)
    solution = optimize(problem, solver=solver, presolve=presolve)
    proven(solution, problem, optimize(problem).objective)
    assert (solution.status, solution.solver_used) == ("optimal", solver)
    assert solution.rows > 0 or solution.variables == 0 or presolve


@pytest.mark.parametrize("name", sample(FRACTIONAL, FRACTIONAL[::4]))
def test_where_the_bounds_do_not_meet_elimination_decides(name: str) -> None:
    problem = frustrated(name)
    solution = optimize(problem)
    proven(solution, problem, brute(problem))
    assert (solution.status, solution.rows) == ("certified", 0)


@pytest.mark.usefixtures("no_elimination")
@pytest.mark.parametrize("name", sample(FRACTIONAL, FRACTIONAL[::4]))
def test_where_the_bounds_do_not_meet_the_ilp_decides(name: str) -> None:
    problem = frustrated(name)
    solution = optimize(problem)
    proven(solution, problem, brute(problem))
    assert (solution.status, solution.solver_used) == ("optimal", solvers.quickest())
    assert solution.rows > 0


@settings(max_examples=60)
@given(dense_problems, st.floats(0.8, 1.3))
def test_what_reaches_the_cutoff_is_bounded_by_it(problem: Problem, share: float) -> None:
    """Either no plan is below the cutoff, up to rounding, or the best plan is found."""
    best = brute(problem)
    cutoff = share * best + 1e-3 * (share - 1)
    solution = optimize(problem, cutoff=cutoff)
    assert solution.lower_bound <= best + 1e-12
    if solution.status == "cutoff":
        assert best >= cutoff * (1 - 2e-9) - 1e-12
    else:
        assert solution.objective == pytest.approx(best, abs=1e-12)


@settings(max_examples=20)
@given(dense_problems, st.data())
def test_a_changed_cost_is_seen(problem: Problem, data: st.DataObject) -> None:
    """Making one strategy of the best plan dearer raises the optimum as brute force says, and no plan is reused."""
    before = optimize(problem)
    v = data.draw(st.integers(0, len(problem.nodes) - 1))
    cost = problem.nodes[v].cost.copy()
    cost[before.assignment[v]] += 1.0
    nodes = list(problem.nodes)
    nodes[v] = dataclasses.replace(nodes[v], cost=cost, signature="changed")
    changed = Problem(tuple(nodes), problem.edges)
    after = optimize(changed)
    proven(after, changed, brute(changed))
    assert after.objective >= before.objective * (1 - 1e-12)  # equal sums may round differently


def test_many_layers_are_solved_as_one() -> None:
    problem = layered(5, 200)
    solution = optimize(problem)
    assert solution.status == "certified"
    assert solution.gap == 0.0
    assert solution.variables == 11
    assert solution.variables_unfolded == problem.variables == 1802
    assert len({tuple(solution.assignment[1 + 3 * i : 4 + 3 * i]) for i in range(200)}) == 1


def test_a_tied_optimum_that_cannot_be_bettered_says_so() -> None:
    """All rungs alike break four edges, in truth none need be; without leave to unfold, that stays a gap."""
    problem = twisted_ring(4)
    solution = optimize(problem, effort=OptimizerEffort(unfolded=0))
    assert (solution.status, solution.objective) == ("optimal-tied", 4.0)
    assert solution.lower_bound <= brute(problem) == 0.0
    assert solution.gap == 1.0
    assert optimize(problem).objective == 0.0


@pytest.mark.usefixtures("no_elimination")
def test_phases_are_reported() -> None:
    phases = optimize(frustrated("complete-5")).phases
    assert list(phases) == ["fold", "presolve", "bound", "eliminate", "ilp"]
    assert all(seconds > 0 for seconds in phases.values())


def test_the_empty_problem() -> None:
    solution = optimize(Problem((), ()))
    assert (solution.objective, solution.gap, solution.status) == (0.0, 0.0, "certified")


def test_ties_are_broken_the_same_way_every_time() -> None:
    equal = Problem(tuple(node(f"n{i}", 1.0, 1.0, 1.0) for i in range(4)), (edge(0, 1, [[0.0] * 3] * 3),))
    assert optimize(equal).assignment.tolist() == [0, 0, 0, 0]
    for name in ("petersen", "complete-6/3"):
        plans = {tuple(optimize(frustrated(name)).assignment.tolist()) for _ in range(2)}
        assert len(plans) == 1


@pytest.mark.usefixtures("no_elimination")
def test_a_rest_that_is_too_large_for_the_ilp_stays_open() -> None:
    problem = frustrated("complete-9")
    exact, solution = optimize(problem), optimize(problem, largest=10)
    assert (solution.status, solution.rows, solution.warnings) == ("open", 0, ())
    assert solution.lower_bound <= exact.objective <= solution.objective == problem.value(solution.assignment)
    assert optimize(problem, largest=10_000).status == exact.status == "optimal"


@pytest.mark.usefixtures("no_elimination")
@pytest.mark.parametrize("name", ["complete-9", "complete-6/3"])
def test_the_ilp_goes_on_from_what_is_bounded(name: str) -> None:
    """To the optimum; and with no time it loses neither the plan nor the bound."""
    problem = frustrated(name)
    bounded = bound(problem)
    assert bounded.solution is not None
    assert bounded.solution.status == "open"
    assert bounded.solution.objective > bounded.solution.lower_bound
    late, done = finish(bounded, time_limit=0.0), finish(bounded)
    proven(done, problem, brute(problem))
    assert late.objective <= bounded.solution.objective
    assert late.lower_bound >= bounded.solution.lower_bound
    assert late.status == "time-limit"
    assert finish(bound(problem, cutoff=bounded.solution.lower_bound / 2)).status == "cutoff"


@pytest.mark.usefixtures("no_elimination")
def test_a_gap_that_is_enough_ends_the_search() -> None:
    problem = frustrated("complete-9")
    exact, solution = optimize(problem), optimize(problem, gap=1.0)
    assert (solution.status, solution.rows) == ("near-optimal", 0)
    assert solution.lower_bound <= exact.objective <= solution.objective
    assert 0 < solution.gap <= 1.0


@pytest.mark.parametrize("name", FRACTIONAL)
@pytest.mark.parametrize("gap", [0.1, 0.4])
def test_guesses_at_the_optimum_prove_what_they_say(name: str, gap: float) -> None:
    problem = frustrated(name)
    best, solution = brute(problem), optimize(problem, gap=gap, fold=False)
    quick = optimize(problem, gap=gap, fold=False, rounds=0, until=gap)
    assert quick.gap <= gap
    assert quick.lower_bound <= best * (1 + 1e-9) <= quick.objective * (1 + 2e-9)
    assert solution.objective == problem.value(solution.assignment)
    assert solution.lower_bound - 1e-12 <= best <= solution.objective + 1e-12
    assert solution.gap <= gap
    assert solution.warnings == ()


@settings(max_examples=60)
@given(dense_problems, st.sampled_from([0.02, 0.1, 0.3]))
def test_guesses_never_bound_above_brute_force(problem: Problem, gap: float) -> None:
    best = brute(problem)
    solution = optimize(problem, gap=gap, fold=False)
    assert solution.lower_bound <= best + 1e-12
    assert best - 1e-12 <= solution.objective <= best / (1 - gap) + 1e-12


@pytest.mark.parametrize("rungs", [2, 4, 6])
@pytest.mark.parametrize("gap", [0.02, 0.3])
def test_a_gap_that_is_enough_for_layers_solved_as_one(rungs: int, gap: float) -> None:
    """What is tied is optimized to the gap as well, and its plan is never said to be nearer than it is."""
    problem = twisted_ring(rungs)
    best, solution = brute(problem), optimize(problem, gap=gap)
    assert solution.objective == problem.value(solution.assignment)
    assert solution.lower_bound <= best <= solution.objective
    assert solution.objective <= best + gap * solution.objective


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), shift=st.integers(0, 1), gap=st.sampled_from([0.02, 0.3]))
def test_folded_layers_are_solved_to_the_gap(seed: int, shift: int, gap: float) -> None:
    problem = layered(seed, 3, shift)
    best, solution = brute(problem), optimize(problem, gap=gap)
    assert solution.lower_bound <= best + 1e-12
    assert best - 1e-12 <= solution.objective <= best / (1 - gap) + 1e-12


@pytest.mark.usefixtures("no_elimination")
def test_a_large_rest_with_a_small_gap_is_left_at_the_bounds() -> None:
    problem = frustrated("petersen")
    exact = optimize(problem)
    # the gap is not small
    assert optimize(problem, effort=OptimizerEffort(large=0)).status == exact.status == "optimal"
    solution = optimize(problem, effort=OptimizerEffort(large=0, near=1.0))
    assert (solution.status, solution.rows) == ("near-optimal", 0)
    assert solution.lower_bound <= exact.objective <= solution.objective
    assert solution.gap > 0


def test_the_plan_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from tests.passes.support.small_problems import layered; from autopar.passes.solver.optimize import optimize; "
        "print(optimize(layered(4, 5, 1)).assignment.tolist())"
    )
    printed_twice(code)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem((node("weights", INF),), ()), "all 1 strategies of 'weights' are forbidden"),
        (
            Problem((node("dot", 0.0), node("sum", 0.0)), (edge(0, 1, [[INF]]),)),
            "none of the 1 strategies left of 'dot' fits with 'sum'",
        ),
        (
            Problem(
                tuple(node(f"n{i}", 0.0, 0.0, 0.0) for i in range(4)),
                tuple(edge(u, v, np.where(np.eye(3) > 0, INF, 0.0).tolist()) for u in range(4) for v in range(u)),
            ),
            "the strategies of 'n0', 'n1', 'n2', 'n3' cannot be combined",
        ),
    ],
    ids=["node", "edge", "combination"],
)
def test_what_cannot_be_planned_is_named(problem: Problem, message: str) -> None:
    with pytest.raises(SolverError, match=message):
        optimize(problem)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"solver": "gurobi"}, "solver='gurobi' is not known. Available: 'auto', 'cbc', 'highs'"),
        ({"time_limit": 0.0}, "time_limit=0.0 must be a number of seconds above zero"),
        ({"time_limit": float("nan")}, "time_limit=nan must be"),
    ],
)
def test_wrong_options(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        optimize(Problem((node("a", 1.0),), ()), **option)


def kill_at_birth(command: list[str], **how: Any) -> Any:
    solver = subprocess.Popen(command, **how)
    os.kill(solver.pid, signal.SIGKILL)
    return solver


@pytest.mark.usefixtures("no_elimination")
@pytest.mark.parametrize("solver", ["auto", "cbc"])
def test_a_killed_solver_leaves_the_best_plan_of_the_ascent(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = frustrated("complete-7/3")
    best = brute(problem)
    monkeypatch.setattr(solvers, "start", kill_at_birth)
    solution = optimize(problem, solver=solver)
    assert solution.status == "fallback"
    assert "exit code -9" in solution.warnings[0]
    assert solution.objective == problem.value(solution.assignment) >= best - 1e-12
    assert solution.lower_bound <= best + 1e-12
    assert solution.gap == pytest.approx((solution.objective - solution.lower_bound) / solution.objective)
    assert solution.gap > 0


@pytest.mark.usefixtures("no_elimination")
def test_a_time_limit_is_a_status_with_a_gap() -> None:
    problem = frustrated("complete-16/3")
    solution = optimize(problem, time_limit=1.5)
    assert solution.status in ("time-limit", "fallback")
    assert solution.warnings
    assert solution.gap > 0
    assert solution.objective == problem.value(solution.assignment)


def test_no_time_at_all_still_gives_a_plan() -> None:
    problem = frustrated("complete-9")
    solution = optimize(problem, time_limit=1e-6)
    assert solution.status == "time-limit"
    assert solution.objective == problem.value(solution.assignment)
    assert "time limit was reached" in solution.warnings[0]
