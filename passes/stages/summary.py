"""Summary of a planned stage: its part of the plan of the step.

    seconds, bytes            passes/stages/cost.py, passes/stages/memory.py
    collectives               autopar/passes/intra_op/extract.py
    boundary                  layouts of values that it sends and receives                  -> BoundaryLayouts
    arguments                 layouts of arguments of the step

The graph that a stage was planned with may be that of an isomorphic stage. A planned stage has one of these forms:

    StagePlan         with graph, problem and solution          (autopar/passes/stages/plan.py)
    SummarizedStage   with its summary; isomorphic to an earlier stage, its own graph is traced when it is needed
    SavedStage        with layouts from a plan, for code generation alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from autopar.hardware.cluster import LogicalMesh
from autopar.ir.collective import Collective
from autopar.ir.graph import graph_hash
from autopar.ir.layout import PARTIAL, Layout, ProgramLayouts, divides
from autopar.passes.intra_op.time_spent import Spent, time_spent
from autopar.passes.solver.optimize import Solution
from autopar.passes.stages.cost import SolvedStage, StageTimes, stage_times
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.graph import StageGraph, stage_graph
from autopar.passes.stages.memory import StageMemory
from autopar.rules import Rule, rules_of


@dataclass(frozen=True, slots=True)
class BoundaryLayouts:
    """Layouts of values that cross the boundary of a stage; a stage on a submesh of the same shape may keep them.

    Attributes:
        sizes: of the submesh's axes.
        sent: value that it sends -> its layout.
        received: value that it receives -> its layout.
    """

    sizes: tuple[int, ...]
    sent: Mapping[int, Layout]
    received: Mapping[int, Layout]


@dataclass(frozen=True, eq=False)
class StageSummary:
    """Summary of a planned stage.

    Attributes:
        times, memory: its seconds and its bytes.
        collectives: of its programs; none over axes of one device.
        graph_hash: of its graph.
        arguments: argument of the step -> its layout; None for scalars.
        boundary: layouts of values that it sends and receives.
        host_bytes: bytes per device of its state in host memory.
        spent: seconds per step by source line, in all its passes and updates.
    """

    times: StageTimes
    memory: StageMemory
    collectives: tuple[Collective, ...]
    graph_hash: str
    arguments: Mapping[int, Layout | None]
    boundary: BoundaryLayouts
    host_bytes: float
    spent: tuple[Spent, ...]


class _Bounded(SolvedStage, Protocol):
    """A solved stage with the layouts of what crosses its boundary, and of its arguments."""

    @cached_property
    def boundary(self) -> BoundaryLayouts: ...
    def arguments(self, graph: StageGraph) -> Mapping[int, Layout | None]: ...


def summarize(plan: _Bounded) -> StageSummary:
    """The summary of a planned stage."""
    graph, times, chosen = plan.graph.graph, stage_times(plan), plan.solution.assignment
    return StageSummary(
        times,
        plan.liveness.memory(chosen),
        tuple(c for c in plan.collectives if c.bytes_sent(plan.mesh.shape)),
        graph_hash(graph),
        plan.arguments(plan.graph),
        plan.boundary,
        plan.liveness.host_bytes(chosen),
        time_spent(graph, plan.model, chosen, plan.collectives, plan.mesh, times.host),
    )


def boundary_layouts(plan: SolvedStage) -> BoundaryLayouts:
    """Layouts of values that a planned stage sends and receives, if they shard evenly and are no partial sums."""
    graph, types = plan.graph.graph, plan.graph.graph.types
    sent: dict[int, Layout] = {}
    for out, value in plan.graph.sent.items():
        atom = graph.outputs[out]
        layout = plan.layouts.uses.get(f"out{out}", plan.layout(atom)) if isinstance(atom, int) else None
        if isinstance(atom, int) and layout is not None and _even(layout, types[atom].shape, plan.mesh):
            sent.setdefault(value, layout)
    received: dict[int, Layout] = {}
    for value, atom in plan.graph.received.items():
        layout = plan.layout(atom)
        if layout is not None and _even(layout, types[atom].shape, plan.mesh):
            received[value] = layout
    return BoundaryLayouts(plan.mesh.sizes, sent, received)


def _even(layout: Layout, shape: Sequence[int], mesh: LogicalMesh) -> bool:
    return PARTIAL not in layout and divides(layout, shape, mesh.sizes)


class StageWithLayouts:
    """A stage whose values have layouts."""

    layouts: ProgramLayouts

    def layout(self, value: int) -> Layout | None:
        """The layout of a value of the graph; None for scalars and values that are recomputed at every reader."""
        return self.layouts.values.get(value)

    def arguments(self, graph: StageGraph) -> Mapping[int, Layout | None]:
        """Arguments of the step that the stage reads -> their layouts."""
        return {v: self.layout(value) for v, value in graph.arguments.items()}


@dataclass(frozen=True, eq=False)
class SavedStage(StageWithLayouts):
    """A stage with the layouts of a saved plan, from which its programs are generated."""

    graph: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]
    layouts: ProgramLayouts


@dataclass(frozen=True, eq=False)
class SummarizedStage(StageWithLayouts):
    """A planned stage without its problem: its solution, layouts and summary.

    Attributes:
        stages, avals: the step in stages, and shape and dtype of every argument.
        number: of the stage.
        leader: number of the first stage that it is isomorphic to.
        mesh: its submesh.
        solution, layouts, summary: as of a `StagePlan`.
        registered: rules that were registered, by operation.
    """

    stages: Stages
    avals: tuple[Any, ...]
    number: int
    leader: int
    mesh: LogicalMesh
    solution: Solution
    layouts: ProgramLayouts
    summary: StageSummary
    registered: Mapping[str, str] | None

    @property
    def boundary(self) -> BoundaryLayouts:
        """Layouts of values that cross its boundary."""
        return self.summary.boundary

    @cached_property
    def graph(self) -> StageGraph:
        """The stage as a graph."""
        return stage_graph(self.stages, self.number, self.avals)

    @cached_property
    def rules(self) -> Mapping[int, Rule]:
        """Rules of the graph's operations."""
        return rules_of(self.graph.graph, self.registered)
