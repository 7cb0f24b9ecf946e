"""Op groups, and the values whose layouts they decide or require.

    binding    maps the dimensions of a value to factors of the group that decides its layout          -> Binding
    use        maps the dimensions of an operand to factors of the group that reads it                 -> Use
    class      strategies of a group that give a value the same layout                                 -> projection

An edge of the optimization problem joins the classes of a binding to the classes of a use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.sharding.strategies import StrategySet
from autopar.ir.graph import Op
from autopar.ir.problem import Problem
from autopar.rules import Rule
from autopar.rules.manual import MANUAL

#: A dimension of a view that may be cut in any way at no cost.
FREE = -3
#: A dimension that the group never cuts.
WHOLE = -1


@dataclass(frozen=True, slots=True)
class Binding:
    """The group that decides the layout of a value.

    Attributes:
        group: index of the group.
        value: the value itself, or the value of which it is a view.
        dims: for each dimension of `value`, the group's factor, or WHOLE.
        view: for each dimension of the view, the dimension of `value` that it broadcasts, or FREE; None if the value is
            not a view.
    """

    group: int
    value: int
    dims: tuple[int, ...]
    view: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """A read of a value, in the layout that the strategy of a group requires.

    Attributes:
        site: the place of the read: "op12.in0", "op12.body.out1" or "out3".
        value: the value read.
        consumer: the group that decides the layout.
        dims: for each dimension of the value, the consumer's factor, or WHOLE.
        assigned: the layout is given by `StrategySet.assigned`, the factors cut during execution; otherwise by
            `StrategySet.result`, those of the result.
        weight: executions per step.
        op: index of the operation that reads, -1 for results of the graph.
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
    """Operations that share one strategy variable.

    Attributes:
        name: text for people, which also breaks ties.
        strategies: the strategies to choose from.
        weight: executions per step.
        op: index of the operation that has the strategies, -1 for arguments, copies and region borders.
        value: the value whose layout the group decides: the largest result of the operation.
        light: HBM traffic of the operations that follow: group factors of a value -> bytes per execution, uncut.
    """

    name: str
    strategies: StrategySet
    weight: float
    op: int
    value: int
    light: tuple[tuple[tuple[int, ...], float], ...] = ()


class Charge(NamedTuple):
    """HBM traffic of a light operation, which depends on the strategy of a group.

    Attributes:
        group: index of the group.
        dims: factors of the group that cut the value; each device moves its share of the bytes.
        nbytes: bytes of the uncut value per step.
        op: index of the operation that moves the bytes; -1 for writing the batch.
    """

    group: int
    dims: tuple[int, ...]
    nbytes: float
    op: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """The values and operations whose communication can overlap with computation.

    Attributes:
        early: values that do not depend on the batch.
        late: indices of operations whose results only the update or the caller reads.
        update: indices of operations of the update.
    """

    early: frozenset[int]
    late: frozenset[int]
    update: frozenset[int]

    def moves(self, value: int, reader: int) -> bool:
        """Whether resharding `value` for the operation `reader` (-1: the caller) can overlap."""
        return reader < 0 or value in self.early or reader in self.update

    def sums(self, op: Op) -> bool:
        """Whether reducing the partial results of `op` can overlap."""
        return op.index in self.late and op.name != MANUAL  # what a `shard_map` sends, its body may wait for


@dataclass(frozen=True, eq=False)
class Grouping:
    """The groups of a program, and the bindings and uses of its values.

    Attributes:
        groups: all groups.
        bindings: value -> its binding; free values are absent.
        uses: all reads at which a value may be resharded.
        rules: signature of an operation -> sharding rule.
        overlap: the communication that can overlap with computation.
        charges: HBM traffic of light operations, one by one; `OpGroup.light` has the sums.
        repeated: value that a repeated part of the program makes (`Graph.repeats`), or that enters a region of it ->
            executions per step of that part.
        free: indices of operations that cost nothing (`autopar.passes.op_groups.merge.Surroundings`).
    """

    groups: tuple[OpGroup, ...]
    bindings: Mapping[int, Binding]
    uses: tuple[Use, ...]
    rules: Mapping[int, Rule]
    overlap: Overlap
    charges: tuple[Charge, ...] = ()
    repeated: Mapping[int, float] = field(default_factory=dict[int, float])
    free: frozenset[int] = frozenset()

    @property
    def views(self) -> frozenset[int]:
        """Values that are broadcasts of others, without a layout of their own."""
        return frozenset(v for v, binding in self.bindings.items() if binding.view is not None)

    def without(self, ops: Collection[int]) -> Grouping:
        """The same where these operations cost nothing, nor what they read in another layout."""
        charges = tuple(charge for charge in self.charges if charge.op not in ops)
        light: dict[int, dict[tuple[int, ...], float]] = {c.group: {} for c in self.charges if c.op in ops}
        for charge in charges:
            executions = self.groups[charge.group].weight
            if charge.group in light and executions > 0:
                nbytes = light[charge.group]
                nbytes[charge.dims] = nbytes.get(charge.dims, 0.0) + charge.nbytes / executions
        groups = tuple(
            replace(group, light=tuple(light[i].items())) if i in light else group
            for i, group in enumerate(self.groups)
        )
        uses = tuple(use for use in self.uses if use.op not in ops)
        return replace(self, groups=groups, uses=uses, charges=charges, free=self.free | {*ops})

    def executions(self, binding: Binding) -> float:
        """How often per step a bound value is made: as often as its group runs, or the part of the program around it.

        Loops count only where the group is inside: a value in a loop that follows one outside is the same every time.
        """
        return max(self.groups[binding.group].weight, self.repeated.get(binding.value, 1.0))


@dataclass(frozen=True, eq=False)
class Model:
    """The problem of one graph on one mesh, and the meaning of its nodes.

    Attributes:
        problem: its nodes are the groups, then the copies.
        grouping: the groups, bindings and uses.
        copies: bound value -> node of its copy.
        copy_sets: bound value -> layouts of its copy.
    """

    problem: Problem
    grouping: Grouping
    copies: Mapping[int, int]
    copy_sets: Mapping[int, StrategySet]


Projection = tuple[NDArray[np.int64], NDArray[np.int8]]
"""Class of each strategy, and layout of each class."""


def projection(strategies: StrategySet, dims: Sequence[int], assigned: bool) -> Projection:
    """The classes of strategies that give a value the same layout.

    Args:
        strategies: n strategies.
        dims: the group's factor for each dimension of the value, or WHOLE.
        assigned: take the layout during execution instead of that of the result.

    Returns:
        The class of each strategy, shape (n,), and the layout of each class, shape (classes, axes). Classes are ordered
        by the code of their layout.
    """
    key = tuple(dims), assigned
    classes_and_layouts = strategies.projections.get(key)
    if classes_and_layouts is None:
        classes_and_layouts = strategies.projections[key] = _projected(strategies, dims, assigned)
    return classes_and_layouts


def _projected(strategies: StrategySet, dims: Sequence[int], assigned: bool) -> Projection:
    factors = strategies.assigned if assigned else strategies.result
    dim_of = np.full(len(strategies.sizes) + 2, -1, np.int8)
    dim_of[-2] = -2  # PARTIAL stays PARTIAL
    for dim, factor in enumerate(dims):
        if factor >= 0:
            dim_of[factor] = dim
    layouts = dim_of[factors]
    # base 16: entries are from -2 (PARTIAL) to 13
    codes = ((layouts.astype(np.int64) + 2) * (16 ** np.arange(layouts.shape[1]))).sum(1)
    _, first, classes = np.unique(codes, return_index=True, return_inverse=True)
    return classes.astype(np.int64), layouts[first]


def source_dims(binding: Binding, use: Use) -> tuple[int, ...]:
    """The consumer's factor for each dimension of `Binding.value`, which differs from the value read for a view."""
    if binding.view is None:
        return use.dims
    dims = [-1] * len(binding.dims)
    for of_view, factor in zip(binding.view, use.dims, strict=True):
        if of_view != FREE:
            dims[of_view] = factor
    return tuple(dims)
