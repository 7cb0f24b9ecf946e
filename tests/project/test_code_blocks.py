"""The Python blocks of pages of the documentation run, and print what the text blocks after them say.

The blocks of a page share their names, and run in a folder of their own. A block whose first line is a comment such as
`# model.py` is that file. What a block prints without a text block after it is not compared. `python -m
tests.project.test_code_blocks` writes what the blocks print now into the pages.

Commands of the command line are parsed and not run.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from autopar.cli import app

ROOT = Path(__file__).parents[2]
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "```python" in path.read_text()
)
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)
COMMAND = re.compile(r"^    (?:\S*/bin/)?(autopar [a-z-]+ [^\n#]+)|`(autopar [a-z-]+ [^`]+)`", re.M)


def printed(page: str) -> Iterator[tuple[re.Match[str], str]]:
    """Every block of a page, and what it prints."""
    names: dict[str, Any] = {"__name__": "page"}
    context = contextvars.copy_context()  # rules that a page registers are its own
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in BLOCK.finditer((ROOT / page).read_text()):
            title = re.match(r"# (\w+\.py)\n", block[1])
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                context.run(exec, compile(block[1], title[1] if title else page, "exec"), names)
            text = out.getvalue().strip("\n").replace("PartitionSpec(", "P(")  # as the version of JAX prints it
            yield block, "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def commands() -> Iterator[str]:
    """Every command of the command line that a page has, on a line of its own or within a sentence."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for line, inline in COMMAND.findall(path.read_text()):
            yield " ".join((line or inline).split())


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_and_print_what_the_page_says(page: str) -> None:
    blocks = list(printed(page))
    assert blocks
    for block, text in blocks:
        assert block[2] is None or text == block[2], block[1]


@pytest.fixture(scope="module")
def main() -> Any:
    """The command line."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands_of_pages_parse(command: str, main: Any) -> None:
    arguments = shlex.split(command)[1:]
    while hasattr(main, "commands"):
        assert arguments[0] in main.commands
        main, arguments = main.commands[arguments[0]], arguments[1:]
    main.make_context(main.name, arguments)  # raises for what it does not know


def _updated(page: str) -> str:
    text = (ROOT / page).read_text()
    for block, now in reversed(list(printed(page))):
        if block[2] is not None:
            text = text[: block.start(2)] + now + text[block.end(2) :]
    return text


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        (ROOT / name).write_text(_updated(name))
