"""Numbers of rematerialised layers: all stages fit, and no more is recomputed than bisection needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.inter_op.recompute import RECOMPUTE, Counts, RecomputeEffort, fewest_layers, fitting

STAGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 21)), min_size=1, max_size=6)


@given(STAGES)
def test_with_enough_rounds_the_fewest_layers_are_found(stages: list[tuple[int, int]]) -> None:
    """A stage has `most` layers and fits with `needed` or more."""
    most, needed = zip(*stages, strict=True)
    asked: list[Counts] = []

    def fits(counts: Counts) -> list[bool]:
        asked.append(counts)
        assert all(0 <= n <= top for n, top in zip(counts, most, strict=True))
        return [n >= least for n, least in zip(counts, needed, strict=True)]

    fewest = fewest_layers(len(most), lambda: most, fits, RecomputeEffort(rounds=10))
    expected = tuple(needed) if all(n <= top for n, top in zip(needed, most, strict=True)) else None
    assert fewest == expected
    assert fewest is None or fewest in asked
    asked.clear()
    quick = fewest_layers(len(most), lambda: most, fits)
    assert len(asked) <= 3 + RECOMPUTE.rounds  # none, all of those that miss, and the last combination
    assert (quick is None) == (expected is None)
    assert quick is None or (quick in asked and all(fits(quick)))


def test_a_stage_that_fits_alone_may_not_fit_beside_a_recomputed_one() -> None:
    """Layouts at the borders change with the neighbours."""

    def fits(counts: Counts) -> list[bool]:
        return [counts[0] >= 2, counts[1] >= (1 if counts[0] else 0)]

    assert fewest_layers(2, lambda: (4, 4), fits, RecomputeEffort(rounds=2)) == (2, 1)


def test_what_never_fits_is_left() -> None:
    asked: list[Counts] = []

    def fits(counts: Counts) -> list[bool]:
        asked.append(counts)
        return [False, True]

    assert fewest_layers(2, lambda: (3, 3), fits) is None
    assert asked == [(0, 0), (3, 0)]


@pytest.mark.parametrize(
    ("over", "raised", "fits"),
    [
        pytest.param("x...", "....", ".xxx", id="the one above its share"),
        pytest.param("x...", "x...", "xx.x", id="the other one, where it has no more layers"),
        pytest.param("x...", "x.x.", ".x.x", id="all, where none has"),
        pytest.param("x.x.", "x...", "xx.x", id="the one of two that has more layers"),
    ],
)
def test_which_stages_of_a_rank_that_does_not_fit_shrink(over: str, raised: str, fits: str) -> None:
    """Stages 0 and 2 share rank 0, which does not fit."""
    flags = [[letter == "x" for letter in letters] for letters in (over, raised, fits)]
    assert fitting((0, 1, 0, 1), (True, False), flags[0], flags[1]) == flags[2]
