"""What a step does besides returning results, and what of it is lost under tracing.

The containers that a step gets while it is traced are copies of the caller's, as under `jax.jit`: values that it writes
into them reach the caller only through its results. Objects that are structure are the caller's own, and change once,
while tracing, instead of at every step. Refused are

    a value written into an argument, on which no result depends    -> first_unused
    an attribute of an object that is set or deleted                -> changed_attribute
    a value kept in an object that the step reaches otherwise       -> find

A function reaches its closure, its defaults and the globals that its code names; a method its object; a class its
attributes; an object its attributes and the elements of a container. Functions and classes of installed packages are
not searched, nor are modules: their own caches are their concern.

Changes of objects of Flax NNX reach the caller's objects (`autopar.ir.arguments`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
from jax.tree_util import tree_leaves_with_path

from autopar import jax_compat
from autopar.ir.arguments import is_opaque

#: Largest number of objects that are visited; a bound on time, some tenths of a second.
MAX_OBJECTS = 100_000

_ATOMS = (str, bytes, int, float, complex, type(None), types.ModuleType, types.CodeType)


@dataclass(frozen=True, eq=False)
class ArgumentSnapshot:
    """Arguments before the step: their leaves, and the attributes of those leaves that are objects, by path."""

    leaves: Mapping[Any, Any]
    attributes: Mapping[Any, Mapping[str, Any]]


def snapshot(args: Any) -> ArgumentSnapshot:
    """The arguments to compare with after the step has run."""
    leaves = dict(tree_leaves_with_path(args, is_leaf=is_opaque))
    objects = {path: x for path, x in leaves.items() if not jax_compat.is_tracer(x) and not is_opaque(x)}
    return ArgumentSnapshot(leaves, {path: _attributes(x) for path, x in objects.items()})


def overwritten(before: ArgumentSnapshot, args: Any) -> dict[Any, Any]:
    """Traced values that the step has written into its arguments, by path."""
    after = tree_leaves_with_path(args, is_leaf=is_opaque)
    return {path: x for path, x in after if jax_compat.is_tracer(x) and x is not before.leaves.get(path)}


def changed_attribute(before: ArgumentSnapshot) -> tuple[Any, str] | None:
    """Path of an object among the arguments and an attribute of it that the step has set or deleted; None if none.

    A value without tracers that a `functools.cached_property` keeps is the same at every step, and no change.
    """
    for path, old in before.attributes.items():
        new = _attributes(before.leaves[path])
        for name in {**old, **new}:
            same = name in old and name in new and old[name] is new[name]
            if not same and not (name in new and _is_cached(before.leaves[path], name, new[name])):
                return path, name
    return None


def _is_cached(x: Any, name: str, value: Any) -> bool:
    """Whether it is the value of a `functools.cached_property`, without tracers."""
    if not isinstance(inspect.getattr_static(type(x), name, None), functools.cached_property):
        return False
    return not any(map(jax_compat.is_tracer, jax.tree.leaves(value)))


def first_unused(jaxpr: jex.ClosedJaxpr, values: Sequence[Any]) -> Any:
    """The first of these values on which no result of a jaxpr depends; None if there is none.

    Args:
        jaxpr: with its own results only.
        values: variables that were additional results.
    """
    used = {v for e in jax_compat.eliminate_dead_code(jaxpr).jaxpr.eqns for v in e.outvars}
    computed = {v for e in jaxpr.jaxpr.eqns for v in e.outvars}
    return next((v for v in values if isinstance(v, jex.Var) and v in computed and v not in used), None)


def find(root: Any, wanted: Callable[[Any], bool]) -> Any:
    """The nearest object that `root` reaches for which `wanted` is true; None if there is none."""
    return next(filter(wanted, itertools.islice(_reachable(root), MAX_OBJECTS)), None)


def _reachable(root: Any) -> Iterator[Any]:
    """The object and all objects that it reaches, each once, the nearest first."""
    queue, seen = deque([root]), {id(root): root}
    while queue:
        current = queue.popleft()
        yield current
        for child in _children(current):
            if not isinstance(child, _ATOMS) and id(child) not in seen:
                seen[id(child)] = child
                queue.append(child)


def _children(x: Any) -> Iterable[Any]:
    if isinstance(x, types.FunctionType):
        return _function_references(x) if _is_user_code(x) else []
    if isinstance(x, type):
        return list(vars(x).values()) if _is_user_code(x) else []
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, Mapping):
        return [*x.keys(), *x.values()] if type(x) is dict else _values(x)
    inside = list(x) if isinstance(x, list | tuple | set | frozenset | deque) else []
    return [*inside, *_values(x)]


def _function_references(x: types.FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
    named = [x.__globals__[name] for name in _names(x.__code__) if name in x.__globals__]
    defaults = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    return [*cells, *named, *defaults, *vars(x).values()]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name without a value yet
        return False


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that a function's code, and the code of functions inside it, may look up among the globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _values(x: Any) -> list[Any]:
    """Values of the attributes that an object itself holds, and of members that C code holds."""
    members = [d for kind in type(x).__mro__ for d in vars(kind).values() if isinstance(d, types.MemberDescriptorType)]
    return [*_dict(x).values(), *(value for _, value in _filled(x, members))]


def _dict(x: Any) -> Mapping[str, Any]:
    """The `__dict__` of an object, read without running code of its class; empty if it has none."""
    try:
        return object.__getattribute__(x, "__dict__")
    except AttributeError:
        return {}


def _filled(x: Any, members: Iterable[types.MemberDescriptorType]) -> Iterator[tuple[str, Any]]:
    for member in members:
        with suppress(AttributeError):  # a slot without a value yet
            yield member.__name__, member.__get__(x)


def _attributes(x: Any) -> Mapping[str, Any]:
    """The attributes of an object that Python code sets: those in its `__dict__` and in `__slots__`."""
    kinds = [kind for kind in type(x).__mro__ if "__slots__" in vars(kind)]
    slots = [d for kind in kinds for d in vars(kind).values() if isinstance(d, types.MemberDescriptorType)]
    attributes = {**dict(_filled(x, slots)), **_dict(x)}
    return {name: value for name, value in attributes.items() if not name.startswith("__")}


def _is_user_code(x: Any) -> bool:
    """Whether a function or class is in the user's modules, not in Python's, in installed packages or in autopar."""
    return jax_compat.is_own(getattr(sys.modules.get(x.__module__), "__file__", None) or "")
