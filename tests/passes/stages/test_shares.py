"""Limits of stages that share devices: all fit if their least memory does, and even shares are tried first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.stages.plan import MemoryLimit
from autopar.passes.stages.shares import planned_within


@given(
    stages=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=1, max_size=6),
    ranks=st.integers(1, 3),
    nbytes=st.integers(1, 400),
)
def test_a_rank_fits_if_the_least_memory_of_its_stages_does(
    stages: list[tuple[int, int]], ranks: int, nbytes: int
) -> None:
    """A stage needs `least` bytes, and uses up to `more` beyond them where its limit allows it."""
    placement = [s % ranks for s in range(len(stages))]
    limits = [MemoryLimit(nbytes // placement.count(rank), 1) for rank in placement]
    asked: list[list[int]] = []

    def plan(within: Any) -> list[Any]:
        asked.append([limit.nbytes for limit in within])
        used = [
            min(max(limit.nbytes, least), least + more) for limit, (least, more) in zip(within, stages, strict=True)
        ]
        return [SimpleNamespace(summary=SimpleNamespace(memory=SimpleNamespace(peak=lambda _, n=n: n))) for n in used]

    planned = planned_within(limits, placement, plan)
    peaks = [stage.summary.memory.peak(1) for stage in planned]
    assert asked[0] == [limit.nbytes for limit in limits]
    for rank in {*placement}:
        of_rank = [s for s, other in enumerate(placement) if other == rank]
        total, least = sum(limits[s].nbytes for s in of_rank), sum(stages[s][0] for s in of_rank)
        assert sum(peaks[s] for s in of_rank) <= max(total, least)


def test_what_may_still_be_recomputed_keeps_even_shares() -> None:
    """A stage that exceeds a limit that is not thorough does not have its least memory."""
    limits = [MemoryLimit(10, 1, thorough=False), MemoryLimit(10, 1, thorough=False)]
    asked: list[list[int]] = []

    def plan(within: Any) -> list[Any]:
        asked.append([limit.nbytes for limit in within])
        return [
            SimpleNamespace(summary=SimpleNamespace(memory=SimpleNamespace(peak=lambda _, n=n: n))) for n in (15, 8)
        ]

    planned_within(limits, (0, 0), plan)
    assert asked == [[10, 10]]
