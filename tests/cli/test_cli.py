"""The command line: what stands on stdout and stderr, exit statuses, targets and options."""

from __future__ import annotations

import functools
import json
import re
import runpy
import sys

import pytest

from autopar import api, cli, zoo
from autopar.errors import ArgumentError
from autopar.plans.plan import Plan
from tests.support.effort import sample

EXAMPLE = """
import jax
import jax.numpy as jnp

def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

def example():
    return step, (jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32))

def nothing():
    return None

def needy(size):
    return None
"""


@pytest.fixture
def autopar(monkeypatch, capsys):
    """Run the command line; returns (exit status, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["autopar", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    model, path = zoo.build("mlp-toy"), tmp_path_factory.mktemp("plans") / "plan.json"
    api.plan(model.step, *model.abstract_args(), mesh=(2,)).save(path)
    return str(path)


@pytest.fixture
def example(tmp_path):
    path = tmp_path / "example_target.py"
    path.write_text(EXAMPLE)
    return path


def test_the_package_runs_as_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["autopar", "clusters"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("autopar", run_name="__main__")
    assert not ended.value.code
    assert "dgx-h100" in capsys.readouterr().out


def test_plan_prints_the_table(autopar):
    status, out, err = autopar("plan", "mlp-toy", "--mesh", "2,4")
    assert (status, err) == (0, "")
    assert out.startswith("Plan for 8 devices, mesh (x=2, y=4), on ")
    assert "state/params/blocks/*/w2 x2" in out
    assert "predicted step: " in out


def test_plan_as_json_is_the_saved_plan_and_nothing_else(autopar, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = autopar("plan", "mlp-toy", "--mesh", "4", "--json", "--no-cache", "--output", path)
    assert status == 0
    assert json.loads(out)["mesh_sizes"] == [4]
    assert Plan.load(path).to_json() == out.strip()
    assert str(path) in err


@pytest.mark.parametrize("solver", ["cbc", "auto"])
def test_solver_is_passed_on(autopar, solver):
    _, out, _ = autopar("plan", "mlp-toy", "--mesh", "2", "--solver", solver, "--json")
    assert (json.loads(out)["solver"] == "cbc") == (solver == "cbc")


def test_sizes_change_the_model(autopar):
    _, out, _ = autopar("plan", "gpt-toy", "--mesh", "2", "--layers", 1, "--batch", 4, "--seq", 12, "--json")
    plan = json.loads(out)
    assert plan["input_shapes"][plan["input_paths"].index("batch/tokens")] == [4, 12]
    assert not [path for path in plan["input_paths"] if "blocks/1" in path]


def test_attention_changes_the_kernel_of_the_model(autopar):
    _, out, _ = autopar("rules", "gpt-125m", "--layers", 1, "--batch", 4, "--attention", "cudnn")
    assert "dot_product_attention_fwd_wrapper(" in out
    assert "dot_product_attention_bwd_wrapper(" in out


def test_selective_scan_changes_the_kernel_of_the_model(autopar):
    _, out, _ = autopar("rules", "mamba-toy", "--selective-scan", "pallas")
    assert out.count("pallas_call(") == 2


@pytest.mark.parametrize(
    ("target", "attention", "message"),
    [
        ("gpt-125m", "flash", "attention='flash' of 'gpt-125m' is not known; use naive, dot_product, cudnn, splash"),
        ("mlp-toy", "cudnn", "'mlp-toy' takes no 'attention'"),
        ("train.py:example", "cudnn", "layers, batch, seq, attention and selective_scan change zoo models only"),
    ],
)
def test_an_attention_that_a_target_has_not_is_one_line(autopar, target, attention, message):
    status, out, err = autopar("plan", target, "--mesh", "2", "--attention", attention)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_cluster_and_hosts_give_the_mesh_its_prices(autopar):
    _, out, _ = autopar("plan", "mlp-toy", "--cluster", "dgx-h100", "--mesh", "4,8", "--json")
    assert json.loads(out)["mesh_sizes"] == [4, 8]
    status, _, err = autopar("plan", "mlp-toy", "--cluster", "dgx-h100", "--hosts", 2, "--mesh", "4,8")
    assert status == 2
    assert "multiply to 32" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "mlp-toi", "--mesh", "2"), "unknown zoo target 'mlp-toi'"),
        (("plan", "mlp-toy", "--mesh", "2,x"), "mesh '2,x': give sizes with commas between"),
        (("plan", "mlp-toy", "--mesh", "0"), "sizes must be at least 1"),
        (("plan", "mlp-toy", "--mesh", "3,3", "--cluster", "dgx-h100"), "8 devices (1 x 8). Sizes that fit: 8 or 2,4"),
        (("launch", "nowhere.py"), "autopar launch: nowhere.py is no file; give a Python script"),
        (("launch", "-n", "2", __file__), "autopar launch: -n is no option; autopar launch --help lists them"),
        (("launch", "--platform", "abacus", __file__), "platform='abacus' must be 'cpu' or 'gpu'"),
        (("plan", "mlp-toy", "--mesh", "2", "--hosts", "3"), "--hosts 3 needs --cluster"),
        (("plan", "mlp-toy", "--mesh", "2", "--cluster", "abacus"), "'abacus' not found. Known presets: cpu-host, "),
        (("plan", "mlp-toy", "--mesh", "2", "--solver", "abacus"), "solver='abacus' must be 'auto'"),
        (("plan", "mlp-toy", "--mesh", "2", "--memory-budget", "much"), "memory_budget='much' must be bytes"),
        (
            ("plan", "nowhere.py:example", "--mesh", "2"),
            "nowhere.py does not exist; a target is a zoo name or file.py:function",
        ),
        (("verify", "mlp-toy", "--mesh", "2", "--target", "abacus"), "target='abacus' is not known"),
        (("bench", "equal", "--dtypes", "float8"), "dtype 'float8' is not known. Available: float32, float64"),
        (("bench", "equal", "--cluster", "abacus"), "cluster 'abacus' is not known. Available: dear, local"),
        (("bench", "alpa", "--resume", "/"), "--resume '/' has no rows of a benchmark: [Errno 21] Is a directory"),
        (("plan", "mlp-toy", "--mesh", "2", "--no-cache", "--output", "/"), "the plan cannot be saved to"),
        (("plan", "mlp-toy", "--mesh", "2", "--batch", 10**20), "more than the 9.0e+15 bytes an array may have"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(autopar, arguments, message):
    status, out, err = autopar(*arguments, *(["--json"] if arguments[0] == "plan" else []))
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_wrong_usage_is_status_2(autopar):
    assert autopar("plan", "mlp-toy", "--bogus")[0] == 2
    assert autopar("plan")[0] == 2
    assert autopar("plan", "mlp-toy", "--cluster", "dgx-h100", "--hosts", 0)[0] == 2
    assert autopar("plan", "mlp-toy", "--mesh", 2, "--num-microbatches", 0)[0] == 2


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["autopar", "plan", "mlp-toi", "--mesh", "2", "--debug"])
    with pytest.raises(ArgumentError, match="unknown zoo target"):
        cli.main()


def test_a_file_is_a_target(autopar, example):
    status, out, _ = autopar("plan", f"{example}:example", "--mesh", "4", "--json")
    assert status == 0
    assert json.loads(out)["input_paths"] == ["w", "x"]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("missing", (), "has no function 'missing'; give one that it has, such as "),
        ("nothing", (), "nothing() of"),
        ("needy", (), "needy() fails: TypeError: needy() missing 1 required positional argument: 'size'"),
        ("example", ("--batch", "3"), "change zoo models only"),
    ],
)
def test_a_file_that_is_no_target(autopar, example, name, more, message):
    status, _, err = autopar("plan", f"{example}:{name}", "--mesh", "2", *more)
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [("import numpie\n", "ModuleNotFoundError: No module named 'numpie'"), ("def example(:\n", "SyntaxError: invalid")],
)
def test_a_file_that_cannot_be_imported(autopar, tmp_path, text, message):
    path = tmp_path / "broken_target.py"
    path.write_text(text)
    status, _, err = autopar("plan", f"{path}:example", "--mesh", "2")
    assert status == 2
    assert f"broken_target.py: importing it fails: {message}" in err
    assert "Traceback" not in err


def test_rules_name_each_distinct_operation_once(autopar):
    _, out, _ = autopar("rules", "mlp-toy")
    lines = [line for line in out.splitlines() if "dot_general(f32[8,32], f32[32,64])" in line]
    assert lines == ["     2  dot_general(f32[8,32], f32[32,64])  a b, b c -> a c | reduce b  [shardy]"]
    _, out, _ = autopar("rules", "mlp-toy", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert {"name", "operands", "rule", "origin", "count"} == set(rows[0])
    assert len(rows) == len({json.dumps([row["name"], row["operands"], row["rule"], i]) for i, row in enumerate(rows)})


@pytest.mark.parametrize("target", ["shardy", "cpu"])
def test_verify_compares_with_what_is_emitted(autopar, target):
    status, out, _ = autopar("verify", "mlp-toy", "--batch", 4096, "--mesh", "8", "--target", target, "--json")
    report = json.loads(out)
    assert (status, report["ok"], report["target"]) == (0, True, target)


def test_verify_compares_stages(autopar):
    options = ("--stages", 2, "--num-microbatches", 2, "--schedule", "gpipe")
    status, out, _ = autopar("verify", "mlp-toy", "--cluster", "p3.16xlarge", "--mesh", "8", *options, "--json")
    report = json.loads(out)
    assert (status, report["ok"], report["target"]) == (0, True, "shardy")


def test_verify_takes_a_saved_plan(autopar, tmp_path):
    path = tmp_path / "plan.json"
    autopar("plan", "mlp-toy", "--mesh", "2,4", "--output", path)
    status, out, _ = autopar("verify", "mlp-toy", "--plan", path)
    assert status == 0
    assert out.startswith("ok on shardy")
    status, _, err = autopar("verify", "mlp-toy", "--batch", 16, "--plan", path)
    assert status == 1
    assert "the plan was made for other arguments" in err


def test_plan_shows_a_saved_plan_with_its_step_and_without(autopar, plan_file):
    status, alone, _ = autopar("plan", plan_file)
    assert (status, alone.splitlines()[0]) == (0, "Plan for 2 devices, mesh (x=2), on dgx-h100")
    status, out, _ = autopar("plan", "mlp-toy", "--plan", plan_file)
    assert (status, out.splitlines()[0]) == (0, alone.splitlines()[0])
    assert "largest activations" in out
    assert "largest activations" not in alone
    status, _, err = autopar("plan", plan_file, "--hints")
    assert (status, "hints needs the step" in err) == (2, True)
    status, _, err = autopar("verify", plan_file)
    assert (status, "has the plan and not its step" in err) == (2, True)


def test_verify_takes_the_pins_of_a_plan(autopar):
    pinned = ("verify", "mlp-toy", "--mesh", "2", "--pin", "batch=x", "--json")
    status, out, _ = autopar(*pinned)
    assert (status, json.loads(out)["predicted_wire_bytes"] > 0) == (0, True)


def test_clusters_lists_the_presets(autopar):
    _, out, _ = autopar("clusters")
    for name in ("cpu-host", "dgx-h100", "p3.16xlarge", "tpu-v6e"):
        assert f"\n{name} " in out
    _, out, _ = autopar("clusters", "--json")
    rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
    assert rows["dgx-h100"]["devices_per_host"] == 8
    assert len(rows) == 10


def test_bench_collectives_prints_a_table_or_json(autopar, tmp_path):
    status, out, err = autopar("bench", "collectives", "--workers", 4)
    assert (status, err) == (0, "")
    assert "halving-doubling" in out
    path = tmp_path / "times.png"
    _, out, err = autopar(
        "bench", "collectives", "--workers", 4, "--bytes", "8,800", "--kind", "broadcast", "--json", "--plot", path
    )
    assert [row["algorithm"] for row in json.loads(out)["rows"]] == ["mst", "ring"]
    assert path.exists()
    assert err == f"saved to {path}\n"


def test_measurements_as_json_keep_their_rows(autopar, monkeypatch):
    rows = [{"model": "one", "error": 0.05}, {"model": "two", "error": -0.01}]
    monkeypatch.setattr("autopar.bench.predictions.run.run", lambda *arguments: rows)
    status, out, _ = autopar("bench", "predictions", "--json")
    printed = json.loads(out)
    assert (status, printed["rows"], printed["worst"]) == (0, rows, 0.05)


# Questions about a plan


def test_explain_prints_layouts_and_their_prices(autopar):
    status, out, err = autopar("explain", "mlp-toy", "params/blocks/*/w1", "--mesh", "2,4")
    assert (status, err) == (0, "")
    assert out.startswith("state/params/blocks/")
    assert "a device" in out
    assert "at least" in out
    status, out, _ = autopar("explain", "mlp-toy", "params/blocks/*/w1", "--mesh", "2,4", "--exact", "--json")
    layouts = json.loads(out)["entries"][0]["layouts"]
    assert status == 0
    assert sum(layout["chosen"] for layout in layouts) == 1
    assert all(layout["exact_s"] >= layout["at_least_s"] * (1 - 1e-9) for layout in layouts)


def test_an_unknown_name_is_one_line(autopar):
    status, out, err = autopar("explain", "mlp-toy", "params/bloks/0/w1", "--mesh", "2,4")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "'params/blocks/0/w1'" in err


def test_saved_plans_side_by_side(autopar, tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    autopar("plan", "mlp-toy", "--mesh", "2,4", "--output", before)
    status, out, _ = autopar("what-if", "mlp-toy", "--mesh", "2,4", "--pin", "*/w1=x", "--output", after)
    assert status == 0
    assert "P('x')" in out
    status, again, _ = autopar("diff", before, after)
    assert (status, again) == (0, out)
    status, out, _ = autopar("explain", "mlp-toy", "*/w1", "--plan", after, "--mesh", "2,4")
    assert status == 0
    assert "(planned)" in out


def test_pins_and_strategies(autopar):
    status, out, _ = autopar("plan", "mlp-toy", "--mesh", "8", "--pins", "fsdp:x", "--pin", "params/*/b1=")
    assert status == 0
    assert "weights sharded over x (FSDP, ZeRO-3)" in out
    assert re.search(r"state/params/blocks/\*/b1 x2 +f32\[64\] +P\(\) ", out)
    status, out, _ = autopar(
        "explain", "mlp-toy", "*/w1", "--mesh", "2,4", "--pin", "params=,x+y", "--pin", "params/*/b?="
    )
    assert (status, "fixed by the pin 'params'" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pins", "fsdp"), "give a strategy and its axis, as in fsdp:x. Known: megatron, fsdp, zero1, data_parallel"),
        (("--pins", "fsdp:data"), "axis 'data' not found. Mesh axes: x"),
        (("--pin", "params"), "give a name and a value"),
    ],
)
def test_a_wrong_pin_is_one_line(autopar, arguments, message):
    status, out, err = autopar("plan", "mlp-toy", "--mesh", "8", *arguments)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give what changes"),
        (("--set", "memory_budget"), "give a name and a value"),
        (("--set", "speed=9"), "--set speed=: not known. Available: cluster, gap, memory_budget"),
        (("--set", "gap=small"), "give a number"),
        (("--pin", "*/w1"), "give a name and a value, such as 'params/*/wq=x,None'"),
        (("--pin", "*/w9=x"), "pin '*/w9' matches no argument"),
    ],
)
def test_what_if_says_what_would_be_right(autopar, arguments, message):
    status, out, err = autopar("what-if", "mlp-toy", "--mesh", "2,4", *arguments)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


def test_what_if_takes_options(autopar):
    changes = ("--set", "mesh=8", "--set", "num_microbatches=2", "--set", "stages=1")
    status, out, _ = autopar("what-if", "mlp-toy", "--mesh", "2,4", *changes, "--json")
    assert status == 0
    assert json.loads(out)["mesh"] == ["x=2, y=4", "x=8"]
    assert json.loads(out)["microbatches"] == ["1", "2"]


class AtOnce:
    """A timer whose time is up when it starts."""

    def __init__(self, seconds, done):
        self.done = done

    def start(self):
        self.done()

    def cancel(self):
        pass


TAKE_LONG = [
    (("explain", "mlp-toy", "params/blocks/0/w1", "--mesh", "2"), "autopar: explain: bounds of 3 layouts"),
    (("explain", "mlp-toy", "batch/x", "--mesh", "2", "--exact"), "solving again, layout 2 of 3"),
    (("diff", "PLAN", "PLAN"), "autopar: diff: reading PLAN and PLAN"),
    (("what-if", "mlp-toy", "--mesh", "2", "--set", "remat=full"), "autopar: step: "),
    (("trace", "PLAN", "OUT"), "autopar: trace: writing OUT"),
    (("report", "PLAN", "OUT"), "autopar: report: writing OUT"),
    (("verify", "mlp-toy", "--mesh", "2"), "autopar: verify: compiling for shardy"),
    (("profile", "mlp-toy", "--mesh", "2", "--steps", "1"), "planning, compiling, measuring steps: 1"),
]


@pytest.mark.parametrize(("command", "said"), sample(TAKE_LONG, TAKE_LONG[1:7:2]))
def test_what_takes_long_is_said_in_a_terminal_and_nowhere_else(
    autopar, monkeypatch, plan_file, tmp_path, command, said
):
    names = {"PLAN": plan_file, "OUT": str(tmp_path / "written")}

    def named(text):
        return functools.reduce(lambda text, name: text.replace(name, names[name]), names, text)

    line = named(said)
    arguments = ("--debug", *map(named, command))
    status, out, err = autopar(*arguments)
    assert (status, line in err) == (0, False)
    monkeypatch.setattr("autopar.progress.threading.Timer", AtOnce)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, shown, err = autopar(*arguments)
    assert (status, line in err) == (0, True)
    if command[0] != "profile":  # whose times differ
        assert shown == out


def test_hints_follow_the_summary(autopar, example):
    status, out, _ = autopar("plan", "mlp-toy", "--mesh", "2", "--hints")
    assert status == 0
    assert out.splitlines()[-1].startswith("faster: twice the batch: ")
    example.write_text(EXAMPLE.replace("    return w", "    assert len(x) == 64\n    return w"))
    status, out, _ = autopar("plan", f"{example}:example", "--mesh", "2", "--hints")
    assert (status, out.splitlines()[-1]) == (0, "no other option is faster")
    slow = ("--mesh", "8", "--pin", "batch=None,None", "--hints")
    status, out, _ = autopar("plan", "mlp-toy", "--batch", "65536", *slow)
    assert status == 0
    assert any(line.startswith("faster: no pins: ") for line in out.splitlines())


def test_report_writes_a_page(autopar, tmp_path):
    plan, page, again = (tmp_path / name for name in ("plan.json", "plan.html", "again.html"))
    assert autopar("plan", "mlp-toy", "--mesh", "2", "--output", plan)[0] == 0
    status, out, err = autopar("report", "mlp-toy", page, "--mesh", "2")
    assert (status, out) == (0, "")
    assert re.fullmatch(rf"[\d.]+ [mun]s per step, written to {re.escape(str(page))}\n", err)
    status, out, err = autopar("report", plan, again, "--json")
    assert (status, err, json.loads(out)["stages"]) == (0, "", 1)
    title = "<title>Plan for 2 devices of dgx-h100, mesh (x=2)</title>"
    assert title in page.read_text()
    assert title in again.read_text()
    status, _, err = autopar("what-if", plan, "--set", "mesh=4")
    assert status == 2
    assert "give the step, and the plan as --plan" in err


def test_trace_writes_a_timeline(autopar, tmp_path):
    plan, direct, saved = (tmp_path / name for name in ("plan.json", "direct.trace", "saved.trace"))
    autopar("plan", "mlp-toy", "--mesh", "2", "--stages", "2", "--output", plan)
    status, out, err = autopar("trace", "mlp-toy", direct, "--mesh", "2", "--stages", "2")
    assert (status, out) == (0, "")
    assert "2 stages" in err
    status, out, err = autopar("trace", plan, saved, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["written_to"] == str(saved)
    assert json.loads(direct.read_text()) == json.loads(saved.read_text())


def test_profile_measures_on_this_machine(autopar, tmp_path):
    both = tmp_path / "both.trace"
    status, out, err = autopar("profile", "mlp-toy", "--mesh", "2", "--steps", "1", "--output", both)
    assert (status, err) == (0, f"written to {both}\n")
    assert re.match(r"\S+ \S+ per step on 2 cpu devices, .* predicted; median of 1, ", out)
    assert re.search(r"^communication +\S+ \S+ +\S+ \S+ ", out, re.M)
    names = [e["args"]["name"] for e in json.loads(both.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert names == ["each of 2 devices", "device 0, measured", "device 1, measured"]
    status, out, _ = autopar("profile", "mlp-toy", "--mesh", "2", "--stages", "2", "--steps", "2", "--json")
    data = json.loads(out)
    assert (status, data["devices"], len(data["step_times_s"])) == (0, 2, 2)
    assert [row["what"] for row in data["kinds"]][:2] == ["forward, stage 0", "backward, stage 0"]
    status, _, err = autopar("profile", "plan.json")
    assert (status, err.count("\n")) == (2, 1)
    assert "has the plan and not its step" in err


def test_the_version(autopar):
    status, out, err = autopar("--version")
    assert (status, err) == (0, "")
    assert out.startswith("autopar ")
    assert "jax-" in out


def test_a_file_without_a_function_lists_its_functions(autopar, example):
    status, out, err = autopar("plan", example)
    assert (status, out) == (2, "")
    assert f"such as {example}:example or {example}:nothing" in err
    assert "needy" not in err
    assert "step" not in err.replace(str(example), "")
