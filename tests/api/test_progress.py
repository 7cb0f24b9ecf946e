"""Words about planning: when they are said, and to whom."""

from __future__ import annotations

import sys
import time

import pytest

from autopar import progress
from autopar.progress import reporting


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def test_asked_for_everything_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting("step", True) as tell:
        tell("tracing")
        assert said(capsys) == ["autopar: step: tracing"]


def test_nobody_is_told_outside_a_terminal_or_against_their_will(capsys: pytest.CaptureFixture[str]) -> None:
    for wanted in (None, False):
        with reporting("step", wanted) as tell:
            tell("tracing")
    assert said(capsys) == []


def test_in_a_terminal_the_last_word_is_said_once_patience_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with reporting("step", None) as tell:
        tell("tracing")
        tell("planning mesh 8")
        lines = list[str]()
        while not lines:
            time.sleep(0.01)
            lines = said(capsys)
        assert lines == ["autopar: step: planning mesh 8"]
        tell("mesh 8: 3 ms per step")
        assert said(capsys) == ["autopar: step: mesh 8: 3 ms per step"]
    tell("too late")
    assert said(capsys) == []
