"""All stages of a step: equal layouts on both sides of borders, shared problems, and effort where it matters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.trace import Traced
from autopar.passes.remat.options import Options
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.plan import MemoryLimit
from autopar.passes.stages.plan_all import StagePlans, plan_stages
from tests.passes.stages.test_graph import COUNT, staged
from tests.support.effort import sample

STAGES = 4


def mesh(devices: int = 2, beta: float = 1e-9) -> LogicalMesh:
    return Cluster.custom((devices,), 1e-6, beta, {"float32": 1e9}, 1e10, 10**9).logical_mesh((devices,))


@cache
def stages_of(model: str) -> tuple[Stages, Traced]:
    stages, _, traced = staged(model, STAGES, layers=4)
    return stages, traced


def planned(limits: Sequence[MemoryLimit] = (), gap: float = Options().gap, model: str = "mlp-toy") -> StagePlans:
    stages, traced = stages_of(model)
    return plan_stages(stages, traced.in_avals, [mesh(4, 1e-7)] * STAGES, Options(gap=gap), limits)


def peaks(plans: StagePlans, limits: Sequence[MemoryLimit]) -> list[float]:
    return [p.summary.memory.peak(limit.in_flight) for p, limit in zip(plans.plans, limits, strict=True)]


def test_borders_have_equal_layouts_on_both_sides() -> None:
    plans = planned(model="gpt-toy")
    assert [type(p).__name__ for p in plans.plans] == ["StagePlan", "StagePlan", "SummarizedStage", "StagePlan"]
    borders = [p.summary.boundary for p in plans.plans]
    assert any(boundary.sent for boundary in borders)
    for transfer, values in plans.stages.transfers.items():
        for v in values:
            sent, wanted = borders[transfer.source].sent.get(v), borders[transfer.target].received.get(v)
            assert sent is None or wanted is None or sent == wanted


@pytest.mark.parametrize("share", sample([0.3, 0.7], [0.3]))
def test_stages_fit_and_the_slowest_is_as_fast_as_without_a_tolerance(share: float) -> None:
    flying = [MemoryLimit(1, min(COUNT, STAGES - s)) for s in range(STAGES)]
    least, most = planned(flying), planned()
    limits = [
        MemoryLimit(int(a + share * (b - a)) + 1, limit.in_flight)
        for a, b, limit in zip(peaks(least, flying), peaks(most, flying), flying, strict=True)
    ]
    exact, tolerant = planned(limits, gap=0.0), planned(limits, gap=0.02)
    for plans in (exact, tolerant):
        assert all(peak <= limit.nbytes for peak, limit in zip(peaks(plans, limits), limits, strict=True))
    slowest = [max(p.solution.objective for p in plans.plans) for plans in (exact, tolerant)]
    assert slowest[0] * (1 - 1e-9) <= slowest[1] <= slowest[0] / (1 - 0.02)
