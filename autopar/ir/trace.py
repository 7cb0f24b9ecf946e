"""From a Python function to a Graph.

`jax.make_jaxpr` runs the function on abstract arguments, `autopar.ir.jaxpr.simplify` removes what XLA would remove, and
`autopar.ir.jaxpr` builds the graph from the jaxpr. Errors of JAX are raised again in the terms of the user's program:
the argument's path, the value, the line.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from autopar import jax_compat
from autopar.errors import ArgumentError, PinError, TraceError
from autopar.ir import arguments, explicit, side_effects
from autopar.ir.arguments import flatten
from autopar.ir.graph import Graph, Op
from autopar.ir.jaxpr import build_graph
from autopar.ir.jaxpr.simplify import simplified
from autopar.ir.op_sets import ATTENTION


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph with what is needed to call it: the trees of arguments and results.

    Attributes:
        graph: the program.
        in_tree, out_tree: trees of arguments and results.
        in_avals, out_avals: their shapes and types, without shardings.
        pins: positions of argument leaves -> the PartitionSpec in their types; see `autopar.ir.explicit`.
        mesh: the Explicit mesh of the arguments, or the Explicit mesh that is set; None if there is none.
        argument_leaves: positions of parameters -> positions of the leaves of the argument, which may be a keyword's.
    """

    graph: Graph
    in_tree: Any
    out_tree: Any
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    pins: Mapping[int, PartitionSpec] = field(default_factory=dict)
    mesh: Mesh | AbstractMesh | None = None
    argument_leaves: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def leaves(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Leaves of arguments with the structure of those that were traced; ArgumentError for others."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.in_tree:
            raise ArgumentError(f"the step was traced for arguments {self.in_tree}, called with {tree}")
        return leaves


def trace(
    fn: Callable[..., Any],
    *args: Any,
    static_argnums: Sequence[int] = (),
    mesh_axes: Mapping[str, int] = MappingProxyType({}),
    **kwargs: Any,
) -> Traced:
    """Trace `fn` on arrays or ShapeDtypeStructs; `autopar.ir.arguments` converts other arguments.

    Args:
        fn: the function.
        *args: its arguments.
        static_argnums: positions of arguments that are no arrays.
        mesh_axes: axis name -> size of the mesh to plan for, whose axes a `with_sharding_constraint` with a bare
            PartitionSpec may name; empty: not known.
        **kwargs: keyword arguments of `fn`.

    Raises:
        ArgumentError: an argument leaf is neither an array nor a number.
        PinError: arguments are on different Explicit meshes; or a `with_sharding_constraint` has a bare PartitionSpec
            and no mesh is known, names an axis that the mesh lacks, or does not fit its value.
        TraceError: the function has ordered side effects, leaks tracers, branches on traced values, uses an axis name
            that is not bound, changes an argument such that the change is lost, or returns something that is not an
            array.
    """
    paths, leaves, in_tree, names = _named_leaves(fn, args, kwargs, static_argnums)
    abstract = list(map(_abstract, leaves, paths))
    shardings = list(map(explicit.sharding_of, leaves))
    mesh = _explicit_mesh(shardings, paths)

    traces: list[Callable[[], Any]] = []

    def flat(*flat_args: Any) -> Any:
        traces.append(jax_compat.current_trace())
        pure = jax.tree.unflatten(in_tree, flat_args)
        positional, keywords = step_arguments = arguments.to_step(pure)
        snapshot = side_effects.snapshot(step_arguments)
        result = fn(*arguments.merge_static(args, static_argnums, positional), **keywords)
        _check_attributes(snapshot, names, _name(fn))
        written = {
            _input_path(path, names): x for path, x in side_effects.overwritten(snapshot, step_arguments).items()
        }
        return _checked_results(arguments.from_step(pure, step_arguments, result), _name(fn)), written

    typed = [_typed(aval, sharding) for aval, sharding in zip(abstract, shardings, strict=True)]
    jaxpr, (out_shape, written) = _make_jaxpr(flat, typed, _name(fn), mesh_axes)
    jaxpr = _without_written(jaxpr, tuple(written), _name(fn))
    _check_leaks(jaxpr, traces[-1], fn)
    jaxpr = jax_compat.without_references(jaxpr)
    jaxpr = jaxpr if mesh is None else explicit.to_auto_axes(jaxpr)
    out_leaves, out_tree = jax.tree.flatten(out_shape)
    out_paths = _output_paths(out_shape, names)
    graph = build_graph(simplified(jaxpr), paths, out_paths)
    pins = {i: pin for i, s in enumerate(shardings) if (pin := explicit.pin(s, len(abstract[i].shape))) is not None}
    out_avals = tuple(_typed(leaf, None) for leaf in out_leaves)
    argument_leaves = _argument_leaves(fn, args, kwargs, static_argnums, in_tree)
    return Traced(graph, in_tree, out_tree, tuple(abstract), out_avals, pins, mesh, argument_leaves)


def _check_attributes(snapshot: side_effects.ArgumentSnapshot, names: tuple[str, ...], name: str) -> None:
    changed = side_effects.changed_attribute(snapshot)
    if changed is not None:
        path, attribute = changed
        class_name = type(snapshot.leaves[path]).__name__
        raise TraceError(
            f"{name} sets the attribute '{attribute}' of '{_input_path(path, names)}' ({class_name}), which "
            "happens once, while it is traced, and not at every step. Keep what changes in arrays that are passed in "
            "and returned."
        )


def _without_written(jaxpr: jex.ClosedJaxpr, paths: Sequence[str], name: str) -> jex.ClosedJaxpr:
    """The program without its last results, the values written into arguments; TraceError if one is lost."""
    if not paths:
        return jaxpr
    count = len(jaxpr.jaxpr.outvars) - len(paths)
    values = jaxpr.jaxpr.outvars[count:]
    jaxpr = jex.ClosedJaxpr(jaxpr.jaxpr.replace(outvars=jaxpr.jaxpr.outvars[:count]), jaxpr.consts)
    lost = side_effects.first_unused(jaxpr, values)
    if lost is not None:
        producer = next(e for e in jaxpr.jaxpr.eqns if lost in e.outvars)
        file, line = jax_compat.user_frame(producer.source_info)
        raise TraceError(
            f"{name} writes {lost.aval.str_short()} into its argument '{paths[values.index(lost)]}'"
            f"{f' at {os.path.basename(file)}:{line}' if file else ''} and neither returns nor uses it. Containers "
            "that it gets are copies, so the update is lost. Return it, and pass what was returned to the next step."
        )
    return jaxpr


def _typed(aval: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array; without a sharding, shape and dtype alone."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))


def _explicit_mesh(shardings: Sequence[NamedSharding | None], paths: Sequence[str]) -> Mesh | AbstractMesh | None:
    """The Explicit mesh of arguments with shardings in their types; else the mesh that is set, if it is Explicit."""
    meshes = [(s.mesh, path) for s, path in zip(shardings, paths, strict=True) if s is not None]
    current = jax_compat.explicit_mesh()
    if meshes and current is not None and current.shape != meshes[0][0].shape:
        raise PinError(
            f"'{meshes[0][1]}' lies on the Explicit mesh {dict(meshes[0][0].shape)}, but the mesh in force is "
            f"{dict(current.shape)}; set that of the arguments with jax.set_mesh"
        )
    for mesh, path in meshes:
        if mesh.shape != meshes[0][0].shape:
            raise PinError(
                f"'{meshes[0][1]}' lies on the Explicit mesh {dict(meshes[0][0].shape)} and '{path}' on "
                f"{dict(mesh.shape)}; move them to one mesh with jax.device_put"
            )
    return meshes[0][0] if meshes else current


def attention_of_cudnn(graph: Graph) -> Op | None:
    """The first operation that cuDNN computes, on GPUs alone; None if there is none."""
    return next((op for op in graph.walk() if op.name in ATTENTION), None)


def needs_gpu(name: str, op: Op, where: str) -> TraceError:
    """The error for an operation of cuDNN that is to run or to be compiled elsewhere; `where`: in words."""
    return TraceError(
        f"{name} uses attention of cuDNN{f' at {op.source}' if op.source else ''}, which runs on GPUs; {where}. Use "
        'jax.nn.dot_product_attention(..., implementation="xla"), or plan for GPUs without running: '
        'autopar.plan(step, ..., cluster="dgx-h100")'
    )


def is_tracing() -> bool:
    """Whether `trace` is running a function; steps that the function calls are then planned as parts of it."""
    return any(frame.f_code is _make_jaxpr.__code__ for frame in jax_compat.frames())


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _make_jaxpr(
    flat: Callable[..., Any], abstract: Sequence[Any], name: str, mesh_axes: Mapping[str, int]
) -> tuple[Any, Any]:
    def made() -> tuple[Any, Any]:
        try:
            return jax.make_jaxpr(flat, return_shape=True)(*abstract)
        except RuntimeError as error:
            if not jax_compat.lacks_cudnn(error):
                raise
            with jax_compat.described_gpu():  # a GPU need not be at hand to plan for one
                return jax.make_jaxpr(flat, return_shape=True)(*abstract)

    try:
        try:
            jaxpr, out_shape = made()
        except Exception as error:
            # a mesh in force changes the types of all values: it is set for programs that need one alone
            if not (mesh_axes and jax_compat.lacks_mesh(error)):
                raise
            with jax_compat.abstract_mesh_in_force(tuple(mesh_axes.values()), tuple(mesh_axes)):
                jaxpr, out_shape = made()
    except _NEEDS_VALUE as error:
        detail = str(error).split("\n")[0].rstrip(".")
        raise TraceError(
            f"{name} needs the value of a traced array{_user_line(error)}: {detail}. "
            "Use jax.lax control flow or jnp.where, or pass the argument in static_argnums."
        ) from error
    except _flax_trace_errors() as error:
        raise TraceError(
            f"{name} changes an object of Flax that is no argument of it{_user_line(error)}: "
            f"{str(error).partition(' (http')[0]}. Pass the module, the optimizer or the nnx.Rngs as an argument."
        ) from error
    except jax.errors.UnexpectedTracerError as error:
        raise TraceError(
            f"{name} uses a traced value that was kept from an earlier trace{_user_line(error)}. "
            "Return it from the function that computes it, and pass it as an argument."
        ) from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise TraceError(
            f"{name} communicates over a named axis that is not there{_user_line(error)}: {str(error).split('. ')[0]}. "
            "Remove pmean, psum and their like: the step computes the whole batch. Or call them inside jax.shard_map "
            "or jax.vmap."
        ) from error
    except jax_compat.SHARDING_TYPE_ERROR as error:
        raise TraceError(
            f"{name} does not fit the shardings that its types carry{_user_line(error)}: {error}. Say what is wanted "
            "with jax.sharding.reshard or out_sharding, or pass arrays on a mesh with Auto axes."
        ) from error
    except Exception as error:
        if str(error).startswith("Non-hashable static arguments"):
            raise TraceError(
                f"{name} passes a traced value to a static argument of jax.jit{_user_line(error)}. Name the argument "
                "in static_argnums or static_argnames of autopar as well."
            ) from error
        wrong = _wrong_constraint(error)
        if wrong is None:
            raise
        raise PinError(f"{name}: {wrong}") from error
    if jax_compat.has_ordered_effects(jaxpr):
        raise TraceError(
            f"{name} has ordered side effects ({', '.join(jax_compat.effect_names(jaxpr))}){_first_effect(jaxpr)}, "
            "which JAX runs on one device only. Use ordered=False."
        )
    return jaxpr, out_shape


def _wrong_constraint(error: Exception) -> str | None:
    """What is wrong with the `with_sharding_constraint` that raised an error of JAX; None for another error."""
    mistake = jax_compat.constraint_mistake(error)
    if mistake is None:
        return None
    detail = str(error).split("\n")[0].rstrip(".")
    return f"with_sharding_constraint{_user_line(error)} {_CONSTRAINT_MISTAKES[mistake]}".replace("{detail}", detail)


#: Kind of mistake of `jax_compat.constraint_mistake` -> what to say.
_CONSTRAINT_MISTAKES: Mapping[str, str] = MappingProxyType(
    {
        "no mesh": (
            "has a PartitionSpec, and no mesh has its axes: give the mesh to plan for, such as "
            "mesh={'data': 4, 'model': 2}, or set one with jax.set_mesh, or constrain with NamedSharding(mesh, spec)"
        ),
        "axis": (
            "names an axis that the mesh lacks: {detail}. Name axes of the mesh, or give a mesh with those that the "
            "step names"
        ),
        "explicit": (
            "names Explicit axes, along which JAX lets it only assert what the type says. Move the value with "
            "jax.sharding.reshard, which is a pin, or make the mesh with axis_types=(jax.sharding.AxisType.Auto, ...)"
        ),
        "other": "does not fit its value: {detail}",
    }
)


def _flax_trace_errors() -> tuple[type[Exception], ...]:
    """Errors of Flax for an object from outside of a trace that is changed inside; none if Flax is not loaded."""
    flax = sys.modules.get("flax.errors")
    return () if flax is None else (flax.TraceContextError,)


#: Errors that JAX raises where Python needs the value of a traced array.
_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _first_effect(jaxpr: jex.ClosedJaxpr) -> str:
    """ " at file.py:12" of the first operation with a side effect."""
    return _first_line(e for e in jaxpr.jaxpr.eqns if e.effects)


def _first_line(equations: Iterable[jex.JaxprEqn]) -> str:
    """ " at file.py:12" of the first operation that has a line, or nothing."""
    frames = (jax_compat.user_frame(e.source_info) for e in equations)
    return next((f" at {os.path.basename(file)}:{line}" for file, line in frames if file), "")


def _checked_results(results: Any, name: str) -> Any:
    """The results themselves; TraceError naming the first leaf that is not an array."""
    for path, leaf in tree_flatten_with_path(results)[0]:
        where = f" at '{_simple(path)}'" if path else ""
        try:
            aval = jax.typeof(leaf)
        except TypeError:
            raise TraceError(
                f"{name} returns {type(leaf).__name__} {leaf!r:.60}{where}, which is no array; "
                "return arrays, numbers or None"
            ) from None
        if jax_compat.is_reference(aval):
            raise TraceError(f"{name} returns a mutable array {aval.str_short()}{where}; return its value, ref[...]")
    return results


def _check_leaks(jaxpr: jex.ClosedJaxpr, trace: Callable[[], Any], fn: Callable[..., Any]) -> None:
    """TraceError if the function uses a traced value from elsewhere, or keeps one where it can reach it again."""
    name = _name(fn)
    for variable, value in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        if jax_compat.is_reference(variable.aval):
            line = _first_line(e for e in jaxpr.jaxpr.eqns if any(v is variable for v in e.invars))
            raise TraceError(
                f"{name} uses a mutable array {variable.aval.str_short()} that it does not make{line}. Pass its value, "
                "ref[...], as an argument, and return the new one."
            )
        if jax_compat.is_tracer(value):
            raise TraceError(
                f"{name} uses a traced {jax.typeof(value).str_short()} that is no argument of it: it was kept from an "
                "earlier trace, or belongs to a function around it. Pass it as an argument."
            )
    leak = jax_compat.leaked_value(trace, partial(side_effects.find, fn))
    if leak is not None:
        type_, line = leak
        raise TraceError(
            f"{name} leaks a traced {type_}{f' computed at {line}' if line else ', an argument'}: it was kept in a "
            "global, a closure or an object, where it is worth nothing after tracing. Return it instead."
        )


def _user_line(error: BaseException) -> str:
    """ " at file.py:12" for the innermost frame of the user's code, outside of installed packages, or nothing."""
    line = ""
    tb = error.__traceback__
    while tb is not None:
        if jax_compat.is_own(tb.tb_frame.f_code.co_filename):
            line = f" at {os.path.basename(tb.tb_frame.f_code.co_filename)}:{tb.tb_lineno}"
        tb = tb.tb_next
    return line


def _parameters(fn: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters; none if the function has no signature."""
    try:
        return [p.name for p in inspect.signature(fn).parameters.values() if p.kind in (0, 1)]
    except (TypeError, ValueError):
        return []


def _argument_leaves(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], static: Sequence[int], in_tree: Any
) -> Mapping[int, Sequence[int]]:
    """Position of a parameter -> positions of the leaves of its argument, given by position or by keyword."""
    parameters = _parameters(fn)
    positions = [i for i in range(len(args)) if i not in static]
    positions += [parameters.index(name) if name in parameters else -1 for name in sorted(kwargs)]
    counts = [tree.num_leaves for group in in_tree.children() for tree in group.children()]
    starts = itertools.accumulate(counts, initial=0)
    each = zip(positions, starts, counts, strict=False)
    return {i: range(start, start + count) for i, start, count in each if i >= 0}


def check_values(fn: Callable[..., Any], args: Sequence[Any], static: Sequence[int] = ()) -> None:
    """Check that the arguments of a call, as pytrees of arrays, have values.

    Raises:
        ArgumentError: an argument leaf is no array or number, or a shape alone.
        DonatedError: an array was donated to an earlier step.
    """
    paths, leaves, _, _ = _named_leaves(fn, args, {}, static)
    for path, leaf in zip(paths, leaves, strict=True):
        _abstract(leaf, path)
        arguments.check_value(leaf, path)


def _named_leaves(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], static: Sequence[int]
) -> tuple[tuple[str, ...], list[Any], Any, tuple[str, ...]]:
    """Paths, leaves and tree of the traced arguments, and the names of the positional ones."""
    parameters = _parameters(fn)
    positions = [i for i in range(len(args)) if i not in static]
    names = tuple(parameters[i] if i < len(parameters) else str(i) for i in positions)
    leaves, in_tree = flatten((tuple(args[i] for i in positions), kwargs), tree_flatten_with_path)
    return tuple(_input_path(path, names) for path, _ in leaves), [leaf for _, leaf in leaves], in_tree, names


def _simple(path: tuple[Any, ...]) -> str:
    return keystr(path, simple=True, separator="/")


def _input_path(path: tuple[Any, ...], names: tuple[str, ...]) -> str:
    """Path of a leaf of (positional, keywords): the argument's name, then the leaf's path in it."""
    group, which, *rest = path
    head = names[which.idx] if group.idx == 0 else str(which.key)
    return "/".join(part for part in (head, _simple(tuple(rest))) if part)


def _output_paths(results: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Paths of the results; the new value of an argument has the path of the argument."""
    if not isinstance(results, arguments.Returned):
        return tuple(_simple(path) for path, _ in tree_flatten_with_path(results)[0])
    updates, out = (tree_flatten_with_path(tree)[0] for tree in (results.updates, results.out))
    return tuple(_input_path(path, names) for path, _ in updates) + tuple(_simple(path) for path, _ in out)


def _abstract(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _typed(leaf, None)
    try:
        aval = jax.typeof(leaf)
    except ValueError as error:  # a masked array of NumPy
        raise ArgumentError(f"argument '{path}' is {type(leaf).__name__}: {error}") from error
    except (TypeError, OverflowError) as error:
        raise ArgumentError(
            f"argument '{path}' is {type(leaf).__name__} {leaf!r:.60}, which is no array; "
            "pass arrays or numbers, register its class as a pytree, or name the argument in static_argnums"
        ) from error
    if jax_compat.is_reference(aval):
        raise ArgumentError(f"argument '{path}' is a mutable array {aval.str_short()}; pass its value, ref[...]")
    narrower = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
    if isinstance(leaf, jax.Array) and narrower != aval.dtype:
        raise ArgumentError(
            f"argument '{path}' is {aval.str_short()}, and jax_enable_x64 is off, so that JAX computes in {narrower}; "
            f"pass it as {narrower}, with .astype('{narrower}'), or call under jax.enable_x64(True)"
        )
    return _typed(aval, None)
