"""What a compiler makes of planned collectives: known, measured conversions, one function each.

A plan says which bytes have to move; a compiler may know a cheaper way to move them, or lack a kind of collective. Each
conversion maps planned collectives to what one compiler emits for them, and verification compares with the result:

    XLA       what differs in dimensions of extent 1 alone is gathered once                   -> equal_gathers_shared
    CPU       no reduce-scatter: an all-reduce and a local slice                              -> without_reduce_scatter
    Shardy    the sums of one operation along several axes are one collective                 -> summed_at_once
    TPU       what only products of default precision read travels as bfloat16                -> narrowed
              small sums are not scattered                                                    -> small_sums_whole
              a vector is not gathered but summed, each device's piece in a buffer of zeros   -> small_gathers_summed

`CONVERSIONS` holds what applies to each platform, in order. Measurements: docs/design.md, "Compile-only checks".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from types import MappingProxyType

from autopar import jax_compat
from autopar.collective import Collective
from autopar.comparison import Comparison
from autopar.graph import Graph, Op, Region
from autopar.layout import Layout, local_shape, steps
from autopar.plans import Plan
from autopar.precision import rounded, rounds

#: TPU keeps arrays of 32-bit elements in tiles of 8 x 128 (XLA's documentation, "Tiled layout").
TILE_ROWS, TILE_COLUMNS = 8, 128

#: Operations that a change of their first operand's type moves through.
REARRANGING = ("transpose", "reshape", "squeeze", "expand_dims", "copy", "rev", "gather", "slice", "dynamic_slice")

#: Operations that may change nothing but dimensions of extent 1.
SAME_DATA = ("rev", "broadcast_in_dim", "reshape", "squeeze", "expand_dims")

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

    def whole(self, value: int) -> Moved:
        """A value with everything that reads it, in whatever layout."""
        return Moved(value, tuple(op for op, _ in self.readers.get(value, ())))

    def summing(self, c: Collective) -> Op | None:
        """The operation whose partial sums a collective ends; None if it is a change of layout."""
        number = c.op.removeprefix("op")
        return self.graph.by_index[int(number)] if number.isdigit() else None

    @cached_property
    def same(self) -> Mapping[int, int]:
        """Value -> the operand that it only differs from in dimensions of extent 1."""
        found: dict[int, int] = {}
        for op in self.graph.walk():
            if op.name in ("rev", "broadcast_in_dim", "reshape", "squeeze", "expand_dims") and isinstance(
                op.inputs[0], int
            ):
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

    def length(self, source: Layout, target: Layout) -> int:
        """Number of collectives that lead from one layout to another."""
        return sum(step.kind != "slice" for step in steps(source, target, self.plan.mesh_sizes) or ())


@dataclass(frozen=True, slots=True)
class Moved:
    """A value that is moved, and the readers that it is moved for; None is the end of a body or of the program."""

    value: int
    readers: tuple[Op | None, ...]


# --- XLA everywhere ---------------------------------------------------------------------------------------------------


def equal_gathers_shared(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """XLA gathers once what only differs in dimensions of extent 1: a kernel of 1 x 1 and the same reversed, say."""
    seen: set[tuple[int, str, tuple[str, ...], int, int]] = set()
    out: list[Collective] = []
    for c in planned:
        value = context.values.get(c.op, -1)
        key = context.origin(value), c.kind, c.axes, c.bytes, c.count
        if value < 0 or c.kind != "all-gather" or key not in seen:
            out.append(c)
        seen.add(key)
    return tuple(out)


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
            kind = "reduce-scatter" if _ends_cut(context.summing(c), axes, context) else "all-reduce"
            out.append(replace(c, kind=kind, axes=axes))
    return tuple(out)


def _ends_cut(op: Op | None, axes: Sequence[str], context: Context) -> bool:
    """Every one of these axes cuts the result of an operation."""
    layout = None if op is None else context.plan.stages[0].values.get(op.outputs[0])
    return layout is not None and all(layout[context.plan.mesh_names.index(a)] >= 0 for a in axes)


# --- TPU --------------------------------------------------------------------------------------------------------------


def narrowed(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """Default precision rounds the float32 operands of products to bfloat16, and libtpu rounds before it moves them.

    So it does with what is only read converted to a narrower type, through transposes and reshapes, and with a dot's
    all-reduce, though not with its reduce-scatter.
    """
    return tuple(
        c if c.kind == "reduce-scatter" else replace(c, bytes=_narrow(c, _moved(c, planned[i + 1 :], context), context))
        for i, c in enumerate(planned)
    )


def _narrow(c: Collective, moved: Moved | None, context: Context) -> int:
    if moved is None:
        return c.bytes
    itemsize = context.graph.types[moved.value].itemsize
    return c.bytes * _width(moved, context) // itemsize


def _width(moved: Moved, context: Context) -> int:
    """Bytes per element of a value that its readers need."""
    needs = (_need(op, moved.value, context) for op in moved.readers)
    return max(needs, default=context.graph.types[moved.value].itemsize)


def _need(op: Op | None, value: int, context: Context) -> int:
    """Bytes per element of a value that one reader needs."""
    type_ = context.graph.types[value]
    if op is None:
        return type_.itemsize
    if rounds(op, type_):
        return rounded(type_).itemsize
    if op.name == "convert_element_type":
        to = context.graph.types[op.outputs[0]]
        return min(type_.itemsize, to.itemsize) if "float" in to.dtype else type_.itemsize
    if op.name in REARRANGING and op.inputs[0] == value:
        return min(type_.itemsize, _width(context.whole(op.outputs[0]), context))
    inside = [inner for region in op.regions for inner in _entering(op, region, value)]
    full = not inside or -1 in inside
    return type_.itemsize if full else max(_width(context.whole(v), context) for v in inside)


def _entering(op: Op, region: Region, value: int) -> Iterator[int]:
    """Inputs of a body that a value becomes; -1 for what a loop carries on, which others write too."""
    first, count = jax_compat.scan_counts(op.params) if op.name == "scan" else (0, 0)
    carried = range(first, first + count) if op.name == "scan" else range(len(op.inputs) if op.name == "while" else 0)
    offset = len(op.inputs) - len(region.inputs)
    for i, inner in enumerate(region.inputs):
        if op.inputs[i + offset] == value:
            yield -1 if i in carried else inner


def _moved(c: Collective, later: Planned, context: Context) -> Moved | None:
    """What a collective moves and for whom; None where that cannot be told from its tag.

    Args:
        c: a planned collective.
        later: those that are planned after it.
        context: the program.
    """
    op = context.summing(c)
    if op is not None:
        return context.whole(op.outputs[0]) if op.name == "dot_general" else None
    stage, value = context.plan.stages[0], context.values.get(c.op, -1)
    if value not in stage.values:
        return None
    wanted, home, copy = context.read(value, c.op), stage.values[value], stage.copies.get(value)
    places = [(op, context.read(value, site)) for op, site in context.readers[value]]
    if copy is not None and sum(other.op == c.op for other in later) >= context.length(copy, wanted):
        return Moved(value, tuple(op for op, layout in places if layout != home))  # to the copy that readers share
    return Moved(value, tuple(op for op, layout in places if layout == wanted))


def small_sums_whole(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """libtpu all-reduces and slices where the pieces are no whole tiles of 8 x 128.

    That is known for pieces of a single tile, for less than 8 rows or columns of a matrix, and for less than 128 along
    the last of several dimensions of a dot where no other is long enough for a tile's row.

    For others it depends on the order of dimensions that libtpu chooses: `EXCEPTIONS`.
    """
    return tuple(replace(c, kind="all-reduce") if _below_a_tile(c, context) else c for c in planned)


def _below_a_tile(c: Collective, context: Context) -> bool:
    op = context.summing(c)
    if c.kind != "reduce-scatter" or op is None:
        return False
    value = op.outputs[0]
    shape, layout = context.graph.types[value].shape, context.plan.stages[0].values.get(value)
    if layout is None:
        return False
    local = local_shape(layout, shape, context.plan.mesh_sizes)
    onto = layout[context.plan.mesh_names.index(c.axes[0])]
    *leading, rows, columns = (1, 1, *local)
    tiles = math.prod(leading) * math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)
    if tiles == 1 or (len(shape) == 2 and local[onto] < TILE_ROWS):
        return True
    last = op.name == "dot_general" and onto == len(shape) - 1 > 1 and shape[onto] >= TILE_COLUMNS > local[onto]
    return last and max(shape[:-1]) < TILE_COLUMNS


def small_gathers_summed(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """libtpu gathers a vector in pieces of less than a tile's row as a sum: each piece in a buffer of zeros."""
    return tuple(replace(c, kind="all-reduce") if _below_a_row(c, context) else c for c in planned)


def _below_a_row(c: Collective, context: Context) -> bool:
    value = context.values.get(c.op, -1)
    if c.kind != "all-gather" or value < 0 or context.graph.types[value].rank != 1:
        return False
    pieces = math.prod(context.sizes[a] for a in c.axes)
    return c.bytes // context.graph.types[value].itemsize // pieces < TILE_COLUMNS


CONVERSIONS: Mapping[str, tuple[Conversion, ...]] = MappingProxyType(
    {
        "cpu": (equal_gathers_shared, without_reduce_scatter),
        "gpu": (equal_gathers_shared,),
        "shardy": (summed_at_once,),
        "tpu": (equal_gathers_shared, narrowed, small_sums_whole, small_gathers_summed),
    }
)


def converted(platform: str, plan: Plan, graph: Graph) -> tuple[Collective, ...]:
    """The collectives of a plan as the compiler of a platform is known to make them."""
    context = Context(graph, plan)
    return reduce(lambda planned, convert: convert(planned, context), CONVERSIONS[platform], plan.collectives)


# --- known and not predictable ----------------------------------------------------------------------------------------

#: Platform -> (planned kind, emitted kind) -> why a collective of the same axes and bytes may become another there.
EXCEPTIONS: Mapping[str, Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        "tpu": {
            ("reduce-scatter", "all-reduce"): "sum left whole, its pieces being no whole tiles in libtpu's layout",
            ("all-reduce", "reduce-scatter"): "sum scattered although its pieces have few rows",
            ("all-gather", "all-reduce"): "small gather done as a sum of pieces in buffers of zeros",
        }
    }
)


def explained(platform: str, found: Comparison) -> tuple[Comparison, Mapping[str, int]]:
    """A comparison without what `EXCEPTIONS` explains, and how many collectives each exception explains.

    Bytes on the wire stay as they are: an exception has a name, not a discount.
    """
    left, right, counts = list(found.predicted_only), list(found.emitted_only), dict[str, int]()
    for (planned, emitted), name in EXCEPTIONS.get(platform, {}).items():
        for mine in [c for c in left if c.kind == planned]:
            other = next((c for c in right if _twins(mine, c) and c.kind == emitted), None)
            if other is not None:
                left.remove(mine)
                right.remove(other)
                counts[name] = counts.get(name, 0) + mine.count
    return replace(found, predicted_only=tuple(left), emitted_only=tuple(right)), counts


def _twins(one: Collective, other: Collective) -> bool:
    return (one.axes, one.bytes, one.count) == (other.axes, other.bytes, other.count)
