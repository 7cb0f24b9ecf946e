"""Plans within a budget against HiGHS: a few cases of the survey, and what it counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.judge.budget_milp import within
from tests.judge.budgets import ROUNDING, Verdict, case, judged, summary
from tests.passes.support.small_problems import random_problem
from tests.passes.support.small_rows import all_peaks, brute_within, random_points
from tests.support.effort import sample

SEEDS = (1, 2, 3, 7)  # a toy and random programs of at most 300 strategies


@pytest.mark.parametrize("seed", sample(SEEDS, SEEDS[:2]))
def test_certificates_hold_against_highs(seed: int) -> None:
    drawn = case(seed)
    assert drawn is not None
    verdict = judged(drawn, 30.0)
    assert verdict.holds
    assert verdict.optimum is not None
    assert verdict.lower <= verdict.optimum * (1 + ROUNDING)
    assert -ROUNDING <= verdict.excess <= verdict.gap * (1 + verdict.gap) + 2 * ROUNDING


@pytest.mark.parametrize("seed", range(6))
def test_the_judge_finds_what_brute_force_finds(seed: int) -> None:
    problem = random_problem(seed, 6, 9)
    source = random_points(problem, seed, 4)
    _, peaks = all_peaks(problem, source)
    budget = float(np.floor(peaks.min() + 0.3 * np.ptp(peaks))) + 0.5
    answer = within(problem, source, budget, 30.0)
    assert answer.optimum is not None
    assert answer.optimum == pytest.approx(brute_within(problem, source, budget), abs=1e-12)
    assert answer.bound <= answer.optimum + 1e-9


GOOD = Verdict(0, "mlp-toy", (2,), "gpu", 10, 1.0, 0.999, 1.0, 1.0, honest=True, status="near-optimal")


def test_what_contradicts_a_certificate_is_counted() -> None:
    above = replace(GOOD, seed=1, lower=1.01, objective=1.02)
    below = replace(GOOD, seed=2, objective=0.9, lower=0.9)
    unfit = replace(GOOD, seed=3, honest=False)
    counted = summary([GOOD, above, below, unfit])
    assert counted["contradicted"] == [1, 2, 3]
    assert counted["solved by HiGHS"] == 4
