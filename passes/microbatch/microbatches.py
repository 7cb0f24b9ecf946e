"""A step as programs around loops over microbatches: what the analysis yields.

prologue    once, on whole values
loops       one or two, each with the operations after it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.passes.microbatch.programs import AccumulatedValue, AccumulationLoop, PlacedOp
from autopar.passes.microbatch.regions import FlattenedOps, Reason
from autopar.passes.microbatch.states import Split, State


@dataclass(frozen=True, slots=True, eq=False)
class Microbatches:
    """A step as programs around loops over microbatches.

    Attributes:
        graph, flat: the step, and its operations with rematerialised bodies inlined.
        count: number of microbatches.
        batch: argument values that are cut, and how.
        states: state of every value inside the loops.
        prologue: operations before the loops, on whole values.
        loops: the loops in order, usually one.
        loop_share: share of the FLOPs (of products, in loops times trip counts) that runs in loops, 0 to 1.
        repeated_share: FLOPs of the first loop that the second repeats, as a share of the FLOPs in loops.
        reasons: why the other FLOPs are outside of the loops, the most FLOPs first.
    """

    graph: Graph
    flat: FlattenedOps
    count: int
    batch: Mapping[int, Split]
    states: Mapping[int, State]
    prologue: tuple[PlacedOp, ...]
    loops: tuple[AccumulationLoop, ...]
    loop_share: float
    repeated_share: float
    reasons: tuple[Reason, ...]

    @property
    def body(self) -> tuple[PlacedOp, ...]:
        """Operations of the last loop."""
        return self.loops[-1].body

    @property
    def epilogue(self) -> tuple[PlacedOp, ...]:
        """Operations after the last loop."""
        return self.loops[-1].after

    @property
    def totals(self) -> tuple[AccumulatedValue, ...]:
        """Values of the last loop that are read outside of it."""
        return self.loops[-1].totals
