"""Rows through folding, elimination, contraction; multipliers, bounds, descent, path relinking, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cost_models.memory.row import Row
from autopar.errors import SolverError
from autopar.ir.problem import Floats, Problem
from autopar.passes.memory.cutting_plane import smallest, within
from autopar.passes.memory.evaluate import Evaluator
from autopar.passes.memory.lagrangian import BudgetObjective, Messages, MultiplierEffort, PeakObjective, Pool, ascend
from autopar.passes.memory.local_search import LocalSearch, LocalSearchEffort
from autopar.passes.memory.path_relinking import relink
from autopar.passes.memory.presolve import (
    PresolvedProblem,
    SymmetryReduction,
    attach,
    fold_rows,
    presolve,
)
from autopar.passes.solver import backends as solvers
from tests.passes.support.small_problems import all_values, dense_problems, edge, layered, node, problems
from tests.passes.support.small_rows import Points, all_peaks, brute_within, layered_points, random_points

pytestmark = pytest.mark.core
HOWS: tuple[SymmetryReduction, ...] = ("none", "tie", "bound")


def presolve_with(problem: Problem, source: Points, how: SymmetryReduction) -> PresolvedProblem:
    try:
        return presolve(problem, source.points, how)
    except SolverError:
        assume(False)
        raise


def middle(problem: Problem, source: Points) -> float:
    values, peaks = all_peaks(problem, source)
    peaks = peaks[np.isfinite(values)]
    assume(len(peaks))
    return float(np.floor(np.median(peaks)))


def totals_of_lifted(presolved: PresolvedProblem, problem: Problem, source: Points) -> tuple[Floats, Floats]:
    """Totals that the presolved claims for all its plans, and those of the same plans unfolded."""
    plans = all_values(presolved.constrained.problem)[0].T
    claimed = Evaluator(presolved.constrained).totals(plans) + np.array(
        [presolved.constant] + [0.0] * presolved.constrained.rows
    )
    lifted = [presolved.lift(plan) for plan in plans]
    true = [[problem.value(x), *(row.value(problem, x) for row in source.points)] for x in lifted]
    return claimed, np.array(true)


@pytest.mark.parametrize("how", HOWS)
@settings(max_examples=40)
@given(problem=problems, seed=st.integers(0, 10**6), points=st.integers(1, 4))
def test_plans_of_the_presolved_problem_cost_the_same_unfolded(
    how: SymmetryReduction, problem: Problem, seed: int, points: int
) -> None:
    source = random_points(problem, seed, points)
    claimed, true = totals_of_lifted(presolve_with(problem, source, how), problem, source)
    np.testing.assert_allclose(claimed, true, atol=1e-9)


@pytest.mark.parametrize("how", HOWS)
@settings(max_examples=20)
@given(seed=st.integers(0, 1000), shift=st.integers(0, 1))
def test_folded_layers_cost_and_hold_the_same_unfolded(how: SymmetryReduction, seed: int, shift: int) -> None:
    problem = layered(seed, 3, shift)
    source = layered_points(problem, 3, seed)
    claimed, true = totals_of_lifted(
        presolve(problem, source.points[:2], how), problem, Points(problem, source.points[:2])
    )
    np.testing.assert_allclose(claimed, true, atol=1e-9)


@settings(max_examples=80)
@given(problem=problems, seed=st.integers(0, 10**6), points=st.integers(1, 4))
def test_presolve_keeps_an_optimum_at_every_budget(problem: Problem, seed: int, points: int) -> None:
    source = random_points(problem, seed, points)
    presolved = presolve_with(problem, source, "none")
    kept = Evaluator(presolved.constrained).totals(all_values(presolved.constrained.problem)[0].T)
    values, peaks = all_peaks(problem, source)
    for budget in np.unique(peaks[np.isfinite(values)]):
        fits = kept[:, 1:].max(axis=1) <= budget + 1e-9
        best = float(kept[fits, 0].min(initial=np.inf)) + presolved.constant
        assert best == pytest.approx(brute_within(problem, source, budget), abs=1e-12)


def test_folding_with_respect_to_rows_tells_layers_apart_and_tying_does_not() -> None:
    problem = layered(5, 8)
    source = layered_points(problem, 8, 5)
    last = attach(problem, [source.points[3]])
    assert [len(fold_rows(last, how).counts) for how in ("none", "tie")] == [25, 4]
    assert sorted(fold_rows(last, "bound").counts.tolist()) == [1, 1, 1, 1, 3, 3, 3, 4, 4, 4]


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), plans=st.integers(1, 12), rows=st.integers(1, 4), later=st.integers(0, 6))
def test_prices_equal_those_of_a_linear_program(seed: int, plans: int, rows: int, later: int) -> None:
    """PuLP's solver as the judge, also when plans come later."""
    rng = np.random.default_rng(seed)
    seconds, excess = rng.integers(0, 20, plans + later) * 0.5, rng.integers(-6, 7, (plans + later, rows)) * 0.25
    master = within(rows, 50.0, 1e-2)
    master.add(seconds[:plans], excess[:plans])
    master.solve()
    master.add(seconds[plans:], excess[plans:])
    multipliers, value = master.solve()
    assert (multipliers >= 0).all()
    lines = np.append(seconds + excess @ multipliers, 50.0 - 1e-2 * multipliers.sum())
    assert lines.min() == pytest.approx(value, abs=1e-6)
    assert value == pytest.approx(_by_pulp(seconds, excess), abs=1e-5)


def _by_pulp(seconds: Floats, excess: Floats) -> float:
    model = solvers.new_model("multipliers")
    multipliers = [solvers.continuous(model, f"p{r}") for r in range(excess.shape[1])]
    above, below = solvers.continuous(model, "above"), solvers.continuous(model, "below")  # value = above - below
    solvers.minimise(model, {above: -1.0, below: 1.0})
    for k, (c, g) in enumerate(zip([*seconds, 50.0], [*excess, [-1e-2] * excess.shape[1]], strict=True)):
        row = {above: 1.0, below: -1.0, **{p: -float(x) for p, x in zip(multipliers, g, strict=True)}}
        solvers.at_most(model, row, float(c), f"plan{k}")
    solution = solvers.solve(model, "cbc", time_limit=10)
    return -float(solution.bound) if solution.bound is not None else np.nan


def test_the_smallest_mix_weighs_rows() -> None:
    master = smallest(2, 100.0)
    master.add(np.zeros(2), np.array([[4.0, 0.0], [0.0, 4.0]]))
    multipliers, value = master.solve()
    assert value == pytest.approx(2.0)
    np.testing.assert_allclose(multipliers, [0.5, 0.5])


@settings(max_examples=80)
@given(problem=dense_problems, seed=st.integers(0, 10**6), points=st.integers(1, 4))
def test_no_bound_exceeds_the_optimum(problem: Problem, seed: int, points: int) -> None:
    source = random_points(problem, seed, points)
    presolved, budget = presolve_with(problem, source, "none"), middle(problem, source)
    best = brute_within(problem, source, budget)
    pool, messages = Pool(presolved.constrained), Messages(presolved.constrained)
    dual = ascend(messages, pool, BudgetObjective(presolved.constrained, budget, pool))
    assert dual.lower + presolved.constant <= best + 1e-9


@settings(max_examples=60)
@given(problem=dense_problems, seed=st.integers(0, 10**6), points=st.integers(1, 4))
def test_an_ascent_goes_on_from_its_best_multipliers(problem: Problem, seed: int, points: int) -> None:
    """Its bound holds, is no worse than the one it starts from, and two passes more do not lose it."""
    source = random_points(problem, seed, points)
    presolved, budget = presolve_with(problem, source, "none"), middle(problem, source)
    pool, messages = Pool(presolved.constrained), Messages(presolved.constrained)
    objective = BudgetObjective(presolved.constrained, budget, pool)
    quick = ascend(messages, pool, objective, effort=MultiplierEffort(scans=0))
    patient = ascend(messages, pool, objective, start=quick.multipliers)
    assert quick.lower - 1e-9 <= patient.lower <= brute_within(problem, source, budget) - presolved.constant + 1e-9
    assert objective.lower(messages.run(2)[0], patient.multipliers) >= patient.lower - 1e-9


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), shift=st.integers(0, 1))
def test_bounds_of_folded_layers_hold_for_layers_that_differ(seed: int, shift: int) -> None:
    problem = layered(seed, 3, shift)
    source = layered_points(problem, 3, seed)
    budget = middle(problem, source)
    best = brute_within(problem, source, budget)
    rows = source.points[1:]
    presolved = presolve(problem, rows, "bound")
    pool, messages = Pool(presolved.constrained), Messages(presolved.constrained)
    dual = ascend(messages, pool, BudgetObjective(presolved.constrained, budget, pool))
    assert dual.lower + presolved.constant <= best + 1e-9


@settings(max_examples=60)
@given(problem=dense_problems, seed=st.integers(0, 10**6), points=st.integers(1, 4))
def test_the_bound_on_the_least_peak_holds(problem: Problem, seed: int, points: int) -> None:
    source = random_points(problem, seed, points)
    nodes = tuple(node(n.name, *(0.0 for _ in n.cost)) for n in problem.nodes)
    weightless = Problem(nodes, ())
    rows = [Row(r.name, r.constant, r.nodes, {}) for r in source.points]
    presolved = presolve(weightless, rows, "none")
    pool = Pool(presolved.constrained)
    dual = ascend(Messages(presolved.constrained), pool, PeakObjective(presolved.constrained, pool))
    least = all_peaks(weightless, Points(weightless, rows))[1].min()
    assert dual.lower <= least + 1e-6
    if points == 1:
        assert dual.lower == pytest.approx(least)


@settings(max_examples=60)
@given(problem=dense_problems, seed=st.integers(0, 10**6), start=st.integers(0, 10**6))
def test_descent_ends_where_no_single_change_helps(problem: Problem, seed: int, start: int) -> None:
    source = random_points(problem, seed, 3)
    budget = middle(problem, source)
    constrained = attach(problem, source.points)
    evaluator, rng = Evaluator(constrained), np.random.default_rng(start)
    plan = np.array([rng.integers(len(n.cost)) for n in problem.nodes])

    def rank(x: np.ndarray) -> tuple[float, float]:
        total = evaluator.totals(x[None])[0]
        return float(np.maximum(total[1:] - budget, 0.0).sum()), float(total[0])

    end = LocalSearch(constrained).descend(
        plan, evaluator.totals(plan[None])[0, 1:], budget, effort=LocalSearchEffort(sweeps=100)
    )
    assert rank(end) <= rank(plan)
    for v, n in enumerate(problem.nodes):
        for s in range(len(n.cost)):
            other = end.copy()
            other[v] = s
            excess, seconds = rank(other)
            assert (excess, seconds) >= (rank(end)[0], rank(end)[1] - 1e-9)


def test_relinking_fills_a_budget_with_single_layers() -> None:
    """Five layers of two nodes that want to agree; a byte saves 1 ms per layer, and three bytes are to be had."""
    agree = [[0.0, 9.0], [9.0, 0.0]]
    nodes = tuple(node(f"n{i}", 0.001 * (i + 1) if i % 2 else 0.0, 0.0) for i in range(10))
    problem = Problem(nodes, tuple(edge(2 * i, 2 * i + 1, agree) for i in range(5)))
    row = Row("end", 0.0, {2 * i: np.array([0.0, 1.0]) for i in range(5)}, {})
    constrained = attach(problem, [row])
    low, high = np.zeros(10, dtype=np.int64), np.ones(10, dtype=np.int64)
    best = relink(constrained, low, [high], np.zeros(1), 3.0, np.ones(1))
    assert best is not None
    assert best.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]


@settings(max_examples=60)
@given(problem=dense_problems, seed=st.integers(0, 10**6), start=st.integers(0, 10**6))
def test_relinked_plans_fit_and_are_made_of_the_given(problem: Problem, seed: int, start: int) -> None:
    """And no change of one component to another plan's choice saves time and fits."""
    problem = Problem(problem.nodes, problem.edges[:4])
    source = random_points(problem, seed, 2)
    budget = middle(problem, source)
    rng = np.random.default_rng(start)
    a, b, c = (np.array([rng.integers(len(n.cost)) for n in problem.nodes]) for _ in range(3))
    usage = np.array([row.value(problem, a) for row in source.points])
    plan = relink(attach(problem, source.points), a, [b, c], usage, budget, np.zeros(2))
    assume(plan is not None)
    assert plan is not None
    assert source.peak(plan)[0] <= budget
    assert ((plan == a) | (plan == b) | (plan == c)).all()
    for v in np.flatnonzero([all(v not in (e.u, e.v) for e in problem.edges) for v in range(len(plan))]):
        for other in (a, b, c):
            changed = plan.copy()
            changed[v] = other[v]
            assert source.peak(changed)[0] > budget or problem.value(changed) >= problem.value(plan) - 1e-12


def test_ledger_adds_up_many_plans_at_once() -> None:
    problem = layered(3, 2)
    source = random_points(problem, 3, 3)
    plans = np.array(list(itertools.product(range(2), *[range(3)] * 2, [0], [1], [2], [1])), dtype=np.int64)
    totals = Evaluator(attach(problem, source.points)).totals(plans)
    for plan, total in zip(plans, totals, strict=True):
        assert total[0] == pytest.approx(problem.value(plan))
        assert total[1:].tolist() == [row.value(problem, plan) for row in source.points]
