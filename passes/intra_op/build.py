"""The intra-op problem: one strategy per op group, and with it a layout for every tensor.

    minimise  sum_c  weight_c (roofline_c[s_c] + partial sums_c[s_c] + light_c[s_c])              -> _node
            + sum_e  weight_e reshard(layout after the producer[s_u], layout of the consumer[s_v]) -> _Edges
    over one strategy s_c per group c

Weights are executions per step, all other terms are in seconds. A value that several groups read through edges gets a
*copy*, a node whose strategies are the layouts of that value. It is between the binding of the value and its readers: a
reshard that several readers need, or one reader in several iterations, then costs once. Readers that need another
layout reshard from the copy. The layout of a copy is a decision like any other, so the optimizer decides whether a
reshard is shared.

Source: Zheng et al. (2022), "Alpa", section 4 (strategies, resharding matrices, one-hot linearisation). The linear
terms e[s,t] with marginals equal to both sides are the local polytope of Wainwright and Jordan (2008), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.precision import rounded, rounds_read
from autopar.cost_models.resharding import Resharding, resharding_on
from autopar.cost_models.sharding.groups import Binding, Grouping, Model, OpGroup, projection, source_dims
from autopar.cost_models.sharding.strategies import StrategySet, padding, share, shares
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, Op, Type
from autopar.ir.layout import Layout
from autopar.ir.problem import Edge, Node, Problem
from autopar.passes.op_groups.strategies import layouts_of


@dataclass(frozen=True)
class _Side:
    """One end of an edge.

    Attributes:
        index: identity; equal ends share it.
        classes: class of each strategy of the node, shape (n,).
        layouts: layout of each class, shape (classes, axes).
    """

    index: int
    classes: NDArray[np.int64]
    layouts: NDArray[np.int8]


Moved = tuple[Type, float, bool]
"""Type of the value moved, moves per step, and whether moves overlap with computation."""


@dataclass
class _Builder:
    """Caches of one `build` call; `behind` has the reshard costs of collectives that overlap with computation."""

    graph: Graph
    mesh: LogicalMesh
    resharding: Resharding
    behind: Resharding
    sides: dict[tuple[int, tuple[int, ...], bool], _Side] = field(default_factory=dict)
    tables: dict[tuple[int, int, Moved], NDArray[np.float64]] = field(default_factory=dict)
    costs: dict[object, NDArray[np.float64]] = field(default_factory=dict)
    sets: dict[tuple[int, ...], StrategySet] = field(default_factory=dict)

    def side(self, strategies: StrategySet, dims: tuple[int, ...], assigned: bool) -> _Side:
        """The end of an edge at a group, for a value whose dimensions are these factors. See `projection`."""
        key = (strategies.index, dims, assigned)
        side = self.sides.get(key)
        if side is None:
            side = self.sides[key] = _Side(len(self.sides), *projection(strategies, dims, assigned))
        return side

    def table(self, u: _Side, v: _Side, moved: Moved) -> NDArray[np.float64]:
        """Seconds per step to reshard, shape (classes of u, classes of v); padding of uneven pieces counts."""
        type_, weight, behind = moved
        resharding = self.behind if behind else self.resharding
        key = (u.index, v.index, moved)
        table = self.tables.get(key)
        if table is None:
            excess = padding(u.layouts, v.layouts, type_.shape, self.mesh.sizes)
            first = excess.flat[0]
            table = resharding.table(u.layouts, v.layouts, type_.nbytes * float(first)) * weight
            for ratio in np.unique(excess[excess != first]):
                prices = resharding.table(u.layouts, v.layouts, type_.nbytes * float(ratio))
                table = np.where(excess == ratio, prices * weight, table)
            self.tables[key] = table
        return table

    def layouts(self, shape: tuple[int, ...], first_index: int) -> StrategySet:
        """The layouts of a copy of this shape; indices of these sets start at `first_index`."""
        layout_set = self.sets.get(shape)
        if layout_set is None:
            layout_set = self.sets[shape] = layouts_of(shape, self.mesh, first_index + len(self.sets))
        return layout_set


def build(graph: Graph, grouping: Grouping, mesh: LogicalMesh, resharding: Resharding | None = None) -> Model:
    """The problem whose solutions are the plans of `graph` on `mesh`."""
    b = _Builder(graph, mesh, resharding or resharding_on(mesh), resharding_on(mesh.with_overlap()))
    nodes = [_node(b, c, is_free=c.op in grouping.free) for c in grouping.groups]
    edges = _Edges(b, grouping)
    readers = _readers(graph, grouping, mesh.device.rounds_operands)
    copies: dict[int, int] = {}
    copy_sets: dict[int, StrategySet] = {}
    # indices of strategy sets from `base` on are those of copies
    base = 1 + max((c.strategies.index for c in grouping.groups), default=0)
    for value, ends in readers.items():
        binding = grouping.bindings[value]
        # a single reader that runs no more often than the producer needs no copy
        if len(ends) == 1 and ends[0].weight <= grouping.executions(binding):
            edges.add_binding(binding, ends[0])
            continue
        strategies = b.layouts(graph.types[value].shape, base)
        copies[value], copy_sets[value] = len(nodes), strategies
        nodes.append(Node(f"copy of %{value}", np.zeros(len(strategies)), ("copy", strategies.index)))
        edges.add_copy(binding, copies[value], strategies, ends)
    return Model(Problem(tuple(nodes), edges.merged()), grouping, copies, copy_sets)


def _node(b: _Builder, c: OpGroup, *, is_free: bool = False) -> Node:
    """The node of a group: seconds per step of its operation and of the HBM traffic of light operations.

    `is_free`: the operation itself costs nothing.
    """
    key = (c.strategies.index, c.weight, c.light, is_free)
    cost = b.costs.get(key)
    if cost is None:
        cost = np.where(np.isfinite(c.strategies.cost), 0.0, np.inf) if is_free else c.strategies.cost.copy()
        each = shares(c.strategies.result, c.strategies.sizes, b.mesh.sizes) if c.light else np.ones((len(cost), 0))
        for dims, nbytes in c.light:
            cost += nbytes * share(each, dims) / b.mesh.device.memory_bandwidth
        cost = b.costs[key] = cost * c.weight
    return Node(c.name, cost, key)


@dataclass(frozen=True, slots=True)
class _End:
    """The reader's end of an edge.

    Attributes:
        consumer: the group that reads.
        dims: the consumer's factor for each dimension of the value.
        assigned: as in `Use`.
        weight: reads per step.
        behind: the reshard can overlap with computation.
        narrow: the value may be rounded before the reshard (`autopar.cost_models.precision`).
    """

    consumer: int
    dims: tuple[int, ...]
    assigned: bool
    weight: float
    behind: bool
    narrow: bool


def _readers(graph: Graph, grouping: Grouping, rounding: bool) -> Mapping[int, list[_End]]:
    """Distinct readers of every bound value, in program order.

    A group that reads its own value in the layout that it decides is no reader. Several uses by one reader count as
    one: it reads as often as the most frequent of them, and overlaps or rounds only if all of them do.
    """
    readers: dict[int, dict[tuple[int, tuple[int, ...], bool], tuple[float, bool, bool]]] = {}
    for use in grouping.uses:
        binding = grouping.bindings.get(use.value)
        if binding is None:
            continue
        dims = source_dims(binding, use)
        if binding.group == use.consumer and not use.assigned and dims == binding.dims:
            continue
        ends = readers.setdefault(binding.value, {})
        key = (use.consumer, dims, use.assigned)
        weight, behind, narrow = ends.get(key, (0.0, True, rounding))
        narrow = narrow and use.op >= 0 and _is_rounded(graph, graph.by_index[use.op], use.site)
        ends[key] = (max(weight, use.weight), behind and grouping.overlap.moves(use.value, use.op), narrow)
    return {value: [_End(*key, *rest) for key, rest in ends.items()] for value, ends in readers.items()}


def _is_rounded(graph: Graph, op: Op, site: str) -> bool:
    """Whether what an operation reads at a site is rounded before products read it; not what its body returns."""
    tag, _, position = site.rpartition(".in")
    return tag == op.tag and rounds_read(graph, op, int(position))


class _Edges:
    """Collects edges, and merges those between the same nodes with the same projections."""

    def __init__(self, b: _Builder, grouping: Grouping) -> None:
        self._b = b
        self._grouping = grouping
        self._found: dict[tuple[int, int, int, int], list[Moved]] = {}
        self._sides: dict[int, _Side] = {}

    def add_binding(self, binding: Binding, end: _End) -> None:
        """Add the edge from the group of a binding to a reader."""
        source = self._grouping.groups[binding.group].strategies
        self._add(binding.group, self._b.side(source, binding.dims, False), end, binding.value)

    def add_copy(self, binding: Binding, copy: int, strategies: StrategySet, ends: list[_End]) -> None:
        """Add the edge from the group of a binding to a copy, and those from the copy to its readers."""
        identity = tuple(range(len(binding.dims)))
        # A value outside a loop is copied once per step, however often the loop reads it.
        weight = min(end.weight for end in ends)
        weight = min(weight, self._grouping.executions(binding)) if weight else weight
        side = self._b.side(strategies, identity, False)
        source = self._grouping.groups[binding.group].strategies
        behind, narrow = all(end.behind for end in ends), all(end.narrow for end in ends)
        moved = self._moved(binding.value, weight, behind, narrow)
        self._record(binding.group, self._b.side(source, binding.dims, False), copy, side, moved)
        for end in ends:
            self._add(copy, side, end, binding.value)

    def _add(self, u: int, side: _Side, end: _End, value: int) -> None:
        """Add an edge from node u to a reader."""
        reader = self._grouping.groups[end.consumer].strategies
        other = self._b.side(reader, end.dims, end.assigned)
        self._record(u, side, end.consumer, other, self._moved(value, end.weight, end.behind, end.narrow))

    def _moved(self, value: int, weight: float, behind: bool, narrow: bool) -> Moved:
        """The properties of a move on which its cost depends."""
        type_ = self._b.graph.types[value]
        return (rounded(type_) if narrow else type_, weight, behind)

    def _record(self, u: int, su: _Side, v: int, sv: _Side, moved: Moved) -> None:
        """Record a move between two ends."""
        self._sides[su.index], self._sides[sv.index] = su, sv
        self._found.setdefault((u, v, su.index, sv.index), []).append(moved)

    def merged(self) -> tuple[Edge, ...]:
        """All edges; equal ends and equal moves give equal keys and share a table."""
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
    """The layout, under strategy number `choice`, of a value whose dimensions are these factors."""
    factors = (strategies.assigned if assigned else strategies.result)[choice]
    position = {f: d for d, f in enumerate(dims) if f >= 0}
    # -2 is PARTIAL, -1 is REPLICATED, as is a factor that no dimension has
    return tuple(int(f) if f == -2 else position.get(int(f), -1) for f in factors)
