"""Plans in as many stages as the settings say, each of which saves memory only where it does not fit.

stages, submeshes, microbatches    balanced, without a search     -> autopar/passes/inter_op/pipelines.py
layers recomputed, state offloaded few, by bisection              -> autopar/passes/inter_op/savings.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

from autopar import argnums
from autopar.compile.call import Call, donated_leaves, offload_option, wanted_mesh
from autopar.compile.stages import pipeline_options, plan_stages
from autopar.hardware import meshes
from autopar.ir.text import size
from autopar.ir.text.warning import warn
from autopar.options import Settings, name_of
from autopar.passes.inter_op import pipelines, savings
from autopar.passes.inter_op.savings import Attempt, Savings, SavingsSearch
from autopar.passes.remat import choose, choose_offload, memory_policy
from autopar.passes.remat.choose_offload import OffloadCandidates
from autopar.passes.stages.offload import offloadable_in_stages
from autopar.plans.stage_budget import budget_error
from autopar.runtime.planned_step import PlannedStep


class GivenStages:
    """Plans a pipeline with as many stages as the settings say, on the given mesh or one axis of all devices.

    With remat="auto" and offload="auto", stages that do not fit into memory rematerialise layers or offload state,
    whichever takes less time. With memory_budget="min" the limit is the least peak that is found.
    """

    def __init__(self, call: Call, s: Settings) -> None:
        asked, self._graph = pipeline_options(s), call.traced.graph
        pipelines.check_options(asked, self._graph)
        candidates = meshes.targets(wanted_mesh(call.traced, s), s.cluster, local=call.local)
        self._call, self._s, self._target = call, s, candidates[0]
        pipeline = pipelines.pipelined(self._graph, argnums.named_batch(call.traced, s), self._target, asked)
        option = offload_option(s, self._target, call.local)
        positions = choose_offload.allowed(self._graph, self._target.logical.device, donated_leaves(call, s), option)
        self._offloadable = offloadable_in_stages(pipeline.stages, positions)
        always = self._offloadable if option == choose_offload.ALL else ()
        self._pipeline = replace(pipeline, choice=replace(pipeline.choice, offloaded=always))
        self._planned: list[PlannedStep] = []

    def plan(self) -> PlannedStep:
        """The plan.

        Raises:
            MemoryBudgetError: none fits into the budget. Without a budget, the smallest is the plan, with a warning.
        """
        if self._s.memory_budget == "min":
            least = savings.smallest(*self._can_save, partial(self._attempt, 0.0))
            return self._fastest(least.peak) or least.plan
        nbytes = memory_policy.memory_bytes(self._target.logical, self._s.memory_budget)
        return self._fastest(nbytes) or _closest(self._call, self._s, self._planned)

    def _fastest(self, nbytes: float) -> PlannedStep | None:
        """The fastest plan within a limit in bytes per device; None if none is found."""
        return SavingsSearch(nbytes, *self._can_save, partial(self._attempt, nbytes), self._seconds_copying).best()

    def _seconds_copying(self, stage: int, nbytes: float) -> float:
        """Seconds in which a stage copies so many bytes to a device and back."""
        return self._state[stage].seconds(nbytes)

    @cached_property
    def _can_save(self) -> tuple[tuple[int, ...], Sequence[Sequence[float]]]:
        """Of every stage, the number of layers that may be recomputed, and the bytes of the steps of its state."""
        return tuple(map(len, self._layers)), [candidates.step_bytes() for candidates in self._state]

    @cached_property
    def _layers(self) -> Sequence[Sequence[int]]:
        """The layers of every stage that may be recomputed."""
        layers = pipelines.recomputable_layers(self._graph, self._pipeline) if self._s.remat == choose.AUTO else ()
        return layers or [()] * len(self._pipeline.stages.stages)

    @cached_property
    def _state(self) -> Sequence[OffloadCandidates]:
        """The state of every stage that may be offloaded, besides what is in any case."""
        positions = () if self._pipeline.choice.offloaded else self._offloadable
        return pipelines.offload_candidates(self._pipeline, positions)

    def _attempt(self, nbytes: float, saved: Savings) -> Attempt[PlannedStep]:
        """The plan with these savings and a limit in bytes per device; 0: of least memory."""
        pipeline = self._pipeline
        recomputed = {layer for layers, n in zip(self._layers, saved.layers, strict=True) for layer in layers[:n]}
        if recomputed:
            pipeline = pipelines.recomputing(self._graph, pipeline, self._target, recomputed)
        offloaded = [i for state, n in zip(self._state, saved.state, strict=True) if n for i in state.steps()[n]]
        if offloaded:
            pipeline = replace(pipeline, choice=replace(pipeline.choice, offloaded=tuple(offloaded)))
        # where more layers can be recomputed, that is quicker to try than layouts of the least memory
        thorough = [n == len(layers) or not nbytes for layers, n in zip(self._layers, saved.layers, strict=True)]
        phases = self._planned[-1].plan.phases if self._planned else {"trace": self._call.trace_s}
        step = plan_stages(self._call, self._s, self._target, pipeline.within(nbytes, thorough), phases)
        self._planned.append(step)
        stages = step.plan.stages
        peaks, ranks = [stage.peak_memory_bytes for stage in stages], [stage.rank for stage in stages]
        return Attempt(step, step.plan.step_time_s, peaks, ranks)


def _closest(call: Call, s: Settings, attempts: Sequence[PlannedStep]) -> PlannedStep:
    """The smallest of plans in stages that do not fit, with a warning; MemoryBudgetError if a budget was given."""
    smallest = min(attempts, key=lambda step: step.plan.peak_memory_bytes)
    if isinstance(s.memory_budget, float):
        budget = memory_policy.memory_bytes(smallest.target.logical, s.memory_budget)
        raise budget_error(smallest.plan, call.traced.graph, budget)
    warn(
        f"{name_of(call.fn)}: the plan needs {size(smallest.plan.peak_memory_bytes)} per device, more than the "
        f"{size(memory_policy.usable_bytes(smallest.target.logical))} that are there, and none in "
        f"{len(smallest.plan.stages)} stages that was found needs less"
    )
    return smallest
