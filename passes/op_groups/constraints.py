"""Pins: layouts that the user fixes.

    `pins` argument                      its keys: autopar/passes/op_groups/pin_keys.py            -> resolve
    type of an argument                  its sharding on an Explicit mesh                          -> resolve
    with_sharding_constraint             inside the user's function                                -> constraint

A pin restricts the strategies of an argument's group, or of the group of a value, to one layout, or adds a group with
one layout for a result. The optimizer chooses the other layouts. Where several pins name one leaf or value, the last
one holds. A pin that names nothing is an error and is never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import PinError
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, Op, Type
from autopar.ir.layout import Layout, divides, from_spec, replicated
from autopar.passes.op_groups.pin_keys import PRODUCTS_AT, ROLES, Batch, Pinnable, by_stage, is_line, matches, nearest

Pins = Mapping[str, PartitionSpec]


class PinnedValue(NamedTuple):
    """The layout of a value inside the program, and the key of the pin.

    `open_dims` are dimensions that mesh axes which cut nothing in `layout` may cut. `computed`: a product is computed
    in this layout, and not in another from which its partial sums are scattered.
    """

    layout: Layout
    key: str
    open_dims: tuple[int, ...] = ()
    computed: bool = False


@dataclass(frozen=True)
class Pinned:
    """What pins fix.

    Attributes:
        arguments, results: positions of argument leaves and of results -> their layout.
        values: values inside the program.
    """

    arguments: Mapping[int, Layout]
    results: Mapping[int, Layout]
    values: Mapping[int, PinnedValue] = field(default_factory=dict[int, PinnedValue])


def resolve(
    pins: Pins | None,
    graph: Graph,
    mesh: LogicalMesh,
    typed: Mapping[int, PartitionSpec] | None = None,
    axes: Mapping[str, int] | None = None,
    batch: Batch = None,
    stage: int = 0,
    stages: int = 1,
) -> Pinned:
    """The leaves and values that pins fix, and their layouts.

    A later pin overrides an earlier one. A pin and the type of an argument must agree.

    Args:
        pins: key (`autopar.passes.op_groups.pin_keys`) -> spec.
        graph: the program.
        mesh: the mesh to plan for.
        typed: position of an argument leaf -> spec of its type.
        axes: axis -> size of the Explicit mesh to which those types refer.
        batch: positions of the argument leaves that hold the batch; None: inferred.
        stage, stages: the stage to plan, and the number of stages.

    Raises:
        PinError: a pin names nothing, has an unknown mesh axis or more dimensions than the value, cuts a dimension
            that does not divide, or contradicts the type of an argument.
    """
    last = last_pins(pins, graph, batch, stage, stages)
    layouts = {of: _layout(of, key, spec, graph, mesh) for of, (key, spec) in last.items()}
    arguments = {of.number: layout for of, layout in layouts.items() if of.kind == "arg"}
    results = {of.number: layout for of, layout in layouts.items() if of.kind == "out"}
    values = {of.number: _value(layout, *last[of]) for of, layout in layouts.items() if of.kind == "value"}
    said = {of.number: f"pin '{key}' of {spec}" for of, (key, spec) in last.items() if of.kind == "arg"}
    for position, spec in (typed or {}).items():
        arguments[position] = _typed(position, spec, axes or {}, graph, mesh, arguments, said)
    return Pinned(arguments, results, values)


def _value(layout: Layout, key: str, spec: PartitionSpec) -> PinnedValue:
    open_dims = (dim for dim, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED)
    return PinnedValue(layout, key, tuple(open_dims), by_stage(key)[1].startswith(PRODUCTS_AT))


def last_pins(
    pins: Pins | None, graph: Graph, batch: Batch = None, stage: int = 0, stages: int = 1
) -> Mapping[Pinnable, tuple[str, PartitionSpec]]:
    """Leaf or value -> key and spec of the pin that holds for it. Raises PinError if a pin names nothing."""
    last: dict[Pinnable, tuple[str, PartitionSpec]] = {}
    for key, partition in (pins or {}).items():
        spec = _spec(key, partition)
        wanted, name = by_stage(key)
        if wanted is not None and wanted >= stages:
            count = f"{stages} stages, 0 to {stages - 1}" if stages > 1 else "one stage, 0"
            raise PinError(f"pin '{key}': the plan has {count}; stages= says how many")
        matching = matches(name, graph, batch)
        if not matching:
            raise _nothing(key, name, graph)
        if wanted in (None, stage):
            last.update(dict.fromkeys(matching, (key, spec)))
    return last


def _nothing(key: str, name: str, graph: Graph) -> PinError:
    """The error for a pin that names nothing."""
    if name in ROLES:
        return PinError(
            f"pin '{key}' matches no argument: none has this role. State is what the step returns anew; batch_argnums "
            f"names the batch. Arguments: {_some(graph.input_paths)}"
        )
    near = tuple(nearest(name, graph))
    if is_line(name):
        return PinError(
            f"pin '{key}' matches no line of the forward pass that computes an array"
            f"{f'; the nearest: {_some(near)}' if near else ''}. with_sharding_constraint fixes results of loops."
        )
    return PinError(
        f"pin '{key}' matches no argument{f'; the nearest: {_some(near)}' if near else ''}. "
        f"Arguments: {_some(graph.input_paths)}. "
        f"Results are pinned by position, 'out:0' to 'out:{len(graph.output_paths) - 1}'."
    )


def _layout(of: Pinnable, key: str, spec: PartitionSpec, graph: Graph, mesh: LogicalMesh) -> Layout:
    """The layout of a leaf or a value under its pin. Raises PinError."""
    if of.kind == "value":
        op, type_ = graph.producers[of.number], graph.types[of.number]
        named = (None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec)
        return checked_layout(PartitionSpec(*named), type_, mesh, f"pin '{key}' on {op.name} at {op.source}")
    paths, atoms = (graph.input_paths, graph.inputs) if of.kind == "arg" else (graph.output_paths, graph.outputs)
    return checked_layout(spec, graph.type_of(atoms[of.number]), mesh, f"pin '{key}' on '{paths[of.number]}'")


def _typed(
    position: int,
    spec: PartitionSpec,
    axes: Mapping[str, int],
    graph: Graph,
    mesh: LogicalMesh,
    arguments: Mapping[int, Layout],
    said: Mapping[int, str],
) -> Layout:
    """The layout that the type of an argument prescribes. Raises PinError."""
    what = f"'{graph.input_paths[position]}', which lies on the Explicit mesh {dict(axes)}"
    layout = checked_layout(spec, graph.types[graph.inputs[position]], mesh, what)
    for name, dim in zip(mesh.names, layout, strict=True):
        if dim >= 0 and axes.get(name) != mesh.shape[name]:
            raise PinError(f"{what}: {spec} cuts over axis '{name}', whose size is another in the mesh {mesh.shape}")
    if arguments.get(position, layout) != layout:
        raise PinError(
            f"{what}: its type says {spec}, but {said[position]} says another. Drop the pin, or move the argument."
        )
    return layout


def _spec(pattern: str, partition: Any) -> PartitionSpec:
    """The spec of a pin. Raises PinError if it is neither a PartitionSpec nor a NamedSharding."""
    if isinstance(partition, NamedSharding):
        return partition.spec
    if isinstance(partition, PartitionSpec):
        return partition
    raise PinError(f"pin '{pattern}' must be a PartitionSpec, it is {type(partition).__name__} {partition!r:.60}")


def constraint(op: Op, type_: Type, mesh: LogicalMesh) -> tuple[Layout, tuple[int, ...]]:
    """The layout that a `with_sharding_constraint` in the user's function requires, and the dimensions it leaves open.

    Raises:
        PinError: the sharding has no spec, or the spec is not valid for the value or the mesh.
    """
    where = f"with_sharding_constraint{f' at {op.source}' if op.source else ''}"
    sharding = op.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        raise PinError(f"{where} must have a PartitionSpec or a NamedSharding, it has {type(sharding).__name__}")
    open_dims = tuple(sorted(op.params["unconstrained_dims"]))
    named = [None if d in open_dims else entry for d, entry in enumerate(sharding.spec)]
    return checked_layout(PartitionSpec(*named), type_, mesh, where), open_dims


def checked_layout(partition: PartitionSpec, type_: Type, mesh: LogicalMesh, what: str) -> Layout:
    """The layout of a spec on a value of this type; an empty value is replicated (`strategies.layouts_of`).

    Args:
        what: names the pin in messages.

    Raises:
        PinError: the spec is not valid for the value or the mesh.
    """
    if getattr(partition, "unreduced", None):
        raise PinError(f"{what}: {partition} is a partial sum, which cannot be pinned")
    names = [name for entry in partition if entry for name in (entry if isinstance(entry, tuple) else (entry,))]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise PinError(f"{what}: {partition} cuts two dimensions over the same axis '{twice[0]}'")
    try:
        layout = from_spec(partition, mesh.names)
    except KeyError as error:
        raise PinError(f"{what}: axis {error} not found. Mesh axes: {', '.join(mesh.names)}") from None
    if len(partition) > type_.rank:
        raise PinError(
            f"{what}: {partition} has {len(partition)} dimensions, the value is {type_}; a later pin of this value "
            "alone overrides it"
        )
    _check_order(partition, mesh, what)
    if not divides(layout, type_.shape, mesh.sizes):
        sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
        raise PinError(
            f"{what}: {partition} does not divide {type_} on the mesh {sizes}{_dividing(layout, type_, mesh)}"
        )
    return replicated(len(mesh.sizes)) if 0 in type_.shape else layout


def _dividing(layout: Layout, type_: Type, mesh: LogicalMesh) -> str:
    """Which dimensions the axes of a layout divide, in words."""
    text = ""
    for axis, dim in enumerate(layout):
        if dim >= 0:
            dims = [d for d, extent in enumerate(type_.shape) if extent % mesh.sizes[axis] == 0]
            which = f"dimension {' and '.join(map(str, dims))}" if dims else "no dimension"
            text += f"; '{mesh.names[axis]}' divides {which}"
    return text


def _check_order(partition: PartitionSpec, mesh: LogicalMesh, what: str) -> None:
    """Raise PinError if a dimension is cut over several axes in another order than that of the mesh."""
    for entry in partition:
        if isinstance(entry, tuple) and (ordered := tuple(sorted(entry, key=mesh.names.index))) != entry:
            first = next(i for i, name in enumerate(entry) if name != ordered[i])
            raise PinError(
                f"{what}: {partition} cuts over '{entry[first]}' before '{ordered[first]}'; use {ordered}, or a mesh "
                f"with '{entry[first]}' before '{ordered[first]}'"
            )


def _some(names: tuple[str, ...], most: int = 8) -> str:
    """The first names, separated by commas, and the number of all if there are more."""
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")
