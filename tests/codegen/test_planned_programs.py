"""Planned stages: equal to one device on any submesh, gradients summed over devices once per step, copies made once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from autopar.hardware.cluster import Cluster
from autopar.ir.trace import trace
from autopar.passes.layers.find import find
from autopar.passes.microbatch.split import split
from autopar.passes.remat.options import Options
from autopar.passes.stages.divide import divide
from autopar.passes.stages.plan import MemoryLimit
from autopar.passes.stages.plan_all import StagePlans, plan_stages
from autopar.runtime import PipelineStep, build
from autopar.schedules import Size, bounds, check, make
from autopar.zoo import build as zoo
from tests.runtime.test_runtime import QUICK, assert_close
from tests.support.effort import sample

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def grids(shapes: Sequence[tuple[int, ...]]) -> list[Mesh]:
    """Submeshes of these shapes on devices in order."""
    devices, first, meshes = np.array(jax.devices()), 0, []
    for shape in shapes:
        count = int(np.prod(shape))
        meshes.append(Mesh(devices[first : first + count].reshape(shape), ("x", "y")[: len(shape)]))
        first += count
    return meshes


def planned(
    model: Any,
    args: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    *,
    count: int = 2,
    schedule: str = "1f1b",
    alpha: float = 1e-6,
    beta: float = 1e-9,
    options: Options | None = None,
) -> tuple[PipelineStep, StagePlans]:
    """The step in as many stages as submeshes, planned for links of these figures."""
    traced = trace(model, *args)
    layers = find(traced.graph)
    n = len(layers.layers)
    borders = [round(n * (i + 1) / len(shapes)) for i in range(len(shapes) - 1)]
    stages = divide(split(traced.graph, count), layers, borders, weights=schedule == "zb-h1")
    meshes = [_mesh(shape, alpha, beta) for shape in shapes]
    plans = plan_stages(stages, traced.in_avals, meshes, options)
    size = Size(len(shapes), count)
    listed = check(make(schedule, size, stages.borders), bounds(schedule, size))
    submeshes = grids(shapes)
    return build(traced, stages, listed, submeshes, plans=plans, compiler_options=QUICK), plans


def _mesh(shape: tuple[int, ...], alpha: float, beta: float) -> Any:
    cluster = Cluster.custom(shape, alpha, beta, {"float64": 1e9, "float32": 1e9}, 1e10, 10**10)
    return cluster.logical_mesh(shape)


def arguments(name: str, **options: int) -> tuple[Any, tuple[Any, Any]]:
    model = zoo(name, dtype="float64", **options)
    return model, (jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1)))


def collectives(program: Any) -> Mapping[str, int]:
    """Collectives of a compiled program with operands of rank 1 or more, by kind; pieces of tuples count one by one."""
    counts: Counter[str] = Counter()
    for line in program.as_text().splitlines():
        match = re.search(rf" = (.*) ({'|'.join(COLLECTIVES)})(-start)?\(", line)
        if match:
            counts[match[2]] += len(re.findall(r"\w+\[\d[^\]]*\]", match[1]))
    return +counts


# Equal to one device

FAST_LINKS, LINKS, SLOW_LINKS = 1e-10, 1e-8, 1e-7  # s/byte

COVER: list[tuple[str, dict[str, int], tuple[tuple[int, ...], ...], str, int, float]] = [
    ("mlp-toy", {"batch": 32}, ((2, 2), (2, 2)), "1f1b", 4, FAST_LINKS),
    ("mlp-toy", {"batch": 32}, ((2, 2), (4,)), "zb-h1", 4, SLOW_LINKS),
    ("mlp-toy", {"batch": 60}, ((3,), (5,)), "gpipe", 2, FAST_LINKS),
    ("gpt-toy", {"batch": 16}, ((2, 2), (2, 2)), "zb-h1", 2, FAST_LINKS),
    ("gpt-toy-tied", {"batch": 16}, ((2, 2), (4,)), "1f1b", 2, SLOW_LINKS),
    ("gpt-toy-remat", {"batch": 16}, ((4,), (2, 2)), "1f1b", 2, LINKS),
    ("gpt-toy-scan", {"batch": 16}, ((2,), (2, 2)), "gpipe", 2, FAST_LINKS),
    ("moe-toy", {}, ((2, 2), (1,)), "1f1b", 2, LINKS),
    ("mlp-toy", {"batch": 32}, ((2, 2), (1,)), "1f1b", 2, LINKS),
]


KEPT = [COVER[i] for i in (1, 2, 4, 6, 8)]


@pytest.mark.parametrize(
    ("target", "options", "shapes", "schedule", "count", "beta"),
    sample(COVER, KEPT),
    ids=[f"{r[0]}-{r[3]}-{r[2]}" for r in sample(COVER, KEPT)],
)
def test_two_steps_are_those_of_one_device(
    target: str, options: dict[str, int], shapes: Any, schedule: str, count: int, beta: float
) -> None:
    model, (state, batch) = arguments(target, **options)
    step, _ = planned(model.step, (state, batch), shapes, count=count, schedule=schedule, alpha=1e-8, beta=beta)
    undivided = jax.jit(model.step, compiler_options=QUICK)
    got, expected = (state, {}), (state, {})
    for _ in range(2):
        got, expected = step(got[0], batch), undivided(expected[0], batch)
        assert_close(got, expected)


# Gradients over devices


def test_gradients_are_summed_over_devices_once_per_step() -> None:
    """None in a pass; in the updates one piece of an all-reduce per parameter."""
    model, (state, batch) = arguments("mlp-toy", batch=1024)
    step, plans = planned(model.step, (state, batch), ((4,), (4,)), count=4, alpha=1e-5)
    parameters = [len(plan.graph.completed_in) for plan in plans.plans]
    counts_by_program = {name: collectives(program) for name, program in step.programs.items()}
    assert {name: c for name, c in counts_by_program.items() if c and name[-1] in "FB"} == {}
    sums = [
        sum(c["all-reduce"] for n, c in counts_by_program.items() if n.startswith(f"stage {s} update")) for s in (0, 1)
    ]
    partial = [
        sum(-2 in (plan.layout(plan.graph.local[v]) or ()) for v in plan.graph.completed_in)  # pyright: ignore[reportArgumentType]
        for plan in plans.plans
    ]
    assert sums == partial == [parameters[0], parameters[1] - 1]  # and the loss, a scalar, in every microbatch


def test_narrow_gradients_are_added_up_in_float32() -> None:
    model = zoo("mlp-toy", dtype="bfloat16", batch=64)
    args = jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    step, _ = planned(model.step, args, ((4,), (4,)), count=4, alpha=1e-5)
    sums = jax.tree.leaves(step.compiled.begin[0].out_info[2])  # pyright: ignore[reportFunctionMemberAccess]
    assert {a.dtype for a in sums} == {np.dtype(np.float32)}
    assert {a.shape[0] for a in sums} == {4}
    assert_close(step(*args), jax.jit(model.step)(*args), 0.05)


# Tensor parallelism


def wide(p: Any, b: Any) -> Any:
    """Two blocks of two products each, over few examples."""

    def loss(p: Any) -> jax.Array:
        x = b["x"]
        for block in p:
            x = x + jnp.tanh(x @ block["up"]) @ block["down"]
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value


def wide_arguments(examples: int) -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 9))
    blocks = [{"up": (32, 64), "down": (64, 32)}] * 4
    params = [{k: 0.1 * jax.random.normal(next(keys), s, "float64") for k, s in block.items()} for block in blocks]
    return params, {"x": jax.random.normal(next(keys), (examples, 32), "float64")}


def test_pins_make_stages_tensor_parallel() -> None:
    """Up-projections cut by columns: one sum per block in the forward pass, none of weights."""
    args = wide_arguments(8)
    options = Options(pins={"*/up": PartitionSpec(None, "x"), "*/down": PartitionSpec("x")})
    step, plans = planned(wide, args, ((4,), (4,)), options=options)
    assert_close(step(*args), jax.jit(wide)(*args))
    new, _ = step(*args)
    assert [b["up"].sharding.spec for b in new] == [PartitionSpec(None, "x")] * 4
    assert collectives(step.programs["stage 0 F"]) == {"all-reduce": 2}
    assert not any(collectives(program) for name, program in step.programs.items() if "update" in name)
    assert plans.distinct == 2


def test_few_examples_of_wide_layers_are_cut_by_features() -> None:
    """Two examples per microbatch cannot be cut over four devices; the planner finds what can."""
    args = wide_arguments(4)
    step, plans = planned(wide, args, ((4,), (4,)), alpha=1e-12, beta=1e-14)
    assert_close(step(*args), jax.jit(wide)(*args))
    for plan in plans.plans:
        weights = [v for v, path in plan.graph.graph.names.items() if path.endswith(("up", "down"))]
        assert all(max(plan.layout(v) or (-1,)) >= 0 for v in weights)


# What is made once


def test_gathered_weights_are_gathered_once_per_step() -> None:
    """Weights held in pieces and read whole by every pass: the copy is made before the passes."""
    args = wide_arguments(256)
    options = Options(pins={"p/*": PartitionSpec("x")})
    step, plans = planned(wide, args, ((4,), (4,)), count=4, options=options)
    assert_close(step(*args), jax.jit(wide)(*args))
    assert len(plans.plans[1].layouts.copies) >= 4
    assert collectives(step.programs["stage 1 begin"]) == {"all-gather": 4}
    passes = {kind: collectives(step.programs[f"stage 1 {kind}"]) for kind in "FB"}
    assert passes == {"F": {}, "B": {}}


def test_what_is_handed_over_lies_alike_on_both_ends() -> None:
    args = wide_arguments(64)
    step, plans = planned(wide, args, ((2, 2), (2, 2)))
    for transfer, values in plans.stages.transfers.items():
        for v in values:
            assert step.planned.value(transfer.source, v).spec == step.planned.value(transfer.target, v).spec


def one_stage_per_layer() -> tuple[Any, Any]:
    traced = trace(wide, *wide_arguments(256))
    layers = find(traced.graph)
    assert len(layers.layers) >= 4
    return traced, divide(split(traced.graph, 2), layers, range(1, len(layers.layers)))


def test_like_stages_are_planned_once() -> None:
    """The first stage needs no cotangent and the last has the loss; those between are alike."""
    traced, stages = one_stage_per_layer()
    plans = plan_stages(stages, traced.in_avals, [_mesh((2,), 1e-6, 1e-9)] * len(stages.stages))
    assert plans.distinct < len(plans.plans)
    with_own = plan_stages(stages, traced.in_avals, [_mesh((2,), 1e-6, 1e-9)] * len(stages.stages))
    assert [p.layouts for p in plans.plans] == [p.layouts for p in with_own.plans]


def test_like_stages_with_unlike_room_share_their_problem() -> None:
    """Each has the fastest plan within its limit, with as many microbatches as it has in flight."""
    traced, stages = one_stage_per_layer()
    meshes, count = [_mesh((2,), 1e-6, 1e-8)] * len(stages.stages), len(stages.stages)
    roomy = plan_stages(stages, traced.in_avals, meshes, limits=[MemoryLimit(10**12, count - s) for s in range(count)])
    peaks = [[p.summary.memory.peak(n) for n in (1, count)] for p in roomy.plans]
    within = int(min(p[1] for p in peaks[1:-1])) - 1  # too little for the middle stages with most in flight
    limits = [MemoryLimit(within, count if s % 2 else 1) for s in range(count)]
    tight = plan_stages(stages, traced.in_avals, meshes, limits=limits)
    assert roomy.distinct == tight.distinct < count
    for plan, limit, before in zip(tight.plans[1:-1], limits[1:-1], peaks[1:-1], strict=True):
        fits = plan.summary.memory.peak(limit.in_flight) <= limit.nbytes
        assert fits == (plan.solution.status != "least-memory")
        assert plan.summary.memory.peak(limit.in_flight) <= before[limit.in_flight > 1]
    at_one = [{p.summary.memory.peak(1) for p in stage_plans.plans[1:-1]} for stage_plans in (tight, roomy)]
    assert at_one[0] != at_one[1]
