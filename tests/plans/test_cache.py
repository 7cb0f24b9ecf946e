"""Plans kept on disk: what makes two questions one, what is kept, and that a kept plan is read instead of solved."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, seed, settings
from jax.sharding import PartitionSpec

import autopar
from autopar import cli
from autopar.bench import worker
from autopar.errors import AutoparWarning
from autopar.hardware.cluster import Cluster
from autopar.ir.trace import trace
from autopar.passes.remat.options import Options
from autopar.plans import cache as plan_cache
from autopar.plans.plan import Plan
from tests.plans.plan_edits import edited
from tests.programs.steps import array, loss, sgd, two_layers
from tests.programs.test_real_programs import assert_equal
from tests.support.processes import printed

P = PartitionSpec
ROOT = Path(__file__).parents[1]
CLUSTER = Cluster.custom((2, 4), (1e-5, 1e-6), (1e-10, 1e-11), 1e12, 1e11, 10**10)


def step(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return sgd(params, grads), value


def planned(**options: Any) -> Plan:
    return autopar.plan(step, two_layers(), array(16, 8), **{"mesh": (2, 4), "cluster": CLUSTER, **options})


def without_phases(plan: Plan) -> str:
    return replace(plan, phases={}).to_json()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def no_solving(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, reading rules and solving fail."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("planned again")

    for name in ("rules_of", "resolve", "memory_policy"):
        monkeypatch.setattr(f"autopar.passes.mesh_search.planner.{name}", fail)
    monkeypatch.setattr("autopar.runtime.planned_step.rules_of", fail)


# Where


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert plan_cache.folder() is None  # as the tests are set up
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path))
    assert plan_cache.folder() == tmp_path
    with plan_cache.off():
        assert plan_cache.folder() is None
    assert plan_cache.folder() == tmp_path
    monkeypatch.delenv(plan_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert plan_cache.folder() == tmp_path / "xdg" / "autopar"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan_cache.folder() == tmp_path / ".cache" / "autopar"


# Reading instead of solving


@pytest.mark.core
def test_a_kept_plan_is_read_and_not_solved_again(folder: Path, request: pytest.FixtureRequest) -> None:
    first = planned()
    (file,) = folder.iterdir()
    assert Plan.load(file) == first
    request.getfixturevalue("no_solving")
    second = planned()
    assert list(second.phases) == ["trace", "cache"]
    assert without_phases(second) == without_phases(first)


PROCESS = """
import sys
import tests.conftest
from tests.plans.test_cache import os, planned, without_phases

os.environ["AUTOPAR_CACHE_DIR"] = sys.argv[1]
plan = planned()
print("cache" in plan.phases, without_phases(plan))
"""


def test_another_process_reads_it(folder: Path) -> None:
    printed_plans: list[list[str]] = []
    for hashes in ("1", "2"):
        printed_plans.append(printed(PROCESS, hashes, str(folder)).split(maxsplit=1))
    with plan_cache.off():
        here = without_phases(planned())
    assert printed_plans == [["False", f"{here}\n"], ["True", f"{here}\n"]]
    assert len(list(folder.iterdir())) == 1


def test_a_step_runs_from_a_kept_plan(folder: Path) -> None:
    args = two_layers(), array(16, 8)
    expected = jax.jit(step)(*args)
    for last in ("export", "cache"):
        function = autopar.parallelize(step, mesh=(2, 4), donate_argnums=())
        assert list(function.plan(*args).phases)[-1] == last
        assert_equal(function(*args), expected)


# The question


def question(fn: Any = step, mesh: Any = (2, 4), cluster: Cluster = CLUSTER, x: Any = None, **options: Any) -> str:
    traced = trace(fn, two_layers(), array(16, 8) if x is None else x)
    return plan_cache.question(traced, cluster.logical_mesh(mesh), cluster.name, Options(**options))


def other_step(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return sgd(params, grads), value + 1


def swapped(first: int) -> Any:
    def fn(params: Any, x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            both = (jnp.sin(c[0]), jnp.cos(c[1]))
            return (both[first], both[1 - first]), None

        return jax.lax.scan(body, (x, x + 1), None, length=2)[0]

    return fn


faster = replace(CLUSTER, device=replace(CLUSTER.device, memory_bandwidth=2e11))
nearer = Cluster.custom((2, 4), (1e-5, 1e-6), (1e-10, 2e-11), 1e12, 1e11, 10**10)
PINS = {"params/up": P("x"), "params/*": P("y")}


CHANGES: Mapping[str, dict[str, Any]] = {
    "another function": {"fn": other_step},
    "another shape": {"x": array(24, 8)},
    "another mesh": {"mesh": (4, 2)},
    "faster devices": {"cluster": faster},
    "a nearer network": {"cluster": nearer},
    "another cluster's name": {"cluster": replace(CLUSTER, name="other")},
    "pins": {"pins": PINS},
    "pins in another order": {"pins": dict(reversed(PINS.items()))},
    "solver": {"solver": "cbc"},
    "donation": {"donate": ()},
    "rules": {"rules": {"tanh": "a b -> a b"}},
    "no folding": {"fold": False},
    "no presolve": {"presolve": False},
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_the_plan_is_asked(changed: dict[str, Any]) -> None:
    assert question(**changed) not in (question(), question(pins={"params/up": P("x")}))
    assert question(**changed) == question(**changed)


def test_what_a_body_returns_and_source_lines_are_asked() -> None:
    assert question(swapped(0)) != question(swapped(1))
    moved = {"step": None}
    exec(compile("\n" * 7 + "def step(p, x):\n    return p['up'] * 2, x", "moved.py", "exec"), moved)
    first = moved["step"]
    exec(compile("\n" * 8 + "def step(p, x):\n    return p['up'] * 2, x", "moved.py", "exec"), moved)
    assert question(first) != question(moved["step"])


def test_versions_and_types_are_asked_but_not_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = question()
    assert question(time_limit=1.0) == before
    monkeypatch.setattr("autopar.jax_compat.versions", lambda: "jax-9")
    assert question() != before
    monkeypatch.undo()
    monkeypatch.setattr("autopar.plans.cache.VERSION", "9")
    assert question() != before
    monkeypatch.undo()
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    on = jax.device_put(array(16, 8), jax.sharding.NamedSharding(mesh, P("x")))
    assert question(lambda p, x: x * 2, x=on) != question(lambda p, x: x * 2)


# What is kept


@pytest.mark.parametrize(
    ("status", "spent", "kept"),
    [
        ("certified", 1.0, True),
        ("optimal", 1.0, True),
        ("optimal-tied", 1.0, True),
        ("near-optimal", 1.0, True),
        ("optimal-tied", 10.0, False),
        ("time-limit", 1.0, False),
        ("fallback", 1.0, False),
    ],
)
def test_only_settled_plans_are_kept(folder: Path, status: str, spent: float, kept: bool) -> None:
    with plan_cache.off():
        plan = planned()
    plan_cache.write(
        "\nprogram: " + plan.graph_hash + "\n", replace(plan, solver_status=status, phases={"ilp": spent}), 10.0
    )
    assert folder.exists() == kept


def again_as(folder: Path, whole: Plan) -> None:
    """The plan is made again, and kept in place of whatever there was."""
    again = planned()
    assert "cache" not in again.phases
    assert without_phases(again) == without_phases(whole)
    (file,) = folder.iterdir()
    assert Plan.load(file) == again
    assert "cache" in planned().phases


@pytest.mark.parametrize("damage", ["empty", "cut off", "no text", "other format", "other program", "no plan"])
def test_a_damaged_file_is_planned_again_and_replaced(folder: Path, damage: str) -> None:
    whole = planned()
    (file,) = folder.iterdir()
    text = file.read_text()
    content = {
        "empty": b"",
        "cut off": text[: len(text) // 2].encode(),
        "no text": b"\xff\xfe\x00",
        "other format": json.dumps({**json.loads(text), "format": 0}).encode(),
        "other program": json.dumps({**json.loads(text), "graph_hash": "0" * 32}).encode(),
        "no plan": b"[1, 2]",
    }
    file.write_bytes(content[damage])
    again_as(folder, whole)


def test_a_file_that_is_valid_and_wrong_is_planned_again(folder: Path) -> None:
    whole = planned()
    (file,) = folder.iterdir()

    @seed(1)
    @settings(max_examples=25, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(edited(file.read_text()))
    def edits(edit: tuple[str, str]) -> None:
        for kept in folder.iterdir():
            kept.write_text(f" {edit[1]}")  # never what was written, also where the edit changes nothing
        again_as(folder, whole)

    edits()


@pytest.mark.parametrize("place", ["x" * 5000, "a/" * 3000])
def test_a_folder_with_a_name_too_long_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path / place))
    with pytest.warns(AutoparWarning, match="plans cannot be kept in .*File name too long"):
        assert planned().solver_status == "certified"


def test_a_folder_that_is_only_read_serves_its_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned()

    def fail(*_: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr("autopar.plans.cache.os.utime", fail)
    again = planned()
    assert "cache" in again.phases
    assert without_phases(again) == without_phases(whole)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path / "file" / "plans"))
    with pytest.warns(AutoparWarning, match=f"plans cannot be kept in .*file.*{plan_cache.VARIABLE}") as caught:
        plan = planned()
    assert plan.solver_status == "certified"
    assert caught[0].filename == __file__


def test_no_part_of_a_file_is_left_when_writing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("autopar.plans.cache.os.replace", fail)
    with pytest.warns(AutoparWarning, match="disk full"):
        planned()
    assert list(folder.iterdir()) == []


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with plan_cache.off():
        plan = planned()
    asked = [f"\nprogram: {plan.graph_hash}\n{i}" for i in range(6)]
    text = hashlib.sha256(plan.to_json().encode()).hexdigest()
    places = [folder / f"{hashlib.sha256(a.encode()).hexdigest()}-{text}.json" for a in asked]
    folder.mkdir()
    (folder / "mine.json").write_text("not a plan of the cache")

    def used(*order: int) -> None:
        for when, i in enumerate(order):
            os.utime(places[i], (when, when))

    def there() -> list[int]:
        return [i for i, place in enumerate(places) if place.exists()]

    monkeypatch.setattr(plan_cache, "MAX_FILES", 3)
    for i in range(4):
        plan_cache.write(asked[i], plan, 60.0)
        used(*there())
    assert there() == [1, 2, 3]
    assert plan_cache.read(asked[1]) == plan  # used now, and so the newest
    plan_cache.write(asked[4], plan, 60.0)
    assert there() == [1, 3, 4]
    used(3, 1, 4)
    monkeypatch.setattr(plan_cache, "MAX_FILES", 256)
    monkeypatch.setattr(plan_cache, "MAX_BYTES", 2 * len(plan.to_json()))
    plan_cache.write(asked[5], plan, 60.0)
    assert there() == [4, 5]
    assert (folder / "mine.json").exists()


# The command line and measurements


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_line_keeps_plans_unless_told_not_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", "mlp-toy", "--mesh", "4", "--no-cache", "--json") == 0
    assert not folder.exists()
    fresh = json.loads(capsys.readouterr().out)
    for _ in range(2):
        assert run(monkeypatch, "plan", "mlp-toy", "--mesh", "4", "--json") == 0
        assert len(list(folder.iterdir())) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [next(iter(p["phases"])) for p in (first, second)] == ["trace", "trace"]
    assert set(second["phases"]) == {"cache", "trace"}
    assert {**second, "phases": {}} == {**first, "phases": {}} == {**fresh, "phases": {}}


def test_measurements_never_read_kept_plans(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned()
    monkeypatch.setattr(sys, "argv", ["worker", "{}"])
    worker.serve(lambda spec: iter([{"solved": "rules" in planned().phases}]))
    assert json.loads(capsys.readouterr().out) == {"solved": True}


def test_files_are_for_the_user_alone(folder: Path) -> None:
    planned()
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0
