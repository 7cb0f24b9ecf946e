"""From a Python function to a Graph.

`jax.make_jaxpr` runs the function on abstract arguments; calls (`jit`, `custom_jvp_call`, ...) are inlined with fresh
values, since one jaxpr object may be called many times; `scan`, `while`, `cond`, rematerialised bodies and unknown
higher-order primitives become operations with regions.

Phases come from JAX's name stacks: `transpose(` is the backward pass, `jvp(` the forward pass under differentiation;
an operation with neither is forward while differentiated operations still follow, and update afterwards.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from autopar import jax_compat
from autopar.errors import ArgumentError, TraceError
from autopar.graph import Atom, Constant, Graph, Op, Phase, Region, Type

#: Higher-order primitives whose bodies autopar looks into; any other keeps its body opaque.
REGION_NAMES = ("scan", "while", "cond", *jax_compat.REMAT)


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
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


# Building the graph


@dataclass
class _Builder:
    """The growing graph; local to `build_graph`."""

    types: list[Type] = field(default_factory=list)
    signatures: dict[Any, int] = field(default_factory=dict)
    known: dict[Any, Type] = field(default_factory=dict)
    constants: list[tuple[int, Any]] = field(default_factory=list)
    count: int = 0

    def type_of(self, aval: Any) -> Type:
        key = (aval.shape, aval.dtype) if hasattr(aval, "dtype") else str(aval)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = type_of_aval(aval)
        return found

    def value(self, aval: Any) -> int:
        self.types.append(self.type_of(aval))
        return len(self.types) - 1

    def signature(self, equation: jex.JaxprEqn, operands: Sequence[Atom]) -> int:
        types = tuple((self.types[a] if isinstance(a, int) else a.type) for a in operands)
        literal = tuple(not isinstance(a, int) for a in operands)
        params = tuple(equation.params.items())
        key = (equation.primitive.name, params, types, literal)
        try:
            hash(key)
        except TypeError:
            key = (equation.primitive.name, str(equation.params), types, literal)
        return self.signatures.setdefault(key, len(self.signatures))


def type_of_aval(aval: Any) -> Type:
    """Type of a JAX abstract value; tokens and other non-arrays become rank-0 values of no bytes."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return Type((), str(aval), 0)
    extended = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    itemsize = 8 if extended else np.dtype(dtype).itemsize
    return Type(tuple(aval.shape), str(dtype), itemsize)


def build_graph(jaxpr: jex.ClosedJaxpr, input_paths: Sequence[str], output_paths: Sequence[str]) -> Graph:
    """The graph of a closed jaxpr; see the module's text."""
    b = _Builder()
    inputs = tuple(b.value(v.aval) for v in jaxpr.jaxpr.invars)
    env: dict[Any, Atom] = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    constants = _constants(b, jaxpr, env)
    records: list[_Record] = []
    _emit(b, jaxpr.jaxpr, env, records, None)
    outputs = tuple(_read(b, env, v) for v in jaxpr.jaxpr.outvars)
    return Graph(
        tuple(b.types),
        inputs,
        tuple(input_paths),
        outputs,
        tuple(output_paths),
        (*constants, *b.constants),
        _finish(records),
        jax_compat.effect_names(jaxpr),
    )


def _constants(b: _Builder, jaxpr: jex.ClosedJaxpr, env: dict[Any, Atom]) -> tuple[tuple[int, Any], ...]:
    found: list[tuple[int, Any]] = []
    for var, array in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        value = b.value(var.aval)
        env[var] = value
        found.append((value, array))
    return tuple(found)


def _read(b: _Builder, env: dict[Any, Atom], atom: Any) -> Atom:
    if isinstance(atom, jex.Literal):
        return Constant(atom.val, b.type_of(atom.aval))
    return env[atom]


@dataclass(frozen=True, slots=True)
class _Record:
    """An operation before its phase is known: that takes a look at the whole program."""

    index: int
    equation: jex.JaxprEqn
    operands: tuple[Atom, ...]
    outputs: tuple[int, ...]
    stack: Any
    signature: int
    mark: Phase | None
    regions: tuple[tuple[str, tuple[int, ...], tuple[_Record, ...], tuple[Atom, ...], tuple[tuple[int, Any], ...]], ...]
    trips: int | None


def _emit(b: _Builder, jaxpr: Any, env: dict[Any, Atom], records: list[_Record], outer: Any) -> None:
    for equation in jaxpr.eqns:
        operands = tuple([_read(b, env, v) for v in equation.invars])
        stack = equation.source_info.name_stack
        stack = stack if outer is None else outer + stack
        inner = jax_compat.callee(equation)
        if inner is not None:
            _inline(b, equation, inner, operands, env, records, stack)
        else:
            records.append(_record(b, equation, operands, env, stack))


def _inline(
    b: _Builder,
    equation: jex.JaxprEqn,
    inner: jex.ClosedJaxpr,
    operands: tuple[Atom, ...],
    env: dict[Any, Atom],
    records: list[_Record],
    stack: Any,
) -> None:
    local: dict[Any, Atom] = dict(zip(inner.jaxpr.invars, operands, strict=True))
    # Closed-over arrays of inner calls become constants of the whole graph.
    b.constants.extend(_constants(b, inner, local))
    _emit(b, inner.jaxpr, local, records, stack)
    for var, result in zip(equation.outvars, inner.jaxpr.outvars, strict=True):
        env[var] = _read(b, local, result)


def _record(
    b: _Builder, equation: jex.JaxprEqn, operands: tuple[Atom, ...], env: dict[Any, Atom], stack: Any
) -> _Record:
    index = b.count
    b.count += 1
    regions, trips = _regions(b, equation, stack)
    outputs = tuple([b.value(v.aval) for v in equation.outvars])
    env.update(zip(equation.outvars, outputs, strict=True))
    return _Record(
        index, equation, operands, outputs, stack, b.signature(equation, operands), _mark(stack), regions, trips
    )


def _regions(b: _Builder, equation: jex.JaxprEqn, stack: Any) -> tuple[tuple[Any, ...], int | None]:
    """The bodies of a higher-order equation that autopar understands, and how often they run."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return (_region(b, "body", params["jaxpr"], stack),), params["length"]
    if name == "while":
        return (
            _region(b, "cond", params["cond_jaxpr"], stack),
            _region(b, "body", params["body_jaxpr"], stack),
        ), None
    if name == "cond":
        return tuple(_region(b, f"branch{i}", branch, stack) for i, branch in enumerate(params["branches"])), 1
    if name in jax_compat.REMAT:
        return (_region(b, "body", jax_compat.close(params["jaxpr"]), stack),), 1
    return (), 1


def _region(b: _Builder, name: str, jaxpr: jex.ClosedJaxpr, stack: Any) -> Any:
    inputs = tuple(b.value(v.aval) for v in jaxpr.jaxpr.invars)
    env: dict[Any, Atom] = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    constants = _constants(b, jaxpr, env)
    records: list[_Record] = []
    _emit(b, jaxpr.jaxpr, env, records, stack)
    return name, inputs, tuple(records), tuple(_read(b, env, v) for v in jaxpr.jaxpr.outvars), constants


def _mark(stack: Any) -> Phase | None:
    text = str(stack)
    if "transpose(" in text:
        return "backward"
    return "forward" if "jvp(" in text else None


def _finish(records: Sequence[_Record]) -> tuple[Op, ...]:
    """Operations with their phases: what follows the last differentiated operation is the update."""
    last = max((i for i, r in enumerate(records) if r.mark is not None), default=len(records))
    return tuple([_op(r, r.mark or ("forward" if i <= last else "update")) for i, r in enumerate(records)])


def _op(record: _Record, phase: Phase) -> Op:
    file, line = jax_compat.user_frame(record.equation.source_info)
    regions = tuple(
        Region(name, inputs, tuple(_op(r, r.mark or phase) for r in records), outputs, constants)
        for name, inputs, records, outputs, constants in record.regions
    )
    return Op(
        index=record.index,
        name=record.equation.primitive.name,
        signature=record.signature,
        inputs=record.operands,
        outputs=record.outputs,
        equation=record.equation,
        name_stack=record.stack,
        phase=phase,
        source=f"{os.path.basename(file)}:{line}" if file else "",
        regions=regions,
        trips=record.trips,
    )
