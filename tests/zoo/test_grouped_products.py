"""Mixtures of experts whose rows are multiplied in groups by JAX's kernels: as by XLA, and cut like those."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

import autopar
from autopar import zoo
from autopar.errors import ArgumentError
from autopar.ir.trace import trace
from autopar.zoo.layers import grouped


@pytest.mark.core
@pytest.mark.parametrize("suffixes", ["", "-scan", "-remat", "-scan-remat"])
def test_every_kernel_is_known(suffixes: str) -> None:
    """Forward, backward and recomputed, inside of loops and rematerialised bodies."""
    graphs = [trace(m.step, *m.abstract_args()).graph for m in map(zoo.build, names(suffixes))]
    counts = [[op.name for op in graph.walk()] for graph in graphs]
    assert counts[0].count("megablox_product") == counts[1].count("ragged_dot_general") > 0
    assert not any(op.name == "pallas_call" for graph in graphs for op in graph.walk())


def names(suffixes: str) -> tuple[str, str]:
    return f"moe-toy-megablox{suffixes}", f"moe-toy-dropless{suffixes}"


def test_a_step_equals_that_of_ragged_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "megablox", partial(grouped.megablox, tile=32, interpret=True))
    models = [*map(zoo.build, names(""))]
    state, batch = models[0].init(jax.random.key(0)), models[0].make_batch(jax.random.key(1))
    steps = [jax.jit(model.step)(state, batch) for model in models]
    results = [(after["opt"], metrics) for after, metrics in steps]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *results)


def test_experts_are_cut() -> None:
    model = zoo.build("moe-toy-megablox")
    plan = autopar.plan(model.step, *model.abstract_args(), mesh=(2, 4), cluster="tpu-v5e")
    assert not [note for note in plan.notes if "megablox_product" in note or "pallas_call" in note]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="takes float32 and bfloat16, and this model computes in float16"):
        zoo.build("moe-toy-megablox", dtype="float16")
