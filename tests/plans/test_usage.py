"""Where the time and the memory of a step go: everything adds up."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.ir.text import WIDTH

OPTIONS = {
    "whole": {},
    "microbatches": {"num_microbatches": 2},
    "recomputed": {"remat": "full"},
    "offloaded": {"offload": "all"},
}


def planned(name, mesh=(2, 2), **options):
    model = zoo.build(name)
    cluster = dear(mesh)
    hosted = replace(cluster, device=replace(cluster.device, host_bandwidth=1e9))
    return autopar.plan(model.step, *model.abstract_args(), mesh=mesh, cluster=hosted, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["mlp-toy", "gpt-toy"])
def test_the_lines_add_up_to_the_step_and_the_fullest_moment_is_the_peak(name, options):
    plan = planned(name, **options)
    assert math.fsum(row.seconds for row in plan.spent) == pytest.approx(plan.step_time_s, rel=1e-9)
    assert all(row.seconds > 0 for row in plan.spent[:-1])
    kinds = plan.time().kinds
    assert kinds["compute"] > 0
    assert kinds["other"] < 0.02 * plan.step_time_s
    assert kinds.get("host", 0.0) == plan.parts.get("host", 0.0)
    lines = plan.time().lines
    assert sum(sum(of.values()) for of in lines.values()) == pytest.approx(plan.step_time_s, rel=1e-9)
    fullest = max(plan.memory().over_time, key=lambda moment: moment.nbytes)
    assert fullest.nbytes == pytest.approx(plan.peak_memory_bytes, rel=1e-6)
    assert dict(fullest.kinds) == dict(plan.stages[0].memory)


def test_communication_is_what_the_collectives_take_less_what_is_hidden():
    plan = planned("gpt-toy", (2, 4))
    assert plan.collectives
    assert 0 < plan.time().kinds["communication"] < plan.step_time_s
    alone = planned("gpt-toy", (1,))
    assert "communication" not in alone.time().kinds


def test_the_time_of_every_rank_is_the_step():
    plan = planned("mlp-toy", (4,), stages=2, num_microbatches=2)
    for passes in plan.time().stages.values():
        assert sum(passes.values()) == pytest.approx(plan.step_time_s)
        assert passes["idle"] > 0
    shared = planned("gpt-toy", (2,), stages=2, num_microbatches=2, schedule="interleaved-1f1b")
    use = shared.time().stages
    for rank in shared.ranks:
        busy = sum(t for stage in rank for name, t in use[stage.name].items() if name != "idle")
        assert busy + use[rank[0].name]["idle"] == pytest.approx(shared.step_time_s)


PIPELINES = {
    "two stages": ("gpt-toy", (4,), {"stages": 2, "num_microbatches": 2}),
    "two stages on each device": (
        "gpt-toy",
        (2,),
        {"stages": 2, "num_microbatches": 2, "schedule": "interleaved-1f1b"},
    ),
    "four stages": ("gpt-toy", (4,), {"stages": 4, "num_microbatches": 4}),
    "offloaded": ("mlp-toy", (4,), {"stages": 2, "num_microbatches": 2, "offload": "all"}),
    "two loops": ("moe-toy", (2, 4), {"stages": 2, "num_microbatches": 2, "schedule": "zb-h1"}),
}


@pytest.mark.parametrize("case", PIPELINES.values(), ids=PIPELINES)
def test_the_lines_of_the_busiest_devices_and_their_idle_time_add_up_to_the_step(case):
    name, mesh, options = case
    plan = planned(name, mesh, **options)
    assert math.fsum(row.seconds for row in plan.spent) == pytest.approx(plan.step_time_s, rel=1e-9)
    most = max(sum(sum(s.busy(plan.num_microbatches).values()) for s in rank) for rank in plan.ranks)
    kinds = plan.time().kinds
    assert plan.step_time_s - kinds["idle"] - kinds.get("first loop", 0.0) == pytest.approx(most, rel=1e-3)
    assert kinds["compute"] > 0.4 * most
    assert "slowest line: " in plan.summary()
    assert re.search(r"stage \d(?: and stage \d)*, with most to do:", str(plan.time()))


def test_a_saved_plan_knows_as_much_and_prints_it(tmp_path):
    plan = planned("gpt-toy", (2, 4))
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert (loaded.time(), loaded.memory()) == (plan.time(), plan.memory())
    text = f"{loaded.time()}\n{loaded.memory()}"
    assert max(map(len, text.splitlines())) <= WIDTH
    slowest = next(iter(plan.time().lines))
    assert f"slowest line: {slowest}, " in plan.summary()
