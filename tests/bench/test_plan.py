"""bench plan: the object it ends with, and the medians."""

from __future__ import annotations

import pytest

from autopar.bench import plan, worker
from autopar.errors import ArgumentError
from tests.support import processes

KEYS = {
    "model", "mesh", "cluster", "total_s", "phases", "variables", "variables_unfolded", "rows", "gap", "solver",
    "objective_s", "step_time_s", "peak_rss_bytes", "repeats", "raw", "certified", "ilp_calls",
    "from_cache",
}  # fmt: skip


def one(total: float, trace: float, rss: int) -> plan.Result:
    return {
        "total_s": total,
        "cpu_s": total / 2,
        "phases": dict.fromkeys(plan.PHASES, trace),
        "peak_rss_bytes": rss,
        "gap": 0.0,
    }


def test_medians_keep_the_raw_times():
    summary = plan.summarise([one(3.0, 0.3, 10), one(1.0, 0.1, 30), one(2.0, 0.2, 20)])
    assert (summary["total_s"], summary["cpu_s"]) == (2.0, 1.0)
    assert summary["phases"]["trace"] == 0.2
    assert summary["peak_rss_bytes"] == 30
    assert summary["raw"]["total_s"] == [3.0, 1.0, 2.0]
    assert summary["raw"]["phases"]["ilp"] == [0.3, 0.1, 0.2]
    assert summary["repeats"] == 3


@pytest.fixture(scope="module")
def fresh() -> tuple[plan.Result, list[str]]:
    """A toy that one process has measured, and what was told."""
    heard: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "lines", processes.worker_lines)
        return plan.run({"model": "mlp-toy", "mesh": [2, 4]}, 1, heard.append), heard


def test_a_fresh_process_measures_a_toy(fresh: tuple[plan.Result, list[str]]):
    measurement, heard = fresh
    assert set(measurement) >= KEYS
    assert set(measurement["phases"]) == set(plan.PHASES)
    assert 0.8 * measurement["total_s"] <= sum(measurement["phases"].values()) <= measurement["total_s"]
    assert measurement["gap"] <= 0.005
    assert measurement["certified"] == (measurement["ilp_calls"] == 0)
    assert len(heard) == 1
    assert plan.table(measurement).startswith("mlp-toy on 2x4 of dgx-h100")


@pytest.mark.usefixtures("forked_workers")
def test_what_is_read_from_the_cache_is_not_solved_again(fresh: tuple[plan.Result, list[str]]):
    solved, _ = fresh
    heard: list[str] = []
    measurement = plan.run({"model": "mlp-toy", "mesh": [2, 4], "from_cache": True}, 1, heard.append)
    assert (measurement["from_cache"], solved["from_cache"]) == (True, False)
    assert len(heard) == 2
    assert heard[0].startswith("kept: ")
    assert measurement["step_time_s"] == solved["step_time_s"]
    assert (measurement["phases"]["graph"], measurement["phases"]["export"]) == (0.0, 0.0)
    assert solved["phases"]["graph"] > 0.0
    assert "from the cache" in plan.table(measurement)


def test_a_plan_that_is_not_kept_cannot_be_read(monkeypatch: pytest.MonkeyPatch):
    unsettled = {"status": "feasible", "total_s": 60.0}
    monkeypatch.setattr(plan.worker, "lines", lambda module, spec: iter([unsettled]))
    with pytest.raises(ArgumentError, match="mlp-toy has a plan that is not kept: it is 'feasible'"):
        plan.run({"model": "mlp-toy", "mesh": [2, 4], "from_cache": True}, 1)


def test_the_error_of_the_process_is_the_error():
    with pytest.raises(worker.WorkerError, match="ArgumentError: unknown zoo target 'nope'"):
        plan.run({"model": "nope", "mesh": [2]}, 1)


def test_no_repeats_are_refused():
    with pytest.raises(ArgumentError, match="repeats=0"):
        plan.run({"model": "mlp-toy", "mesh": [2]}, 0)
