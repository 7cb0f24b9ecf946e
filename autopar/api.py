"""What users call: `parallelize`, `plan`, `gather`.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.compile import Pin, Prepared, name_of, prepare, warn
from autopar.errors import ArgumentError, DonatedError
from autopar.ir import arguments, explicit
from autopar.ir.arguments import Opened, opened
from autopar.ir.trace import is_tracing
from autopar.options import Settings, settings
from autopar.plans.plan import Plan
from autopar.runtime.executables import Executable, Lowered, lower


def parallelize(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a train step, or any jittable function, run on many devices.

    Use it bare, with options, or as a call: `@parallelize`, `@parallelize(mesh=(2, 4))`, `parallelize(fn, mesh=...)`.

    Options:
        cluster: prices the mesh; default the local devices.
        mesh: jax Mesh, AbstractMesh, tuple of sizes or {name: size}; default: every factorisation is searched,
            or the mesh of the arguments where that is Explicit and something is cut over it.
        batch_argnums: positional arguments that hold the batch; default: those that are no state.
        donate_argnums: positional arguments whose buffers may be reused; default: state leaves, never the batch.
        static_argnums: positional arguments that are not traced; they must be hashable.
        pins: {path glob, "arg:i" or "out:i": PartitionSpec}, layouts that the plan must keep.
        solver: "auto", "cbc" or "highs".
        gap: how far the step may lie above the bound on all plans, relative to it; 0 asks for a proof; default: 0.005.
        time_limit: seconds for planning; default: about what compiling takes, 5 at least.
        plan: a Plan, or the path of a saved one, to run instead of planning.
        progress: say on stderr what is planned; default: in a terminal, after two seconds.
        memory_budget: bytes per device, "12GiB", or "min"; default: the device's memory, with a warning beyond.
        remat: "auto", "none", "dots" or "full": what the backward pass recomputes; "auto": what memory forces it to.
        offload: "auto", "none" or "all": which optimizer state waits in the host's memory between steps; "auto": what
            memory forces there.
        stages: parts of the model that work side by side on submeshes, the devices in order or slices of `mesh` along
            its first axis; "auto": one.
        num_microbatches: parts of the batch that run one after the other, their gradients added up; "auto": one
            without stages, else two per stage, or what divides the batch.
        schedule: "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b" (two parts on each submesh), "zb-h1", "inference";
            "auto": "1f1b" for steps with a backward pass.
        per_microbatch: globs of source lines, scopes or operations whose totals over the batch, such as the statistics
            of batch norm, may be those of a microbatch; "*": all.

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
    chosen = settings(options)
    with opened(args, {}, chosen.static_argnums) as given:
        return prepare(fn, given.args, {}, chosen, local=False).plan


def gather(tree: Any) -> Any:
    """Whole host values (numpy arrays) of a tree of possibly sharded arrays; other leaves are kept.

    Raises:
        DonatedError: an array of the tree was donated to a step.
    """
    return jax.tree.map(lambda x: _whole(x) if isinstance(x, jax.Array) and not _extended(x) else x, tree)


def _whole(x: jax.Array) -> np.ndarray:
    if x.is_deleted():
        raise DonatedError(
            f"an array of shape {x.shape} was donated to an earlier step and its memory reused. "
            "Gather the state that the step returned, or pass donate_argnums=()."
        )
    return np.asarray(x)


def _extended(x: jax.Array) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)


class ParallelFunction:
    """A function that plans and compiles itself for the shapes it is called with.

    Called while another function is being traced, it is inlined there, and the outermost `parallelize` plans it; where
    there is none, an `AutoparWarning` says so. As an attribute of a class it is a method (`BoundFunction`).

    Threads may share it. The first call for given shapes plans and compiles while others wait for what it makes, and
    steps are handed to the devices one after the other (`autopar.runtime.single_program.DISPATCH`).
    """

    def __init__(self, fn: Callable[..., Any], chosen: Settings) -> None:
        functools.update_wrapper(self, fn)
        self.__wrapped__ = fn
        self.settings = chosen
        self._prepared: dict[_Key, Prepared] = {}
        self._executables: dict[Prepared, Executable] = {}
        self._last: tuple[Any, Executable] | None = None
        self._planning = threading.RLock()  # planning may call the function's own `plan`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._opened(args, kwargs) as given:
            if not any(map(jax_compat.is_tracer, given.leaves)):
                return self._run(given)
        self._warn_of_the_outer()
        return self.__wrapped__(*map(arguments.plain, args), **kwargs)

    def _run(self, given: Opened) -> Any:
        # A loop hands back what the last step returned: comparing type objects is quicker than hashing shapes.
        avals = [leaf.aval if isinstance(leaf, jax.Array) else _leaf_key(leaf) for leaf in given.leaves]
        now = (given.tree, self._fixed(given.args), jax_compat.trace_context(), avals)
        last = self._last
        if last is None or last[0] != now:
            last = self._last = (now, self._compiled(given))
        return last[1].run(given.leaves)

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

    def compiled(self, *args: Any, **kwargs: Any) -> Executable:
        """What a call with these arguments (arrays or ShapeDtypeStructs) runs, compiled once."""
        with self._opened(args, kwargs) as given:
            return self._compiled(given)

    def _compiled(self, given: Opened) -> Executable:
        with self._planning:
            prepared = self._prepare(given)
            found = self._executables.get(prepared)
            if found is None:
                found = self._executables[prepared] = lower(prepared, name_of(self.__wrapped__)).compile()
        return found

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ShapeDtypeStructs), made once per structure."""
        with self._opened(args, kwargs) as given:
            return self._prepare(given).plan

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Plan and lower for these arguments."""
        with self._opened(args, kwargs) as given:
            return lower(self._prepare(given), name_of(self.__wrapped__))

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """Run `init_fn(*args)` so that each array is created in its place, never whole on one device.

        With a plan whose argument has this structure (call `plan` first), arrays get the plan's shardings; before any
        plan they are spread evenly over all devices, and the first step moves them.

        Raises:
            ArgumentError: no function.
        """
        if not callable(init_fn):
            raise ArgumentError(f"init takes a function, got {type(init_fn).__name__} {init_fn!r:.60}")
        with opened(args, {}) as given:
            made = self._created(lambda *pure: arguments.called(init_fn, (pure, {})), given.args)
            return arguments.closed(made, given.leaves)

    def _created(self, init_fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        shapes = jax.eval_shape(init_fn, *args)
        parts = (shapes.updates, shapes.out) if isinstance(shapes, arguments.Returned) else (shapes,)
        homes = [home for part in parts for home in self._homes(part)]
        made: dict[int, Any] = {}
        for mesh in dict.fromkeys(home.mesh for home in homes):  # one program reaches the devices of one mesh
            mine = [i for i, home in enumerate(homes) if home.mesh == mesh]
            where = tuple(homes[i] for i in mine)
            some = jax.jit(lambda *given, mine=mine: _some(init_fn(*given), mine), out_shardings=where)
            whole = NamedSharding(mesh, PartitionSpec())
            made.update(zip(mine, some(*(_reached(x, whole) for x in args)), strict=True))
        return jax.tree.unflatten(jax.tree.structure(shapes), [made[i] for i in range(len(homes))])

    def _homes(self, shapes: Any) -> Sequence[NamedSharding]:
        """Where the leaves of a tree of this structure are to be held."""
        for prepared in reversed(self._prepared.values()):
            try:
                positions = prepared.plan.positions(shapes)
            except ArgumentError:
                continue
            homes = prepared.homes()
            return [homes[i] for i in positions]
        mesh = jax_compat.auto_mesh(np.array(jax.devices()), ("devices",))
        return [NamedSharding(mesh, _spread(leaf.shape, mesh.size)) for leaf in jax.tree.leaves(shapes)]

    def _prepare(self, given: Opened) -> Prepared:
        key = self._key(given)
        with self._planning:
            found = self._prepared.get(key) or self._fitting(key)
            if found is None:
                found = prepare(self.__wrapped__, given.args, given.kwargs, self.settings, local=True)
            self._prepared[key] = found
        return found

    def _fitting(self, key: _Key) -> Prepared | None:
        """An entry for the same structure whose plan keeps these pins, as it does those of its own results."""
        structure, pins = key
        within = any(pins) or jax_compat.explicit_mesh() is not None
        same = (prepared for (other, _), prepared in self._prepared.items() if other == structure)
        return next((prepared for prepared in same if prepared.keeps(pins, within)), None)

    def _key(self, given: Opened) -> _Key:
        context = jax_compat.trace_context()
        structure = given.tree, self._fixed(given.args), tuple(map(_leaf_key, given.leaves)), context
        return structure, tuple(map(_pin, given.leaves))

    def _opened(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Opened]:
        return opened(args, kwargs, self.settings.static_argnums)

    def _fixed(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The static arguments."""
        static = self.settings.static_argnums
        fixed = tuple(args[i] for i in static if i < len(args))
        for i, value in zip(static, fixed, strict=False):
            _check_hashable(name_of(self.__wrapped__), i, value)
        return fixed


class BoundFunction:
    """A parallelized method of one object, which is its first argument.

    An object that is a pytree, or of Flax NNX, is an argument like others. Any other is structure: the method is
    planned and compiled for this object, and sees its attributes as they are at the first call.
    """

    def __init__(self, function: ParallelFunction, instance: Any) -> None:
        functools.update_wrapper(self, function.__wrapped__)
        self.__wrapped__ = functools.partial(function.__wrapped__, instance)
        self.__self__, self.__func__ = instance, function
        self._owner = instance if 0 in function.settings.static_argnums else arguments.owner(instance)

    @property
    def owner(self) -> Any:
        """The first argument of the function."""
        return self._owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._owner, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """As `ParallelFunction.plan`."""
        return self.__func__.plan(self._owner, *args, **kwargs)

    def compiled(self, *args: Any, **kwargs: Any) -> Executable:
        """As `ParallelFunction.compiled`."""
        return self.__func__.compiled(self._owner, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `ParallelFunction.lower`."""
        return self.__func__.lower(self._owner, *args, **kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """As `ParallelFunction.init`."""
        return self.__func__.init(init_fn, *args)


#: Structure of the arguments, and how each leaf lies on an Explicit mesh.
_Key = tuple[Any, tuple[Pin | None, ...]]


def _check_hashable(name: str, position: int, value: Any) -> None:
    held = arguments.with_arrays(value)
    if held is not None:
        raise ArgumentError(
            f"static argument {position} of {name} is {held}: its arrays would be constants of the program. Leave it "
            "out of static_argnums; what is no array in it is structure anyway."
        )
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
    except (TypeError, OverflowError):
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
    best = max((d for d, n in enumerate(shape) if n % devices == 0), key=lambda d: (shape[d], -d), default=None)
    if best is None or math.prod(shape) == 0:
        return PartitionSpec()
    return PartitionSpec(*[None] * best, "devices")
