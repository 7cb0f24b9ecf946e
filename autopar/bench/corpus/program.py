"""The programs of a corpus: train steps as their authors write them, in a table.

A corpus is a module with `PROGRAMS`, a sequence of `Program`. Each names the function that builds its step, so that a
package is imported only when one of its programs is asked for. `tests.corpus.table` is the one of this project.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.bench import rows
from autopar.errors import ArgumentError

TABLE = "tests.corpus.table"

#: A step, and the arguments of its first call.
Built = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Program:
    """One train step and what a check of it has to know.

    Attributes:
        name: unique in the corpus.
        title: what it is, for people.
        build: "module:function"; `function(scale)` returns a step and its arguments, with about `scale` times the
            activations of scale 1.
        packages: distributions that it needs besides JAX.
        large: a scale at which one of eight devices needs 32 MiB or more.
        carried: how many of the step's first results are the first arguments of the next step; 0: there is none.
        in_place: that many arguments are objects of Flax NNX instead, which the step changes, as `nnx.jit` has it.
        precision: the narrowest dtype in which something of it computes, whatever the dtype of its arguments is;
            "float64" if it follows them.
        options: of `autopar.parallelize`, where its author would have to give some.
    """

    name: str
    title: str
    build: str
    packages: tuple[str, ...]
    large: int
    carried: int = 1
    in_place: bool = False
    precision: str = "float64"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def versions(self) -> dict[str, str]:
        """Package -> installed version; those that are absent are left out."""
        versions = {name: _version(name) for name in self.packages}
        return {name: version for name, version in versions.items() if version}

    def missing(self) -> tuple[str, ...]:
        """Packages that are not installed."""
        return tuple(name for name in self.packages if not _version(name))

    def built(self, scale: int = 1) -> Built:
        """The step, and the arguments of its first call."""
        module, _, function = self.build.partition(":")
        return getattr(importlib.import_module(module), function)(scale)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def corpus(table: str = TABLE) -> dict[str, Program]:
    """The programs of a corpus by name, in its order.

    Raises:
        ArgumentError: no such module, or one without `PROGRAMS`.
    """
    module = _imported(table)
    if not hasattr(module, "PROGRAMS"):
        raise ArgumentError(f"{table} has no PROGRAMS, a sequence of autopar.bench.corpus.program.Program")
    return {program.name: program for program in module.PROGRAMS}


def _imported(table: str) -> ModuleType:
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.append(root)  # tests/ of a checkout is no installed package
    try:
        return importlib.import_module(table)
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"corpus {table!r} cannot be imported ({error}). Run from a checkout of autopar, or give the module of "
            "your own corpus, one with a sequence PROGRAMS of autopar.bench.corpus.program.Program."
        ) from None


def chosen(programs: Mapping[str, Program], names: Sequence[str]) -> list[Program]:
    """Those of these names, or all; ArgumentError for a name that is not known."""
    rows.check_words("program", names, tuple(programs))
    return [programs[name] for name in names or programs]
