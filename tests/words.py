"""Private words that names and texts avoid in favour of the field's terms.

`python -m tests.words` prints where they are. A word counts in the names that a module defines, split at underscores
and capitals, and in its docstrings and comments. `docs/glossary.md` has the terms. Names of variables and parameters,
also those of tests, say what they hold: a word that tells nothing is no name of one.
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

#: Whole names of variables and parameters -> what they should say; fields and functions may have them.
VARIABLES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("found", "some", "one", "made", "known", "others", "told"), "what it holds")
)

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


def variables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every variable and parameter; fields of classes are none."""
    statements = [s for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for s in node.body]
    fields = {id(s.target) for s in statements if isinstance(s, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.lineno, node.id


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


def occurrences(root: Path = ROOT) -> list[tuple[str, int, str]]:
    """(file, line, word) of every private word, in the order of files and lines."""
    places: list[tuple[str, int, str]] = []
    for package in (*PACKAGES, "tests"):
        for path in sorted((root / package).rglob("*.py")):
            source = path.read_text()
            tree, file = ast.parse(source), str(path.relative_to(root))
            here = [(line, name) for line, name in variables(tree) if name in VARIABLES]
            here += words_of(source, tree) if package in PACKAGES else []
            places += [(file, line, word) for line, word in sorted(here)]
    return sorted(places)


def words_of(source: str, tree: ast.Module) -> list[tuple[int, str]]:
    """(line, word) of every word of the names and texts of a module."""
    here = [(line, word) for line, name in names(tree) for word in parts(name) if word in NAMES]
    for first, text in texts(source, tree):
        for offset, line in enumerate(text.lower().splitlines()):
            words = [word for word in re.findall(r"(?<!\w)[a-z]+(?!\w)", line) if word in TERMS]
            here += [(first + offset, word) for word in (*words, *(p for p in PHRASES if p in line))]
    return here


def main() -> int:
    places, terms = occurrences(), {**NAMES, **PHRASES, **VARIABLES}
    for file, line, word in places:
        print(f"{file}:{line}: {word} ({terms[word]})")
    counts = Counter(word for _, _, word in places)
    print(f"{len(places)} in all:", ", ".join(f"{word} {n}" for word, n in counts.most_common()))
    return bool(places)


if __name__ == "__main__":
    sys.exit(main())
