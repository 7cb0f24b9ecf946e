"""The program that a plan executes: the step as written, with the plan's rematerialisation and microbatches.

Gradient accumulation is a rewrite too, and its result is traced and planned like any step:

    trace -> split into `count` microbatches (`autopar.passes.microbatch.split`) -> one scan over them -> trace

State, arguments and results stay those of the step. A microbatch takes an equal part of every device's shard of the
batch, so no example moves between devices. Where something is computed per microbatch, a microbatch is a contiguous run
of examples instead, so that results do not depend on the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax

from autopar.ir.graph import graph_hash
from autopar.ir.jaxpr import build_graph
from autopar.ir.jaxpr.simplify import simplified
from autopar.ir.trace import Traced
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.split import split
from autopar.passes.remat import rewrite as remat
from autopar.plans.plan import Plan
from autopar.plans.validation.consistency import as_plan_mismatch, mismatches
from autopar.plans.validation.layouts import check_arguments, check_layouts
from autopar.plans.validation.schema import FieldError


def accumulate_gradients(
    traced: Traced, count: int, batch: Sequence[int], devices: int, per_microbatch: Sequence[str] = ()
) -> Traced:
    """The step as a loop over `count` microbatches; the step itself if `count` is 1.

    Args:
        traced: the step.
        count: number of microbatches.
        batch: positions of the argument leaves that hold the batch.
        devices: number of devices over which the batch may be sharded.
        per_microbatch: globs of the values that may be computed per microbatch; see
            `autopar.passes.microbatch.split.split`.

    Raises:
        MicrobatchError: the batch does not divide, or examples depend on each other.
    """
    if count == 1:
        return traced
    programs = StepPrograms(
        split(traced.graph, count, batch, shards=1 if per_microbatch else devices, per_microbatch=per_microbatch)
    )
    jaxpr = jax.make_jaxpr(lambda *leaves: programs.step(leaves))(*traced.in_avals)
    paths, results = traced.graph.input_paths, traced.graph.output_paths
    return replace(traced, graph=build_graph(simplified(jaxpr), paths, results))


def apply_loaded_plan(traced: Traced, plan: Plan, registered: Mapping[str, str]) -> Traced:
    """The trace as a plan from a file, one without stages, executes it; the plan is checked against it.

    Args:
        traced: the step as written.
        plan: the plan.
        registered: the user's sharding rules.

    Raises:
        PlanMismatchError: the plan's layouts are of another program, or do not fit this one.
    """
    with as_plan_mismatch("recomputes other layers, or has other microbatches,"):
        run = apply_rewrites(traced, plan)
    with mismatches():
        if plan.stages[0].graph_hash != rewritten_hash(traced, run):
            expected = "that of the program that its remat, num_microbatches, batch and per_microbatch make"
            raise FieldError(expected, f"{plan.stages[0].graph_hash!r}", "stages[0].graph_hash")
        check_arguments(plan, run.graph)
        check_layouts(plan, 0, run.graph, plan.mesh_sizes, registered)
    return run


def rewritten_hash(written: Traced, run: Traced) -> str:
    """A hash of the program that is executed; "" if it is the program as written."""
    return "" if run.graph is written.graph else graph_hash(run.graph)


def apply_rewrites(traced: Traced, plan: Plan) -> Traced:
    """The trace with the plan's rematerialisation and microbatches; unchanged for a pipeline.

    Raises:
        ArgumentError, MicrobatchError: the plan was made for other layers, or for another batch.
    """
    if plan.pipelined:
        return traced
    run = replace(traced, graph=remat.rewrite(traced.graph, plan.remat))
    return accumulate_gradients(run, plan.num_microbatches, plan.batch, math.prod(plan.mesh_sizes), plan.per_microbatch)
