"""Lower bounds on pipelines: no layer is bounded above what it takes in a stage, and no pipeline is faster."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import api, zoo
from autopar.hardware import meshes
from autopar.passes.inter_op import pipelines
from autopar.passes.inter_op.dynamic_program import Question, RunCosts, placements
from autopar.passes.inter_op.layer_bounds import BoundedLayers, ByteRates, bound_on, bounded_layers, priced_on
from autopar.passes.inter_op.least_step import least_step
from autopar.passes.inter_op.lower_bound import PIPELINE_BOUND, OneStage, PipelineBound
from autopar.passes.inter_op.search import InterOpSearch, SearchSpace
from autopar.passes.layers import find as layers_pass
from autopar.passes.memory.penalised import penalised
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.split import split
from autopar.passes.remat.options import Options
from autopar.passes.remat.rewrite import FULL, NONE, POLICIES, recomputable, rewrite
from autopar.passes.solver.optimize import optimize
from autopar.passes.stages.cost import stage_times
from autopar.passes.stages.divide import divide
from autopar.passes.stages.graph import stage_graph
from autopar.passes.stages.plan import StageProblem
from autopar.plans.builders.pipeline import make_plan
from autopar.plans.plan import Plan
from autopar.rules import rules_of
from tests.passes.inter_op.test_dynamic_program import divisions
from tests.passes.inter_op.test_optimality import CLUSTERS
from tests.support.effort import ALL, examples, sample
from tests.support.traces import traced

COUNT = 2
MODELS: dict[str, dict[str, Any]] = {
    "mlp-toy": {"layers": 3},
    "gpt-toy": {"layers": 2 if ALL else 1},
    "gpt-toy-scan": {},
    "moe-toy": {},
    "t5-toy": {},
}


@cache
def search(model: str, cluster: str) -> InterOpSearch:
    step = traced(model, **MODELS[model])
    return InterOpSearch(step.graph, step.in_avals, CLUSTERS[cluster][0], batch_leaves(step.graph, 1), Options(gap=0.0))


@cache
def layers(model: str, cluster: str, count: int = COUNT) -> BoundedLayers:
    of = search(model, cluster)
    return bounded_layers(of.split_into(count), of.layers, of.avals)


@cache
def bounds(model: str, cluster: str, n: int, count: int = COUNT, *, once: bool = True) -> list[float]:
    """Of every layer, its seconds on a submesh, with or without what runs once per step."""
    bounded = layers(model, cluster, count)
    mesh = search(model, cluster).meshes[n]
    of_class = {
        c: bound_on(g, mesh, rules_of(g.graph), remat=False, once=once) for c, g in bounded.classes.graphs().items()
    }
    return [(of_class[c].seconds if once else of_class[c].passes)[NONE] for c in bounded.classes.of_layer]


def optimum(model: str, cluster: str, n: int, first: int, last: int) -> float:
    """Seconds of the best plan of consecutive layers in one stage, without a memory limit."""
    return whole_stage(model, cluster, n, first, last).fastest.objective


def whole_stage(model: str, cluster: str, n: int, first: int, last: int) -> StageProblem:
    """Consecutive layers in one stage on a submesh."""
    of = search(model, cluster)
    parts, count = of.split_into(COUNT), len(of.layers.layers)
    stages = divide(parts, of.layers, sorted({first, last} - {0, count}))
    graph = stage_graph(stages, int(first > 0), of.avals, StepPrograms(parts))
    return StageProblem(graph, of.meshes[n], rules_of(graph.graph), of.options)


@pytest.mark.parametrize(
    ("model", "cluster"),
    sample(
        [*((model, "hosts with little bandwidth") for model in MODELS), ("moe-toy", "one host")],
        [("mlp-toy", "hosts with little bandwidth"), ("moe-toy", "one host")],
    ),
)
def test_layers_take_no_less_in_a_stage_than_their_bounds(model: str, cluster: str) -> None:
    count = len(search(model, cluster).layers.layers)
    runs = {(0, count), (0, 2), (1, 3), (count - 2, count), (0, 1), (count - 1, count)}
    for n in {0, len(search(model, cluster).meshes) - 1}:
        of_layers = bounds(model, cluster, n)
        for first, last in sorted(runs):
            assert sum(of_layers[first:last]) <= optimum(model, cluster, n, first, last) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("model", "cluster"),
    sample(
        [(model, cluster) for model in ("mlp-toy", "gpt-toy", "moe-toy", "t5-toy") for cluster in CLUSTERS],
        [("gpt-toy", "one host"), ("moe-toy", "hosts with little bandwidth")],
    ),
)
def test_rematerialised_layers_take_no_less_in_a_stage_than_their_bounds(model: str, cluster: str) -> None:
    """Stages of the rewritten program, and bounds on layers of the program as written."""
    of, bounded = search(model, cluster), layers(model, cluster)
    frees = recomputable(of.graph)
    rewritten = rewrite(of.graph, [FULL if free else NONE for free in frees])
    parts, its_layers = split(rewritten, COUNT, batch_leaves(rewritten, COUNT)), layers_pass.find(rewritten)
    count = len(of.layers.layers)
    assert len(its_layers.layers) == count
    for mesh in of.meshes.values():
        of_class = {c: bound_on(g, mesh, rules_of(g.graph)).seconds for c, g in bounded.classes.graphs().items()}
        of_layer = [
            of_class[c][FULL if free else NONE] for c, free in zip(bounded.classes.of_layer, frees, strict=True)
        ]
        for first, last in {(0, 2), (1, 2), (1, min(3, count - 1))}:
            stages = divide(parts, its_layers, sorted({first, last} - {0, count}))
            graph = stage_graph(stages, int(first > 0), of.avals, StepPrograms(parts))
            optimum = StageProblem(graph, mesh, rules_of(graph.graph), of.options).fastest.objective
            assert 0.3 * optimum < sum(of_layer[first:last]) <= optimum * (1 + 1e-9)


@settings(max_examples=examples(12), derandomize=True)
@given(st.data())
def test_layers_take_no_more_and_pay_no_more_for_bytes_than_their_stage(data: st.DataObject) -> None:
    """In its passes, and at any price of a byte, whatever plan the stage has."""
    model = data.draw(st.sampled_from([*MODELS]))
    cluster = data.draw(st.sampled_from([*CLUSTERS]))
    of, bounded = search(model, cluster), layers(model, cluster)
    count, n = len(of.layers.layers), data.draw(st.sampled_from(sorted(of.meshes)))
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    stage = whole_stage(model, cluster, n, first, last)
    fastest, scale = stage.fastest, stage.fastest.objective / stage.liveness.memory(stage.fastest.assignment).peak(1)
    rate = scale * 10 ** data.draw(st.floats(-3.0, 2.0))
    row = stage.liveness.penalised_row(fastest.assignment, 1.0)
    smaller = optimize(penalised(stage.model.problem, row, rate), gap=0.0)
    graphs = bounded.classes.graphs({*bounded.classes.of_layer[first:last]})
    price = [ByteRates(rate, rate, rate)]
    priced = {
        c: priced_on(g, of.meshes[n], rules_of(g.graph), bounded.classes.owned(c), price)[0] for c, g in graphs.items()
    }
    passes = sum(bounds(model, cluster, n, once=False)[first:last])
    for plan in (fastest, smaller):
        times = stage_times(stage.plan(plan))
        assert passes <= COUNT * (times.forward + times.backward + times.weight) * (1 + 1e-9)
        memory = stage.liveness.memory(plan.assignment)
        seconds = stage.model.problem.value(plan.assignment)
        paid = seconds + rate * (memory.state + memory.sums + memory.copies)
        assert sum(priced[c] for c in bounded.classes.of_layer[first:last]) <= paid * (1 + 1e-9)


@pytest.mark.parametrize(
    ("model", "cluster"),
    sample(
        [*(("gpt-toy", cluster) for cluster in CLUSTERS), ("moe-toy", "hosts with little bandwidth")],
        [("gpt-toy", "hosts with latency"), ("gpt-toy", "hosts with little bandwidth")],
    ),
)
def test_more_devices_and_more_microbatches_take_no_less(model: str, cluster: str) -> None:
    """Device-seconds on multiples of a number of devices, and seconds per step for multiples of microbatches."""
    size = {n: mesh.size for n, mesh in search(model, cluster).meshes.items()}
    for a, b in itertools.permutations(size, 2):
        if size[b] % size[a] == 0:
            few, many = bounds(model, cluster, a), bounds(model, cluster, b)
            assert all(s * size[a] <= t * size[b] * (1 + 0.01) for s, t in zip(few, many, strict=True))
    for n in (0, len(size) - 1):
        two, four = bounds(model, cluster, n), bounds(model, cluster, n, 4)
        assert all(s <= t * (1 + 0.01) for s, t in zip(two, four, strict=True))


def random_question(data: st.DataObject) -> Question:
    """A problem whose stages have random costs, in half of the cases only in their passes."""
    layers, devices = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    where = tuple(placements([(1, devices)]))
    shape = 2, layers + 1, layers + 1
    random, often = np.random.default_rng(data.draw(st.integers(0, 2**20))), float(data.draw(st.booleans()))
    prices = list[RunCosts]()
    for _ in range(devices):
        seconds, once = random.integers(1, 9, shape).astype(float), often * random.integers(0, 5, shape)
        prices.append(RunCosts(seconds, once, random.integers(0, 9, shape) + 0.0, random.integers(0, 4, shape) + 0.0))
    microbatches, stages = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([None, 1, 2]))
    memory = [float(data.draw(st.integers(4, 20)))] * devices
    return Question(layers, devices, where, prices, memory, microbatches, lambda s: s, None, stages)


@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_the_least_step_is_that_of_brute_force(data: st.DataObject, splits: bool) -> None:
    question = random_question(data)
    best = math.inf
    for parts in divisions(question):
        step, behind = 0.0 if question.stages in (None, len(parts)) else math.inf, 0.0
        for number, part in reversed([*enumerate(parts)]):
            prices = question.prices[part.placement.submesh]
            at = part.option, part.first, part.last
            fits = prices.peaks(len(parts) - number)[at] <= question.memory[part.placement.submesh]
            path = 0.0 if splits else prices.seconds[at]
            behind = max(question.microbatches * prices.seconds[at], path + behind if number + 1 < len(parts) else 0.0)
            busy = question.microbatches * prices.times(question.microbatches)[at]
            step = max(step, busy, behind) if fits else math.inf
        best = min(best, step)
    least = least_step(question, splits=splits)
    once = any(np.any(prices.once) for prices in question.prices)
    assert least.seconds <= best * (1 + 1e-9) if once else least.seconds == pytest.approx(best)
    if best < math.inf:
        assert [stage.first for stage in least.stages] == [0, *(stage.last for stage in least.stages[:-1])]
        assert least.stages[-1].last == question.layers


@pytest.mark.parametrize(
    ("cluster", "share"),
    sample(
        itertools.product(CLUSTERS, (None, 0.6, 0.35)),
        [("hosts with latency", None), ("hosts with latency", 0.35), ("hosts with little bandwidth", 0.6)],
    ),
)
def test_no_pipeline_is_faster_than_the_bound(cluster: str, share: float | None) -> None:
    of = search("gpt-toy", cluster)
    space = SearchSpace(of.batch, (2, 4, 8))
    best = of.best(space)
    assert best is not None
    if share is not None:
        space = replace(space, memory=share * max(best.peaks))
        best = of.best(space)
    bound = PipelineBound(of, space).least()
    assert bound > 0
    assert best is None or bound <= best.seconds


@pytest.mark.parametrize("model", sample(["mlp-toy", "moe-toy"], ["mlp-toy"]))
def test_layers_that_are_not_bounded_would_not_raise_the_bound(model: str) -> None:
    of = search(model, "hosts with little bandwidth")
    bound = PipelineBound(of, SearchSpace(of.batch, (2, 4, 8)))
    least, left_out = bound.least(), 0
    for count in {m for m, _, _ in bound.bounded} - {2}:
        graphs = layers(model, "hosts with little bandwidth", count).classes.graphs()
        large = {c for m, _, c in bound.bounded if m == count}
        for n, c in itertools.product(of.meshes, sorted(large)):
            if (count, n, c) not in bound.bounded:
                left_out += 1
                bound.bounded[count, n, c] = bound_on(graphs[c], of.meshes[n], rules_of(graphs[c].graph))
    assert left_out
    assert min(bound.step(count).seconds for count in (2, 4, 8)) == pytest.approx(least)


def step_bound(cluster: str, policy: str, memory: float | None = None) -> float:
    """Of pipelines whose layers all have one rematerialisation policy, and whose stages fit into so many bytes."""
    of = search("gpt-toy", cluster)
    return PipelineBound(of, SearchSpace(of.batch, (2, 4), policies=(policy,), memory=memory)).least()


@settings(max_examples=examples(8), derandomize=True)
@given(st.data())
def test_no_planned_pipeline_is_faster_than_the_bound(data: st.DataObject) -> None:
    """Any division, number of microbatches, schedule and rematerialisation, every stage planned as a whole."""
    cluster = data.draw(st.sampled_from([*CLUSTERS]))
    of, step = search("gpt-toy", cluster), traced("gpt-toy", **MODELS["gpt-toy"])
    count, devices = len(of.layers.layers), of.cluster.num_devices
    stages = data.draw(st.integers(1, min(count, devices)))

    def cuts(total: int) -> list[int]:
        return sorted(data.draw(st.permutations(range(1, total)))[: stages - 1])

    borders, ends = cuts(count), [0, *cuts(devices), devices]
    policy = data.draw(st.sampled_from([NONE, FULL]))
    policies = [policy if frees else NONE for frees in recomputable(of.graph)]
    choice = pipelines.StageChoice(
        tuple(borders),
        tuple(b - a for a, b in itertools.pairwise(ends)),
        data.draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"])),
        data.draw(st.sampled_from([2, 4])),
        of.batch,
        remat=() if policy == NONE else tuple(policies),
    )
    (target,) = meshes.targets((devices,), of.cluster, local=False)
    pipeline = pipelines.assemble(step.graph, choice, target)
    layouts = pipelines.plan_layouts(replace(step, graph=pipeline.layers.graph), pipeline, of.options)
    plan = make_plan(step.graph, pipeline, layouts, target, (), 0.0)
    assert plan.step_time_s >= step_bound(cluster, policy, float(plan.peak_memory_bytes))


@pytest.mark.parametrize("model", sample(["gpt-toy", "t5-toy"], ["gpt-toy"]))
def test_one_stage_takes_no_less_under_a_policy_than_the_bounds_on_its_layers(model: str) -> None:
    """Neither seconds, at its fastest, nor bytes, with the least memory."""
    of, count = search(model, "one host"), 2
    space = SearchSpace(of.batch, (count,), stages=1, memory=1e5)
    bound = PipelineBound(of, space, effort=replace(PIPELINE_BOUND, large=0.0))
    bound.least()
    built = zoo.build(model, **MODELS[model])
    n = next(n for n, mesh in of.meshes.items() if mesh.size == of.cluster.num_devices)
    options: dict[str, Any] = {"mesh": of.meshes[n].sizes, "num_microbatches": count, "batch_argnums": 1}

    def planned(policy: str, budget: str | None) -> Plan:
        options.update(remat=policy, memory_budget=budget)
        return api.plan(built.step, *built.abstract_args(), cluster=of.cluster, **options)

    of_layers = bound.one_stage(count, bound.layer_bounds(count)[n], n)
    for policy, seconds, nbytes in zip(POLICIES, of_layers.seconds, of_layers.residuals, strict=True):
        fastest, smallest = planned(policy, None), planned(policy, "min")
        assert 0.9 * fastest.step_time_s <= seconds.sum() <= fastest.step_time_s
        bound_on_bytes = nbytes.sum() + of_layers.state + of_layers.sums
        assert 0.5 * smallest.peak_memory_bytes <= bound_on_bytes <= smallest.peak_memory_bytes


@settings(max_examples=100, derandomize=True)
@given(st.data())
def test_one_stage_within_memory_takes_no_more_than_brute_force(data: st.DataObject) -> None:
    """Any policies of up to four layers, and as much state offloaded as does not fit."""
    numbers = st.integers(0, 512).map(lambda n: n / 64)  # shares of whole bytes
    layers = data.draw(st.integers(1, 4))
    table = st.lists(st.lists(numbers, min_size=layers, max_size=layers), min_size=3, max_size=3)
    seconds, residuals = np.array(data.draw(table)), np.array(data.draw(table))
    state, sums = data.draw(numbers), data.draw(numbers)
    bandwidth = data.draw(st.sampled_from([0.0, 0.5, 4.0]))
    smallest = residuals.min(0).sum() + sums + (0.0 if bandwidth else state)
    largest = residuals.max(0).sum() + sums + state
    memory = smallest + data.draw(st.integers(-1, 9)) / 8 * (largest - smallest)
    best = math.inf
    for policies in itertools.product(range(3), repeat=layers):
        chosen = [*policies], [*range(layers)]
        excess = max(residuals[chosen].sum() + state + sums - memory, 0.0)
        if excess <= (state if bandwidth else 0.0):
            best = min(best, seconds[chosen].sum() + (2 * excess / bandwidth if bandwidth else 0.0))
    least = OneStage(seconds, residuals, state, sums).within(memory, bandwidth)
    assert least <= best * (1 + 1e-9) + 1e-9
    if memory >= largest:
        assert least == pytest.approx(seconds.min(0).sum())


@pytest.mark.parametrize(
    ("cluster", "share", "shape"),
    sample(
        itertools.product(CLUSTERS, (1.0, 0.7, 0.45), meshes.factorisations(4)), [("hosts with latency", 0.45, (2, 2))]
    ),
)
def test_no_plan_on_one_mesh_takes_less_than_the_bound_on_one_stage(
    cluster: str, share: float, shape: tuple[int, ...]
) -> None:
    """Within less memory, with the layers priced at every rate."""
    of, count = search("gpt-toy", cluster), 4
    model = zoo.build("gpt-toy", **MODELS["gpt-toy"])
    options: dict[str, Any] = {"mesh": shape, "num_microbatches": count, "batch_argnums": 1}

    def planned(budget: int | None) -> Plan:
        return api.plan(model.step, *model.abstract_args(), cluster=of.cluster, memory_budget=budget, **options)

    plan = planned(int(share * planned(None).peak_memory_bytes))
    space = SearchSpace(of.batch, (count,), stages=1, memory=float(plan.peak_memory_bytes))
    bound = PipelineBound(of, space, effort=replace(PIPELINE_BOUND, large=0.0))
    assert 0 < bound.least() <= plan.step_time_s
    assert bound.priced
