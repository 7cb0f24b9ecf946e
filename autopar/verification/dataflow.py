"""Data movement of a plan: which value a collective transfers, for which readers, between which layouts.

    tag -> operation or value       `Context.reduced_op`, `Context.values`
    equal steps of reshards         `Context.resharding_steps`: of one value in one program, by its layouts so far
    equal data                      `Context.origin`, `Context.gather_key`: up to dimensions of extent 1
    equal computation               `Context.duplicates`: an operation on the same values in the same layouts
    loop-invariant values           `Context.loop_runs`
    values of equal elements        `Context.uniform`
    products with swapped operands  `Context.emitted_value`

Conversions (`autopar.verification.lowering`) and exceptions (`autopar.verification.exceptions`) use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from autopar.codegen.fold_transpose import folded_transposes
from autopar.ir.collective import Collective
from autopar.ir.control_flow import entries
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import Layout, route, steps
from autopar.ir.op_sets import ADDITIONS, LINEAR_UNARY, RESHAPES
from autopar.passes.intra_op.extract import one_program
from autopar.passes.op_groups.bindings import assumed_trips
from autopar.plans.plan import Plan
from autopar.rules import rules_of

#: Operations that may change only dimensions of extent 1.
SAME_DATA = ("rev", "broadcast_in_dim", *RESHAPES)

#: Operations whose result has equal elements if all operands have.
UNIFORM = (*LINEAR_UNARY, *ADDITIONS, "rev", "sub", "mul", "div")


@dataclass(frozen=True, eq=False)
class Context:
    """Analyses of a plan and its graph, for its collectives.

    Attributes:
        graph: the program.
        plan: its layouts.
        stored: values, and copies of values in a layout, that one program of a stage leaves for another; None: in the
            planned layout.
        program_of: operation -> the program that it is compiled in. Compilers merge nothing across programs.
    """

    graph: Graph
    plan: Plan
    stored: AbstractSet[tuple[int, Layout | None]] = frozenset()
    program_of: Callable[[int], str] = one_program

    @property
    def sizes(self) -> Mapping[str, int]:
        """Mesh axis -> devices along it."""
        return self.plan.mesh

    def along(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Axes in mesh order, each once."""
        return tuple(sorted(set(axes), key=self.plan.mesh_names.index))

    @cached_property
    def values(self) -> Mapping[str, int]:
        """Site -> the value that is read there."""
        return {use.site: value for value, uses in self.graph.uses.items() for use in uses}

    def program_reading(self, site: str) -> str:
        """The program that reads a value at a site; the caller's reads are in none."""
        return self._programs_reading.get(site, "")

    @cached_property
    def _programs_reading(self) -> Mapping[str, str]:
        sites = (use for uses in self.graph.uses.values() for use in uses)
        return {use.site: self.program_of(use.op.index) for use in sites if use.op is not None}

    def read(self, value: int, site: str) -> Layout:
        """The layout in which a value with a planned layout is read at a site."""
        stage = self.plan.stages[0]
        return stage.uses.get(site, stage.values[value])

    @cached_property
    def loop_runs(self) -> Mapping[int, int]:
        """Loop-invariant value -> number of iterations of the loops around it, multiplied."""
        runs_of_value: dict[int, int] = {}
        trips = assumed_trips(self.graph)
        for op in self.graph.walk():  # an operation comes before its regions, and its operands before both
            runs = trips.get(op.tag, op.trips or 1)
            for e in entries(op):
                outside = runs_of_value.get(e.operand, 1) if isinstance(e.operand, int) else 1
                if e.kind == "constant" and outside * runs > 1:
                    runs_of_value[e.value] = outside * runs
            read = [runs_of_value.get(atom, 1) for atom in op.inputs if isinstance(atom, int)]
            if not op.regions and read and min(read) > 1:
                runs_of_value.update((v, min(read)) for v in op.outputs)
        return runs_of_value

    @cached_property
    def folded_transposes(self) -> Mapping[int, Op]:
        """Products that are emitted with swapped operands -> the transposes that read them."""
        return folded_transposes(self.graph, self.plan.stages[0])

    def emitted_value(self, op: Op) -> int:
        """The first result of an operation as it is emitted: for a product with swapped operands, its transpose."""
        transpose = self.folded_transposes.get(op.outputs[0])
        return op.outputs[0] if transpose is None else transpose.outputs[0]

    def all_readers(self, value: int) -> Transfer:
        """A value with all its readers, in any layout."""
        return self.transfer(value, None, (use.op for use in self.graph.uses.get(value, ())))

    def transfer(self, value: int, copy: Layout | None, readers: Iterable[Op | None]) -> Transfer:
        """A value, or a copy of it in this layout, with these readers; stored, another program reads it too."""
        return Transfer(value, (*readers, *((None,) if (value, copy) in self.stored else ())))

    def reduced_op(self, c: Collective) -> Op | None:
        """The operation whose partial sums a collective reduces; None if the collective is part of a reshard."""
        number = c.op.removeprefix("op")
        return self.graph.by_index[int(number)] if number.isdigit() else None

    def summed_factors(self, op: Op) -> Mapping[str, int]:
        """Mesh axis -> the factor that it shards and that the operation reduces over."""
        rule, stage = rules_of(self.graph).get(op.signature), self.plan.stages[0]
        factors_by_axis: dict[str, int] = {}
        if rule is None:
            return factors_by_axis
        for k, (atom, factors) in enumerate(zip(op.inputs, rule.operands, strict=True)):
            layout = stage.values.get(atom) if isinstance(atom, int) else None
            for axis, dim in zip(self.plan.mesh_names, stage.uses.get(f"{op.tag}.in{k}", layout) or (), strict=False):
                if dim >= 0 and factors[dim] in rule.reduced:
                    factors_by_axis[axis] = factors[dim]
        return factors_by_axis

    @cached_property
    def same_data(self) -> Mapping[int, int]:
        """Value -> the operand from which it differs only in dimensions of extent 1."""
        sources: dict[int, int] = {}
        for op in self.graph.walk():
            if op.name in SAME_DATA and isinstance(op.inputs[0], int):
                before, after = self.graph.types[op.inputs[0]].shape, self.graph.types[op.outputs[0]].shape
                reversed_extent = math.prod(before[d] for d in op.params["dimensions"]) if op.name == "rev" else 1
                if reversed_extent == 1 and [n for n in before if n > 1] == [n for n in after if n > 1]:
                    sources[op.outputs[0]] = op.inputs[0]
        return sources

    def origin(self, value: int) -> int:
        """The first value with the same data, up to dimensions of extent 1."""
        while value in self.same_data:
            value = self.same_data[value]
        return value

    def resharding_steps(self, site: str) -> Sequence[Hashable]:
        """A key per collective of the reshard for a site: program, value, its layouts up to and after that collective.

        If the value has a shared copy, the reshard goes through its layout.
        """
        stage, value = self.plan.stages[0], self.values.get(site, -1)
        if value not in stage.values:
            return ()
        layout, wanted = stage.values[value], self.read(value, site)
        copy = stage.copies.get(value, layout)
        first, then = (route(*ends, self.plan.mesh_sizes) for ends in ((layout, copy), (copy, wanted)))
        way = [layout for layout, _ in groupby((layout, *first, copy, *then, wanted))]
        return [
            (self.program_reading(site), value, *way[: k + 2], i)
            for k, ends in enumerate(pairwise(way))
            for i in range(self.num_collectives(*ends))
        ]

    def gather_key(self, value: int, site: str) -> Hashable:
        """What is gathered for a site: program, data, layouts before and after on dimensions of extent above 1."""
        stage = self.plan.stages[0]
        real = [d for d, n in enumerate(self.graph.types[value].shape) if n > 1]
        layouts = stage.values.get(value), stage.copies.get(value), stage.uses.get(site)
        compared = [layout and tuple(real.index(d) if d in real else -1 for d in layout) for layout in layouts]
        return (self.program_reading(site), self.origin(value), *compared)

    @cached_property
    def duplicates(self) -> AbstractSet[int]:
        """Operations (by index) that compute the same as an earlier one of their program, in the same layouts."""
        stage, first, duplicates = self.plan.stages[0], dict[Hashable, int](), set[int]()
        producer: dict[int, tuple[int, int]] = {}  # value -> the first operation that computes it, and its position
        for op in (op for op in self.graph.walk() if op.outputs and not op.regions):
            atoms = [producer.get(a, a) if isinstance(a, int) else repr(a.value) for a in op.inputs]
            uses = [stage.uses.get(f"{op.tag}.in{k}") for k in range(len(atoms))]
            layouts = [stage.values.get(v) for v in op.outputs]
            index = first.setdefault((self.program_of(op.index), op.signature, *atoms, *uses, *layouts), op.index)
            producer.update((v, (index, i)) for i, v in enumerate(op.outputs))
            duplicates.update({op.index} - {index})
        return duplicates

    @cached_property
    def free_ops(self) -> AbstractSet[str]:
        """Tags of operations whose results have dimensions but no planned layout: they are computed at each use."""
        computed = [op for op in self.graph.walk() if op.outputs and not op.regions]
        values, types = self.plan.stages[0].values, self.graph.types
        return {op.tag for op in computed if op.outputs[0] not in values and types[op.outputs[0]].rank}

    @cached_property
    def recomputed(self) -> AbstractSet[str]:
        """Tags of those that are computed in more than one layout."""
        stage = self.plan.stages[0]
        free = {op.tag: op.outputs[0] for op in self.graph.walk() if op.tag in self.free_ops}
        wanted = {tag: {stage.uses.get(use.site) for use in self.graph.uses.get(v, ())} for tag, v in free.items()}
        return {tag for tag, layouts in wanted.items() if len(layouts) > 1}

    @cached_property
    def uniform(self) -> AbstractSet[int]:
        """Values whose elements are all equal, computed from constants alone."""
        uniform: set[int] = set()
        for op in self.graph.walk():
            read = [a for k, a in enumerate(op.inputs) if op.name != "scatter-add" or k != 1]  # not its indices
            equal = all(a in uniform if isinstance(a, int) else a.type.rank == 0 for a in read)
            if equal and (op.name in UNIFORM or (op.name == "scatter-add" and self._scatters_nowhere(op))):
                uniform.update(op.outputs)
        return uniform

    def _scatters_nowhere(self, op: Op) -> bool:
        """Whether the dimensions that a scatter indexes have extent 1."""
        shape = self.graph.type_of(op.inputs[0]).shape
        return all(shape[d] == 1 for d in op.params["dimension_numbers"].scatter_dims_to_operand_dims)

    def num_collectives(self, source: Layout, target: Layout) -> int:
        """Number of collectives between two layouts."""
        return sum(step.kind != "slice" for step in steps(source, target, self.plan.mesh_sizes) or ())


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that is moved, and the readers that it is moved for.

    None is a result of a region or of the program, or another program.
    """

    value: int
    readers: tuple[Op | None, ...]
