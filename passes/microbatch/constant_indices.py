"""Constant components of index arrays.

In x[arange(n), labels] the first component of every index is its own row. jax.numpy makes that component from an iota,
corrected for negative values, broadcast and concatenated with the labels: integers that depend on no argument. They are
folded here with numpy, as far back as the operations of `_FOLDED` reach. Each fold gives the value in the operation's
own dtype, so that an index of eight bits wraps as it does when the step runs; only integers and booleans are folded.
Called only where a gather or scatter indexes a split dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Atom, Graph, Op

#: Largest number of elements of an index array that is folded.
MAX_ELEMENTS = 1 << 24


def constant_component(graph: Graph, producers: Mapping[int, Op], atom: Atom, component: int) -> NDArray[Any] | None:
    """Entries [..., component] of an index array; None unless they are constant.

    Args:
        graph: the step.
        producers: value -> the operation that defines it.
        atom: the index array.
        component: position in its last dimension.
    """
    op = producers.get(atom) if isinstance(atom, int) else None
    if op is None or graph.type_of(atom).size > MAX_ELEMENTS:
        return None
    if op.name == "convert_element_type":
        values = constant_component(graph, producers, op.inputs[0], component)
        return None if values is None else _convert(op, values)
    last = graph.type_of(atom).rank - 1
    if op.name != "concatenate" or op.params["dimension"] != last:
        values = fold(graph, producers, atom)
        return None if values is None else values[..., component]
    for piece in op.inputs:
        width = graph.type_of(piece).shape[last]
        if component < width:
            values = fold(graph, producers, piece)
            return None if values is None else values[..., component]
        component -= width
    return None


def fold(
    graph: Graph, producers: Mapping[int, Op], atom: Atom, given: Mapping[int, NDArray[Any]] | None = None
) -> NDArray[Any] | None:
    """The value of an atom that depends on no argument, or on the `given` values alone; None for others."""
    if given and isinstance(atom, int) and atom in given:
        return given[atom]
    dtype = graph.type_of(atom).dtype
    if dtype != "bool" and not dtype.startswith(("int", "uint")):
        return None
    if not isinstance(atom, int):
        return np.asarray(atom.value).astype(jnp.dtype(dtype))
    op = producers.get(atom)
    if op is None or op.name not in _FOLDED:
        return None
    operands = [fold(graph, producers, a, given) for a in op.inputs]
    values = [x for x in operands if x is not None]
    if len(values) < len(operands):
        return None
    with np.errstate(over="ignore"):  # integers wrap, as on the device
        return _FOLDED[op.name](op, *values)


def _iota(op: Op) -> NDArray[Any]:
    shape, dim = op.params["shape"], op.params["dimension"]
    indices = np.arange(shape[dim]).astype(op.params["dtype"])
    return np.broadcast_to(indices.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def _broadcast(op: Op, x: NDArray[Any]) -> NDArray[Any]:
    shape, dims = op.params["shape"], op.params["broadcast_dimensions"]
    aligned = [x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
    return np.broadcast_to(x.reshape(aligned), shape)


def _convert(op: Op, x: NDArray[Any]) -> NDArray[Any]:
    return x.astype(op.params["new_dtype"])


def _select(op: Op, which: NDArray[Any], *cases: NDArray[Any]) -> NDArray[Any]:
    return np.choose(which.astype(np.int64), np.broadcast_arrays(*cases))


def _divide(op: Op, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any] | None:
    """Rounded towards zero; by zero, devices differ."""
    if not np.all(y):
        return None
    quotient = x // y
    return quotient + ((quotient * y != x) & ((x < 0) != (y < 0))).astype(quotient.dtype)


def _remainder(op: Op, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any] | None:
    """With the sign of the dividend."""
    return None if not np.all(y) else np.fmod(x, y)


_FOLDED: Mapping[str, Callable[..., NDArray[Any] | None]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda op, x: x.reshape(op.params["new_sizes"]),
    "squeeze": lambda op, x: np.squeeze(x, tuple(op.params["dimensions"])),
    "convert_element_type": _convert,
    "select_n": _select,
    "add": lambda op, x, y: x + y,
    "sub": lambda op, x, y: x - y,
    "mul": lambda op, x, y: x * y,
    "div": _divide,
    "rem": _remainder,
    "max": lambda op, x, y: np.maximum(x, y),
    "min": lambda op, x, y: np.minimum(x, y),
    "sign": lambda op, x: np.sign(x),
    "and": lambda op, x, y: x & y,
    "or": lambda op, x, y: x | y,
    "eq": lambda op, x, y: x == y,
    "ne": lambda op, x, y: x != y,
    "lt": lambda op, x, y: x < y,
    "le": lambda op, x, y: x <= y,
    "gt": lambda op, x, y: x > y,
    "ge": lambda op, x, y: x >= y,
}
