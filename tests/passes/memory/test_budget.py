"""The optimizer under memory rows against brute force over every plan, by every way, folded and not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, reject, settings
from hypothesis import strategies as st

from autopar import zoo
from autopar.cost_models.memory.row import Row
from autopar.errors import ArgumentError, SolverError
from autopar.hardware.cluster import Cluster
from autopar.ir.problem import Problem
from autopar.ir.trace import trace
from autopar.passes.intra_op import build as intra_op
from autopar.passes.memory import budget as budgets
from autopar.passes.memory.budget import BudgetedSolution, Infeasible, optimize_within
from autopar.passes.memory.min_memory import LEAST_MEMORY, LeastMemory, least_memory
from autopar.passes.op_groups import merge as op_groups
from autopar.passes.solver import backends as solvers
from autopar.rules import rules_of
from tests.passes.support.liveness import liveness
from tests.passes.support.small_problems import dense_problems, layered, node, problems, random_problem
from tests.passes.support.small_rows import (
    Points,
    all_peaks,
    brute_least,
    brute_within,
    layered_points,
    random_points,
)
from tests.support.effort import examples
from tests.support.processes import printed_twice

pytestmark = pytest.mark.core
INF = float("inf")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "unfolded": {"fold": False},
    "raw": {"presolve": False},
    "cbc": {"solver": "cbc"},
    "cbc unfolded": {"solver": "cbc", "fold": False},
}
EXACT = {"gap": 0.0}


def some_budget(problem: Problem, source: Points, share: float) -> float:
    """A budget from a byte below the least peak of the plans that exist to the largest, in whole bytes."""
    values, peaks = all_peaks(problem, source)
    peaks = peaks[np.isfinite(values)]
    if not len(peaks):
        reject()
    return float(np.floor(peaks.min() + share * (np.ptp(peaks) + 1)) - 1)


def honest(solution: BudgetedSolution, problem: Problem, source: Points, budget: float) -> None:
    """The plan costs and holds what is claimed, fits, and the bound is below the true optimum."""
    assert solution.objective == pytest.approx(problem.value(solution.assignment), abs=1e-12)
    assert solution.peak_bytes == source.peak(solution.assignment)[0] <= budget
    best = brute_within(problem, source, budget)
    assert solution.lower_bound <= best + 1e-12
    assert solution.objective >= best - 1e-12
    assert solution.gap == pytest.approx(
        1 - solution.lower_bound / solution.objective if solution.objective else 0.0, abs=1e-8
    )


def proven(problem: Problem, source: Points, budget: float, **how: Any) -> None:
    """The optimum, or the refusal with the least peak, as brute force says."""
    best = brute_within(problem, source, budget)
    if best == INF:
        with pytest.raises(Infeasible) as refusal:
            optimize_within(problem, source, budget, **how)
        assert refusal.value.least.peak_bytes == brute_least(problem, source)
        return
    solution = optimize_within(problem, source, budget, **how)
    honest(solution, problem, source, budget)
    if solution.status != "optimal-tied":
        assert solution.objective == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=examples(40))
@given(problem=problems, seed=st.integers(0, 10**6), points=st.integers(1, 6), share=st.floats(0, 1))
def test_equals_brute_force(way: str, problem: Problem, seed: int, points: int, share: float) -> None:
    source = random_points(problem, seed, points, shown=seed % 3)
    proven(problem, source, some_budget(problem, source, share), **EXACT, **WAYS[way])


@settings(max_examples=25)
@given(problem=dense_problems, seed=st.integers(0, 10**6), share=st.floats(0, 0.5))
@example(problem=random_problem(278, 6, 12), seed=12, share=0.09375)  # which presolve of HiGHS made dearer
def test_dense_problems(problem: Problem, seed: int, share: float) -> None:
    source = random_points(problem, seed, 4)
    proven(problem, source, some_budget(problem, source, share), **EXACT)


@pytest.mark.parametrize("way", ["default", "unfolded", "cbc"])
@settings(max_examples=25)
@given(seed=st.integers(0, 1000), shift=st.integers(0, 1), share=st.floats(0, 1))
def test_layers_that_live_at_different_times(way: str, seed: int, shift: int, share: float) -> None:
    """Folded, bounds and optimum still are those of the unfolded problem, where layers need not be symmetric."""
    problem = layered(seed, 3, shift)
    source = layered_points(problem, 3, seed)
    proven(problem, source, some_budget(problem, source, share), **EXACT, **WAYS[way])


@settings(max_examples=60)
@given(problem=dense_problems, seed=st.integers(0, 10**6), share=st.floats(0, 1), target=st.sampled_from([1e-3, 0.05]))
@example(problem=random_problem(544325, 6, 20), seed=108, share=0.75, target=1e-3)  # of which HiGHS gave dearer values
def test_a_target_is_kept_and_the_bound_holds(problem: Problem, seed: int, share: float, target: float) -> None:
    source = random_points(problem, seed, 3)
    budget = some_budget(problem, source, share)
    best = brute_within(problem, source, budget)
    assume(best < INF)
    solution = optimize_within(problem, source, budget, gap=target)
    honest(solution, problem, source, budget)
    assert solution.gap <= target
    assert solution.objective <= best * (1 + 2 * target) + 1e-12


@settings(max_examples=60)
@given(problem=problems, seed=st.integers(0, 10**6), points=st.integers(1, 5))
def test_the_least_peak_equals_brute_force(problem: Problem, seed: int, points: int) -> None:
    source = random_points(problem, seed, points)
    least = brute_least(problem, source)
    if least == INF:
        with pytest.raises(SolverError, match="no plan exists"):
            optimize_within(problem, source, 1e9)
        return
    start = optimize_within(problem, source, 1e9).assignment
    least_peak = least_memory(problem, source, seeds=[start])
    assert least_peak.peak_bytes == least == source.peak(least_peak.assignment)[0]
    assert least_peak.lower_bytes <= least + 1e-9
    assert least_peak.seconds == pytest.approx(problem.value(least_peak.assignment), abs=1e-12)


@settings(max_examples=examples(60))
@given(problem=problems, seed=st.integers(0, 10**6), points=st.integers(1, 5), share=st.floats(0, 1))
def test_a_proof_that_no_plan_fits_replaces_the_least_peak(
    problem: Problem, seed: int, points: int, share: float
) -> None:
    source = random_points(problem, seed, points)
    budget = some_budget(problem, source, share / 10)
    if brute_within(problem, source, budget) < INF:
        proven(problem, source, budget, refutes=True, **EXACT)
        return
    with pytest.raises(Infeasible) as refusal:
        optimize_within(problem, source, budget, refutes=True)
    least = refusal.value.least
    assert least.lower_bytes <= brute_least(problem, source) <= least.peak_bytes
    assert least.peak_bytes == source.peak(least.assignment)[0] > budget


def towers(count: int) -> tuple[Problem, Points]:
    """Unequal decisions, each of which fills a program point of its own unless it is dear."""
    problem = Problem(tuple(node(f"n{i}", 0.001, 0.002 + 0.001 * i) for i in range(count)), ())
    rows = [Row(f"point {i}", 0.0, {i: np.array([10.0 + i, 1.0])}, {}) for i in range(count)]
    return problem, Points(problem, rows)


def test_a_refutation_ends_before_the_least_peak_is_found() -> None:
    problem, source = towers(30)
    ends = {
        refutes: least_memory(problem, source, seeds=[np.zeros(30, np.int64)], asked=0.5, refutes=refutes, exact=False)
        for refutes in (True, False)
    }
    assert 0.5 < ends[True].lower_bytes <= ends[False].peak_bytes == 1.0 < ends[True].peak_bytes
    assert len(ends[True].rows) < len(ends[False].rows) == 30


def test_each_round_adds_several_of_the_highest_peaks() -> None:
    """A row each round would take 30 rounds."""
    problem, source = towers(30)
    effort = replace(LEAST_MEMORY, rounds=10)
    least = least_memory(problem, source, seeds=[np.zeros(30, np.int64)], effort=effort, exact=False)
    assert least.peak_bytes == 1.0


def test_a_plan_that_fits_is_found_without_the_least_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search within the budget comes first: the least peak costs far more, and is not asked for."""

    def never(*_: object, **__: object) -> LeastMemory:
        raise AssertionError("the least peak is sought")

    monkeypatch.setattr(budgets, "least_memory", never)
    problem, source = towers(30)
    solution = optimize_within(problem, source, 20.0)
    assert solution.peak_bytes <= 20.0
    assert solution.objective == pytest.approx(sum(0.001 if 10 + i <= 20 else 0.002 + 0.001 * i for i in range(30)))


def test_a_changed_row_is_seen() -> None:
    """One byte more where the best plan peaks, and it no longer fits: the row decides, not the nodes' costs."""
    problem = random_problem(11, 6, 14)
    source = random_points(problem, 11, 3)
    budget = some_budget(problem, source, 0.4)
    before = optimize_within(problem, source, budget, **EXACT)
    room = budget - before.peak_bytes + 1.0
    changed = Points(problem, [replace(row, constant=row.constant + room) for row in source.points])
    after = optimize_within(problem, changed, budget, **EXACT)
    honest(after, problem, changed, budget)
    assert after.objective == pytest.approx(brute_within(problem, changed, budget), abs=1e-12)
    assert after.objective > before.objective


def test_what_fits_without_rows_is_returned_at_once() -> None:
    problem = random_problem(2, 5, 9)
    source = random_points(problem, 2, 3)
    solution = optimize_within(problem, source, 1e9)
    assert (solution.status, solution.price, solution.multipliers) == ("certified", 0.0, {})


def test_the_price_is_what_a_byte_is_worth() -> None:
    """Twenty equal decisions, 1 ms for each byte saved: the price of a byte is a millisecond."""
    problem = Problem(tuple(node(f"n{i}", 0.001, 0.002) for i in range(20)), ())
    row = Row("end", 0.0, {i: np.array([1.0, 0.0]) for i in range(20)}, {})
    solution = optimize_within(problem, Points(problem, [row]), 7.0)
    assert solution.objective == pytest.approx(0.033)
    assert solution.price == pytest.approx(1e-3)
    assert solution.multipliers == {"end": pytest.approx(1e-3)}
    assert solution.points == ("end",)
    assert sorted(solution.assignment.tolist()) == [0] * 7 + [1] * 13


def best_of_layers(problem: Problem, source: Points, layers: int, budget: float) -> float:
    """The optimum of `layered` (no shift) under `layered_points`; the state is the bytes of the a's so far."""
    tables = [e.table for e in problem.edges[:5]]
    costs = [n.cost for n in problem.nodes[1:4]]
    held_hub, held_a, held_b = (source.points[0].nodes[v] for v in (0, 1, 2))
    best = INF
    for hub, cost in enumerate(problem.nodes[0].cost):
        state = {0.0: float(cost)}
        for _ in range(layers):
            after: dict[float, float] = {}
            for (so_far, value), (a, b) in itertools.product(state.items(), itertools.product(range(3), repeat=2)):
                total = so_far + held_a[a]
                if 1.0 + held_hub[hub] + total + held_b[b] > budget:
                    continue
                layer = costs[0][a] + costs[1][b] + tables[0][hub, a] + tables[2][a, b] + tables[4][a, b]
                layer += min(costs[2][c] + tables[1][hub, c] + tables[3][b, c] for c in range(3))
                after[total] = min(after.get(total, INF), value + layer)
            state = after
        best = min([best, *state.values()])
    return best


@pytest.mark.parametrize("seed", range(3))
def test_the_least_peak_of_a_refusal_is_a_budget_that_plans(seed: int) -> None:
    """Too many strategies for an exact least peak: what one way finds another need not."""
    problem = layered(seed, 240)
    assert problem.variables > LEAST_MEMORY.small
    source = layered_points(problem, 240, seed)
    least = least_memory(problem, source)
    with pytest.raises(Infeasible) as refusal:
        optimize_within(problem, source, 0.5 * least.peak_bytes)
    named = refusal.value.least.peak_bytes
    assert named == least.peak_bytes
    assert optimize_within(problem, source, named).peak_bytes <= named


def test_many_layers_part_ways_to_fill_the_budget() -> None:
    """60 layers: the plan beats all that treat them symmetric and is near the true optimum, by dynamic programming."""
    problem = layered(5, 60)
    source = layered_points(problem, 60, 5)
    free = source.peak(optimize_within(problem, source, 1e9).assignment)[0]
    least = least_memory(problem, source)
    budget = float(np.floor((free + least.peak_bytes) / 2))
    symmetric = [np.array([hub, *(layer * 60)]) for hub in range(2) for layer in itertools.product(range(3), repeat=3)]
    symmetric = min(problem.value(plan) for plan in symmetric if source.peak(plan)[0] <= budget)
    solution = optimize_within(problem, source, budget)
    assert solution.peak_bytes == source.peak(solution.assignment)[0] <= budget
    best = best_of_layers(problem, source, 60, budget)
    assert solution.lower_bound <= best + 1e-9
    assert best - 1e-9 <= solution.objective <= 1.01 * best
    assert solution.objective < symmetric


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_real_model_against_the_ilp(share: float) -> None:
    """A train step and a memory model of its own: plan and bound enclose the optimum that CBC proves, unfolded."""
    model = zoo.build("mlp-toy", layers=1)
    graph = trace(model.step, *model.abstract_args()).graph
    mesh = Cluster.preset("dgx-h100", hosts=1).logical_mesh((1, 8))
    built = intra_op.build(graph, op_groups.group(graph, rules_of(graph), mesh), mesh)
    source = liveness(graph, built, mesh)
    least = least_memory(built.problem, source)
    free = source.peak(optimize_within(built.problem, source, INF).assignment)[0]
    budget = least.peak_bytes + share * (free - least.peak_bytes)
    solution = optimize_within(built.problem, source, budget)
    exact = optimize_within(built.problem, source, budget, solver="cbc", fold=False, time_limit=300.0)
    assert exact.status == "optimal"
    assert solution.peak_bytes == source.peak(solution.assignment)[0] <= budget
    assert solution.lower_bound <= exact.objective * (1 + 1e-9)
    assert exact.objective * (1 - 1e-9) <= solution.objective <= exact.objective * (1 + 2e-3)


def test_without_a_solver_the_ascent_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "COMMANDS", {"cbc": lambda *_: []})
    problem = random_problem(4, 7, 18)
    source = random_points(problem, 4, 3)
    budget = some_budget(problem, source, 0.3)
    solution = optimize_within(problem, source, budget, **EXACT)
    honest(solution, problem, source, budget)


def test_the_plan_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from tests.passes.support.small_problems import random_problem; "
        "from tests.passes.support.small_rows import random_points; "
        "from autopar.passes.memory.budget import optimize_within; p = random_problem(9, 7, 16); "
        "print(optimize_within(p, random_points(p, 9, 4), 50.0).assignment.tolist())"
    )
    printed_twice(code)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"solver": "gurobi"}, "solver='gurobi' is not known"),
        ({"time_limit": 0.0}, "time_limit=0.0 must be"),
        ({"budget": float("nan")}, "budget=nan must be a number of bytes"),
    ],
)
def test_wrong_options(option: dict[str, Any], message: str) -> None:
    problem = Problem((node("a", 1.0),), ())
    with pytest.raises(ArgumentError, match=message):
        optimize_within(problem, Points(problem, []), **{"budget": 1.0, **option})


def test_the_search_of_few_layers_is_counted_not_timed() -> None:
    """Two runs, one with twice the time, find the same plan and bound."""
    problem = layered(3, 2)
    source = layered_points(problem, 2, 3)
    budget = some_budget(problem, source, 0.3)
    first, second = (optimize_within(problem, source, budget, time_limit=limit) for limit in (30.0, 60.0))
    honest(first, problem, source, budget)
    assert first.assignment.tolist() == second.assignment.tolist()
    assert first.lower_bound == second.lower_bound
