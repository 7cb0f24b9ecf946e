"""bench collectives: rows that are the closed forms, crossovers that are the fastest, the picture and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.bench import collectives
from autopar.errors import ArgumentError, ClusterError
from autopar.hardware.algorithms import ALGORITHMS
from autopar.hardware.cluster import Cluster

EXCHANGES = {
    "parameter-server", "sharded-server", "naive", "sequential", "ring", "tree", "butterfly", "halving-doubling",
}  # fmt: skip


def test_rows_are_the_closed_forms_on_the_clusters_link():
    result = collectives.run(8, (1000, 10**9), "dgx-h100")
    cluster = Cluster.preset("dgx-h100")
    gamma = 3 / cluster.device.memory_bandwidth
    assert {row["algorithm"] for row in result["rows"]} == EXCHANGES
    for row in result["rows"]:
        form = ALGORITHMS["all-reduce"][row["algorithm"]]
        expected = [form.time(8, b, cluster.intra.alpha, cluster.intra.beta, gamma) for b in (1000, 10**9)]
        assert row["seconds"] == pytest.approx(expected)
        assert row["total_bytes"] == pytest.approx(8 * row["bytes_per_worker"])
    assert result["planner_s"][1] == pytest.approx(14 / 8 * 1e9 / 450e9, rel=0.01)


def test_two_levels_appear_between_hosts_and_win_there():
    result = collectives.run(32, (10**9,), "dgx-h100")
    rows = {row["algorithm"]: row for row in result["rows"]}
    # 7/8 twice inside at 450 GB/s, 2 * 3/4 of an eighth at 50 GB/s, additions, and 20 messages.
    gamma = 3 / 3.35e12
    expected = 14 / 8 / 450e9 + 1.5 / 8 / 50e9 + gamma * (7 / 8 + 3 / 4 / 8)
    assert rows["two-level"]["s_per_byte"] == pytest.approx(expected)
    assert rows["two-level"]["steps"] == 20
    assert result["crossovers"][-1]["algorithm"] == "two-level"
    assert "two-level" not in {row["algorithm"] for row in collectives.run(8, (1,), "dgx-h100")["rows"]}


def test_algorithms_for_powers_of_two_stay_away_from_six():
    names = {row["algorithm"] for row in collectives.run(6, (1,), "dgx-h100", "reduce-scatter")["rows"]}
    assert names == {"mst", "ring", "bruck"}


costs = st.floats(1e-7, 1e-2)


@given(st.lists(st.tuples(costs, costs), min_size=1, max_size=8), st.floats(0, 1e9))
def test_crossovers_name_the_fastest_at_every_size(lines: list[tuple[float, float]], nbytes: float) -> None:
    rows = [{"algorithm": str(i), "latency_s": a, "s_per_byte": s} for i, (a, s) in enumerate(lines)]
    crossovers = collectives.crossovers(rows)
    name = [c["algorithm"] for c in crossovers if c["from_bytes"] <= nbytes][-1]
    times = [a + s * nbytes for a, s in lines]
    assert times[int(name)] == pytest.approx(min(times), rel=1e-6)
    starts = [c["from_bytes"] for c in crossovers]
    assert starts == sorted(starts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, (8,), "dgx-h100"), "workers=1 must be at least 2"),
        ((8, (8,), "dgx-h100", "all-shuffle"), "'all-shuffle' not found. Known collectives: broadcast, "),
        ((8, (), "dgx-h100"), "sizes of at least 1 byte"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        collectives.run(*arguments)
    with pytest.raises(ClusterError, match="are no whole hosts"):
        collectives.run(12, (8,), "dgx-h100")


def test_the_table_shows_every_algorithm():
    text = collectives.table(collectives.run(16, (4000,), "p4d.24xlarge"))
    for name in (*sorted(EXCHANGES), "two-level", "at 4 kB", "fastest: ", "the planner"):
        assert name in text


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    result = collectives.run(8, (1000,), "dgx-h100")
    collectives.plot(result, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="cannot be written"):
        collectives.plot(result, tmp_path / "times.abacus")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError, match=r"autopar\[report\]"):
        collectives.plot(collectives.run(8, (1000,), "dgx-h100"), tmp_path / "times.png")
