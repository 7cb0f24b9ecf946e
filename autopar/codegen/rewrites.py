"""The program that a plan executes: the step as written, with the plan's rematerialisation and microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.codegen.accumulate import accumulate_gradients
from autopar.ir.graph import graph_hash
from autopar.ir.trace import Traced
from autopar.passes.remat import rewrite as remat
from autopar.plans.checks import as_plan_mismatch, mismatches
from autopar.plans.layout_checks import check_arguments, check_layouts
from autopar.plans.plan import Plan
from autopar.plans.schema import FieldError


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
