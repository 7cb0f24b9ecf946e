"""Steps in several processes compute what one device computes, and all processes agree on what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.bench.equal.run import quick_flags
from autopar.bench.processes import deaths as measured_deaths
from autopar.cli.launch import Launch, run

SCRIPT = Path(__file__).parent / "launched_steps.py"


def launched(processes: int, devices: int, *arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """`autopar launch` of a script."""
    counts = ["--processes", str(processes), "--devices-per-process", str(devices)]
    command = [sys.executable, "-m", "autopar.cli", "launch", *counts, str(script), *arguments]
    env = {**os.environ, "XLA_FLAGS": quick_flags(), "AUTOPAR_CACHE_DIR": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


def rows(done: subprocess.CompletedProcess[str], status: int = 0) -> Mapping[str, Mapping[str, Any]]:
    """Case -> what process 0 printed."""
    assert done.returncode == status, done.stderr[-3000:]
    printed = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    return {row["case"]: row for row in printed}


EQUAL = ("one mesh", "1f1b", "tied", "two stages each", "parts", "prefetched")
REFUSED = ("batch differs", "pin", "functions", "nan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def launch_of_two(folder: Path) -> subprocess.CompletedProcess[str]:
    """Two processes of two devices: a stage, or two, in each; in the last case process 1 is killed."""
    return launched(2, 2, *EQUAL, *REFUSED, "forty", f"checkpoint={folder}", "death")


@pytest.fixture(scope="module")
def two_processes(launch_of_two: subprocess.CompletedProcess[str]) -> Mapping[str, Mapping[str, Any]]:
    """The rows of that launch."""
    return rows(launch_of_two, status=128 + signal.SIGKILL)


@pytest.mark.parametrize("case", EQUAL)
def test_steps_of_two_processes_are_those_of_one_device(
    two_processes: Mapping[str, Mapping[str, Any]], case: str
) -> None:
    row = two_processes[case]
    assert row["loss"] <= 1e-9
    assert row["state"] <= 1e-9
    assert not row.get("wrong")


def test_a_note_says_what_moves_arrays_between_processes(
    two_processes: Mapping[str, Mapping[str, Any]],
) -> None:
    assert two_processes["1f1b"]["transport"]
    assert not two_processes["one mesh"]["transport"]


def test_a_pipeline_s_checkpoint_is_restored_onto_one_mesh_and_in_one_process(
    two_processes: Mapping[str, Mapping[str, Any]], folder: Path
) -> None:
    row = two_processes["checkpoint"]
    assert row["loss"] <= 1e-9
    assert row["names"] == [path.name for path in sorted(folder.iterdir())] == ["000000", "000001", "000002"]
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(None, "x"))
    with jax.enable_x64(True):
        like = {"w": jax.ShapeDtypeStruct((2, 8, 8), np.float64, sharding=sharding), "count": np.int64(0)}
        restored = autopar.restore_checkpoint(folder, like)
        assert restored["w"].sharding == sharding
        assert np.asarray(restored["w"]).tolist() == row["w"]
    assert restored["count"] == 4


def test_steps_leave_no_arrays_behind(two_processes: Mapping[str, Mapping[str, Any]]) -> None:
    row = two_processes["forty"]
    assert len(row["live"]) == 2
    for after_ten, after_forty in row["live"]:
        assert after_ten == after_forty
    assert row["loss"] <= 1e-12


def test_a_stage_may_span_two_processes() -> None:
    row = rows(launched(4, 1, "spanning"))["spanning"]
    assert (row["stages"], row["wrong"]) == (2, [])
    assert row["state"] <= 1e-9


def test_a_batch_that_differs_between_processes_is_refused_in_all(
    two_processes: Mapping[str, Mapping[str, Any]],
) -> None:
    first, second = two_processes["batch differs"]["errors"]
    assert first == second
    assert "argument 'x' of process 1 differs from that of process 0" in first
    assert "make_array_from_process_local_data" in first


def test_an_error_of_planning_is_raised_in_all_processes(two_processes: Mapping[str, Mapping[str, Any]]) -> None:
    first, second = two_processes["pin"]["errors"]
    assert first == second
    assert first.startswith("PinError: ")


def test_processes_that_plan_different_functions_are_told_so(two_processes: Mapping[str, Mapping[str, Any]]) -> None:
    first, second = two_processes["functions"]["errors"]
    assert first == second
    assert "process 1 differs: the program of '<lambda>' there" in first


def test_all_processes_name_the_line_that_made_a_nan(two_processes: Mapping[str, Mapping[str, Any]]) -> None:
    first, second = two_processes["nan"]["errors"]
    assert first == second
    assert re.fullmatch(r"NanError: \w+ at launched_steps\.py:\d+ gives NaN: an operand is infinite", first)


def test_a_process_that_dies_is_named_by_the_others_and_by_the_exit_status(
    launch_of_two: subprocess.CompletedProcess[str],
) -> None:
    done = launch_of_two
    assert done.returncode == 128 + signal.SIGKILL
    assert "ProcessError: the step cannot go on: process 1 of 2 does not answer" in done.stderr
    assert "autopar launch: process 1 of 2 was ended by SIGKILL" in done.stderr


@pytest.fixture(scope="module")
def deaths() -> Sequence[Mapping[str, Any]]:
    """Process 1 of two is killed while steps run, then process 0; soon, for steps run at full speed until then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_deaths, "MOMENTS", {"steps": (0.0, 0.5)})
        return measured_deaths.run(measured_deaths.Deaths(rounds=2, phases=("steps",)))


def test_the_others_end_with_a_named_error_when_a_process_is_killed(deaths: Sequence[Mapping[str, Any]]) -> None:
    assert [row["victim"] for row in deaths] == [1, 0]
    assert all(row["ok"] for row in deaths), [measured_deaths.line(row) for row in deaths]


def test_a_process_that_has_named_another_does_not_wait_for_it_at_its_end(deaths: Sequence[Mapping[str, Any]]) -> None:
    (first,) = deaths[0]["survivors"]
    assert first["status"] == 1, "JAX ends a process that waits with SIGABRT"
    assert "ProcessError: the step cannot go on: process 1 of 2 does not answer" in first["said"]


def test_the_last_line_of_process_0_comes_last_and_the_exit_status_is_that_of_the_first_that_failed(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, jax\n"
        "jax.distributed.initialize()\n"
        "print('first of', jax.process_index(), sys.argv[1:], jax.device_count())\n"
        "time.sleep(2.0 * jax.process_index())\n"
        "print('last of', jax.process_index())\n"
        "sys.exit(3 * jax.process_index())\n"
    )
    done = launched(2, 3, "--own", script=script)
    assert done.returncode == 3
    lines = [line for line in done.stdout.splitlines() if " of " in line]
    assert sorted(lines[:-1]) == ["first of 0 ['--own'] 6", "first of 1 ['--own'] 6", "last of 1"]
    assert lines[-1] == "last of 0"


def test_a_process_whose_script_raises_ends_at_once_though_the_others_do_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, time\n"
        "if jax.process_index() == 1:\n"
        "    raise ValueError('no data')\n"
        "time.sleep(100)\n"
        "print('waited for')\n"
    )
    assert run(Launch(str(script), (), 2, 1, grace=0.5)) == 1
    printed = capfd.readouterr()
    assert "ValueError: no data" in printed.err
    assert printed.err.splitlines()[-1] == "autopar launch: process 1 of 2 failed with status 1"
    assert "waited for" not in printed.out


def test_what_a_script_leaves_running_does_not_keep_the_launch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print(left.pid)\n"
    )
    assert run(Launch(str(script), (), 1, 1)) == 0
    os.kill(int(capfd.readouterr().out), signal.SIGKILL)  # it runs still


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_launch_with_all_processes(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "print('ready', os.getpid())\n"
        "print('the last line is kept back', flush=True)\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-m", "autopar.cli", "launch", "--processes", "1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline().removeprefix("ready "))
        started.send_signal(number)
        _, err = started.communicate(timeout=60)
    assert started.returncode == 128 + number
    assert f"autopar launch: {number.name} is passed on to 1 of 1 processes" in err
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_planning_may_be_the_first_that_a_script_does_with_jax(tmp_path: Path) -> None:
    """Before a backend is initialized; strategies among the pins are expanded in every process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, numpy as np, autopar\n"
        "def train_step(w, x):\n"
        "    loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)\n"
        "    return w - 0.1 * gradient, loss\n"
        "step = autopar.parallelize(train_step, mesh={'data': 2}, pins=autopar.pins.fsdp('data'))\n"
        "_, loss = step(np.ones((4, 4), np.float32), np.ones((8, 4), np.float32))\n"
        "print(float(loss))\n"
    )
    done = launched(2, 1, script=script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "16.0"
