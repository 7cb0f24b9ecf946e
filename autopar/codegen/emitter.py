"""Emits the operations of one program, while JAX traces it: operands read in planned layouts, results constrained."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex

from autopar import jax_compat
from autopar.codegen.context import Context
from autopar.codegen.fold_transpose import transposed_layout
from autopar.codegen.partial_sums import SPLITS
from autopar.codegen.start_indices import clamp_start_indices
from autopar.errors import RuleError
from autopar.ir import control_flow
from autopar.ir.graph import Atom, Op, Region
from autopar.ir.layout import PARTIAL, REPLICATED, Layout, partial_axes, replicated, spec
from autopar.ir.op_sets import ATTENTION, RAGGED_PRODUCTS
from autopar.rules import SHARD_MAPPED, context_parallel, cudnn, pallas, partitioned, ragged
from autopar.rules.manual import MANUAL

Specs = tuple[jax.sharding.PartitionSpec, ...]


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
        values = self.context.stage.values
        types = self.context.graph.types
        return bool(op.outputs) and all(types[v].rank and v not in values for v in op.outputs)

    def _run_leaf(self, op: Op) -> None:
        operands = clamp_start_indices(op, [self.read(atom, f"{op.tag}.in{k}", op) for k, atom in enumerate(op.inputs)])
        leads = [partial_axes(self.context.layout_at(atom, f"{op.tag}.in{k}")) for k, atom in enumerate(op.inputs)]
        kept = partial_axes(self.context.stage.values.get(op.outputs[0])) if op.outputs else []
        transpose = self.context.folded_transposes.get(op.outputs[0]) if op.name == "dot_general" else None
        if transpose is not None and transpose.index in self.op_indices and not any(leads):
            self._store_folded(op, operands, transpose)
        elif any(leads):
            self._store(op, self._bind_partial(op, operands, leads), max(leads, key=len))
        elif kept:
            self._store(op, [SPLITS[op.name](self.context, op, operands, kept)], kept)
        else:
            self._store(op, self._bind(op, operands))

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
            emit = _LOCAL.get(op.name, _bind_locally if op.name in SHARD_MAPPED else None)
            bind = partial(jax_compat.bind, op.equation) if emit is None else emit(self.context, op)
            results = list(bind(operands))
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


def _bind_locally(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds an operation per device, in `jax.shard_map`.

    XLA would gather the operands. It cannot partition a Pallas kernel: that runs per device even if it is not cut. The
    local call of a kernel with a rule of the user's is not known; it is left to XLA.
    """
    unsharded, names = replicated(len(context.names)), context.names
    operand_layouts = [context.read_layout(atom, f"{op.tag}.in{k}") for k, atom in enumerate(op.inputs)]
    result_layouts = [context.unreduced(op, position, ()) for position in range(len(op.outputs))]
    bind: Callable[[Sequence[Any]], Sequence[Any]] = partial(jax_compat.bind, op.equation)
    is_kernel = op.name == "pallas_call"
    if is_kernel and context.rules[op.signature].origin == "user":
        return bind
    if not is_kernel and all(layout == unsharded for layout in result_layouts):
        return bind
    ranks = [context.graph.type_of(atom).rank for atom in op.inputs]
    in_specs = tuple(spec(layout, rank, names) for layout, rank in zip(operand_layouts, ranks, strict=True))
    types = [context.graph.types[v] for v in op.outputs]
    out_specs = tuple(spec(layout, t.rank, names) for layout, t in zip(result_layouts, types, strict=True))
    if is_kernel:
        parts = [_part(context, t.shape, layout) for layout, t in zip(result_layouts, types, strict=True)]
        bind = partial(pallas.bind_part, op.equation, parts, specs=in_specs)
    if op.name == "fft" and context.on_cpu:
        bind = partial(_bind_in_order, op)
    return _shard_mapped(context, lambda *shards: bind(shards), in_specs, out_specs)


def _bind_in_order(op: Op, operands: Sequence[Any]) -> list[Any]:
    """Binds an operation whose operands and results are in memory with their dimensions in order.

    XLA may give those of a Fourier transform another order, in which its kernel for CPU fails (JAX 0.10.2).
    """
    in_order = jax_compat.in_row_major_order
    return [in_order(x) for x in jax_compat.bind(op.equation, [in_order(x) for x in operands])]


def _shard_mapped(
    context: Context, run: Callable[..., Sequence[Any]], in_specs: Specs, out_specs: Specs
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function of a device's shards as one of whole operands."""
    local = jax.shard_map(
        lambda *shards: tuple(run(*shards)),
        mesh=context.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
    return lambda operands: local(*operands)


def _bind_partitioned(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds an operation with `custom_partitioning`: its own `partition` says what each device runs.

    Left to XLA, `partition` gets whatever shardings reach the operation, and fails where its rule does not give them.
    Here they are those of the rule: operands in any other layout are resharded first, results afterwards. Where nothing
    is cut, each device runs the function on whole operands.
    """
    rule = context.rules[op.signature]
    axes = _cut_factors(context, op)
    operands, results = partitioned.specs(rule.operands, axes), partitioned.specs(rule.results, axes)
    if not axes:
        return _shard_mapped(context, jex.jaxpr_as_fun(op.params["call"]), operands, results)
    try:
        call = partitioned.local_call(partitioned.Partitioned.of(op.params), context.mesh, operands, results)
    except RuleError as error:
        name = partitioned.name(op.params)
        raise RuleError(
            f"{name}{f' at {op.source}' if op.source else ''} cannot be cut as its sharding_rule says: operands as "
            f"{', '.join(map(str, operands))} on the mesh {dict(context.mesh.shape)}: {error}. Name what it cannot cut "
            f"in need_replication_factors, or with autopar.register_rule('{name}', ...)"
        ) from error
    return _shard_mapped(context, call.run, call.operands, call.results)


def _bind_attention(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds cuDNN's attention per device; results that lack a factor which is cut are combined there."""
    rule, axes = context.rules[op.signature], _cut_factors(context, op)
    along = tuple(name for name, factor in axes.items() if factor == cudnn.POSITIONS)
    devices = math.prod(context.mesh.shape[name] for name in along)

    def bind(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
        return jax_compat.bind(op.equation.replace(params=dict(params)), operands)

    def run(*shards: Any) -> list[Any]:
        if along:
            ways = {"gather": cudnn.gathers(rule), "ring": op.tag in context.stage.rings}
            results = context_parallel.run(op.name, bind, op.params, shards, along, devices, **ways)
        else:
            results = bind(shards, op.params)
        for i, dims in enumerate(rule.results):
            lacking = tuple(name for name, factor in axes.items() if factor not in dims)
            combine = {"sum": jax.lax.psum, "max": jax.lax.pmax}.get(cudnn.combined(op.name, i) or "")
            if lacking and combine is not None:
                results[i] = combine(results[i], lacking)
        return results

    return _shard_mapped(context, run, partitioned.specs(rule.operands, axes), partitioned.specs(rule.results, axes))


def _bind_ragged(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds a product over groups of rows per device, on the groups of its rows; partial sums are reduced there.

    What is cut by a rule of the user's is left to XLA.
    """
    rule, axes = context.rules[op.signature], _cut_factors(context, op)
    if not axes or rule.origin == "user":
        return partial(jax_compat.bind, op.equation)
    dimension = ragged.ragged_dimension(op.params)
    rows = tuple(name for name, factor in axes.items() if factor == rule.operands[0][dimension])
    summed = tuple(name for name, factor in axes.items() if factor in rule.reduced)
    (result,) = rule.results
    layout = [result.index(axes[name]) if axes.get(name) in result else REPLICATED for name in context.names]
    scattered = _scattered(context, op, layout, summed)
    if scattered != REPLICATED:
        layout[context.names.index(summed[0])] = scattered

    def run(left: Any, right: Any, sizes: Any) -> list[Any]:
        if rows:
            sizes = ragged.block_sizes(sizes, jax.lax.axis_index(rows), left.shape[dimension])
        (product,) = jax_compat.bind(op.equation, (left, right, sizes))
        if scattered != REPLICATED:
            return [jax.lax.psum_scatter(product, summed, scatter_dimension=scattered, tiled=True)]
        return [jax.lax.psum(product, summed) if summed else product]

    out_specs = (spec(tuple(layout), len(result), context.names),)
    return _shard_mapped(context, run, partitioned.specs(rule.operands, axes), out_specs)


def _scattered(context: Context, op: Op, layout: Sequence[int], summed: Sequence[str]) -> int:
    """The dimension of a result onto which its partial sums over one mesh axis are scattered; REPLICATED: none.

    `layout`: of the result before.
    """
    planned = context.stage.values.get(op.outputs[0])
    if planned is None or len(summed) != 1:
        return REPLICATED
    axis = context.names.index(summed[0])
    onto = planned[axis]
    same = [a for a, dim in enumerate(layout) if dim == onto]
    parts = math.prod(context.mesh.shape[context.names[a]] for a in (*same, axis))
    even = onto >= 0 and not context.graph.types[op.outputs[0]].shape[onto] % parts
    return onto if even and all(a < axis for a in same) else REPLICATED


def _bind_manual(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds a `shard_map` of the user's on the devices of the plan."""
    return partial(jax_compat.bind_on_mesh, op.equation, context.mesh)


def _cut_factors(context: Context, op: Op) -> dict[str, int]:
    """Name of a mesh axis -> the factor of an operation that the layouts of its operands cut along it."""
    rule = context.rules[op.signature]
    axes: dict[str, int] = {}
    for k, (atom, dims) in enumerate(zip(op.inputs, rule.operands, strict=True)):
        for name, dim in zip(context.names, context.read_layout(atom, f"{op.tag}.in{k}"), strict=True):
            if dim >= 0 and dims[dim] in rule.free:
                axes.setdefault(name, dims[dim])
    # A `shard_map` takes equal parts alone: axes are taken in their order as long as the factor divides by all of them.
    shards: dict[int, int] = {}
    for name, factor in list(axes.items()):
        shards[factor] = shards.get(factor, 1) * context.mesh.shape[name]
        if rule.sizes[factor] % shards[factor]:
            del axes[name]
            shards[factor] //= context.mesh.shape[name]
    return axes


def _part(context: Context, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The shape of a device's part of an array that is cut evenly."""
    part = list(shape)
    for name, dim in zip(context.names, layout, strict=True):
        if dim >= 0:
            part[dim] //= context.mesh.shape[name]
    return tuple(part)


def _move_first_behind(count: int, rank: int) -> tuple[int, ...]:
    """The permutation that moves the first dimension behind the next `count`."""
    return (*range(1, count + 1), 0, *range(count + 1, rank))


#: Operation -> how it is bound per device, if not as it is.
_LOCAL: Mapping[str, Callable[[Context, Op], Callable[[Sequence[Any]], Sequence[Any]]]] = {
    "custom_partitioning": _bind_partitioned,
    **dict.fromkeys(ATTENTION, _bind_attention),
    **dict.fromkeys(RAGGED_PRODUCTS, _bind_ragged),
    MANUAL: _bind_manual,
}

_REGIONS: Mapping[str, Callable[[Emitter, Op, Sequence[Any]], list[Any]]] = {
    "scan": Emitter.scan,
    "while": Emitter.while_loop,
    "cond": Emitter.cond,
    jax_compat.REMAT: Emitter.remat,
}
