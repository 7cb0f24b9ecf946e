"""Layouts inside all stages of a step: every stage planned on its submesh, with an eye on its neighbours.

    borders    what a forward pass hands over keeps its layout where both submeshes have one shape, though what reads it
               may convert it (autopar/passes/op_groups/merge.py); what a backward pass hands over is delivered as its
               reader wants it, for stages are planned in order                             -> _Planner.wishes
    alike      stages that are one program are traced once (passes/stages/isomorphism.py), and those with equal graphs,
               meshes and pins planned once                                                    -> _Planner.plan
    runs       stages of a large step are planned in two runs, in two processes where there are two: those that hand
               nothing to each other on submeshes of one shape apart, if that makes runs of about equal length; else
               the first half of all and the second, which does not know what the first hands over, and whose stages
               are planned again as far as that turns out to lie otherwise                        -> runs, _joined

Runs depend on the stages and their submeshes alone, so that the plan is the same in any number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeAlias, TypeVar

import networkx as nx

from autopar import parallel_map
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.passes.intra_op.plan import Options
from autopar.passes.microbatch.loop import Programs
from autopar.passes.op_groups import constraints
from autopar.passes.solver.optimize import Solution
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.graph import StageGraph, stage_graph
from autopar.passes.stages.isomorphism import Likeness, likeness, renamed
from autopar.passes.stages.plan import Limit, PenalisedPlans, StagePlan, plan_stage, planned
from autopar.passes.stages.summary import Account, Border, Kept, Recorded
from autopar.plans.plan import Stage, graph_hash
from autopar.rules import Reader, Rule

#: Operations of a step from which its stages are planned in two runs.
LARGE = 5_000
#: Share of all operations that the longer of two runs may have, if neither has to wait for the other.
LONGER = 0.85
#: What planning a stage takes that is about like one before, which has as many operations and a submesh of that shape.
AGAIN = 0.2

Key: TypeAlias = tuple[str, LogicalMesh, Hashable]
"""What plans of a stage depend on: a hash of its graph, its submesh, pins of arguments and of results."""


Accounted: TypeAlias = StagePlan | Recorded
"""A stage that was planned, here or in another process."""
LaidOut: TypeAlias = Accounted | Kept
"""A stage with its layouts."""
S = TypeVar("S", bound=LaidOut, covariant=True)


@dataclass(frozen=True, eq=False)
class StagePlans(Generic[S]):
    """The plans of all stages of a step; `distinct` of them were solved, the others are like one of these."""

    stages: Stages
    plans: tuple[S, ...]
    distinct: int


@dataclass(frozen=True, eq=False)
class _Made:
    """A planned stage and what its plan depends on."""

    plan: Accounted
    key: Key


@dataclass(frozen=True, eq=False)
class _Record:
    """What another process sends of a planned stage."""

    solution: Solution
    layouts: Stage
    account: Account
    key: Key


def plan_stages(
    stages: Stages,
    avals: Sequence[Any],
    meshes: Sequence[LogicalMesh],
    options: Options | None = None,
    limits: Sequence[Limit] = (),
) -> StagePlans[Accounted]:
    """Plan every stage.

    Args:
        stages: the step in stages.
        avals: shape and dtype of every argument of the step.
        meshes: the submesh of every stage.
        options: of planning; `pins` are those of the step's arguments, by path, and hold in every stage that has them.
            Recomputation and donation are not among them.
        limits: what every stage may hold. None at all: the budget of the options, for one microbatch at a time.

    Returns:
        The plans. Those that another process has made are `Recorded`, without the problem that they solve.

    Raises:
        PinError: a pin that fits no argument of the step, or not the mesh of its stage.
        MemoryBudgetError: no plan of a stage fits into the budget.
    """
    planner = _Planner(stages, tuple(avals), tuple(meshes), options or Options(), tuple(limits))
    parts = runs(stages, meshes)
    if parallel_map.apart(len(parts)):
        records = parallel_map.results([partial(_records, planner, part) for part in parts])
        found = {n: planner.recorded(n, one) for part in records for n, one in part.items()}
    else:
        found = {n: made for part in parts for n, made in planner.run(part).items()}
    return _joined(planner, parts, found)


def runs(stages: Stages, meshes: Sequence[LogicalMesh]) -> tuple[tuple[int, ...], ...]:
    """Stages to be planned side by side: two runs that take about as long, or one of few operations."""
    operations, everything = _operations(stages), range(len(meshes))
    if len(meshes) < 2 or sum(operations) < LARGE:
        return (tuple(everything),)
    weights = _weights(operations, meshes)
    first, second = set[int](), set[int]()
    for part in sorted(_bound(stages, meshes), key=lambda part: (-sum(weights[n] for n in part), part)):
        min(first, second, key=lambda run: sum(weights[n] for n in run)).update(part)
    if max(sum(weights[n] for n in run) for run in (first, second)) <= LONGER * sum(weights):
        return tuple(sorted(first)), tuple(sorted(second))
    done = list(itertools.accumulate(weights))
    cut = min(everything[1:], key=lambda k: (max(done[k - 1], done[-1] - done[k - 1]), k))
    return tuple(everything[:cut]), tuple(everything[cut:])


def _operations(stages: Stages) -> list[int]:
    """Operations of every stage."""
    updates = stages.updates.programs
    return [
        sum(len(one.ops) for one in stage.passes.values()) + sum(len(u.ops) for u in updates if u.stage == s)
        for s, stage in enumerate(stages.stages)
    ]


def _weights(operations: Sequence[int], meshes: Sequence[LogicalMesh]) -> list[float]:
    """About what planning every stage takes, in operations."""
    alike = set[tuple[int, tuple[int, ...]]]()
    found: list[float] = []
    for count, mesh in zip(operations, meshes, strict=True):
        found.append(count * (AGAIN if (count, mesh.sizes) in alike else 1.0))
        alike.add((count, mesh.sizes))
    return found


def _bound(stages: Stages, meshes: Sequence[LogicalMesh]) -> list[list[int]]:
    """Stages between which layouts are kept, directly or by way of others, together."""
    graph = nx.Graph()
    graph.add_nodes_from(range(len(meshes)))
    graph.add_edges_from(h[1:] for h in stages.hands if meshes[h.source].sizes == meshes[h.target].sizes)
    return [sorted(part) for part in nx.connected_components(graph)]


def _records(planner: _Planner, part: Sequence[int]) -> dict[int, _Record]:
    found = planner.run(part)
    return {n: _Record(m.plan.solution, m.plan.layouts, m.plan.account, m.key) for n, m in found.items()}


def _joined(planner: _Planner, parts: Sequence[Sequence[int]], found: dict[int, _Made]) -> StagePlans[Accounted]:
    """All stages, planned again where a stage of another run, or one planned again, hands over something else."""
    borders = {n: made.plan.border for n, made in found.items()}
    unseen = {n for part in parts[:-1] for n in part}
    for number in (n for part in parts[1:] for n in part):
        arguments, results = planner.wishes(number, {n: borders[n] for n in sorted(unseen)})
        at = borders[number]
        if any(at.wanted.get(v) != one for v, one in arguments.items()) or any(
            at.given.get(v) != one for v, one in results.items()
        ):
            found[number] = planner.plan(number, borders)
            borders[number] = found[number].plan.border
            unseen.add(number)
    made = [found[n] for n in range(len(found))]
    return StagePlans(planner.stages, tuple(one.plan for one in made), len({one.key for one in made}))


@dataclass(frozen=True, eq=False)
class _Program:
    """The graph of the first of stages that are alike, its rules, and a hash that it shares with them."""

    likeness: Likeness
    graph: StageGraph
    rules: Mapping[int, Rule]
    hash: str


@dataclass(eq=False)
class _Planner:
    """Plans stages; alike ones are solved once."""

    stages: Stages
    avals: tuple[Any, ...]
    meshes: tuple[LogicalMesh, ...]
    options: Options
    limits: tuple[Limit, ...] = ()
    programs_of: dict[Hashable, _Program] = field(default_factory=dict)
    known: dict[Key, StagePlan] = field(default_factory=dict)
    charges: dict[Key, PenalisedPlans] = field(default_factory=dict)

    @cached_property
    def programs(self) -> Programs:
        return Programs(self.stages.split)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.options.rules)

    def run(self, part: Sequence[int]) -> dict[int, _Made]:
        """The plans of stages in order, each knowing those of the run before it."""
        borders: dict[int, Border] = {}
        found: dict[int, _Made] = {}
        for number in part:
            found[number] = self.plan(number, borders)
            borders[number] = found[number].plan.border
        return found

    def recorded(self, number: int, one: _Record) -> _Made:
        """A stage of which no more is known than its plan."""
        mesh, rules = self.meshes[number], self.options.rules
        plan = Recorded(self.stages, self.avals, number, mesh, one.solution, one.layouts, one.account, rules)
        return _Made(plan, one.key)

    def plan(self, number: int, borders: Mapping[int, Border]) -> _Made:
        """The plan of a stage next to these; that of one that is like an earlier stage has no graph yet."""
        here = likeness(self.stages, number, self.avals, self.programs)
        if here.key not in self.programs_of:
            graph = stage_graph(self.stages, number, self.avals, self.programs)
            self.programs_of[here.key] = _Program(here, graph, self.reader.of(graph.graph), _hash(graph.graph))
        program = self.programs_of[here.key]
        graph, rules, mesh = renamed(program.graph, program.likeness, here), program.rules, self.meshes[number]
        arguments, results = self._pinned(graph, borders)
        pinned = tuple(sorted(arguments.items())), tuple(sorted(results.items()))
        key = (program.hash, mesh, pinned)
        if self.limits:
            if key not in self.charges:
                self.charges[key] = PenalisedPlans(graph, mesh, rules, self.options, arguments, results, rough=True)
            made = self.charges[key].within(graph, rules, self.limits[number])
        elif key not in self.known:
            made = self.known[key] = plan_stage(graph, mesh, rules, self.options, arguments, results)
        else:
            same = self.known[key]
            made = planned(graph, mesh, rules, same.model, same.liveness, same.solution)
        if program.likeness.stage == number:
            return _Made(made, key)
        return self.recorded(number, _Record(made.solution, made.layouts, made.account, key))

    def wishes(self, number: int, borders: Mapping[int, Border]) -> tuple[dict[int, Layout], dict[int, Layout]]:
        """Layouts of what a stage receives and hands over, fixed by earlier stages among these on equal submeshes."""
        arguments: dict[int, Layout] = {}
        results: dict[int, Layout] = {}
        for hand, values in self.stages.hands.items():
            before = borders.get(min(hand.source, hand.target))
            if max(hand.source, hand.target) != number or before is None or before.sizes != self.meshes[number].sizes:
                continue
            fixed, into = (before.given, arguments) if hand.target == number else (before.wanted, results)
            into.update((v, fixed[v]) for v in values if v in fixed)
        return arguments, results

    def _pinned(self, graph: StageGraph, borders: Mapping[int, Border]) -> tuple[dict[int, Layout], dict[int, Layout]]:
        """Layouts that the user or an earlier stage has fixed, by position of arguments and of results."""
        mesh, split = self.meshes[graph.stage], self.stages.split
        position = {v: i for i, v in enumerate(graph.graph.inputs)}
        out = {v: i for i, v in graph.handed.items()}
        whole = constraints.resolve(self.options.pins, split.graph, mesh).arguments
        held = {v: layout for i, layout in whole.items() if (v := split.graph.inputs[i]) in graph.arguments}
        arguments = {position[graph.arguments[v]]: layout for v, layout in held.items()}
        whole_batch = [v for v in graph.arguments if v in split.batch]
        arguments.update((position[graph.arguments[v]], (-1,) * len(mesh.sizes)) for v in whole_batch)
        received, handed = self.wishes(graph.stage, borders)
        arguments.update((position[graph.received[v]], layout) for v, layout in received.items())
        return arguments, {out[v]: layout for v, layout in handed.items()}


def _hash(graph: Graph) -> str:
    """A hash of the graph that does not depend on the names of its arguments."""
    paths = tuple(str(i) for i in range(len(graph.inputs)))
    return graph_hash(replace(graph, input_paths=paths))
