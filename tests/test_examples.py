"""Every example runs at toy size and says so itself in its last lines."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_every_example_is_tested_here() -> None:
    assert [path.stem for path in sorted(EXAMPLES.glob("*.py"))] == ["train_gpt"]


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
