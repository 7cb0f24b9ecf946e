"""The intra-op pass: one layout for every tensor, chosen by integer linear programming.

    minimise  sum_c  weight_c (roofline_c[s] + partial sums_c[s] + light_c[s])                    -> _node
            + sum_e  weight_e reshard(layout the producer leaves[s], layout the consumer wants[t]) -> _Edges
    over one strategy s per group

A value that several groups read through edges gets a *copy*: a layout of its own between its binding and its readers,
so that a reshard which several readers want, or one reader several times, is paid once. The readers then reshard from
the copy where they want yet another layout. Copies are decisions like any other, so the optimizer weighs sharing
against not sharing.

Source: Zheng et al. (2022), "Alpa", section 4 (strategies, resharding matrices, one-hot linearisation); the linear
terms e[s,t] with marginals equal to both sides are the local polytope of Wainwright and Jordan (2008), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.compiler.precision import rounded, rounds
from autopar.cost_models.resharding import Resharding
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, Type
from autopar.ir.layout import Layout
from autopar.ir.problem import Edge, Node, Problem
from autopar.passes.op_groups.bindings import FREE, Binding, Grouping, OpGroup, Use, projection
from autopar.passes.op_groups.strategies import StrategySet, layouts_of, padding, share, shares


@dataclass(frozen=True, eq=False)
class Model:
    """The problem of one graph on one mesh, with what is needed to read an assignment.

    Attributes:
        problem: nodes are the groups, then the copies.
        grouping: what the nodes stand for.
        copies: binding value -> node of its copy.
    """

    problem: Problem
    grouping: Grouping
    copies: Mapping[int, int]
    copy_sets: Mapping[int, StrategySet]


@dataclass(frozen=True)
class _Side:
    """One end of an edge: classes of the node's strategies and their layouts; `index` identifies equal ones."""

    index: int
    classes: NDArray[np.int64]
    layouts: NDArray[np.int8]


Moved = tuple[Type, float, bool]
"""What is moved, how often per step, and whether behind computation."""


@dataclass
class _Builder:
    graph: Graph
    mesh: LogicalMesh
    resharding: Resharding
    behind: Resharding
    sides: dict[tuple[int, tuple[int, ...], bool], _Side] = field(default_factory=dict)
    tables: dict[tuple[int, int, Moved], NDArray[np.float64]] = field(default_factory=dict)
    costs: dict[object, NDArray[np.float64]] = field(default_factory=dict)
    sets: dict[tuple[int, ...], StrategySet] = field(default_factory=dict)

    def side(self, strategies: StrategySet, dims: tuple[int, ...], assigned: bool) -> _Side:
        key = (strategies.index, dims, assigned)
        found = self.sides.get(key)
        if found is None:
            found = self.sides[key] = _Side(len(self.sides), *projection(strategies, dims, assigned))
        return found

    def table(self, u: _Side, v: _Side, moved: Moved) -> NDArray[np.float64]:
        """Seconds per step between the classes of two ends, what uneven pieces move in excess included."""
        type_, weight, behind = moved
        resharding = self.behind if behind else self.resharding
        key = (u.index, v.index, moved)
        found = self.tables.get(key)
        if found is None:
            excess = padding(u.layouts, v.layouts, type_.shape, self.mesh.sizes)
            found = np.zeros(excess.shape)
            for ratio in np.unique(excess):
                prices = resharding.table(u.layouts, v.layouts, type_.nbytes * float(ratio))
                found = np.where(excess == ratio, prices * weight, found)
            self.tables[key] = found
        return found

    def layouts(self, shape: tuple[int, ...], first_index: int) -> StrategySet:
        found = self.sets.get(shape)
        if found is None:
            found = self.sets[shape] = layouts_of(shape, self.mesh, first_index + len(self.sets))
        return found


def build(graph: Graph, grouping: Grouping, mesh: LogicalMesh, resharding: Resharding | None = None) -> Model:
    """The problem whose solutions are the plans of `graph` on `mesh`."""
    b = _Builder(graph, mesh, resharding or Resharding(mesh), Resharding(mesh.behind_computation()))
    nodes = [_node(b, c) for c in grouping.groups]
    edges = _Edges(b, grouping)
    readers = _readers(graph, grouping, mesh.device.rounds_operands)
    copies: dict[int, int] = {}
    copy_sets: dict[int, StrategySet] = {}
    base = 1 + max((c.strategies.index for c in grouping.groups), default=0)
    for value, ends in readers.items():
        binding = grouping.bindings[value]
        if len(ends) == 1 and ends[0].weight <= grouping.groups[binding.group].weight:
            edges.add_home(binding, ends[0])
            continue
        strategies = b.layouts(graph.types[value].shape, base)
        copies[value], copy_sets[value] = len(nodes), strategies
        nodes.append(Node(f"copy of %{value}", np.zeros(len(strategies)), ("copy", strategies.index)))
        edges.add_copy(binding, copies[value], strategies, ends)
    return Model(Problem(tuple(nodes), edges.merged()), grouping, copies, copy_sets)


def _node(b: _Builder, c: OpGroup) -> Node:
    key = (c.strategies.index, c.weight, c.light)
    cost = b.costs.get(key)
    if cost is None:
        cost = c.strategies.cost.copy()
        each = shares(c.strategies.held, c.strategies.sizes, b.mesh.sizes) if c.light else np.ones((len(cost), 0))
        for dims, nbytes in c.light:
            cost += nbytes * share(each, dims) / b.mesh.device.memory_bandwidth
        cost = b.costs[key] = cost * c.weight
    return Node(c.name, cost, key)


@dataclass(frozen=True, slots=True)
class _End:
    """The reader's end of an edge.

    Nothing waits for a move `behind` computation; `narrow`: what is moved may be rounded before
    (`autopar.cost_models.compiler.precision`).
    """

    consumer: int
    dims: tuple[int, ...]
    assigned: bool
    weight: float
    behind: bool
    narrow: bool


def source_dims(binding: Binding, use: Use) -> tuple[int, ...]:
    """The consumer's factor for each dimension of the value behind a use (`Binding.value`)."""
    if binding.view is None:
        return use.dims
    dims = [-1] * len(binding.dims)
    for of_view, factor in zip(binding.view, use.dims, strict=True):
        if of_view != FREE:
            dims[of_view] = factor
    return tuple(dims)


def _readers(graph: Graph, grouping: Grouping, rounding: bool) -> Mapping[int, list[_End]]:
    """Distinct readers of every bound value, in program order; what a group reads from itself as it is, is none."""
    found: dict[int, dict[tuple[int, tuple[int, ...], bool], tuple[float, bool, bool]]] = {}
    for use in grouping.uses:
        binding = grouping.bindings.get(use.value)
        if binding is None:
            continue
        dims = source_dims(binding, use)
        if binding.group == use.consumer and not use.assigned and dims == binding.dims:
            continue
        ends = found.setdefault(binding.value, {})
        key = (use.consumer, dims, use.assigned)
        weight, behind, narrow = ends.get(key, (0.0, True, rounding))
        narrow = narrow and use.op >= 0 and rounds(graph.by_index[use.op], graph.types[use.value])
        ends[key] = (max(weight, use.weight), behind and grouping.slack.moves(use.value, use.op), narrow)
    return {value: [_End(*key, *rest) for key, rest in ends.items()] for value, ends in found.items()}


class _Edges:
    """Collects edges, merging those between the same nodes with the same projections."""

    def __init__(self, b: _Builder, grouping: Grouping) -> None:
        self._b = b
        self._grouping = grouping
        self._found: dict[tuple[int, int, int, int], list[Moved]] = {}
        self._sides: dict[int, _Side] = {}

    def add_home(self, binding: Binding, end: _End) -> None:
        source = self._grouping.groups[binding.group].strategies
        self._add(binding.group, self._b.side(source, binding.dims, False), end, binding.value)

    def add_copy(self, binding: Binding, copy: int, strategies: StrategySet, ends: list[_End]) -> None:
        identity = tuple(range(len(binding.dims)))
        # What lies outside loops is copied once, however often the loops inside read it.
        weight = min(end.weight for end in ends)
        weight = min(weight, self._grouping.groups[binding.group].weight) if weight else weight
        side = self._b.side(strategies, identity, False)
        source = self._grouping.groups[binding.group].strategies
        behind, narrow = all(end.behind for end in ends), all(end.narrow for end in ends)
        moved = self._moved(binding.value, weight, behind, narrow)
        self._record(binding.group, self._b.side(source, binding.dims, False), copy, side, moved)
        for end in ends:
            self._add(copy, side, end, binding.value)

    def _add(self, u: int, side: _Side, end: _End, value: int) -> None:
        reader = self._grouping.groups[end.consumer].strategies
        other = self._b.side(reader, end.dims, end.assigned)
        self._record(u, side, end.consumer, other, self._moved(value, end.weight, end.behind, end.narrow))

    def _moved(self, value: int, weight: float, behind: bool, narrow: bool) -> Moved:
        type_ = self._b.graph.types[value]
        return (rounded(type_) if narrow else type_, weight, behind)

    def _record(self, u: int, su: _Side, v: int, sv: _Side, moved: Moved) -> None:
        self._sides[su.index], self._sides[sv.index] = su, sv
        self._found.setdefault((u, v, su.index, sv.index), []).append(moved)

    def merged(self) -> tuple[Edge, ...]:
        kinds: dict[object, tuple[int, NDArray[np.float64]]] = {}
        out: list[Edge] = []
        for (u, v, iu, iv), parts in self._found.items():
            su, sv = self._sides[iu], self._sides[iv]
            key = (iu, iv, tuple(sorted(parts, key=str) if len(parts) > 1 else parts))
            if key not in kinds:
                kinds[key] = (len(kinds), np.sum([self._b.table(su, sv, part) for part in key[2]], axis=0))
            index, table = kinds[key]
            out.append(Edge(u, v, su.classes, sv.classes, table, (index,)))
        return tuple(out)


def layout_at(strategies: StrategySet, choice: int, dims: tuple[int, ...], assigned: bool) -> Layout:
    """The layout of a value whose dimensions are these factors, under one strategy."""
    factors = (strategies.assigned if assigned else strategies.held)[choice]
    position = {f: d for d, f in enumerate(dims) if f >= 0}
    return tuple(int(f) if f == -2 else position.get(int(f), -1) for f in factors)
