"""The table: what its rows promise, for any size; sizes that do not fit are refused with alternatives."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedules import SCHEDULES, Size, bounds, check, make, peak_stash, weight_versions
from tests.schedules.sizes import named_sizes

RUNNABLE = ("inference", "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1")


def test_which_schedules_run_and_which_are_synchronous() -> None:
    assert tuple(name for name, row in SCHEDULES.items() if row.executable) == RUNNABLE
    assert [name for name, row in SCHEDULES.items() if not row.synchronous] == ["pipedream", "pipedream-2bw", "ampnet"]
    assert all(row.synchronous for row in SCHEDULES.values() if row.executable)


def published(name: str, p: int, m: int, v: int, rank: int) -> int:
    """Stashes as the papers state them, ranks from 0, in (stage, microbatch) pairs."""
    return {
        "inference": 0,
        "gpipe": m,
        "1f1b": min(p - rank, m),
        "eager-1f1b": min(2 * (p - rank) - 1, m),
        "interleaved-1f1b": min(2 * (p - rank - 1) + (v - 1) * p + 1, v * m),
        "zb-h1": min(p, m),
        "pipedream": min(p - rank, m),
    }[name]


@pytest.mark.parametrize("name", [*RUNNABLE, "pipedream"])
@given(data=st.data())
@settings(max_examples=20)
def test_published_stash_is_reached_and_not_passed(name: str, data: st.DataObject) -> None:
    _, size = data.draw(named_sizes((name,), most=8))
    wanted = tuple(published(name, size.ranks, size.items, size.chunks, rank) for rank in range(size.ranks))
    assert peak_stash(make(name, size)) == bounds(name, size) == wanted


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_chimera_holds_between_half_and_all(p: int, units: int) -> None:
    """Li and Hoefler (2021): D/2 + 1 to D microbatches, two copies of the weights; the middle ranks hold most."""
    size = Size(p, p * units)
    stashes = peak_stash(make("chimera", size))
    assert stashes == bounds("chimera", size)
    assert (min(stashes), max(stashes)) == (p // 2 + 1, p)


@given(p=st.integers(1, 6), extra=st.integers(0, 4), batches=st.integers(2, 4))
@settings(max_examples=30)
def test_versions_of_the_weights(p: int, extra: int, batches: int) -> None:
    """PipeDream keeps p - s versions on stage s, PipeDream-2BW two, AMPNet and everything synchronous one."""
    size = Size(p, p + extra, batches=batches)
    assert weight_versions(make("pipedream", size)) == tuple(range(p, 0, -1))
    assert max(weight_versions(make("pipedream-2bw", size))) == 2
    assert set(weight_versions(make("ampnet", size))) == {1}
    assert set(weight_versions(make("1f1b", Size(p, p + extra)))) == {1}


def test_ampnet_uses_newer_weights_backward_than_forward() -> None:
    runs = [i for i in make("ampnet", Size(3, 2, batches=3)).lists[0] if i.op == "run"]
    forward = {i.microbatch: i.version for i in runs if i.kind == "F"}
    assert any(i.version > forward[i.microbatch] for i in runs if i.kind == "B")


def test_pipedream_uses_the_same_weights_backward_as_forward() -> None:
    runs = [i for i in make("pipedream", Size(3, 6)).lists[0] if i.op == "run"]
    assert {(i.microbatch, i.version) for i in runs if i.kind == "F"} == {
        (i.microbatch, i.version) for i in runs if i.kind == "B"
    }


def test_borders_may_skip_stages() -> None:
    """What stage 0 makes for stages 1 and 2 is sent to both; the last rank's own stages hand on without a transfer."""
    schedule = make("interleaved-1f1b", Size(2, 2, chunks=2), [(0, 1), (0, 2), (1, 2), (2, 3), (1, 3)])
    check(schedule)
    sent = {str(i) for instructions in schedule.lists for i in instructions if i.op == "send"}
    assert sent == {f"{word}" for i in (0, 1) for word in (
        f"F0.{i}>1", f"F1.{i}>2", f"F2.{i}>3", f"B3.{i}>2", f"B2.{i}>1", f"B1.{i}>0",
    )}  # fmt: skip


MISTAKES: list[tuple[str, dict[str, int], str]] = [
    ("zigzag", {}, "unknown schedule 'zigzag'; there are inference, gpipe, .*"),
    ("1f1b", {"ranks": 0}, "schedule 1f1b needs ranks >= 1, not 0"),
    ("gpipe", {"microbatches": 0}, "schedule gpipe needs microbatches >= 1, not 0"),
    ("1f1b", {"chunks": 2}, "schedule 1f1b has one of chunks, not 2; more: interleaved-1f1b"),
    ("1f1b", {"batches": 2}, "schedule 1f1b has one of batches, not 2; more: pipedream, pipedream-2bw, ampnet"),
    (
        "interleaved-1f1b",
        {"microbatches": 6, "chunks": 2},
        ".* groups of 4, .* 6; use 4 or 8, or schedule 1f1b, .*",
    ),
    ("interleaved-1f1b", {"microbatches": 3}, ".* groups of 4, .* got 3; use 4, or schedule 1f1b, .*"),
    ("chimera", {"ranks": 3}, ".* needs an even number of ranks, not 3; use 4, or 1f1b"),
    (
        "pipedream-2bw",
        {"microbatches": 3},
        ".* as many .* as there are ranks, 4, and got 3; use 4 or more, .*",
    ),
]


@pytest.mark.parametrize(("name", "sizes", "message"), MISTAKES)
def test_mistakes(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make(name, Size(**{"ranks": 4, "microbatches": 8, **sizes}))
    assert re.fullmatch(message, str(caught.value)), str(caught.value)


def test_no_border() -> None:
    with pytest.raises(ScheduleError, match=r"border \(2, 1\) is no pair of stages 0 <= a < b < 4"):
        make("1f1b", Size(4, 8), [(0, 1), (2, 1)])
