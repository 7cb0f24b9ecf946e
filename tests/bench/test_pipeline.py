"""bench pipeline: clock, prices, and rows."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from autopar.bench.pipelines import simulated as pipeline
from autopar.cost_models.pipeline import Prices
from autopar.schedules import Instruction, Size, make


def test_the_narrow_model_descends() -> None:
    model = pipeline.narrow(layers=2, products=3, width=4, batch=8)
    state, batch = model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))
    assert batch["x"].shape == (8, 3, 4)
    assert [p.shape for p in state["params"]] == [(3, 4, 4)] * 2
    new, first = jax.jit(model.step)(state, batch)
    _, second = jax.jit(model.step)(new, batch)
    assert float(second["loss"]) < float(first["loss"])


def test_a_layer_is_a_product_by_a_block_diagonal() -> None:
    model = pipeline.narrow(layers=1, products=2, width=3, batch=4)
    state, batch = model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))
    w, x = np.asarray(state["params"][0]), np.asarray(batch["x"])
    expected = np.mean(np.square(x + np.maximum(np.einsum("bni,nij->bnj", x, w), 0)))
    assert float(model.step(state, batch)[1]["loss"]) == pytest.approx(float(expected), rel=1e-5)


def clocked(seconds: dict[pipeline.Key, list[float]], begins: list[float]) -> pipeline.Clock:
    return pipeline.Clock(begins=begins, times=seconds)


def test_prices_are_medians_and_the_beginning_counts_once() -> None:
    """Two steps; the second stage has two updates in each."""
    seconds = {
        ("run", "F", 0, -1): [1.0, 2.0, 9.0],
        ("run", "F", 1, -1): [3.0],
        ("run", "B", 0, -1): [4.0],
        ("run", "B", 1, -1): [5.0],
        ("send", "F", 0, 1): [0.5],
        ("send", "B", 1, 0): [0.25],
        ("update", "", 0, -1): [1.0, 1.0],
        ("update", "", 1, -1): [1.0, 10.0, 3.0, 10.0],
    }
    prices = pipeline.prices_of(clocked(seconds, [4.0, 4.0]), 2, 2)
    assert prices == Prices(
        (2.0, 3.0), (4.0, 5.0), (0.0, 0.0), transfer={(0, 1): 0.5, (1, 0): 0.25}, update=(1.0 + 1.0, 12.0 + 1.0)
    )


def test_a_clock_keeps_the_beginning_of_a_step_apart() -> None:
    clock = pipeline.Clock()
    for _ in range(2):
        clock.start()
        clock(Instruction("run", "F", 0, 0), {})
        clock(Instruction("run", "F", 0, 1), {})
    assert len(clock.begins) == 2
    assert {key: len(times) for key, times in clock.times.items()} == {("run", "F", 0, -1): 2}


def test_a_row_pairs_steps_with_the_prices_before_them() -> None:
    """Two alike stages of passes that take t: 2 t (m + p - 1), of which m work. The machine gets slower by the step."""
    schedule = make("1f1b", Size(2, 4))
    ticks = (1.0, 2.0, 4.0)
    seconds = {("run", kind, s, -1): [t for t in ticks for _ in range(4)] for kind in "FB" for s in range(2)}
    clock = clocked(seconds | {("run", "F", 0, -1): [t for t in ticks for _ in range(3)]}, [*ticks])
    row = pipeline.row("narrow", schedule, clock, [12.0, 20.0, 60.0], [1.0, 0.9, 1.1])
    assert (row["raw_simulated_s"], row["raw_s"]) == ([10.0, 20.0, 40.0], [12.0, 20.0, 60.0])
    assert (row["simulated_s"], row["measured_s"]) == (20.0, 20.0)
    assert row["ratio"] == pytest.approx(1.2)
    assert row["simulated_bubble"] == pytest.approx(0.2)
    assert row["bubble"] == pytest.approx(1 - 8 / 12)
    assert row["threads"] == 1.0
    assert pipeline.figures([row]) == {"worst_ratio": pytest.approx(1.2), "by_bubble": ["1f1b"]}
    assert "ratio 1.200" in pipeline.line(row)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="idle priority is Linux's")
def test_neighbours_take_what_nothing_else_wants() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with pipeline.neighbours(cores[:1]) as (child,):
        assert child.poll() is None
        while os.sched_getaffinity(child.pid) != {cores[0]}:  # it starts
            time.sleep(0.01)
        assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE
    assert child.poll() is not None


def test_all_threads_are_confined() -> None:
    cores = os.sched_getaffinity(0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        try:
            pipeline.confine([min(cores)])
            assert pool.submit(os.sched_getaffinity, 0).result() == {min(cores)} == os.sched_getaffinity(0)
        finally:
            pipeline.confine(cores)
    assert os.sched_getaffinity(0) == cores


def test_a_pipeline_is_measured_end_to_end() -> None:
    """A tiny step under two schedules, one by one and as it runs."""
    model = pipeline.narrow(layers=4, products=2, width=4, batch=16)
    variants = []
    for name in ("1f1b", "zb-h1"):
        step = pipeline.built(model, 2, 1, name, 4)
        variants.append(pipeline.Variant(step, pipeline.placed(step, model)))
    pipeline.take_turns(variants, 2)
    for variant in variants:
        row = pipeline.row("narrow", variant.step.schedule, variant.clock, variant.times, variant.threads)
        assert len(row["raw_s"]) == 2
        assert min(t for times in row["pass_s"].values() for t in times) > 0
        assert {*row["transfer_s"]} == {"0>1", "1>0"}
