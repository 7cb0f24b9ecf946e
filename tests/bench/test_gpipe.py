"""bench gpipe: the pipeline by hand computes the step of one device, and the row."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from autopar import jax_compat, zoo
from autopar.bench.pipelines import gpipe
from autopar.bench.step import Variant
from tests.support.effort import sample


@pytest.mark.parametrize(
    ("stages", "data", "layers", "skips"),
    sample([(4, 2, 4, False), (4, 2, 4, True), (2, 1, 4, True)], [(4, 2, 4, False), (2, 1, 4, True)]),
)
def test_gpipe_by_hand_is_the_step_of_one_device(stages: int, data: int, layers: int, skips: bool) -> None:
    """Parameters and moments after two steps, in doubles."""
    with jax.enable_x64(True):
        model = zoo.build("gpt-toy", dtype="float64", layers=layers)
        state, batch = model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))
        devices = np.array(jax.devices()[: stages * data]).reshape(stages, data)
        hand = gpipe.GPipe(jax_compat.auto_mesh(devices, ("stage", "data")), 4, 16, skips, "float64")
        mine = hand.init(state["params"])
        step, undivided = hand.compiled(mine), jax.jit(model.step)
        metrics: dict[str, jax.Array] = {}
        expected: dict[str, jax.Array] = {}
        for _ in range(2):
            (mine, metrics), (state, expected) = step(mine, batch), undivided(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-12)
        adam, theirs = mine["opt"][0], state["opt"][0]
        pairs = ((mine["params"], state["params"]), (adam.mu, theirs.mu), (adam.nu, theirs.nu))
        for got, want in pairs:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-14), got, hand.stacked(want))


def test_layers_are_cut_by_stage_and_all_else_is_whole() -> None:
    model = zoo.build("gpt-toy", layers=4)
    mesh = jax_compat.auto_mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "data"))
    state = gpipe.GPipe(mesh, 4, 16).init(model.init(jax.random.key(0))["params"])
    w1, embed = state["opt"][0].mu["blocks"]["w1"], state["params"]["embed"]
    assert (w1.shape[:2], w1.addressable_shards[0].data.shape[:2]) == ((4, 1), (1, 1))
    assert embed.sharding.is_fully_replicated


def test_autopars_plan_is_of_the_same_form() -> None:
    prepared = gpipe.ours(zoo.build("gpt-toy", layers=4))
    assert [s.devices for s in prepared.plan.stages] == [2] * 4
    assert (prepared.plan.schedule, prepared.plan.num_microbatches) == ("1f1b", 8)
    *recomputed, rest = prepared.plan.remat
    assert (set(recomputed), rest) == ({"full"}, "none")  # the last one is followed by its own backward pass


def test_the_row_has_ratios_errors_and_raw_times() -> None:
    variants = [
        Variant("autopar", lambda s, b: (s, b), None, [2.0, 4.0]),
        Variant("gpipe", lambda s, b: (s, b), None, [1.0, 4.0]),
        Variant("gpipe that skips", lambda s, b: (s, b), None, [1.0, 1.0]),
    ]
    losses = {"autopar": [1.0, 2.0], "gpipe": [1.0, 2.1], "gpipe that skips": [1.0, 2.0]}
    passes = {"F": [0.02] * 4, "B": [0.05] * 4}
    row = gpipe.row(variants, [1.0, 2.0], losses, passes, [{"x": 2}] * 4)
    assert row["ratio"] == {"gpipe": 1.2, "gpipe that skips": 3.0}
    assert row["paired_ratio"] == {"gpipe": 1.5, "gpipe that skips": 3.0}
    assert row["loss_error"] == {"autopar": 0.0, "gpipe": pytest.approx(0.05), "gpipe that skips": 0.0}
    assert not row["ok"]
    assert row["raw_s"]["autopar"] == [2.0, 4.0]
    assert "gpipe within 5.0e-02 of one device" in gpipe.table(row)
