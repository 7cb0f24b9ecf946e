"""Checks that a compiler emits the collectives that a plan predicts.

    target "shardy"  the program is lowered on a mesh without devices and partitioned by Shardy alone: any mesh size,
                     well under a second; collectives must be equal piece by piece
    target "cpu"     compiled for virtual CPU devices
    target "tpu:..." compiled by libtpu for a topology such as "tpu:v5e:2x4", no TPU needed
    target "gpu:..." compiled by XLA for devices such as "gpu:h100:8", no GPU needed

The programs of a pipeline are compared stage by stage (`autopar.verification.verify_stages`).

Planned collectives are first lowered in the way that the compiler of the target is known to lower them
(`autopar.verification.lowering`). A check passes if the bytes on the wire are within `MOST_WIRE_RATIO` of the plan's;
on "shardy", if all pieces are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax

from autopar import jax_compat
from autopar.codegen import emit as codegen
from autopar.codegen.rewrites import apply_loaded_plan, apply_rewrites
from autopar.errors import ArgumentError
from autopar.ir.arguments import ArrayArguments, as_arrays
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Op
from autopar.ir.op_sets import RETURNING_CALLBACKS
from autopar.ir.trace import Traced, attention_of_cudnn, needs_gpu, trace
from autopar.options import name_of, written
from autopar.plans import comparison
from autopar.plans.plan import Plan, check_matches
from autopar.rules import rules_of
from autopar.rules.registry import registered_rules
from autopar.verification import exceptions as known_exceptions
from autopar.verification import lowering, verify_stages
from autopar.verification.dataflow import Context
from autopar.verification.targets import BACKENDS, DESCRIBED, TARGETS, Axes, Emitted, read

#: Largest ratio of emitted to predicted wire bytes, or its inverse, at which a check passes.
MOST_WIRE_RATIO = 1.10


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
        uncounted: collectives that broadcast the result of a callback. They are neither predicted nor compared.
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
        exceptions = [f"{count} x {name}" for name, count in self.exceptions.items()]
        return "\n".join([head, *exceptions, *map(_not_counted, self.uncounted), *self.mismatches])


def _not_counted(c: Collective) -> str:
    axes, where = "+".join(c.axes), f" at {c.source}" if c.source else ""
    return f"not counted, of a callback: {c.count} x {c.kind} over {axes}, {c.bytes:,} bytes{where}"


@jax.disable_jit(False)
def verify(plan: Plan, fn: Callable[..., Any], *args: Any, target: str = "cpu", **kwargs: Any) -> Report:
    """Compare the collectives of a plan with those of the program that a compiler makes of it.

    Args:
        plan: a plan of `fn`.
        fn: the function as it is written, or a parallelized one, whose `static_argnums` apply here.
        *args: its arguments, arrays or `ShapeDtypeStruct`s.
        target: the compiler. "cpu": XLA for virtual CPU devices. "shardy": the partitioner alone, on an abstract mesh
            of any size, without compilation. "tpu:v5e:2x4": libtpu for a topology, without a TPU (extra `tpu`).
            "gpu:h100:8": XLA for devices of one host, h100 or a100, without a GPU (extra `gpu`).
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
    static, names = (chosen.static_argnums, chosen.static_argnames) if chosen else ((), ())
    with as_arrays(args, kwargs, static, names) as array_args:
        traced = _traced(fn, array_args, static, plan)
        check_matches(plan, traced.graph, getattr(fn, "__name__", "the function"))
        op = attention_of_cudnn(traced.graph)
        if op is not None and platform != "gpu":
            raise needs_gpu(name_of(fn), op, f"target={target!r} is none")
        if plan.pipelined:
            return _verify_stages(plan, name_of(fn), traced, target)
    traced, backend = apply_loaded_plan(traced, plan, registered_rules()), BACKENDS[platform]
    axes = Axes(plan.mesh_names, plan.mesh_sizes)
    with jax_compat.automatic_axes():
        mesh = backend.mesh(axes, traced.graph, topology)
        built = codegen.program(traced.graph, plan, rules_of(traced.graph), mesh)
        lowered = built.jit().trace(*traced.in_avals).lower(lowering_platforms=(backend.platform,))
        needed = codegen.compiler_options(plan, traced.graph, backend.platform)
        emitted = backend.emit(lowered, axes, traced.graph, needed)
    return _report(plan, traced.graph, emitted, target)


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
    static, names = (chosen.static_argnums, chosen.static_argnames) if chosen else ((), ())
    with as_arrays(args, kwargs, static, names) as array_args:
        traced = apply_rewrites(_traced(fn, array_args, static, step.plan), step.plan)
    axes = Axes(step.plan.mesh_names, step.plan.mesh_sizes)
    return _report(step.plan, traced.graph, read(step.programs["step"], axes, traced.graph), "cpu")


def _traced(fn: Callable[..., Any], array_args: ArrayArguments, static: Sequence[int], plan: Plan) -> Traced:
    step = array_args.step(fn)
    return trace(step, *array_args.args, static_argnums=static, mesh_axes=plan.mesh, **array_args.kwargs)


def _report(plan: Plan, graph: Graph, program: Emitted, target: str) -> Report:
    platform, context = target.partition(":")[0], Context(graph, plan)
    predicted, _ = _split_counted(graph, lowering.lower_collectives(platform, context))
    emitted, uncounted = _split_counted(graph, [_sourced(c, graph) for c in program.collectives])
    compared = comparison.compare(predicted, emitted, plan.mesh)
    compared, exceptions = known_exceptions.apply_exceptions(platform, compared, predicted, context)
    return Report(
        _within_tolerance(compared, target),
        target,
        emitted,
        compared,
        program.memory,
        program.flops,
        tuple(comparison.differences(compared)),
        exceptions,
        program.accessed,
        predicted,
        uncounted,
    )


def _split_counted(graph: Graph, pieces: Sequence[Collective]) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Collectives that a plan has, and others: of results of callbacks."""

    def is_other(c: Collective) -> bool:
        op = _operation(c, graph)
        if op is None:
            return False
        return op.name in RETURNING_CALLBACKS and c.op == op.tag

    return tuple(c for c in pieces if not is_other(c)), tuple(filter(is_other, pieces))


def _sourced(c: Collective, graph: Graph) -> Collective:
    """A collective with the line of the operation that it is tagged with, if the target names no line."""
    op = None if c.source else _operation(c, graph)
    return c if op is None else replace(c, source=op.source)


def _operation(c: Collective, graph: Graph) -> Op | None:
    """The operation that a collective is tagged with, also inside a region; None for results and without a tag."""
    number = re.match(r"op(\d+)\b", c.op)
    return graph.by_index.get(int(number[1])) if number else None


def _verify_stages(plan: Plan, name: str, traced: Traced, target: str) -> Report:
    by_stage = verify_stages.emitted(plan, name, traced, target)
    return Report(
        all(_within_tolerance(c, target) for c in by_stage.comparisons),
        target,
        by_stage.collectives,
        by_stage.comparison,
        by_stage.memory,
        by_stage.flops,
        tuple(line for c in by_stage.comparisons for line in comparison.differences(c)),
        by_stage.exceptions,
        by_stage.accessed,
        by_stage.predicted,
    )


def _within_tolerance(c: comparison.Comparison, target: str) -> bool:
    if target == "shardy":
        return not c.predicted_only and not c.emitted_only
    return 1 / MOST_WIRE_RATIO <= c.ratio <= MOST_WIRE_RATIO
