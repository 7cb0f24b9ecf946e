"""What the programs of a step in stages are made of: functions on arrays, and where these lie.

A step in stages has numbers for what its programs read and leave to each other (`autopar.passes.stages.divide`).
`Places` say for each number where the array lies, `Bodies` what a program computes. There are two sources of both:
`plain`, layouts by a function, and `planned`, layouts by the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from jax.sharding import NamedSharding

from autopar.passes.microbatch.loop import Accumulator
from autopar.passes.stages.divide import Stages
from autopar.schedules.instructions import Kind

#: Arrays by number.
Values = Mapping[int, Any]


class Places(Protocol):
    """Where arrays lie, by stage and number."""

    @property
    def stages(self) -> Stages:
        """The step, its lists of values as the programs are called with them."""
        ...

    def everywhere(self, stage: int) -> NamedSharding:
        """A copy on every device of a stage."""
        ...

    def value(self, stage: int, value: int) -> NamedSharding:
        """A value of the microbatch that a pass of the stage makes or reads."""
        ...

    def whole(self, stage: int, value: int) -> NamedSharding:
        """A whole value that passes read, an argument or of the prologue."""
        ...

    def argument(self, stage: int, value: int) -> NamedSharding:
        """An argument of the step; the batch is on every device, to be cut into microbatches there."""
        ...

    def blocks(self, stage: int, value: int) -> NamedSharding:
        """All microbatches of an argument, stacked in front."""
        ...

    def total(self, stage: int, value: int) -> NamedSharding:
        """The sum of a total, or one of its parts, in the stage whose passes make it."""
        ...

    def ended(self, number: int, value: int) -> NamedSharding:
        """Sum or parts of a total as an update reads them."""
        ...

    def read(self, number: int, value: int) -> NamedSharding:
        """A value of another update as an update reads it."""
        ...

    def result(self, number: int, value: int) -> NamedSharding:
        """A value that an update gives."""
        ...


class Bodies(Protocol):
    """What programs compute; all functions are traced by JAX."""

    def accumulator(self, stage: int, total: int) -> Accumulator:
        """How the parts of a total of a stage come together."""
        ...

    def begin(self, stage: int, arguments: Values) -> Values:
        """Whole values that passes read, of the prologue."""
        ...

    def run(
        self, stage: int, kind: Kind, whole: Values, local: Values, index: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """A pass on blocks and values of one microbatch: its part of every total, what it writes."""
        ...

    def update(self, number: int, arguments: Values, totals: Values, reads: Values) -> tuple[Any, ...]:
        """What an update writes."""
        ...
