"""bench schedules: a row per schedule, a complaint where the size does not fit."""

from __future__ import annotations

import pytest

from autopar.bench.pipelines import schedules
from autopar.errors import ArgumentError
from autopar.schedules import SCHEDULES, Size


def test_rows_and_table() -> None:
    rows = schedules.run(Size(3, 8), chunks=2, slices=4, repeats=1)
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    assert [row["schedule"] for row in rows if "complaint" in row] == ["interleaved-1f1b", "chimera"]
    row_of = {row["schedule"]: row for row in rows}
    assert row_of["1f1b"]["bubble_over_ideal"] == pytest.approx(2 / 8)
    assert row_of["zb-h1"]["bubble_over_ideal"] == pytest.approx(2 / 8 / 3)
    assert row_of["terapipe"]["bubble_over_ideal"] == pytest.approx(2 / 32)
    assert (row_of["1f1b"]["held_least"], row_of["1f1b"]["held_most"]) == (1, 3)
    assert row_of["pipedream"]["weight_versions"] == 3
    text = schedules.table(rows)
    assert "25.0%" in text
    assert "use 6 or 9, or schedule 1f1b" in text


def test_no_repeats() -> None:
    with pytest.raises(ArgumentError, match="repeats must be at least 1, not 0"):
        schedules.run(Size(2, 2), chunks=1, slices=1, repeats=0)
