"""Objects that a function can reach without being called: where it can keep a value after it returns.

    function    its closure, its defaults, and the globals that its code names
    method      its object
    class       its attributes
    object      its attributes, and the elements of a container

Functions and classes of installed packages are not searched, nor are modules: their own caches are their concern.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from autopar import jax_compat

#: Largest number of objects that are visited; a bound on time, some tenths of a second.
MAX_OBJECTS = 100_000

_ATOMS = (str, bytes, int, float, complex, type(None), types.ModuleType, types.CodeType)


def reaches(root: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether `root` reaches an object for which `wanted` is true."""
    return any(map(wanted, itertools.islice(_reachable(root), MAX_OBJECTS)))


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
        return [*x.keys(), *x.values()] if type(x) is dict else list(getattr(x, "__dict__", {}).values())
    inside = list(x) if isinstance(x, list | tuple | set | frozenset | deque) else []
    return [*inside, *getattr(x, "__dict__", {}).values(), *_slots(x)]


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


def _slots(x: Any) -> list[Any]:
    names = [name for kind in type(x).__mro__ for name in vars(kind).get("__slots__", ())]
    return [getattr(x, name) for name in names if isinstance(name, str) and hasattr(x, name)]


def _is_user_code(x: Any) -> bool:
    """Whether a function or class is in the user's modules, not in Python's, in installed packages or in autopar."""
    return jax_compat.is_own(getattr(sys.modules.get(x.__module__), "__file__", None) or "")
