"""The predicted step as a timeline: its form, its length, and every instruction."""

from __future__ import annotations

import itertools
import json

import pytest

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.plans.views.timeline import simulated, trace_events

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "interleaved-1f1b")


def planned(mesh, **options):
    model = zoo.build("gpt-toy")
    return autopar.plan(model.step, *model.abstract_args(), mesh=mesh, cluster=dear(mesh), **options)


def spans(events, process=None):
    return [e for e in events if e["ph"] == "X" and (process is None or e["pid"] == process)]


def assert_well_formed(trace):
    """The Trace Event Format: complete and metadata events, and rows on which nothing overlaps."""
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}
    rows = {}
    for event in trace["traceEvents"]:
        assert {"name", "pid", "tid", "args"} <= event.keys()
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert event["ts"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for times in rows.values():
        times.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(times))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_instruction_that_takes_time_is_there(schedule):
    plan = planned((2,), stages=2, num_microbatches=4, schedule=schedule)
    trace = json.loads(json.dumps(trace_events(plan)))
    assert_well_formed(trace)
    events = trace["traceEvents"]
    lists, simulation = simulated(plan)
    assert simulation.seconds == pytest.approx(plan.parts["pipeline"], rel=1e-12)
    assert lists.lists == plan.origin.step.pipeline.schedule.lists
    for rank, instructions in enumerate(lists.lists):
        passes = [str(i) for i in instructions if i.op == "run"]
        shown = [e["args"].get("instruction") for e in spans(events, rank)]
        assert [name for name in shown if name in passes] == passes
    assert max(e["ts"] + e["dur"] for e in spans(events)) == pytest.approx(plan.step_time_s * 1e6)


def test_one_mesh_has_the_seconds_of_its_lines():
    plan = planned((2, 2))
    trace = trace_events(plan)
    assert_well_formed(trace)
    events = spans(trace["traceEvents"])
    assert sum(e["dur"] for e in events if e["tid"] > 1) == pytest.approx(plan.step_time_s * 1e6)
    assert {e["name"] for e in events if e["tid"] == 1} >= {"forward", "backward", "update"}
    assert trace["otherData"]["step_time_s"] == plan.step_time_s


def test_a_saved_plan_writes_the_same_file(tmp_path):
    plan = planned((2,), stages=2, num_microbatches=2)
    plan.save(tmp_path / "plan.json")
    plan.trace(tmp_path / "one.json")
    autopar.Plan.load(tmp_path / "plan.json").trace(tmp_path / "two.json")
    assert json.loads((tmp_path / "one.json").read_text()) == json.loads((tmp_path / "two.json").read_text())
    with pytest.raises(ArgumentError, match="the trace cannot be written to"):
        plan.trace(tmp_path / "nowhere" / "trace.json")


def test_transfers_of_stages_that_are_not_there(tmp_path):
    plan = planned((2,), stages=2, num_microbatches=2)
    data = json.loads(plan.to_json())
    data["transfers"]["0>9"] = 1.0
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanMismatchError, match=r"field 'transfers' is '0>9', expected two stages"):
        autopar.Plan.load(tmp_path / "plan.json")
