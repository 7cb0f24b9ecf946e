"""From a Python function to a Graph.

`jax.make_jaxpr` runs the function on abstract arguments, `autopar.jaxpr` makes the graph of what it recorded. What
stops JAX is said in the words of the user's program: the argument's path, the value, the line.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
from jax.tree_util import keystr, tree_flatten_with_path

from autopar import jax_compat
from autopar.errors import ArgumentError, TraceError
from autopar.graph import Graph
from autopar.jaxpr import build_graph


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph with what is needed to call it: the trees of arguments and results."""

    graph: Graph
    in_tree: Any
    out_tree: Any
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]


def trace(fn: Callable[..., Any], *args: Any, static_argnums: Sequence[int] = (), **kwargs: Any) -> Traced:
    """Trace `fn` on arrays or ShapeDtypeStructs.

    Raises:
        ArgumentError: an argument leaf is neither an array nor a number.
        TraceError: the function has ordered side effects, leaks tracers, branches on traced values, or returns what is
            no array.
    """
    dynamic = tuple(a for i, a in enumerate(args) if i not in static_argnums)
    names = _argument_names(fn, len(args), static_argnums)
    leaves, in_tree = flatten(dynamic, kwargs)
    paths = tuple(_input_path(path, names) for path, _ in leaves)
    abstract = [_abstract(leaf, path) for (_, leaf), path in zip(leaves, paths, strict=True)]

    alive: list[Callable[[], Any]] = []

    def flat(*flat_args: Any) -> Any:
        alive.append(jax_compat.current_trace())
        positional, keywords = jax.tree_util.tree_unflatten(in_tree, flat_args)
        rest = iter(positional)
        full = [args[i] if i in static_argnums else next(rest) for i in range(len(args))]
        return _checked_results(fn(*full, **keywords), _name(fn))

    jaxpr, out_shape = _make_jaxpr(flat, abstract, _name(fn))
    _check_leaks(jaxpr, alive[0], _name(fn))
    out_leaves, out_tree = tree_flatten_with_path(out_shape)
    out_paths = tuple(_simple(path) for path, _ in out_leaves)
    graph = build_graph(jax_compat.eliminate_dead_code(jaxpr), paths, out_paths)
    return Traced(graph, in_tree, out_tree, tuple(abstract), tuple(leaf for _, leaf in out_leaves))


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _make_jaxpr(flat: Callable[..., Any], abstract: Sequence[Any], name: str) -> tuple[Any, Any]:
    try:
        jaxpr, out_shape = jax.make_jaxpr(flat, return_shape=True)(*abstract)
    except _NEEDS_VALUE as error:
        detail = str(error).split("\n")[0].rstrip(".")
        raise TraceError(
            f"{name} needs the value of a traced array{_user_line(error)}: {detail}. "
            "Use jax.lax control flow or jnp.where, or pass the argument in static_argnums."
        ) from error
    except jax.errors.UnexpectedTracerError as error:
        raise TraceError(
            f"{name} uses a traced value that was kept from an earlier trace{_user_line(error)}. "
            "Return it from the function that computes it, and pass it as an argument."
        ) from error
    if jax_compat.has_ordered_effects(jaxpr):
        raise TraceError(
            f"{name} has ordered side effects ({', '.join(jax_compat.effect_names(jaxpr))}){_first_effect(jaxpr)}, "
            "which JAX runs on one device only. Use ordered=False."
        )
    return jaxpr, out_shape


#: What JAX raises where Python asks for the value of a traced array.
_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _first_effect(jaxpr: jex.ClosedJaxpr) -> str:
    """ " at file.py:12" of the first operation with a side effect."""
    frames = [jax_compat.user_frame(e.source_info) for e in jaxpr.jaxpr.eqns if e.effects]
    return next((f" at {os.path.basename(file)}:{line}" for file, line in frames if file), "")


def _checked_results(results: Any, name: str) -> Any:
    """The results themselves; TraceError naming the first leaf that is no array."""
    for path, leaf in tree_flatten_with_path(results)[0]:
        try:
            jax.typeof(leaf)
        except TypeError:
            where = f" at '{_simple(path)}'" if path else ""
            raise TraceError(
                f"{name} returns {type(leaf).__name__} {leaf!r:.60}{where}, which is no array; "
                "return arrays, numbers or None"
            ) from None
    return results


def _check_leaks(jaxpr: jex.ClosedJaxpr, trace: Callable[[], Any], name: str) -> None:
    """TraceError if the function uses a traced value from elsewhere, or leaves one behind."""
    for value in jaxpr.consts:
        if jax_compat.is_tracer(value):
            raise TraceError(
                f"{name} uses a traced {jax.typeof(value).str_short()} that is no argument of it: it was kept from an "
                "earlier trace, or belongs to a function around it. Pass it as an argument."
            )
    leak = jax_compat.leaked_value(trace)
    if leak is not None:
        type_, line = leak
        raise TraceError(
            f"{name} leaks a traced {type_}{f' computed at {line}' if line else ', an argument'}: it was kept in a "
            "global, a closure or an object, where it is worth nothing after tracing. Return it instead."
        )


def _user_line(error: BaseException) -> str:
    """ " at file.py:12" for the innermost frame outside JAX and autopar, or nothing."""
    here = os.path.dirname(os.path.abspath(__file__))
    jax_home = os.path.dirname(os.path.abspath(jax.__file__))
    found = ""
    tb = error.__traceback__
    while tb is not None:
        file = os.path.abspath(tb.tb_frame.f_code.co_filename)
        if not file.startswith((here + os.sep, jax_home + os.sep)) or os.sep + "zoo" + os.sep in file:
            found = f" at {os.path.basename(file)}:{tb.tb_lineno}"
        tb = tb.tb_next
    return found


def _argument_names(fn: Callable[..., Any], count: int, static: Sequence[int]) -> tuple[str, ...]:
    """A name for every traced positional argument: the parameter's, or its position."""
    try:
        params = [p.name for p in inspect.signature(fn).parameters.values() if p.kind in (0, 1)]
    except (TypeError, ValueError):
        params = []
    return tuple(params[i] if i < len(params) else str(i) for i in range(count) if i not in static)


def flatten(
    dynamic: tuple[Any, ...], kwargs: Any, how: Callable[..., Any] = tree_flatten_with_path
) -> tuple[list[Any], Any]:
    """Leaves and tree of (positional, keyword) arguments; ArgumentError if they are no pytree."""
    try:
        return how((dynamic, kwargs))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the arguments are no pytree that JAX can flatten: {error.__cause__ or error}") from None


def _simple(path: tuple[Any, ...]) -> str:
    return keystr(path, simple=True, separator="/")


def _input_path(path: tuple[Any, ...], names: tuple[str, ...]) -> str:
    """Path of a leaf of (positional, keywords): the argument's name, then the leaf's path in it."""
    group, which, *rest = path
    head = names[which.idx] if group.idx == 0 else str(which.key)
    return "/".join(part for part in (head, _simple(tuple(rest))) if part)


def _abstract(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
    try:
        aval = jax.typeof(leaf)
    except TypeError as error:
        raise ArgumentError(
            f"argument '{path}' is {type(leaf).__name__} {leaf!r:.60}, which is no array; "
            "pass arrays or numbers, or name the argument in static_argnums"
        ) from error
    if jax_compat.is_reference(aval):
        raise ArgumentError(f"argument '{path}' is a mutable array {aval.str_short()}; pass its value, ref[...]")
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
