"""Checks that a compiler emits the collectives that a plan predicts.

    target "shardy"  the program is lowered on a mesh without devices and partitioned by Shardy alone: any mesh size,
                     well under a second; collectives must be equal piece by piece
    target "cpu"     compiled for virtual CPU devices
    target "tpu:..." compiled by libtpu for a topology such as "tpu:v5e:2x4", no TPU needed
    target "gpu:..." compiled by XLA for devices such as "gpu:h100:8", no GPU needed

The programs of a pipeline are compiled for "cpu" only, and compared stage by stage
(`autopar.verification.verify_stages`).

Planned collectives are first lowered in the way that the compiler of the target is known to lower them
(`autopar.verification.lowering`). A check passes if the bytes on the wire are within `MOST_WIRE_RATIO` of the plan's;
on "shardy", if all pieces are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from autopar import jax_compat
from autopar.codegen import emit as codegen
from autopar.codegen.rewrites import apply_loaded_plan, apply_rewrites
from autopar.errors import ArgumentError, MeshError
from autopar.hardware import gpu_topology, tpu_topology
from autopar.ir.arguments import as_arrays
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Op
from autopar.ir.op_sets import RETURNING_CALLBACKS
from autopar.ir.trace import Traced, trace
from autopar.options import name_of, written
from autopar.passes.op_groups.bindings import assumed_trips
from autopar.plans import comparison
from autopar.plans.plan import Plan, check_matches
from autopar.rules import rules_of
from autopar.rules.registry import registered_rules
from autopar.verification import exceptions as known_exceptions
from autopar.verification import hlo, lowering, shardy, verify_stages

#: Largest ratio of emitted to predicted wire bytes, or its inverse, at which a check passes.
MOST_WIRE_RATIO = 1.10

#: Operations that JAX lowers for devices at hand only. Tried on 0.10.2 and 0.12.0.
LOWERED_FOR_DEVICES = (*RETURNING_CALLBACKS, "custom_partitioning", "inspect_sharding")

TARGETS = ("cpu", "shardy", "tpu:TOPOLOGY (tpu:v5e:2x4)", "gpu:DEVICES (gpu:h100:8)")


@dataclass(frozen=True)
class Report:
    """Result of `autopar.verify`; as text, a line for each mismatch with its source line.

    Attributes:
        ok: whether the target emits the predicted communication.
        target: the target, as it was given.
        collectives: collectives that the target emits.
        comparison: matched and unmatched collectives, and wire bytes of both.
        memory: kind of memory -> bytes per device, if the target reports it.
        flops: floating-point operations per device and step, if the target reports them.
        mismatches: a line for each difference, with the source line of the user; equal differences share one.
        exceptions: known deviation of the target that no plan can predict (`autopar.verification.exceptions`) -> number
            of collectives that it explains. Their bytes count.
        accessed: bytes read and written in device memory per device and step, if the target reports them.
        predicted: collectives of the plan, as the compiler of the target is known to convert them: TPU, for example,
            gathers operands of products in bfloat16.
        uncounted: collectives of a `shard_map` of the user, those of its operands, and those that broadcast the result
            of a callback. They are neither predicted nor compared.
    """

    ok: bool
    target: str
    collectives: tuple[Collective, ...]
    comparison: comparison.Comparison
    memory: Mapping[str, int]
    flops: float
    mismatches: tuple[str, ...]
    exceptions: Mapping[str, int] = field(default_factory=dict[str, int])
    accessed: float = 0.0
    predicted: tuple[Collective, ...] = ()
    uncounted: tuple[Collective, ...] = ()

    @property
    def bytes(self) -> float:
        """Bytes that each device sends per step in the emitted collectives, without `uncounted`."""
        return self.comparison.emitted_wire_bytes

    def __str__(self) -> str:
        c = self.comparison
        head = (
            f"{'ok' if self.ok else 'MISMATCH'} on {self.target}: {c.matched + c.joined} collectives as predicted, "
            f"{c.emitted_wire_bytes:,.0f} bytes on the wire per device and step, "
            f"predicted {c.predicted_wire_bytes:,.0f}"
        )
        known = [f"{count} x {name}" for name, count in self.exceptions.items()]
        return "\n".join([head, *known, *map(_not_counted, self.uncounted), *self.mismatches])


def _not_counted(c: Collective) -> str:
    axes, where = "+".join(c.axes), f" at {c.source}" if c.source else ""
    return f"not counted, in a shard_map or callback: {c.count} x {c.kind} over {axes}, {c.bytes:,} bytes{where}"


def verify(plan: Plan, fn: Callable[..., Any], *args: Any, target: str = "cpu", **kwargs: Any) -> Report:
    """Compare the collectives of a plan with those of the program that a compiler makes of it.

    Args:
        plan: a plan of `fn`.
        fn: the function as it is written, or a parallelized one, whose `static_argnums` apply here.
        *args: its arguments, arrays or `ShapeDtypeStruct`s.
        target: the compiler. "cpu": XLA for virtual CPU devices, the only target for a plan with stages. "shardy":
            the partitioner alone, on an abstract mesh of any size, without compilation. "tpu:v5e:2x4": libtpu for a
            topology, without a TPU (extra `tpu`). "gpu:h100:8": XLA for devices of one host, h100 or a100, without a
            GPU (extra `gpu`).
        **kwargs: keyword arguments of `fn`.

    Returns:
        The comparison. A mismatch raises no error; see `Report.ok`.

    Raises:
        ArgumentError: the target is unknown, `plan` is no plan, or `fn` no function.
        PlanMismatchError: the plan is for another function or other shapes.
        MeshError: the plan has more devices than the target "cpu".
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"verify takes a Plan, then the function and its arguments; got {plan!r:.60}")
    if not callable(fn):
        raise ArgumentError(f"verify takes a function behind the plan, got {type(fn).__name__} {fn!r:.60}")
    platform, _, topology = str(target).partition(":")
    if platform not in BACKENDS or bool(topology) != (platform in DESCRIBED):
        raise ArgumentError(f"target={target!r} is not known. Available: {', '.join(TARGETS)}")
    fn, args, chosen = written(fn, args)
    static = chosen.static_argnums if chosen else ()
    with as_arrays(args, kwargs, static) as given:
        traced = trace(fn, *given.args, static_argnums=static, **given.kwargs)
        check_matches(plan, traced.graph, getattr(fn, "__name__", "the function"))
        if plan.pipelined:
            return _verify_stages(plan, name_of(fn), traced, target)
    traced = apply_loaded_plan(traced, plan, registered_rules())
    backend = BACKENDS[platform]
    with jax_compat.automatic_axes():
        mesh = backend.mesh(plan, traced.graph, topology)
        built = codegen.program(traced.graph, plan, rules_of(traced.graph), mesh)
        found = backend.emit(built, traced, plan)
    return _report(plan, traced.graph, found, target)


class CompiledStep(Protocol):
    """The attributes of an `autopar.runtime.executables.Executable` that `verify_compiled` reads."""

    @property
    def plan(self) -> Plan: ...
    @property
    def programs(self) -> Mapping[str, Any]: ...


def verify_compiled(step: CompiledStep, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """`verify` with target "cpu" for a step without stages that is already compiled.

    It sends the same bytes. All-reduces that the compiler has combined share one source line, so that fewer pieces are
    matched by name.
    """
    fn, args, chosen = written(fn, args)
    static = chosen.static_argnums if chosen else ()
    with as_arrays(args, kwargs, static) as given:
        traced = apply_rewrites(trace(fn, *given.args, static_argnums=static, **given.kwargs), step.plan)
    return _report(step.plan, traced.graph, _read(step.programs["step"], traced.graph, step.plan), "cpu")


def _report(plan: Plan, graph: Graph, found: Emitted, target: str) -> Report:
    platform = target.partition(":")[0]
    predicted, _ = _split_counted(graph, lowering.lower_collectives(platform, plan, graph))
    emitted, uncounted = _split_counted(graph, [_sourced(c, graph) for c in found.collectives])
    compared = comparison.compare(predicted, emitted, plan.mesh)
    compared, exceptions = known_exceptions.apply_exceptions(platform, compared, predicted, plan, graph)
    return Report(
        _within_tolerance(compared, target),
        target,
        emitted,
        compared,
        found.memory,
        found.flops,
        tuple(comparison.differences(compared)),
        exceptions,
        found.accessed,
        predicted,
        uncounted,
    )


def _split_counted(graph: Graph, found: Sequence[Collective]) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Collectives that autopar plans, and others: in a `shard_map`, of its operands, of results of callbacks."""

    def is_other(c: Collective) -> bool:
        op = _operation(c, graph)
        if op is None:
            return False
        return op.name == "shard_map" or (op.name in RETURNING_CALLBACKS and c.op == op.tag)

    return tuple(c for c in found if not is_other(c)), tuple(filter(is_other, found))


def _sourced(c: Collective, graph: Graph) -> Collective:
    """A collective with the line of the operation that it is tagged with, if the target names no line."""
    op = None if c.source else _operation(c, graph)
    return c if op is None else replace(c, source=op.source)


def _operation(c: Collective, graph: Graph) -> Op | None:
    """The operation that a collective is tagged with, also inside a region; None for results and without a tag."""
    number = re.match(r"op(\d+)\b", c.op)
    return graph.by_index.get(int(number[1])) if number else None


def _verify_stages(plan: Plan, name: str, traced: Traced, target: str) -> Report:
    found = verify_stages.emitted(plan, name, traced, target, _ON_CPU)
    return Report(
        all(_within_tolerance(c, target) for c in found.comparisons),
        target,
        found.collectives,
        found.comparison,
        found.memory,
        found.flops,
        tuple(line for c in found.comparisons for line in comparison.differences(c)),
        found.exceptions,
        found.accessed,
        found.predicted,
    )


def _within_tolerance(c: comparison.Comparison, target: str) -> bool:
    if target == "shardy":
        return not c.predicted_only and not c.emitted_only
    return 1 / MOST_WIRE_RATIO <= c.ratio <= MOST_WIRE_RATIO


def _abstract(plan: Plan, graph: Graph, topology: str) -> Any:
    """A mesh without devices; of local devices if an operation, such as a callback, is lowered only for devices."""
    bound = next((op for op in graph.walk() if op.name in LOWERED_FOR_DEVICES), None)
    if bound is None:
        return jax_compat.auto_abstract_mesh(plan.mesh_sizes, plan.mesh_names)
    return _of_local_devices(plan, f"for '{bound.name}'{f' at {bound.source}' if bound.source else ''}")


def _local(plan: Plan, graph: Graph, topology: str) -> Any:
    return _of_local_devices(plan, "with target 'cpu'")


def _of_local_devices(plan: Plan, why: str) -> Any:
    devices, count = jax.devices(), math.prod(plan.mesh_sizes)
    if len(devices) < count:
        raise MeshError(f"verify needs {count} devices for mesh {plan.mesh_sizes} {why}, {len(devices)} are here")
    return jax_compat.auto_mesh(np.array(devices[:count]).reshape(plan.mesh_sizes), plan.mesh_names)


def _tpu(plan: Plan, graph: Graph, topology: str) -> Any:
    return tpu_topology.mesh(topology, plan.mesh_sizes, plan.mesh_names)


def _gpu(plan: Plan, graph: Graph, topology: str) -> Any:
    return gpu_topology.mesh(topology, plan.mesh_sizes, plan.mesh_names)


@dataclass(frozen=True)
class Emitted:
    """Collectives and statistics of a program on a target; fields as in `Report`."""

    collectives: tuple[Collective, ...]
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    flops: float = 0.0
    accessed: float = 0.0


def _partitioned(built: codegen.Program, traced: Traced, plan: Plan) -> Emitted:
    lowered = built.jit().trace(*traced.in_avals).lower(lowering_platforms=("cpu",))
    return Emitted(shardy.collectives(shardy.partition(lowered), assumed_trips(traced.graph)))


def _compiled(built: codegen.Program, traced: Traced, plan: Plan, platform: str, options: Mapping[str, str]) -> Emitted:
    lowered = built.jit().trace(*traced.in_avals).lower(lowering_platforms=(platform,))
    needed = codegen.compiler_options(plan, traced.graph, platform)
    with jax_compat.own_source_lines():
        compiled = lowered.compile(compiler_options=_merged_options(options, needed))
    return _read(compiled, traced.graph, plan)


def _read(compiled: Any, graph: Graph, plan: Plan) -> Emitted:
    stats = compiled.memory_analysis()
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "host arguments": stats.host_argument_size_in_bytes,
    }
    costs = compiled.cost_analysis() or {}
    found = hlo.collectives(compiled.as_text(), plan.mesh_names, plan.mesh_sizes, assumed_trips(graph))
    return Emitted(found, memory, float(costs.get("flops", 0.0)), float(costs.get("bytes accessed", 0.0)))


def _merged_options(*options: Mapping[str, str]) -> dict[str, str]:
    """Compiler options together, with their lists concatenated."""
    names = dict.fromkeys(name for some in options for name in some)
    return {name: ",".join(some[name] for some in options if name in some) for name in names}


@dataclass(frozen=True)
class Backend:
    """How to compile for one kind of target.

    Attributes:
        mesh: (plan, program, topology) -> the mesh to compile for.
        emit: (program, trace, plan) -> what the target emits.
    """

    mesh: Callable[[Plan, Graph, str], Any]
    emit: Callable[[codegen.Program, Traced, Plan], Emitted]


def _without(*passes: str) -> Mapping[str, str]:
    """Compiler options that disable these passes.

    Combining only changes the number of pieces in one instruction; without it, the pieces keep their own tags.
    """
    return {"xla_disable_hlo_passes": ",".join(passes)}


_ON_CPU = _without("cpu-all-reduce-combiner")
_ON_GPU = _without("gpu-all-reduce-combiner", "gpu-reduce-scatter-combiner", "gpu-all-gather-combiner")
# libtpu also stages buffers through on-chip memory, and passes those of a collective through all loops that overlap
# with it. Its cost analysis counts both as traffic, so both are disabled.
_ON_TPU = {
    **_without("all-reduce-combiner"),
    "xla_vf_vmem_memory_space_assignment": "false",
    "xla_tpu_enable_async_collective_fusion": "false",
}

BACKENDS: Mapping[str, Backend] = {
    "shardy": Backend(_abstract, _partitioned),
    "cpu": Backend(_local, partial(_compiled, platform="cpu", options=_ON_CPU)),
    "tpu": Backend(_tpu, partial(_compiled, platform="tpu", options=_ON_TPU)),
    "gpu": Backend(_gpu, partial(_compiled, platform="cuda", options=_ON_GPU)),
}

#: Platforms whose devices need not be present: the target names a topology.
DESCRIBED = ("tpu", "gpu")
