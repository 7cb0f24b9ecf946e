"""What users call: `parallelize`, `plan`, `check`, `gather`, `save_checkpoint`, `restore_checkpoint`.

What `parallelize` returns is a `ParallelFunction`, or a `BoundFunction` as an attribute of a class
(`autopar.api.parallel_function`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Unpack

import jax

from autopar import checkpoints
from autopar.api.parallel_function import ParallelFunction
from autopar.checkpoints import Saving
from autopar.compile import plan_step
from autopar.errors import ArgumentError, DonatedError
from autopar.ir import arguments
from autopar.ir.arguments import as_arrays
from autopar.options import Options, for_function, name_of, settings, with_options, written
from autopar.plans.plan import Plan
from autopar.runtime.executables import Executable, lower
from autopar.runtime.planned_step import PlannedStep
from autopar.runtime.processes import whole
from autopar.verification.checking import Check, compare_with_one_device


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
        static_argnums: positions of arguments that are not traced, by keyword too: hashable, and no modules.
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
        num_microbatches: parts of the batch, computed one after the other, with gradients and metrics of the whole
            batch (GPipe, Huang et al., 2019); `MicrobatchError` if examples depend on each other. "auto": 1, or the
            fewest of 2, 4, 8 and 16 with which a plan fits; with `stages` two per stage or the next divisor, or 1.
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
        ArgumentError, ScheduleError: `fn` is no function of whole arrays, or an option is unknown or invalid.
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
