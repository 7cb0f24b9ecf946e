"""The figures of `autopar bench first-call`, and one program measured."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.bench import first_call
from autopar.bench.corpus import program as corpus_program
from autopar.errors import ArgumentError


def row(name: str, half: str, plan_s: float, gap: float = 0.0, cost: float | None = None) -> dict[str, Any]:
    figures = {"plan_s": plan_s, "first_s": 2 * plan_s, "jit_s": 2.0, "gap": gap, "cost": cost, "mesh": [2, 4]}
    return {"program": name, "size": "small", "half": half, "error": "", "status": "certified", **figures}


@pytest.mark.usefixtures("forked_workers")
def test_one_program_is_measured() -> None:
    (row,) = first_call.run(["mlp-toy"])
    assert (row["program"], row["size"], row["half"], row["error"]) == ("mlp-toy", "small", "zoo", "")
    assert 0 < row["plan_s"] < row["first_s"]
    assert row["jit_s"] > 0
    assert sum(row["phases"].values()) == pytest.approx(row["plan_s"], rel=0.25)
    assert "planned in" in first_call.line(row)


def test_every_other_program_is_set_aside() -> None:
    names = tuple(corpus_program.corpus())
    halves = [first_call.half_of(name, names) for name in sorted(names)]
    assert halves[:4] == ["settled", "aside", "settled", "aside"]
    assert abs(halves.count("settled") - halves.count("aside")) <= 1
    assert first_call.half_of("mlp-toy", names) == "zoo"


def test_figures_hold_only_where_all_is_quick_and_near() -> None:
    good = [row("a", "settled", 1.0, cost=0.001), row("b", "aside", 1.5)]
    assert first_call.holds(good)
    assert first_call.figures(good)["all"]["over_jit"] == pytest.approx(0.625)
    for bad in (
        [row("a", "settled", 3.0)],
        [row("a", "settled", 1.0), row("b", "aside", 11.0), row("c", "aside", 1.0)],
        [row("a", "settled", 1.0, gap=0.02)],
        [row("a", "settled", 1.0, cost=0.006)],
        [{"program": "a", "size": "small", "half": "settled", "error": "died"}],
        [],
    ):
        assert not first_call.holds(bad)
    assert "worst" in first_call.table(good)


def test_names_are_checked() -> None:
    with pytest.raises(ArgumentError, match="program 'mlp-toi' is not known"):
        first_call.run(["mlp-toi"])
