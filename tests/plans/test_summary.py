"""The plan's table: groups, reasons, collectives, figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.ir.collective import Collective
from autopar.ir.text import WIDTH, seconds, size
from autopar.ir.trace import trace
from autopar.plans.plan import from_json
from autopar.plans.views.reasons import Reasons, layout_text
from autopar.plans.views.summary import (
    ACTIVATIONS,
    COLLECTIVES,
    activation_rows,
    argument_rows,
    collective_rows,
    sections,
    stage_rows,
)


@pytest.fixture(scope="module")
def mlp():
    return zoo.build("mlp-toy")


@pytest.fixture(scope="module")
def base(mlp):
    """A plan on (2, 4) whose layouts and collectives the tests replace."""
    return autopar.plan(mlp.step, *mlp.abstract_args(), mesh=(2, 4))


def with_layouts(plan, layouts):
    """The plan with other layouts of arguments, everything else whole."""
    whole = (-1,) * len(plan.mesh_sizes)
    return replace(plan, inputs=tuple(layouts.get(path, whole) for path in plan.input_paths), collectives=())


def rows(plan, title, reasons=None):
    return {row[0]: row[1:] for row in argument_rows(plan, sections(plan)[title], reasons)}


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (0, "73.2 GB of memory per device"),
        (77e9, "73.2 of 77 GB of memory per device"),
        (1.5e12, "73.2 GB of 1.5 TB of memory per device"),
        (73e9, "73.2 of 73 GB of memory per device, 200 MB too much"),
    ],
)
def test_the_header_says_memory_beside_its_limit(base, limit, text):
    (stage,) = base.stages
    stages = (replace(stage, peak_memory_bytes=int(73.2e9)),)
    header = replace(base, stages=stages, memory_limit_bytes=int(limit)).summary().splitlines()
    (line,) = [line for line in header if "of memory per device" in line]
    assert line.endswith(f"of the peak FLOP/s, {text}")


def test_stages_of_one_rank_share_the_limit_of_its_memory(base):
    sizes = {"stage 0": (0, 40), "stage 1": (1, 70), "stage 2": (0, 50)}  # rank, GB
    stages = [replace(base.stages[0], name=name, rank=rank, layers=(0, 1), peak_memory_bytes=gb * 10**9)
              for name, (rank, gb) in sizes.items()]  # fmt: skip
    plan = replace(base, stages=tuple(stages), schedule="1f1b", memory_limit_bytes=80 * 10**9)
    assert {row[0]: row[-1] for row in stage_rows(plan)} == {
        "stage 0": "40 GB, 10 GB too much",
        "stage 1": "70 GB",
        "stage 2": "50 GB, 10 GB too much",
    }


@pytest.mark.parametrize(
    ("layout", "shape", "text"),
    [
        ((0, 1), (8, 8), "dim 0 over x, dim 1 over y: 1/8 a device"),
        ((1, 1), (8, 8), "dim 1 over x+y: 1/8 a device"),
        ((-1, 0), (6, 8), "dim 0 over y (padded by 2): 1/4 a device"),
        ((-1, -1), (8, 8), "whole on every device"),
        ((-1, -1), (3, 5), "whole: no dimension divides by x=2, y=4"),
        ((-1, -1), (), "whole on every device"),
    ],
)
def test_a_layout_says_what_it_does(base, layout, shape, text):
    assert layout_text(layout, shape, base) == text


def test_equal_layers_share_a_row_and_others_do_not(base):
    plan = with_layouts(base, {"state/params/blocks/0/w1": (0, -1), "state/params/blocks/1/w1": (1, -1)})
    table = rows(plan, "parameters and other state")
    assert table["state/params/blocks/*/b1 x2"] == ("f32[64]", "P()", "whole on every device")
    assert table["state/params/blocks/0/w1"] == ("f32[32,64]", "P('x')", "dim 0 over x: 1/2 a device")
    assert table["state/params/blocks/1/w1"] == ("f32[32,64]", "P(None, 'x')", "dim 1 over x: 1/2 a device")


def test_moments_that_follow_their_parameters_are_one_row(base):
    cut = {f"state/{tree}/blocks/{i}/w1": (0, 1) for tree in ("params", "opt/0/mu", "opt/0/nu") for i in (0, 1)}
    table = rows(with_layouts(base, {**cut, "state/opt/0/nu/blocks/0/w1": (-1, 0)}), "optimizer state")
    assert table["state/opt/0/mu/... x8"][-1] == "lies as the parameter does"
    assert table["state/opt/0/nu/... x7"][-1] == "lies as the parameter does"
    assert table["state/opt/0/nu/blocks/0/w1"] == ("f32[32,64]", "P('y')", "dim 0 over y: 1/4 a device")
    assert table["state/opt/0/count"][0] == "i32[]"


def test_every_argument_is_in_one_section(base):
    members = [i for group in sections(base).values() for i in group]
    assert sorted(members) == list(range(len(base.input_paths)))
    assert [base.input_paths[i] for i in sections(base)["other arguments"]] == ["batch/x", "batch/y"]


@pytest.mark.parametrize(
    ("params", "name", "why"),
    [
        (P(), "b1", ["whole on every device", "gradient all-reduce over x (nn.py:"]),
        (
            P("x"),
            "w1",
            ["dim 0 over x: 1/8 a device", "all-gather over x (nn.py:", "gradient reduce-scatter over x (nn.py:"],
        ),
    ],
    ids=["whole", "cut"],
)
def test_reasons_name_what_a_parameter_costs(params, name, why):
    model = zoo.build("mlp-toy", batch=4096)
    pins = {"state/params/*": params, "state/opt/0/?u/*": params, "batch/*": P("x")}
    args = model.abstract_args()
    plan = autopar.plan(model.step, *args, mesh=(8,), cluster=dear((8,)), pins=pins)
    table = rows(plan, "parameters and other state", Reasons(plan, trace(model.step, *args).graph))
    text = table[f"state/params/blocks/*/{name} x2"][-1].split("; ")
    assert [part[: len(start)] for part, start in zip(text, why, strict=True)] == why


def test_a_parameter_read_in_a_loop_names_the_line_in_it():
    model = zoo.build("mlp-toy-scan")
    args = model.abstract_args()
    plan = autopar.plan(model.step, *args, mesh=(8,), cluster=dear((8,)))
    graph = trace(model.step, *args).graph
    (scan,) = [op for op in graph.ops if op.name == "scan" and op.phase == "forward"]
    inner = next(op for op in scan.regions[0].ops if op.name == "dot_general")
    moved = Collective("all-gather", ("x",), 64, 4, f"{inner.tag}.in1", inner.source)
    reasons = Reasons(replace(plan, collectives=(moved,)), graph)
    texts = [reasons.argument(i) for i, path in enumerate(plan.input_paths) if path.startswith("state/params/")]
    assert sum(f"all-gather over x ({inner.source})" in text for text in texts) == 1


def test_collectives_are_grouped_and_the_largest_come_first(base):
    pieces = [
        Collective("all-reduce", ("x",), 100, 1, "op1", "a.py:1"),
        Collective("all-reduce", ("x",), 300, 2, "op2", "a.py:1"),
        Collective("all-gather", ("x", "y"), 8000, 1, "op3.in0", "b.py:2"),
        Collective("all-gather", ("x",), 10, 1, "out0", ""),
    ]
    table = collective_rows(replace(base, collectives=tuple(pieces)))
    assert table == [
        ("all-gather", "x+y", "1", "7 kB", "b.py:2"),
        ("all-reduce", "x", "3", "700 B", "a.py:1"),
        ("all-gather", "x", "1", "5 B", f"result {base.output_paths[0]}"),
    ]


def test_many_groups_of_collectives_end_in_a_count(base):
    pieces = tuple(Collective("all-reduce", ("x",), 1000, 1, "op1", f"a.py:{i}") for i in range(COLLECTIVES + 3))
    table = collective_rows(replace(base, collectives=pieces))
    assert len(table) == COLLECTIVES + 1
    assert table[-1] == ("3 more groups", "", "3", "3 kB", "")


def test_the_largest_activations_come_first(mlp):
    args = mlp.abstract_args()
    plan = autopar.plan(mlp.step, *args, mesh=(8,), cluster=dear((8,)))
    table = activation_rows(plan, Reasons(plan, trace(mlp.step, *args).graph))
    assert 1 < len(table) <= ACTIVATIONS
    assert table[0][0].startswith("dot_general nn.py:")
    assert table[0][1] in ("f32[8,64]", "f32[8,32]", "f32[32,64]", "f32[64,32]")
    assert " a device" in table[0][-1]


def test_the_text_is_plain_and_the_same_for_a_plan_from_disk(mlp, base):
    graph = trace(mlp.step, *mlp.abstract_args()).graph
    text = base.summary(graph)
    assert from_json(json.loads(base.to_json())).summary(graph) == text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert f"solver: {base.solver_status}, gap 0" in text
    assert f"predicted step: {seconds(base.step_time_s)} (operations " in text


def test_notes_and_status_are_told(base):
    text = replace(base, solver_status="time-limit", gap=0.02, notes=("fft runs replicated",)).summary()
    assert "solver: time-limit, gap 0.02 (best plan found within the time limit)" in text
    assert text.endswith("note: fft runs replicated")


def test_units():
    assert [size(n) for n in (0, 999, 1000, 2.5e6, 3.21e9)] == ["0 B", "999 B", "1 kB", "2.5 MB", "3.21 GB"]
    assert [seconds(t) for t in (0.0, 2e-9, 3e-5, 0.0421, 2.0)] == ["0 s", "2 ns", "30 us", "42.1 ms", "2 s"]
