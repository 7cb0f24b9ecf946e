"""Every example runs at toy size and says so itself in its last lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from autopar.bench.equal.run import quick_flags

pytestmark = pytest.mark.core

EXAMPLES = Path(__file__).parents[2] / "examples"

LEARNT = r"loss of the last steps \d\.\d\d nats, unigram entropy \d\.\d\d: ok"
EQUAL = r"3 parallel steps equal the single-device run: loss within \d\.\de[-+]\d\d \(allowed 1e-05\): ok"

#: Example -> patterns of its last lines.
LAST_LINES = {
    "finetune_lora": (
        r"held-out loss on English \d\.\d\d nats, \d\.\d\d before fine-tuning: ok",
        r"devices sum \d+ kB a step; the base's gradients are 532 kB: ok",
        EQUAL,
    ),
    "pipelined_inference": (
        r"4 layers in 4 stages: a device stores at most 2\d% of the weights: ok",
        r"the pipeline equals the single-device run: probabilities within \S+ of the largest \(allowed 1e-05\): ok",
    ),
    "train_digits": (r"accuracy on 360 held-out images 9\d\.\d% \(needed 95%\): ok", EQUAL),
    "train_llama_nnx": (LEARNT, EQUAL),
    "train_moe_equinox": (
        LEARNT,
        r"the busiest expert gets \d\.\d times an even share of the tokens: ok",
        EQUAL,
    ),
}


def test_every_example_is_tested_here() -> None:
    names = ["train_gpt", "train_in_processes", *LAST_LINES]
    assert [path.stem for path in sorted(EXAMPLES.glob("*.py"))] == sorted(names)


@pytest.mark.parametrize("name", LAST_LINES)
def test_example_passes_its_own_checks(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module(f"examples.{name}").main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(("Plan for 8 devices, mesh ", "base: loss "))
    for line, pattern in zip(lines[-len(LAST_LINES[name]) :], LAST_LINES[name], strict=True):
        assert re.fullmatch(pattern, line), line


def test_training_in_processes_passes_its_own_checks() -> None:
    command = [sys.executable, str(EXAMPLES / "train_in_processes.py")]
    env = {**os.environ, "XLA_FLAGS": quick_flags(), "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    fell, equal = done.stdout.splitlines()[-2:]
    assert re.fullmatch(r"the loss fell from \d\.\d{3} to \d\.\d{3} in 30 steps: ok", fell)
    assert equal.startswith("2 processes, 3 parallel steps equal the single-device run: ")
    assert equal.endswith(": ok")


def test_pipelined_inference_reports_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = import_module("examples.pipelined_inference")
    monkeypatch.setattr(example, "TOLERANCE", -1.0)
    assert example.main() == 1
    stored, equality = capsys.readouterr().out.splitlines()[-2:]
    assert stored.endswith(": ok")
    assert equality.startswith("the pipeline equals")
    assert equality.endswith(": FAILED")


def test_train_gpt_learns_and_equals_the_single_device_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module("examples.train_gpt").main(["toy"]) == 0
    learning, equality = capsys.readouterr().out.splitlines()[-2:]
    assert learning.startswith("held-out loss ")
    assert learning.endswith("(needed 0.50): ok")
    assert equality.startswith("3 parallel steps equal the single-device run: ")
    assert equality.endswith(": ok")


def test_train_gpt_reports_failure() -> None:
    example = import_module("examples.train_gpt")
    learnt, line = example.report_learning(loss=2.9, entropy=3.2)
    assert not learnt
    assert line == "held-out loss 2.90 nats, 0.30 below the unigram entropy 3.20 (needed 0.50): FAILED"
    ones, other = example.np.ones(3), example.np.array([1.0, 1.0, 0.9])
    equal, line = example.report_equality(example.Snapshot([1.0], ones), example.Snapshot([1.0], other))
    assert not equal
    assert "parameters within 1.0e-01 of their largest entry" in line
