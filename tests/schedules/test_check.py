"""The checker: it passes every generated schedule, and of mutated ones just those that still compute the step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedules import (
    SCHEDULES,
    Instruction,
    Pipeline,
    Schedule,
    Size,
    bounds,
    check,
    make,
    parse_schedule,
    peak_stash,
)
from autopar.schedules.pipeline import Weights
from tests.schedules.machine import Machine, expected
from tests.schedules.sizes import SYNCHRONOUS, named_sizes, schedules

CHAIN = Pipeline(placement=(0, 1), microbatches=1, borders=((0, 1),), window=1)


def computes(schedule: Schedule, seed: int) -> bool:
    """Whether a machine that executes the lists gets the gradients right and ends with nothing left."""
    try:
        gradients = Machine(schedule).execute(seed)
    except (KeyError, AssertionError):
        return False
    return gradients == pytest.approx(expected(schedule.pipeline), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@given(data=st.data())
@settings(max_examples=15)
def test_every_schedule_passes_within_its_bounds(name: str, data: st.DataObject) -> None:
    _, size = data.draw(named_sizes((name,), most=7))
    check(make(name, size), bounds(name, size))


@given(schedule=schedules(SYNCHRONOUS), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_synchronous_schedules_compute_the_step(schedule: Schedule, seed: int) -> None:
    check(schedule)
    assert Machine(schedule).execute(seed) == pytest.approx(expected(schedule.pipeline), rel=1e-9, abs=1e-12)


# Mutations

Found = list[Instruction]


def _drop(data: st.DataObject, lists: list[Found], rank: int, at: int) -> None:
    del lists[rank][at]


def _duplicate(data: st.DataObject, lists: list[Found], rank: int, at: int) -> None:
    lists[rank].insert(data.draw(st.integers(at, len(lists[rank]))), lists[rank][at])


def _swap(data: st.DataObject, lists: list[Found], rank: int, at: int) -> None:
    other = data.draw(st.integers(0, len(lists[rank]) - 1))
    lists[rank][at], lists[rank][other] = lists[rank][other], lists[rank][at]


def _neighbours(data: st.DataObject, lists: list[Found], rank: int, at: int) -> None:
    other = max(at - 1, 0)
    lists[rank][at], lists[rank][other] = lists[rank][other], lists[rank][at]


def _elsewhere(data: st.DataObject, lists: list[Found], rank: int, at: int) -> None:
    target = data.draw(st.integers(0, len(lists) - 1))
    moved = lists[rank].pop(at)
    lists[target].insert(data.draw(st.integers(0, len(lists[target]))), moved)


def _other_microbatch(data: st.DataObject, lists: list[Found], rank: int, at: int) -> None:
    lists[rank][at] = replace(lists[rank][at], microbatch=lists[rank][at].microbatch ^ 1)


MUTATIONS = {
    "drop": _drop,
    "duplicate": _duplicate,
    "swap": _swap,
    "swap neighbours": _neighbours,
    "move": _elsewhere,
    "other microbatch": _other_microbatch,
}
HARMLESS = {"swap", "swap neighbours", "move"}  # some of these change nothing that matters


@pytest.mark.parametrize("mutation", MUTATIONS)
@given(schedule=schedules(SYNCHRONOUS, most=3), data=st.data(), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_what_passes_is_what_computes(mutation: str, schedule: Schedule, data: st.DataObject, seed: int) -> None:
    lists = [list(instructions) for instructions in schedule.lists]
    rank = data.draw(st.integers(0, len(lists) - 1))
    MUTATIONS[mutation](data, lists, rank, data.draw(st.integers(0, len(lists[rank]) - 1)))
    mutant = replace(schedule, lists=tuple(map(tuple, lists)))
    try:
        check(mutant)
    except ScheduleError:
        passes = False
    else:
        passes = True
    event(f"passes: {passes}")
    assert passes <= (mutation in HARMLESS)
    assert passes == computes(mutant, seed)


# Messages

GOOD = """
rank 0: F0.0 F0.0>1 B1.0<0 B0.0 +0.0 -F0.0 sum0.0 new0.0
rank 1: F0.0<1 F1.0 B1.0 B1.0>0 +1.0 -F1.0 sum1.0 new1.0
"""
BAD = [
    ("dropped", GOOD.replace("F0.0>1 ", ""), r"'every instruction occurs once, on its rank': rank 0 lacks F0\.0>1"),
    ("twice", GOOD.replace("B0.0 ", "B0.0 B0.0 "), r".*: rank 0 has B0\.0 2 times"),
    ("not its own", GOOD.replace("F1.0 ", "F1.0 F0.0 "), r".*: rank 1 has F0\.0, which is no work of its"),
    ("a rank", GOOD.strip().splitlines()[0], r".*: there are 1 lists for 2 ranks"),
    ("unready", GOOD.replace("F1.0 B1.0 ", "B1.0 F1.0 "), r"'what an .*: rank 1 has B1\.0 before F1\.0"),
    ("early", GOOD.replace("F0.0<1 F1.0", "F1.0 F0.0<1"), r".*: rank 1 has F1\.0 before F0\.0<1"),
    ("freed", GOOD.replace("B1.0 B1.0>0 +1.0 -F1.0", "-F1.0 B1.0 B1.0>0 +1.0"), r".*: rank 1 has -F1\.0 before B1\.0"),
    ("version", GOOD.replace("F0.0 F0.0>1", "F0.0v1 F0.0>1"), r".*: rank 0 runs F0\.0v1 with version 1 .* of 0"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_message(text: str, message: str) -> None:
    check(parse_schedule(GOOD, CHAIN))
    with pytest.raises(ScheduleError) as caught:
        check(parse_schedule(text, CHAIN, "mine"))
    assert re.fullmatch("schedule mine breaks " + message, str(caught.value)), str(caught.value)


def _backward(i: int, version: str = "") -> str:
    return f"B0.{i}{version} +0.{i} -F0.{i}"


@pytest.mark.parametrize(
    ("weights", "microbatches", "text", "message"),
    [
        (
            "stashed",
            2,
            f"F0.0 {_backward(0)} F0.1 {_backward(1)} sum0.0 new0.0 sum0.1 new0.1",
            r"rank 0 has \+0\.1 before new0\.0",
        ),
        (
            "double",
            3,
            f"F0.0 F0.1 F0.2v1 {_backward(0)} sum0.0 new0.0 {_backward(1)} sum0.1 new0.1 "
            f"{_backward(2, 'v1')} sum0.2 new0.2",
            r"rank 0 runs F0\.2v1 when there are only 0 updates of its weights",
        ),
    ],
)  # fmt: skip
def test_windows_do_not_run_into_each_other(weights: Weights, microbatches: int, text: str, message: str) -> None:
    """Gradients of the next window wait for the update of this one, and passes for the weights that they use."""
    pipeline = Pipeline((0,), microbatches, (), window=1, weights=weights)
    with pytest.raises(ScheduleError, match=message):
        check(parse_schedule(f"rank 0: {text}", pipeline))


def test_a_circle_is_named() -> None:
    """Both ranks send before they receive: fine for mailboxes, but here a transfer takes both ranks at once."""
    pipeline = Pipeline(placement=(0, 1, 0), microbatches=2, borders=((0, 1), (1, 2)), window=2, backward=False)
    ends = "+0.0 +0.1 +2.0 +2.1 sum0.1 new0.1 sum2.1 new2.1", "+1.0 +1.1 sum1.1 new1.1"
    text = f"""
    rank 0: F0.0 F0.0>1 F0.1 F0.1>1 F1.0<2 F2.0 F1.1<2 F2.1 {ends[0]}
    rank 1: F0.0<1 F1.0 F1.0>2 F0.1<1 F1.1 F1.1>2 {ends[1]}
    """
    wrong = parse_schedule(text, pipeline)
    with pytest.raises(ScheduleError, match=r"'no rank waits for ever': .* in a circle: F0\.1>1 on rank 0, F1\.0<2 on"):
        check(wrong)
    with pytest.raises(ScheduleError, match="blocks itself"):
        _ = wrong.order
    right = parse_schedule(text.replace("F1.0>2 F0.1<1", "F0.1<1 F1.0>2"), pipeline)
    assert Machine(check(right)).execute(0) == pytest.approx(expected(pipeline))


def test_the_bound_is_kept() -> None:
    gpipe, tight = make("gpipe", Size(2, 3)), bounds("1f1b", Size(2, 3))
    assert peak_stash(gpipe) == (3, 3)
    with pytest.raises(ScheduleError, match=r"'no rank holds more than its bound': rank 0 holds 3 .* and may hold 2"):
        check(gpipe, tight)
