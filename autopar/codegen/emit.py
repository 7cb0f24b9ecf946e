"""From a plan and its graph to one sharded jit program.

Every equation is bound again inside `jax.jit`, with

- a sharding constraint on every value of rank >= 1 that has a planned layout (with fewer constraints the compiler's
  propagation spreads other layouts through the unconstrained operations: up to 2.1 times the bytes were measured);
- a product that only a transpose reads emitted with its operands swapped, in place of both
  (`autopar.codegen.fold_transpose`);
- a constrained copy where a use needs another layout than its value has, one per (value, layout);
- values without a planned layout (free values and views) computed where they are used, once per layout;
- operations that XLA would gather bound per device inside `jax.shard_map` (`autopar.rules.SHARD_MAPPED`);
- loops and rematerialised bodies rebuilt, with their bodies emitted in the same way;
- offloaded state copied to device memory at the start of the program, and back at its end. The compiler decides when
  the copies run: libtpu prefetches as early as memory allows.

Each binding keeps the user's source line and carries the tag of its operation ("op12", "op12.in0", "out3") in its name
stack, so that each instruction of the compiled program can be traced back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.codegen.fold_transpose import folded_transposes, transposed_layout
from autopar.codegen.start_indices import clamp_start_indices
from autopar.ir import control_flow
from autopar.ir.graph import Atom, Graph, Op, Region
from autopar.ir.layout import PARTIAL, REPLICATED, Layout, ProgramLayouts, partial_axes, replicated, route, spec, steps
from autopar.ir.op_sets import LAPACK
from autopar.ir.train_state import match_state
from autopar.passes.op_groups.reduction_lowering import first_stage
from autopar.plans.plan import Plan, Stage
from autopar.rules import SHARD_MAPPED, Rule

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True, eq=False)
class Program:
    """A function of flat argument leaves, and the shardings to jit it with."""

    function: Callable[..., tuple[Any, ...]]
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    donated: tuple[int, ...]

    def jit(self) -> Any:
        """The jitted function of flat leaves."""
        return jax.jit(
            self.function,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.donated,
            keep_unused=True,
        )


def program(graph: Graph, plan: Plan, rules: Mapping[int, Rule], mesh: AnyMesh) -> Program:
    """The sharded program of a plan with a single stage on a concrete or abstract mesh."""
    stage = plan.stages[0]
    context = Context(graph, stage, rules, mesh, plan.mesh_names)

    inputs, outputs = in_shardings(plan, mesh), _out_shardings(graph, plan, mesh)

    def function(*leaves: Any) -> tuple[Any, ...]:
        fetched = (_to_memory(x, s, jax_compat.DEVICE_MEMORY) for x, s in zip(leaves, inputs, strict=True))
        emitter = Emitter(context, dict(zip(graph.inputs, fetched, strict=True)))
        for value, array in graph.constants:
            emitter.define(value, array, "constant")
        emitter.run(graph.ops)
        results = (emitter.output(i, atom, plan.outputs[i]) for i, atom in enumerate(graph.outputs))
        return tuple(_to_memory(x, s, jax_compat.HOST_MEMORY) for x, s in zip(results, outputs, strict=True))

    return Program(function, inputs, outputs, plan.donated)


def in_shardings(plan: Plan, mesh: AnyMesh) -> tuple[NamedSharding, ...]:
    """Shardings of the argument leaves between steps on one mesh, memory kind included."""
    return tuple(_sharding(mesh, s, i in plan.offloaded) for i, s in enumerate(plan.in_specs()))


def _out_shardings(graph: Graph, plan: Plan, mesh: AnyMesh) -> tuple[NamedSharding, ...]:
    """Shardings of the results: the next value of an offloaded argument is offloaded too."""
    offloaded = {out for out, position in match_state(graph).items() if position in plan.offloaded}
    return tuple(_sharding(mesh, s, i in offloaded) for i, s in enumerate(plan.out_specs()))


def _sharding(mesh: AnyMesh, partition: PartitionSpec, offloaded: bool) -> NamedSharding:
    return NamedSharding(mesh, partition, memory_kind=jax_compat.HOST_MEMORY if offloaded else None)


def _to_memory(array: Any, sharding: NamedSharding, memory: str) -> Any:
    """An offloaded array (by its sharding between steps) copied to memory of this kind; any other unchanged."""
    if sharding.memory_kind != jax_compat.HOST_MEMORY:
        return array
    with jax.named_scope("offload"):
        return jax.device_put(array, sharding.with_memory_kind(memory))


def compiler_options(plan: Plan, graph: Graph, platform: str) -> Mapping[str, str]:
    """XLA options that the program of a plan without stages needs.

    XLA's CPU compiler removes optimization barriers before it schedules, and then rematerialises values at once instead
    of in the backward pass. Without that pass it keeps the barriers. Tested on jaxlib 0.10.2.
    """
    barriers = {"xla_disable_hlo_passes": "cse_barrier_expander"} if plan.remat and platform == "cpu" else {}
    return {**barriers, **kernel_options(graph, platform)}


def kernel_options(graph: Graph, platform: str) -> Mapping[str, str]:
    """XLA options that programs with LAPACK kernels need on CPU.

    A LAPACK kernel splits a batch over the thread pool that all CPU devices share, and blocks one of its threads until
    the batch is done. In breadth-first order the kernels of several devices can block all threads, and the step never
    ends. The memory-optimized scheduler does not run such kernels concurrently. Tested on jaxlib 0.10.2 and 0.12.0.
    """
    waits = platform == "cpu" and any(op.name in LAPACK for op in graph.walk())
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if waits else {}


def unreduced_layout(layout: Layout) -> Layout:
    """The layout of the array that represents a partial sum, which has a leading dimension per partial axis."""
    lead = partial_axes(layout)
    return tuple(lead.index(a) if d == PARTIAL else d + len(lead) if d >= 0 else d for a, d in enumerate(layout))


@dataclass(frozen=True, eq=False)
class Context:
    """Plan, rules and mesh of one program, shared by the emitters of its regions."""

    graph: Graph
    stage: Stage | ProgramLayouts
    rules: Mapping[int, Rule]
    mesh: AnyMesh
    names: tuple[str, ...]

    @cached_property
    def folded_transposes(self) -> Mapping[int, Op]:
        """Products that are emitted with swapped operands -> the transposes that read them."""
        return folded_transposes(self.graph, self.stage)

    @cached_property
    def loses_nan(self) -> bool:
        """Whether maxima are combined by XLA's all-reduce on CPU, which drops NaN in some orders (0.10 and 0.12)."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    def constrain(self, array: Any, layout: Layout) -> Any:
        """Constrain an array to a layout; one leading dimension per axis along which it is partial."""
        sharding = NamedSharding(self.mesh, spec(unreduced_layout(layout), array.ndim, self.names))
        return jax.lax.with_sharding_constraint(array, sharding)

    def reshard(self, array: Any, source: Layout, target: Layout) -> Any:
        """An array with layout `source`, resharded to `target` in the steps that the plan's cost assumes.

        Axes that are partial in the source and not in the target are summed over their leading dimensions first.
        """
        return self.constrain_along_route(self.reduce_partials(array, partial_axes(source), target), source, target)

    def reduce_partials(self, array: Any, lead: Sequence[int], target: Layout) -> Any:
        """An array summed over its leading dimensions for axes of `lead` that are not partial in `target`.

        If all leading dimensions are summed, they are first merged into one, so that the compiler reduces over all
        their axes in one collective.
        """
        summed = [i for i, axis in enumerate(lead) if target[axis] != PARTIAL]
        if len(summed) > 1 and len(summed) == len(lead):
            array = array.reshape(-1, *array.shape[len(lead) :])
            names = tuple(self.names[axis] for axis in lead)
            rest = [PartitionSpec.UNCONSTRAINED] * (array.ndim - 1)
            array = jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec(names, *rest)))
            summed = [0]
        return jax_compat.reduce_sum(array, summed) if summed else array

    def constrain_along_route(self, array: Any, source: Layout, target: Layout, *, after_dot: bool = False) -> Any:
        """Constrain an array to each layout of its route, the target last.

        An all-to-all starts from a separate copy constrained to `source`: where a dot reads the same array, XLA loses
        its mesh axes and would all-gather it (jaxlib 0.12; docs/benchmarks/layout-changes.md).

        Args:
            array: the array.
            source: its layout.
            target: the layout wanted.
            after_dot: the array is the unreduced result of a dot, whose reduction may take two steps.
        """
        sizes = tuple(self.mesh.shape[name] for name in self.names)
        first = first_stage(source, target, sizes) if after_dot else ()
        moves = steps(source, target, sizes)
        start = (source,) if moves and moves[0].kind == "all-to-all" else ()
        for stop in (*start, *(first or route(source, target, sizes)), target):
            array = self.constrain(array, stop)
        return array


def _with_nan(op: Op, operand: Any, extremum: Any) -> Any:
    """The maximum or minimum of an operand, NaN where any element is NaN: a boolean reduction finds those."""
    any_nan = jax.lax.reduce_or(operand != operand, op.params["axes"])
    return jax.lax.select(any_nan, jax.lax.full_like(extremum, float("nan")), extremum)


def _tagged(op: Op | None, site: str) -> contextlib.AbstractContextManager[Any]:
    """Equations bound inside get the name of a site, and the source line of the operation if there is one."""
    if op is None:
        return jax.named_scope(site)
    return jax_compat.emitting(op.equation.source_info, op.name_stack, site)


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
        leads = [partial_axes(self._layout_at(atom, f"{op.tag}.in{k}")) for k, atom in enumerate(op.inputs)]
        kept = partial_axes(self.context.stage.values.get(op.outputs[0])) if op.outputs else []
        transpose = self.context.folded_transposes.get(op.outputs[0]) if op.name == "dot_general" else None
        if transpose is not None and transpose.index in self.op_indices and not any(leads):
            self._store_folded(op, operands, transpose)
        elif any(leads):
            self._store(op, self._bind_partial(op, operands, leads), max(leads, key=len))
        elif kept:
            self._store(op, [_SPLITS[op.name](self, op, operands, kept)], kept)
        else:
            self._store(op, self._bind(op, operands))

    def _layout_at(self, atom: Atom, site: str) -> Layout | None:
        """The layout of an operand at a site; None for literals, scalars, free values and views."""
        if not isinstance(atom, int) or atom not in self.context.stage.values:
            return None
        return self.context.stage.uses.get(site, self.context.stage.values[atom])

    def _read_layout(self, atom: Atom, site: str) -> Layout:
        """The layout in which an operand is read at a site; free values and views are computed in it."""
        layout = self._layout_at(atom, site)
        return self.context.stage.uses.get(site, replicated(len(self.context.names))) if layout is None else layout

    def _bind_partial(self, op: Op, operands: Sequence[Any], leads: Sequence[Sequence[int]]) -> list[Any]:
        """A linear operation on partial sums: batched over their leading dimensions."""

        def batched(*operands: Any) -> tuple[Any, ...]:
            return tuple(jax_compat.bind(op.equation, operands))

        axes = tuple(0 if lead else None for lead in leads)
        for _ in max(leads, key=len):
            batched = jax.vmap(batched, in_axes=axes)
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            return list(batched(*operands))

    def split_product(self, op: Op, operands: Sequence[Any], kept: Sequence[int]) -> Any:
        """A product left unreduced along the axes `kept`: the contracted dimension is split,

            sum_k a[.., k] b[k, ..]  ->  [sum_{k in part p} a[.., k] b[k, ..]  for p in parts]

        and the parts form a batch dimension that is sharded along the axis.
        """
        (lhs_c, rhs_c), (lhs_b, rhs_b) = op.params["dimension_numbers"]
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            lhs, lhs_dims = self._split(op, 0, operands[0], lhs_c, lhs_b, kept)
            rhs, rhs_dims = self._split(op, 1, operands[1], rhs_c, rhs_b, kept)
            numbers = ((lhs_dims[0], rhs_dims[0]), (lhs_dims[1], rhs_dims[1]))
            return op.equation.primitive.bind(lhs, rhs, **{**op.params, "dimension_numbers": numbers})

    def split_sum(self, op: Op, operands: Sequence[Any], kept: Sequence[int]) -> Any:
        """A reduce_sum left unreduced along the axes `kept`, in the same way."""
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            array, (rest, lead) = self._split(op, 0, operands[0], op.params["axes"], (), kept)
            trailing = [d for d in range(array.ndim) if d not in lead]
            array = jax.lax.transpose(array, (*lead, *trailing))
            return jax_compat.reduce_sum(array, [len(lead) + trailing.index(d) for d in rest])

    def split_scatter(self, op: Op, operands: Sequence[Any], kept: Sequence[int]) -> Any:
        """A scatter that adds to zeros, left unreduced along the axes `kept`: each part is scattered by itself."""
        rule = self.context.rules[op.signature]
        parts: list[Any] = []
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            for k in (1, 2):
                summed = [d for d, factor in enumerate(rule.operands[k]) if factor in rule.reduced]
                array, dim_of, new_dims = self._split_axes(op, k, operands[k], summed)
                axes = [a for a, p in enumerate(dim_of) if any(p in new_dims[d][:-1] for d in summed)]
                axes.sort(key=lambda a: (a not in kept, a))
                lead = [dim_of[a] for a in axes]
                parts.append(jax.lax.transpose(array, (*lead, *(d for d in range(array.ndim) if d not in lead))))

            def scatter(indices: Any, updates: Any) -> Any:
                return jax_compat.bind(op.equation, [operands[0], indices, updates])[0]

            for _ in axes:
                scatter = jax.vmap(scatter)
            return jax_compat.reduce_sum(scatter(*parts), range(len(kept), len(axes)))

    def _split(
        self, op: Op, k: int, array: Any, contracted: Sequence[int], batch: Sequence[int], kept: Sequence[int]
    ) -> tuple[Any, tuple[tuple[int, ...], tuple[int, ...]]]:
        """An operand with its contracted dimensions split by the mesh axes on them, and its new (contracted, batch)."""
        array, dim_of, new_dims = self._split_axes(op, k, array, contracted)
        lead = [dim_of[a] for a in kept]
        rest = tuple(p for dim in contracted for p in new_dims[dim] if p not in lead)
        return array, (rest, (*lead, *(new_dims[dim][0] for dim in batch)))

    def _split_axes(
        self, op: Op, k: int, array: Any, dims: Sequence[int]
    ) -> tuple[Any, tuple[int, ...], Mapping[int, Sequence[int]]]:
        """An operand reshaped so that each mesh axis on one of `dims` has a dimension of its own.

        Returns:
            array: the reshaped operand.
            dim_of: per mesh axis the new dimension that it shards; -1: none.
            new_dims: old dimension -> its new dimensions, those of mesh axes first.
        """
        layout = self._read_layout(op.inputs[k], f"{op.tag}.in{k}")
        sizes = [self.context.mesh.shape[name] for name in self.context.names]
        shape: list[int] = []
        new_dims: dict[int, list[int]] = {}
        dim_of = [-1] * len(sizes)
        for dim, extent in enumerate(array.shape):
            axes = [a for a, d in enumerate(layout) if d == dim]
            split = [a for a in axes if dim in dims]
            for a in split:
                dim_of[a] = len(shape)
                new_dims.setdefault(dim, []).append(len(shape))
                shape.append(sizes[a])
                extent //= sizes[a]
            for a in axes:
                if a not in split:
                    dim_of[a] = len(shape)
            new_dims.setdefault(dim, []).append(len(shape))
            shape.append(extent)
        return self.context.constrain(array.reshape(shape), tuple(dim_of)), tuple(dim_of), new_dims

    def _bind(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        if op.name == "sharding_constraint":
            return list(operands)  # a pin: the value's planned layout is the same constraint
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            bind = self._bind_locally(op) if op.name in SHARD_MAPPED else partial(jax_compat.bind, op.equation)
            results = list(bind(operands))
            return [_with_nan(op, operands[0], results[0])] if self._may_lose_nan(op) else results

    def _may_lose_nan(self, op: Op) -> bool:
        """Whether this is a maximum or minimum of floats over a sharded dimension, combined by XLA:CPU's all-reduce."""
        if op.name not in ("reduce_max", "reduce_min") or not self.context.loses_nan:
            return False
        sharded = any(dim in op.params["axes"] for dim in self._read_layout(op.inputs[0], f"{op.tag}.in0"))
        return sharded and jax.numpy.issubdtype(self.context.graph.type_of(op.inputs[0]).dtype, jax.numpy.inexact)

    def _bind_locally(self, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """Binds an operation with sharded results per device, in `jax.shard_map`; XLA would gather the operands."""
        unsharded, names = replicated(len(self.context.names)), self.context.names
        operand_layouts = [self._read_layout(atom, f"{op.tag}.in{k}") for k, atom in enumerate(op.inputs)]
        result_layouts = [self._unreduced_layout(op, position, ()) for position in range(len(op.outputs))]
        bind = partial(jax_compat.bind, op.equation)
        if all(layout == unsharded for layout in result_layouts):
            return bind
        ranks = [self.context.graph.type_of(atom).rank for atom in op.inputs]
        in_specs = tuple(spec(layout, rank, names) for layout, rank in zip(operand_layouts, ranks, strict=True))
        out_specs = tuple(
            spec(layout, self.context.graph.types[v].rank, names)
            for layout, v in zip(result_layouts, op.outputs, strict=True)
        )
        local = jax.shard_map(
            lambda *shards: tuple(bind(shards)),
            mesh=self.context.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        return lambda operands: local(*operands)

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
            unreduced, layout = (
                transposed_layout(self._unreduced_layout(op, 0, ()), transpose),
                self.context.stage.values[value],
            )
            self.arrays[value] = self._reduce_and_constrain(op, array, unreduced, layout)
        self.producers[value] = transpose
        self.folded.add(transpose.index)

    def _constrain_result(self, op: Op, position: int, array: Any, lead: Sequence[int], layout: Layout) -> Any:
        """A result in its planned layout, reduced in the order that the plan's cost assumes."""
        if op.regions:
            return self.context.constrain(array, layout)
        unreduced = self._unreduced_layout(op, position, lead)
        return self._reduce_and_constrain(op, self.context.reduce_partials(array, lead, layout), unreduced, layout)

    def _reduce_and_constrain(self, op: Op, array: Any, unreduced: Layout, layout: Layout) -> Any:
        """An array with the layout `unreduced`, reduced and constrained to its planned layout."""
        if not any(s == PARTIAL != t for s, t in zip(unreduced, layout, strict=True)):
            return self.context.constrain(array, layout)
        return self.context.constrain_along_route(array, unreduced, layout, after_dot=op.name == "dot_general")

    def _unreduced_layout(self, op: Op, position: int, lead: Sequence[int]) -> Layout:
        """The layout of a result before its reduction: PARTIAL along axes that shard a reduced factor."""
        rule = self.context.rules[op.signature]
        result = {f: d for d, f in enumerate(rule.results[position])}
        layout = [PARTIAL if axis in lead else REPLICATED for axis in range(len(self.context.names))]
        for k, (atom, dims) in enumerate(zip(op.inputs, rule.operands, strict=True)):
            for axis, dim in enumerate(self._read_layout(atom, f"{op.tag}.in{k}")):
                if dim >= 0:
                    layout[axis] = PARTIAL if dims[dim] in rule.reduced else result.get(dims[dim], layout[axis])
        return tuple(layout)

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
        if computed != wanted:
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


def _move_first_behind(count: int, rank: int) -> tuple[int, ...]:
    """The permutation that moves the first dimension behind the next `count`."""
    return (*range(1, count + 1), 0, *range(count + 1, rank))


_SPLITS: Mapping[str, Callable[[Emitter, Op, Sequence[Any], Sequence[int]], Any]] = {
    "dot_general": Emitter.split_product,
    "reduce_sum": Emitter.split_sum,
    "scatter-add": Emitter.split_scatter,
}

_REGIONS: Mapping[str, Callable[[Emitter, Op, Sequence[Any]], list[Any]]] = {
    "scan": Emitter.scan,
    "while": Emitter.while_loop,
    "cond": Emitter.cond,
    jax_compat.REMAT: Emitter.remat,
}
