"""The ILP and the solvers behind it: right answers, honest statuses, nothing left lying about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.ir.problem import Edge, Node, Problem, absorb_loops
from autopar.passes.solver import backends as solvers
from autopar.passes.solver import ilp
from tests.passes.support.small_problems import brute, edge, frustrated, node, problems, random_problem

pytestmark = pytest.mark.core
INF = float("inf")
SOLVERS = [
    pytest.param(s, marks=pytest.mark.skipif(s not in solvers.available(), reason=f"{s} is not installed"))
    for s in ("cbc", "highs")
]


def scaled(problem: Problem, factor: float) -> Problem:
    nodes = (Node(n.name, n.cost * factor, n.signature) for n in problem.nodes)
    return Problem(tuple(nodes), tuple(Edge(e.u, e.v, e.gu, e.gv, e.table * factor, e.key) for e in problem.edges))


def value(problem: Problem, answer: ilp.Answer) -> float:
    assert answer.assignment is not None, answer.message
    return problem.value(answer.assignment)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force(solver: str, seed: int) -> None:
    problem = absorb_loops(random_problem(seed, nodes=6, edges=12, forbidden=0.1 * (seed % 2)))
    best = brute(problem)
    answer = ilp.solve(problem, solver, time_limit=20)
    if best == INF:
        assert (answer.status, answer.assignment) == ("infeasible", None)
        return
    assert answer.status == "optimal"
    assert value(problem, answer) == pytest.approx(best, abs=1e-12)
    assert answer.lower == pytest.approx(best, abs=1e-10)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_microseconds_and_days_are_solved_alike(solver: str, factor: float) -> None:
    problem = scaled(frustrated("circulant-7/3"), factor)
    answer = ilp.solve(problem, solver, time_limit=20)
    assert value(problem, answer) == pytest.approx(brute(problem), rel=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_nanosecond_next_to_a_thousand_seconds_decides(solver: str) -> None:
    """A known plan tells the scale: what costs 1000 s is out, and the nanoseconds count."""
    nodes = tuple(node(f"n{i}", 1e-3 + 1e-9 * ((i * 7) % 4), 1e-3 + 1e-9 * ((i * 5) % 3), 1e3) for i in range(5))
    differ = (np.eye(3) * 3e-9 + np.eye(3)[::-1] * 1e-9).tolist()
    problem = Problem(nodes, tuple(edge(u, v, differ) for u in range(5) for v in range(u)))
    upper = problem.value(np.zeros(5, dtype=np.int64))
    answer = ilp.solve(problem, solver, time_limit=20, upper=upper)
    assert value(problem, answer) == pytest.approx(brute(problem), rel=1e-11)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_cutoff_at_the_optimum_still_finds_it(solver: str) -> None:
    problem = frustrated("complete-6")
    best = brute(problem)
    answer = ilp.solve(problem, solver, time_limit=20, upper=best, cutoff=True)
    assert value(problem, answer) == pytest.approx(best)


@settings(max_examples=40)
@given(problems)
def test_rows_and_columns_follow_the_formula(problem: Problem) -> None:
    """Per node one row; per edge one for each class in use or allowed; columns: finite costs and finite pairs."""
    problem = absorb_loops(problem)
    _, _, rows, columns = ilp._build(solvers.new_model("m"), problem, 1.0)
    expected = sum(int(np.isfinite(n.cost).sum()) for n in problem.nodes)
    expected += sum(int(np.isfinite(e.table).sum()) for e in problem.edges)
    assert columns == expected
    assert rows >= len(problem.nodes)


def child(code: str) -> Any:
    """A stand-in for subprocess.Popen that starts a Python child instead of the solver."""

    def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        del command
        return subprocess.Popen([sys.executable, "-c", code], **how)

    return start


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
        ("raise SystemExit(3)", "exit code 3"),
        ("", "without a solution file"),
        ("import os; open('solution', 'w').write('Stopped on time\\n0 x'); os._exit(9)", "exit code 9"),
        ("import time; time.sleep(60)", "stopped 0 s after its time limit of 0.2 s"),
    ],
    ids=["killed", "crashed", "silent", "killed as it writes", "hangs"],
)
def test_a_broken_solver_is_a_status(code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "start", child(code))
    monkeypatch.setattr(solvers, "GRACE", 0.0 if "stopped" in message else 60.0)  # others end by themselves
    answer = ilp.solve(frustrated("complete-4"), "cbc", time_limit=0.2)
    assert (answer.status, answer.assignment, answer.lower) == ("failed", None, -INF)
    assert message in answer.message


def test_within_a_gap_the_bound_is_what_is_proven() -> None:
    problem = frustrated("complete-9")
    best = ilp.solve(problem, "cbc", time_limit=20)
    assert best.assignment is not None
    optimum = problem.value(best.assignment)
    for gap, status in ((0.0, "optimal"), (1.1 * optimum, "near-optimal")):
        answer = ilp.solve(problem, "cbc", time_limit=20, gap=gap)
        assert answer.status == status
        assert answer.assignment is not None
        assert answer.lower <= optimum * (1 + ilp.ACCURACY)
        assert problem.value(answer.assignment) - answer.lower <= gap + ilp.ACCURACY * optimum


def test_a_missing_solver_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "COMMANDS", {"cbc": lambda *_: []})
    answer = ilp.solve(frustrated("complete-4"), "cbc", time_limit=1)
    assert answer.status == "failed"
    assert "'cbc' is not installed" in answer.message


def test_a_program_that_cannot_be_started_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "COMMANDS", {"cbc": lambda *_: ["/nowhere/cbc"]})
    answer = ilp.solve(frustrated("complete-4"), "cbc", time_limit=1)
    assert answer.status == "failed"
    assert "/nowhere/cbc could not be started" in answer.message


@pytest.mark.parametrize("solver", SOLVERS)
def test_nothing_is_printed_or_left_behind(
    solver: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert ilp.solve(frustrated("complete-5"), solver, time_limit=20).status == "optimal"
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_the_time_limit_is_kept_and_told() -> None:
    """CBC needs minutes for this one; stopped early it answers with the limit, and with a bound below the optimum."""
    problem = frustrated("complete-16/3")
    answer = ilp.solve(problem, "cbc", time_limit=1.0)
    assert answer.status in ("time-limit", "failed")
    if answer.assignment is not None:
        assert answer.lower <= problem.value(answer.assignment)


def test_a_half_written_file_of_highs_is_no_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; open('solution', 'w').write('{'); os._exit(9)"
    monkeypatch.setattr(solvers, "start", child(code))
    answer = ilp.solve(frustrated("complete-4"), "highs", time_limit=0.2)
    assert (answer.status, answer.assignment) == ("failed", None)
    assert "exit code 9" in answer.message
