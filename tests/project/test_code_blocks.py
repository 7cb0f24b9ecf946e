"""The Python blocks of pages of the documentation run, and print what the text blocks after them say.

The blocks of a page share their names. A block whose first line is a comment such as `# model.py` is that file.
`python -m tests.project.test_code_blocks` writes what the blocks print now into the pages.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("choosing.md",)
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)


def printed(page: str) -> Iterator[tuple[re.Match[str], str]]:
    """Every block of a page, and what it prints."""
    names: dict[str, Any] = {}
    for block in BLOCK.finditer((ROOT / "docs" / page).read_text()):
        title = re.match(r"# (\w+\.py)\n", block[1])
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block[1], title[1] if title else page, "exec"), names)
        text = out.getvalue().strip("\n").replace("PartitionSpec(", "P(")  # as the version of JAX prints it
        yield block, "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.mark.parametrize("page", PAGES)
def test_blocks_print_what_the_page_says(page: str) -> None:
    blocks = list(printed(page))
    assert len(blocks) > 3
    for block, text in blocks:
        assert text == (block[2] or ""), block[1]


def _updated(page: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    for block, now in reversed(list(printed(page))):
        if block[2] is not None:
            text = text[: block.start(2)] + now + text[block.end(2) :]
    return text


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        (ROOT / "docs" / name).write_text(_updated(name))
