"""A call that is to be planned, the same with one thing changed, and what settings mean for every kind of plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar import argnums, jax_compat
from autopar.errors import ArgumentError, MeshError, PinError, TraceError
from autopar.hardware import meshes
from autopar.hardware.meshes import Target
from autopar.ir import arguments
from autopar.ir.graph import Graph, Op
from autopar.ir.text.warning import warn
from autopar.ir.trace import Traced, trace
from autopar.ir.train_state import in_place, match_state
from autopar.options import Settings, name_of
from autopar.passes import strategies
from autopar.passes.remat import choose_offload, memory_policy
from autopar.passes.solver.optimize import TIME_LIMIT_REACHED
from autopar.progress import Progress
from autopar.rules import manual, rules_of
from autopar.rules.registry import registered_rules
from autopar.runtime.planned_step import PlannedStep


@dataclass(frozen=True, slots=True)
class PlanningEffort:
    """How long planning may take."""

    # default time limit of planning (s), at least (not measured)
    planning_seconds: float = 5.0
    # the same per operation (s), which is about the time that compilation takes; the larger of both counts (not
    # measured)
    seconds_per_op: float = 2e-3


PLANNING = PlanningEffort()


@dataclass(frozen=True, eq=False)
class Call:
    """One call to be planned.

    Attributes:
        fn, traced, args: the function, its trace and the arguments.
        local: the plan is to run on the devices of this process.
        trace_s: seconds that tracing took.
        report: prints progress.
        context: JAX's settings at the trace.
    """

    fn: Callable[..., Any]
    traced: Traced
    args: Sequence[Any]
    local: bool
    trace_s: float
    report: Progress
    context: Hashable = None


def with_batch(call: Call, s: Settings, times: int) -> Call:
    """The call with a batch `times` as large, traced anew.

    The function runs again on abstract arguments. It must not raise for them, and its results that are no examples
    must keep their shapes, so that a larger batch is all that is different.

    Raises:
        ArgumentError: the batch is not told from other arguments, shardings are in the types of the arguments, or JAX's
            settings are no longer those of the first trace.
        TraceError: the function does not take this batch.
    """
    before, leaves = call.traced, argnums.batch_positions(call.traced, s)
    extents = {before.in_avals[i].shape[0] for i in leaves}
    if len(extents) != 1 or before.mesh is not None or call.context != jax_compat.trace_context():
        raise ArgumentError(f"{name_of(call.fn)} is not planned with another batch")
    avals = [_longer(aval, times) if i in leaves else aval for i, aval in enumerate(before.in_avals)]
    return _retraced(call, s, avals, f"a batch {times} times as large")


def with_attention_of_cudnn(call: Call, s: Settings) -> Call:
    """The call with `jax.nn.dot_product_attention` by cuDNN in place of XLA, traced anew.

    Raises:
        ArgumentError: there is none, shardings are in the types of the arguments, or JAX's settings are no longer those
            of the first trace.
        TraceError: the function does not take it, as with operands in float32.
    """
    if call.traced.mesh is not None or call.context != jax_compat.trace_context():
        raise ArgumentError(f"{name_of(call.fn)} is not planned with attention of cuDNN")
    with jax_compat.attention_by_cudnn() as is_called:
        again = _retraced(call, s, call.traced.in_avals, "attention of cuDNN")
    if not is_called():
        raise ArgumentError(f"{name_of(call.fn)} has no jax.nn.dot_product_attention by XLA")
    return again


def _retraced(call: Call, s: Settings, avals: Sequence[Any], changed: str) -> Call:
    """The call, traced anew for these arguments; TraceError if the function, or its state, does not take the change."""
    before = call.traced
    positional, keywords = jax.tree.unflatten(before.in_tree, list(avals))
    given = arguments.merge_static(call.args, s.static_argnums, positional)
    try:
        with arguments.node_context((positional, keywords)):
            traced = trace(call.fn, *given, static_argnums=s.static_argnums, mesh_axes=s.mesh_axes, **keywords)
    except Exception as error:  # whatever the function raises for what it was not written for
        raise TraceError(f"{name_of(call.fn)} does not take {changed}: {error}") from error
    if traced.out_tree != before.out_tree or match_state(traced.graph) != match_state(before.graph):
        raise TraceError(f"{name_of(call.fn)} has another state with {changed}")
    return replace(call, traced=traced)


def _longer(aval: jax.ShapeDtypeStruct, times: int) -> jax.ShapeDtypeStruct:
    return aval.update(shape=(times * aval.shape[0], *aval.shape[1:]))


def default_time_limit(graph: Graph) -> float:
    """Default time limit of planning in seconds."""
    return max(PLANNING.planning_seconds, PLANNING.seconds_per_op * sum(1 for _ in graph.walk()))


def offload_option(s: Settings, target: Target, local: bool) -> str:
    """The option `offload`; "none" in place of "auto" where the devices here cannot address host memory.

    Raises:
        ArgumentError: the option is "all", and the devices here cannot address host memory.
    """
    kinds = meshes.memory_kinds(target) if local else (jax_compat.HOST_MEMORY,)
    if jax_compat.HOST_MEMORY in kinds:
        return s.offload
    if s.offload == choose_offload.ALL:
        raise ArgumentError(
            f"offload='all' needs devices that can address memory of the kind '{jax_compat.HOST_MEMORY}'; those here "
            f"have {', '.join(map(repr, kinds)) or 'none that JAX tells apart'}. Use offload='auto' or 'none'."
        )
    return choose_offload.NONE


def donated_leaves(call: Call, s: Settings) -> tuple[int, ...]:
    """Positions of the argument leaves whose buffers the step may reuse."""
    donated = argnums.donated(call.traced, s)
    return tuple(sorted(in_place(call.traced.graph).values())) if isinstance(donated, str) else donated


def state_leaves(call: Call, s: Settings) -> tuple[int, ...]:
    """The argument leaves that the step returns anew, which are donated unless the settings say otherwise."""
    return donated_leaves(call, replace(s, donate_argnums="auto"))


def wanted_mesh(traced: Traced, s: Settings) -> Any:
    """The mesh to plan for: the given one, or the one over which the step constrains shardings; None: search.

    That is an Explicit one, or that of the first `NamedSharding` in a constraint. A `shard_map` in the step has a mesh
    of its own, which is the one to plan for. Given as sizes alone, a mesh has its names.

    Raises:
        MeshError: a `shard_map` has another mesh than the one that is given, or than another `shard_map`.
    """
    constraints = [op for op in traced.graph.walk() if op.name == "sharding_constraint"]
    given = s.mesh
    if given is None and (traced.pins or constraints):
        given = traced.mesh if traced.mesh is not None else _mesh_of_constraints(constraints)
    return given if s.pipelined else _mesh_of_maps(traced.graph, given)


def _mesh_of_constraints(constraints: Sequence[Op]) -> Any:
    """The mesh of the first `NamedSharding` in these operations: its devices, or its sizes; None: there is none."""
    shardings = (op.params["sharding"] for op in constraints)
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty), None)
    return mesh if mesh is None or jax_compat.is_concrete_mesh(mesh) else dict(mesh.shape)


def _mesh_of_maps(graph: Graph, given: Any) -> Any:
    first = manual.first_call(graph)
    if first is None:
        return given
    own = manual.call_of(first).mesh
    for op in manual.calls(graph):
        if (other := manual.call_of(op).mesh) != own:
            raise MeshError(
                f"shard_map at {manual.line(op)} runs over the mesh {dict(other)}, and that at {manual.line(first)} "
                f"over {dict(own)}: a step is planned for one mesh. Write both for one, with the axes of both."
            )
    if given is None:
        mesh = first.params["mesh"]
        return mesh if jax_compat.is_concrete_mesh(mesh) else own
    wanted = meshes.axes(given)
    if wanted == tuple(own.values()):
        return own
    if not isinstance(wanted, Mapping) or tuple(wanted.items()) != tuple(own.items()):
        raise MeshError(
            f"shard_map at {manual.line(first)} runs over the mesh {dict(own)}, and the mesh to plan for is {wanted}. "
            "Axes, sizes and their order must be the same: leave out mesh=, or write the shard_map for the other one."
        )
    return given


def ordinary_pins(traced: Traced, s: Settings) -> Settings:
    """The settings, with strategies among the pins expanded for the mesh that they ask for.

    Raises:
        PinError: a strategy is pinned and no mesh is given, or it fits neither the mesh nor the step.
    """
    named = [key for key in s.pins or {} if strategies.names_strategy(key, traced.graph)]
    if not s.pins or not named:
        return s
    wanted = s.plan.mesh if s.plan is not None and s.mesh is None else wanted_mesh(traced, s)
    if wanted is None:
        axis = strategies.axes_of(named[0], s.pins[named[0]])[0]
        raise PinError(
            f"pin '{named[0]}' needs the size of mesh axis '{axis}', and no mesh is given; "
            f"mesh={{'{axis}': 8}}, for example"
        )
    mesh = meshes.targets(wanted, s.cluster, local=False)[0].logical
    rules = partial(rules_of, traced.graph, registered_rules())
    return replace(s, pins=strategies.expand(s.pins, traced.graph, mesh, rules, argnums.named_batch(traced, s)))


def in_bytes(call: Call, s: Settings) -> Settings:
    """The settings, with a memory budget that is a share of a device's memory in bytes."""
    if not isinstance(s.memory_budget, memory_policy.MemoryShare):
        return s
    wanted = s.plan.mesh if s.plan is not None and s.mesh is None else wanted_mesh(call.traced, s)
    mesh = meshes.targets(wanted, s.cluster, local=call.local)[0].logical
    return replace(s, memory_budget=memory_policy.memory_bytes(mesh, s.memory_budget))


def absolute_budget(s: Settings) -> float | str | None:
    """The memory budget of settings `in_bytes`: bytes, "min" or None."""
    assert not isinstance(s.memory_budget, memory_policy.MemoryShare)
    return s.memory_budget


def warn_of(call: Call, step: PlannedStep) -> None:
    """Warn of what the planners remark on a step, but for a time limit that was reached (`warn_of_time_limit`)."""
    for warning in step.warnings:
        if not warning.startswith(TIME_LIMIT_REACHED):
            warn(f"{name_of(call.fn)}: {warning}")


def warn_of_time_limit(name: str, step: PlannedStep, s: Settings, seconds: float) -> None:
    """Warn once that planning was ended by its time limit before the plan was known to be within the tolerance.

    A search under a memory budget uses all of the default limit: it is a remark there only if the solver had no time.

    Args:
        name: of the step.
        step: the planned step.
        s: the settings.
        seconds: what planning took, without tracing.
    """
    plan = step.plan
    ended = s.time_limit is not None and (seconds > s.time_limit or plan.solver_status == "time-limit")
    if plan.gap <= s.gap or not (ended or any(text.startswith(TIME_LIMIT_REACHED) for text in step.warnings)):
        return
    limit = "" if s.time_limit is None else f" ({s.time_limit:g} s)"
    what = "need up to {} less memory" if plan.solver_status == "least-memory" else "be up to {} faster"
    gap = f"{plan.gap:.1%}"
    missed = "no bound on other plans is known" if plan.gap >= 1.0 else f"another plan may {what.format(gap)}"
    warn(f"{name}: {TIME_LIMIT_REACHED}{limit} with a gap of {gap}: {missed}. Raise time_limit= (--time-limit)")
