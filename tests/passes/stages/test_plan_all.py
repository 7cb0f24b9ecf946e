"""Stages planned in two runs: the same plan in any number of processes, and borders that lie alike afterwards."""

from __future__ import annotations

import itertools
import json

import pytest

from autopar import parallel_map
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.passes.intra_op.plan import Options
from autopar.passes.stages import plan_all as stage_runs
from autopar.passes.stages.cost import stage_memory
from autopar.passes.stages.plan import DEAR, ENOUGH, RATES, Limit, PenalisedPlans, StagePlan
from autopar.passes.stages.plan import planned as plan_at
from autopar.passes.stages.plan_all import StagePlans, plan_stages, runs
from autopar.rules import Reader
from tests import processes
from tests.passes.stages.test_graph import staged

SCRIPT = """
import json, sys
from autopar import parallel_map
from autopar.passes.stages import plan_all
from tests.passes.stages.test_plan_all import described, planned
plan_all.LARGE, parallel_map.WORKERS = 0, int(sys.argv[1])
plans = planned()
print(json.dumps([sorted({type(p).__name__ for p in plans.plans}), described(plans)]))
"""


def mesh(devices: int = 2) -> LogicalMesh:
    return Cluster.custom((devices,), 1e-6, 1e-9, {"float32": 1e9}, 1e10, 10**9).logical_mesh((devices,))


def planned() -> StagePlans:
    stages, _, traced = staged("gpt-toy", 4, layers=4)
    return plan_stages(stages, traced.in_avals, [mesh()] * 4)


def described(plans: StagePlans) -> str:
    return repr(
        [plans.distinct]
        + [(p.layouts, p.account.prices, p.account.memory, p.account.graph_hash, p.rules) for p in plans.plans]
    )


def test_few_operations_are_one_run() -> None:
    stages, _, _ = staged("gpt-toy", 4, layers=4)
    assert runs(stages, [mesh()] * 4) == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((2, 4, 4, 2), {(0, 1, 2), (3,)}),  # the third is like the second, and quickly planned
        ((2, 2, 4, 4), {(0, 1), (2, 3)}),
        ((2, 4, 2, 4), {(0, 1), (2, 3)}),  # no two neighbours are alike: any halves do
        ((2, 2, 2, 4), {(0, 1, 2), (3,)}),
        ((2, 2, 2, 2), {(0, 1), (2, 3)}),  # all are bound to each other: halves
    ],
)
def test_stages_that_keep_no_layouts_of_each_other_are_planned_apart(
    devices: tuple[int, ...], expected: set[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, _, traced = staged("gpt-toy", 4, layers=4)
    meshes = [mesh(n) for n in devices]
    in_order = plan_stages(stages, traced.in_avals, meshes).plans
    monkeypatch.setattr(stage_runs, "LARGE", 0)
    found = runs(stages, meshes)
    assert set(found) == expected
    dealt = plan_stages(stages, traced.in_avals, meshes).plans
    seconds = [p.solution.objective for p in in_order]
    assert [p.solution.objective for p in dealt] == pytest.approx(seconds, rel=ENOUGH)
    if len(set(devices)) > 1:  # halves may settle borders in another way that costs about the same
        assert [p.account.border for p in dealt] == [p.account.border for p in in_order]


def test_two_runs_hand_over_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one run knows of the other comes too late, and its stages are planned again where that matters."""
    monkeypatch.setattr(stage_runs, "LARGE", 0)
    plans = planned()
    assert len(runs(plans.stages, [mesh()] * 4)) == 2
    borders = [p.account.border for p in plans.plans]
    for hand, values in plans.stages.hands.items():
        for v in values:
            given, wanted = borders[hand.source].given.get(v), borders[hand.target].wanted.get(v)
            assert given is None or wanted is None or given == wanted


def test_the_plan_is_the_same_in_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_runs, "LARGE", 0)
    monkeypatch.setattr(parallel_map, "WORKERS", 1)
    _, apart = json.loads(processes.printed(SCRIPT, "0", "2"))
    here = planned()
    assert [type(p).__name__ for p in here.plans] == ["StagePlan", "StagePlan", "Recorded", "StagePlan"]
    assert described(here) == apart


@pytest.fixture(scope="module")
def slow() -> tuple[PenalisedPlans, list[StagePlan]]:
    """A stage on slow links, and its plans at every rate."""
    _, graphs, _ = staged("gpt-toy", 2, layers=4)
    on = Cluster.custom((4,), 1e-6, 1e-7, {"float32": 1e11}, 1e10, 10**9).logical_mesh((4,))
    graph, rules = graphs[0], Reader({}).of(graphs[0].graph)
    charges = PenalisedPlans(graph, on, rules, Options())
    return charges, [plan_at(graph, on, rules, charges.model, charges.liveness, charges.at(rate)) for rate in RATES]


def test_a_stage_is_charged_no_more_than_it_has_to_be(slow: tuple[PenalisedPlans, list[StagePlan]]) -> None:
    """Whatever rate its layers were charged at by themselves: the lowest one of those at which the whole fits."""
    charges, at = slow
    graph, rules = charges.graph, charges.rules
    peaks, seconds = [stage_memory(plan).peak(1) for plan in at], [plan.solution.objective for plan in at]
    assert min(peaks) < 0.8 * peaks[0]
    assert max(seconds) > 1.2 * seconds[0]
    for limit in (max(peaks), *(0.5 * (a + b) for a, b in itertools.pairwise(peaks) if a > b), min(peaks)):
        found = [charges.within(graph, rules, Limit(limit, 1, rate)) for rate in RATES]
        assert all(stage_memory(plan).peak(1) <= limit for plan in found)
        assert max(p.solution.objective for p in found) <= (1 + ENOUGH) * min(p.solution.objective for p in found)


def test_a_rate_between_is_tried_where_the_next_one_costs_much(slow: tuple[PenalisedPlans, list[StagePlan]]) -> None:
    charges, at = slow
    graph, rules = charges.graph, charges.rules
    below, fits = (stage_memory(at[n]).peak(1) for n in (-2, -1))
    assert at[-1].solution.objective > (1 + DEAR) * at[-2].solution.objective
    between = PenalisedPlans(graph, charges.mesh, rules, Options())
    found = between.within(graph, rules, Limit(0.5 * (below + fits), 1))
    assert stage_memory(found).peak(1) <= 0.5 * (below + fits)
    assert found.solution.objective <= at[-1].solution.objective
    (share,) = {*between.solved} - {*RATES}
    assert RATES[-2] < share < RATES[-1]
    enough = PenalisedPlans(graph, charges.mesh, rules, Options())
    enough.within(graph, rules, Limit(below, 1))
    assert {*enough.solved} <= {*RATES}


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_rates_may_go_by_what_bounds_alone_find(slow: tuple[PenalisedPlans, list[StagePlan]], share: float) -> None:
    charges, _ = slow
    rough = PenalisedPlans(charges.graph, charges.mesh, charges.rules, Options(), rough=True)
    assert rough.at(share).objective == pytest.approx(charges.at(share).objective, rel=ENOUGH)
    assert rough.base.objective >= charges.free.objective * (1 - ENOUGH)
