"""The optimizer finds what exhaustive search finds, and a judge that shares no code with it agrees on every price.

Some dozens of programs are judged here; `python -m tests.judge.intra_op --graphs 1000` judges more in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar import zoo
from autopar.hardware.cluster import Cluster
from autopar.ir.problem import Edge, Node, Problem
from autopar.ir.trace import Traced, trace
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import optimize
from autopar.plans.builders.one_mesh import Planned, make_plan
from tests.judge.intra_op import ROUNDING, Judged, Verdict, judged_programs, verdict, zoo_prices
from tests.judge.model import Judge, eliminated, enumerated
from tests.judge.survey import survey
from tests.support.effort import examples, sample

GRAPHS, WITH_ILP = examples(160), examples(48)


@pytest.fixture(scope="module")
def programs() -> list[tuple[int, Judged]]:
    return list(judged_programs(GRAPHS))


@pytest.fixture(scope="module")
def verdicts(programs: list[tuple[int, Judged]]) -> list[Verdict]:
    ways = [("unfolded", "raw", "cbc", "highs"), ("unfolded", "raw")]
    return [verdict(seed, subject, ways[i >= WITH_ILP]) for i, (seed, subject) in enumerate(programs)]


def test_the_optimizer_finds_the_optimum_of_every_program(verdicts: list[Verdict]) -> None:
    assert len(verdicts) == GRAPHS
    assert [(v.seed, v.planned, v.optimum) for v in verdicts if abs(v.planned / v.optimum - 1) > ROUNDING] == []


def test_the_judge_agrees_on_the_price_of_every_plan(verdicts: list[Verdict]) -> None:
    assert [(v.seed, v.planned, v.priced) for v in verdicts if abs(v.planned / v.priced - 1) > ROUNDING] == []


WAYS = [("unfolded", GRAPHS), ("raw", GRAPHS), ("cbc", WITH_ILP), ("highs", WITH_ILP)]


@pytest.mark.parametrize(("way", "least"), WAYS)
def test_every_way_of_solving_finds_the_same_optimum(verdicts: list[Verdict], way: str, least: int) -> None:
    tried = [v for v in verdicts if way in v.variants]
    assert len(tried) == least
    differ = [v for v in tried if abs(v.variants[way] / v.optimum - 1) > ROUNDING]
    assert [(v.seed, v.variants[way], v.optimum) for v in differ] == []


def test_the_programs_are_hard_enough(verdicts: list[Verdict]) -> None:
    assert {v.clusters for v in verdicts} == {*range(4, 11)}
    assert sum(v.weights_cut for v in verdicts) >= GRAPHS / 4  # not pure data parallel
    assert sum(v.diamond for v in verdicts) >= GRAPHS / 4
    assert sum(v.shared > 0 for v in verdicts) >= GRAPHS / 4
    assert {v.method for v in verdicts} == {"enumerated", "eliminated"}


def test_elimination_finds_what_enumeration_finds(programs: list[tuple[int, Judged]]) -> None:
    small = [subject.judge for _, subject in programs if subject.judge.assignments <= 20_000]
    assert len(small) >= 10
    for judge in small:
        (best, choice), (other, _) = eliminated(judge), enumerated(judge)
        assert best == pytest.approx(other, rel=ROUNDING)
        assert judge.seconds(choice) == pytest.approx(best, rel=ROUNDING)


# A wrong cost anywhere at the optimum is noticed.

Change = Callable[[Problem, np.ndarray, float], Problem]


def cheaper_node(problem: Problem, plan: np.ndarray, seconds: float) -> Problem:
    """The first node with a cost takes less in the plan's strategy."""
    at = next(i for i, n in enumerate(problem.nodes) if n.cost.any())
    node = problem.nodes[at]
    cost = node.cost.copy()
    cost[plan[at]] -= seconds
    return replace(problem, nodes=(*problem.nodes[:at], Node(node.name, cost, "changed"), *problem.nodes[at + 1 :]))


def cheaper_edge(problem: Problem, plan: np.ndarray, seconds: float) -> Problem:
    """The last edge takes less between the plan's strategies."""
    edge = problem.edges[-1]
    table = edge.table.copy()
    table[edge.gu[plan[edge.u]], edge.gv[plan[edge.v]]] -= seconds
    return replace(problem, edges=(*problem.edges[:-1], Edge(edge.u, edge.v, edge.gu, edge.gv, table, (-1,))))


@pytest.mark.parametrize("change", [cheaper_node, cheaper_edge])
def test_a_mutated_cost_is_noticed(programs: list[tuple[int, Judged]], change: Change) -> None:
    for seed, subject in programs[:20]:
        problem, plan = subject.planned.model.problem, subject.planned.solution.assignment
        optimum, *_ = subject.judge.optimum()
        solution = optimize(change(problem, plan, 1e-3 * optimum))
        assert abs(solution.objective / optimum - 1) > 1e-4, f"seed {seed}"


def test_the_judge_prices_a_product_by_hand() -> None:
    """x [8,16] @ w [16,4] on (2, 2): x cut by rows along the first axis, the sum over 16 along the second."""
    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 4), (8, 16)))
    traced = trace(lambda w, x: x @ w, w, x)
    cluster = Cluster.custom((2, 2), (1e-6, 2e-6), (1e-9, 3e-9), 1e9, 1e9, 10**9, kernel_overhead=5e-6)
    mesh = cluster.logical_mesh((2, 2))
    judge = survey(traced.graph, make_plan(traced, mesh, "custom", Options()).rules, mesh)
    layouts = {"w": (-1, 0), "x": (0, 1)}
    choice = [_option(judge, name, lambda o, want=want: o.left == want) for name, want in layouts.items()]
    choice.append(_option(judge, "op0 dot_general", lambda o: (o.cut, o.ends) == ((0, 1), ("", "reduce"))))
    roofline = max(2 * 8 * 16 * 4 / 4 / 1e9, 4 * (8 * 16 / 4 + 16 * 4 / 2 + 8 * 4 / 2) / 1e9) + 5e-6
    all_reduce = 2e-6 + 3e-9 * 4 * 8 * 4 / 2  # two devices exchange their halves of the batch's result in one message
    assert judge.seconds(choice) == pytest.approx(roofline + all_reduce, rel=1e-12)


def _option(judge: Judge, name: str, wanted: Callable[[Any], bool]) -> int:
    decision = next(d for d in judge.decisions if d.name == name)
    return next(i for i, o in enumerate(decision.options) if wanted(o))


# Whole models

MODELS = ("mlp-toy", "gpt-toy-scan-remat", "moe-toy", "wresnet-toy", "rnn-toy", "flax-linen-toy")


@pytest.mark.parametrize("name", sample(MODELS, ["mlp-toy", "gpt-toy-scan-remat", "wresnet-toy"]))
def test_the_judge_agrees_on_the_price_of_a_model(name: str) -> None:
    ((_, ours, theirs),) = zoo_prices([name])
    assert theirs == pytest.approx(ours, rel=ROUNDING)


def data_parallel(model: zoo.Model, path: str, shape: tuple[int, ...]) -> P:
    """The batch cut over all devices, everything else whole."""
    return P(("x", "y")) if path.startswith("batch") else P()


def fully_sharded(model: zoo.Model, path: str, shape: tuple[int, ...]) -> P:
    """Batch and state cut over all devices, along the longest dimension (Rajbhandari et al., 2020, "ZeRO")."""
    best = max((d for d, n in enumerate(shape) if n % 8 == 0), key=lambda d: shape[d], default=None)
    return P() if best is None else P(*[None] * best, ("x", "y"))


def megatron(model: zoo.Model, path: str, shape: tuple[int, ...]) -> P:
    """The model's own table inside, the batch outside (Shoeybi et al., 2019)."""
    if path.startswith("batch"):
        return P("x")
    name = path.split("/")[-1]
    spec = next((spec for glob, spec in model.megatron if glob.split("/")[-1] == name), P())
    return P(*("y" if axis == "model" else axis for axis in spec))


def sequence_parallel(model: zoo.Model, path: str, shape: tuple[int, ...]) -> P:
    """As Megatron, with tokens cut along the sequence (Korthikanti et al., 2022)."""
    tokens = path.startswith("batch") and len(shape) > 1
    return P("x", "y") if tokens else megatron(model, path, shape)


MESH = Cluster.custom((2, 4), (1e-6, 1e-7), (4e-9, 1e-10), 1e12, 1e11, 10**10).logical_mesh((2, 4))


@pytest.fixture(scope="module", params=["mlp-toy", "gpt-toy"])
def optimum(request: pytest.FixtureRequest) -> tuple[zoo.Model, Traced, Planned]:
    model = zoo.build(request.param)
    traced = trace(model.step, *model.abstract_args())
    return model, traced, make_plan(traced, MESH, "custom", Options())


@pytest.mark.parametrize("expert", [data_parallel, fully_sharded, megatron, sequence_parallel])
def test_no_expert_plan_is_cheaper_than_the_optimum(
    optimum: tuple[zoo.Model, Traced, Planned], expert: Callable[..., P]
) -> None:
    model, traced, best = optimum
    graph = traced.graph
    paths = zip(graph.input_paths, graph.inputs, strict=True)
    pins = {f"arg:{i}": expert(model, path, graph.types[v].shape) for i, (path, v) in enumerate(paths)}
    pinned = make_plan(traced, MESH, "custom", Options(pins=pins)).plan
    assert pinned.in_specs() != best.plan.in_specs()
    assert pinned.objective_s >= best.plan.objective_s * (1 - ROUNDING)
    # The same account of the program prices both.
    judge = survey(graph, best.rules, MESH)
    assert judge.price(best.plan.stages[0]) == pytest.approx(best.plan.objective_s, rel=ROUNDING)
    assert judge.price(pinned.stages[0]) == pytest.approx(pinned.objective_s, rel=ROUNDING)
