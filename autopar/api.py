"""What users call: `parallelize`, `plan`, `gather`.

    first call      trace -> plan -> compile, for these shapes
    later calls     flatten, place what is not in place, run

A `ParallelFunction` keeps one entry per argument structure (tree, shapes, dtypes, static values); everything in an
entry is frozen, so that a second call neither traces nor plans again.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import codegen, jax_compat, meshes
from autopar.errors import ArgumentError, AutoparWarning, DonatedError, PinError, PlanMismatchError
from autopar.graph import verify as verify_graph
from autopar.meshes import Target
from autopar.planning import Options, Planned, collector_paused, make_plan
from autopar.plans import Plan, check_matches
from autopar.rules import rules_of
from autopar.settings import Settings, settings
from autopar.trace import Traced, flatten, trace


def parallelize(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a train step, or any jittable function, run on many devices.

    Use it bare, with options, or as a call: `@parallelize`, `@parallelize(mesh=(2, 4))`, `parallelize(fn, mesh=...)`.

    Options:
        cluster: prices the mesh; default the local devices.
        mesh: jax Mesh, AbstractMesh, tuple of sizes or {name: size}; default: every factorisation is searched.
        batch_argnums: positional arguments that hold the batch; default: those that are no state.
        donate_argnums: positional arguments whose buffers may be reused; default: state leaves, never the batch.
        static_argnums: positional arguments that are not traced; they must be hashable.
        pins: {path glob, "arg:i" or "out:i": PartitionSpec}, layouts that the plan must keep.
        solver: "auto", "cbc" or "highs"; time_limit: seconds.
        plan: a Plan, or the path of a saved one, to run instead of planning.
        progress: print phases to stderr.
        num_microbatches, stages, schedule, remat, memory_budget, per_microbatch: "auto" only, in this version.

    Returns:
        A `ParallelFunction`, called like `fn`.

    Raises:
        ArgumentError: an unknown option or a value out of range.
    """
    if fn is None:
        return functools.partial(parallelize, **options)
    if not callable(fn):
        raise ArgumentError(f"parallelize takes a function, got {type(fn).__name__} {fn!r:.60}")
    return ParallelFunction(fn, settings(options))


def plan(fn: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    """The plan of `fn` for these arguments (arrays or ShapeDtypeStructs); needs no devices.

    Options are those of `parallelize` but `plan`. Without `cluster`, a given mesh is priced as the preset dgx-h100.
    """
    fn = fn.__wrapped__ if isinstance(fn, ParallelFunction) else fn
    if not callable(fn):
        raise ArgumentError(f"plan takes a function, got {type(fn).__name__} {fn!r:.60}")
    return _plan(fn, args, {}, settings(options), local=False).planned.plan


def gather(tree: Any) -> Any:
    """Whole host values (numpy arrays) of a tree of possibly sharded arrays; other leaves are kept."""
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) and not _extended(x) else x, tree)


def _extended(x: jax.Array) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A plan with the trace it belongs to and the mesh it is for."""

    traced: Traced
    planned: Planned
    target: Target


@jax_compat.automatic_axes()
def _plan(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], s: Settings, local: bool
) -> _Prepared:
    with collector_paused():
        return _plan_uninterrupted(fn, args, kwargs, s, local)


def _plan_uninterrupted(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], s: Settings, local: bool
) -> _Prepared:
    begin = time.perf_counter()
    traced = trace(fn, *args, static_argnums=s.static_argnums, **kwargs)
    verify_graph(traced.graph)
    trace_s = time.perf_counter() - begin
    if s.plan is not None:
        return _loaded(fn, traced, s)
    candidates = meshes.targets(s.mesh, s.cluster, local=local)
    _check_batch(fn, traced, args, s, candidates)
    options = Options(pins=s.pins, solver=s.solver, time_limit=s.time_limit, donate=_donated(traced, args, s))
    best: _Prepared | None = None
    misfits: list[PinError] = []  # a pin may name axes that only some of the candidates have
    for target in candidates:
        try:
            planned = make_plan(traced, target.logical, target.cluster.name, options, trace_s)
        except PinError as error:
            misfits.append(error)
            continue
        if s.progress:
            _report(_name(fn), planned.plan)
        if best is None or planned.plan.step_time_s < best.planned.plan.step_time_s * (1 - 1e-9):
            best = _Prepared(traced, planned, target)
    if best is None:
        raise misfits[0]
    for warning in best.planned.solution.warnings:
        warnings.warn(f"{_name(fn)}: {warning}", AutoparWarning, stacklevel=_user_stacklevel())
    return best


def _user_stacklevel() -> int:
    """The `stacklevel` at which a warning of the caller points to the user's line."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("autopar.", "contextlib")):
        level, frame = level + 1, frame.f_back
    return level


def _report(name: str, made: Plan) -> None:
    """What planning for one mesh took, on stderr."""
    phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in made.phases.items())
    mesh = dict(zip(made.mesh_names, made.mesh_sizes, strict=True))
    print(f"autopar: {name} on mesh {mesh}: {made.step_time_s:.3g} s per step; {phases}", file=sys.stderr)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _loaded(fn: Callable[..., Any], traced: Traced, s: Settings) -> _Prepared:
    """A plan from elsewhere, checked against this function and, if one is given, this mesh."""
    assert s.plan is not None
    check_matches(s.plan, traced.graph, _name(fn))
    mesh = s.mesh if s.mesh is not None else dict(zip(s.plan.mesh_names, s.plan.mesh_sizes, strict=True))
    (target,) = meshes.targets(mesh, s.cluster, local=True)
    if (target.logical.sizes, target.logical.names) != (s.plan.mesh_sizes, s.plan.mesh_names):
        raise PlanMismatchError(
            f"the plan is for the mesh {dict(zip(s.plan.mesh_names, s.plan.mesh_sizes, strict=True))}, "
            f"but mesh {target.logical.shape} was given. Plan again, or leave out mesh."
        )
    planned = Planned(s.plan, traced.graph, rules_of(traced.graph), None, None)  # type: ignore[arg-type]
    return _Prepared(traced, planned, target)


def _leaf_ranges(args: Sequence[Any], static: Sequence[int]) -> Mapping[int, range]:
    """Positional argument -> the positions of its leaves among all traced leaves."""
    found: dict[int, range] = {}
    start = 0
    for i, arg in enumerate(args):
        if i not in static:
            count = len(jax.tree.leaves(arg))
            found[i] = range(start, start + count)
            start += count
    return found


def _donated(traced: Traced, args: Sequence[Any], s: Settings) -> tuple[int, ...] | str:
    if isinstance(s.donate_argnums, str):
        return "auto"
    ranges = _leaf_ranges(args, s.static_argnums)
    unknown = [n for n in s.donate_argnums if n not in ranges]
    if unknown:
        raise ArgumentError(f"donate_argnums={s.donate_argnums}: there is no traced argument {unknown[0]}")
    return tuple(i for n in s.donate_argnums for i in ranges[n])


def _check_batch(
    fn: Callable[..., Any], traced: Traced, args: Sequence[Any], s: Settings, candidates: Sequence[Target]
) -> None:
    """A batch that the user names must divide by some axis of the mesh."""
    if isinstance(s.batch_argnums, str):
        return
    ranges = _leaf_ranges(args, s.static_argnums)
    graph = traced.graph
    for number in s.batch_argnums:
        if number not in ranges:
            raise ArgumentError(f"batch_argnums={s.batch_argnums}: {_name(fn)} has no traced argument {number}")
        for i in ranges[number]:
            shape = graph.types[graph.inputs[i]].shape
            axes = sorted({size for t in candidates for size in t.logical.sizes if size > 1})
            if axes and (not shape or all(shape[0] % size for size in axes)):
                readers = [op.source for op in graph.walk() if graph.inputs[i] in op.inputs and op.source]
                raise ArgumentError(
                    f"batch argument '{graph.input_paths[i]}' of shape {shape}"
                    f"{f', read at {readers[0]},' if readers else ''} does not divide by any mesh axis "
                    f"({', '.join(map(str, axes))}). Use a batch that is a multiple, or leave batch_argnums on 'auto'."
                )


# Running


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled step. `programs` maps names to JAX's compiled objects; a plan without stages has one, "step"."""

    plan: Plan
    programs: Mapping[str, Any]
    _prepared: _Prepared
    _shardings: tuple[NamedSharding, ...]

    def as_text(self) -> str:
        """The compiled HLO."""
        return "\n".join(p.as_text() for p in self.programs.values())

    def memory_analysis(self) -> Any:
        """XLA's memory statistics of the step (per device)."""
        return self.programs["step"].memory_analysis()

    def cost_analysis(self) -> Any:
        """XLA's cost statistics of the step (per device)."""
        return self.programs["step"].cost_analysis()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the traced arguments (static ones left out)."""
        return self.run(jax.tree.leaves((args, kwargs)))

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run on flat argument leaves."""
        donated = frozenset(self.plan.donated)
        placed = [
            _place(x, sharding, i in donated, self.plan.input_paths[i])
            for i, (x, sharding) in enumerate(zip(leaves, self._shardings, strict=True))
        ]
        results = self.programs["step"](*placed)
        return jax.tree.unflatten(self._prepared.traced.out_tree, results)


def _place(leaf: Any, sharding: NamedSharding, donated: bool, path: str) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise DonatedError(
                f"'{path}' of shape {leaf.shape} was donated to an earlier step and its memory reused. "
                "Use the state that the step returned, or pass donate_argnums=()."
            )
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        # A copy, so that donating it cannot take the caller's own buffer away: device_put aliases the shard of the
        # device that holds the array, whatever may_alias says, when it replicates (seen on 0.10.2).
        return jax.device_put(leaf.copy() if donated else leaf, sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ArgumentError(
            f"'{path}' is {leaf}; a call needs arrays. With shapes alone use .plan(...) or .lower(...)."
        )
    return jax.device_put(leaf, sharding)


@dataclass(frozen=True, eq=False)
class Lowered:
    """A planned step before compilation, in JAX's ahead-of-time convention."""

    plan: Plan
    jax_lowered: Any
    _prepared: _Prepared
    _shardings: tuple[NamedSharding, ...]

    def as_text(self) -> str:
        """The StableHLO."""
        return self.jax_lowered.as_text()

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Executable:
        """Compile for the devices at hand."""
        compiled = self.jax_lowered.compile(compiler_options=dict(compiler_options) if compiler_options else None)
        return Executable(self.plan, {"step": compiled}, self._prepared, self._shardings)


class ParallelFunction:
    """A function that plans and compiles itself for the shapes it is called with.

    Called while another function is being traced, it is inlined there, and the outermost `parallelize` plans it.
    """

    def __init__(self, fn: Callable[..., Any], chosen: Settings) -> None:
        functools.update_wrapper(self, fn)
        self.__wrapped__ = fn
        self.settings = chosen
        self._prepared: dict[Any, _Prepared] = {}
        self._executables: dict[Any, Executable] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, key = self._key(args, kwargs)
        if any(map(jax_compat.is_tracer, leaves)):
            return self.__wrapped__(*args, **kwargs)
        executable = self._executables.get(key)
        if executable is None:
            executable = self._executables[key] = self.lower(*args, **kwargs).compile()
        return executable.run(leaves)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ShapeDtypeStructs), made once per structure."""
        return self._prepare(args, kwargs).planned.plan

    @jax_compat.automatic_axes()
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Plan and lower for these arguments."""
        prepared = self._prepare(args, kwargs)
        mesh = jax_compat.auto_mesh(meshes.concrete(prepared.target), prepared.target.logical.names)
        built = codegen.program(prepared.planned.graph, prepared.planned.plan, prepared.planned.rules, mesh)
        lowered = built.jit().lower(*prepared.traced.in_avals)
        return Lowered(prepared.planned.plan, lowered, prepared, built.in_shardings)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """Run `init_fn(*args)` so that each array is created in its place, never whole on one device.

        With a plan whose argument has this structure (call `plan` first), arrays get the plan's shardings; before any
        plan they are spread evenly over all devices, and the first step moves them.
        """
        shapes = jax.eval_shape(init_fn, *args)
        return jax.jit(init_fn, out_shardings=self._state_shardings(shapes))(*args)

    def _state_shardings(self, shapes: Any) -> Any:
        for prepared in reversed(self._prepared.values()):
            try:
                specs = prepared.planned.plan.shardings(shapes)
            except ArgumentError:
                continue
            mesh = jax_compat.auto_mesh(meshes.concrete(prepared.target), prepared.target.logical.names)
            return jax.tree.map(
                lambda spec, mesh=mesh: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
            )
        mesh = jax_compat.auto_mesh(np.array(jax.devices()), ("devices",))
        return jax.tree.map(lambda leaf: NamedSharding(mesh, _spread(leaf.shape, mesh.size)), shapes)

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Prepared:
        _, key = self._key(args, kwargs)
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = _plan(self.__wrapped__, args, kwargs, self.settings, local=True)
        return found

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
        static = self.settings.static_argnums
        dynamic = tuple(a for i, a in enumerate(args) if i not in static) if static else args
        leaves, tree = flatten(dynamic, dict(kwargs), jax.tree.flatten)
        fixed = tuple(args[i] for i in static if i < len(args))
        for i, value in zip(static, fixed, strict=False):
            _check_hashable(_name(self.__wrapped__), i, value)
        return leaves, (tree, fixed, tuple(map(_leaf_key, leaves)), jax_compat.trace_context())


def _check_hashable(name: str, position: int, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise ArgumentError(
            f"static argument {position} of {name} must be hashable, "
            f"it is {type(value).__name__} {value!r:.60} ({error})"
        ) from None


def _leaf_key(leaf: Any) -> Any:
    """Shape, dtype and weak type as JAX would trace them, so that a step count given as 0 and returned as an array
    are one."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False))
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        return type(leaf)  # no array: tracing says so, with its path
    return aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False))


def _spread(shape: Sequence[int], devices: int) -> PartitionSpec:
    """The first longest dimension that divides, cut over all devices; replicated if none does."""
    best = max((d for d, n in enumerate(shape) if n % devices == 0), key=lambda d: (shape[d], -d), default=None)
    if best is None or math.prod(shape) == 0:
        return PartitionSpec()
    return PartitionSpec(*[None] * best, "devices")
