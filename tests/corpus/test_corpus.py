"""The corpus: its table, and a handful of its programs; `autopar bench corpus` checks all of them."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

import autopar
from autopar.bench import worker
from autopar.bench.corpus import case as corpus_case
from autopar.bench.corpus import compare as corpus_compare
from autopar.bench.corpus import program as corpus_program
from autopar.bench.corpus import run as corpus
from autopar.bench.equal import case as equal_case
from autopar.errors import ArgumentError
from tests.corpus.table import PROGRAMS

BY_NAME = {program.name: program for program in PROGRAMS}
#: One of each package that traces in little time.
PLANNED = ("nnx_lora", "cnn", "mlp_regularised", "penzai_mlp", "moe_ragged_dot")

pytestmark = pytest.mark.filterwarnings("ignore")  # what other people's packages warn of is theirs


def finding(check, **more):
    row = {"program": "muon", "check": check, "state": "ok", "value": 0.0, "text": "", "seconds": 0.0, "figures": {}}
    return {**row, "versions": {}, **more}


def _needs(program):
    if missing := program.missing():
        pytest.skip(f"not installed: {', '.join(missing)} (pip install autopar[corpus])")


def test_every_program_has_a_name_of_its_own_and_there_are_forty():
    assert len(BY_NAME) == len(PROGRAMS) >= 40


def test_every_row_of_the_table_has_its_function():
    for program in PROGRAMS:
        module, _, function = program.build.partition(":")
        source = Path(importlib.util.find_spec(module).origin).read_text()
        assert f"\ndef {function}(scale=1):\n" in source, program.build


@pytest.mark.parametrize("name", PLANNED)
def test_a_program_is_planned(name):
    program = BY_NAME[name]
    _needs(program)
    step, args = program.built()
    plan = autopar.plan(step, *args, mesh=(8,), cluster=equal_case.dear((8,)), time_limit=20.0)
    cut = [path for path, layout in zip(plan.input_paths, plan.inputs, strict=True) if any(d >= 0 for d in layout)]
    assert cut, "everything whole: these prices should make a plan cut something"


def test_a_program_equals_the_single_device():
    program = BY_NAME["muon"]
    subject = corpus_case.Subject(program, 1)
    outcomes = dict(corpus_case.on_mesh(subject, (8,)))
    assert {name: (outcome.state, outcome.text) for name, outcome in outcomes.items() if outcome.state != "ok"} == {}
    assert set(outcomes) == set(corpus.SMALL[:3])


@pytest.mark.parametrize(("name", "scale"), [("dp_sgd", 64), ("simclr_with_queue", 64), ("spectral_norm", 1024)])
def test_the_memory_of_a_small_step_is_predicted(name, scale):
    """Of gradients of each example, of logits that are joined, of products with swapped operands."""
    program = BY_NAME[name]
    _needs(program)
    assert abs(corpus_case.memory(corpus_case.Subject(program, scale)).value) <= 0.05


def test_a_wrong_step_is_found():
    program = BY_NAME["muon"]
    subject = corpus_case.Subject(program, 1)
    step, args = subject.built
    theirs = corpus_case.results(jax.jit(step), subject.arguments(), program)
    params, opt_state, x, y = args
    ours = corpus_case.results(jax.jit(step), (params, opt_state, x * 1.001, y), program)
    value, path = corpus_compare.worst(corpus_compare.differences(ours[-1], theirs[-1]))
    assert value > corpus_case.TOLERANCE["float32"]
    assert path


def test_a_leaf_that_is_rounding_is_compared_with_the_largest_of_its_kind():
    theirs = {"params/w": np.ones(2), "params/b": np.array([1e-12, 0.0]), "n": np.array(3)}
    ours = {"params/w": np.ones(2), "params/b": np.array([3e-12, 0.0]), "n": np.array(3)}
    assert corpus_compare.differences(ours, theirs)["params/b"] == pytest.approx(2e-12)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([np.nan, 1.0]), np.ones(2)),
        (np.ones(2, np.float32), np.ones(2, np.float64)),
        (np.ones(2), np.ones(3)),
    ],
)
def test_what_is_infinitely_far_apart(ours, theirs):
    assert corpus_compare.differences({"x": ours}, {"x": theirs}) == {"x": math.inf}


def test_what_is_not_finite_on_both_sides_is_equal():
    both = {"x": np.array([np.inf, np.nan, 1.0])}
    assert corpus_compare.differences(both, both) == {"x": 0.0}


def test_a_corpus_that_is_not_there_says_what_to_give():
    with pytest.raises(ArgumentError, match=r"corpus 'no\.such\.table' cannot be imported .* PROGRAMS"):
        corpus_program.corpus("no.such.table")


def test_a_program_that_is_not_there_names_those_that_are():
    with pytest.raises(ArgumentError, match=r"program 'resnet' is not known\. Available: .*resnet_batch_norm"):
        corpus.run(("resnet",))


def test_findings_are_resumed_and_an_absent_package_is_no_failure(tmp_path):
    table = tmp_path / "findings.jsonl"
    row = {
        "program": "muon",
        "check": "memory",
        "state": "ok",
        "value": 0.1,
        "text": "",
        "seconds": 1.0,
        "versions": {},
    }

    table.write_text(json.dumps({**row, "figures": {"predicted": 11.0, "compiled": 10.0}}) + "\n")
    rows = corpus.run(("muon",), checks=("memory",), resume=table)
    assert [r["value"] for r in rows] == [0.1]
    figures = corpus.figures([*rows, {**row, "program": "other", "state": "absent", "figures": {}}])
    assert (figures["programs"], figures["failed"], figures["absent"], figures["memory_worst"]) == (2, 0, 1, 0.1)
    assert "muon" in corpus.table(rows)


def test_where_a_worker_dies_its_check_fails_and_another_goes_on(monkeypatch):
    asked = []

    def lines(module, spec, env, patience):
        asked.append(spec["checks"])
        for check in spec["checks"]:
            if check == "cpu 8" and len(asked) == 1:
                raise worker.WorkerError("killed")
            yield finding(check)

    monkeypatch.setattr(worker, "lines", lines)
    rows = corpus.run(("muon",), checks=("mesh 8", "cpu 8", "stages"))
    assert [(row["check"], row["state"]) for row in rows] == [("mesh 8", "ok"), ("cpu 8", "failed"), ("stages", "ok")]
    assert asked == [["mesh 8", "cpu 8", "stages"], ["stages"]]
    assert rows[1]["text"] == "killed"


def test_a_worker_that_dies_when_all_is_found_fails_nothing(monkeypatch):
    def lines(module, spec, env, patience):
        yield finding("stages")
        raise worker.WorkerError("killed")

    monkeypatch.setattr(worker, "lines", lines)
    assert [row["state"] for row in corpus.run(("muon",), checks=("stages",))] == ["ok"]


def test_a_program_without_its_package_is_absent_and_runs_nothing(monkeypatch):
    program = corpus_program.Program("p", "of no package", "nowhere:build", ("no-such-distribution",), 1)
    monkeypatch.setattr(corpus_program, "corpus", lambda table: {"p": program})
    (row,) = corpus.run(checks=("memory",))
    assert (row["state"], row["text"]) == ("absent", "not installed: no-such-distribution")
