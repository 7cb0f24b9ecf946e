"""A parallelized function: what `parallelize` returns.

    first call      trace -> plan -> compile, for these shapes
    later calls     flatten, place what is not in place, run

A `ParallelFunction` keeps one entry per argument structure (tree, shapes, dtypes, static values); everything in an
entry is frozen, so that a second call neither traces nor plans again. Arguments on an Explicit mesh come with pins in
their types (`autopar.ir.explicit`): an entry serves all calls whose pins its plan keeps. Plans outlive the process in
`autopar.plans.cache`.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.compile import batches, plan_step
from autopar.errors import ArgumentError
from autopar.ir import arguments, explicit
from autopar.ir.arguments import ArrayArguments, as_arrays
from autopar.ir.layout import longest_dividing
from autopar.ir.text.printer import type_text
from autopar.ir.text.warning import warn
from autopar.ir.trace import is_tracing
from autopar.options import Settings, name_of
from autopar.plans.plan import Plan
from autopar.runtime.executables import Executable, Lowered, lower
from autopar.runtime.planned_step import Pin, PlannedStep
from autopar.verification.profile.comparison import Profile
from autopar.verification.profile.measure import profile


class ParallelFunction:
    """What `parallelize` returns: a function that is planned and compiled for the shapes it is called with.

    In a trace of another function the call is inlined, and the outermost `parallelize` plans it. If there is none, an
    `AutoparWarning` is given. As an attribute of a class it is a method (`BoundFunction`). Under `jax.disable_jit()` a
    call runs the function as it is written, operation by operation, and `plan` still plans.

    Threads may share it. The first call for given shapes plans and compiles while other threads wait for the result.
    Steps are dispatched to the devices one after the other (`autopar.runtime.single_program.DISPATCH_LOCK`).

    Attributes:
        __wrapped__: the function as it is written.
        settings: the options, checked.
    """

    __wrapped__: Callable[..., Any]
    settings: Settings

    def __init__(self, fn: Callable[..., Any], chosen: Settings) -> None:
        functools.update_wrapper(self, fn)
        self.__wrapped__ = fn
        self.settings = chosen
        self._planned_steps: dict[_Key, PlannedStep] = {}
        self._executables: dict[PlannedStep, Executable] = {}
        self._last: tuple[Any, Executable] | None = None
        self._planning = threading.RLock()  # planning may call the function's own `plan`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; the first call for given shapes plans and compiles it.

        Raises:
            AutoparError: the step cannot be planned, or its arguments do not fit; see the subclasses.
        """
        if not jax_compat.disables_jit():
            with self._opened(args, kwargs) as array_args:
                if not any(map(jax_compat.is_tracer, array_args.leaves)):
                    return self._run(array_args)
            self._warn_of_the_outer()
        return self.__wrapped__(*map(arguments.unwrap, args), **kwargs)

    def _run(self, array_args: ArrayArguments) -> Any:
        # A loop passes in the results of the last step: comparing type objects is quicker than hashing shapes.
        avals = [leaf.aval if isinstance(leaf, jax.Array) else _leaf_key(leaf) for leaf in array_args.leaves]
        now = (array_args.tree, self._fixed(array_args), jax_compat.trace_context(), avals)
        last = self._last
        if last is None or last[0] != now:
            last = self._last = (now, self._compiled(array_args, has_run=last is not None))
        return last[1].run(array_args.leaves)

    def __deepcopy__(self, memo: Any) -> ParallelFunction:
        """The function itself, as of `jax.jit`."""
        return self

    def __get__(self, instance: Any, kind: type | None = None) -> ParallelFunction | BoundFunction:
        return self if instance is None else BoundFunction(self, instance)

    def _warn_of_the_outer(self) -> None:
        if is_tracing() or jax_compat.traces_for_shapes():
            return
        warn(
            f"{name_of(self.__wrapped__)} is parallelized, and traced into another function by jax.jit, grad, vmap, "
            "nnx.jit or jax.export: there it runs as written, on the devices of that function. Parallelize the "
            "outermost function: autopar.parallelize(outer) for jax.jit(outer), autopar.parallelize(jax.grad(fn)) for "
            "jax.grad(autopar.parallelize(fn))."
        )

    def _warn_of_another_shape(self, array_args: ArrayArguments) -> None:
        """Warn if a step that has run is planned again for other shapes or dtypes, which takes as long as before."""
        plan = next(reversed(self._planned_steps.values())).plan
        if any(isinstance(_leaf_key(leaf), type) for leaf in array_args.leaves):
            return  # no array: tracing says so
        types = [type_text(jax.typeof(leaf)) for leaf in array_args.leaves]
        if len(types) != len(plan.input_types):
            return
        pairs = zip(plan.input_paths, plan.input_types, types, strict=True)
        changed = [types for types in pairs if types[1] != types[2]]
        if changed:
            path, before, now = changed[0]
            rest = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
            other_dtype = before.partition("[")[2] == now.partition("[")[2]
            advice = "Pass it in one dtype" if other_dtype else "A last, smaller batch can be dropped or padded"
            warn(
                f"{name_of(self.__wrapped__)} is planned and compiled again: '{path}' is {now} and was {before}{rest}. "
                f"{advice}; compiled(...) plans and compiles ahead of a call"
            )

    @jax.disable_jit(False)
    def compiled(self, *args: Any, **kwargs: Any) -> Executable:
        """The executable that a call with these arguments (arrays or `ShapeDtypeStruct`s) runs, compiled once."""
        with self._opened(args, kwargs) as array_args:
            return self._compiled(array_args)

    def _compiled(self, array_args: ArrayArguments, *, has_run: bool = False) -> Executable:
        with self._planning:
            planned = self._planned_step(array_args, has_run=has_run)
            executable = self._executables.get(planned)
            if executable is None:
                executable = self._executables[planned] = self._lowered(planned).compile()
        return executable

    @jax.disable_jit(False)
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `ShapeDtypeStruct`s), computed once for each of their structures."""
        with self._opened(args, kwargs) as array_args:
            return self._planned_step(array_args).plan

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last structure that was planned; None if there is none."""
        return next((planned.plan for planned in reversed(self._planned_steps.values())), None)

    def planned_arguments(self) -> Iterator[Any]:
        """The arguments of all plans, the last plan's first, as `ShapeDtypeStruct`s with their shardings."""
        for planned in reversed(self._planned_steps.values()):
            pairs = zip(planned.traced.in_avals, planned.argument_shardings(), strict=True)
            leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=s) for aval, s in pairs]
            args, kwargs = jax.tree.unflatten(planned.traced.in_tree, leaves)
            yield from (*args, *kwargs.values())

    def batch_shardings(self, batch: Any) -> batches.Shardings | None:
        """Where compiled steps take the leaves of a batch (None: on the host); None if none is compiled for it."""
        return batches.shardings(batch, self._executables.values())

    @jax.disable_jit(False)
    def profile(self, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
        """Measure some steps, and compare them with the plan.

        Every step runs with the same arguments under JAX's profiler, on the devices of this process. State that is
        donated is copied before each step, so that the arguments stay valid and are not changed.

        Args:
            *args: the arguments of a call, arrays and modules.
            steps: how many steps are measured; one more runs before them.
            **kwargs: keyword arguments of a call.

        Returns:
            Times by kind of work, source line, stage and pass, beside the predicted ones; see `Profile.trace` for the
            timeline.

        Raises:
            AutoparError: the step cannot be planned, or its arguments do not fit.
            ArgumentError: `steps` is no positive integer, an argument has no value, or another profile is being taken.
        """
        with self._opened(args, kwargs) as array_args:
            planned = self._planned_step(array_args)
            devices = list(planned.mesh().devices.flat)
            executable = self._compiled(array_args)
            shardings, graph = planned.argument_shardings(), planned.traced.graph
            return profile(executable, array_args.leaves, shardings, devices, graph, steps)

    @jax.disable_jit(False)
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Plan and lower for these arguments, as `jax.jit(fn).lower` does; each call lowers anew."""
        with self._opened(args, kwargs) as array_args:
            return self._lowered(self._planned_step(array_args))

    def _lowered(self, planned: PlannedStep) -> Lowered:
        return lower(planned, name_of(self.__wrapped__), self.settings.debug_nans)

    @jax.disable_jit(False)
    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """Call `init_fn(*args)` so that every array is created with its sharding, never whole on one device.

        If a plan exists for an argument of this structure (call `plan` first), arrays have the shardings of the plan.
        Otherwise each array is sharded along one dimension over all devices, and the first step reshards it.

        Args:
            init_fn: returns the initial state.
            *args: its arguments, such as a random key.

        Raises:
            ArgumentError: `init_fn` is no function.
        """
        arguments.check_function("init", init_fn)
        with as_arrays(args, {}) as array_args:
            state = self._created(lambda *pure: arguments.call_on_arrays(init_fn, (pure, {})), array_args.args)
            return arguments.to_caller(state, array_args.leaves)

    def _created(self, init_fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        shapes = jax.eval_shape(init_fn, *args)
        parts = (shapes.updates, shapes.out) if isinstance(shapes, arguments.Returned) else (shapes,)
        shardings = [sharding for part in parts for sharding in self._shardings(part)]
        arrays: dict[int, Any] = {}
        for mesh in dict.fromkeys(
            sharding.mesh for sharding in shardings
        ):  # one program reaches the devices of one mesh
            mine = [i for i, sharding in enumerate(shardings) if sharding.mesh == mesh]
            where = tuple(shardings[i] for i in mine)
            create = jax.jit(lambda *inputs, mine=mine: _some(init_fn(*inputs), mine), out_shardings=where)
            whole = NamedSharding(mesh, PartitionSpec())
            is_part = mesh.size < jax.sharding.get_abstract_mesh().size  # of the mesh in force: that of a stage
            with jax_compat.no_mesh() if is_part else nullcontext():
                arrays.update(zip(mine, create(*(_reached(x, whole) for x in args)), strict=True))
        return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[i] for i in range(len(shardings))])

    def _shardings(self, shapes: Any) -> Sequence[NamedSharding]:
        """The shardings of the leaves of a tree of this structure."""
        for planned in reversed(self._planned_steps.values()):
            try:
                positions = planned.plan.positions(shapes)
            except ArgumentError:
                continue
            shardings = planned.argument_shardings()
            return [shardings[i] for i in positions]
        mesh = jax_compat.auto_mesh(np.array(jax.devices()), ("devices",))
        return [NamedSharding(mesh, _spread(leaf.shape, mesh.size)) for leaf in jax.tree.leaves(shapes)]

    def _planned_step(self, array_args: ArrayArguments, *, has_run: bool = False) -> PlannedStep:
        key = self._key(array_args)
        with self._planning:
            planned = self._planned_steps.get(key) or self._fitting(key)
            if planned is None:
                if has_run:
                    self._warn_of_another_shape(array_args)
                fn = array_args.step(self.__wrapped__)
                planned = plan_step(fn, array_args.args, array_args.kwargs, self.settings, local=True)
            self._planned_steps[key] = planned
        return planned

    def _fitting(self, key: _Key) -> PlannedStep | None:
        """An entry for the same structure whose plan keeps these pins, as it does those of its own results."""
        structure, pins = key
        within = any(pins) or jax_compat.explicit_mesh() is not None
        same = (planned for (other, _), planned in self._planned_steps.items() if other == structure)
        return next((planned for planned in same if planned.matches_pins(pins, within)), None)

    def _key(self, array_args: ArrayArguments) -> _Key:
        context = jax_compat.trace_context()
        structure = array_args.tree, self._fixed(array_args), tuple(map(_leaf_key, array_args.leaves)), context
        return structure, tuple(map(_pin, array_args.leaves))

    def _opened(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[ArrayArguments]:
        return as_arrays(args, kwargs, self.settings.static_argnums, self.settings.static_argnames)

    def _fixed(self, array_args: ArrayArguments) -> tuple[Any, ...]:
        """The static arguments, with their positions or keywords."""
        args, named = array_args.args, array_args.named
        fixed = (*((i, args[i]) for i in self.settings.static_argnums if i < len(args)), *named.items())
        for which, value in fixed:
            arguments.check_static(name_of(self.__wrapped__), which, value)
        return fixed


class BoundFunction:
    """A parallelized method of one object, which is the first argument; it has the methods of `ParallelFunction`.

    An object that is a pytree, or of Flax NNX, is an argument like others. Any other object is part of the structure:
    the method is planned and compiled for this object, and reads its attributes at the first call only.

    Attributes:
        __wrapped__: the method as it is written.
        __self__: the object.
        __func__: the parallelized function.
    """

    __wrapped__: Callable[..., Any]
    __self__: Any
    __func__: ParallelFunction

    def __init__(self, function: ParallelFunction, instance: Any) -> None:
        functools.update_wrapper(self, function.__wrapped__)
        self.__wrapped__ = functools.partial(function.__wrapped__, instance)
        self.__self__, self.__func__ = instance, function
        self._owner = instance if 0 in function.settings.static_argnums else arguments.wrap_owner(instance)

    @property
    def owner(self) -> Any:
        """The first argument of the function."""
        return self._owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `ParallelFunction.__call__`."""
        return self.__func__(self._owner, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """As `ParallelFunction.plan`."""
        return self.__func__.plan(self._owner, *args, **kwargs)

    def compiled(self, *args: Any, **kwargs: Any) -> Executable:
        """As `ParallelFunction.compiled`."""
        return self.__func__.compiled(self._owner, *args, **kwargs)

    def profile(self, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
        """As `ParallelFunction.profile`."""
        return self.__func__.profile(self._owner, *args, steps=steps, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `ParallelFunction.lower`."""
        return self.__func__.lower(self._owner, *args, **kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """As `ParallelFunction.init`."""
        return self.__func__.init(init_fn, *args)


#: Structure of the arguments, and the sharding of each leaf on an Explicit mesh.
_Key = tuple[Any, tuple[Pin | None, ...]]


def _leaf_key(leaf: Any) -> Any:
    """Shape, dtype and weak type as JAX would trace them, so that a step count given as 0 and returned as an array
    are one."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False))
    try:
        aval = jax.typeof(leaf)
    except (TypeError, OverflowError, ValueError):
        return type(leaf)  # no array: tracing says so, with its path
    return aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False))


def _pin(leaf: Any) -> Pin | None:
    sharding = None if jax_compat.is_tracer(leaf) else explicit.sharding_of(leaf)
    return None if sharding is None else (explicit.pin(sharding, len(leaf.shape)), sharding.mesh)


def _some(tree: Any, positions: Sequence[int]) -> tuple[Any, ...]:
    leaves = jax.tree.leaves(tree)
    return tuple(leaves[i] for i in positions)


def _reached(arg: Any, whole: NamedSharding) -> Any:
    """An argument whose arrays the devices of a mesh can read; those that belong to no device stay as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, whole) if isinstance(x, jax.Array) and x.committed else x, arg)


def _spread(shape: Sequence[int], devices: int) -> PartitionSpec:
    """The first longest dimension that divides, cut over all devices; replicated if none does."""
    best = longest_dividing(shape, devices)
    if best is None or math.prod(shape) == 0:
        return PartitionSpec()
    return PartitionSpec(*[None] * best, "devices")
