"""Programs of stages without a plan: a function gives the layouts of inputs and outputs, and none are set inside.

XLA propagates the layouts of inputs and outputs, and reduces gradients over devices in every microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.codegen.layouts import Layouts
from autopar.codegen.stages.shardings import Values
from autopar.ir.graph import Graph
from autopar.ir.train_state import match_state
from autopar.passes.microbatch.accumulators import Accumulator
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.programs import AccumulatedValue, AccumulationLoop
from autopar.passes.stages.divide import Stages
from autopar.schedules.instructions import Kind


@dataclass(frozen=True, eq=False)
class UnplannedPrograms:
    """`StageShardings` and `ProgramBodies` from a function that gives layouts by (stage, value)."""

    stages: Stages
    meshes: tuple[Mesh, ...]
    layouts: Layouts

    def graph(self, stage: int) -> Graph:
        return self.stages.split.graph

    # Shardings

    def replicated(self, stage: int) -> NamedSharding:
        return NamedSharding(self.meshes[stage], PartitionSpec())

    def value(self, stage: int, value: int) -> NamedSharding:
        return NamedSharding(self.meshes[stage], self.layouts(stage, value))

    def whole(self, stage: int, value: int) -> NamedSharding:
        return self.argument(stage, value)

    def argument(self, stage: int, value: int) -> NamedSharding:
        return self.replicated(stage) if value in self.stages.split.batch else self.value(stage, value)

    def blocks(self, stage: int, value: int) -> NamedSharding:
        return NamedSharding(self.meshes[stage], PartitionSpec(None, *self.layouts(stage, value)))

    def total(self, stage: int, value: int) -> NamedSharding:
        stacked = self.accumulator(stage, value).is_stacked
        return self.blocks(stage, value) if stacked else self.replicated(stage)

    def update_total(self, number: int, value: int) -> NamedSharding:
        return self.replicated(self.stages.updates.programs[number].stage)

    def update_read(self, number: int, value: int) -> NamedSharding:
        return self.replicated(self.stages.updates.programs[number].stage)

    def update_result(self, number: int, value: int) -> NamedSharding:
        """A new value of the state has the sharding of its argument."""
        stage, argument = self.stages.updates.programs[number].stage, self._carried.get(value)
        return self.replicated(stage) if argument is None else self.argument(stage, argument)

    @cached_property
    def _carried(self) -> Mapping[Any, int]:
        """New value of an argument -> the argument."""
        split = self.stages.split
        return {split.flat.outputs[out]: split.graph.inputs[i] for out, i in match_state(split.graph).items()}

    # Functions

    @cached_property
    def _programs(self) -> StepPrograms:
        return StepPrograms(self.stages.split)

    @cached_property
    def _totals(self) -> Mapping[int, AccumulatedValue]:
        return {t.value: t for stage in self.stages.stages for pass_ in stage.passes.values() for t in pass_.totals}

    @cached_property
    def _constants(self) -> Mapping[int, Any]:
        """Arrays that the step closes over, as NumPy arrays where possible."""
        return {v: unplaced(array) for v, array in self.stages.split.flat.constants}

    def accumulator(self, stage: int, total: int) -> Accumulator:
        return self._programs.accumulator(self._totals[total])

    def begin(self, stage: int, arguments: Values) -> Values:
        prologue = self.stages.stages[stage].prologue
        return self._programs.after(AccumulationLoop((), (), prologue), {**self._constants, **arguments}, ())

    def run(
        self, stage: int, kind: Kind, whole: Values, local: Values, index: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        pass_ = self.stages.stages[stage].passes[kind]
        wanted = tuple(AccumulatedValue(v, "last") for v in (*(t.value for t in pass_.totals), *pass_.writes))
        outputs = self._programs.loop_body(
            AccumulationLoop(pass_.ops, wanted, ()), {**self._constants, **whole}, local, index
        )
        return outputs[: len(pass_.totals)], outputs[len(pass_.totals) :]

    def update(self, number: int, arguments: Values, totals: Values, reads: Values) -> tuple[Any, ...]:
        update = self.stages.updates.programs[number]
        accumulated = [totals[t.value] for t in update.totals]
        inputs = {**self._constants, **arguments, **reads}
        values = self._programs.after(AccumulationLoop((), update.totals, update.ops), inputs, accumulated)
        return tuple(values[v] for v in update.writes)


def unplaced(array: Any) -> Any:
    """An array that a program on any submesh may close over: a NumPy array, or the array itself for extended dtypes."""
    extended = jnp.issubdtype(jax.typeof(array).dtype, jax.dtypes.extended)
    return array if extended else np.asarray(array)
