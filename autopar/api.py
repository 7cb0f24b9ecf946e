"""What users call: `parallelize`, `plan`, `check`, `gather`, `save_checkpoint`, `restore_checkpoint`.

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
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import checkpoints, jax_compat
from autopar.checkpoints import Saving
from autopar.compile import batches, plan_step
from autopar.compile.call import warn
from autopar.errors import ArgumentError, DonatedError
from autopar.ir import arguments, explicit
from autopar.ir.arguments import ArrayArguments, as_arrays
from autopar.ir.layout import longest_dividing
from autopar.ir.text.printer import type_text
from autopar.ir.trace import is_tracing
from autopar.options import Options, Settings, for_function, name_of, settings, with_options, written
from autopar.plans.plan import Plan
from autopar.runtime.executables import Executable, Lowered, lower
from autopar.runtime.planned_step import Pin, PlannedStep
from autopar.runtime.processes import whole
from autopar.verification.checking import Check, compare_with_one_device
from autopar.verification.profile.comparison import Profile
from autopar.verification.profile.measure import profile


@with_options
def parallelize(fn: Callable[..., Any] | None = None, **options: Unpack[Options]) -> Any:
    """Plan, compile and run a train step, or another function that `jax.jit` accepts, on many devices.

    `@parallelize`, `@parallelize(mesh=(2, 4))` or `parallelize(fn, mesh=(2, 4))`. The first call with given shapes
    plans and compiles; later calls run the compiled program.

    Args:
        fn: the function; without it, `parallelize` returns a decorator.
        cluster: device model and links, from which costs are computed: a `Cluster`, or the name of one, "dgx-h100"
            (as many hosts as `mesh` needs), "dgx-h100:4" (hosts) or "cluster.toml". None: the local devices
            (`Cluster.local`), or for `autopar.plan` with a given mesh the preset "dgx-h100".
        mesh: a jax `Mesh` or `AbstractMesh`, a tuple of axis sizes, or `{axis name: size}`, of as many devices as
            `cluster` has. None: all factorizations of the number of devices into one or two axes, and the prime
            factorization if it has three factors. An Explicit mesh in the program, or that of a `shard_map`, is used.
        batch_argnums: positions of the arguments whose leaves have the batch as dimension 0. "auto": all but the state.
        donate_argnums: positions of the arguments whose buffers the step may reuse. "auto": the state, which is every
            argument leaf that the step returns with the same path or position, shape and dtype. With `plan`, only
            leaves that the plan donates are donated. Use of a donated array raises `DonatedError` with its path.
        static_argnums: positions of arguments that are not traced, as in `jax.jit`: hashable, and no modules. Given by
            keyword, they are static too.
        static_argnames: names of parameters that are not traced, by keyword or by position.
        memory_budget: bound on the predicted peak memory per device: bytes, "12GiB", "80%" of a device's memory, or
            "min" for the least peak, with `stages` over all devices; `MemoryBudgetError` if no plan fits. None: nine
            tenths of a device's memory; if none fits, the plan that exceeds it least, with a warning.
        pins: `{key: PartitionSpec}` (or `NamedSharding` for its spec), layouts that every plan keeps. Keys are globs of
            paths of argument leaves; "arg:i", "out:i", where i counts the array leaves of all arguments or results; the
            roles "params", "opt" and "batch"; "activations at model.py:30" or "products at model.py:30", what the
            forward pass computes at a source line; "stage 1: params/*", one of these in one stage. A later pin
            overrides an earlier one. `autopar.pins` has strategies by name.
        solver: "auto": bounds and elimination, then HiGHS for what they leave open. "cbc", "highs": always the ILP.
        time_limit: seconds for planning, all meshes, recomputation and offloading included. After it the best plan so
            far is used, with a warning that states its gap. None: about the compilation time, at least 5.
        gap: relative gap between step time and lower bound at which the search ends. 0 requires a proof of optimality.
        plan: a `Plan`, or the path of a saved one, that replaces planning.
        progress: print to stderr what is planned or explained, and bounds. None: in a terminal, after two seconds.
        debug_nans: raise `NanError` for a NaN among the results that no argument holds, with the source line of the
            operation that made it, its stage and microbatch. Nothing is donated, each program of the step is waited
            for, and one that gives NaN runs again by operations. None: as `jax_debug_nans` is at compilation.
        remat: results of the forward pass that the backward pass recomputes (Chen et al., 2016). "none". "dots": in
            each layer all but those of matrix products and convolutions. "full": everything in a layer, from the inputs
            of the layer. "auto": nothing, unless memory requires it; then the policy with the shortest step, in as few
            layers, or stages by number, as suffice. `jax.checkpoint` in `fn` is kept.
        offload: optimizer state in host memory between steps (ZeRO-Offload, Ren et al., 2021). "none". "all": every
            donated leaf that only the update reads. "auto": none, unless memory requires it and copies take less time
            than recomputation. Requires memory of the kind `pinned_host`, and `host_bandwidth` and `host_memory_bytes`.
        num_microbatches: parts of the batch, computed one after the other, with gradients and metrics accumulated to
            those of the whole batch (GPipe, Huang et al., 2019). `MicrobatchError` if examples depend on each other.
            "auto": 1, or the fewest of 2, 4, 8 and 16 with which a plan fits into memory; with `stages` two per stage,
            or the next number that divides the batch, or 1 if they depend.
        stages: pipeline stages: runs of layers with about equal FLOPs, each on a submesh, which is a range of the
            devices or a slice of `mesh` along its first axis. "search": stages, submeshes, microbatches, schedule and
            recomputation are optimized together (Alpa, Zheng et al., 2022, section 5); the result may be one stage.
            With `mesh`, `memory_budget="min"` or `offload="all"` there is one stage, with a warning. "auto": "search"
            without `mesh` if the cluster has several hosts, or if `memory_budget` and `num_microbatches` are not given
            and the step as written needs more than twice the memory of all devices; otherwise 1.
        schedule: order of the passes: "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b" (two stages per submesh),
            "zb-h1" or "inference"; "none" is for one stage. "auto": "1f1b", or "inference" without a backward pass; if
            stages are searched, the best of "1f1b", "eager-1f1b" and "gpipe".
        per_microbatch: globs of source lines ("model.py:30"), scopes of `jax.named_scope` or primitives whose totals
            over the batch may be replaced by those of each microbatch, as of batch norm; "*": all.

    Returns:
        A `ParallelFunction`, which is called like `fn`.

    Raises:
        ArgumentError, ScheduleError: `fn` is no function of whole arrays, or an option is unknown or its value
            invalid.
        PinError: `pins` is no mapping from text; at the first call, a pin names nothing or does not fit.
        PlanMismatchError: the file named by `plan` contains no valid plan.
    """
    if fn is None:
        return functools.partial(parallelize, **options)
    arguments.check_function("parallelize", fn)
    return ParallelFunction(fn, for_function(settings(options), fn))


@jax.disable_jit(False)
@with_options
def plan(fn: Callable[..., Any], *args: Any, **options: Unpack[Options]) -> Plan:
    """Plan a function for arguments of these shapes, without devices.

    Args:
        fn: the function as it is written, or a parallelized one, whose options do not apply.
        *args: its arguments, arrays or `ShapeDtypeStruct`s.
        **options: those of `parallelize`. With `plan`, that plan is checked against the function, and its step is there
            for `Plan.explain` and `Plan.what_if`.

    Returns:
        The plan.

    Raises:
        AutoparError: as a call of the parallelized function; see the subclasses.
    """
    fn = fn.__wrapped__ if isinstance(fn, ParallelFunction) else fn
    arguments.check_function("plan", fn)
    chosen = for_function(settings(options), fn)
    with as_arrays(args, {}, chosen.static_argnums) as array_args:
        return plan_step(fn, array_args.args, {}, chosen, local=False).plan


@jax.disable_jit(False)
@with_options
def check(fn: Callable[..., Any], *args: Any, **options: Unpack[Options]) -> Check:
    """Run a step in parallel, and as it is written on one device, and compare the results leaf by leaf.

    Integers, booleans and random keys must be equal. A float may differ by 1e-9 (float64), 1e-5 (float32), 5e-3
    (float16), 3e-2 (bfloat16) or 0.25 (float8) of the largest magnitude in its leaf, by the least precise type that the
    step computes in. It may also differ by four times as much as the result of the step as written changes when each
    float of the arguments changes by one unit in the last place. For a stricter check pass arguments in float64, under
    `jax.enable_x64(True)`. If the step does not fit the memory of one device, as the cluster describes it, the batch is
    halved until it fits.

    Args:
        fn: the function as it is written, or a parallelized one.
        *args: the arguments of a call, arrays and modules. They are not changed.
        **options: those of `parallelize`. Without any, those that `fn` was parallelized with.

    Returns:
        The comparison. A difference raises no error; see `Check.ok` and `Check.raise_if_different`.

    Raises:
        ArgumentError: an argument has no value, or the step does not fit one device even with one example, or it
            names devices of its own, by a `NamedSharding` or `shard_map`.
    """
    step, args, own = written(fn, args)
    chosen = own if own is not None and not options else for_function(settings(options), step)

    def parallel(args: Sequence[Any]) -> tuple[PlannedStep, Executable]:
        planned = plan_step(step, args, {}, chosen, local=True)
        return planned, lower(planned, name_of(step), chosen.debug_nans).compile()

    return compare_with_one_device(step, args, chosen, parallel)


def gather(tree: Any) -> Any:
    """Copy every array of a tree, sharded or not, to the host.

    With several processes, all of them call it with the same tree.

    Args:
        tree: a pytree.

    Returns:
        The tree with a numpy array in place of each array, whole in every process; random keys and leaves that are no
        arrays are unchanged.

    Raises:
        DonatedError: an array of the tree was donated to a step.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not _extended(x)}
    deleted = next((x for x in arrays.values() if x.is_deleted()), None)
    if deleted is not None:
        raise DonatedError(
            f"an array of shape {deleted.shape} was donated to an earlier step and its memory reused. "
            "Gather the state that the step returned, or pass donate_argnums=()."
        )
    on_host = dict(zip(arrays, whole(list(arrays.values())), strict=True))
    return jax.tree.unflatten(structure, [on_host.get(i, x) for i, x in enumerate(leaves)])


def _extended(x: jax.Array) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)


def save_checkpoint(path: str | os.PathLike[str], state: Any, step: Any = None, *, keep: int = 1) -> Saving:
    """Save a pytree of arrays, sharded or not, while the program goes on.

    Copies of the arrays are on the host when this returns, so that the next step may take over their memory. Files are
    written in a thread. A checkpoint has no trace of the plan: it is restored onto any mesh, and any number of stages
    and processes. With several processes, all of them call this with the same tree.

    Where an earlier save into the same folder is unfinished, this first waits for it: checkpoints are written one after
    the other, the last one is the newest, and one save at a time has copies on the host. An error of the earlier save
    is raised by its own `wait()`.

    Args:
        path: a folder. The newest whole checkpoint in it counts; a writer that is killed leaves that as it was.
        state: a pytree.
        step: the parallelized function, whose last plan is kept beside the arrays.
        keep: how many whole checkpoints stay in the folder.

    Returns:
        The save; its `wait()` returns the checkpoint's folder once it is whole.

    Raises:
        ArgumentError: `path` is no path, `keep` is no integer of at least 1, or a value that every process has differs
            between them.
        CheckpointError: leaves of the tree have the same path, such as those of {"a/b": x, "a": {"b": y}}.
        DonatedError: an array of the tree was donated to a step.
    """
    folder = _folder(path)
    if not isinstance(keep, Integral) or keep < 1:
        raise ArgumentError(f"keep={keep!r:.60} must be an integer of at least 1")
    plan = step.last_plan if isinstance(step, ParallelFunction) else None
    return checkpoints.save(folder, state, plan and plan.to_json(), keep)


def restore_checkpoint(path: str | os.PathLike[str], like: Any) -> Any:
    """Restore the newest whole checkpoint of a folder; each process reads what its devices store.

    Args:
        path: the folder that `save_checkpoint` was given.
        like: a pytree of arrays or `jax.ShapeDtypeStruct`s with shardings, or a parallelized function that is planned
            for the state: call its `plan` first. Layers may be stacked, as for a scan, in one of the trees alone:
            "blocks/3/w" is row 3 of "blocks/w".

    Returns:
        The pytree, in the shardings of `like`.

    Raises:
        CheckpointError: there is no whole checkpoint, it is damaged, or it is of another tree.
        ArgumentError: `path` is no path, or `like` is a function that has no plan.
    """
    folder = _folder(path)
    if not isinstance(like, ParallelFunction):
        return checkpoints.restore(folder, like)
    wanted = next((arg for arg in like.planned_arguments() if checkpoints.is_saved(folder, arg)), None)
    if wanted is None:
        names = checkpoints.saved_names(folder)
        raise ArgumentError(
            f"{name_of(like.__wrapped__)} has no plan with an argument of {len(names)} leaves such as "
            f"{', '.join(map(repr, names[:2]))}. Call its plan(...) first, or pass a tree with shardings."
        )
    return checkpoints.restore(folder, wanted)


def _folder(path: str | os.PathLike[str]) -> str:
    folder = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(folder, str):
        raise ArgumentError(f"path={path!r:.60} must be a folder, as a str or a pathlib.Path")
    return folder


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
        types = [type_text(jax.typeof(leaf)) for leaf in array_args.leaves]
        if len(types) != len(plan.input_types):
            return
        pairs = zip(plan.input_paths, plan.input_types, types, strict=True)
        changed = [f"'{path}' is {now} and was {before}" for path, before, now in pairs if now != before]
        if changed:
            rest = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
            warn(
                f"{name_of(self.__wrapped__)} is planned and compiled again: {changed[0]}{rest}. A last, smaller batch "
                "can be dropped or padded; compiled(...) plans and compiles ahead of a call"
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
    best = longest_dividing(shape, devices)
    if best is None or math.prod(shape) == 0:
        return PartitionSpec()
    return PartitionSpec(*[None] * best, "devices")
