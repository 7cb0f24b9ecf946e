"""The only place that touches JAX beyond its public interface, or that branches on its version.

Each entry says which versions it was tried on. Everything else in autopar imports from here, so that a new JAX release
is the work of one package.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jaxlib.version
from jax._src import config as jax_config  # tried on 0.10.2, 0.12.0: settings that change what a trace gives
from jax._src import core as jax_core  # tried on 0.10.2, 0.12.0: the trace in force, to find values that outlive it
from jax._src import effects as jax_effects  # tried on 0.10.2, 0.12.0: which effects force an order
from jax._src import (
    source_info_util,  # tried on 0.10.2, 0.12.0: user frames and name stacks of equations
    xla_bridge,  # tried on 0.10.2, 0.12.0: whether a backend is running
)
from jax._src.interpreters import partial_eval  # tried on 0.10.2, 0.12.0: dead code elimination, also inside scans
from jax._src.state.discharge import discharge_state  # tried on 0.10.2, 0.12.0: mutable arrays as values
from jax.experimental.layout import Layout, with_layout_constraint  # tried on 0.10.2, 0.12.0
from jax.extend.core.primitives import convert_element_type_p

from autopar.jax_compat.meshes import SHARDING_TYPE_ERROR as SHARDING_TYPE_ERROR
from autopar.jax_compat.meshes import abstract_mesh_in_force as abstract_mesh_in_force
from autopar.jax_compat.meshes import auto_abstract_mesh as auto_abstract_mesh
from autopar.jax_compat.meshes import auto_mesh as auto_mesh
from autopar.jax_compat.meshes import automatic_axes as automatic_axes
from autopar.jax_compat.meshes import automatic_context as automatic_context
from autopar.jax_compat.meshes import constraint_equation as constraint_equation
from autopar.jax_compat.meshes import constraint_mistake as constraint_mistake
from autopar.jax_compat.meshes import explicit_mesh as explicit_mesh
from autopar.jax_compat.meshes import is_concrete_mesh as is_concrete_mesh
from autopar.jax_compat.meshes import is_explicit as is_explicit
from autopar.jax_compat.meshes import lacks_mesh as lacks_mesh
from autopar.jax_compat.meshes import no_mesh as no_mesh
from autopar.jax_compat.meshes import on_auto_mesh as on_auto_mesh
from autopar.jax_compat.meshes import without_sharding as without_sharding
from autopar.jax_compat.partitioning import attention_by_cudnn as attention_by_cudnn
from autopar.jax_compat.partitioning import described_gpu as described_gpu
from autopar.jax_compat.partitioning import lacks_cudnn as lacks_cudnn
from autopar.jax_compat.partitioning import partitioning_rule as partitioning_rule
from autopar.jax_compat.processes import Conversation as Conversation
from autopar.jax_compat.processes import ProcessStore as ProcessStore
from autopar.jax_compat.processes import end_without_the_others as end_without_the_others
from autopar.jax_compat.processes import is_distributed as is_distributed
from autopar.jax_compat.processes import process_store as process_store
from autopar.jax_compat.scans import scan_counts as scan_counts
from autopar.jax_compat.scans import scan_equation as scan_equation
from autopar.jax_compat.scans import with_flat_trees as with_flat_trees
from autopar.jax_compat.scans import without_flat_trees as without_flat_trees
from autopar.jax_compat.shard_maps import bind_in_body as bind_in_body
from autopar.jax_compat.shard_maps import bind_on_mesh as bind_on_mesh
from autopar.jax_compat.shard_maps import has_side_effects as has_side_effects
from autopar.jax_compat.shard_maps import shard_map_parts as shard_map_parts
from autopar.jax_compat.shard_maps import shard_mapped as shard_mapped

#: Primitives that only call another jaxpr once with the same arguments; the tracer inlines them.
#: name -> parameter that holds the callee. Tried on 0.10.2 and 0.12.0.
INLINED_CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # closed_call's name on 0.12
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_lin": "jaxpr",
}

#: Folders of installed packages.
_INSTALLED = tuple(dict.fromkeys(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")))

_AUTOPAR = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ZOO = os.path.join(_AUTOPAR, "zoo", "")

#: Name of the rematerialisation primitive. Tried on 0.10.2 and 0.12.0.
REMAT = "remat2"


def callee(equation: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The jaxpr an inlinable call equation runs, closed; None if the equation is no such call."""
    if equation.primitive.name == "call_hi_primitive":
        return _expanded(equation)
    parameter = INLINED_CALLS.get(equation.primitive.name)
    if parameter is None:
        return None
    return close(equation.params[parameter])


def _expanded(equation: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """The operation that JAX expands before lowering, such as `jnp.searchsorted`; at its line.

    Tried on 0.12.0; 0.10.2 has no such operations.
    """
    primitive: Any = equation.primitive
    with source_info_util.user_context(equation.source_info.traceback):
        return jax.make_jaxpr(functools.partial(primitive.to_lojax, **equation.params))(
            *(variable.aval for variable in equation.invars)
        )


def close(jaxpr: Any) -> jex.ClosedJaxpr:
    """A ClosedJaxpr from an open or a closed one."""
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, ())


def eliminate_dead_code(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program without equations that no result and no side effect needs; arguments are all kept.

    Tried on 0.10.2, 0.12.0.
    """
    return live_part(jaxpr, [True] * len(jaxpr.jaxpr.outvars), True)[0]


def live_part(
    jaxpr: jex.ClosedJaxpr, results: Sequence[bool], kept: bool | Sequence[bool] = False
) -> tuple[jex.ClosedJaxpr, list[bool]]:
    """What a jaxpr computes of some of its results, and which arguments it keeps: those it reads, and those of `kept`.

    Tried on 0.10.2, 0.12.0.
    """
    alive, read = partial_eval.dce_jaxpr(jaxpr.jaxpr, list(results), instantiate=kept)
    return jex.ClosedJaxpr(alive, jaxpr.consts), list(read)


def user_frame(source_info: Any) -> tuple[str, int]:
    """(file name, line) of the user's code behind an equation; ("", 0) when there is none. Tried on 0.10.2, 0.12.0.

    Inside an installed library, such as optax, it is the innermost call from outside; without one, the library's line.
    """
    return _frame(source_info.traceback)


@functools.lru_cache(maxsize=64)  # equations of one call follow each other
def _frame(traceback: Any) -> tuple[str, int]:
    codes, positions = traceback.raw_frames() if traceback else ((), ())
    for code, position in zip(codes, positions, strict=True):
        if is_own(code.co_filename):
            own_frame = source_info_util.raw_frame_to_frame(code, position)
            return own_frame.file_name, own_frame.start_line
    frame = source_info_util.user_frame(traceback)
    return ("", 0) if frame is None or is_ours(frame.file_name) else (frame.file_name, frame.start_line)


def is_ours(filename: str) -> bool:
    """Whether it is one of autopar's files; the zoo is written as users write, and counts as theirs."""
    return filename.startswith(_AUTOPAR) and not filename.startswith(_ZOO)


@functools.cache
def is_own(filename: str) -> bool:
    """Whether code of this file is the user's, not of JAX, Python, an installed package or autopar."""
    installed = any(filename.startswith(path) for path in _INSTALLED)
    return not installed and not is_ours(filename) and source_info_util.is_user_filename(filename)


@contextlib.contextmanager
def emitting(source_info: Any, name_stack: Any, tag: str) -> Iterator[None]:
    """Bind equations so that they keep the user's source line and carry `tag` in their name stack; without one, "".

    Tried on 0.10.2 and 0.12.0: 99-100% of collective bytes in HLO then trace back to an equation.
    """
    stack = name_stack.extend(tag) if tag else name_stack
    with source_info_util.user_context(source_info.traceback, name_stack=stack):
        yield


def bind(equation: jex.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Bind an equation's primitive to new operands, as JAX's own evaluator does. Tried on 0.10.2 and 0.12.0."""
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def in_row_major_order(x: Any) -> Any:
    """An array whose dimensions are in memory in their order, the last one innermost. Tried on 0.10.2 and 0.12.0."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def rematerialised(equation: jex.JaxprEqn, body: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    """Bind a rematerialisation equation to another body with the same results. Tried on 0.10.2 and 0.12.0.

    `jax.checkpoint` would not do: it only keeps the compiler from merging the recomputation while differentiating.
    """
    closed = jax.make_jaxpr(lambda *args: body(*args))(*operands)
    opened = partial_eval.convert_constvars_jaxpr(closed.jaxpr)
    return list(equation.primitive.bind(*closed.consts, *operands, **{**equation.params, "jaxpr": opened}))


def barrier_equation(avals: Sequence[Any]) -> jex.JaxprEqn:
    """`optimization_barrier` over values of these types. Tried on 0.10.2 and 0.12.0."""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    (equation,) = jax.make_jaxpr(lambda *xs: jax.lax.optimization_barrier(xs))(*types).jaxpr.eqns
    return equation


def equation_of(function: Callable[..., Any], avals: Sequence[Any], like: jex.JaxprEqn) -> jex.JaxprEqn:
    """The one equation that a function records on values of these types, at the line of another one and in its context.

    Tried on 0.10.2 and 0.12.0.
    """
    (equation,) = jax.make_jaxpr(function)(*avals).jaxpr.eqns
    return equation.replace(source_info=like.source_info, ctx=like.ctx)


def primitive(name: str) -> Any:
    """JAX's primitive of this name; KeyError if no module of JAX has one. Tried on 0.10.2."""
    return _primitives()[name]


@functools.cache
def _primitives() -> Mapping[str, Any]:
    modules = [vars(m) for name, m in sorted(sys.modules.items()) if name.partition(".")[0] == "jax"]
    return {x.name: x for values in modules for x in list(values.values()) if isinstance(x, jex.Primitive)}


def name_stack(scopes: str) -> Any:
    """A name stack whose text is `scopes`. Tried on 0.10.2."""
    return source_info_util.new_name_stack(*[scopes] if scopes else [])


def puts_into_sharding(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is a `device_put` into a sharding or a kind of memory. Tried on 0.10.2 and 0.12.0."""
    return any(not isinstance(d, jax.Device | None) for d in equation.params.get("devices", ()))


def without_source(equation: jex.JaxprEqn) -> jex.JaxprEqn:
    """The equation without the Python frames that recorded it. Tried on 0.10.2."""
    return equation.replace(source_info=source_info_util.new_source_info())


def rematted(name_stack: Any) -> Any:
    """The name stack of an operation that is recomputed in the backward pass, named as JAX names it."""
    return name_stack.extend(_REMATTED)


def is_rematted(name_stack: Any) -> bool:
    """True for the name stack, or its text, of such an operation. Tried on 0.10.2 and 0.12.0."""
    return _REMATTED in str(name_stack)


_REMATTED = "rematted_computation"


def hashes_keys(dtype: str) -> bool:
    """True if random bits of keys of a type are hashes of counters, two words at once: bit i is a hash of i alone.

    That is JAX's default for threefry keys. Tried on 0.10.2.
    """
    return dtype == "key<fry>" and jax_config.threefry_partitionable.value


def trace_context() -> Hashable:
    """JAX's settings that change what tracing and compiling give (x64, matmul precision, the mesh in force, ...).

    Part of the key of everything kept for a second call, as in JAX itself. Tried on 0.10.2 and 0.12.0.
    """
    return jax_config.trace_context()


def reduce_sum(array: Any, dims: Sequence[int]) -> Any:
    """The sum over some dimensions in the array's own precision (`jnp.sum` would widen halves).

    Tried on 0.10.2 and 0.12.0.
    """
    return jax.lax.reduce_sum(array, tuple(dims))


_REDUCTIONS_OVER_AXES = {"psum": jax.lax.reduce_sum, "pmax": jax.lax.reduce_max, "pmin": jax.lax.reduce_min}


def reduced_over_dimensions(equation: Any) -> Any | None:
    """The reduction that a collective over an axis of `jax.vmap` has become: one over dimensions; None if it is none.

    Tried on 0.10.2 and 0.12.0.
    """
    reduce = _REDUCTIONS_OVER_AXES.get(equation.primitive.name)
    axes = equation.params.get("axes", ())
    if reduce is None or equation.params.get("axis_index_groups") is not None or len(equation.invars) != 1:
        return None
    if not all(isinstance(axis, int) for axis in axes):
        return None
    aval = jax.ShapeDtypeStruct(equation.invars[0].aval.shape, equation.invars[0].aval.dtype)
    (reduction,) = jax.make_jaxpr(lambda x: reduce(x, tuple(axes)))(aval).eqns
    return equation.replace(primitive=reduction.primitive, params=reduction.params)


def weakly_typed(array: jax.Array) -> jax.Array:
    """The same array as one that a Python number has made, on the same devices. Tried on 0.10.2 and 0.12.0."""
    return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def is_reference(aval: Any) -> bool:
    """True for the type of a mutable array (`jax.new_ref`). Tried on 0.10.2 and 0.12.0."""
    return type(aval).__name__ == "AbstractRef"


def without_references(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same without the mutable arrays that it makes: writes return new values, as XLA is given them.

    Unchanged if JAX lacks this for an operation that takes one. Tried on 0.10.2 and 0.12.0.
    """
    if jax_core.internal_mutable_array_effect not in jaxpr.effects:
        return jaxpr
    try:
        return discharge_state(jaxpr)
    except NotImplementedError:
        return jaxpr


def kernel_effects(jaxpr: Any) -> tuple[frozenset[int], tuple[str, ...]]:
    """Positions of the references that a kernel's body writes, and names of its effects on other state.

    Debug prints do not count. Tried on 0.10.2 and 0.12.0.
    """
    of_references = [e for e in jaxpr.effects if isinstance(e, jax_effects.JaxprInputEffect)]
    names = {type(e).__name__ for e in jaxpr.effects if not isinstance(e, jax_effects.JaxprInputEffect)}
    written = {e.input for e in of_references if type(e).__name__ != "ReadEffect"}
    positions = frozenset(i for i, variable in enumerate(jaxpr.invars) if variable in written)
    return positions, tuple(sorted(names - {"DebugEffect"}))


def element_read(equation: Any) -> tuple[Any, ...] | None:
    """The indices of a kernel's read of one element of a reference, atoms or numbers; None for any other read.

    Tried on 0.10.2 and 0.12.0.
    """
    indexers = jax.tree.unflatten(equation.params["tree"], equation.invars[1:])
    if len(indexers) != 1 or equation.outvars[0].aval.shape:
        return None
    return tuple(getattr(indexers[0], "indices", ())) or None


def slices_written(equation: Any) -> tuple[tuple[Any, int], ...] | None:
    """(start, number of elements) along each dimension of what a kernel's write covers; None for other writes.

    A start is an atom or a number. Tried on 0.10.2 and 0.12.0.
    """
    indexers = jax.tree.unflatten(equation.params["tree"], equation.invars[2:])
    indices = getattr(indexers[0], "indices", ()) if len(indexers) == 1 else ()
    slices = [
        tuple(getattr(i, name, other) for name, other in (("start", i), ("size", 1), ("stride", 1))) for i in indices
    ]
    is_scalar = [getattr(getattr(start, "aval", start), "shape", ()) == () for start, *_ in slices]
    regular = all(is_scalar) and all(isinstance(size, int) and stride == 1 for _, size, stride in slices)
    return tuple((start, size) for start, size, _ in slices) if slices and regular else None


def is_tpu_kernel(params: Mapping[str, Any]) -> bool:
    """Whether a `pallas_call` has parameters of the compiler for TPUs. Tried on 0.10.2 and 0.12.0."""
    return type(params["compiler_params"]).__module__.startswith("jax._src.pallas.mosaic.") and not params["interpret"]


def is_tracer(value: Any) -> bool:
    """True for a value of a function that is being traced. Tried on 0.10.2 and 0.12.0."""
    return isinstance(value, jax_core.Tracer)


def frames() -> list[types.FrameType]:
    """Python's frames, from the caller outwards."""
    frame = inspect.currentframe()
    stack: list[types.FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack[1:]


def traces_for_shapes() -> bool:
    """Whether what is being traced will not run: it is for `jax.eval_shape` or `jax.make_jaxpr`.

    Tried on 0.10.2 and 0.12.0.
    """
    names = {f.f_code.co_name for f in frames() if f.f_globals.get("__name__", "").startswith("jax.")}
    return not names.isdisjoint(("eval_shape", "make_jaxpr_f"))


def current_trace() -> Callable[[], Any]:
    """A weak reference to the trace in force: it dies with the trace unless some traced value outlives it."""
    return weakref.ref(jax_core.trace_ctx.trace)


def leaked_value(trace: Callable[[], Any], find: Callable[[Callable[[Any], bool]], Any]) -> tuple[str, str] | None:
    """(type, "file:line") of a traced value that is kept after its trace has ended; None if none is.

    Args:
        trace: the weak reference to the trace.
        find: the nearest object, of those that may not keep a traced value, for which a predicate is true, or None.

    JAX's own leak check collects garbage after every inner trace. This looks once, and only where the trace is still
    there: that is so as well where a cycle or a cache of a library keeps it, which is no leak. The line is empty for an
    argument. Tried on 0.10.2 and 0.12.0.
    """
    ended = trace()
    if ended is None:
        return None
    tracer = find(lambda x: is_tracer(x) and hasattr(x, "_line_info") and _is_inside(x._trace, ended))
    if tracer is None:
        return None
    file, line = user_frame(tracer._line_info)
    return tracer.aval.str_short(), f"{os.path.basename(file)}:{line}" if file else ""


def _is_inside(trace: Any, outer: Any) -> bool:
    """Whether a trace is another one, or began while that was in force."""
    while trace is not None and trace is not outer:
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def effect_names(jaxpr: jex.ClosedJaxpr) -> tuple[str, ...]:
    """Sorted names of the effects of a jaxpr."""
    return tuple(sorted(str(e) for e in jaxpr.effects))


def has_ordered_effects(jaxpr: jex.ClosedJaxpr) -> bool:
    """True if some effect forces an order between steps, which runs on one device only. Tried on 0.10.2, 0.12.0."""
    return bool(jax_effects.ordered_effects.filter_in(jaxpr.effects))


#: Kinds of memory that JAX tells apart: a device's own, and its host's. Tried on 0.10.2 and 0.12.0, CPU and TPU v5e.
DEVICE_MEMORY, HOST_MEMORY = "device", "pinned_host"


def backends_are_initialized() -> bool:
    """Whether a backend, and with it threads, has been started in this process."""
    return xla_bridge.backends_are_initialized()


def quick_compilation() -> Mapping[str, str | bool | int]:
    """Compiler options for numbers that nobody waits for: little optimisation by LLVM, simple emitters of kernels.

    XLA partitions as always; what it fuses and how it assigns memory differ a little. The emitters can be chosen in
    0.10 and no more in 0.12. Tried on 0.10.2 and 0.12.0.
    """
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    quick |= {"xla_cpu_parallel_codegen_split_count": 1}  # small programs are one piece of work for LLVM
    simple = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    return {**quick, **simple}


def compiled(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """What is lowered, compiled, so that it takes arguments of less than a byte per element as well.

    JAX compares where arguments are in memory with what the program expects, and takes 4 bits per element for another
    layout than that of an int4 array, which says 0 (whole bytes). Without a layout there is nothing to compare. Tried
    on 0.10.2 and 0.12.0.
    """
    executable: Any = lowered.compile(compiler_options=dict(options) if options else None)
    program = executable._executable
    layouts = [None if x and x.sub_byte_element_size_in_bits else x for x in program._xla_in_layouts]
    if None in layouts:
        program._xla_in_layouts = layouts
    return executable


def memory_kinds(device: Any) -> tuple[str, ...]:
    """Kinds of memory that programs on a device can address; none where the backend does not tell them apart."""
    try:
        return tuple(memory.kind for memory in device.addressable_memories())
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return ()


def disables_jit() -> bool:
    """JAX's setting `jax_disable_jit`, read as often as a step is called. Tried on 0.10.2 and 0.12.0."""
    return jax_config.disable_jit.value


def debugs_nans() -> bool:
    """JAX's setting `jax_debug_nans`. Tried on 0.10.2 and 0.12.0."""
    config: Any = jax.config
    return bool(config.jax_debug_nans)


@contextlib.contextmanager
def own_source_lines() -> Iterator[None]:
    """Inside, JAX's compilation cache tells equal programs from other source lines apart.

    Otherwise a program found there names the lines of the one that was compiled first. Tried on 0.10.2 and 0.12.0.
    """
    with jax_config.compilation_cache_include_metadata_in_key(True):
        yield


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable of a jaxpr; () for what is no array."""
    return getattr(variable.aval, "shape", ())


def versions() -> str:
    """JAX's and jaxlib's versions, for cache keys and plans."""
    return f"jax-{jax.__version__} jaxlib-{jaxlib.version.__version__}"


def key_implementation(dtype: Any) -> str:
    """The name of the implementation of random keys of a type. Tried on 0.10.2 and 0.12.0."""
    return str(dtype._impl.name)


def is_from_pmap(fn: object) -> bool:
    """Whether `jax.pmap` made a function, which can be lowered but not traced. Tried on 0.10.2 and 0.12.0."""
    return isinstance(fn, types.FunctionType) and hasattr(fn, "lower") and not hasattr(fn, "trace")
