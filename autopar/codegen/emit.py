"""From a plan and its graph to one sharded jit program.

Every equation is bound again inside `jax.jit`, with

- a sharding constraint on every homed value of rank >= 1 (constraining fewer lets the compiler's propagation spread
  other layouts through the unconstrained operations: up to 2.1 times the bytes were measured);
- a product that only a transpose reads made the other way round, in place of both (`autopar.codegen.fold_transpose`);
- a constrained copy where a use wants another layout than its value has, one per (value, layout);
- free values and views computed where they are used, once per layout;
- operations that XLA would gather bound to the pieces of each device (`autopar.rules.SHARD_MAPPED`);
- loops and rematerialised bodies rebuilt around the same treatment of their bodies;
- state that waits in the host's memory copied to the device where the program begins, and back where it ends. When the
  copies run is the compiler's choice: libtpu fetches as far ahead as memory lasts.

Each binding keeps the user's source line and carries the tag of its operation ("op12", "op12.in0", "out3") in its name
stack, so that what the compiler emits can be traced back.
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
from autopar.codegen.fold_transpose import permuted, turned
from autopar.codegen.start_indices import in_range
from autopar.ir import control_flow
from autopar.ir.graph import Atom, Graph, Op, Region
from autopar.ir.layout import PARTIAL, REPLICATED, Layout, partial_axes, replicated, route, spec, steps
from autopar.ir.op_sets import LAPACK
from autopar.ir.train_state import match_state
from autopar.passes.op_groups.reduction_lowering import first_stage
from autopar.plans.plan import Plan, Stage
from autopar.rules import SHARD_MAPPED, Rule

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True, eq=False)
class Program:
    """A function of flat argument leaves with the shardings it is to be jitted with."""

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
        fetched = (_moved(x, s, jax_compat.DEVICE_MEMORY) for x, s in zip(leaves, inputs, strict=True))
        scope = Scope(context, dict(zip(graph.inputs, fetched, strict=True)))
        for value, array in graph.constants:
            scope.define(value, array, "constant")
        scope.run(graph.ops)
        results = (scope.output(i, atom, plan.outputs[i]) for i, atom in enumerate(graph.outputs))
        return tuple(_moved(x, s, jax_compat.HOST_MEMORY) for x, s in zip(results, outputs, strict=True))

    return Program(function, inputs, outputs, plan.donated)


def in_shardings(plan: Plan, mesh: AnyMesh) -> tuple[NamedSharding, ...]:
    """Where the argument leaves lie between steps, on one mesh and in which memory."""
    return tuple(_placed(mesh, s, i in plan.offloaded) for i, s in enumerate(plan.in_specs()))


def _out_shardings(graph: Graph, plan: Plan, mesh: AnyMesh) -> tuple[NamedSharding, ...]:
    """Where the results lie: what follows an argument that waits in the host's memory waits there too."""
    hosted = {out for out, position in match_state(graph).items() if position in plan.offloaded}
    return tuple(_placed(mesh, s, i in hosted) for i, s in enumerate(plan.out_specs()))


def _placed(mesh: AnyMesh, cut: PartitionSpec, hosted: bool) -> NamedSharding:
    return NamedSharding(mesh, cut, memory_kind=jax_compat.HOST_MEMORY if hosted else None)


def _moved(array: Any, home: NamedSharding, memory: str) -> Any:
    """An array whose home is the host's memory, in the memory named; others as they are."""
    if home.memory_kind != jax_compat.HOST_MEMORY:
        return array
    with jax.named_scope("offload"):
        return jax.device_put(array, home.with_memory_kind(memory))


def compiler_options(plan: Plan, graph: Graph, platform: str) -> Mapping[str, str]:
    """What the program of a plan without stages must be compiled with.

    XLA's CPU compiler takes barriers out before it decides in which order to run, and then recomputes at once what was
    to be recomputed late; without that pass it keeps them. Tried on jaxlib 0.10.2.
    """
    barriers = {"xla_disable_hlo_passes": "cse_barrier_expander"} if plan.remat and platform == "cpu" else {}
    return {**barriers, **kernel_options(graph, platform)}


def kernel_options(graph: Graph, platform: str) -> Mapping[str, str]:
    """What the programs of a step must be compiled with for the sake of LAPACK.

    On CPU its kernels share a batch out to the threads that all devices have together, and wait for them in one of
    these. Run breadth first, kernels of several devices come to wait in all of the threads, and the step never ends. In
    the order that takes the least memory they do not wait side by side. Tried on jaxlib 0.10.2 and 0.12.0.
    """
    waits = platform == "cpu" and any(op.name in LAPACK for op in graph.walk())
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if waits else {}


def of_parts(layout: Layout) -> Layout:
    """The layout of the array that holds partial sums: one leading dimension per axis along which it is partial."""
    lead = partial_axes(layout)
    return tuple(lead.index(a) if d == PARTIAL else d + len(lead) if d >= 0 else d for a, d in enumerate(layout))


@dataclass(frozen=True, eq=False)
class Context:
    """What all scopes of one program share."""

    graph: Graph
    stage: Stage
    rules: Mapping[int, Rule]
    mesh: AnyMesh
    names: tuple[str, ...]

    @cached_property
    def turned(self) -> Mapping[int, Op]:
        """Products that are made the other way round -> the transposes that read them."""
        return turned(self.graph, self.stage)

    @cached_property
    def loses_nan(self) -> bool:
        """Whether the all-reduce of maxima is XLA's on CPU, which drops NaN in some orders (0.10 and 0.12)."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    def constrain(self, array: Any, layout: Layout) -> Any:
        """Constrain an array to a layout; one leading dimension per axis along which it is partial."""
        sharding = NamedSharding(self.mesh, spec(of_parts(layout), array.ndim, self.names))
        return jax.lax.with_sharding_constraint(array, sharding)

    def move(self, array: Any, source: Layout, target: Layout) -> Any:
        """An array that lies as `source`, brought to `target` by the steps that the plan priced.

        What is partial in the source and not in the target is summed over its leading dimension first.
        """
        return self.along(self.summed(array, partial_axes(source), target), source, target)

    def summed(self, array: Any, lead: Sequence[int], target: Layout) -> Any:
        """An array with the leading dimensions of `lead` that are not to stay partial added up.

        Several are merged into one before, so that the compiler sums over all their axes at once.
        """
        done = [i for i, axis in enumerate(lead) if target[axis] != PARTIAL]
        if len(done) > 1 and len(done) == len(lead):
            array = array.reshape(-1, *array.shape[len(lead) :])
            names = tuple(self.names[axis] for axis in lead)
            rest = [PartitionSpec.UNCONSTRAINED] * (array.ndim - 1)
            array = jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec(names, *rest)))
            done = [0]
        return jax_compat.reduce_sum(array, done) if done else array

    def along(self, array: Any, source: Layout, target: Layout, *, in_stages: bool = False) -> Any:
        """Constrain an array to every layout of the route, the target last; `in_stages`: the sums of a dot end here.

        An exchange starts from an array of its own: XLA forgets the mesh axes of one that a dot reads where it lies,
        and would gather it whole (jaxlib 0.12; docs/design.md, "Resharding").
        """
        sizes = tuple(self.mesh.shape[name] for name in self.names)
        first = first_stage(source, target, sizes) if in_stages else ()
        moves = steps(source, target, sizes)
        start = (source,) if moves and moves[0].kind == "all-to-all" else ()
        for stop in (*start, *(first or route(source, target, sizes)), target):
            array = self.constrain(array, stop)
        return array


def _with_nan(op: Op, operand: Any, found: Any) -> Any:
    """The maximum or minimum of an operand, NaN where an element is: whether one is, is combined as truth values."""
    any_is = jax.lax.reduce_or(operand != operand, op.params["axes"])
    return jax.lax.select(any_is, jax.lax.full_like(found, float("nan")), found)


def _tagged(op: Op | None, site: str) -> contextlib.AbstractContextManager[Any]:
    """Binds what follows under the name of a site, with the source line of an operation if there is one."""
    if op is None:
        return jax.named_scope(site)
    return jax_compat.emitting(op.equation.source_info, op.name_stack, site)


@dataclass(eq=False)
class Scope:
    """Values of one body while it is being traced; a region gets a scope of its own."""

    context: Context
    arrays: dict[int, Any]
    lazy: dict[int, tuple[Op, int]] = field(default_factory=dict)
    copies: dict[tuple[int, Layout], Any] = field(default_factory=dict)
    makers: dict[int, Op] = field(default_factory=dict)
    running: frozenset[int] = frozenset()  # operations of the program that is traced, by index
    done: set[int] = field(default_factory=set)  # transposes whose products were made that way round, by index

    # Definitions

    def define(self, value: int, array: Any, tag: str) -> None:
        layout = self.context.stage.values.get(value)
        with jax.named_scope(tag):
            self.arrays[value] = array if layout is None else self.context.constrain(array, layout)

    def run(self, ops: Sequence[Op]) -> None:
        self.running = frozenset(op.index for op in ops)
        for op in ops:
            if op.index in self.done:
                continue
            if op.regions:
                self._run_region(op)
            elif self.is_lazy(op):
                for position, value in enumerate(op.outputs):
                    self.lazy[value] = (op, position)
            else:
                self._run_leaf(op)

    def is_lazy(self, op: Op) -> bool:
        """Free values and views: nothing in the plan fixes where they live."""
        values = self.context.stage.values
        types = self.context.graph.types
        return bool(op.outputs) and all(types[v].rank and v not in values for v in op.outputs)

    def _run_leaf(self, op: Op) -> None:
        operands = in_range(op, [self.read(atom, f"{op.tag}.in{k}", op) for k, atom in enumerate(op.inputs)])
        leads = [partial_axes(self._layout_at(atom, f"{op.tag}.in{k}")) for k, atom in enumerate(op.inputs)]
        kept = partial_axes(self.context.stage.values.get(op.outputs[0])) if op.outputs else []
        behind = self.context.turned.get(op.outputs[0]) if op.name == "dot_general" else None
        if behind is not None and behind.index in self.running and not any(leads):
            self._store_turned(op, operands, behind)
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
        """The layout in which an operand is read at a site; free values and views are made in it."""
        found = self._layout_at(atom, site)
        return self.context.stage.uses.get(site, replicated(len(self.context.names))) if found is None else found

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
        """A product whose partial sums along the axes `kept` stay: the contracted dimension is split,

            sum_k a[.., k] b[k, ..]  ->  [sum_{k in part p} a[.., k] b[k, ..]  for p in parts]

        with the parts a batch dimension that lies along the axis.
        """
        (lhs_c, rhs_c), (lhs_b, rhs_b) = op.params["dimension_numbers"]
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            lhs, lhs_dims = self._split(op, 0, operands[0], lhs_c, lhs_b, kept)
            rhs, rhs_dims = self._split(op, 1, operands[1], rhs_c, rhs_b, kept)
            numbers = ((lhs_dims[0], rhs_dims[0]), (lhs_dims[1], rhs_dims[1]))
            return op.equation.primitive.bind(lhs, rhs, **{**op.params, "dimension_numbers": numbers})

    def split_sum(self, op: Op, operands: Sequence[Any], kept: Sequence[int]) -> Any:
        """A reduce_sum whose partial sums along the axes `kept` stay, in the same way."""
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            array, (rest, lead) = self._split(op, 0, operands[0], op.params["axes"], (), kept)
            others = [d for d in range(array.ndim) if d not in lead]
            array = jax.lax.transpose(array, (*lead, *others))
            return jax_compat.reduce_sum(array, [len(lead) + others.index(d) for d in rest])

    def split_scatter(self, op: Op, operands: Sequence[Any], kept: Sequence[int]) -> Any:
        """A scatter that adds to zeros, whose partial sums along the axes `kept` stay: each part is scattered apart."""
        rule = self.context.rules[op.signature]
        parts: list[Any] = []
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            for k in (1, 2):
                summed = [d for d, factor in enumerate(rule.operands[k]) if factor in rule.reduced]
                array, placed, home = self._split_axes(op, k, operands[k], summed)
                axes = [a for a, p in enumerate(placed) if any(p in home[d][:-1] for d in summed)]
                axes.sort(key=lambda a: (a not in kept, a))
                lead = [placed[a] for a in axes]
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
        array, placed, home = self._split_axes(op, k, array, contracted)
        lead = [placed[a] for a in kept]
        rest = tuple(p for dim in contracted for p in home[dim] if p not in lead)
        return array, (rest, (*lead, *(home[dim][0] for dim in batch)))

    def _split_axes(
        self, op: Op, k: int, array: Any, dims: Sequence[int]
    ) -> tuple[Any, tuple[int, ...], Mapping[int, Sequence[int]]]:
        """An operand with these dimensions split by the mesh axes on them.

        Also, per axis, the new dimension that it cuts (-1: none), and per old dimension the new ones, the rest last.
        """
        layout = self._read_layout(op.inputs[k], f"{op.tag}.in{k}")
        sizes = [self.context.mesh.shape[name] for name in self.context.names]
        shape: list[int] = []
        home: dict[int, list[int]] = {}
        placed = [-1] * len(sizes)
        for dim, extent in enumerate(array.shape):
            axes = [a for a, d in enumerate(layout) if d == dim]
            split = [a for a in axes if dim in dims]
            for a in split:
                placed[a] = len(shape)
                home.setdefault(dim, []).append(len(shape))
                shape.append(sizes[a])
                extent //= sizes[a]
            for a in axes:
                if a not in split:
                    placed[a] = len(shape)
            home.setdefault(dim, []).append(len(shape))
            shape.append(extent)
        return self.context.constrain(array.reshape(shape), tuple(placed)), tuple(placed), home

    def _bind(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        if op.name == "sharding_constraint":
            return list(operands)  # A pin: the plan's own constraint says the same.
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            bind = self._on_pieces(op) if op.name in SHARD_MAPPED else partial(jax_compat.bind, op.equation)
            made = list(bind(operands))
            return [_with_nan(op, operands[0], made[0])] if self._may_lose_nan(op) else made

    def _may_lose_nan(self, op: Op) -> bool:
        """Whether the maximum or minimum of floats over a dimension that is cut is combined by a faulty all-reduce."""
        if op.name not in ("reduce_max", "reduce_min") or not self.context.loses_nan:
            return False
        cut = any(dim in op.params["axes"] for dim in self._read_layout(op.inputs[0], f"{op.tag}.in0"))
        return cut and jax.numpy.issubdtype(self.context.graph.type_of(op.inputs[0]).dtype, jax.numpy.inexact)

    def _on_pieces(self, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """Binds an operation to what each device has, where that is a piece; XLA would gather the operands."""
        whole, names = replicated(len(self.context.names)), self.context.names
        given = [self._read_layout(atom, f"{op.tag}.in{k}") for k, atom in enumerate(op.inputs)]
        made = [self._unsummed(op, position, ()) for position in range(len(op.outputs))]
        bind = partial(jax_compat.bind, op.equation)
        if all(layout == whole for layout in made):
            return bind
        ranks = [self.context.graph.type_of(atom).rank for atom in op.inputs]
        into = tuple(spec(layout, rank, names) for layout, rank in zip(given, ranks, strict=True))
        out = tuple(
            spec(layout, self.context.graph.types[v].rank, names) for layout, v in zip(made, op.outputs, strict=True)
        )
        local = jax.shard_map(
            lambda *pieces: tuple(bind(pieces)), mesh=self.context.mesh, in_specs=into, out_specs=out, check_vma=False
        )
        return lambda operands: local(*operands)

    def _store(self, op: Op, results: Sequence[Any], lead: Sequence[int] = ()) -> None:
        """Keep results in their layouts; `lead` are the axes that are leading dimensions of the arrays."""
        for position, (value, array) in enumerate(zip(op.outputs, results, strict=True)):
            layout = self.context.stage.values.get(value)
            if layout is not None:
                with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
                    array = self._settle(op, position, array, lead, layout)
            self.arrays[value] = array
            self.makers[value] = op

    def _store_turned(self, op: Op, operands: Sequence[Any], transpose: Op) -> None:
        """Keep the transpose of a product: the product of its operands the other way round."""
        value = transpose.outputs[0]
        (lhs_c, rhs_c), (lhs_b, rhs_b) = op.params["dimension_numbers"]
        precision = op.params["precision"]
        swapped = {
            "dimension_numbers": ((rhs_c, lhs_c), (rhs_b, lhs_b)),
            "precision": precision[::-1] if isinstance(precision, tuple) else precision,
        }
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            array = op.equation.primitive.bind(operands[1], operands[0], **{**op.params, **swapped})
            fresh, layout = permuted(self._unsummed(op, 0, ()), transpose), self.context.stage.values[value]
            self.arrays[value] = self._resolved(op, array, fresh, layout)
        self.makers[value] = transpose
        self.done.add(transpose.index)

    def _settle(self, op: Op, position: int, array: Any, lead: Sequence[int], layout: Layout) -> Any:
        """A result where the plan wants it, its sums resolved in the order that the plan priced."""
        if op.regions:
            return self.context.constrain(array, layout)
        fresh = self._unsummed(op, position, lead)
        return self._resolved(op, self.context.summed(array, lead, layout), fresh, layout)

    def _resolved(self, op: Op, array: Any, fresh: Layout, layout: Layout) -> Any:
        """An array that is partial where `fresh` says so, summed and where the plan wants it."""
        if not any(s == PARTIAL != t for s, t in zip(fresh, layout, strict=True)):
            return self.context.constrain(array, layout)
        return self.context.along(array, fresh, layout, in_stages=op.name == "dot_general")

    def _unsummed(self, op: Op, position: int, lead: Sequence[int]) -> Layout:
        """The layout a result has before its sums are added up: PARTIAL along axes that cut a reduced factor."""
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
        """The array of an operand in the layout that the plan wants at this site."""
        if not isinstance(atom, int):
            return atom.value
        stage = self.context.stage
        if atom in self.lazy:
            return self.materialise(atom, stage.uses.get(site, replicated(len(self.context.names))), site, reader)
        at_home = stage.values.get(atom)
        if at_home is None:
            return self.arrays[atom]
        return self.at(atom, stage.uses.get(site, at_home), site, reader)

    def at(self, value: int, wanted: Layout, site: str, reader: Op | None) -> Any:
        """A homed value in some layout, through its shared copy if it has one."""
        stage = self.context.stage
        if wanted == stage.values[value]:
            return self.arrays[value]
        found = self.copies.get((value, wanted))
        if found is None:
            array, lies = self._nearest(value, wanted, site, reader)
            with _tagged(reader, site):
                found = self.copies[value, wanted] = self.context.move(array, lies, wanted)
        return found

    def _nearest(self, value: int, wanted: Layout, site: str, reader: Op | None) -> tuple[Any, Layout]:
        """What readers of a value start from: its shared copy, or the value itself."""
        stage = self.context.stage
        copy = stage.copies.get(value)
        if copy is None or copy == wanted:
            return self.arrays[value], stage.values[value]
        return self.at(value, copy, site, reader), copy

    def materialise(self, value: int, wanted: Layout, site: str, reader: Op) -> Any:
        """A free value or a view, computed in the layout that is wanted.

        Dimensions along which its operation is not cut are computed whole. Left to XLA, a pad between elements gives
        another result where it is cut (tried on JAX 0.10.2 and 0.12.0, CPU).
        """
        found = self.copies.get((value, wanted))
        if found is not None:
            return found
        op, position = self.lazy[value]
        rule = self.context.rules[op.signature]
        factors = [rule.results[position][d] if d >= 0 else d for d in wanted]
        uncut = tuple(REPLICATED if f in rule.need_replication else d for d, f in zip(wanted, factors, strict=True))
        if uncut != wanted:
            array = self.materialise(value, uncut, site, reader)
        else:
            operands = [
                self._lazy_operand(atom, dims, factors, f"{op.tag}.in{k}", op)
                for k, (atom, dims) in enumerate(zip(op.inputs, rule.operands, strict=True))
            ]
            array = self._bind(op, operands)[position]
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            found = self.copies[value, wanted] = self.context.constrain(array, wanted)
        return found

    def _lazy_operand(self, atom: Atom, dims: Sequence[int], factors: Sequence[int], site: str, op: Op) -> Any:
        if not isinstance(atom, int):
            return atom.value
        shape = self.context.graph.types[atom].shape
        position = {f: d for d, f in enumerate(dims) if shape[d] > 1}
        wanted = tuple(position.get(f, -1) if f >= 0 else f for f in factors)
        if atom in self.lazy:
            return self.materialise(atom, wanted, site, op)
        return self.at(atom, wanted, site, op) if atom in self.context.stage.values else self.arrays[atom]

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
        return self.at(atom, layout, site, self.makers.get(atom))

    # Regions

    def inner(self, region: Region, arrays: Sequence[Any]) -> Scope:
        """The scope of a body whose inputs are these arrays, which lie as the plan says."""
        scope = Scope(self.context, {})
        for value, array in zip(region.inputs, arrays, strict=True):
            scope.define(value, array, "enter")
        for value, array in region.constants:
            scope.define(value, array, "constant")
        scope.run(region.ops)
        return scope

    def _leave(self, op: Op, region: Region, scope: Scope) -> list[Any]:
        return [scope.read(a, f"{op.tag}.{region.name}.out{j}", op) for j, a in enumerate(region.outputs)]

    def _run_region(self, op: Op) -> None:
        operands = [self.read(atom, f"{op.tag}.in{k}", op) for k, atom in enumerate(op.inputs)]
        kind = "remat" if op.name in jax_compat.REMAT else op.name
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            results = _REGIONS[kind](self, op, operands)
        self._store(op, results)

    def _body(self, op: Op, region: Region) -> control_flow.BodyFunction:
        return lambda arrays: self._leave(op, region, self.inner(region, arrays))

    def scan(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        results = control_flow.scan(op, operands, self._body(op, op.regions[0]))
        for j in range(jax_compat.scan_counts(op.params)[1], len(results)):
            lead = partial_axes(self.context.stage.values.get(op.outputs[j]))
            if lead:  # the loop stacks in front of the dimensions of partial sums
                results[j] = jax.lax.transpose(results[j], _behind(len(lead), results[j].ndim))
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


def _behind(count: int, rank: int) -> tuple[int, ...]:
    """The permutation that brings the first dimension behind the next `count`."""
    return (*range(1, count + 1), 0, *range(count + 1, rank))


_SPLITS: Mapping[str, Callable[[Scope, Op, Sequence[Any], Sequence[int]], Any]] = {
    "dot_general": Scope.split_product,
    "reduce_sum": Scope.split_sum,
    "scatter-add": Scope.split_scatter,
}

_REGIONS: Mapping[str, Callable[[Scope, Op, Sequence[Any]], list[Any]]] = {
    "scan": Scope.scan,
    "while": Scope.while_loop,
    "cond": Scope.cond,
    "remat": Scope.remat,
}
