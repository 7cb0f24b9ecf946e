"""`memory_budget=` with stages: the peak stays within it, results are the same, and what does not fit says why."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import AutoparWarning, MemoryBudgetError
from autopar.hardware.cluster import Cluster
from tests.support.effort import sample

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b"]
MODEL = zoo.build("mlp-toy", layers=4, batch=64)


@cache
def plan(schedule: Schedule = "1f1b", budget: int | Literal["min"] | None = None) -> autopar.Plan:
    options: dict[str, Any] = {"mesh": (2,), "cluster": dear((2,)), "stages": 2, "num_microbatches": 4}
    return autopar.plan(MODEL.step, *MODEL.abstract_args(), schedule=schedule, memory_budget=budget, **options)


@cache
def least(schedule: Schedule) -> MemoryBudgetError:
    with pytest.raises(MemoryBudgetError) as refused:
        plan(schedule, 1)
    return refused.value


@pytest.mark.parametrize("schedule", sample(["gpipe", "1f1b", "interleaved-1f1b"], ["1f1b", "interleaved-1f1b"]))
def test_the_smallest_budget_that_an_error_names_is_met(schedule: Schedule) -> None:
    error, free = least(schedule), plan(schedule)
    assert 0 < error.bound_bytes <= error.least_bytes < free.peak_memory_bytes
    smallest = plan(schedule, error.least_bytes)
    assert smallest.peak_memory_bytes <= error.least_bytes
    assert not any("more than" in note for note in smallest.notes)
    assert plan(schedule, free.peak_memory_bytes).stages == free.stages


@settings(max_examples=5, derandomize=True)
@given(share=st.floats(0, 1.2), schedule=st.sampled_from(["1f1b", "interleaved-1f1b"]))
def test_no_budget_is_exceeded(share: float, schedule: Schedule) -> None:
    free, smallest = plan(schedule).peak_memory_bytes, least(schedule).least_bytes
    budget = int(smallest + share * (free - smallest))
    within = plan(schedule, budget)
    assert within.peak_memory_bytes <= budget
    assert within.step_time_s >= plan(schedule).step_time_s * 0.995
    by_rank = [sum(s.peak_memory_bytes for s in within.stages if s.rank == rank) for rank in (0, 1)]
    assert within.peak_memory_bytes == max(by_rank)


def test_the_least_budget_is_the_least_peak_over_all_devices() -> None:
    smallest = plan("1f1b", "min")
    assert smallest.peak_memory_bytes <= least("1f1b").least_bytes
    assert smallest.step_time_s <= plan("1f1b", smallest.peak_memory_bytes).step_time_s
    assert not any("more than" in note for note in smallest.notes)


def test_the_message_says_where_and_what_would_fit() -> None:
    first_line = (
        r"no plan in 2 stages fits into 1 B per device: the smallest one found needs .* in stage \d \(state .*\)"
    )
    assert re.match(first_line, str(least("gpipe")))
    assert f"memory_budget={least('1f1b').least_bytes} on devices that have it" in str(least("1f1b"))


def test_what_would_fit_is_said_where_it_would() -> None:
    """A change that frees memory, but not enough, is no advice."""
    needs, fewer = least("gpipe").least_bytes, least("1f1b").least_bytes
    assert fewer < needs
    with pytest.raises(MemoryBudgetError, match="schedule='1f1b', which keeps fewer microbatches; num_microbatches=8"):
        plan("gpipe", fewer)
    assert not re.search("remat|schedule|num_microbatches", str(least("gpipe")).partition("What would fit:")[2])
    assert not re.search("schedule", str(least("1f1b")).partition("What would fit:")[2])
    options: dict[str, Any] = {"mesh": (2,), "cluster": dear((2,)), "stages": 2, "schedule": "gpipe", "remat": "none"}
    for count in (1, 64):  # 1f1b keeps as many of one microbatch; 64 rows have no halves
        with pytest.raises(MemoryBudgetError) as refused:
            autopar.plan(MODEL.step, *MODEL.abstract_args(), num_microbatches=count, memory_budget=1000, **options)
        free = refused.value.least_bytes - 1
        with pytest.raises(MemoryBudgetError) as refused:
            autopar.plan(MODEL.step, *MODEL.abstract_args(), num_microbatches=count, memory_budget=free, **options)
        assert "recompute what the backward pass keeps" in str(refused.value)
        assert ("schedule='1f1b'" in str(refused.value)) == (count > 1)
        assert ("num_microbatches=" in str(refused.value)) == (count == 1)


def test_as_few_layers_as_suffice_are_recomputed_and_results_are_the_same() -> None:
    """The first stage, with two microbatches in flight, is the one that does not fit."""
    model = zoo.build("mlp-toy", layers=4, batch=256, dtype="float32")
    args = jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    options: dict[str, Any] = {"mesh": (2,), "stages": 2, "num_microbatches": 4, "donate_argnums": ()}
    options |= {"cluster": dear((2,))}
    free = autopar.plan(model.step, *args, **options)
    budget = int(0.9 * free.peak_memory_bytes)
    step = autopar.parallelize(model.step, memory_budget=budget, **options)
    plan = step.plan(*args)
    (first, middle), (_, end) = plan.stages[0].layers, plan.stages[1].layers
    assert 0 < plan.remat[first:middle].count("full") < middle - first
    assert plan.remat[middle:end].count("none") == end - middle
    assert "full" not in free.remat
    assert plan.peak_memory_bytes <= budget
    for ours, theirs in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(model.step)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_without_a_budget_the_smallest_is_the_plan_and_a_warning_says_so() -> None:
    tiny = Cluster.custom((4,), 1e-6, 1e-10, 1e12, 1e11, 20_000)
    with pytest.warns(AutoparWarning, match=r"needs .* per device, more than the 18 kB that are there"):
        autopar.plan(MODEL.step, *MODEL.abstract_args(), mesh=(4,), cluster=tiny, stages=2, num_microbatches=4)
