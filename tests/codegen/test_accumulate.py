"""`num_microbatches`: gradient accumulation on a mesh gives the step's own results, and refuses where it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.api.parallel_function import ParallelFunction
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError, MemoryBudgetError, MicrobatchError
from autopar.ir.layout import partial_axes

pytestmark = pytest.mark.core

MODELS = (
    ("mlp-toy", (8,), "none"),
    ("gpt-toy-tied", (2, 4), "full"),
    ("moe-toy", (4, 2), "none"),
    ("rnn-toy", (2, 4), "none"),
)


def parallel(model: zoo.Model, mesh: tuple[int, ...], **options: object) -> ParallelFunction:
    return autopar.parallelize(model.step, mesh=mesh, cluster=dear(mesh), donate_argnums=(), **options)


def inputs(model: zoo.Model) -> tuple[object, object]:
    return model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))


@pytest.mark.parametrize(("name", "mesh", "remat"), MODELS)
def test_the_results_are_those_of_the_whole_batch(name: str, mesh: tuple[int, ...], remat: str) -> None:
    with jax.enable_x64(True):
        model = zoo.build(name, dtype="float64", batch=32, **({"layers": 1} if name == "gpt-toy-tied" else {}))
        state, batch = inputs(model)
        expected = jax.tree.leaves(jax.jit(model.step)(state, batch))
        results = jax.tree.leaves(parallel(model, mesh, num_microbatches=4, remat=remat)(state, batch))
    for result, other in zip(results, expected, strict=True):
        largest = np.max(np.abs(np.asarray(other)), initial=1e-300)
        assert np.max(np.abs(np.asarray(result) - np.asarray(other)), initial=0.0) <= 1e-9 * largest


def test_gradients_are_reduced_once_per_step() -> None:
    model = zoo.build("gpt-toy", batch=1024)
    pins = {"batch/*": P("x"), "state/*": P()}
    args = model.abstract_args()
    plan = autopar.plan(model.step, *args, mesh={"x": 8}, cluster="dgx-h100", num_microbatches=4, pins=pins)
    reduced = [c for c in plan.collectives if c.kind in ("all-reduce", "reduce-scatter") and c.bytes > 4]
    assert len(reduced) > 20
    assert {c.count for c in reduced} == {1}
    assert autopar.verify(plan, model.step, *args).ok


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_a_scan_over_the_elements_of_a_total_reads_it_reduced(mesh: tuple[int, ...]) -> None:
    """Its slices are scalars, which have no layout of their own."""

    def totals(batch: jax.Array) -> jax.Array:
        return jax.lax.map(lambda x: 2 * jax.numpy.sin(x), jax.numpy.tanh(batch).sum(0))

    batch = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    step = autopar.parallelize(totals, mesh=mesh, cluster=dear(mesh), num_microbatches=2)
    assert any(partial_axes(layout) for layout in step.plan(batch).stages[0].values.values())
    np.testing.assert_allclose(step(batch), jax.jit(totals)(batch), rtol=1e-5)


def test_weights_of_a_recurrent_network_have_their_gradient_reduced_once_per_sequence() -> None:
    model = zoo.build("rnn-toy", batch=64)
    args = model.abstract_args()
    plan = autopar.plan(model.step, *args, mesh={"x": 8}, pins={"batch/*": P("x"), "state/*": P()})
    assert {c.count for c in plan.collectives} == {1}
    assert autopar.verify(plan, model.step, *args).ok


def test_the_peak_falls_and_the_plan_says_why() -> None:
    model = zoo.build("gpt-toy", layers=1, batch=64)
    args = model.abstract_args()
    whole, parts = (
        autopar.plan(model.step, *args, mesh=(8,), cluster=dear((8,)), num_microbatches=count) for count in (1, 8)
    )
    assert parts.stages[0].peak_memory_bytes < whole.stages[0].peak_memory_bytes / 2
    assert (whole.num_microbatches, parts.num_microbatches) == (1, 8)
    assert {parts.input_paths[i] for i in parts.batch} == {"batch/labels", "batch/tokens"}
    assert parts.graph_hash == whole.graph_hash


def test_microbatches_may_be_recomputed_too() -> None:
    model = zoo.build("gpt-toy", batch=64)
    args = model.abstract_args()
    kept, again = (
        autopar.plan(model.step, *args, mesh=(8,), cluster=dear((8,)), num_microbatches=4, remat=remat)
        for remat in ("none", "full")
    )
    assert (set(kept.remat), "full" in again.remat) == (set(), True)
    kept_for_backward, kept_again = (
        next(m.kinds["residuals"] for m in p.stages[0].over_time if m.phase == "backward" and "residuals" in m.kinds)
        for p in (kept, again)
    )
    assert kept_again < kept_for_backward / 2
    assert again.stages[0].peak_memory_bytes < 0.8 * kept.stages[0].peak_memory_bytes
    assert again.hfu / again.mfu > 1.2 * kept.hfu / kept.mfu
    budget = (kept.stages[0].peak_memory_bytes + again.stages[0].peak_memory_bytes) / 2
    plan = autopar.plan(
        model.step, *args, mesh=(8,), cluster=dear((8,)), num_microbatches=4, remat="auto", memory_budget=budget
    )
    assert plan.stages[0].peak_memory_bytes <= budget


def test_a_refusal_suggests_more_microbatches_than_there_are() -> None:
    model = zoo.build("mlp-toy", batch=256)
    with pytest.raises(MemoryBudgetError) as caught:
        autopar.plan(
            *(model.step, *model.abstract_args()),
            mesh=(2,),
            cluster=dear((2,)),
            num_microbatches=2,
            memory_budget=1.2e5,
        )
    suggested = re.search(r"num_microbatches=(\d+)", str(caught.value))
    assert suggested is not None
    assert int(suggested[1]) >= 4


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_saved_plan_runs_and_is_verified(remat: str, tmp_path: Path) -> None:
    model = zoo.build("mlp-toy", batch=32)
    state, batch = inputs(model)
    plan = parallel(model, (8,), num_microbatches=2, remat=remat).plan(state, batch)
    assert ("full" in plan.remat) == (remat == "full")
    plan.save(tmp_path / "plan.json")
    loaded = autopar.parallelize(model.step, plan=tmp_path / "plan.json", donate_argnums=())
    expected = jax.jit(model.step)(state, batch)[1]["loss"]
    assert float(loaded(state, batch)[1]["loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert autopar.verify(plan, model.step, state, batch).ok


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("wresnet-toy", {"num_microbatches": 2}, MicrobatchError, r"reduce_sum at wresnet\.py:\d+ is over"),
        ("mlp-toy", {"num_microbatches": 3}, MicrobatchError, r"'batch/\w+' of shape .* cannot be cut into 3"),
        ("mlp-toy", {"num_microbatches": 0}, ArgumentError, "num_microbatches=0 must be 'auto' or a number"),
    ],
)
def test_what_cannot_be_split_is_refused(
    model: str, options: dict[str, int], error: type[Exception], message: str
) -> None:
    built = zoo.build(model)
    with pytest.raises(error, match=message):
        autopar.plan(built.step, *built.abstract_args(), mesh=(2,), cluster=dear((2,)), **options)
