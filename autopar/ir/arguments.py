"""What users pass and return, as pytrees of arrays.

A step takes modules, optimizers, activation functions and flags; a program takes arrays. Inside a pytree of arrays

    Node       is an object of Flax NNX: its graph definition is structure, the values of its Variables are leaves
    Static     is a leaf that is no array, or a number inside an Equinox module: it is structure, compared by value
    Kept       is a value of a Node that a step leaves as it is: the structure of the results says which argument it is
    Returned   is the result of a step that takes Nodes: what it makes of them, and what it returns

There are four conversions, two outside of the program and two while it is traced. Those of NNX share an update context,
as in `nnx.jit`, so that objects that occur twice are one, and what a step does to an object happens to the caller's.

    opened     outside, before: objects -> pytrees of arrays
    inside     while tracing, before the step: pytrees -> objects
    returned   while tracing, after it: objects -> pytrees
    closed     outside, after: results as the step returned them, the caller's objects updated in place

Flax and Equinox are never imported here: an argument can only be theirs if their module is loaded.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.tree_util import (
    GetAttrKey,
    register_pytree_node,
    register_pytree_with_keys,
    tree_leaves_with_path,
    tree_map_with_path,
)

from autopar import jax_compat
from autopar.errors import ArgumentError

#: Of the update context that the four conversions share.
_TAG = "autopar"


@dataclass(frozen=True, eq=False)
class Static:
    """A leaf that is structure. Equal by value and type; `by_identity`: only to itself."""

    value: Any
    by_identity: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or self.by_identity != other.by_identity:
            return False
        mine, theirs = self.value, other.value
        return mine is theirs or (not self.by_identity and type(mine) is type(theirs) and bool(mine == theirs))

    def __hash__(self) -> int:
        return object.__hash__(self.value) if self.by_identity else hash(self.value)


@dataclass(frozen=True)
class Structure:
    """Of a Node: its `nnx.GraphDef`, and the paths of its leaves, which follow from it."""

    graphdef: Any
    paths: tuple[str, ...] = field(compare=False)


@dataclass(frozen=True, eq=False)
class Node:
    """An object of Flax NNX in parts."""

    structure: Structure
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Kept:
    """A value that is the same after the step as before it: the argument leaf of this number."""

    leaf: int


@dataclass(frozen=True, eq=False)
class Returned:
    """Of a step with Nodes: (positional, keyword) arguments after it, anything but Nodes left out; and its result."""

    updates: Any
    out: Any


register_pytree_node(Static, lambda s: ((), s), lambda s, _: s)
register_pytree_node(Kept, lambda k: ((), k), lambda k, _: k)
register_pytree_with_keys(
    Node,
    lambda n: (tuple(zip(map(GetAttrKey, n.structure.paths), n.values, strict=True)), n.structure),
    lambda structure, values: Node(structure, tuple(values)),
    lambda n: (n.values, n.structure),
)
register_pytree_node(Returned, lambda r: ((r.updates, r.out), None), lambda _, children: Returned(*children))


# Outside


@dataclass(frozen=True, eq=False)
class Opened:
    """Arguments as pytrees of arrays, and the leaves and the tree of those that are traced."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    tree: Any


@contextlib.contextmanager
def opened(args: Sequence[Any], kwargs: Mapping[str, Any], static: Sequence[int] = ()) -> Iterator[Opened]:
    """Arguments as pytrees of arrays. Trace, run and close inside; positions in `static` are left alone.

    Raises:
        ArgumentError: the arguments are no pytree.
    """
    dynamic = tuple(arg for i, arg in enumerate(args) if i not in static), dict(kwargs)
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not _has_nodes(dynamic):
        yield _opened(args, dynamic, static)
        return
    with nnx.update_context(_TAG):
        yield _opened(args, _without_nodes(dynamic, _TAG), static)


def _opened(args: Sequence[Any], dynamic: Any, static: Sequence[int]) -> Opened:
    leaves, tree = flatten(dynamic)
    if not all(map(_is_surely_array, leaves)):
        dynamic = _without_statics(dynamic)
        leaves, tree = flatten(dynamic)
    return Opened(merged(args, static, dynamic[0]), dynamic[1], leaves, tree)


def merged(args: Sequence[Any], static: Sequence[int], traced: Sequence[Any]) -> tuple[Any, ...]:
    """Positional arguments, the static ones of `args` and these traced ones."""
    rest = iter(traced)
    return tuple(arg if i in static else next(rest) for i, arg in enumerate(args))


def flatten(dynamic: tuple[tuple[Any, ...], Any], how: Callable[..., Any] = jax.tree.flatten) -> tuple[list[Any], Any]:
    """Leaves and tree of (positional, keyword) arguments; ArgumentError if they are no pytree."""
    try:
        return how(dynamic)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the arguments are no pytree that JAX can flatten: {error.__cause__ or error}") from None


def closed(result: Any, leaves: Sequence[Any]) -> Any:
    """What the step returned, from the pytree that the program gave; `leaves` are those of the arguments it ran on."""
    if not isinstance(result, Returned):
        return _with_nodes(_with_statics(result), None)
    filled = jax.tree.map(lambda x: leaves[x.leaf] if isinstance(x, Kept) else x, result, is_leaf=_is(Kept))
    _, out = _with_nodes(_with_statics((filled.updates, filled.out)), _TAG, inner=False)
    return out


def is_plain(tree: Any) -> bool:
    """Whether a structure is that of plain pytrees of arrays, which `closed` leaves as they are."""
    return not _of_kind(tree, Returned, Node, Static)


def kept(tree: Any) -> frozenset[int]:
    """Argument leaves that a step leaves as they are, from the structure of its results: not to be donated."""
    return frozenset(x.leaf for x in _of_kind(tree, Kept))


# While tracing


def called(fn: Callable[..., Any], pure: Any, place: Callable[[Any], Any] = tuple) -> Any:
    """What a function returns as a pytree of arrays.

    Args:
        fn: as written.
        pure: its (positional, keyword) arguments as pytrees of arrays.
        place: from the traced positional arguments to all of them.
    """
    seen = inside(pure)
    return returned(pure, seen, fn(*place(seen[0]), **seen[1]))


def inside(args: Any) -> Any:
    """Arguments as the step sees them, from pytrees of traced values."""
    return _with_nodes(_with_statics(args), _TAG, inner=True)


def returned(before: Any, after: Any, out: Any) -> Any:
    """What a step has returned as pytrees of arrays; with Nodes among its arguments these as well, in a `Returned`.

    Args:
        before: arguments as pytrees, as they were; `after`: as the step sees them.
        out: what it returned.
    """
    if not _has(before, Node):
        return _without_statics(_without_nodes(out, None))
    after = jax.tree.map(lambda x: x if is_node(x) else None, after, is_leaf=is_node)
    updates, out = _without_statics(_without_nodes((after, out), _TAG))
    return Returned(_only_changes(before, updates), out)


def _only_changes(before: Any, updates: Any) -> Any:
    """Updates with a mark for every value that is where it was and as it was."""
    was = {path: (number, value) for number, (path, value) in enumerate(tree_leaves_with_path(before))}

    def marked(path: Any, value: Any) -> Any:
        number, old = was.get(path, (-1, None))
        return Kept(number) if value is old else value

    return tree_map_with_path(marked, updates)


# Objects of Flax NNX


def is_node(x: Any) -> bool:
    """Whether it is an object of Flax NNX: a module, an optimizer, random streams, a metric, a Variable."""
    return _kind(type(x)) is _Kind.NODE


def _is_whole(x: Any) -> bool:
    """Whether it is not looked into: an `nnx.State` is a pytree of arrays, whatever holds them."""
    return _kind(type(x)) is not _Kind.OTHER


class _Kind(enum.Enum):
    """What Flax NNX has a type for."""

    NODE = enum.auto()
    STATE = enum.auto()
    OTHER = enum.auto()


def _kind(of: type) -> _Kind:
    nnx = sys.modules.get("flax.nnx")
    return _Kind.OTHER if nnx is None else _kind_in(nnx, of)


@functools.cache  # asked for every node of the arguments at every call
def _kind_in(nnx: Any, of: type) -> _Kind:
    if issubclass(of, nnx.State):
        return _Kind.STATE
    if issubclass(of, nnx.Variable) or of in nnx.graph.GRAPH_REGISTRY:
        return _Kind.NODE
    return _Kind.OTHER


def is_opaque(x: Any) -> bool:
    """Whether it is an object of a library that keeps account of its own changes."""
    equinox = sys.modules.get("equinox")
    return _is_whole(x) or (equinox is not None and isinstance(x, equinox.nn.State))


def _has_nodes(dynamic: Any) -> bool:
    return any(map(is_node, flatten(dynamic, partial(jax.tree.flatten, is_leaf=_is_whole))[0]))


def _without_nodes(tree: Any, tag: str | None) -> Any:
    """Objects in parts; `tag`: of the update context in force, None without one."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    with nnx.split_context(tag) as context:
        return jax.tree.map(lambda x: _node(context, x) if is_node(x) else x, tree, is_leaf=_is_whole)


def _with_nodes(tree: Any, tag: str | None, inner: bool | None = None) -> Any:
    """Objects put together; `inner`: while tracing."""
    if not _has(tree, Node):
        return tree
    with sys.modules["flax.nnx"].merge_context(tag, inner) as context:
        return jax.tree.map(lambda x: _object(context, x) if isinstance(x, Node) else x, tree, is_leaf=_is(Node))


def _node(context: Any, x: Any) -> Node:
    graphdef, state = context.flatten(x)
    paths = tuple("/".join(map(str, path)) for path in state.paths)
    return Node(Structure(graphdef, paths), tuple(map(_value, state.leaves)))


def _object(context: Any, node: Node) -> Any:
    return context.unflatten(node.structure.graphdef, list(node.values))


def _value(variable: Any) -> Any:
    """Of a Variable, and of an array that a module holds without one. Tried on Flax 0.12.0 and 0.12.8."""
    if not isinstance(variable, sys.modules["flax.nnx"].Variable):
        return variable
    getter = getattr(type(variable), "get_raw_value", None)
    return variable.raw_value if getter is None else getter(variable)


# Leaves that are no arrays


def owner(instance: Any) -> Any:
    """The first argument of a method: a pytree or an object of NNX as it is, any other object as structure."""
    is_leaf = jax.tree.structure(instance) == jax.tree.structure(0) and not isinstance(instance, _ARRAY)
    return Static(instance, by_identity=True) if is_leaf and not is_node(instance) else instance


def plain(arg: Any) -> Any:
    """An argument as it was passed, from what `owner` has made of it."""
    return arg.value if isinstance(arg, Static) else arg


def with_arrays(x: Any) -> str | None:
    """What an object is that holds arrays, in words; None if it holds none."""
    if is_node(x):
        return f"the object {type(x).__name__} of Flax NNX"
    held = any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(x))
    return f"{type(x).__name__}, a pytree with arrays" if held else None


def _without_statics(tree: Any) -> Any:
    """Leaves that are no arrays as structure."""
    equinox = sys.modules.get("equinox")
    if equinox is not None:
        module = _is(equinox.Module)
        tree = jax.tree.map(lambda x: _of_module(x) if module(x) else x, tree, is_leaf=module)
    return jax.tree.map(lambda x: Static(x) if _is_static(x) else x, tree)


def _of_module(module: Any) -> Any:
    """An Equinox module whose numbers are structure, as `eqx.filter_jit` has it: flags, rates, sizes."""
    return jax.tree.map(lambda x: Static(x) if isinstance(x, _NUMBER) else x, module)


def _with_statics(tree: Any) -> Any:
    """Leaves that are structure as leaves again."""
    return jax.tree.map(plain, tree, is_leaf=_is(Static))


_NUMBER = (bool, int, float, complex)
_ARRAY = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def _is_surely_array(leaf: Any) -> bool:
    return isinstance(leaf, _ARRAY)


def _is_static(leaf: Any) -> bool:
    """Whether a leaf is structure: a function, or what is compared by value. An object that may change is not."""
    if isinstance(leaf, (*_ARRAY, *_NUMBER)) or jax_compat.is_tracer(leaf) or hasattr(leaf, "__jax_array__"):
        return False
    if callable(leaf) and not _holds_arrays(leaf):
        return True
    try:
        hash(leaf)
    except TypeError:
        return False
    return type(leaf).__hash__ is not object.__hash__


def _holds_arrays(leaf: Any) -> bool:
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(getattr(leaf, "__dict__", {})))


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, kinds)


def _has(tree: Any, *kinds: type) -> bool:
    return any(isinstance(x, kinds) for x in jax.tree.leaves(tree, is_leaf=_is(*kinds)))


def _of_kind(tree: Any, *kinds: type) -> list[Any]:
    """Wrappers in a structure."""
    example = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [x for x in jax.tree.leaves(example, is_leaf=_is(*kinds)) if isinstance(x, kinds)]
