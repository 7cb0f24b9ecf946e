"""The instruction lists, and charts of when their passes run (to be compared with the figures of the papers), as text.

`python -m tests.schedules.test_lists` prints what `lists.txt` should hold; read the difference before keeping it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from autopar.cost_models.pipeline import simulate, uniform
from autopar.errors import ScheduleError
from autopar.schedules import SCHEDULES, Instruction, Schedule, Size, make, parse, parse_schedule
from tests.schedules.sizes import DISTINCT, schedules

GOLDEN = Path(__file__).with_name("lists.txt")
CHARTS = {
    **{name: Size(4, 4) for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "chimera", "terapipe")},
    "interleaved-1f1b": Size(4, 4, chunks=2),
}


def chart(schedule: Schedule) -> str:
    """One line per rank, one column per tick: the passes at one tick each."""
    split = schedule.pipeline.split
    simulation = simulate(schedule, uniform(schedule.pipeline.stages, 1, 1, int(split)))
    lines: list[str] = []
    for instructions, starts in zip(schedule.lists, simulation.starts, strict=True):
        cells = ["."] * int(simulation.seconds)
        for i, start in zip(instructions, starts, strict=True):
            if i.op == "run":
                cells[int(start)] = str(i)
        lines.append(" ".join(f"{cell:4}" for cell in cells).rstrip())
    return "\n".join(lines) + "\n"


def text() -> Iterator[str]:
    """All that is golden."""
    for name, size in DISTINCT.items():
        yield f"lists of {name}, {size}\n{make(name, size)}"
    for name, size in CHARTS.items():
        yield f"ticks of {name}, {size}\n{chart(make(name, size))}"


def test_golden() -> None:
    assert "\n".join(text()) == GOLDEN.read_text()


def test_all_lists_differ() -> None:
    assert set(DISTINCT) == set(SCHEDULES)
    assert len({str(make(name, size)) for name, size in DISTINCT.items()}) == len(SCHEDULES)


@given(schedule=schedules())
@settings(max_examples=30)
def test_lists_are_read_back_from_their_text(schedule: Schedule) -> None:
    assert parse_schedule(str(schedule), schedule.pipeline, schedule.name) == schedule


@pytest.mark.parametrize(
    ("instruction", "printed"),
    [
        (Instruction("run", "F", 0, 2), "F0.2"),
        (Instruction("run", "W", 10, 0, version=3), "W10.0v3"),
        (Instruction("send", "B", 1, 2, to=0), "B1.2>0"),
        (Instruction("recv", "F", 0, 2, to=1), "F0.2<1"),
        (Instruction("accumulate", "", 3, 1), "+3.1"),
        (Instruction("free", "F", 3, 1), "-F3.1"),
        (Instruction("reduce", "", 3, 7), "sum3.7"),
        (Instruction("update", "", 3, 7), "new3.7"),
    ],
)
def test_text(instruction: Instruction, printed: str) -> None:
    assert str(instruction) == printed
    assert parse(printed) == instruction


@pytest.mark.parametrize("word", ["", "X0.1", "F0", "F0.1>", "W0.1>1", "-W0.0", "+0.1v1"])
def test_no_instruction(word: str) -> None:
    with pytest.raises(ScheduleError, match="is no instruction"):
        parse(word)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 12), (6, 5)])
def test_zb_h1_runs_weights_after_later_backward_passes(ranks: int, microbatches: int) -> None:
    """W(i) of rank r comes after B(i + r), so that rank 0 puts nothing off and the last rank most."""
    for rank, instructions in enumerate(make("zb-h1", Size(ranks, microbatches)).lists):
        runs = [i for i in instructions if i.op == "run"]
        place = {(i.kind, i.microbatch): position for position, i in enumerate(runs)}
        for i in range(microbatches):
            later = min(i + rank, microbatches - 1)
            assert place["W", i] > place["B", later]
            assert later == microbatches - 1 or place["W", i] < place["B", later + 1]


if __name__ == "__main__":
    print("\n".join(text()), end="")
