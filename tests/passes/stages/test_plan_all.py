"""Stages planned in two runs: the same plan in any number of processes, and equal layouts on both sides of borders."""

from __future__ import annotations

import itertools
import json

import pytest

from autopar import parallel_map
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.passes.remat.options import Options
from autopar.passes.stages.cost import stage_memory
from autopar.passes.stages.plan import PENALTIES, MemoryLimit, PenalisedPlans, StagePlan
from autopar.passes.stages.plan import planned as plan_at
from autopar.passes.stages.plan_all import RUNS, RunEffort, StagePlans, plan_stages, planning_runs
from autopar.rules import RuleReader
from tests import processes
from tests.passes.stages.test_graph import staged

TWO_RUNS = RunEffort(two_from=0)

SCRIPT = """
import json, sys
from autopar import parallel_map
from tests.passes.stages.test_plan_all import TWO_RUNS, described, planned
parallel_map.WORKERS = int(sys.argv[1])
plans = planned(TWO_RUNS)
print(json.dumps([sorted({type(p).__name__ for p in plans.plans}), described(plans)]))
"""


def mesh(devices: int = 2) -> LogicalMesh:
    return Cluster.custom((devices,), 1e-6, 1e-9, {"float32": 1e9}, 1e10, 10**9).logical_mesh((devices,))


def planned(effort: RunEffort = RUNS) -> StagePlans:
    stages, _, traced = staged("gpt-toy", 4, layers=4)
    return plan_stages(stages, traced.in_avals, [mesh()] * 4, effort=effort)


def described(plans: StagePlans) -> str:
    return repr(
        [plans.distinct]
        + [(p.layouts, p.summary.times, p.summary.memory, p.summary.graph_hash, p.rules) for p in plans.plans]
    )


def test_few_operations_are_one_run() -> None:
    stages, _, _ = staged("gpt-toy", 4, layers=4)
    assert planning_runs(stages, [mesh()] * 4) == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((2, 4, 4, 2), {(0, 1, 2), (3,)}),  # the third has the solution of the second, and costs little
        ((2, 2, 4, 4), {(0, 1), (2, 3)}),
        ((2, 4, 2, 4), {(0, 1), (2, 3)}),  # no two neighbours have equal submeshes: any halves do
        ((2, 2, 2, 4), {(0, 1, 2), (3,)}),
        ((2, 2, 2, 2), {(0, 1), (2, 3)}),  # all are coupled: halves
    ],
)
def test_stages_without_coupled_boundaries_are_planned_in_parallel(
    devices: tuple[int, ...], expected: set[tuple[int, ...]]
) -> None:
    stages, _, traced = staged("gpt-toy", 4, layers=4)
    meshes = [mesh(n) for n in devices]
    in_order = plan_stages(stages, traced.in_avals, meshes).plans
    runs = planning_runs(stages, meshes, TWO_RUNS)
    assert set(runs) == expected
    parallel = plan_stages(stages, traced.in_avals, meshes, effort=TWO_RUNS).plans
    seconds = [p.solution.objective for p in in_order]
    assert [p.solution.objective for p in parallel] == pytest.approx(seconds, rel=PENALTIES.gap)
    if len(set(devices)) > 1:  # halves may choose other boundary layouts of about the same cost
        assert [p.summary.boundary for p in parallel] == [p.summary.boundary for p in in_order]


def test_two_runs_agree_on_boundary_layouts() -> None:
    """The second run does not know the layouts of the first; its stages are planned again where these differ."""
    plans = planned(TWO_RUNS)
    assert len(planning_runs(plans.stages, [mesh()] * 4, TWO_RUNS)) == 2
    borders = [p.summary.boundary for p in plans.plans]
    for transfer, values in plans.stages.transfers.items():
        for v in values:
            sent, wanted = borders[transfer.source].sent.get(v), borders[transfer.target].received.get(v)
            assert sent is None or wanted is None or sent == wanted


def test_the_plan_is_the_same_in_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_map, "WORKERS", 1)
    _, two_processes = json.loads(processes.printed(SCRIPT, "0", "2"))
    one_process = planned(TWO_RUNS)
    assert [type(p).__name__ for p in one_process.plans] == ["StagePlan", "StagePlan", "SummarizedStage", "StagePlan"]
    assert described(one_process) == two_processes


@pytest.fixture(scope="module")
def slow() -> tuple[PenalisedPlans, list[StagePlan]]:
    """A stage on slow links, and its plans at every rate."""
    _, graphs, _ = staged("gpt-toy", 2, layers=4)
    on = Cluster.custom((4,), 1e-6, 1e-7, {"float32": 1e11}, 1e10, 10**9).logical_mesh((4,))
    graph, rules = graphs[0], RuleReader({}).read(graphs[0].graph)
    penalised = PenalisedPlans(graph, on, rules, Options())
    solutions = [penalised.at(rate) for rate in PENALTIES.rates]
    return penalised, [plan_at(graph, on, rules, penalised.model, penalised.liveness, s) for s in solutions]


def test_a_stage_has_the_lowest_penalty_rate_that_fits(slow: tuple[PenalisedPlans, list[StagePlan]]) -> None:
    """Whatever the rate of its layers by themselves: the lowest rate at which the whole stage fits."""
    penalised, at = slow
    graph, rules = penalised.graph, penalised.rules
    peaks, seconds = [stage_memory(plan).peak(1) for plan in at], [plan.solution.objective for plan in at]
    assert min(peaks) < 0.8 * peaks[0]
    assert max(seconds) > 1.2 * seconds[0]
    for limit in (max(peaks), *(0.5 * (a + b) for a, b in itertools.pairwise(peaks) if a > b), min(peaks)):
        plans = [penalised.within(graph, rules, MemoryLimit(limit, 1, rate)) for rate in PENALTIES.rates]
        assert all(stage_memory(plan).peak(1) <= limit for plan in plans)
        assert max(p.solution.objective for p in plans) <= (1 + PENALTIES.gap) * min(
            p.solution.objective for p in plans
        )


def test_a_rate_between_is_tried_where_the_next_one_costs_much(slow: tuple[PenalisedPlans, list[StagePlan]]) -> None:
    penalised, at = slow
    graph, rules = penalised.graph, penalised.rules
    below, fits = (stage_memory(at[n]).peak(1) for n in (-2, -1))
    assert at[-1].solution.objective > (1 + PENALTIES.refine_above) * at[-2].solution.objective
    between = PenalisedPlans(graph, penalised.mesh, rules, Options())
    plans = between.within(graph, rules, MemoryLimit(0.5 * (below + fits), 1))
    assert stage_memory(plans).peak(1) <= 0.5 * (below + fits)
    assert plans.solution.objective <= at[-1].solution.objective
    (rate,) = {*between.solved} - {*PENALTIES.rates}
    assert PENALTIES.rates[-2] < rate < PENALTIES.rates[-1]
    enough = PenalisedPlans(graph, penalised.mesh, rules, Options())
    enough.within(graph, rules, MemoryLimit(below, 1))
    assert {*enough.solved} <= {*PENALTIES.rates}


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_rates_may_refer_to_a_rough_solution(slow: tuple[PenalisedPlans, list[StagePlan]], rate: float) -> None:
    penalised, _ = slow
    rough = PenalisedPlans(penalised.graph, penalised.mesh, penalised.rules, Options(), rough_reference=True)
    assert rough.at(rate).objective == pytest.approx(penalised.at(rate).objective, rel=PENALTIES.gap)
    assert rough.reference.objective >= penalised.unpenalised.objective * (1 - PENALTIES.gap)
