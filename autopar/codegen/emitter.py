"""Emits the operations of one program, while JAX traces it: operands read in planned layouts, results constrained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autopar import jax_compat
from autopar.codegen.context import Context
from autopar.codegen.fold_transpose import transposed_layout
from autopar.codegen.partial_sums import SPLITS
from autopar.codegen.shard_mapped import binding, split_convolution
from autopar.codegen.start_indices import barrier_before_scatter, clamp_start_indices
from autopar.ir import control_flow
from autopar.ir.graph import Atom, Op, Region
from autopar.ir.layout import PARTIAL, REPLICATED, Layout, partial_axes, replicated
from autopar.ir.op_sets import RAGGED_PRODUCTS
from autopar.rules.convolutions import CONVOLUTION, is_grouped


@dataclass(eq=False)
class Emitter:
    """Emits the operations of one program or region while JAX traces it; each nested region has its own emitter.

    Attributes:
        context: of the program.
        arrays: value -> its array in its planned layout.
        lazy: free value or view -> the operation that makes it, and the position among its results.
        copies: (value, layout) -> a resharded copy.
        producers: value -> the operation that made its array.
        op_indices: indices of the operations of this program.
        folded: indices of transposes that were emitted together with their product.
    """

    context: Context
    arrays: dict[int, Any]
    lazy: dict[int, tuple[Op, int]] = field(default_factory=dict)
    copies: dict[tuple[int, Layout], Any] = field(default_factory=dict)
    producers: dict[int, Op] = field(default_factory=dict)
    op_indices: frozenset[int] = frozenset()
    folded: set[int] = field(default_factory=set)

    # Definitions

    def define(self, value: int, array: Any, tag: str) -> None:
        """Sets the array of a value, constrained to its planned layout; `tag` names the constraint."""
        layout = self.context.stage.values.get(value)
        with jax.named_scope(tag):
            self.arrays[value] = array if layout is None else self.context.constrain(array, layout)

    def run(self, ops: Sequence[Op]) -> None:
        """Emits operations in order."""
        self.op_indices = frozenset(op.index for op in ops)
        for op in ops:
            if op.index in self.folded:
                continue
            if op.regions:
                self._run_region(op)
            elif self.is_lazy(op):
                for position, value in enumerate(op.outputs):
                    self.lazy[value] = (op, position)
            else:
                self._run_leaf(op)

    def is_lazy(self, op: Op) -> bool:
        """Whether all results are free values or views, which have no planned layout and are emitted at each use."""
        return self.context.graph.lacks_layouts(op, self.context.stage.values)

    def _run_leaf(self, op: Op) -> None:
        operands = clamp_start_indices(op, [self.read(atom, f"{op.tag}.in{k}", op) for k, atom in enumerate(op.inputs)])
        operands = barrier_before_scatter(op, operands, self._maker)
        leads = [partial_axes(self.context.layout_at(atom, f"{op.tag}.in{k}")) for k, atom in enumerate(op.inputs)]
        kept = partial_axes(self.context.stage.values.get(op.outputs[0])) if op.outputs else []
        transpose = self.context.folded_transposes.get(op.outputs[0]) if op.name == "dot_general" else None
        if transpose is not None and transpose.index in self.op_indices and not any(leads):
            self._store_folded(op, operands, transpose)
        elif any(leads):
            self._store(op, self._bind_partial(op, operands, leads), max(leads, key=len))
        elif op.name == CONVOLUTION and (kept or self._is_run_in_groups(op)):
            array, lead = split_convolution(self.context, op, operands)
            self._store(op, [array], lead)
        elif kept:
            self._store(op, [SPLITS[op.name](self.context, op, operands, kept)], kept)
        else:
            self._store(op, self._bind(op, operands))

    def _maker(self, atom: Atom) -> Op | None:
        """The operation of this program that makes a value, views included."""
        if not isinstance(atom, int):
            return None
        return self.lazy[atom][0] if atom in self.lazy else self.producers.get(atom)

    def _is_run_in_groups(self, op: Op) -> bool:
        """Whether each device runs its part of a convolution in groups; XLA has those with a rule of the user's."""
        return is_grouped(op) and self.context.rules[op.signature].origin != "user"

    def _bind_partial(self, op: Op, operands: Sequence[Any], leads: Sequence[Sequence[int]]) -> list[Any]:
        """A linear operation on partial sums: batched over their leading dimensions."""

        def batched(*operands: Any) -> tuple[Any, ...]:
            return tuple(jax_compat.bind(op.equation, operands))

        axes = tuple(0 if lead else None for lead in leads)
        for _ in max(leads, key=len):
            batched = jax.vmap(batched, in_axes=axes)
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            return list(batched(*operands))

    def _bind(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        if op.name == "sharding_constraint":
            return list(operands)  # a pin: the value's planned layout is the same constraint
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            if op.name == "reduce":
                # XLA loses the value that the reduction begins with where its operand is joined from pieces of one
                # element, also in plain `jax.jit` (jaxlib 0.10.2 and 0.12.0, CPU)
                operands = jax.lax.optimization_barrier(tuple(operands))
            results = list(binding(self.context, op)(operands))
            return [_with_nan(op, operands[0], results[0])] if self.context.may_lose_nan(op) else results

    def _store(self, op: Op, results: Sequence[Any], lead: Sequence[int] = ()) -> None:
        """Stores results in their planned layouts; `lead`: mesh axes that are leading dimensions of the arrays."""
        for position, (value, array) in enumerate(zip(op.outputs, results, strict=True)):
            layout = self.context.stage.values.get(value)
            if layout is not None:
                with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
                    array = self._constrain_result(op, position, array, lead, layout)
            self.arrays[value] = array
            self.producers[value] = op

    def _store_folded(self, op: Op, operands: Sequence[Any], transpose: Op) -> None:
        """Stores the transpose of a product: the product of its operands, swapped."""
        value = transpose.outputs[0]
        (lhs_c, rhs_c), (lhs_b, rhs_b) = op.params["dimension_numbers"]
        precision = op.params["precision"]
        swapped = {
            "dimension_numbers": ((rhs_c, lhs_c), (rhs_b, lhs_b)),
            "precision": precision[::-1] if isinstance(precision, tuple) else precision,
        }
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            array = op.equation.primitive.bind(operands[1], operands[0], **{**op.params, **swapped})
            unreduced = transposed_layout(self.context.unreduced(op, 0, ()), transpose)
            self.arrays[value] = self._reduce_and_constrain(op, array, unreduced, self.context.stage.values[value])
        self.producers[value] = transpose
        self.folded.add(transpose.index)

    def _constrain_result(self, op: Op, position: int, array: Any, lead: Sequence[int], layout: Layout) -> Any:
        """A result in its planned layout, reduced in the order that the plan's cost assumes."""
        if op.regions or op.name in RAGGED_PRODUCTS:  # reduced per device, if at all
            return self.context.constrain(array, layout)
        unreduced = self.context.unreduced(op, position, lead)
        return self._reduce_and_constrain(op, self.context.reduce_partials(array, lead, layout), unreduced, layout)

    def _reduce_and_constrain(self, op: Op, array: Any, unreduced: Layout, layout: Layout) -> Any:
        """An array with the layout `unreduced`, reduced and constrained to its planned layout."""
        if not any(s == PARTIAL != t for s, t in zip(unreduced, layout, strict=True)):
            return self.context.constrain(array, layout)
        return self.context.constrain_along_route(array, unreduced, layout, after_dot=op.name == "dot_general")

    # Reading

    def read(self, atom: Atom, site: str, reader: Op) -> Any:
        """The array of an operand, in the layout that the plan gives this use."""
        if not isinstance(atom, int):
            return atom.value
        stage = self.context.stage
        if atom in self.lazy:
            return self.materialise(atom, stage.uses.get(site, replicated(len(self.context.names))), site, reader)
        layout = stage.values.get(atom)
        if layout is None:
            return self.arrays[atom]
        return self.in_layout(atom, stage.uses.get(site, layout), site, reader)

    def in_layout(self, value: int, wanted: Layout, site: str, reader: Op | None) -> Any:
        """A value with a planned layout in another layout, resharded from its shared copy if it has one."""
        stage = self.context.stage
        if wanted == stage.values[value]:
            return self.arrays[value]
        copy = self.copies.get((value, wanted))
        if copy is None:
            array, source = self._resharding_source(value, wanted, site, reader)
            with _tagged(reader, site):
                copy = self.copies[value, wanted] = self.context.reshard(array, source, wanted)
        return copy

    def _resharding_source(self, value: int, wanted: Layout, site: str, reader: Op | None) -> tuple[Any, Layout]:
        """The array from which readers of a value are resharded, and its layout: the shared copy or the value."""
        stage = self.context.stage
        copy = stage.copies.get(value)
        if copy is None or copy == wanted:
            return self.arrays[value], stage.values[value]
        return self.in_layout(value, copy, site, reader), copy

    def materialise(self, value: int, wanted: Layout, site: str, reader: Op) -> Any:
        """A free value or a view, computed in the layout `wanted`.

        Dimensions along which its operation cannot be sharded are computed whole. Left to XLA, a pad between elements
        gives a wrong result where it is sharded (tested on JAX 0.10.2 and 0.12.0, CPU).
        """
        copy = self.copies.get((value, wanted))
        if copy is not None:
            return copy
        op, position = self.lazy[value]
        rule = self.context.rules[op.signature]
        factors = [rule.results[position][d] if d >= 0 else d for d in wanted]
        computed = tuple(REPLICATED if f in rule.need_replication else d for d, f in zip(wanted, factors, strict=True))
        if PARTIAL in wanted:  # zeros, to which summands are added: as many as there are devices along these axes
            whole = self.materialise(value, tuple(max(d, REPLICATED) for d in wanted), site, reader)
            array = jax.numpy.broadcast_to(whole, self.context.summands_shape(value, wanted))
        elif computed != wanted:
            array = self.materialise(value, computed, site, reader)
        else:
            operands = [
                self._lazy_operand(atom, dims, factors, f"{op.tag}.in{k}", op)
                for k, (atom, dims) in enumerate(zip(op.inputs, rule.operands, strict=True))
            ]
            array = self._bind(op, operands)[position]
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            copy = self.copies[value, wanted] = self.context.constrain(array, wanted)
        return copy

    def _lazy_operand(self, atom: Atom, dims: Sequence[int], factors: Sequence[int], site: str, op: Op) -> Any:
        if not isinstance(atom, int):
            return atom.value
        shape = self.context.graph.types[atom].shape
        position = {f: d for d, f in enumerate(dims) if shape[d] > 1}
        wanted = tuple(position.get(f, -1) if f >= 0 else f for f in factors)
        if atom in self.lazy:
            return self.materialise(atom, wanted, site, op)
        return self.in_layout(atom, wanted, site, op) if atom in self.context.stage.values else self.arrays[atom]

    def output(self, position: int, atom: Atom, layout: Layout) -> Any:
        """Result `position` of the program."""
        if not isinstance(atom, int):
            return jax.numpy.asarray(atom.value)  # typed by JAX, weakly where the function's result is
        site = f"out{position}"
        stage = self.context.stage
        if atom in self.lazy:
            return self.materialise(atom, layout, site, self.lazy[atom][0])
        if atom not in stage.values:
            return self.arrays[atom]
        return self.in_layout(atom, layout, site, self.producers.get(atom))

    # Regions

    def emit_region(self, region: Region, arrays: Sequence[Any]) -> Emitter:
        """Emits a region on these inputs, constrained to their planned layouts; returns its emitter."""
        emitter = Emitter(self.context, {})
        for value, array in zip(region.inputs, arrays, strict=True):
            emitter.define(value, array, "enter")
        for value, array in region.constants:
            emitter.define(value, array, "constant")
        emitter.run(region.ops)
        return emitter

    def _leave(self, op: Op, region: Region, emitter: Emitter) -> list[Any]:
        return [emitter.read(a, f"{op.tag}.{region.name}.out{j}", op) for j, a in enumerate(region.outputs)]

    def _run_region(self, op: Op) -> None:
        operands = [self.read(atom, f"{op.tag}.in{k}", op) for k, atom in enumerate(op.inputs)]
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            results = _REGIONS[op.name](self, op, operands)
        self._store(op, results)

    def _body(self, op: Op, region: Region) -> control_flow.BodyFunction:
        return lambda arrays: self._leave(op, region, self.emit_region(region, arrays))

    def scan(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        results = control_flow.scan(op, operands, self._body(op, op.regions[0]))
        for j in range(jax_compat.scan_counts(op.params)[1], len(results)):
            lead = partial_axes(self.context.stage.values.get(op.outputs[j]))
            if lead:  # the loop's dimension comes before those of partial sums
                results[j] = jax.lax.transpose(results[j], _move_first_behind(len(lead), results[j].ndim))
        return results

    def while_loop(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        test, body = op.regions
        batched = self.context.graph.type_of(test.outputs[0]).rank > 0
        return control_flow.while_loop(op, operands, self._body(op, test), self._body(op, body), batched=batched)

    def cond(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        return control_flow.cond(operands, [self._body(op, region) for region in op.regions])

    def remat(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        body = self._body(op, op.regions[0])
        return jax_compat.rematerialised(op.equation, lambda *arrays: tuple(body(arrays)), operands)


def _tagged(op: Op | None, site: str) -> contextlib.AbstractContextManager[Any]:
    """Equations bound inside get the name of a site, and the source line of the operation if there is one."""
    if op is None:
        return jax.named_scope(site)
    return jax_compat.emitting(op.equation.source_info, op.name_stack, site)


def _with_nan(op: Op, operand: Any, extremum: Any) -> Any:
    """The maximum or minimum of an operand, NaN where any element is NaN: a boolean reduction finds those."""
    any_nan = jax.lax.reduce_or(operand != operand, op.params["axes"])
    return jax.lax.select(any_nan, jax.lax.full_like(extremum, float("nan")), extremum)


def _move_first_behind(count: int, rank: int) -> tuple[int, ...]:
    """The permutation that moves the first dimension behind the next `count`."""
    return (*range(1, count + 1), 0, *range(count + 1, rank))


_REGIONS: Mapping[str, Callable[[Emitter, Op, Sequence[Any]], list[Any]]] = {
    "scan": Emitter.scan,
    "while": Emitter.while_loop,
    "cond": Emitter.cond,
    jax_compat.REMAT: Emitter.remat,
}
