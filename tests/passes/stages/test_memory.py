"""Memory of stages: rows agree with the bytes of a plan, and plans within a limit with an independent solver."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.hardware.cluster import Cluster
from autopar.ir.layout import local_shape
from autopar.ir.problem import Ints
from autopar.ir.trace import trace
from autopar.passes.layers.find import find
from autopar.passes.memory.search_state import Acceptance
from autopar.passes.microbatch.split import split
from autopar.passes.remat.options import Options
from autopar.passes.stages.divide import PASS_KINDS, divide
from autopar.passes.stages.graph import stage_graph
from autopar.passes.stages.memory import whole_bytes
from autopar.passes.stages.plan import MemoryLimit, StageProblem
from autopar.rules import rules_of
from tests.judge.budget_milp import within
from tests.passes.stages.test_graph import COUNT, staged
from tests.programs.steps import array
from tests.support.effort import examples

SECONDS = 60.0  # for the independent solver
MODELS = ("mlp-toy", "gpt-toy")


@cache
def problem(name: str, stage: int, beta: float = 1e-7) -> StageProblem:
    """A stage on links of so many s/byte."""
    _, graphs, _ = staged(name, 2)
    mesh = Cluster.custom((4,), 1e-6, beta, {"float32": 1e11}, 1e10, 10**9).logical_mesh((4,))
    return StageProblem(graphs[stage], mesh, rules_of(graphs[stage].graph), Options(gap=0.0))


def drawn(stage: StageProblem, seed: int) -> Ints:
    """A random strategy per node; copies and readers need not agree, and the cost may be infinite."""
    rng = np.random.default_rng(seed)
    return np.array([rng.integers(len(node.cost)) for node in stage.model.problem.nodes], np.int64)


@settings(max_examples=60, derandomize=True)
@given(st.sampled_from(MODELS), st.integers(0, 1), st.integers(1, COUNT), st.integers(0, 2**32), st.floats(0.3, 1.1))
def test_rows_agree_with_the_bytes_of_a_plan(name: str, number: int, in_flight: int, seed: int, share: float) -> None:
    stage = problem(name, number)
    rows, plan = stage.liveness.rows(in_flight), drawn(stage, seed)
    memory = stage.liveness.memory(plan)
    peak, at_peak = rows.peak(plan)
    assert peak == whole_bytes(memory.peak(in_flight))
    assert at_peak.value(stage.model.problem, plan) == pytest.approx(memory.peak(in_flight))
    over = [row.value(stage.model.problem, plan) for row in rows.over(plan, share * peak)]
    assert all(nbytes > share * peak * (1 - 1e-9) for nbytes in over)
    assert bool(over) == (memory.peak(in_flight) > share * peak)
    assert over == pytest.approx(sorted(over, reverse=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", [0, 1])
def test_bytes_by_kind_are_those_of_the_layouts(name: str, number: int) -> None:
    stage = problem(name, number)
    for plan in (stage.plan(stage.fastest), stage.plan(stage.within(MemoryLimit(1, 1)))):
        memory, graph = stage.liveness.memory(plan.solution.assignment), plan.graph.graph

        def nbytes(v: int, plan=plan, graph=graph) -> int:
            layout = plan.layout(v)
            shape = graph.types[v].shape if layout is None else local_shape(layout, graph.types[v].shape, (4,))
            return math.prod(shape) * graph.types[v].itemsize

        assert memory.state == sum(nbytes(v) for v in plan.graph.arguments.values())
        assert memory.batch == COUNT * sum(nbytes(v) for v in plan.graph.blocks.values())
        assert not plan.graph.parts
        assert memory.sums == sum(
            nbytes(v) for s in plan.graph.completed_in if isinstance(v := plan.graph.local[s], int)
        )
        outputs = {v for op in graph.ops if plan.graph.program_of(op.index) in PASS_KINDS for v in op.outputs}
        assert 0 < memory.stash <= sum(graph.types[v].nbytes for v in outputs)
        least = stage.liveness.least()
        for kind in ("state", "sums", "batch", "stash"):
            assert getattr(least, kind) <= getattr(memory, kind) * (1 + 1e-12)
        assert memory.peak(3) >= memory.peak(2) >= least.peak(2)
        assert memory.peak(3) - memory.peak(2) in (0.0, pytest.approx(memory.stash))


def test_accumulators_that_another_stage_reads_are_stored_while_passes_run() -> None:
    """The second stage accumulates its part of the gradient of shared weights, which the first one updates."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            y = x
            for _ in range(4):
                y = jnp.tanh(y @ w)
            return jnp.sum(y)

        return w - jax.grad(loss)(w)

    step_traced = trace(step, array(16, 16), array(32, 16))
    divided = divide(split(step_traced.graph, COUNT), find(step_traced.graph), [2])
    mesh = Cluster.custom((1,), 1e-6, 1e-8, {"float32": 1e9}, 1e9, 10**9).logical_mesh((1,))
    programs = {}
    for number in range(2):
        graph = stage_graph(divided, number, step_traced.in_avals)
        stage = StageProblem(graph, mesh, rules_of(graph.graph), Options(gap=0.0))
        programs[number] = {*graph.completed_in.values()}
        assert stage.liveness.memory(stage.fastest.assignment).sums == 16 * 16 * 4 * len(graph.accumulators)
        assert stage.liveness.least().sums == 16 * 16 * 4 * len(graph.accumulators) > 0
    assert programs == {0: {"update0"}, 1: set()}


def test_results_of_each_example_are_stored_for_all_microbatches_while_passes_run() -> None:
    """Their parts have a leading dimension that no axis cuts, and numbers of two bytes stay so, unlike sums."""

    def step(weights: tuple[jax.Array, ...], x: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        def loss(weights: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.sum(y), y

        gradients, y = jax.grad(loss, has_aux=True)(weights)
        return jax.tree.map(jnp.subtract, weights, gradients), y

    square, last, x = (array(*shape, dtype=jnp.bfloat16) for shape in ((16, 16), (16, 8), (32, 16)))
    step_traced = trace(step, (square, square, square, last), x)
    divided = divide(split(step_traced.graph, COUNT), find(step_traced.graph), [1])
    graph = stage_graph(divided, 1, step_traced.in_avals)
    ((total, stack),) = graph.parts.items()
    types, repeats = graph.graph.types, graph.graph.repeats
    assert types[stack].shape == (COUNT, 8, 8)
    assert repeats is not None
    assert {p: graph.graph.inputs[i] for p, i in repeats.parts.items()} == {graph.part_results[total]: stack}

    mesh = Cluster.custom((4,), 1e-6, 1e-8, {"bfloat16": 1e9}, 1e9, 10**9).logical_mesh((4,))
    stage = StageProblem(graph, mesh, rules_of(graph.graph), Options(gap=0.0))
    plan = stage.plan(stage.fastest)
    layout = plan.layout(stack)
    assert layout == (1,), "the examples of each part are cut"
    sums = {a: plan.layout(a) for v in graph.completed_in if isinstance(a := graph.accumulated(v), int)}
    shares = {a: math.prod(local_shape(at, types[a].shape, (4,))) for a, at in sums.items() if at is not None}
    assert {types[a].dtype for a in shares if a != stack} == {"float32"}
    assert stage.liveness.memory(plan.solution.assignment).sums == sum(n * types[a].itemsize for a, n in shares.items())


@settings(max_examples=examples(12), derandomize=True)
@given(st.integers(0, 1), st.sampled_from([1, COUNT]), st.floats(0.0, 1.0), st.sampled_from([1e-9, 1e-7]))
def test_plans_within_a_limit_are_optimal(number: int, in_flight: int, share: float, beta: float) -> None:
    """The objective and the bound against HiGHS on the problem as it is written, over all memory rows."""
    stage = problem("mlp-toy", number, beta)
    rows = stage.liveness.rows(in_flight)
    most, _ = rows.peak(stage.fastest.assignment)
    least, _ = rows.peak(stage.within(MemoryLimit(1, in_flight)).assignment)
    limit = MemoryLimit(int(least + share * (most - least)), in_flight)
    solution = stage.within(limit)
    assert rows.peak(solution.assignment)[0] <= limit.nbytes
    assert stage.model.problem.value(solution.assignment) == pytest.approx(solution.objective)
    answer = within(stage.model.problem, rows, limit.nbytes, SECONDS)
    assert answer.optimum is not None
    assert solution.lower_bound <= answer.optimum * (1 + 1e-8)
    assert solution.objective == pytest.approx(answer.optimum, rel=1e-3)


def test_a_plan_that_is_fast_enough_ends_the_search() -> None:
    """The search ends at once with a plan for more microbatches in flight, if that is accepted."""
    stage = copy.copy(problem("mlp-toy", 0))
    stage.solved = {}
    rows, free = stage.liveness.rows(COUNT), stage.fastest
    least, most = (rows.peak(s.assignment)[0] for s in (stage.within(MemoryLimit(1, COUNT)), free))
    limit = MemoryLimit(int(0.2 * most + 0.8 * least), COUNT)
    fewer = replace(limit, in_flight=COUNT - 1)
    first = stage.within(limit)
    assert free.objective < 0.98 * first.objective  # otherwise the bound without a limit proves that it is good enough
    second = stage.within(fewer, Acceptance(first.objective, first.objective))
    assert (second.status, second.rows) == ("accepted", 0)
    assert second.objective <= first.objective
    for too_strict in (Acceptance(0.5 * free.objective, first.objective), Acceptance(first.objective, 0.0)):
        stage.solved = {limit: first}
        assert stage.within(fewer, too_strict).status != "accepted"


def test_the_least_peak_is_proven_where_nothing_fits() -> None:
    stage = problem("mlp-toy", 0)
    for in_flight in (1, COUNT):
        smallest = stage.within(MemoryLimit(1, in_flight))
        peak, _ = stage.liveness.rows(in_flight).peak(smallest.assignment)
        assert stage.within(MemoryLimit(int(peak), in_flight)).objective <= smallest.objective
        with pytest.raises(AssertionError):  # the independent solver finds the problem infeasible
            within(stage.model.problem, stage.liveness.rows(in_flight), peak - 1, SECONDS)
