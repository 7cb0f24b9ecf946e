"""What a compiler makes of planned collectives: known, measured conversions, one function each.

A plan says which bytes have to move; a compiler may know a cheaper way to move them, or lack a kind of collective. Each
conversion maps planned collectives to what one compiler emits for them, and verification compares with the result:

    CPU       no reduce-scatter: an all-reduce and a local slice                              -> without_reduce_scatter
    Shardy    the sums of one operation along several axes are one collective                 -> summed_at_once
    TPU       what only products of default precision read travels as bfloat16                -> narrowed
              small sums are not scattered                                                    -> small_sums_whole
              a vector is not gathered but summed, each device's piece in a buffer of zeros   -> small_gathers_summed

`CONVERSIONS` holds what applies to each platform, in order. Measurements: docs/design.md, "Compile-only checks".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from types import MappingProxyType

from autopar.collective import Collective
from autopar.graph import Graph, Op
from autopar.layout import Layout, steps
from autopar.plans import Plan

#: Operations on the matrix unit, whose float32 operands default precision rounds to bfloat16.
PRODUCTS = ("dot_general", "conv_general_dilated")
#: Operations that a change of type moves through.
REARRANGING = ("transpose", "reshape", "squeeze", "expand_dims", "copy", "rev")

Planned = Sequence[Collective]
Conversion = Callable[[Planned, "Context"], tuple[Collective, ...]]


@dataclass(frozen=True, eq=False)
class Context:
    """What a conversion may look at beside the collectives."""

    graph: Graph
    plan: Plan

    @property
    def sizes(self) -> Mapping[str, int]:
        """Mesh axis -> devices along it."""
        return dict(zip(self.plan.mesh_names, self.plan.mesh_sizes, strict=True))

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


# --- any sum ----------------------------------------------------------------------------------------------------------


def without_reduce_scatter(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """XLA on CPU has no reduce-scatter: one becomes an all-reduce of the same operand, and a slice."""
    return tuple(replace(c, kind="all-reduce") if c.kind == "reduce-scatter" else c for c in planned)


def summed_at_once(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """Shardy adds up the partial sums of one operation along all axes at once.

    That is a reduce-scatter where the result ends cut along all of them, else an all-reduce.
    """
    sums: dict[str, list[Collective]] = {}
    for c in planned:
        if c.kind in ("reduce-scatter", "all-reduce"):
            sums.setdefault(c.op, []).append(c)
    out: list[Collective] = []
    for c in planned:
        mine = sums.get(c.op, [])
        if c not in mine or sum(len(s.axes) for s in mine) < 2:
            out.append(c)
        elif c is mine[0]:
            axes = context.along([a for s in mine for a in s.axes])
            kind = "reduce-scatter" if _ends_cut(c.op, axes, context) else "all-reduce"
            out.append(replace(c, kind=kind, axes=axes))
    return tuple(out)


def _ends_cut(tag: str, axes: Sequence[str], context: Context) -> bool:
    """Every one of these axes cuts the result of the operation with this tag."""
    op = context.graph.by_index.get(int(tag.removeprefix("op"))) if tag.removeprefix("op").isdigit() else None
    layout = context.plan.stages[0].values.get(op.outputs[0]) if op is not None and op.outputs else None
    return layout is not None and all(layout[context.plan.mesh_names.index(a)] >= 0 for a in axes)


# --- TPU --------------------------------------------------------------------------------------------------------------


def narrowed(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """Default precision rounds the float32 operands of products to bfloat16, and libtpu rounds before it moves them.

    So it does with what is only read converted to a narrower type, through transposes and reshapes, and with a
    product's all-reduce, though not with its reduce-scatter.
    """
    widths: dict[tuple[int, Layout | None], int] = {}

    def width(value: int, layouts: Sequence[Layout] | None) -> int:
        """Bytes per element that readers of a value (in these layouts alone) need."""
        own = context.graph.types[value].itemsize
        places = [
            (op, site)
            for op, site in context.readers.get(value, ())
            if layouts is None or context.read(value, site) in layouts
        ]
        return max((_needs(op, value, own, width, context) for op, _ in places), default=own)

    _ = widths
    return tuple(replace(c, bytes=_scaled(c, position, planned, width, context)) for position, c in enumerate(planned))


Width = Callable[[int, Sequence[Layout] | None], int]


def _needs(op: Op | None, value: int, own: int, width: Width, context: Context) -> int:
    """Bytes per element of a value that one reader needs."""
    if op is None:
        return own
    if op.name in PRODUCTS and context.graph.types[value].dtype == "float32" and _default_precision(op):
        return 2
    if op.name == "convert_element_type":
        to = context.graph.types[op.outputs[0]]
        return min(own, to.itemsize) if "float" in to.dtype else own
    if op.name in REARRANGING:
        return min(own, width(op.outputs[0], None))
    return own


def _default_precision(op: Op) -> bool:
    return all(p is None or p.name == "DEFAULT" for p in op.params["precision"] or ())


def _scaled(c: Collective, position: int, planned: Planned, width: Width, context: Context) -> int:
    value, layouts = _moved(c, position, planned, context)
    if value < 0 or c.kind == "reduce-scatter":
        return c.bytes
    own = context.graph.types[value].itemsize
    return c.bytes * width(value, layouts) // own


def _moved(c: Collective, position: int, planned: Planned, context: Context) -> tuple[int, Sequence[Layout] | None]:
    """The value that a collective moves, and the layouts in which those it is moved for read it; -1 if unknown."""
    stage = context.plan.stages[0]
    if c.op.removeprefix("op").isdigit():
        op = context.graph.by_index[int(c.op.removeprefix("op"))]
        return (op.outputs[0], None) if op.name == "dot_general" else (-1, None)
    value = context.values.get(c.op, -1)
    if value not in stage.values:
        return -1, None
    wanted, home = context.read(value, c.op), stage.values[value]
    copy = stage.copies.get(value)
    if copy is None:
        return value, (wanted,)
    after = _count(copy, wanted, context)
    later = sum(other.op == c.op for other in planned[position + 1 :])
    shared = [context.read(value, site) for _, site in context.readers[value]]
    return value, (wanted,) if later < after else [layout for layout in shared if layout != home]


def _count(source: Layout, target: Layout, context: Context) -> int:
    return sum(step.kind != "slice" for step in steps(source, target, context.plan.mesh_sizes) or ())


CONVERSIONS: Mapping[str, tuple[Conversion, ...]] = MappingProxyType(
    {"cpu": (without_reduce_scatter,), "shardy": (summed_at_once,), "tpu": (narrowed,)}
)


def converted(platform: str, plan: Plan, graph: Graph) -> tuple[Collective, ...]:
    """The collectives of a plan as the compiler of a platform is known to make them."""
    context = Context(graph, plan)
    return reduce(lambda planned, convert: convert(planned, context), CONVERSIONS[platform], plan.collectives)
