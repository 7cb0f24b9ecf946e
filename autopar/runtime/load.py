"""A plan that is given instead of planned: checked against the function and the devices here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar import jax_compat
from autopar.codegen.rewrites import apply_loaded_plan
from autopar.errors import PlanMismatchError
from autopar.hardware import meshes
from autopar.hardware.cluster import Cluster
from autopar.hardware.meshes import Target
from autopar.ir.trace import Traced
from autopar.passes.inter_op import pipelines
from autopar.passes.inter_op.pipelines import Pipelined
from autopar.plans.builders import pipeline as pipeline_plan
from autopar.plans.plan import Plan, check_matches
from autopar.plans.validation.consistency import as_plan_mismatch
from autopar.rules.registry import registered_rules
from autopar.runtime.planned_step import PlannedStep


def load(
    name: str, traced: Traced, plan: Plan, mesh: Any = None, cluster: Cluster | None = None, *, local: bool = True
) -> PlannedStep:
    """The planned step of a given plan.

    Args:
        name: of the function, for messages.
        traced: its trace.
        plan: the plan.
        mesh: the option `mesh`; None: that of the plan.
        cluster: the option `cluster`.
        local: it is to run on the devices of this process.

    Raises:
        PlanMismatchError: the plan is for another function or mesh, or needs host memory that is not available here.
        MeshError: fewer devices than the plan has.
    """
    check_matches(plan, traced.graph, name)
    (target,) = meshes.targets(plan.mesh if mesh is None else mesh, cluster, local=local)
    if (target.logical.sizes, target.logical.names) != (plan.mesh_sizes, plan.mesh_names):
        raise PlanMismatchError(
            f"the plan is for the mesh {plan.mesh}, "
            f"but mesh {target.logical.shape} was given. Plan again, or leave out mesh."
        )
    if local and plan.offloaded and jax_compat.HOST_MEMORY not in (kinds := meshes.memory_kinds(target)):
        raise PlanMismatchError(
            f"the plan keeps state in memory of the kind '{jax_compat.HOST_MEMORY}', and the devices here have "
            f"{', '.join(map(repr, kinds)) or 'none that JAX tells apart'}. Plan again."
        )
    rules = registered_rules()
    if plan.pipelined:
        pipeline = _assemble(traced, plan, target)
        run = replace(traced, graph=pipeline.layers.graph)
        layouts = pipeline_plan.kept(plan, run, pipeline, rules)
        return PlannedStep(run, plan, target, rules, pipeline=pipeline, layouts=layouts)
    return PlannedStep(apply_loaded_plan(traced, plan, rules), plan, target, rules)


def _assemble(traced: Traced, plan: Plan, target: Target) -> Pipelined:
    """The stages of a plan; PlanMismatchError if the step does not have the plan's layers."""
    with as_plan_mismatch("has other stages"):
        return pipelines.assemble(traced.graph, pipeline_plan.choice_of(plan), target)
