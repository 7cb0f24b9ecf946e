"""What a planned stage comes down to: all that a plan needs to know of it once its layouts are chosen.

    seconds, bytes            passes/stages/cost.py
    collectives               autopar/passes/intra_op/extract.py
    borders                   the layouts in which it hands values over and wants them      -> Border
    arguments                 where those of the step lie

Stages are planned in processes of their own (`autopar.passes.stages.plan_all`), from which graphs and problems cannot
be sent, an account can; and the graph that a stage was planned with may be that of another that is like it. `Recorded`
is a planned stage of which there is the account; its graph is made where it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autopar.hardware.cluster import LogicalMesh
from autopar.ir.collective import Collective
from autopar.ir.layout import PARTIAL, Layout, divides
from autopar.passes.solver.optimize import Solution
from autopar.passes.stages.cost import StageMemory, StagePrices, stage_memory, stage_prices
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.graph import StageGraph, stage_graph
from autopar.plans.plan import Stage, graph_hash
from autopar.rules import Rule, rules_of

if TYPE_CHECKING:
    from autopar.passes.stages.plan import StagePlan


@dataclass(frozen=True, slots=True)
class Border:
    """Layouts of what crosses the borders of a stage, as a stage on a submesh of the same shape may keep them.

    Attributes:
        sizes: of the submesh's axes.
        given: value that it hands over -> its layout.
        wanted: value that it receives -> its layout.
    """

    sizes: tuple[int, ...]
    given: Mapping[int, Layout]
    wanted: Mapping[int, Layout]


@dataclass(frozen=True, eq=False)
class Account:
    """What a plan needs to know of a planned stage.

    Attributes:
        prices, memory: its seconds and its bytes.
        collectives: of its programs; none over axes of one device.
        graph_hash: of its graph.
        arguments: argument of the step -> where it lies; None for scalars.
        border: layouts of what it hands over and receives.
    """

    prices: StagePrices
    memory: StageMemory
    collectives: tuple[Collective, ...]
    graph_hash: str
    arguments: Mapping[int, Layout | None]
    border: Border


def account(plan: StagePlan) -> Account:
    """The account of a planned stage."""
    return Account(
        stage_prices(plan),
        stage_memory(plan),
        tuple(c for c in plan.collectives if c.sent(plan.mesh.shape)),
        graph_hash(plan.graph.graph),
        plan.arguments(plan.graph),
        plan.border,
    )


def border(plan: StagePlan) -> Border:
    """Layouts of what a planned stage hands over and receives: those that cut evenly, and whole values."""
    graph, types = plan.graph.graph, plan.graph.graph.types
    given: dict[int, Layout] = {}
    for out, value in plan.graph.handed.items():
        atom = graph.outputs[out]
        layout = plan.layouts.uses.get(f"out{out}", plan.layout(atom)) if isinstance(atom, int) else None
        if isinstance(atom, int) and layout is not None and _even(layout, types[atom].shape, plan.mesh):
            given.setdefault(value, layout)
    wanted = {v: (atom, plan.layout(atom)) for v, atom in plan.graph.received.items()}
    return Border(
        plan.mesh.sizes,
        given,
        {v: at for v, (atom, at) in wanted.items() if at is not None and _even(at, types[atom].shape, plan.mesh)},
    )


def _even(layout: Layout, shape: Sequence[int], mesh: LogicalMesh) -> bool:
    return PARTIAL not in layout and divides(layout, shape, mesh.sizes)


class Placed:
    """A stage whose values have layouts."""

    layouts: Stage

    def layout(self, value: int) -> Layout | None:
        """Where a value of the graph lives; None for scalars and what is made where it is read."""
        return self.layouts.values.get(value)

    def arguments(self, graph: StageGraph) -> Mapping[int, Layout | None]:
        """Arguments of the step that the stage reads, and how they lie there."""
        return {v: self.layout(inner) for v, inner in graph.arguments.items()}


@dataclass(frozen=True, eq=False)
class Kept(Placed):
    """The layouts of a stage as a plan holds them: what its programs are made from."""

    graph: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]
    layouts: Stage


@dataclass(frozen=True, eq=False)
class Recorded(Placed):
    """A planned stage as its account tells it.

    Attributes:
        stages, avals: the step in stages, and shape and dtype of every argument.
        number: of the stage.
        mesh: its submesh.
        solution, layouts, account: as of a `StagePlan`.
        registered: rules that were registered, by operation.
    """

    stages: Stages
    avals: tuple[Any, ...]
    number: int
    mesh: LogicalMesh
    solution: Solution
    layouts: Stage
    account: Account
    registered: Mapping[str, str] | None

    @property
    def border(self) -> Border:
        """Layouts of what crosses its borders."""
        return self.account.border

    @cached_property
    def graph(self) -> StageGraph:
        """The stage as a graph."""
        return stage_graph(self.stages, self.number, self.avals)

    @cached_property
    def rules(self) -> Mapping[int, Rule]:
        """Rules of the graph's operations."""
        return rules_of(self.graph.graph, self.registered)
