"""Every pass on small graphs, text in, text out: one file of cases for each pass, in tests/passes/cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.passes.support.printers import CASES, PRINTERS
from tests.support.text_cases import Case, read, regenerate

pytestmark = pytest.mark.core

FOUND = [(name, case) for name in PRINTERS for case in read(CASES / f"{name}.txt")[1]]


@pytest.mark.parametrize(("name", "case"), FOUND, ids=[f"{name}: {case.title}" for name, case in FOUND])
def test_case(name: str, case: Case) -> None:
    assert case.run(PRINTERS[name]) == case.expected, "if that is right: make goldens"


def test_every_file_is_of_a_pass() -> None:
    assert {path.stem for path in CASES.iterdir()} == set(PRINTERS)


def test_regenerating_changes_only_what_is_expected(tmp_path: Path) -> None:
    stale = tmp_path / "stale.txt"
    head = 'About.\n\n=== one\nby: 2\n# a comment\ngraph(%0: f32[4] "x") {\n  return %0 "y"\n}\n---\n'
    stale.write_text(f"{head}old\n")
    regenerate(stale, lambda graph, by: f"{len(graph.inputs) * by}\n")
    assert stale.read_text() == f"{head}2\n"


@pytest.mark.parametrize("text", ["\n=== one\ngraph() {}\n", "\n=== one\n---\n\n=== one\n---\n"])
def test_cases_without_an_end_or_with_one_title_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.txt: 'one' is the title of two cases, or has no line '---'"):
        read(tmp_path / "bad.txt")
