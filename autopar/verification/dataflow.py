"""What the collectives of a plan move, and for whom: values, their readers, and the layouts between which they travel.

    tag -> operation or value      `Context.summing`, `Context.values`
    the same way so far            `Context.stops`: of one value, by its layouts since home
    the same data                  `Context.origin`, `Context.way`: it differs in dimensions of extent 1 alone
    the same computation           `Context.repeated`: an operation on the same values in the same layouts
    the same in every iteration    `Context.repeats`
    one number throughout          `Context.uniform`
    made the other way round       `Context.made`

Conversions (`autopar.verification.lowering`) and exceptions (`autopar.verification.exceptions`) ask it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from autopar.codegen.fold_transpose import turned
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import Layout, route, steps
from autopar.passes.op_groups.bindings import assumed_trips
from autopar.passes.op_groups.regions import constants_of
from autopar.plans.plan import Plan
from autopar.rules import rules_of

#: Operations that may change nothing but dimensions of extent 1.
SAME_DATA = ("rev", "broadcast_in_dim", "reshape", "squeeze", "expand_dims")

#: Operations that make one number throughout of operands that are.
UNIFORM = (
    *SAME_DATA,
    *("transpose", "slice", "copy", "convert_element_type", "neg", "add", "add_any", "sub", "mul", "div"),
)


@dataclass(frozen=True, eq=False)
class Context:
    """A plan and its graph, asked about its collectives."""

    graph: Graph
    plan: Plan

    @property
    def sizes(self) -> Mapping[str, int]:
        """Mesh axis -> devices along it."""
        return self.plan.mesh

    def along(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Axes in mesh order."""
        return tuple(sorted(set(axes), key=self.plan.mesh_names.index))

    @cached_property
    def readers(self) -> Mapping[int, tuple[tuple[Op | None, str], ...]]:
        """Value -> the operation and site of everything that reads it; None where it leaves a body or the program."""
        found: dict[int, list[tuple[Op | None, str]]] = {}
        for op in self.graph.walk():
            for k, atom in enumerate(op.inputs):
                if isinstance(atom, int):
                    found.setdefault(atom, []).append((op, f"{op.tag}.in{k}"))
            for region in op.regions:
                for j, atom in enumerate(region.outputs):
                    if isinstance(atom, int):
                        found.setdefault(atom, []).append((None, f"{op.tag}.{region.name}.out{j}"))
        for j, atom in enumerate(self.graph.outputs):
            if isinstance(atom, int):
                found.setdefault(atom, []).append((None, f"out{j}"))
        return {value: tuple(places) for value, places in found.items()}

    @cached_property
    def values(self) -> Mapping[str, int]:
        """Site -> the value that is read there."""
        return {site: value for value, places in self.readers.items() for _, site in places}

    def read(self, value: int, site: str) -> Layout:
        """The layout in which a homed value is read at a site."""
        stage = self.plan.stages[0]
        return stage.uses.get(site, stage.values[value])

    @cached_property
    def repeats(self) -> Mapping[int, int]:
        """Value that is the same in every iteration of loops around it -> how often these run it, all together."""
        found: dict[int, int] = {}
        trips = assumed_trips(self.graph)
        for op in self.graph.walk():  # an operation before its bodies, and what it reads before both
            runs = trips.get(op.tag, op.trips or 1)
            for value, atom in constants_of(op):
                outside = found.get(atom, 1) if isinstance(atom, int) else 1
                if outside * runs > 1:
                    found[value] = outside * runs
            read = [found.get(atom, 1) for atom in op.inputs if isinstance(atom, int)]
            if not op.regions and read and min(read) > 1:
                found.update((v, min(read)) for v in op.outputs)
        return found

    @cached_property
    def turned(self) -> Mapping[int, Op]:
        """Products that are made the other way round -> the transposes that read them."""
        return turned(self.graph, self.plan.stages[0])

    def made(self, op: Op) -> int:
        """The value that an operation makes first: of a product that is made the other way round its transpose."""
        behind = self.turned.get(op.outputs[0])
        return op.outputs[0] if behind is None else behind.outputs[0]

    def whole(self, value: int) -> Moved:
        """A value with everything that reads it, in whatever layout."""
        return Moved(value, tuple(op for op, _ in self.readers.get(value, ())))

    def summing(self, c: Collective) -> Op | None:
        """The operation whose partial sums a collective ends; None if it is a change of layout."""
        number = c.op.removeprefix("op")
        return self.graph.by_index[int(number)] if number.isdigit() else None

    def summed_factors(self, op: Op) -> Mapping[str, int]:
        """Mesh axis -> the factor that it cuts and the operation sums over."""
        rule, stage = rules_of(self.graph).get(op.signature), self.plan.stages[0]
        found: dict[str, int] = {}
        if rule is None:
            return found
        for k, (atom, factors) in enumerate(zip(op.inputs, rule.operands, strict=True)):
            lying = stage.values.get(atom) if isinstance(atom, int) else None
            for axis, dim in zip(self.plan.mesh_names, stage.uses.get(f"{op.tag}.in{k}", lying) or (), strict=False):
                if dim >= 0 and factors[dim] in rule.reduced:
                    found[axis] = factors[dim]
        return found

    @cached_property
    def same(self) -> Mapping[int, int]:
        """Value -> the operand that it only differs from in dimensions of extent 1."""
        found: dict[int, int] = {}
        for op in self.graph.walk():
            if op.name in SAME_DATA and isinstance(op.inputs[0], int):
                before, after = self.graph.types[op.inputs[0]].shape, self.graph.types[op.outputs[0]].shape
                turned = math.prod(before[d] for d in op.params["dimensions"]) if op.name == "rev" else 1
                if turned == 1 and [n for n in before if n > 1] == [n for n in after if n > 1]:
                    found[op.outputs[0]] = op.inputs[0]
        return found

    def origin(self, value: int) -> int:
        """The value that it is, but for dimensions of extent 1."""
        while value in self.same:
            value = self.same[value]
        return value

    def stops(self, site: str) -> Sequence[Hashable]:
        """After each collective that brings a value to a site: the value, and the layouts that it has had since home.

        Where the value has a copy, the way leads through that.
        """
        stage, value = self.plan.stages[0], self.values.get(site, -1)
        if value not in stage.values:
            return ()
        home, wanted = stage.values[value], self.read(value, site)
        copy = stage.copies.get(value, home)
        first, then = (route(*ends, self.plan.mesh_sizes) for ends in ((home, copy), (copy, wanted)))
        way = [layout for layout, _ in groupby((home, *first, copy, *then, wanted))]
        return [(value, *way[: k + 2], i) for k, ends in enumerate(pairwise(way)) for i in range(self.length(*ends))]

    def way(self, value: int, site: str) -> Hashable:
        """What is gathered for a site: the data, and where from and to, told by its dimensions of extent above 1."""
        stage = self.plan.stages[0]
        real = [d for d, n in enumerate(self.graph.types[value].shape) if n > 1]
        layouts = stage.values.get(value), stage.copies.get(value), stage.uses.get(site)
        told = [layout and tuple(real.index(d) if d in real else -1 for d in layout) for layout in layouts]
        return (self.origin(value), *told)

    @cached_property
    def repeated(self) -> AbstractSet[int]:
        """Operations (by index) that compute in the same layouts what an earlier one has computed."""
        stage, first, found = self.plan.stages[0], dict[Hashable, int](), set[int]()
        made: dict[int, tuple[int, int]] = {}  # value -> the operation that computes it first, and its position
        for op in (op for op in self.graph.walk() if op.outputs and not op.regions):
            atoms = [made.get(a, a) if isinstance(a, int) else repr(a.value) for a in op.inputs]
            uses = [stage.uses.get(f"{op.tag}.in{k}") for k in range(len(atoms))]
            home = [stage.values.get(v) for v in op.outputs]
            index = first.setdefault((op.signature, *atoms, *uses, *home), op.index)
            made.update((v, (index, i)) for i, v in enumerate(op.outputs))
            found.update({op.index} - {index})
        return found

    @cached_property
    def free(self) -> AbstractSet[str]:
        """Tags of the operations whose results have dimensions but no layout: they are computed where they are read."""
        made = [op for op in self.graph.walk() if op.outputs and not op.regions]
        values, types = self.plan.stages[0].values, self.graph.types
        return {op.tag for op in made if op.outputs[0] not in values and types[op.outputs[0]].rank}

    @cached_property
    def computed_anew(self) -> AbstractSet[str]:
        """Those of them that are computed in more than one layout."""
        stage = self.plan.stages[0]
        free = {op.tag: op.outputs[0] for op in self.graph.walk() if op.tag in self.free}
        wanted = {tag: {stage.uses.get(site) for _, site in self.readers.get(v, ())} for tag, v in free.items()}
        return {tag for tag, layouts in wanted.items() if len(layouts) > 1}

    @cached_property
    def uniform(self) -> AbstractSet[int]:
        """Values that are one number throughout, made of constants alone."""
        found: set[int] = set()
        for op in self.graph.walk():
            read = [a for k, a in enumerate(op.inputs) if op.name != "scatter-add" or k != 1]  # not its indices
            alike = all(a in found if isinstance(a, int) else a.type.rank == 0 for a in read)
            if alike and (op.name in UNIFORM or (op.name == "scatter-add" and self._scatters_nowhere(op))):
                found.update(op.outputs)
        return found

    def _scatters_nowhere(self, op: Op) -> bool:
        """The dimensions that a scatter chooses places in have a single place."""
        shape = self.graph.type_of(op.inputs[0]).shape
        return all(shape[d] == 1 for d in op.params["dimension_numbers"].scatter_dims_to_operand_dims)

    def length(self, source: Layout, target: Layout) -> int:
        """Number of collectives that lead from one layout to another."""
        return sum(step.kind != "slice" for step in steps(source, target, self.plan.mesh_sizes) or ())


@dataclass(frozen=True, slots=True)
class Moved:
    """A value that is moved, and the readers that it is moved for; None is the end of a body or of the program."""

    value: int
    readers: tuple[Op | None, ...]
