"""Where the layout of every value is decided, and who reads it how: the vocabulary of the grouping.

A *binding* ties a value's dimensions to factors of a group; a *use* ties the dimensions of an operand to factors of the
group that reads it. `projection` turns either into classes of strategies that mean the same layout, which is what the
edges of the optimization problem are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import UNKNOWN_TRIPS, Atom, Graph, Op
from autopar.ir.layout import Layout
from autopar.passes.op_groups.overlap import Slack
from autopar.passes.op_groups.strategies import MOST_PADDING, StrategySet, layouts_of
from autopar.passes.op_groups.unreduced import Deferral
from autopar.rules import Rule

#: A dimension of a view along which any layout costs nothing.
FREE = -3
#: A dimension that its group never cuts.
WHOLE = -1

#: A group's factors for the dimensions of each operand, and of each result, of an operation that follows an operand.
Followed = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a value's layout is decided.

    Attributes:
        group: index of the group.
        value: the value itself, or the one that a view looks at.
        dims: for each dimension of `value`, the group's factor, or WHOLE.
        view: for each dimension of this value, the dimension of `value` behind it, or FREE; None if it is no view.
    """

    group: int
    value: int
    dims: tuple[int, ...]
    view: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """A value read at a site, in the layout that a group's strategy wants there.

    Attributes:
        site: "op12.in0", "op12.body.out1" or "out3".
        value: the value read.
        consumer: the group that decides the layout.
        dims: for each dimension of the value, the consumer's factor, or WHOLE.
        assigned: the layout follows what the strategy cuts while running, not what its result holds.
        weight: executions per step.
        op: index of the operation it belongs to, -1 for results of the graph.
    """

    site: str
    value: int
    consumer: int
    dims: tuple[int, ...]
    assigned: bool
    weight: float
    op: int


@dataclass(frozen=True, slots=True, eq=False)
class OpGroup:
    """A decision: its strategies, how often it runs, and the light operations that follow it.

    Attributes:
        name: for people and for breaking ties.
        strategies: what may be chosen.
        weight: executions per step.
        op: index of the operation that has the strategies, -1 for arguments, copies and region borders.
        value: the value whose layout it decides (the operation's largest result).
        light: bytes moved by followers: group factors of the value -> bytes per execution.
    """

    name: str
    strategies: StrategySet
    weight: float
    op: int
    value: int
    light: tuple[tuple[tuple[int, ...], float], ...] = ()


class Charge(NamedTuple):
    """Light traffic on a group: `nbytes` of the whole per step, of which its cuts of `dims` leave a share.

    `op` is the operation that moves them, -1 for what the batch is written with.
    """

    group: int
    dims: tuple[int, ...]
    nbytes: float
    op: int


@dataclass(frozen=True, eq=False)
class Grouping:
    """The whole program's decisions: which groups, where every value lives, who reads what how.

    `charges` are the light traffic of the groups one by one.
    """

    groups: tuple[OpGroup, ...]
    bindings: Mapping[int, Binding]
    uses: tuple[Use, ...]
    rules: Mapping[int, Rule]
    slack: Slack
    charges: tuple[Charge, ...] = ()


def projection(strategies: StrategySet, dims: Sequence[int], assigned: bool) -> tuple[np.ndarray, np.ndarray]:
    """(class of each strategy, layouts of the classes) of a value whose dimensions are these group factors.

    Shapes (n,) and (classes, axes); classes are ordered by first appearance in the sorted codes.
    """
    factors = strategies.assigned if assigned else strategies.held
    dim_of = np.full(len(strategies.sizes) + 2, -1, np.int8)
    dim_of[-2] = -2
    for dim, factor in enumerate(dims):
        if factor >= 0:
            dim_of[factor] = dim
    layouts = dim_of[factors]
    codes = ((layouts.astype(np.int64) + 2) * (16 ** np.arange(layouts.shape[1]))).sum(1)
    _, first, classes = np.unique(codes, return_index=True, return_inverse=True)
    return classes.astype(np.int64), layouts[first]


@dataclass
class Draft:
    """A group whose followers are still being charged."""

    name: str
    strategies: StrategySet
    weight: float
    op: int
    value: int
    light: dict[tuple[int, ...], float] = field(default_factory=dict)
    repeats: float = 1.0


@dataclass
class Builder:
    """The growing grouping; local to one `group` call.

    `repeats`: executions per step of the top-level operation that is being visited; `pace`: of those visited, by index.
    `loose`: groups of arguments that nothing follows -> the most padding of what would follow them.
    """

    graph: Graph
    rules: Mapping[int, Rule]
    mesh: LogicalMesh
    deferral: Deferral
    slack: Slack
    drafts: list[Draft] = field(default_factory=list)
    bindings: dict[int, Binding] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    sets: dict[object, StrategySet] = field(default_factory=dict)
    followers: list[Op] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)
    heavy_reads: set[int] = field(default_factory=set)
    loose: dict[int, float] = field(default_factory=dict)
    repeats: float = 1.0
    pace: dict[int, float] = field(default_factory=dict)
    charges: list[Charge] = field(default_factory=list)
    followed: dict[tuple[int, int, tuple[int, ...]], Followed] = field(default_factory=dict)  # see `groups._followed`

    def new(self, name: str, strategies: StrategySet, weight: float, op: int, value: int) -> int:
        self.drafts.append(Draft(name, strategies, weight, op, value, repeats=self.repeats))
        return len(self.drafts) - 1

    def strategy_set(self, key: object, make: Callable[[int], StrategySet]) -> StrategySet:
        found = self.sets.get(key)
        if found is None:
            found = self.sets[key] = make(len(self.sets))
        return found

    def layouts(self, shape: tuple[int, ...], most_padding: float = MOST_PADDING) -> StrategySet:
        key = ("layouts", shape, most_padding)
        return self.strategy_set(key, lambda index: layouts_of(shape, self.mesh, index, most_padding))

    def is_free(self, atom: Atom) -> bool:
        return not isinstance(atom, int) or not self.graph.types[atom].shape or atom not in self.bindings

    def pinned(self, shape: tuple[int, ...], layout: Layout, open_dims: tuple[int, ...] = ()) -> StrategySet:
        """The layouts of this shape, restricted to one; axes it leaves out may cut the open dimensions."""
        every = self.layouts(shape, 1.0)
        wanted = np.array(layout, every.held.dtype)
        rows = ((every.held == wanted) | ((wanted == WHOLE) & np.isin(every.held, open_dims))).all(1)
        parts = (every.assigned[rows], every.held[rows], every.after[rows], every.cost[rows], every.sizes)
        return self.strategy_set(("pinned", shape, layout, open_dims), lambda index: StrategySet(index, *parts))

    def enter(self, name: str, value: int, weight: float, most_padding: float = MOST_PADDING) -> int:
        """A group for a value that comes from outside: the border of a region."""
        return self.enter_as(name, value, weight, self.layouts(self.graph.types[value].shape, most_padding))

    def enter_as(self, name: str, value: int, weight: float, strategies: StrategySet) -> int:
        """A group for a value that comes from outside, with these layouts."""
        shape = self.graph.types[value].shape
        group = self.new(name, strategies, weight, -1, value)
        self.bindings[value] = Binding(group, value, tuple(range(len(shape))))
        return group


@dataclass(frozen=True, slots=True)
class Kind:
    """What all operations of one signature share."""

    rule: Rule
    main: int
    candidates: tuple[int, ...]
    may_be_free: bool
    broadcast: bool


def alias(b: Builder, atom: Atom, value: int, name: str, site: str, weight: float, op: int) -> None:
    """`value` is what is read at `site` and lies where that lives; if it lives nowhere, it gets a border group."""
    binding = b.bindings.get(atom) if isinstance(atom, int) else None
    if binding is not None and binding.view is None:
        b.bindings[value] = Binding(binding.group, value, binding.dims)
    elif b.graph.types[value].shape:
        group = b.enter(name, value, weight)
        if isinstance(atom, int):
            use(b, site, atom, group, tuple(range(b.graph.types[value].rank)), False, weight, op)


def use(
    b: Builder, site: str, value: int, consumer: int, dims: tuple[int, ...], assigned: bool, weight: float, op: int
) -> None:
    """Record a `Use`, unless the value already lies as the consumer wants it because it lives there."""
    if not dims:
        return
    binding = b.bindings.get(value)
    same = binding is not None and binding.view is None and binding.group == consumer and binding.dims == dims
    if not same or assigned:
        b.uses.append(Use(site, value, consumer, dims, assigned, weight, op))


def assumed_trips(graph: Graph) -> Mapping[str, int]:
    """Tags of the loops whose trips are only known at run time -> the trips that prices assume for them."""
    return {op.tag: UNKNOWN_TRIPS for op in graph.walk() if op.regions and op.trips is None}
