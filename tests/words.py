"""Private words that names and texts avoid in favour of the field's terms.

`python -m tests.words` prints where they are. A word counts in the names that a module defines, split at underscores
and capitals, and in its docstrings and comments. `docs/glossary.md` has the terms.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[1]
PACKAGES = ("autopar", "passes", "cost_models")

#: Word -> the term to use. Inflected forms count by themselves.
TERMS: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(("home", "homes", "homed"), "binding, sharding"),
    **dict.fromkeys(("hunt", "hunts"), "search"),
    **dict.fromkeys(("trade", "trades"), "option"),
    **dict.fromkeys(("hope", "hopes", "hoped"), "lower bound, estimate"),
    **dict.fromkeys(("plays", "played", "playing"), "simulate"),
    **dict.fromkeys(("accounts", "accounted"), "summary"),
    **dict.fromkeys(("loose",), "not propagated"),
    **dict.fromkeys(("handed", "hands"), "sent, received, passed"),
    **dict.fromkeys(("turned",), "transposed"),
    **dict.fromkeys(("held",), "live, kept, stored"),
    **dict.fromkeys(("lies", "lie"), "is sharded, is"),
    **dict.fromkeys(("stands", "stand", "stood"), "is"),
    **dict.fromkeys(("likeness",), "isomorphism"),
    **dict.fromkeys(("ledger", "swapper", "untie", "twin", "twins"), "see docs/glossary.md"),
    **dict.fromkeys(("offered", "offers", "learnt", "judged", "judges"), "submit, add, evaluate"),
})  # fmt: skip

#: Word -> the term to use in names; texts may say how far apart two things are.
NAMES: Mapping[str, str] = MappingProxyType({**TERMS, "apart": "separate"})

#: Phrases of texts -> the term to use.
PHRASES: Mapping[str, str] = MappingProxyType({
    "goes by": "uses, depends on",
    "go by": "use, depend on",
    "has time": "can overlap",
    "have time": "can overlap",
})  # fmt: skip


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module defines: classes, functions, arguments, fields and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def texts(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """First line and text of every docstring, attribute docstring and comment."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def parts(name: str) -> list[str]:
    """The words of a name, in lower case: "StageOptions" and "stage_options" have the words "stage" and "options"."""
    return re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())


def found(root: Path = ROOT) -> list[tuple[str, int, str]]:
    """(file, line, word) of every private word, in the order of files and lines."""
    places: list[tuple[str, int, str]] = []
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        source = path.read_text()
        tree, file = ast.parse(source), str(path.relative_to(root))
        here = [(line, word) for line, name in names(tree) for word in parts(name) if word in NAMES]
        for first, text in texts(source, tree):
            for offset, line in enumerate(text.lower().splitlines()):
                words = [word for word in re.findall(r"(?<!\w)[a-z]+(?!\w)", line) if word in TERMS]
                here += [(first + offset, word) for word in (*words, *(p for p in PHRASES if p in line))]
        places += [(file, line, word) for line, word in sorted(here)]
    return places


def main() -> int:
    places = found()
    for file, line, word in places:
        print(f"{file}:{line}: {word} ({NAMES.get(word) or PHRASES[word]})")
    counts = Counter(word for _, _, word in places)
    print(f"{len(places)} in all:", ", ".join(f"{word} {n}" for word, n in counts.most_common()))
    return bool(places)


if __name__ == "__main__":
    sys.exit(main())
