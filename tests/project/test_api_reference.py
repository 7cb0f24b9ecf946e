"""Every option, public name, field and method has a description, and a place on the reference page."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import autopar
from autopar import options
from autopar.api.parallel_function import BoundFunction, ParallelFunction
from autopar.errors import ArgumentError
from autopar.hardware.cluster import LogicalMesh
from autopar.hardware.description import Device
from autopar.hardware.links import Level, Link
from autopar.ir.collective import Collective
from autopar.plans.comparison import Comparison
from autopar.runtime.executables import Executable, Lowered
from autopar.verification.checking import Leaf

ROOT = Path(__file__).parents[2]
PAGE = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M))

#: Classes of values that public functions return, or take, without a name in `autopar`.
RELATED = (ParallelFunction, BoundFunction, Lowered, Executable, Collective, Leaf, Comparison)
FIGURES = (Device, Link, Level, LogicalMesh)
FUNCTIONS = tuple(f for name in dir(autopar) if inspect.isfunction(f := getattr(autopar, name)))
CLASSES = (*(c for name in dir(autopar) if inspect.isclass(c := getattr(autopar, name))), *RELATED, *FIGURES)


def described(of: Any, section: str) -> list[str]:
    """Names with a description in a section of a Google-style docstring, in its order."""
    lines = (inspect.getdoc(of) or "").splitlines()
    body = "\n".join(lines[lines.index(f"{section}:") + 1 :]) if f"{section}:" in lines else ""
    return re.findall(r"^    \*{0,2}(\w+): \S", re.split(r"\n(?=\S)", body)[0], re.M)


def members(of: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class itself defines, and `__call__`."""
    for name, member in vars(of).items():
        if (not name.startswith("_") or name == "__call__") and not isinstance(member, type):
            function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            if inspect.isfunction(function) or isinstance(function, property):
                yield name, function


def parameters(fn: Callable[..., Any]) -> list[str]:
    """Names in a signature, less that of the object that a method is called on."""
    return [name for name in inspect.signature(fn).parameters if name != "self"]


# Options


def test_signatures_state_every_option_with_its_type_and_default() -> None:
    stated = inspect.signature(autopar.parallelize).parameters
    assert list(stated) == ["fn", *(f.name for f in fields(options.Settings))]
    assert {f.name: stated[f.name].default for f in fields(options.Settings)} == vars(options.Settings())
    types = get_type_hints(options.Options)
    assert {name: p.annotation for name, p in stated.items() if name != "fn"} == types
    assert set(inspect.signature(autopar.check).parameters) == {"fn", "args", *types}
    assert set(inspect.signature(autopar.plan).parameters) == {"fn", "args", *types}


def test_every_option_is_described_in_the_order_of_the_signature() -> None:
    assert described(autopar.parallelize, "Args") == list(inspect.signature(autopar.parallelize).parameters)


@pytest.mark.parametrize("name", ["solver", "remat", "offload", "schedule", "stages", "num_microbatches"])
def test_words_of_an_option_are_those_that_its_type_lists(name: str) -> None:
    hint = get_type_hints(options.Options)[name]
    words = {word for part in (hint, *get_args(hint)) for word in get_args(part) if isinstance(word, str)}
    doc = " ".join((autopar.parallelize.__doc__ or "").split())
    assert words
    assert [word for word in words if f'"{word}"' not in doc] == []
    for word in words:
        options.settings({name: word})
    with pytest.raises(ArgumentError if name != "schedule" else autopar.errors.ScheduleError) as refused:
        options.settings({name: "?"})
    assert set(re.findall(r"'([\w-]+)'", str(refused.value))) == words


# Names


@pytest.mark.parametrize("name", dir(autopar))  # those of `__all__` among them
def test_every_public_name_is_described_and_on_the_page(name: str) -> None:
    assert f"autopar.{name}" in PAGE
    if name == "__version__":
        body = ast.parse(Path(autopar.__file__).read_text()).body
        at = next(i for i, node in enumerate(body) if "__version__ =" in ast.unparse(node))
        after = body[at + 1]
        assert isinstance(after, ast.Expr)
        assert isinstance(after.value, ast.Constant)
    else:
        assert getattr(autopar, name).__doc__


@pytest.mark.parametrize("of", [*RELATED, *FIGURES], ids=lambda of: of.__name__)
def test_classes_of_results_are_on_the_page(of: type) -> None:
    assert f"{of.__module__}.{of.__name__}" in PAGE


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_every_parameter_of_a_function_is_described(fn: Callable[..., Any]) -> None:
    unpacked = set(get_type_hints(options.Options)) if "options" in described(fn, "Args") else set[str]()
    assert set(parameters(fn)) - unpacked <= set(described(fn, "Args"))


# Classes


@pytest.mark.parametrize("of", CLASSES, ids=lambda of: of.__name__)
def test_every_field_is_described(of: type) -> None:
    names = [f.name for f in fields(of) if not f.name.startswith("_")] if is_dataclass(of) else []
    assert of.__doc__
    assert [name for name in names if name not in described(of, "Attributes")] == []


@pytest.mark.parametrize("of", CLASSES, ids=lambda of: of.__name__)
def test_every_public_method_is_described(of: type) -> None:
    assert [name for name, member in members(of) if not member.__doc__] == []


@pytest.mark.parametrize("of", CLASSES, ids=lambda of: of.__name__)
def test_a_method_describes_all_of_its_parameters_or_none(of: type) -> None:
    for name, member in members(of):
        if inspect.isfunction(member) and (args := described(member, "Args")):
            assert args == parameters(member), name
