"""The stages of ZeRO come out of the search when the budget falls, and nothing names them there."""

from __future__ import annotations

import pytest

from autopar import zoo
from autopar.bench import zero


@pytest.fixture(scope="module")
def rows() -> list[zero.Row]:
    """Two stages with a quarter of the layers; the whole table is a benchmark."""
    return zero.run(zoo.build(zero.MODEL, **{**zero.SIZES, "layers": 6}), stages=zero.STAGES[:2], time_limit=120.0)


def test_every_stage_is_reached(rows: list[zero.Row]) -> None:
    assert [row["stage"] for row in rows if row["ok"]] == ["data parallel", "ZeRO-1"]


def test_the_formulas_are_those_of_the_paper() -> None:
    """16 M; 4 M + 12 M / N; 2 M + 14 M / N; 16 M / N with N = 64, as in its figure 1."""
    assert [stage.nbytes(64) for stage in zero.STAGES] == [16, 4.1875, 2.21875, 0.25]


def test_what_is_cut(rows: list[zero.Row]) -> None:
    """Nothing without a budget, then the optimizer state; parameters stay whole in both."""
    data, first = ({kind: n / row["parameters"] for kind, n in row["memory"].items()} for row in rows)
    assert data["optimizer state"] == pytest.approx(12, rel=1e-3)
    assert first["optimizer state"] < 12 / 2
    assert data["parameters"] == pytest.approx(2, rel=1e-3)
    assert first["parameters"] > 1.9


def test_the_table_says_what_is_missed(rows: list[zero.Row]) -> None:
    missed = [{**rows[0], "ok": False}, *rows[1:]]
    assert zero.table(rows).count("yes") == 2
    assert zero.table(missed).count("yes") == 1
