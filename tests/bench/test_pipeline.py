"""bench pipeline: clock, prices, and rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from autopar.bench import pipeline
from autopar.cost_models.pipeline import Prices, uniform
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
    expected = np.mean(np.square(x + np.tanh(np.einsum("bni,nij->bnj", x, w))))
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
    found = pipeline.prices_of(clocked(seconds, [4.0, 4.0]), 2, 2)
    assert found == Prices(
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


def test_a_row_has_the_ratio_and_both_bubbles() -> None:
    """Two alike stages: 2 (m + p - 1) ticks, of which m work."""
    schedule = make("1f1b", Size(2, 4))
    found = pipeline.row("narrow", schedule, uniform(2, 1.0, 1.0), [12.0, 10.0, 16.0], [1.0, 0.9, 1.1])
    assert (found["simulated_s"], found["measured_s"], found["ratio"]) == (10.0, 12.0, 1.2)
    assert found["simulated_bubble"] == pytest.approx(0.2)
    assert found["bubble"] == pytest.approx(1 - 8 / 12)
    assert found["threads"] == 1.0
    assert pipeline.figures([found]) == {"worst_ratio": 1.2, "by_bubble": ["1f1b"]}
    assert "ratio 1.200" in pipeline.line(found)


def test_a_pipeline_is_measured_end_to_end() -> None:
    """A tiny step under two schedules, one by one and as it runs."""
    model = pipeline.narrow(layers=4, products=2, width=4, batch=16)
    variants = []
    for name in ("1f1b", "zb-h1"):
        step = pipeline.built(model, 2, 1, name, 4)
        variants.append(pipeline.Variant(step, pipeline.placed(step, model)))
    pipeline.take_turns(variants, 2)
    for variant in variants:
        prices = pipeline.prices_of(variant.clock, 2, 2)
        found = pipeline.row("narrow", variant.step.schedule, prices, variant.times, variant.threads)
        assert len(found["raw_s"]) == 2
        assert min(t for times in found["pass_s"].values() for t in times) > 0
        assert {*found["transfer_s"]} == {"0>1", "1>0"}
