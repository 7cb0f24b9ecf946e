"""Pins: layouts that the user fixes.

    path glob, "arg:i", "out:i"          the `pins` argument                                       -> resolve
    type of an argument                  its sharding on an Explicit mesh                          -> resolve
    with_sharding_constraint             inside the user's function                                -> constraint

A pin restricts the strategies of an argument's group to one layout, or adds a group with one layout for a result. The
optimizer chooses the other layouts. A pin that matches nothing is an error and is never ignored.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import PinError
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, Op, Type
from autopar.ir.layout import Layout, divides, from_spec, replicated

Pins = Mapping[str, PartitionSpec]


@dataclass(frozen=True)
class Pinned:
    """Positions of argument leaves and of result leaves -> the layout to which they are fixed."""

    arguments: Mapping[int, Layout]
    results: Mapping[int, Layout]


def resolve(
    pins: Pins | None,
    graph: Graph,
    mesh: LogicalMesh,
    typed: Mapping[int, PartitionSpec] | None = None,
    axes: Mapping[str, int] | None = None,
) -> Pinned:
    """The leaves that pins fix, and their layouts.

    A glob matches a whole path ("state/params/w1"), or its part below the argument's name ("params/w1"). A later pin
    overrides an earlier one. A pin and the type of an argument must agree.

    Args:
        pins: glob or position -> spec.
        graph: the program.
        mesh: the mesh to plan for.
        typed: position of an argument leaf -> spec of its type.
        axes: axis -> size of the Explicit mesh to which those types refer.

    Raises:
        PinError: a pin matches no leaf, names an unknown mesh axis, has more dimensions than the leaf, cuts a
            dimension that does not divide, or contradicts the type of an argument.
    """
    arguments: dict[int, Layout] = {}
    results: dict[int, Layout] = {}
    said: dict[int, str] = {}
    for pattern, partition in (pins or {}).items():
        spec = _spec(pattern, partition)
        matching = list(matches(pattern, graph))
        if not matching:
            near = difflib.get_close_matches(pattern, graph.input_paths, 3, cutoff=0.4)
            raise PinError(
                f"pin '{pattern}' matches no argument{f'; the nearest: {_some(tuple(near))}' if near else ''}. "
                f"Arguments: {_some(graph.input_paths)}. "
                f"Results are pinned by position, 'out:0' to 'out:{len(graph.output_paths) - 1}'."
            )
        for kind, position in matching:
            of = graph.input_paths if kind == "arg" else graph.output_paths
            atom = graph.inputs[position] if kind == "arg" else graph.outputs[position]
            layout = checked_layout(spec, graph.type_of(atom), mesh, f"pin '{pattern}' on '{of[position]}'")
            (arguments if kind == "arg" else results)[position] = layout
            if kind == "arg":
                said[position] = f"pin '{pattern}' of {spec}"
    for position, spec in (typed or {}).items():
        arguments[position] = _typed(position, spec, axes or {}, graph, mesh, arguments, said)
    return Pinned(arguments, results)


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


def matches(pattern: str, graph: Graph) -> Iterator[tuple[str, int]]:
    """("arg" or "out", position) of each leaf that a pin matches. Raises PinError for a position out of range."""
    kind, _, number = pattern.partition(":")
    if kind in ("arg", "out") and number.isdigit():
        count = len(graph.inputs if kind == "arg" else graph.outputs)
        if int(number) >= count:
            raise PinError(f"pin '{pattern}': there are only {count} {kind} leaves, 0 to {count - 1}")
        yield kind, int(number)
        return
    for i, path in enumerate(graph.input_paths):
        if names(pattern, path):
            yield "arg", i


def names(pattern: str, path: str) -> bool:
    """Whether a glob matches the path of an argument leaf, or its part below the argument's name."""
    return any(fnmatch.fnmatchcase(part, pattern) for part in (path, path.partition("/")[2]))


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
    if len(partition) > type_.rank:
        raise PinError(f"{what}: {partition} has {len(partition)} dimensions, the value is {type_}")
    names = [name for entry in partition if entry for name in (entry if isinstance(entry, tuple) else (entry,))]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise PinError(f"{what}: {partition} cuts two dimensions over the same axis '{twice[0]}'")
    try:
        layout = from_spec(partition, mesh.names)
    except KeyError as error:
        raise PinError(f"{what}: axis {error} not found. Mesh axes: {', '.join(mesh.names)}") from None
    _check_order(partition, mesh, what)
    if not divides(layout, type_.shape, mesh.sizes):
        sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
        raise PinError(f"{what}: {partition} does not divide {type_} on the mesh {sizes}")
    return replicated(len(mesh.sizes)) if 0 in type_.shape else layout


def _check_order(partition: PartitionSpec, mesh: LogicalMesh, what: str) -> None:
    """Raise PinError if a dimension is cut over several axes in another order than that of the mesh."""
    for entry in partition:
        if isinstance(entry, tuple) and (ordered := tuple(sorted(entry, key=mesh.names.index))) != entry:
            first = next(i for i, name in enumerate(entry) if name != ordered[i])
            raise PinError(f"{what}: {partition} cuts over '{entry[first]}' before '{ordered[first]}'; use {ordered}")


def _some(names: tuple[str, ...], most: int = 8) -> str:
    """The first names, separated by commas, and the number of all if there are more."""
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")
