"""Files and modules that texts name are there."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
PACKAGES = ("autopar", "passes", "cost_models")
FILE = re.compile(r"`((?:autopar|passes|cost_models|tests|docs|examples)/[\w./-]+\.\w+)`")
MODULE = re.compile(r"`(autopar(?:\.\w+)+)`")


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def there(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            if not hasattr(target, part):
                return False
            target = getattr(target, part)
        return True
    return False


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(text: Path) -> None:
    named = FILE.findall(text.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_files_and_modules_that_docstrings_name_are_there() -> None:
    files, modules = set[str](), set[str]()
    for path in sources():
        text = path.read_text()
        files.update(FILE.findall(text))
        modules.update(MODULE.findall(text))
    assert len(modules) > 50
    assert sorted(name for name in files if not (ROOT / name).exists()) == []
    assert sorted(name for name in modules if not there(name)) == []
