"""Does the compiler emit what the plan predicts?

    target "shardy"  the program is lowered on a mesh without devices and partitioned by Shardy alone: any mesh size,
                     well under a second; collectives must be equal piece by piece
    target "cpu"     compiled for virtual CPU devices; a reduce-scatter appears there as an all-reduce of the same bytes
    target "tpu:..." compiled by libtpu for a topology such as "tpu:v5e:2x4", no TPU needed

A check passes when nothing was emitted that no operation of the plan explains, and the bytes on the wire are within
`TOLERANCE` of the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from autopar import codegen, comparison, hlo, jax_compat, shardy, tpu_topology
from autopar.collective import Collective
from autopar.errors import ArgumentError, MeshError
from autopar.plans import Plan, check_matches
from autopar.rules import rules_of
from autopar.trace import trace

#: Emitted over predicted wire bytes up to which a plan counts as honoured.
TOLERANCE = 1.10

TARGETS = ("cpu", "shardy", "tpu:TOPOLOGY (tpu:v5e:2x4)")


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        ok: the target emits what the plan predicts.
        target: "cpu", "shardy" or "tpu:v5e:2x4".
        collectives: what the target emits.
        comparison: matched and unmatched pieces, and wire bytes of both.
        memory: bytes per device by kind, where the target reports it.
        flops: floating-point operations per device, where the target reports it.
        mismatches: a line for everything that differs, with the user's source line.
    """

    ok: bool
    target: str
    collectives: tuple[Collective, ...]
    comparison: comparison.Comparison
    memory: Mapping[str, int]
    flops: float
    mismatches: tuple[str, ...]

    @property
    def bytes(self) -> float:
        """Bytes each device sends per step in what was emitted."""
        return self.comparison.emitted_wire_bytes

    def __str__(self) -> str:
        c = self.comparison
        head = (
            f"{'ok' if self.ok else 'MISMATCH'} on {self.target}: {c.matched + c.joined} collectives as predicted, "
            f"{c.emitted_wire_bytes:,.0f} bytes on the wire per device and step, "
            f"predicted {c.predicted_wire_bytes:,.0f}"
        )
        return "\n".join([head, *self.mismatches])


def verify(plan: Plan, fn: Callable[..., Any], *args: Any, target: str = "cpu", **kwargs: Any) -> Report:
    """Compare a plan with what a target makes of it.

    Raises:
        ArgumentError: an unknown target.
        PlanMismatchError: the plan is for another function or other shapes.
        MeshError: target "cpu" with fewer devices than the plan has.
    """
    platform, _, topology = target.partition(":")
    if platform not in BACKENDS or bool(topology) != (platform == "tpu"):
        raise ArgumentError(f"target={target!r} is not known. Available: {', '.join(TARGETS)}")
    fn = getattr(fn, "__wrapped__", fn)
    traced = trace(fn, *args, **kwargs)
    check_matches(plan, traced.graph, getattr(fn, "__name__", "the function"))
    sizes = dict(zip(plan.mesh_names, plan.mesh_sizes, strict=True))
    backend = BACKENDS[platform]
    with jax_compat.automatic_axes():
        mesh = backend.mesh(plan, topology)
        built = codegen.program(traced.graph, plan, rules_of(traced.graph), mesh)
        found, memory, flops = backend.emit(built, traced.in_avals, plan)
    predicted = backend.conversion(plan.collectives, sizes)
    compared = comparison.compare(predicted, found, sizes)
    mismatches = tuple(_mismatches(compared))
    return Report(_holds(compared, target), target, found, compared, memory, flops, mismatches)


def without_reduce_scatter(predicted: Sequence[Collective], sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """What a backend that has no reduce-scatter makes of these: XLA on CPU all-reduces and slices afterwards.

    One reduce-scatter becomes an all-reduce of the same operand. Where an operation scatters along several axes, one
    joint all-reduce does it all, with the same bytes on the wire: 2 (xy-1)/xy = 2 (x-1)/x + 2 (y-1)/(xy).
    """
    sums: dict[str, list[Collective]] = {}
    for c in predicted:
        if c.kind in ("reduce-scatter", "all-reduce"):
            sums.setdefault(c.op, []).append(c)
    order = list(sizes)
    out: list[Collective] = []
    for c in predicted:
        scatters = [s for s in sums.get(c.op, ()) if s.kind == "reduce-scatter"]
        if c not in sums.get(c.op, ()) or len(scatters) < 2:
            out.append(replace(c, kind="all-reduce") if c.kind == "reduce-scatter" else c)
        elif c is scatters[0]:
            axes = sorted({a for s in sums[c.op] for a in s.axes}, key=order.index)
            out.append(replace(c, kind="all-reduce", axes=tuple(axes)))
    return tuple(out)


def _holds(c: comparison.Comparison, target: str) -> bool:
    if target == "shardy":
        return not c.predicted_only and not c.emitted_only
    return 1 / TOLERANCE <= c.ratio <= TOLERANCE


def _abstract(plan: Plan, topology: str) -> Any:
    return jax_compat.auto_abstract_mesh(plan.mesh_sizes, plan.mesh_names)


def _local(plan: Plan, topology: str) -> Any:
    devices, count = jax.devices(), math.prod(plan.mesh_sizes)
    if len(devices) < count:
        raise MeshError(f"target 'cpu' needs {count} devices for mesh {plan.mesh_sizes}, {len(devices)} are here")
    return jax_compat.auto_mesh(np.array(devices[:count]).reshape(plan.mesh_sizes), plan.mesh_names)


def _described(plan: Plan, topology: str) -> Any:
    return tpu_topology.mesh(topology, plan.mesh_sizes, plan.mesh_names)


Emitted = tuple[tuple[Collective, ...], dict[str, int], float]
"""Collectives, bytes per device by kind, FLOPs per device."""


def _partitioned(built: codegen.Program, avals: Any, plan: Plan) -> Emitted:
    lowered = built.jit().trace(*avals).lower(lowering_platforms=("cpu",))
    return shardy.collectives(shardy.partition(lowered)), {}, 0.0


def _compiled(built: codegen.Program, avals: Any, plan: Plan, platform: str, combiner: str) -> Emitted:
    # Combining only changes how many pieces one instruction carries; undone, the pieces keep their own tags.
    lowered = built.jit().trace(*avals).lower(lowering_platforms=(platform,))
    compiled = lowered.compile(compiler_options={"xla_disable_hlo_passes": combiner})
    stats = compiled.memory_analysis()
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }
    found = hlo.collectives(compiled.as_text(), plan.mesh_names, plan.mesh_sizes)
    return found, memory, float((compiled.cost_analysis() or {}).get("flops", 0.0))


def _unchanged(predicted: Sequence[Collective], sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    return tuple(predicted)


@dataclass(frozen=True)
class Backend:
    """How one kind of target is compiled for.

    Attributes:
        mesh: (plan, topology) -> the mesh to compile for.
        emit: what it makes of a program.
        conversion: what its compiler turns planned collectives into, bytes on the wire unchanged.
    """

    mesh: Callable[[Plan, str], Any]
    emit: Callable[[codegen.Program, Any, Plan], Emitted]
    conversion: Callable[[Sequence[Collective], Mapping[str, int]], tuple[Collective, ...]]


BACKENDS: Mapping[str, Backend] = {
    "shardy": Backend(_abstract, _partitioned, _unchanged),
    "cpu": Backend(
        _local, partial(_compiled, platform="cpu", combiner="cpu-all-reduce-combiner"), without_reduce_scatter
    ),
    "tpu": Backend(_described, partial(_compiled, platform="tpu", combiner="all-reduce-combiner"), _unchanged),
}


def _mismatches(c: comparison.Comparison) -> list[str]:
    lines: list[str] = []
    for title, side in (("predicted but not emitted", c.predicted_only), ("emitted but not predicted", c.emitted_only)):
        for x in side:
            where = f" at {x.source}" if x.source else ""
            what = f" ({x.op})" if x.op else ""
            lines.append(f"{title}: {x.count} x {x.kind} over {'+'.join(x.axes)}, {x.bytes:,} bytes{where}{what}")
    return lines
