"""What was published of GPT, against what the graph says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.bench.references import published


@pytest.mark.parametrize("remat", [False, True])
def test_flops_are_those_of_the_formula(remat: bool) -> None:
    counts = published.flops("125m", remat=remat)
    assert counts["ratio"] == pytest.approx(1, rel=1e-12)
    assert (counts["left_out"] > 0) == remat


def test_the_formula_at_a_size_worked_out_by_hand() -> None:
    """GPT-2.6B, batch 32: 72 and 96 times 32 * 1024 * 32 * 2560^2 * (1 + 1/15), and 6 * 32 * 1024 * 2560 * 51200."""
    config = published.gpt.SIZES["2.6b"]
    assert published.formula(config, remat=False) / 32 == pytest.approx(553535385108480.0)
    assert published.formula(config, remat=True) / 32 == pytest.approx(729457245552640.0)


def test_what_the_author_cuts_is_cut_in_every_block() -> None:
    """Megatron's four sums per block, in whichever form, over the axis "model"."""
    plan = published.step(replace(published.gpt.SIZES["toy"], layers=4, width=256, batch=16, seq=64))
    for stage in plan.stages:
        sums = [c for c in stage.collectives if c.kind in ("all-reduce", "reduce-scatter") and c.axes == ("model",)]
        assert sum(c.count for c in sums) >= 2 * 2 * 3  # blocks, microbatches, sums; the first has one less behind it
