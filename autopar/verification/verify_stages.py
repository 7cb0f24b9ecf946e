"""Checks that the compiler emits what the plans of pipeline stages predict, for virtual CPU devices.

A stage's passes run once per microbatch, its other programs once per step. The collectives of all of them are compared
with those of the stage's plan, as `autopar.verification.verify` does for one program. Transfers between stages are
copies, not collectives. The programs of a loop that runs first have no prediction: they are compiled, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar import jax_compat
from autopar.errors import ArgumentError
from autopar.ir.collective import Collective
from autopar.ir.trace import Traced
from autopar.passes.op_groups.bindings import assumed_trips
from autopar.plans import comparison
from autopar.plans.plan import Plan
from autopar.runtime.executor import FIRST_LOOP
from autopar.runtime.load import load
from autopar.runtime.planned_step import PlannedStep
from autopar.schedules.instructions import Kind
from autopar.verification import exceptions as known_exceptions
from autopar.verification import hlo, lowering

UNPREDICTED = "program of a loop that runs first, which has no prediction"
_KINDS: tuple[Kind, ...] = ("F", "B", "W")


@dataclass(frozen=True)
class EmittedByStages:
    """Collectives and statistics of the programs of all stages.

    Attributes:
        collectives: of every stage, with their executions per step.
        comparisons: per stage.
        memory: kind of memory -> bytes per device, of the program that needs most of it.
        flops: floating-point operations per device and step, of the stage with most.
        accessed: bytes that a device reads and writes per step, of the stage with most.
        exceptions: programs that are not compared, and known deviations of the compiler -> their number.
        predicted: collectives that the plan predicts for every stage, as the compiler is known to lower them.
    """

    collectives: tuple[Collective, ...]
    comparisons: tuple[comparison.Comparison, ...]
    memory: Mapping[str, int]
    flops: float
    accessed: float
    exceptions: Mapping[str, int]
    predicted: tuple[Collective, ...]

    @property
    def comparison(self) -> comparison.Comparison:
        """The comparison of all stages together."""
        found = self.comparisons
        return comparison.Comparison(
            sum(c.matched for c in found),
            sum(c.joined for c in found),
            tuple(x for c in found for x in c.predicted_only),
            tuple(x for c in found for x in c.emitted_only),
            math.fsum(c.predicted_wire_bytes for c in found),
            math.fsum(c.emitted_wire_bytes for c in found),
        )


def emitted(plan: Plan, name: str, traced: Traced, target: str, options: Mapping[str, str]) -> EmittedByStages:
    """Compile the programs of a plan's stages and read their collectives.

    Args:
        plan: the plan of a pipeline.
        name, traced: the step.
        target: must be "cpu".
        options: of the compiler.

    Raises:
        ArgumentError: another target.
        MeshError: fewer devices than the plan has.
    """
    if target != "cpu":
        raise ArgumentError(f"target={target!r} is not available for plans with stages; use target='cpu'")
    with jax_compat.automatic_axes():
        planned = load(name, traced, plan)
    programs = planned.build(options).programs
    stages = [_stage(planned, programs, number) for number in range(len(plan.stages))]
    first = sum(name.startswith(FIRST_LOOP) for name in programs)
    names = dict.fromkeys(name for stage in stages for name in stage.exceptions)
    exceptions = {name: sum(stage.exceptions.get(name, 0) for stage in stages) for name in names}
    return EmittedByStages(
        tuple(c for stage in stages for c in stage.collectives),
        tuple(stage.comparison for stage in stages),
        _memory(programs.values()),
        max(stage.costs["flops"] for stage in stages),
        max(stage.costs["bytes accessed"] for stage in stages),
        {**exceptions, **({UNPREDICTED: first} if first else {})},
        tuple(c for stage in stages for c in stage.predicted),
    )


@dataclass(frozen=True)
class _Stage:
    """Collectives and costs of the programs of one stage."""

    predicted: tuple[Collective, ...]
    collectives: tuple[Collective, ...]
    comparison: comparison.Comparison
    exceptions: Mapping[str, int]
    costs: Mapping[str, float]


def _stage(planned: PlannedStep, programs: Mapping[str, Any], number: int) -> _Stage:
    plan, layouts = planned.plan, planned.layouts
    assert layouts is not None
    stage, graph = plan.stages[number], layouts.plans[number].graph.graph
    names, sizes = tuple(stage.submesh), tuple(stage.submesh.values())
    runs = {f"stage {number} {kind}": plan.num_microbatches for kind in _KINDS}
    found: list[Collective] = []
    costs = {"flops": 0.0, "bytes accessed": 0.0}
    for name, program in programs.items():
        if name.startswith(f"stage {number} "):
            times = runs.get(name, 1)
            emitted = hlo.collectives(program.as_text(), names, sizes, assumed_trips(graph))
            found += [replace(c, count=times * c.count) for c in emitted]
            known = program.cost_analysis() or {}
            costs = {what: total + times * float(known.get(what, 0.0)) for what, total in costs.items()}
    one = replace(plan, stages=(stage,), collectives=stage.collectives, mesh_names=names, mesh_sizes=sizes)
    predicted = lowering.lower_collectives("cpu", one, graph)
    compared = comparison.compare(predicted, found, stage.submesh)
    compared, exceptions = known_exceptions.apply_exceptions("cpu", compared, predicted, one, graph)
    return _Stage(predicted, tuple(found), compared, exceptions, costs)


def _memory(programs: Any) -> Mapping[str, int]:
    stats = [program.memory_analysis() for program in programs]
    kinds = {"arguments": "argument", "results": "output", "aliased": "alias", "temporaries": "temp"}
    return {kind: max(getattr(s, f"{name}_size_in_bytes") for s in stats) for kind, name in kinds.items()}
