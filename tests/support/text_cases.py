"""Text cases: files of titled cases, each with options, the printed form of a graph, and the text that is expected.

    What the file is about, in as many lines as needed.

    === a title, which says one behaviour
    mesh: (2,)
    graph(%0: f32[8] "x") {
      ...
    }
    ---
    the expected text

Options are Python literals, and keywords of the function under test. `python -m tests.support.goldens` writes what is
expected anew, and changes nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.text.parser import parse

TITLE, EXPECTED = "=== ", "---\n"

#: From a graph, and options as keywords, to text.
Transform = Callable[..., str]


@dataclass(frozen=True)
class Case:
    """One case, as it is written."""

    title: str
    source: str
    expected: str

    @property
    def options(self) -> Mapping[str, Any]:
        lines = [line for line in self.source.partition("graph(")[0].splitlines() if line and line[0] != "#"]
        return {name: ast.literal_eval(value.strip()) for name, _, value in (line.partition(":") for line in lines)}

    @property
    def graph(self) -> Graph:
        """GraphTextError if the text is no graph; its line numbers begin at the graph."""
        _, head, text = self.source.partition("graph(")
        return parse(head + text)

    def run(self, transform: Transform) -> str:
        """What the pass makes of the graph; an error of autopar is its message."""
        graph, options = self.graph, self.options
        try:
            return transform(graph, **options).rstrip("\n") + "\n"
        except AutoparError as error:
            return f"{type(error).__name__}: {error}\n"


def read(path: Path) -> tuple[str, tuple[Case, ...]]:
    """(description, cases) of a file; ValueError for a case without an expected part, or with the title of another."""
    description, *parts = path.read_text(encoding="utf-8").split(f"\n{TITLE}")
    cases: list[Case] = []
    for part in parts:
        title, _, rest = part.partition("\n")
        source, mark, expected = rest.partition(f"\n{EXPECTED}")
        if not mark or any(title == c.title for c in cases):
            raise ValueError(f"{path.name}: '{title}' is the title of two cases, or has no line '---'")
        cases.append(Case(title, source, expected.rstrip("\n") + "\n"))
    return description, tuple(cases)


def regenerate(path: Path, transform: Transform) -> None:
    """Rewrites the expected parts of a file."""
    description, cases = read(path)
    written = [f"\n{TITLE}{c.title}\n{c.source}\n{EXPECTED}{c.run(transform)}" for c in cases]
    path.write_text(description + "".join(written), encoding="utf-8")
