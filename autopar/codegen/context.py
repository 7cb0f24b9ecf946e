"""What the emitters of one program share: its plan, rules and mesh, and how arrays come into planned layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.codegen.fold_transpose import folded_transposes
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.layout import PARTIAL, REPLICATED, Layout, ProgramLayouts, partial_axes, replicated, route, spec, steps
from autopar.passes.op_groups.reduction_lowering import first_stage
from autopar.plans.record import Stage
from autopar.rules import Rule

AnyMesh = Mesh | AbstractMesh


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
    def on_cpu(self) -> bool:
        """Whether the program runs on the devices of a host's CPU."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    def constrain(self, array: Any, layout: Layout) -> Any:
        """Constrain an array to a layout; one leading dimension per axis along which it is partial."""
        sharding = NamedSharding(self.mesh, spec(unreduced_layout(layout), array.ndim, self.names))
        return jax.lax.with_sharding_constraint(array, sharding)

    def summands_shape(self, value: int, layout: Layout) -> tuple[int, ...]:
        """The shape of the array of a value: one leading dimension per axis along which it is partial."""
        lead = (self.mesh.shape[self.names[axis]] for axis in partial_axes(layout))
        return (*lead, *self.graph.types[value].shape)

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
            array = array.reshape(math.prod(array.shape[: len(lead)]), *array.shape[len(lead) :])
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

    # Layouts at operations

    def layout_at(self, atom: Atom, site: str) -> Layout | None:
        """The layout of an operand at a site; None for literals, scalars, free values and views."""
        if not isinstance(atom, int) or atom not in self.stage.values:
            return None
        return self.stage.uses.get(site, self.stage.values[atom])

    def read_layout(self, atom: Atom, site: str) -> Layout:
        """The layout in which an operand is read at a site; free values and views are computed in it."""
        layout = self.layout_at(atom, site)
        return self.stage.uses.get(site, replicated(len(self.names))) if layout is None else layout

    def unreduced(self, op: Op, position: int, lead: Sequence[int]) -> Layout:
        """The layout of a result before its reduction: PARTIAL along axes that shard a reduced factor."""
        rule = self.rules[op.signature]
        result = {f: d for d, f in enumerate(rule.results[position])}
        layout = [PARTIAL if axis in lead else REPLICATED for axis in range(len(self.names))]
        for k, (atom, dims) in enumerate(zip(op.inputs, rule.operands, strict=True)):
            for axis, dim in enumerate(self.read_layout(atom, f"{op.tag}.in{k}")):
                if dim >= 0:
                    layout[axis] = PARTIAL if dims[dim] in rule.reduced else result.get(dims[dim], layout[axis])
        return tuple(layout)

    def may_lose_nan(self, op: Op) -> bool:
        """Whether this is a maximum or minimum of floats over a sharded dimension, combined by XLA:CPU's all-reduce."""
        if op.name not in ("reduce_max", "reduce_min") or not self.on_cpu:
            return False
        sharded = any(dim in op.params["axes"] for dim in self.read_layout(op.inputs[0], f"{op.tag}.in0"))
        return sharded and jax.numpy.issubdtype(self.graph.type_of(op.inputs[0]).dtype, jax.numpy.inexact)
