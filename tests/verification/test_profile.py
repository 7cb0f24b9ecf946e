"""Measured steps: every operation and instruction is there, nothing of the caller's changes, both timelines fit."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError
from autopar.plans.views.timeline import instruction_words, simulated
from autopar.verification import hlo
from autopar.verification.profile import recording
from autopar.verification.profile.comparison import union
from tests.passes.microbatch import batch_programs as programs
from tests.plans.test_timeline import assert_well_formed, spans

pytestmark = pytest.mark.core

COLLECTIVE = re.compile(r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(")


def stepped(name, mesh, layers=None, **options):
    model = zoo.build(name, layers=layers)
    step = autopar.parallelize(model.step, mesh=mesh, cluster=dear(mesh), **options)
    return step, (model.init(jax.random.key(0)), model.make_batch(jax.random.key(1)))


@pytest.fixture(scope="module")
def one_mesh():
    step, args = stepped("gpt-toy", (2, 2), layers=1)
    return step, args, step.profile(*args, steps=2)


@pytest.fixture(scope="module")
def staged():
    """Balance losses, which need a loop over the microbatches that runs first."""
    name = "balanced experts in every layer"
    fn = programs.EXACT[name]
    args = programs.arguments(name, fn)
    options = {"stages": 2, "num_microbatches": 2, "schedule": "1f1b", "batch_argnums": (2,)}
    step = autopar.parallelize(fn, mesh=(2, 2), cluster=dear((2, 2)), **options)
    return step, args, step.profile(*args, steps=1)


def test_every_collective_of_the_program_is_there(one_mesh):
    step, args, profile = one_mesh
    text = step.compiled(*args).as_text()
    written = len(COLLECTIVE.findall(text))
    assert written == len(COLLECTIVE.findall(text[text.index("\nENTRY") :])) > 10  # none in a loop
    assert profile.collective_runs() == profile.expected_collective_runs() == 4 * written
    begun = [(o.step, o.device, o.name) for o in profile.operations if o.begins]
    assert len(begun) == len(set(begun)) == 2 * 4 * written
    assert {o.kind for o in profile.operations} >= {"", "all-reduce"}


def test_bodies_of_loops_run_as_often_as_the_loop():
    step, args = stepped("gpt-toy-scan", (4,))
    profile = step.profile(*args, steps=1)
    text = step.compiled(*args).as_text()
    assert profile.collective_runs() == profile.expected_collective_runs() > 4 * len(COLLECTIVE.findall(text))


def test_times_of_one_mesh_add_up(one_mesh):
    profile = one_mesh[2]
    computation, communication, idle = profile.kinds()
    assert (computation.what, communication.what, idle.what) == ("computation", "communication", "idle")
    total = computation.measured_s + communication.measured_s + idle.measured_s
    assert total == pytest.approx(profile.step_time_s)
    assert computation.predicted_s + communication.predicted_s == pytest.approx(profile.plan.step_time_s)
    assert min(computation.measured_s, communication.measured_s) > 0
    lines = {row.what: row for row in profile.lines()}
    assert lines["nn.py:25"].predicted_s > 0
    assert lines["nn.py:25"].measured_s > 0
    busy = sum(o.seconds for o in profile.median_step)
    assert sum(row.measured_s for row in lines.values()) == pytest.approx(busy / 4)


def test_arguments_stay_as_they_are(one_mesh):
    step, args, _ = one_mesh
    before = jax.tree.map(np.asarray, args[0]["params"])
    step.profile(*args, steps=1)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, args[0]["params"]))
    assert np.isfinite(step(*args)[1]["loss"])


def test_every_instruction_of_a_pipeline_is_there(staged):
    _, _, profile = staged
    schedule, _ = simulated(profile.plan)
    expected = {instruction_words(i) for instructions in schedule.lists for i in instructions if i.op == "run"}
    ran = {o.instruction for o in profile.operations}
    assert expected <= ran
    first_loop = {f"first loop, stage {s} F, microbatch {m}" for s in (0, 1) for m in (0, 1)}
    assert {name for name in ran if name.startswith("first loop") and " F, " in name} == first_loop
    assert {name for name in ran - expected if not name.startswith("first loop")} >= {"stage 0 begin", "stage 1 begin"}
    assert profile.collective_runs() == profile.expected_collective_runs() > 0


def test_instructions_of_a_device_run_in_the_order_of_the_schedule(staged):
    _, _, profile = staged
    schedule, _ = simulated(profile.plan)
    for rank, instructions in enumerate(schedule.lists):
        order = [instruction_words(i) for i in instructions if i.op == "run"]
        for device in (2 * rank, 2 * rank + 1):
            starts = {}
            for o in profile.by_device[device]:
                starts.setdefault(o.instruction, o.start_s)
            shown = sorted((name for name in starts if name in order), key=starts.__getitem__)
            assert shown == order


def test_times_of_a_pipeline(staged):
    profile = staged[2]
    by_name = {row.what: row for row in profile.kinds()}
    names = ["forward, stage 0", "backward, stage 0", "once per step, stage 0", "first loop, rank 0", "idle, rank 0"]
    assert [*by_name][:5] == names
    predicted = sum(by_name[name].predicted_s for name in names)
    assert predicted == pytest.approx(profile.plan.step_time_s)
    assert all(row.measured_s > 0 for row in by_name.values())
    assert "stage and pass" in str(profile)


@pytest.mark.parametrize("which", ["one_mesh", "staged"])
def test_both_timelines_are_in_one_file(which, request, tmp_path):
    profile = request.getfixturevalue(which)[2]
    profile.trace(tmp_path / "both.json")
    trace = json.loads((tmp_path / "both.json").read_text())
    assert_well_formed(trace)
    events = spans(trace["traceEvents"])
    predicted = [e for e in events if not e["args"].get("measured")]
    assert max(e["ts"] + e["dur"] for e in predicted) == pytest.approx(profile.plan.step_time_s * 1e6)
    assert trace["otherData"]["measured_step_time_s"] == profile.step_time_s
    took_time = [o for o in profile.median_step if o.seconds > 0]
    of_devices = [e for e in events if e["args"].get("program")]
    assert len(of_devices) == len(took_time)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {f"device {i}, measured" for i in range(4)} <= names
    if which == "staged":
        rows = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 0]
        assert {"passes", "measured passes"} <= {*rows}
        shown = {e["name"] for e in events if e["pid"] == 0}
        assert "forward, stage 0, microbatch 1" in shown


def test_methods_have_profiles():
    class Scaler:
        @autopar.parallelize(mesh=(4,))
        def step(self, w, x):
            return w - jax.grad(lambda w: (x @ w).sum())(w)

    w, x = jnp.ones((8, 4)), jnp.ones((16, 8))
    profile = Scaler().step.profile(w, x, steps=3)
    assert len(profile.step_times_s) == 3
    assert profile.step_time_s == sorted(profile.step_times_s)[1]


def test_what_cannot_be_profiled(one_mesh, tmp_path):
    step, args, profile = one_mesh
    with pytest.raises(ArgumentError, match=r"^steps=0 must be an integer of at least 1$"):
        step.profile(*args, steps=0)
    with pytest.raises(ArgumentError, match=r"a call needs arrays"):
        step.profile(*jax.eval_shape(lambda: args), steps=1)
    jax.profiler.start_trace(str(tmp_path))
    try:
        with pytest.raises(ArgumentError, match=r"no profile can be taken: .*End the other profile first"):
            step.profile(*args)
    finally:
        jax.profiler.stop_trace()
    with pytest.raises(ArgumentError, match="the trace cannot be written to"):
        profile.trace(tmp_path / "nowhere" / "trace.json")


def test_lost_operations_are_told(one_mesh):
    profile = one_mesh[2]
    lost = autopar.Profile(
        profile.plan, "cpu", 4, profile.step_times_s, profile.operations[: len(profile.operations) // 3],
        profile.collectives,
    )  # fmt: skip
    assert "the profiler recorded" not in str(profile)
    assert re.search(r"the profiler recorded \d+ of \d+ collectives", str(lost))


def test_union():
    assert union([]) == 0
    assert union([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4


TPU = """
planes {
  name: "/device:TPU:3"
  lines { name: "XLA Modules" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 } }
  lines { name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 1000000 duration_ps: 2000000 }
    events { metadata_id: 3 offset_ps: 4000000 duration_ps: 500000 } }
  event_metadata { key: 1 value { id: 1 name: "jit_step(77)" } }
  event_metadata { key: 2 value { id: 2 name: "%fusion.4 = f32[8]{0} fusion(%p)" } }
  event_metadata { key: 3 value { id: 3 name: "all-reduce.1" } }
}
planes {
  name: "/device:GPU:1"
  lines { name: "Stream #1" timestamp_ns: 2000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 3000000
      stats { metadata_id: 1 str_value: "dot.2" } stats { metadata_id: 2 str_value: "jit_step" } } }
  event_metadata { key: 1 value { id: 1 name: "sm90_gemm" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
}
planes {
  name: "/host:CPU"
  lines { name: "python" timestamp_ns: 500 events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "autopar.profile" } }
}
"""


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_planes_of_tpu_and_gpu():
    recorded = recording.from_planes(jax.profiler.ProfileData.from_text_proto(TPU).planes)
    named = [(e.module, e.name, e.device, round(e.start_s * 1e9), round(e.seconds * 1e9)) for e in recorded.events]
    assert named == [
        ("jit_step", "dot.2", 1, 2000, 3000),
        ("jit_step", "fusion.4", 3, 2000, 2000),
        ("jit_step", "all-reduce.1", 3, 5000, 500),
    ]
    assert [(span.start_s, span.seconds) for span in recorded.calls] == [(pytest.approx(5e-7), pytest.approx(9e-6))]


TEXT = """HloModule jit_step, num_partitions=4

%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  %all-reduce.7 = f32[8]{0} all-reduce(%p), channel_id=9, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = f32[2]{0} slice(%all-reduce.7), slice={[0:2]}
}

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ag-start = (f32[2]{0}, f32[8]{0}) all-gather-start(%c), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %ag-done = f32[8]{0} all-gather-done(%ag-start)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]{0}) while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %scattered = f32[2]{0} fusion(%loop), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(f)/op3/dot"}
  ROOT %negate.1 = f32[2]{0} negate(%scattered), metadata={op_name="x" source_file="/home/a/model.py" source_line=7}
}
"""


def test_operations_of_a_program():
    operations = hlo.operations(TEXT)
    shown = {name: (o.kind, o.runs, o.calls, o.op, o.source) for name, o in operations.items()}
    assert shown["loop"] == ("", 0, True, "", "")
    assert shown["ag-start"] == ("all-gather", 5, False, "", "")
    assert shown["ag-done"] == ("all-gather", 0, False, "", "")
    assert shown["scattered"] == ("reduce-scatter", 1, False, "op3", "")
    assert shown["negate.1"] == ("", 0, False, "", "model.py:7")
