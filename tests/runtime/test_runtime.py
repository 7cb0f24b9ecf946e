"""A step run as a pipeline computes what it computes on one device, step after step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from autopar import jax_compat
from autopar.api import parallelize
from autopar.errors import ArgumentError, MeshError, StageError
from autopar.ir.trace import trace
from autopar.passes.layers.find import find
from autopar.passes.microbatch.split import split
from autopar.passes.stages.divide import divide
from autopar.runtime import PipelineStep, build
from autopar.schedules import Size, bounds, check, make
from autopar.zoo import build as zoo
from tests.passes.microbatch import batch_programs as programs
from tests.programs.steps import array, loss, sgd, two_layers
from tests.support.collecting import new_objects_only
from tests.support.effort import sample

QUICK = dict(jax_compat.quick_compilation())


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def submeshes(sizes: Sequence[int]) -> list[Mesh]:
    """One-dimensional meshes of so many devices each, in order."""
    devices = iter(jax.devices())
    return [Mesh(np.array([next(devices) for _ in range(n)]), ("data",)) for n in sizes]


def pipeline(
    step: Callable[..., Any],
    args: Sequence[Any],
    sizes: Sequence[int],
    schedule: str = "1f1b",
    count: int = 4,
    borders: Sequence[int] | None = None,
    batch: Any = "auto",
    **options: Any,
) -> PipelineStep:
    """The step in stages between layers, on submeshes of these sizes; one border in the middle if none are given."""
    traced = trace(step, *args)
    layers = find(traced.graph)
    cuts = [len(layers.layers) // 2] if borders is None else borders
    stages = divide(split(traced.graph, count, batch), layers, cuts, weights=schedule == "zb-h1")
    size = Size(len(sizes), count, len(stages.stages) // len(sizes))
    listed = check(make(schedule, size, stages.borders), bounds(schedule, size))
    return build(traced, stages, listed, submeshes(sizes), compiler_options=QUICK, **options)


def assert_close(got: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Equal trees and types, every leaf within `tolerance` of its largest magnitude."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max(initial=0.0) <= tolerance * np.abs(b).max(initial=0.0) + 1e-300, name


# Exact: a pairwise cover of models, schedules, numbers of stages and submeshes

COVER: list[tuple[str, dict[str, int], tuple[int, ...], str, tuple[int, ...], int]] = [
    ("mlp-toy", {"batch": 60}, (1,), "gpipe", (3, 5), 4),
    ("mlp-toy", {"layers": 4}, (1, 2, 3), "zb-h1", (1, 1, 1, 1), 8),
    ("gpt-toy", {"layers": 4, "batch": 16}, (2, 3, 4), "1f1b", (2, 2, 2, 2), 4),
    ("gpt-toy", {}, (2,), "zb-h1", (4, 4), 2),
    ("gpt-toy", {}, (1, 2, 3), "interleaved-1f1b", (1, 1), 2),
    ("gpt-toy-tied", {}, (1, 2, 3), "gpipe", (2, 1, 3, 2), 4),
    ("gpt-toy-tied", {}, (2,), "eager-1f1b", (1, 1), 8),
    ("gpt-toy", {"layers": 4, "batch": 16}, (2, 3, 4), "eager-1f1b", (2, 2, 2, 2), 8),
    ("gpt-toy-remat", {}, (1, 2, 3), "zb-h1", (2, 2, 2, 2), 2),
    ("moe-toy", {}, (2,), "1f1b", (3, 5), 2),
    ("moe-toy", {}, (1, 2, 3), "interleaved-1f1b", (4, 4), 2),
    ("unet-toy", {}, (2, 3, 4), "zb-h1", (1, 2, 1, 1), 2),
]
#: Every schedule, equal and unequal submeshes, several stages on one, tied weights, two sweeps over the microbatches.
KEPT = [COVER[i] for i in (0, 1, 4, 5, 6, 9)]


@pytest.mark.parametrize(
    ("target", "options", "borders", "schedule", "sizes", "count"),
    sample(COVER, KEPT),
    ids=[f"{r[0]}-{r[3]}-{r[4]}" for r in sample(COVER, KEPT)],
)
def test_three_steps_are_those_of_one_device(
    target: str, options: dict[str, int], borders: Any, schedule: str, sizes: Any, count: int
) -> None:
    model = zoo(target, dtype="float64", **options)
    state, batch = jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    step = pipeline(model.step, (state, batch), sizes, schedule, count, borders)
    undivided = jax.jit(model.step, compiler_options=QUICK)
    got, expected = (state, {}), (state, {})
    for _ in range(3):
        got, expected = step(got[0], batch), undivided(expected[0], batch)
        assert_close(got, expected)


KINDS = [
    ("global norm", "zb-h1", (2, 2)),
    ("metrics", "1f1b", (1, 3)),
    ("dropout", "gpipe", (2, 2)),
    ("mask by position", "1f1b", (4, 4)),
    ("lamb", "1f1b", (1, 1)),
    ("scan", "1f1b", (2, 2)),
    ("evaluation", "inference", (2, 2)),
    ("balanced experts in every layer", "zb-h1", (2, 2)),
]


@pytest.mark.parametrize(("name", "schedule", "sizes"), sample(KINDS, [KINDS[i] for i in (1, 2, 4, 6, 7)]))
def test_steps_of_all_kinds_are_those_of_one_device(name: str, schedule: str, sizes: Any) -> None:
    function = programs.EXACT[name]
    args = programs.arguments(name, function)
    paths = trace(function, *args).graph.input_paths
    batch = [i for i, path in enumerate(paths) if path.startswith("b/")]
    step = pipeline(function, args, sizes, schedule, batch=batch)
    assert_close(step(*args), jax.jit(function, compiler_options=QUICK)(*args))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_scan_whose_layers_share_a_weight(schedule: str) -> None:
    def step(p: Any, b: Any) -> Any:
        def loss(p: Any) -> Any:
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w + x @ p["shared"]), None), b["x"], p["layers"])[0]
            return jnp.mean((x @ p["shared"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, g: w - g, p, gradients), value

    weights = np.sin(np.arange(5 * 8 * 8.0)).reshape(5, 8, 8)
    args = {"layers": weights[:4], "shared": weights[4]}, {"x": np.cos(np.arange(128.0)).reshape(16, 8)}
    options: dict[str, Any] = {"stages": 2, "num_microbatches": 4, "schedule": schedule, "donate_argnums": ()}
    assert_close(parallelize(step, mesh=(4,), **options)(*args), jax.jit(step)(*args))


def test_results_that_nothing_computes() -> None:
    """A closed-over array, a number, an argument and the batch itself come back."""
    table = jnp.arange(3.0)

    def step(p: Any, b: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(b["x"] @ p["a"]) @ p["a"] @ p["a"]) ** 2))(p)
        return {"a": p["a"] - grads["a"]}, value, table, 2.5, p["a"], b["x"]

    args = {"a": jnp.eye(4)}, {"x": jnp.ones((8, 4))}
    assert_close(pipeline(step, args, (2, 2))(*args), jax.jit(step)(*args))


# Where arrays live


@pytest.fixture(scope="module")
def small() -> tuple[PipelineStep, Any, Any]:
    model = zoo("mlp-toy", dtype="float64")
    state, batch = jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    return pipeline(model.step, (state, batch), (2, 2)), state, batch


def test_state_lives_where_its_stage_is(small: tuple[PipelineStep, Any, Any]) -> None:
    step, state, batch = small
    new, _ = step(state, batch)
    graph = step.traced.graph
    for value, path, leaf in zip(graph.inputs, graph.input_paths, jax.tree.leaves(new), strict=False):
        stage = step.stages.updates.owners[value]
        assert leaf.sharding == step.planned.argument(stage, value), path
    again, _ = step(new, batch)
    assert [a.sharding for a in jax.tree.leaves(again)] == [a.sharding for a in jax.tree.leaves(new)]


def test_nothing_is_left_behind(small: tuple[PipelineStep, Any, Any]) -> None:
    step, state, batch = small
    state, _ = step(state, batch)
    alive: list[int] = []
    with new_objects_only():
        for _ in range(4):
            state, _ = step(state, batch)
            jax.block_until_ready(state)
            gc.collect()
            alive.append(len(jax.live_arrays()))
    assert len(set(alive)) == 1


def test_sums_are_donated_and_arguments_are_not(small: tuple[PipelineStep, Any, Any]) -> None:
    step, state, batch = small
    new, _ = step(state, batch)
    step(new, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, new, batch)))
    text = step.compiled.passes[0]["B"].as_text()  # pyright: ignore[reportFunctionMemberAccess]
    assert "input_output_alias" in text


# Errors


def checked(state: Any, b: Any) -> Any:
    """A step that fails on the host when it meets a negative number."""

    def positive(x: Any) -> Any:
        if (x < 0).any():
            raise ValueError("a negative number")
        return x

    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(jnp.tanh(b["x"] @ p["a"]) @ p["b"]) @ p["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    kind = jax.ShapeDtypeStruct(b["t"].shape, b["t"].dtype)
    seen = jnp.sum(jax.pure_callback(positive, kind, b["t"], vmap_method="sequential"))
    return jax.tree.map(lambda p, g: p - g * seen, state, grads), value


def test_an_error_on_the_host_names_its_stage_and_leaves_the_arguments_usable() -> None:
    state = {"a": jnp.eye(4), "b": jnp.eye(4)}
    good = {"x": jnp.ones((8, 4)), "t": jnp.ones(8, jnp.float32)}  # JAX checks types in a thread without doubles
    step = pipeline(checked, (state, good), (1, 1), count=2, blocking=True)
    with pytest.raises(
        StageError,
        match=r"stage \d failed in new\d\.1: .*ValueError: a negative number \[pure_callback at test_runtime\.py:\d+\]",
    ):
        step(state, {**good, "t": good["t"].at[7].set(-1)})
    assert_close(step(state, good), jax.jit(checked)(state, good))


def test_an_error_in_a_pass_names_its_instruction(small: tuple[PipelineStep, Any, Any]) -> None:
    step, state, batch = small

    def out_of_memory(*args: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED\nof memory\n8 bytes")

    passes = step.compiled.passes
    broken = replace(step, compiled=replace(step.compiled, passes=(passes[0], {**passes[1], "B": out_of_memory})))
    said = r"^stage 1 failed in B1\.0: RESOURCE_EXHAUSTED \.\.\. 8 bytes \[its largest value is f64.* at nn\.py:\d+\]$"
    with pytest.raises(StageError, match=said):
        broken(state, batch)
    assert_close(*(step(state, batch) for _ in range(2)))


@pytest.mark.parametrize(
    ("size", "name", "sizes", "error", "message"),
    [
        (Size(2, 2), "1f1b", (1, 1), ArgumentError, "is for 2 stages and one batch in 2 microbatches; the step has 2"),
        (Size(2, 4), "inference", (1, 1), ArgumentError, "has passes F, the step has B, F"),
        (Size(2, 4), "1f1b", (1, 1, 1), MeshError, "has 2 ranks, and there are 3 submeshes"),
        (Size(2, 4), "1f1b", (0,), MeshError, "submeshes share .*; give each rank"),
    ],
)
def test_what_does_not_fit_is_refused(size: Size, name: str, sizes: Any, error: Any, message: str) -> None:
    model = zoo("mlp-toy")
    traced = trace(model.step, *model.abstract_args())
    stages = divide(split(traced.graph, 4), find(traced.graph), (1,))
    meshes = submeshes(sizes) if sizes != (0,) else submeshes((1,)) * 2
    with pytest.raises(error, match=message):
        build(traced, stages, make(name, size), meshes)


def test_other_arguments_are_refused(small: tuple[PipelineStep, Any, Any]) -> None:
    step, state, batch = small
    with pytest.raises(ArgumentError, match="was traced for arguments"):
        step(state)
    with pytest.raises(ArgumentError, match=r"argument 'batch/x' has shape \(3, 32\)"):
        step(state, {**batch, "x": jnp.ones((3, 32))})


def test_small_results_and_metrics_of_all_stages_are_on_the_same_devices() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        params, total, count = state
        value, grads = jax.value_and_grad(loss)(params, x)
        norms = {name: jnp.linalg.norm(g) for name, g in grads.items()}
        new = sgd(params, grads), total + norms["up"] + value, count + 1
        return new, {"loss": value, "norms": norms, "each": jnp.stack(list(norms.values())), "count": count}

    args = (two_layers(), jnp.zeros(()), jnp.zeros(())), array(8, 8)
    run = parallelize(step, mesh=(2, 2), stages=2, num_microbatches=2, donate_argnums=())
    (params, *metrics), results = run(*args)
    assert len({p.sharding.device_set == metrics[0].sharding.device_set for p in params.values()}) == 2
    used = [x.sharding.device_set for x in (*metrics, *jax.tree.leaves(results))]
    assert all(devices == used[0] for devices in used)
    float(results["loss"] + results["norms"]["up"] + metrics[0] / metrics[1])
