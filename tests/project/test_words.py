"""The private words of `tests.words` do not come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import words


def test_names_and_texts_have_no_private_words() -> None:
    assert [f"{file}:{line}: {word}" for file, line, word in words.occurrences()] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class StageHome: pass", [(1, "home")]),
        ("def f(held): pass", [(1, "held")]),
        ("x = 1  # goes by the axis", [(1, "goes by")]),
        ('"""A value.\n\nIt lies on a device.\n"""', [(3, "lies")]),
        ("holder = 'held'  # strings are for users", []),
        ("def f(known): return [one for one in known]", [(1, "known"), (1, "one")]),
        ("class Found:\n    made: int\n    def found(self): ...", []),
    ],
    ids=("class", "argument", "phrase in a comment", "docstring", "string", "variables", "field and method"),
)
def test_a_word_is_found_where_it_is(source: str, expected: list[tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "autopar").mkdir()
    (tmp_path / "autopar" / "module.py").write_text(source)
    assert words.occurrences(tmp_path) == [("autopar/module.py", *place) for place in expected]
