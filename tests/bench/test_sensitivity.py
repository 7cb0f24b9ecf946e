"""Records of effort are described and complete, and the benchmark that varies them says what changed."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from autopar.bench.sensitivity import records
from autopar.bench.sensitivity import run as measure
from autopar.errors import ArgumentError

ROOT = Path(__file__).parent.parent.parent
MODULES = sorted(
    ".".join(("autopar", *path.relative_to(ROOT).with_suffix("").parts)).replace("autopar.autopar", "autopar")
    for top in ("passes", "cost_models", "autopar/compile")
    for path in (ROOT / top).rglob("*.py")
    if path.name != "__init__.py"
)


def instances() -> dict[str, Any]:
    """Module and name -> record, of all modules of the planner."""
    records_by_name: dict[str, Any] = {}
    for module in MODULES:
        for name, value in vars(importlib.import_module(module)).items():
            if type(value).__name__.endswith("Effort") and type(value).__module__ == module:
                records_by_name[f"{module}.{name}"] = value
    return records_by_name


def test_every_record_of_the_planner_is_varied() -> None:
    varied_records = {id(record) for record in records.RECORDS.values()}
    assert {id(record) for record in instances().values()} <= varied_records
    assert len(varied_records) == len(records.RECORDS)


@pytest.mark.parametrize("kind", sorted({type(r) for r in records.RECORDS.values()}, key=lambda kind: kind.__name__))
def test_every_field_says_what_it_limits_and_where_it_is_from(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__doc__
    text = textwrap.dedent(inspect.getsource(kind)).splitlines()
    for field in dataclasses.fields(kind):
        at = next(i for i, line in enumerate(text) if re.match(rf"    {field.name}: ", line))
        above: list[str] = []
        while text[at - 1 - len(above)].startswith("    # "):
            above.insert(0, text[at - 1 - len(above)].removeprefix("    # "))
        assert re.fullmatch(r".{10,}\(.{10,}\)", " ".join(above)), f"{kind.__name__}.{field.name}: {above}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), dataclasses.fields(kind)[0].name, 0)


def test_no_number_of_a_record_is_read_before_planning() -> None:
    """A default argument with the number of a record would not follow the record."""
    names = {path.rpartition(".")[2] for path in instances()}
    for module in MODULES:
        tree = ast.parse(inspect.getsource(importlib.import_module(module)))
        early = [d for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for d in _defaults(f)]
        early += [s for s in tree.body if isinstance(s, ast.Assign | ast.AnnAssign)]
        read = [x for e in early for x in ast.walk(e) if isinstance(x, ast.Attribute)]
        assert not [ast.unparse(x) for x in read if isinstance(x.value, ast.Name) and x.value.id in names], module


def _defaults(function: ast.FunctionDef) -> list[ast.expr]:
    return [*function.args.defaults, *(d for d in function.args.kw_defaults if d is not None)]


def test_values_differ_from_the_default() -> None:
    for algorithm, field in records.every():
        own = getattr(records.RECORDS[algorithm], field)
        values = records.values(algorithm, field)
        assert values, f"{algorithm}.{field}"
        assert own not in values
    assert records.values("dual-ascent", "patience") == (6, 24)
    assert records.values("multiplier-steps", "share") == (0.3, 1.0)
    assert records.values("stage-options", "shares") == ((0.15, 3.0), (0.6, 12.0))
    assert max(records.values("reduction", "kept")) < 1  # fixing would never end


ROWS = """
{"program": "a", "algorithm": "dual-ascent", "field": "patience", "value": 6, "read": true, "step_s": 1.01, "gap": 0.01, "cpu_s": 1.0, "default_step_s": 1.0, "default_gap": 0.0, "default_cpu_s": 2.0}
{"program": "b", "algorithm": "dual-ascent", "field": "patience", "value": 6, "read": true, "step_s": 3.0, "gap": 0.0, "cpu_s": 3.0, "default_step_s": 3.0, "default_gap": 0.0, "default_cpu_s": 2.0}
{"program": "a", "algorithm": "dual-ascent", "field": "small", "value": 200, "read": true, "step_s": 1.0, "gap": 0.0, "cpu_s": 2.02, "default_step_s": 1.0, "default_gap": 0.0, "default_cpu_s": 2.0}
{"program": "a", "algorithm": "dual-ascent", "field": "small", "value": 50, "read": true, "step_s": NaN, "gap": NaN, "cpu_s": 20.0, "late": true, "default_step_s": 1.0, "default_gap": 0.0, "default_cpu_s": 2.0}
{"program": "a", "algorithm": "elimination", "field": "starts", "value": 4, "read": true, "step_s": 1.0, "gap": 0.0, "cpu_s": 2.02, "default_step_s": 1.0, "default_gap": 0.0, "default_cpu_s": 2.0}
{"program": "a", "algorithm": "mix", "field": "plans", "read": false}
"""  # noqa: E501


def test_the_table_sums_up_rows() -> None:
    rows = [json.loads(line) for line in ROWS.strip().splitlines()]
    first, *_ = measure.summary(rows)
    assert (first["programs"], first["step_worst"]) == (2, pytest.approx(0.01))
    assert first["step_median"] == pytest.approx(0.005)
    assert (first["time_median"], first["time_least"], first["gap_worst"]) == (1.0, 0.5, 0.01)
    text = measure.table(rows)
    assert re.search(r"patience +12 +6 +2 +\+1.00% +\+0.50% +1.00 +0.50 +1.50 +\+1.00%", text)
    assert re.search(r"small +100 +50 +1 .* 10.00 +10.00 +10.00 +\+0.00% +1$", text, re.MULTILINE)
    assert "within 0.0% of the median" in text
    assert "changed nothing (1): elimination.starts" in text
    assert "not read by any program (1): mix.plans" in text


@pytest.mark.usefixtures("forked_workers")
def test_a_number_that_planning_reads_is_varied_in_a_process_of_its_own(tmp_path: Path) -> None:
    own = records.RECORDS["local-search"].sweeps
    resume = tmp_path / "rows.jsonl"
    rows = measure.run(["local-search", "simulation"], ["sweeps", "saved"], ["mlp-toy 0.7"], resume)
    tried = {(r["algorithm"], r["field"], r.get("value")) for r in rows}
    varied = {("local-search", "sweeps", own // 2), ("local-search", "sweeps", 2 * own)}
    assert tried == varied | {("simulation", "saved", None)}
    assert all(r["step_s"] >= r["default_step_s"] * 0.99 > 0 for r in rows if r["read"])
    assert records.RECORDS["local-search"].sweeps == own
    assert measure.run(["local-search", "simulation"], ["sweeps", "saved"], ["mlp-toy 0.7"], resume) == rows


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="algorithm 'simplex' is not known"):
        measure.run(["simplex"])
    with pytest.raises(ArgumentError, match="field 'color' is not known"):
        measure.run(["simulation"], ["color"])
