"""The interface between code generation and runtime: shardings and functions of the programs of a step in stages.

A step in stages numbers the arrays that its programs pass to each other (`autopar.passes.stages.divide`).
`StageShardings` gives the sharding of each number, `ProgramBodies` the function of each program. Two classes implement
both: `UnplannedPrograms` with layouts by a function, `PlannedPrograms` with layouts of the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from jax.sharding import NamedSharding

from autopar.ir.graph import Graph
from autopar.passes.microbatch.accumulators import Accumulator
from autopar.passes.stages.divide import Stages
from autopar.schedules.instructions import Kind

#: Arrays by number.
Values = Mapping[int, Any]


class StageShardings(Protocol):
    """The shardings of arrays, by stage and number."""

    @property
    def stages(self) -> Stages:
        """The step, with the lists of values that its programs are called with."""
        ...

    def replicated(self, stage: int) -> NamedSharding:
        """A copy on every device of a stage."""
        ...

    def value(self, stage: int, value: int) -> NamedSharding:
        """A value of one microbatch that a pass of the stage makes or reads."""
        ...

    def whole(self, stage: int, value: int) -> NamedSharding:
        """A value that is the same for every microbatch and that passes read: an argument, or one of the prologue."""
        ...

    def argument(self, stage: int, value: int) -> NamedSharding:
        """An argument of the step; the batch is replicated, and each device takes its microbatches from it."""
        ...

    def blocks(self, stage: int, value: int) -> NamedSharding:
        """All microbatches of an argument, stacked along a leading dimension."""
        ...

    def total(self, stage: int, value: int) -> NamedSharding:
        """The accumulator of a total, in the stage whose passes make it."""
        ...

    def update_total(self, number: int, value: int) -> NamedSharding:
        """The accumulator of a total, as update `number` reads it."""
        ...

    def update_read(self, number: int, value: int) -> NamedSharding:
        """A value of another update, as update `number` reads it."""
        ...

    def update_result(self, number: int, value: int) -> NamedSharding:
        """A value that update `number` writes."""
        ...


class ProgramBodies(Protocol):
    """The functions of programs; all are traced by JAX."""

    def graph(self, stage: int) -> Graph:
        """The graph whose operations the tags in a stage's programs name."""
        ...

    def accumulator(self, stage: int, total: int) -> Accumulator:
        """How the parts of a total are accumulated over microbatches."""
        ...

    def begin(self, stage: int, arguments: Values) -> Values:
        """The values of the prologue that passes read."""
        ...

    def run(
        self, stage: int, kind: Kind, whole: Values, local: Values, index: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """A pass on blocks and values of one microbatch: its part of every total, and the values that it writes."""
        ...

    def update(self, number: int, arguments: Values, totals: Values, reads: Values) -> tuple[Any, ...]:
        """The values that an update writes."""
        ...
