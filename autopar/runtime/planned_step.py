"""A planned step: its program, plan, devices and sharding rules, from which it is lowered and compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.codegen import emit as codegen
from autopar.hardware import meshes
from autopar.hardware.meshes import Target
from autopar.ir.layout import from_spec
from autopar.ir.op_sets import CALLBACKS
from autopar.ir.trace import Traced
from autopar.passes.inter_op.pipelines import Pipelined
from autopar.passes.stages.plan_all import CodegenStage, StagePlans
from autopar.plans.plan import Plan
from autopar.rules import Rule, rules_of
from autopar.runtime.executor import PipelineStep
from autopar.runtime.pipeline import build

#: The sharding of an argument on an Explicit mesh: its spec (None if it is replicated) and the mesh.
Pin = tuple[PartitionSpec | None, Any]


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A planned step, before code generation.

    Attributes:
        traced: the trace with the graph that is executed, rematerialisation and microbatches included.
        plan: the plan.
        target: the mesh that it is for.
        registered: the user's sharding rules that it was planned with.
        warnings: what to warn the user of.
        pipeline: the step in stages; None on one mesh.
        layouts: the layouts inside the stages, if there are several.
    """

    traced: Traced
    plan: Plan
    target: Target
    registered: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    pipeline: Pipelined | None = None
    layouts: StagePlans[CodegenStage] | None = None

    def rules(self) -> Mapping[int, Rule]:
        """The sharding rules of the graph's operations, for code generation."""
        return rules_of(self.traced.graph, self.registered)

    def mesh(self) -> Mesh:
        """The devices, with Auto axes."""
        return jax_compat.auto_mesh(meshes.concrete(self.target), self.target.logical.names)

    def argument_shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding of every argument leaf between steps; where no stage stores it, that of the first stage."""
        pieces = (self.mesh(),) if self.pipeline is None else self.submeshes()
        rank = {i: stage.rank for stage in self.plan.stages for i in stage.arguments}
        by_rank = [codegen.in_shardings(self.plan, piece) for piece in pieces]
        return tuple(by_rank[rank.get(i, 0)][i] for i in range(len(self.plan.inputs)))

    def submeshes(self) -> tuple[Mesh, ...]:
        """The devices of every rank of a pipeline, with Auto axes."""
        assert self.pipeline is not None
        return meshes.submeshes(self.mesh(), [mesh.sizes for mesh in self.pipeline.meshes])

    def build(self, compiler_options: Mapping[str, Any] | None = None, debug_nans: bool = False) -> PipelineStep:
        """The pipeline, compiled for the devices of this process.

        Args:
            compiler_options: of XLA.
            debug_nans: search the results of every program for NaN; nothing is donated.
        """
        assert self.pipeline is not None
        with jax_compat.no_mesh():
            # an error in a host callback is reported after its call has returned, unless each call is waited for
            blocking = any(op.name in CALLBACKS for op in self.traced.graph.walk())
            submeshes = self.submeshes()
            required = codegen.kernel_options(self.traced.graph, submeshes[0].devices.flat[0].platform)
            options: Any = {
                "plans": self.layouts,
                "compiler_options": {**required, **(compiler_options or {})},
                "blocking": blocking,
                "donated": self.plan.donated,
                "debug_nans": debug_nans,
            }
            return build(self.traced, self.pipeline.stages, self.pipeline.schedule, submeshes, **options)

    def matches_pins(self, pins: Sequence[Pin | None], within: bool) -> bool:
        """Whether the plan fits a call whose arguments have these types.

        No stage stores the batch, so that its types do not matter. Results of stages are on submeshes with Auto axes:
        a call with them need not be on an Explicit mesh.

        Args:
            pins: per argument leaf, its sharding on an Explicit mesh; None where it has none.
            within: an argument, or the call, is on an Explicit mesh.
        """
        is_typed = self.traced.mesh is not None
        batch = self.plan.batch if self.plan.pipelined else ()
        return (within == is_typed or (self.plan.pipelined and is_typed)) and all(
            dict(pin[1].shape) == self.target.logical.shape and from_spec(pin[0], self.plan.mesh_names) == layout
            for i, (pin, layout) in enumerate(zip(pins, self.plan.inputs, strict=True))
            if pin is not None and pin[0] is not None and i not in batch
        )
