"""Arguments and results of a step as pytrees of arrays.

A step takes modules, optimizers, activation functions and flags; a program takes arrays. In a pytree of arrays

    Node        is an object of Flax NNX: its graph definition is structure, the values of its Variables are leaves
    Static      is a leaf that is not an array, or a number in an Equinox module: structure, compared by value
    Unchanged   is a value of a Node that a step does not change: the structure of the results gives the argument leaf
    Returned    is the result of a step that takes Nodes: their new values, and what the step returns

There are four conversions, two outside of the program and two while it is traced. Those of NNX share an update context,
as in `nnx.jit`, so that an object that occurs twice stays one object, and a step's changes reach the caller's object.

    as_arrays   outside, before the call: objects -> pytrees of arrays
    to_step     while tracing, before the step: pytrees -> objects
    from_step   while tracing, after the step: objects -> pytrees
    to_caller   outside, after the call: results as the step returned them; the caller's objects are updated in place

Flax and Equinox are never imported here: an argument can only be an object of theirs if their module is loaded.
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
from autopar.errors import ArgumentError, DonatedError

#: Name of the update context that the four conversions share.
_TAG = "autopar"


@dataclass(frozen=True, eq=False)
class Static:
    """A leaf that is structure. Equal by value and type; with `by_identity` only to itself."""

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
    """Structure of a Node: its `nnx.GraphDef`, and the paths of its leaves, which follow from it."""

    graphdef: Any
    paths: tuple[str, ...] = field(compare=False)


@dataclass(frozen=True, eq=False)
class Node:
    """An object of Flax NNX, split into structure and values."""

    structure: Structure
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Unchanged:
    """A value that is the same after the step as before: that of argument leaf number `leaf`."""

    leaf: int


@dataclass(frozen=True, eq=False)
class Returned:
    """Result of a step with Nodes.

    Attributes:
        updates: (positional, keyword) arguments after the step, without anything but Nodes.
        out: what the step returns.
    """

    updates: Any
    out: Any


register_pytree_node(Static, lambda s: ((), s), lambda s, _: s)
register_pytree_node(Unchanged, lambda k: ((), k), lambda k, _: k)
register_pytree_with_keys(
    Node,
    lambda n: (tuple(zip(map(GetAttrKey, n.structure.paths), n.values, strict=True)), n.structure),
    lambda structure, values: Node(structure, tuple(values)),
    lambda n: (n.values, n.structure),
)
register_pytree_node(Returned, lambda r: ((r.updates, r.out), None), lambda _, children: Returned(*children))


# Outside


@dataclass(frozen=True, eq=False)
class ArrayArguments:
    """Arguments as pytrees of arrays, and the leaves and the tree of those that are traced.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments that are traced.
        leaves, tree: of the arguments that are traced.
        named: the keyword arguments that are static.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    tree: Any
    named: Mapping[str, Any]

    def step(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `args` and `kwargs`: `fn`, or `fn` with its static keyword arguments."""
        return functools.wraps(fn)(partial(fn, **self.named)) if self.named else fn


@contextlib.contextmanager
def as_arrays(
    args: Sequence[Any], kwargs: Mapping[str, Any], static: Sequence[int] = (), names: Sequence[str] = ()
) -> Iterator[ArrayArguments]:
    """Arguments as pytrees of arrays. Trace, run and convert results inside.

    Positions in `static` and keywords in `names` are not converted.

    Raises:
        ArgumentError: the arguments are no pytree.
    """
    named = {name: kwargs[name] for name in names if name in kwargs}
    keywords = {name: arg for name, arg in kwargs.items() if name not in named}
    dynamic = tuple(arg for i, arg in enumerate(args) if i not in static), keywords
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not _has_nodes(dynamic):
        yield _as_arrays(args, dynamic, static, named)
        return
    with nnx.update_context(_TAG):
        yield _as_arrays(args, _without_nodes(dynamic, _TAG), static, named)


@contextlib.contextmanager
def node_context(tree: Any) -> Iterator[None]:
    """A context in which a step is traced again on pytrees of arrays, without the objects that they came from."""
    if not _has(tree, Node):
        yield
        return
    with sys.modules["flax.nnx"].update_context(_TAG):
        yield


def _as_arrays(args: Sequence[Any], dynamic: Any, static: Sequence[int], named: Mapping[str, Any]) -> ArrayArguments:
    leaves, tree = flatten(dynamic)
    if not all(map(_is_surely_array, leaves)):
        dynamic = _without_statics(dynamic)
        leaves, tree = flatten(dynamic)
    return ArrayArguments(merge_static(args, static, dynamic[0]), dynamic[1], leaves, tree, named)


def merge_static(args: Sequence[Any], static: Sequence[int], traced: Sequence[Any]) -> tuple[Any, ...]:
    """All positional arguments: the static ones of `args`, and these traced ones."""
    rest = iter(traced)
    return tuple(arg if i in static else next(rest) for i, arg in enumerate(args))


def flatten(dynamic: tuple[tuple[Any, ...], Any], how: Callable[..., Any] = jax.tree.flatten) -> tuple[list[Any], Any]:
    """Leaves and tree of (positional, keyword) arguments; ArgumentError if they are no pytree."""
    try:
        return how(dynamic)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the arguments are no pytree that JAX can flatten: {error.__cause__ or error}") from None


def to_caller(result: Any, leaves: Sequence[Any]) -> Any:
    """The step's result from the program's; `leaves` are those of the arguments on which the program ran."""
    if not isinstance(result, Returned):
        return _with_nodes(_with_statics(result), None)
    filled = jax.tree.map(lambda x: leaves[x.leaf] if isinstance(x, Unchanged) else x, result, is_leaf=_is(Unchanged))
    _, out = _with_nodes(_with_statics((filled.updates, filled.out)), _TAG, inner=False)
    return out


def is_plain(tree: Any) -> bool:
    """Whether results with this structure are plain pytrees of arrays, which `to_caller` returns unchanged."""
    return next(_wrappers(tree, Returned, Node, Static), None) is None


def unchanged_leaves(tree: Any) -> frozenset[int]:
    """Argument leaves that a step does not change, from the structure of its results: they must not be donated."""
    return frozenset(wrapper.unflatten(()).leaf for wrapper in _wrappers(tree, Unchanged))


# While tracing


def call_on_arrays(fn: Callable[..., Any], pure: Any, place: Callable[[Any], Any] = tuple) -> Any:
    """The result of a function as a pytree of arrays.

    Args:
        fn: as the user wrote it.
        pure: its (positional, keyword) arguments as pytrees of arrays.
        place: maps the traced positional arguments to all positional arguments.
    """
    step_arguments = to_step(pure)
    return from_step(pure, step_arguments, fn(*place(step_arguments[0]), **step_arguments[1]))


def to_step(args: Any) -> Any:
    """Arguments for the step, from pytrees of traced values."""
    return _with_nodes(_with_statics(args), _TAG, inner=True)


def from_step(before: Any, after: Any, out: Any) -> Any:
    """The step's result as a pytree of arrays; if its arguments have Nodes, a `Returned` with their new values.

    Args:
        before: arguments as pytrees, before the step.
        after: the arguments that the step got, after it.
        out: the step's result.
    """
    if not _has(before, Node):
        return _without_statics(_without_nodes(out, None))
    after = jax.tree.map(lambda x: x if is_node(x) else None, after, is_leaf=is_node)
    updates, out = _without_statics(_without_nodes((after, out), _TAG))
    return Returned(_mark_unchanged(before, updates), out)


def _mark_unchanged(before: Any, updates: Any) -> Any:
    """Updates, with `Unchanged` for every value that the step did not change."""
    before_leaves = {path: (number, value) for number, (path, value) in enumerate(tree_leaves_with_path(before))}

    def mark(path: Any, value: Any) -> Any:
        number, old = before_leaves.get(path, (-1, None))
        return Unchanged(number) if value is old else value

    return tree_map_with_path(mark, updates)


# Objects of Flax NNX


def is_node(x: Any) -> bool:
    """Whether it is an object of Flax NNX: a module, an optimizer, random streams, a metric, a Variable."""
    return _nnx_kind(type(x)) is _NnxKind.NODE


def _is_nnx(x: Any) -> bool:
    """Whether it is a leaf of pytrees here. An `nnx.State` is a pytree of arrays, whatever contains the arrays."""
    return _nnx_kind(type(x)) is not _NnxKind.OTHER


class _NnxKind(enum.Enum):
    """Classes of objects for Flax NNX."""

    NODE = enum.auto()
    STATE = enum.auto()
    OTHER = enum.auto()


def _nnx_kind(of: type) -> _NnxKind:
    nnx = sys.modules.get("flax.nnx")
    return _NnxKind.OTHER if nnx is None else _nnx_kind_in(nnx, of)


@functools.cache  # called for every node of the arguments at every call
def _nnx_kind_in(nnx: Any, of: type) -> _NnxKind:
    if issubclass(of, nnx.State):
        return _NnxKind.STATE
    if issubclass(of, nnx.Variable) or of in nnx.graph.GRAPH_REGISTRY:
        return _NnxKind.NODE
    return _NnxKind.OTHER


def is_opaque(x: Any) -> bool:
    """Whether it is an object of a library that tracks its own changes."""
    equinox = sys.modules.get("equinox")
    return _is_nnx(x) or (equinox is not None and isinstance(x, equinox.nn.State))


def _has_nodes(dynamic: Any) -> bool:
    return any(map(is_node, flatten(dynamic, partial(jax.tree.flatten, is_leaf=_is_nnx))[0]))


def _without_nodes(tree: Any, tag: str | None) -> Any:
    """Objects split; `tag`: name of the active update context, None without one."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    with nnx.split_context(tag) as context:
        return jax.tree.map(lambda x: _split_object(context, x) if is_node(x) else x, tree, is_leaf=_is_nnx)


def _with_nodes(tree: Any, tag: str | None, inner: bool | None = None) -> Any:
    """Objects merged; `inner`: while tracing."""
    if not _has(tree, Node):
        return tree
    with sys.modules["flax.nnx"].merge_context(tag, inner) as context:
        return jax.tree.map(lambda x: _merge_object(context, x) if isinstance(x, Node) else x, tree, is_leaf=_is(Node))


def _split_object(context: Any, x: Any) -> Node:
    graphdef, state = context.flatten(x)
    paths = tuple("/".join(map(str, path)) for path in state.paths)
    return Node(Structure(graphdef, paths), tuple(map(_value, state.leaves)))


def _merge_object(context: Any, node: Node) -> Any:
    return context.unflatten(node.structure.graphdef, list(node.values))


def _value(variable: Any) -> Any:
    """The value of a Variable, or an array that a module has without a Variable. Tested on Flax 0.12.0 and 0.12.8."""
    if not isinstance(variable, sys.modules["flax.nnx"].Variable):
        return variable
    getter = getattr(type(variable), "get_raw_value", None)
    return variable.raw_value if getter is None else getter(variable)


# Leaves that are no arrays


def wrap_owner(instance: Any) -> Any:
    """The first argument of a method: a pytree or an object of NNX unchanged, any other object as structure."""
    is_leaf = jax.tree.structure(instance) == jax.tree.structure(0) and not isinstance(instance, _ARRAY)
    return Static(instance, by_identity=True) if is_leaf and not is_node(instance) else instance


def unwrap(arg: Any) -> Any:
    """An argument as the user passed it, from the result of `wrap_owner`."""
    return arg.value if isinstance(arg, Static) else arg


def check_static(name: str, which: int | str, value: Any) -> None:
    """Check a static argument of the function `name`; `which`: its position or keyword.

    Raises:
        ArgumentError: it contains arrays, or cannot be hashed.
    """
    if (described := _describe_arrays(value)) is not None:
        raise ArgumentError(
            f"static argument {which} of {name} is {described}: its arrays would be constants of the program. "
            "Leave it out of static_argnums; what is no array in it is structure anyway."
        )
    try:
        hash(value)
    except TypeError as error:
        raise ArgumentError(
            f"static argument {which} of {name} must be hashable, it is {type(value).__name__} {value!r:.60} ({error})"
        ) from None


def check_value(leaf: Any, path: str) -> None:
    """Check that an argument leaf has a value; `path`: its name in errors.

    Raises:
        ArgumentError: it is a shape alone.
        DonatedError: it was donated to an earlier step.
    """
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise DonatedError(
                f"'{path}' of shape {leaf.shape} was donated to an earlier step and its memory reused. "
                "Use the state that the step returned, or pass donate_argnums=()."
            )
    elif isinstance(leaf, jax.ShapeDtypeStruct):
        raise ArgumentError(
            f"'{path}' is {leaf}; a call needs arrays. With shapes alone use .plan(...) or .lower(...)."
        )


def _describe_arrays(x: Any) -> str | None:
    """Description of an object that contains arrays; None if it contains none."""
    if is_node(x):
        return f"the object {type(x).__name__} of Flax NNX"
    has_arrays = any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(x))
    return f"{type(x).__name__}, a pytree with arrays" if has_arrays else None


def _without_statics(tree: Any) -> Any:
    """Leaves that are not arrays as structure."""
    equinox = sys.modules.get("equinox")
    if equinox is not None:
        module = _is(equinox.Module)
        tree = jax.tree.map(lambda x: _freeze_numbers(x) if module(x) else x, tree, is_leaf=module)
    return jax.tree.map(lambda x: Static(x) if _is_static(x) else x, tree)


def _freeze_numbers(module: Any) -> Any:
    """An Equinox module whose numbers (flags, rates, sizes) are structure, as in `eqx.filter_jit`."""
    return jax.tree.map(lambda x: Static(x) if isinstance(x, _NUMBER) else x, module)


def _with_statics(tree: Any) -> Any:
    """Structure as leaves again."""
    return jax.tree.map(unwrap, tree, is_leaf=_is(Static))


_NUMBER = (bool, int, float, complex)
_ARRAY = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def _is_surely_array(leaf: Any) -> bool:
    return isinstance(leaf, _ARRAY)


def _is_static(leaf: Any) -> bool:
    """Whether a leaf is structure: a function, or a value compared by value. An object that may change is not."""
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


def _wrappers(tree: Any, *kinds: type) -> Iterator[Any]:
    """Structures of the wrappers of these kinds in a structure."""
    node = tree.node_data()
    if node is not None and issubclass(node[0], kinds):
        yield tree
        return
    for child in tree.children():
        yield from _wrappers(child, *kinds)


def check_function(caller: str, fn: Any) -> None:
    """Check that `fn` is a function of whole arrays; `caller`: what takes it, for the message.

    Raises:
        ArgumentError: it is no function, or one that `jax.pmap` made, which runs on pieces of its arguments.
    """
    if not callable(fn):
        raise ArgumentError(f"{caller} takes a function, got {type(fn).__name__} {fn!r:.60}")
    if jax_compat.is_from_pmap(fn):
        name = getattr(fn, "__name__", "this one")
        raise ArgumentError(
            f"{caller} takes a function of whole arrays, and {name} is made by jax.pmap. Give the function itself, "
            "without pmean, psum and their like, and arguments without a dimension of devices."
        )
