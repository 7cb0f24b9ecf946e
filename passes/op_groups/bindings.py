"""Collects groups, bindings and uses (`autopar.cost_models.sharding.groups`) while `merge.group` visits operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.sharding.groups import WHOLE, Binding, Charge, Overlap, Use
from autopar.cost_models.sharding.strategies import StrategySet
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import UNKNOWN_TRIPS, Atom, Graph, Op
from autopar.ir.layout import Layout
from autopar.passes.op_groups.constraints import PinnedValue
from autopar.passes.op_groups.strategies import MOST_PADDING, layouts_of
from autopar.passes.op_groups.unreduced import Deferral
from autopar.rules import Rule, manual

#: For an operation that follows an operand: the group's factors for the dimensions of each operand and of each result.
Followed = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]


@dataclass
class Draft:
    """An `OpGroup` under construction, to which the traffic of its followers is still added.

    `repeats` is the number of executions per step of the top-level operation at which it was made.
    """

    name: str
    strategies: StrategySet
    weight: float
    op: int
    value: int
    light: dict[tuple[int, ...], float] = field(default_factory=dict)
    repeats: float = 1.0


@dataclass
class Builder:
    """The state of one `merge.group` call.

    Attributes:
        graph, rules, mesh: the arguments of `merge.group`.
        deferral: operations that may have partial sums as operands or results.
        overlap: the communication that can overlap.
        drafts, bindings, uses, charges: the grouping so far.
        kinds: signature of an operation -> what all operations of that signature share.
        sets: key -> strategy set, so that equal operations share one.
        followers: light operations, whose HBM traffic is charged to their groups.
        reads: value -> number of reads.
        heavy_reads: values that operations with strategies of their own, or the caller, read.
        accumulators: groups of carries of scans that may be partial sums; only what adds to them follows them.
        not_propagated: groups of arguments whose sharding is not propagated to their readers -> largest padding of the
            readers' own layouts, as a factor.
        repeats: executions per step of the top-level operation that is being visited.
        pace: index of a visited operation -> executions per step of its top-level operation.
        followed: cache of `merge._followed`.
        pinned_values: values inside the program that have one layout only.
    """

    graph: Graph
    rules: Mapping[int, Rule]
    mesh: LogicalMesh
    deferral: Deferral
    overlap: Overlap
    drafts: list[Draft] = field(default_factory=list)
    bindings: dict[int, Binding] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    sets: dict[object, StrategySet] = field(default_factory=dict)
    followers: list[Op] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)
    heavy_reads: set[int] = field(default_factory=set)
    accumulators: set[int] = field(default_factory=set)
    not_propagated: dict[int, float] = field(default_factory=dict)
    repeats: float = 1.0
    pace: dict[int, float] = field(default_factory=dict)
    charges: list[Charge] = field(default_factory=list)
    followed: dict[tuple[int, int, tuple[int, ...]], Followed] = field(default_factory=dict)
    pinned_values: Mapping[int, PinnedValue] = field(default_factory=dict[int, PinnedValue])

    def new(self, name: str, strategies: StrategySet, weight: float, op: int, value: int) -> int:
        """Add a group. Returns its index."""
        self.drafts.append(Draft(name, strategies, weight, op, value, repeats=self.repeats))
        return len(self.drafts) - 1

    def strategy_set(self, key: object, make: Callable[[int], StrategySet]) -> StrategySet:
        """The strategy set of a key; `make` makes it from its index when the key is new."""
        strategies = self.sets.get(key)
        if strategies is None:
            strategies = self.sets[key] = make(len(self.sets))
        return strategies

    def layouts(self, shape: tuple[int, ...], most_padding: float = MOST_PADDING) -> StrategySet:
        """All layouts of a shape whose padding lengthens no dimension by more than this factor."""
        key = ("layouts", shape, most_padding)
        return self.strategy_set(key, lambda index: layouts_of(shape, self.mesh, index, most_padding))

    def layouts_or_partial(self, shape: tuple[int, ...]) -> StrategySet:
        """All layouts of a shape, partial sums along any axes included."""
        return self.strategy_set(
            ("layouts or partial", shape), lambda index: layouts_of(shape, self.mesh, index, partial=True)
        )

    def is_free(self, atom: Atom) -> bool:
        """Whether no group decides the layout of an atom: constants, scalars, and values made from such alone."""
        return not isinstance(atom, int) or not self.graph.types[atom].shape or atom not in self.bindings

    def pinned(self, shape: tuple[int, ...], layout: Layout, open_dims: tuple[int, ...] = ()) -> StrategySet:
        """The layouts that equal `layout`, except that axes which cut nothing there may cut `open_dims`."""
        every = self.layouts(shape, 1.0)
        wanted = np.array(layout, every.result.dtype)
        rows = ((every.result == wanted) | ((wanted == WHOLE) & np.isin(every.result, open_dims))).all(1)
        return self.some(every, rows, ("pinned", shape, layout, open_dims))

    def some(self, every: StrategySet, rows: NDArray[np.bool_], key: object) -> StrategySet:
        """The strategies of a set at which `rows` is true, as the set of this key."""
        parts = (every.assigned[rows], every.result[rows], every.after[rows], every.cost[rows], every.sizes)
        return self.strategy_set(key, lambda index: StrategySet(index, *parts))

    def enter(self, name: str, value: int, weight: float, most_padding: float = MOST_PADDING) -> int:
        """Add a group for a value that enters a region. Returns its index."""
        return self.enter_as(name, value, weight, self.layouts(self.graph.types[value].shape, most_padding))

    def enter_as(self, name: str, value: int, weight: float, strategies: StrategySet) -> int:
        """Add a group with these layouts for an argument, or for a value that enters a region. Returns its index."""
        group = self.new(name, strategies, weight, -1, value)
        self.bind(value, group)
        return group

    def bind(self, value: int, group: int) -> None:
        """Bind a value to a group that decides the layout of an array of its shape."""
        self.bindings[value] = Binding(group, value, tuple(range(self.graph.types[value].rank)))


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties that all operations of one signature share.

    Attributes:
        rule: the sharding rule.
        main: position of the largest result.
        candidates: positions of the operands that the operation can follow.
        may_be_free: the operation is computed wherever its result is used if all its operands are free.
        broadcast: it is a broadcast.
    """

    rule: Rule
    main: int
    candidates: tuple[int, ...]
    may_be_free: bool
    broadcast: bool


def alias(b: Builder, atom: Atom, value: int, name: str, site: str, weight: float, op: int) -> None:
    """Bind `value` as `atom`, which is read at `site`, is bound.

    It gets a new group if `atom` is free, a view, or may be a partial sum.
    """
    binding = b.bindings.get(atom) if isinstance(atom, int) else None
    if binding is not None and binding.view is None and binding.group not in b.accumulators:
        b.bindings[value] = Binding(binding.group, value, binding.dims)
    elif b.graph.types[value].shape:
        group = b.enter(name, value, weight)
        if isinstance(atom, int):
            use(b, site, atom, group, tuple(range(b.graph.types[value].rank)), False, weight, op)


def use(
    b: Builder, site: str, value: int, consumer: int, dims: tuple[int, ...], assigned: bool, weight: float, op: int
) -> None:
    """Record a `Use`, unless the consumer itself decides the layout of the value, with equal dimensions."""
    if not dims:
        return
    binding = b.bindings.get(value)
    same = binding is not None and binding.view is None and binding.group == consumer and binding.dims == dims
    if not same or assigned:
        b.uses.append(Use(site, value, consumer, dims, assigned, weight, op))


def assumed_trips(graph: Graph) -> Mapping[str, int]:
    """Tag of each loop whose number of iterations is known only at run time -> the number that costs assume.

    Loops in the body of a `shard_map` have its tag.
    """
    unknown = (op for op in graph.walk() if (op.regions and op.trips is None) or manual.loops_are_unknown(op))
    return {op.tag: UNKNOWN_TRIPS for op in unknown}
