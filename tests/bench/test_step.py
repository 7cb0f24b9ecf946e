"""bench step: the experts' layouts, turns, and the row."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar import jax_compat, zoo
from autopar.bench import step
from autopar.errors import ArgumentError


@pytest.fixture(scope="module")
def mlp():
    return zoo.build("mlp-toy")


@pytest.mark.parametrize(
    ("name", "path", "shape", "spec"),
    [
        ("data", "params/blocks/0/w1", (32, 64), P()),
        ("fsdp", "params/blocks/0/w1", (32, 64), P(None, "devices")),
        ("fsdp", "params/blocks/0/b1", (6,), P()),
        ("megatron", "params/blocks/0/w1", (32, 64), P(None, "devices")),
        ("megatron", "opt/0/mu/blocks/0/w1", (32, 64), P(None, "devices")),
        ("megatron", "params/blocks/0/w2", (64, 32), P("devices", None)),
        ("megatron", "params/blocks/0/w1", (32, 60), P()),
        ("megatron", "opt/0/count", (), P()),
    ],
)
def test_where_an_expert_puts_a_leaf(mlp, name, path, shape, spec):
    assert step.EXPERTS[name].place(path, shape, mlp) == spec


@pytest.mark.parametrize("name", sorted(step.EXPERTS))
def test_an_expert_takes_the_single_device_step(mlp, name):
    mesh = jax_compat.auto_mesh(np.array(jax.devices()), ("devices",))
    variant = step.expert(name, mlp, mesh)
    batch = mlp.make_batch(jax.random.key(1))
    after, metrics = jax.jit(mlp.step)(mlp.init(jax.random.key(0)), batch)
    theirs, their_metrics = variant.step(variant.state, batch)
    assert their_metrics["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), theirs, after)


def test_everyone_takes_as_many_turns_and_goes_first_in_turn():
    log: list[str] = []

    def stepper(name):
        return lambda state, batch: (log.append(name), {})

    variants = [step.Variant(name, stepper(name), None) for name in "ab"]
    step.take_turns(variants, [0, 1], 2)
    assert "".join(log) == "aabb" + "ab" + "ba"
    assert [len(v.times) for v in variants] == [2, 2]


def test_the_ratio_is_to_the_best_expert():
    times = {"autopar": [2.0, 3.0, 9.0], "data": [6.0, 6.0, 6.0], "fsdp": [2.0, 2.0, 2.0]}
    variants = [step.Variant(name, lambda s, b: (s, b), None, t) for name, t in times.items()]
    row = step.row("mlp-toy", variants, SimpleNamespace(mesh_sizes=(8,), step_time_s=1.0))
    assert (row["best_expert"], row["ratio"], row["raw_s"]) == ("fsdp", 1.5, times)
    assert row["paired_ratio"] == 1.5
    assert step.table([row]).endswith("largest ratio: 1.500 (mlp-toy); target 1.05")


def test_no_models_are_refused():
    with pytest.raises(ArgumentError, match="no models given"):
        step.run([], 1)


def test_every_size_builds():
    for name, sizes in step.BENCH_SIZES.items():
        assert zoo.build(name, **sizes).parameters() > 0
