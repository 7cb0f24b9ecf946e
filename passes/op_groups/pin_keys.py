"""Keys of pins: which leaves and values of a program each one names.

    "state/params/w1"                  the argument leaf of this path
    "params/*/wq"                      argument leaves by a glob, of the path or of its part below the argument's name
    "arg:3", "out:0"                   an argument leaf or a result by its position
    "params", "opt", "batch"           argument leaves by their role                                   -> ROLES
    "activations at model.py:30"       what the forward pass computes at a source line, a glob         -> values_at
    "model.py:30"                      the same
    "products at model.py:30"          the matrix products and convolutions there                      -> products_at
    "products at model.py:30 [*,16]"   those of this shape; "*" is any extent
    "stage 1: params/*/wq"             one of these, in one stage of a pipeline                        -> by_stage

A path comes before a glob, a glob before a role, and a role before a source line.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from autopar.errors import PinError
from autopar.ir.graph import Graph, Op
from autopar.ir.op_sets import ALL_PRODUCTS
from autopar.ir.train_state import optimizer_leaves, parameter_leaves
from autopar.passes.microbatch.batch import infer_batch

#: What the key of a pin for activations begins with.
ACTIVATIONS = "activations at "
#: What the key of a pin for matrix products and convolutions begins with.
PRODUCTS_AT = "products at "
#: Keys that mean several pins, and are expanded before (autopar/passes/strategies).
STRATEGY_NAMES = ("megatron", "fsdp", "zero1", "data_parallel")
#: Names that an error suggests.
NEAREST = 3

Batch = Sequence[int] | None
"""Positions of the argument leaves that hold the batch; None: inferred."""


class Pinnable(NamedTuple):
    """What a pin fixes the layout of: an argument leaf or a result, by its position, or a value of the graph."""

    kind: Literal["arg", "out", "value"]
    number: int


def _batch_leaves(graph: Graph, batch: Batch) -> Sequence[int]:
    return infer_batch(graph) if batch is None else batch


#: Role -> the argument leaves that have it.
ROLES: Mapping[str, Callable[[Graph, Batch], Sequence[int]]] = {
    "params": lambda graph, batch: parameter_leaves(graph),
    "opt": lambda graph, batch: optimizer_leaves(graph),
    "batch": _batch_leaves,
}


def by_stage(key: str) -> tuple[int | None, str]:
    """The number of the stage that a key is for, or None, and the rest of the key."""
    match = re.fullmatch(r"stage (\d+):\s*(.+)", key)
    return (None, key) if match is None else (int(match[1]), match[2])


def matches(key: str, graph: Graph, batch: Batch = None) -> tuple[Pinnable, ...]:
    """What a key names, less the number of its stage; empty if it names nothing.

    Raises:
        PinError: a position is out of range.
    """
    kind, _, number = key.partition(":")
    if kind in ("arg", "out") and number.isdigit():
        return (_at_position(key, "arg" if kind == "arg" else "out", int(number), graph),)
    if key.startswith(ACTIVATIONS):
        return tuple(Pinnable("value", v) for v in values_at(graph, key.removeprefix(ACTIVATIONS).strip()))
    if key.startswith(PRODUCTS_AT):
        return tuple(Pinnable("value", v) for v in products_at(graph, key.removeprefix(PRODUCTS_AT)))
    leaves = _arguments(key, graph) or _with_role(key, graph, batch)
    values = values_at(graph, key) if is_line(key) and not leaves else ()
    return tuple(Pinnable("arg", i) for i in leaves) or tuple(Pinnable("value", v) for v in values)


def _at_position(key: str, kind: Literal["arg", "out"], number: int, graph: Graph) -> Pinnable:
    count = len(graph.inputs if kind == "arg" else graph.outputs)
    if number >= count:
        raise PinError(f"pin '{key}': there are only {count} {kind} leaves, 0 to {count - 1}")
    return Pinnable(kind, number)


def _arguments(key: str, graph: Graph) -> list[int]:
    """Argument leaves by path; a key that is the whole path of one names no other."""
    exact = [i for i, path in enumerate(graph.input_paths) if path == key]
    return exact or [i for i, path in enumerate(graph.input_paths) if names(key, path)]


def names(pattern: str, path: str) -> bool:
    """Whether a glob matches the path of an argument leaf, or its part below the argument's name."""
    return any(fnmatch.fnmatchcase(part, pattern) for part in (path, path.partition("/")[2]))


def _with_role(key: str, graph: Graph, batch: Batch) -> list[int]:
    """Argument leaves by role; scalars have no layout."""
    leaves = ROLES[key](graph, batch) if key in ROLES else ()
    return [i for i in leaves if graph.types[graph.inputs[i]].rank]


def values_at(graph: Graph, line: str) -> list[int]:
    """What the forward pass computes at a source line: values that other lines read, and others of their types.

    In `h = relu(x @ w + b)` these are all values of the shape of h. In `x.reshape(...).transpose(...)` a value on the
    way, whose dimensions are in another order, is none of them.

    Args:
        graph: the program.
        line: a glob for source lines, such as "model.py:30".
    """
    here = {v: op.source for op in _at(graph, line) for v in op.outputs if graph.types[v].rank}
    read = {(source, graph.types[v]) for v, source in here.items() if _is_read_elsewhere(graph, v, source)}
    return [v for v, source in here.items() if not read or (source, graph.types[v]) in read]


def products_key(source: str, shape: Sequence[int | str]) -> str:
    """The key of the products of a shape at a source line; "*" is any extent."""
    return f"{PRODUCTS_AT}{source} [{','.join(map(str, shape))}]"


def products_at(graph: Graph, wanted: str) -> list[int]:
    """Results of the matrix products and convolutions of the forward pass at a source line, "model.py:30 [*,16]"."""
    line, _, shape = wanted.strip().partition(" ")
    extents = [extent.strip() for extent in shape.strip().removeprefix("[").removesuffix("]").split(",")]
    values = (op.outputs[0] for op in _at(graph, line) if op.name in ALL_PRODUCTS)
    return [v for v in values if not shape or _has_shape(graph.types[v].shape, extents)]


def _has_shape(shape: Sequence[int], extents: Sequence[str]) -> bool:
    pairs = zip(shape, extents, strict=False)
    return len(shape) == len(extents) and all(wanted in ("*", str(extent)) for extent, wanted in pairs)


def _at(graph: Graph, line: str) -> list[Op]:
    """Operations of the forward pass at a source line, a glob."""
    return [op for op in graph.walk() if _is_forward(op) and op.source and fnmatch.fnmatchcase(op.source, line)]


def _is_forward(op: Op) -> bool:
    return op.phase == "forward" and not op.regions


def _is_read_elsewhere(graph: Graph, value: int, source: str) -> bool:
    """Whether the forward pass reads a value at another line, or a body returns it."""
    readers = (use.op for use in graph.uses.get(value, ()))
    return any(op is None or (op.phase == "forward" and op.source != source) for op in readers)


def nearest(key: str, graph: Graph) -> Iterator[str]:
    """Keys like one that names nothing: paths and roles, or source lines if it has the form of a line."""
    lines = sorted({op.source for op in graph.walk() if _is_forward(op) and op.source})
    names = lines if is_line(key) else [*graph.input_paths, *ROLES, *STRATEGY_NAMES]
    wanted = key.removeprefix(ACTIVATIONS).removeprefix(PRODUCTS_AT).strip()
    yield from difflib.get_close_matches(wanted, names, NEAREST, cutoff=0.4)


def is_line(key: str) -> bool:
    """Whether a key has the form of a source line."""
    return key.startswith((ACTIVATIONS, PRODUCTS_AT)) or ".py:" in key
