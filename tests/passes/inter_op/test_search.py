"""Prices of layers, and the search for a pipeline that they serve."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.pipeline import Prices, simulate
from autopar.errors import MicrobatchError
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.trace import Traced, trace
from autopar.passes.inter_op.effort import INTER_OP
from autopar.passes.inter_op.layer_bounds import bounded_layers
from autopar.passes.inter_op.layer_costs import (
    Border,
    LayerClasses,
    LayerCosts,
    border_bytes,
    layer_classes,
    run_costs,
    run_options,
)
from autopar.passes.inter_op.search import (
    InterOpSearch,
    SearchSpace,
    microbatch_counts,
    splittable_counts,
)
from autopar.passes.inter_op.simulate import FoundPipeline, least_seconds, simulated_seconds
from autopar.passes.inter_op.stage_options import StageOption, StageOptions
from autopar.passes.inter_op.submeshes import shape_of
from autopar.passes.layers import find as layers_pass
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.microbatch.split import split
from autopar.passes.remat.options import Options
from autopar.passes.remat.rewrite import FULL, NONE, recomputable, rewrite
from autopar.passes.solver.optimize import optimize
from autopar.passes.stages.divide import divide
from autopar.passes.stages.graph import stage_graph
from autopar.passes.stages.plan import StageProblem
from autopar.rules import rules_of
from autopar.schedules import SCHEDULES, Size, make
from tests.passes.microbatch import batch_programs as programs
from tests.support.effort import examples, sample
from tests.support.traces import traced


def kinds(step: Traced, count: int) -> LayerClasses:
    parts = split(step.graph, count, batch_leaves(step.graph, count))
    return layer_classes(parts, layers_pass.find(step.graph), step.in_avals)


def cluster(devices: int = 4, memory: float = 1e9) -> Cluster:
    """Devices slow enough that a toy keeps them busy, on one host."""
    return replace(
        Cluster.custom((devices,), 1e-6, 1e-9, {"float32": 1e9}, 1e10, int(memory)), intra=Cluster.local().intra
    )


@pytest.mark.parametrize("name", sample(["gpt-toy", "moe-toy", "unet-toy", "llama3-toy"], ["gpt-toy", "moe-toy"]))
def test_another_number_of_microbatches_is_as_if_the_step_had_been_cut_for_it(name: str) -> None:
    step = traced(name)
    again, anew = kinds(step, 4).at(2), kinds(step, 2)
    assert again is not None
    assert again.microbatches == 2
    for kind, graph in again.graphs().items():
        assert graph_hash(graph.graph) == graph_hash(anew.graphs()[kind].graph)


def test_loops_take_another_analysis() -> None:
    assert kinds(traced("gpt-toy-scan"), 4).at(2) is None


def test_layers_that_read_totals_of_a_first_loop_are_priced() -> None:
    program = programs.EXACT["balanced experts in every layer"]
    step = trace(program, *programs.arguments("balanced experts in every layer", program))
    batch = [i for i, path in enumerate(step.graph.input_paths) if path.startswith("b/")]
    classes = layer_classes(split(step.graph, 4, batch), layers_pass.find(step.graph), step.in_avals)
    assert classes.stages.first_loop is not None
    assert len(classes.stages.split.graph.inputs) > len(step.in_avals)
    assert classes.graphs().keys() == {*classes.of_layer}
    bounded = bounded_layers(split(step.graph, 4, batch), layers_pass.find(step.graph), step.in_avals)
    assert bounded.classes.graphs().keys() == {*bounded.classes.of_layer}


def test_layers_of_one_kind_are_cut_out_once() -> None:
    classes = kinds(traced("gpt-toy", layers=5), 2)
    assert len(classes.of_layer) == 7
    assert len(classes.stage) == 3


@pytest.fixture(scope="module")
def pricing() -> LayerCosts:
    return LayerCosts(kinds(traced("gpt-toy", layers=4), 2), Options())


def test_the_first_way_is_the_optimum_and_each_other_one_trades_time_for_bytes(pricing: LayerCosts) -> None:
    mesh = cluster().logical_mesh((2, 2))
    for kind, options in pricing.on(mesh).by_kind.items():
        ordered = options.all
        stage = StageProblem(pricing.graphs[kind], mesh, pricing.rules[kind], Options())
        best = optimize(stage.model.problem)
        assert ordered[0].share == 0
        # local slices, which the optimizer prices at next to nothing, are left out of the seconds of programs
        assert ordered[0].times.seconds(2) == pytest.approx(best.objective, rel=2e-3)
        assert ordered[0].memory.state + ordered[0].memory.stash <= stage.liveness.rows(1).peak(best.assignment)[0] * 2
        for cheap, small in itertools.pairwise(ordered):
            assert cheap.times.seconds(2) <= small.times.seconds(2)


def test_recomputing_repeats_what_the_backward_pass_needs_and_keeps_what_enters(pricing: LayerCosts) -> None:
    middle = pricing.on(cluster().logical_mesh((4,))).by_kind[1].cheapest
    again = middle.recomputed()
    # the last product is part of the layer's result, which its backward pass does not need
    assert 0.5 * middle.times.forward < middle.times.recomputation < 0.9 * middle.times.forward
    assert again.times.backward == middle.times.backward + middle.times.recomputation
    assert again.memory.stash == middle.entering > 0
    assert again.memory.stash + again.memory.temporaries == pytest.approx(
        middle.memory.stash + middle.memory.temporaries
    )


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)])
def test_a_rematerialised_layer_takes_what_its_stage_takes(pricing: LayerCosts, shape: tuple[int, ...]) -> None:
    """The rewritten program, divided at the same layers."""
    mesh, step = cluster(math.prod(shape)).logical_mesh(shape), traced("gpt-toy", layers=4)
    policies = [FULL if free else NONE for free in recomputable(step.graph)]
    rewritten = rewrite(step.graph, policies)
    stages = divide(split(rewritten, 2), layers_pass.find(rewritten), [2, 3])
    graph = stage_graph(stages, 1, step.in_avals)
    times = StageOptions(graph, mesh, rules_of(graph.graph), Options(), ()).cheapest.times
    forecast = pricing.on(mesh).by_kind[pricing.kinds.of_layer[2]].cheapest.recomputed().times
    assert forecast.seconds(2) == pytest.approx(times.seconds(2), rel=0.03)


def test_a_run_of_layers_costs_what_its_layers_cost(pricing: LayerCosts) -> None:
    on = pricing.on(cluster().logical_mesh((4,)))
    priced = on.whole()
    of_layer = pricing.kinds.of_layer
    costs = run_costs({kind: priced.options(kind) for kind in of_layer}, of_layer, (NONE, FULL))
    for option, (policy, number) in enumerate(run_options((NONE, FULL))):
        options = [priced.option(kind, number, policy) for kind in of_layer]
        passes = [t.times.forward + t.times.backward + t.times.weight for t in options]
        assert costs.seconds[option, 1, 4] == pytest.approx(sum(passes[1:4]))
        assert costs.stash[option, 0, 6] == pytest.approx(sum(t.memory.stash for t in options))
        most = max(t.memory.temporaries for t in options[2:4]) + max(t.memory.batch for t in options[2:4])
        fixed = sum(t.memory.state + t.memory.sums + t.memory.copies for t in options[2:4])
        assert costs.fixed[option, 2, 4] == pytest.approx(most + fixed)


def test_no_way_to_run_a_layer_holds_less_than_is_hoped_for(searcher: InterOpSearch) -> None:
    """Whatever is in flight, with and without recomputation."""
    for priced in searcher.priced(4, searcher.meshes).values():
        for options in priced.by_kind.values():
            assert options.up_to(0)[0] == options.cheapest
            assert options.up_to(0)[-1].times == options.cheapest.times
            for least in (options.up_to(penalties)[-1] for penalties in range(len(options.open))):
                for option in (options.cheapest, *options.all):
                    for option_memory, bound in ((option, least), (option.recomputed(), least.recomputed())):
                        assert all(bound.memory.peak(n) <= option_memory.memory.peak(n) * (1 + 1e-9) for n in (1, 2, 5))


def test_the_border_is_the_residual_stream() -> None:
    step = traced("gpt-toy", layers=3)
    layers, stream = layers_pass.find(step.graph), 8 * 16 * 32 * 4.0  # batch, sequence, width, bytes
    assert set(border_bytes(split(step.graph, 2), layers)) == {Border(stream, stream)}


def test_what_readers_make_anew_is_not_handed_over() -> None:
    """Layers share a mask [batch, sequence, width] made of lengths [batch]: only its cotangents would cross."""
    layers, batch, length, width = 3, 8, 4, 16

    def loss(params: Any, x: Any, lengths: Any) -> Any:
        mask = (jnp.arange(length) < lengths[:, None]).astype(x.dtype)[:, :, None] * jnp.ones(width)
        for w in params:
            x = jnp.tanh(x @ w) * mask
        return (x**2).sum()

    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, *batch))

    shapes = [(width, width)] * layers, ((batch, length, width), (batch,))
    params, (x, lengths) = ([jax.ShapeDtypeStruct(shape, "float32") for shape in group] for group in shapes)
    graph = trace(step, params, (x, jax.ShapeDtypeStruct(lengths.shape, "int32"))).graph
    cut, stream = layers_pass.find(graph), 4.0 * batch * length * width
    forward = {border.forward for border in border_bytes(split(graph, 2), cut)}
    assert forward == {stream}
    assert {border.backward for border in border_bytes(split(graph, 2), cut)} >= {2 * stream}


@pytest.mark.parametrize(
    ("devices", "per_host", "shape"),
    [
        *((1, 8, (1,)), (2, 8, (2,)), (3, 8, (3,)), (4, 8, (2, 2)), (6, 8, (2, 3)), (7, 8, (7,)), (8, 8, (2, 4))),
        *((9, 9, (3, 3)), (16, 8, (2, 8)), (64, 8, (8, 8)), (4, 2, (2, 2))),
    ],
)
def test_submeshes_have_the_axes_that_hold_most_layouts(devices: int, per_host: int, shape: tuple[int, ...]) -> None:
    assert shape_of(devices, per_host) == shape
    assert math.prod(shape) == devices


# The search


@pytest.fixture(scope="module")
def searcher() -> InterOpSearch:
    step = traced("gpt-toy", layers=4)
    search = InterOpSearch(step.graph, step.in_avals, cluster(), batch_leaves(step.graph, 1), Options())
    assert search.priced(2, search.meshes).keys() == search.priced(4, search.meshes).keys() == {0, 1, 2, 3}
    return search


def opened(searcher: InterOpSearch, **chosen: Any) -> SearchSpace:
    chosen.setdefault("counts", (2, 4))
    return SearchSpace(searcher.batch, **chosen)


def assert_whole(pipeline: FoundPipeline, layer_count: int, devices: int) -> None:
    assert [s.first for s in pipeline.stages] == [0, *(s.last for s in pipeline.stages[:-1])]
    assert pipeline.stages[-1].last == layer_count
    assert [s.start for s in pipeline.stages] == [
        sum(s.devices for s in pipeline.stages[:i]) for i in range(len(pipeline.stages))
    ]
    assert sum(s.devices for s in pipeline.stages) == devices
    simulated = simulate(make(pipeline.schedule, Size(len(pipeline.stages), pipeline.microbatches)), pipeline.prices)
    assert simulated.seconds == pipeline.seconds


def ways_of(searcher: InterOpSearch, count: int) -> list[dict[int, tuple[StageOption, ...]]]:
    return [{kind: t.all for kind, t in p.by_kind.items()} for p in searcher.priced(count, searcher.meshes).values()]


def test_a_step_that_is_split_already_is_priced_the_same(searcher: InterOpSearch) -> None:
    parts = {4: split(searcher.graph, 4, searcher.batch)}
    again = InterOpSearch(searcher.graph, searcher.avals, searcher.cluster, searcher.batch, Options(), parts=parts)
    for count in (2, 4):
        assert ways_of(again, count) == ways_of(searcher, count)


def test_the_search_uses_all_layers_and_devices_and_what_it_played(searcher: InterOpSearch) -> None:
    pipeline = searcher.best(opened(searcher))
    assert pipeline is not None
    assert_whole(pipeline, 6, 4)
    assert pipeline.remat == (NONE,) * 6


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_number_of_stages_can_be_asked_for(searcher: InterOpSearch, stages: int) -> None:
    pipeline = searcher.best(opened(searcher, stages=stages))
    assert pipeline is not None
    assert len(pipeline.stages) == stages
    assert_whole(pipeline, 6, 4)


def test_no_choice_is_better_than_the_one_that_is_free(searcher: InterOpSearch) -> None:
    free = searcher.best(opened(searcher))
    assert free is not None
    for stages in (1, 2, 3, 4):
        for number in (2, 4):
            fixed = searcher.best(opened(searcher, stages=stages, counts=(number,)))
            assert fixed is None or fixed.seconds >= free.seconds * (1 - 2 * INTER_OP.near)


def test_memory_forces_recomputation_and_then_nothing_fits(searcher: InterOpSearch) -> None:
    fixed: dict[str, Any] = {"stages": 2, "counts": (4,)}
    free = searcher.best(opened(searcher, **fixed))
    assert free is not None
    budgets = [max(free.peaks) * share for share in np.linspace(0.9, 0.05, 18)]
    plain = [searcher.best(opened(searcher, **fixed, policies=(NONE,), memory=budget)) for budget in budgets]
    both = [searcher.best(opened(searcher, **fixed, memory=budget)) for budget in budgets]
    forced = [
        pipeline for pipeline, without in zip(both, plain, strict=True) if pipeline is not None and without is None
    ]
    assert forced
    assert all(FULL in pipeline.remat and pipeline.seconds > free.seconds for pipeline in forced)
    assert both[-1] is None
    for pipeline, budget in zip(both, budgets, strict=True):
        assert pipeline is None or max(pipeline.peaks) <= budget


def test_no_memory_is_left_free_where_nothing_else_fits(searcher: InterOpSearch) -> None:
    fixed: dict[str, Any] = {"stages": 2, "counts": (4,)}
    free = searcher.best(opened(searcher, **fixed, reserve=0.0))
    assert free is not None
    budgets = [max(free.peaks) * share for share in np.linspace(1.0, 0.05, 40)]
    exact = [searcher.best(opened(searcher, **fixed, reserve=0.0, memory=budget)) for budget in budgets]
    pipelines = [searcher.best(opened(searcher, **fixed, memory=budget)) for budget in budgets]
    assert [pipeline is None for pipeline in pipelines] == [pipeline is None for pipeline in exact]
    least = exact.index(None) - 1
    assert searcher.best(opened(searcher, **fixed, reserve=0.0, memory=budgets[least] * (1 - INTER_OP.reserve))) is None
    assert pipelines[least] == exact[least]


def fresh(searcher: InterOpSearch) -> InterOpSearch:
    """The same without prices."""
    return InterOpSearch(searcher.graph, searcher.avals, searcher.cluster, searcher.batch, Options())


def test_state_that_all_devices_cannot_hold_is_seen_before_anything_is_priced(searcher: InterOpSearch) -> None:
    """The bound is on every option to run a layer, and nothing is priced where it says no."""
    least = searcher.kinds.least_bytes()
    for n, priced in searcher.priced(4, searcher.meshes).items():
        for kind, options in priced.by_kind.items():
            held = min(t.memory.state + t.memory.sums for t in options.all)
            assert 0 < least[kind] <= searcher.meshes[n].size * held * (1 + 1e-9)
    total = sum(least[kind] for kind in searcher.kinds.of_layer)
    again = InterOpSearch(searcher.graph, searcher.avals, searcher.cluster, searcher.batch, Options())
    assert again.best(opened(again, memory=0.9 * total / 4)) is None
    assert not again.submesh_costs


@pytest.mark.parametrize(("name", "less"), [("1f1b", 2e-3), ("eager-1f1b", 0.025), ("gpipe", 2e-3)])
def test_a_schedule_repeats_itself_after_a_while(name: str, less: float) -> None:
    """What eager 1F1B has in flight beyond need hides a slow stage at first: up to two passes of each stage."""
    rng = np.random.default_rng(3)
    links = {pair: 0.2 for s in range(3) for pair in ((s, s + 1), (s + 1, s))}
    for _ in range(examples(20)):
        forward, backward = (tuple(rng.uniform(1, 3, 4)) for _ in range(2))
        prices = Prices(forward, backward, update=(1.0,) * 4, transfer=links)
        for count in (8, 64, 65, 300):
            exact = simulate(make(name, Size(4, count)), prices).seconds
            assert (1 - less) * exact <= simulated_seconds(name, Size(4, count), prices) <= (1 + 2e-3) * exact


@given(st.integers(1, 4), st.integers(1, 12), st.sampled_from(("1f1b", "eager-1f1b", "gpipe", "zb-h1")), st.data())
def test_no_schedule_takes_less_than_its_bound(stages: int, count: int, name: str, data: st.DataObject) -> None:
    seconds = st.tuples(*[st.floats(0.1, 3)] * stages)
    links = {pair: data.draw(st.floats(0, 3)) for s in range(stages - 1) for pair in ((s, s + 1), (s + 1, s))}
    prices = Prices(data.draw(seconds), data.draw(seconds), update=data.draw(seconds), transfer=links)
    held = [SCHEDULES[name].stash(Size(stages, count), s) for s in range(stages)]
    assert least_seconds(prices, count, held) <= simulate(make(name, Size(stages, count)), prices).seconds * (1 + 1e-9)


def test_the_bound_is_what_1f1b_takes_where_it_waits_for_transfers() -> None:
    links = {pair: 2.0 for s in range(3) for pair in ((s, s + 1), (s + 1, s))}
    prices = Prices((1.0,) * 4, (2.0,) * 4, transfer=links)
    exact = simulate(make("1f1b", Size(4, 64)), prices).seconds
    assert 0.95 * exact <= least_seconds(prices, 64, (4, 3, 2, 1)) <= exact
    assert least_seconds(prices, 64, (64,) * 4) < 0.9 * exact


@pytest.mark.parametrize("beta", [1e-9, 1e-7])
def test_layers_take_no_less_of_all_devices_on_more_hosts(beta: float) -> None:
    """What lets submeshes be left out before anything is priced there."""
    step = traced("gpt-toy", layers=2)
    many = replace(Cluster.custom((4,), 1e-6, beta, {"float32": 1e9}, 1e10, 10**9), hosts=4, devices_per_host=1)
    searcher = InterOpSearch(step.graph, step.in_avals, many, batch_leaves(step.graph, 1), Options())
    priced = searcher.priced(4, searcher.meshes)
    sizes = {n: searcher.meshes[n].size for n in priced}
    for kind in searcher.kinds.stage:
        used = {n: sizes[n] * min(t.times.seconds(4) for t in priced[n].by_kind[kind].all) for n in priced}
        assert all(used[a] <= used[b] for a, b in itertools.combinations(priced, 2) if sizes[b] % sizes[a] == 0)
    real = {n: {kind: options.all for kind, options in costs.by_kind.items()} for n, costs in priced.items()}
    partly = {
        n: {kind: options for kind, options in real[n].items() if kind == searcher.kinds.of_layer[1]} for n in real
    }
    for costed in ((0,), (0, 1), (0, 1, 3)):
        for first in ({n: real[n] for n in costed}, {**{n: real[n] for n in costed[:-1]}, 0: real[0], 3: partly[3]}):
            for n, least in searcher.lower_bounds_of(first).items():
                bound, exact = (
                    run_costs(w, searcher.kinds.of_layer, (NONE,)).times(4).min(0) for w in (least, real[n])
                )
                assert np.all(np.triu(bound, 1) <= np.triu(exact, 1) * (1 + 1e-9))


def test_trying_every_number_of_microbatches_finds_little_more(searcher: InterOpSearch) -> None:
    best = searcher.best(opened(searcher, counts=(1, 2, 4, 8)))
    alone = [searcher.best(opened(searcher, counts=(number,))) for number in (1, 2, 4, 8)]
    assert best is not None
    assert best.seconds <= (1 + INTER_OP.near) * min(pipeline.seconds for pipeline in alone if pipeline is not None)


@pytest.mark.parametrize(
    ("model", "batch", "share"),
    sample(
        [*itertools.product(["gpt-toy"], [32], [1.0, 0.25, 0.1]), ("mlp-toy", 16384, 0.25)], [("mlp-toy", 16384, 0.25)]
    ),
)
def test_numbers_from_where_the_step_fits_on_lead_to_the_best(model: str, batch: int, share: float) -> None:
    """Down where memory is ample, up where only small microbatches fit."""
    step = traced(model, layers=2, batch=batch)
    counts = (1, 2, 4, 8, 16, 32)
    searcher = InterOpSearch(step.graph, step.in_avals, cluster(), batch_leaves(step.graph, 1), Options())
    ample = [searcher.best(opened(searcher, counts=(count,))) for count in counts]
    memory = share * max(max(pipeline.peaks) for pipeline in ample if pipeline is not None)
    alone = [searcher.best(opened(searcher, counts=(count,), memory=memory)) for count in counts]
    best = searcher.best(opened(searcher, counts=counts, memory=memory))
    assert best is not None
    assert best.seconds <= (1 + INTER_OP.near) * min(pipeline.seconds for pipeline in alone if pipeline is not None)


def test_only_pipelines_below_a_limit_are_found(searcher: InterOpSearch) -> None:
    pipeline = searcher.best(opened(searcher, counts=(4,)))
    assert pipeline is not None
    assert searcher.best(opened(searcher, counts=(4,), limit=0.9 * pipeline.formula)) is None
    again = searcher.best(opened(searcher, counts=(4,), limit=1.1 * pipeline.formula))
    assert again is not None
    assert (again.stages, again.seconds) == (pipeline.stages, pipeline.seconds)


def test_a_slow_network_between_hosts_makes_stages() -> None:
    """Two hosts of two devices: gradients of all parameters are dear between them, activations are not."""
    step = traced("gpt-toy", layers=2)
    two = Cluster.custom((2, 2), (1e-6, 1e-6), (1e-7, 1e-12), {"float32": 1e9}, 1e10, 10**9)
    apart = replace(two, hosts=2, devices_per_host=2)
    batch = batch_leaves(step.graph, 1)
    pipeline = InterOpSearch(step.graph, step.in_avals, apart, batch, Options()).best(SearchSpace(batch, (4,)))
    assert pipeline is not None
    assert len(pipeline.stages) >= 2
    assert all(s.start // 2 == (s.start + s.devices - 1) // 2 for s in pipeline.stages)


@pytest.mark.parametrize(
    ("extent", "wanted"),
    [
        (1, (1,)),
        (8, (1, 2, 4, 8)),
        (12, (1, 2, 4, 12)),
        (1024, (8, 16, 32, 64, 128, 256, 512, 1024)),
        (1536, (12, 16, 32, 64, 128, 256, 512, 1536)),
        (1520, (16, 38, 76, 152, 304, 760, 1520)),
    ],
)
def test_numbers_of_microbatches_are_divisors_an_octave_apart(extent: int, wanted: tuple[int, ...]) -> None:
    assert microbatch_counts(extent) == wanted
    assert all(extent % m == 0 for m in wanted)


def test_experts_that_choose_among_several_examples_take_fewer_microbatches() -> None:
    """Two examples form a group: microbatches of one example cannot be had, of two they can."""
    graph, batch = grouped(8)
    assert splittable_counts(graph, (1, 2, 4, 8), batch) == (1, 2, 4)
    with pytest.raises(MicrobatchError):
        splittable_counts(graph, (8,), batch)


def grouped(examples: int) -> tuple[Graph, tuple[int, ...]]:
    def loss(w: Any, x: Any) -> Any:
        return (jnp.tanh(x.reshape(examples // 2, -1)) @ w @ w).mean()

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(loss)(w, x)

    types = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((examples, 4), jnp.float32)
    return trace(step, *types).graph, (1,)
