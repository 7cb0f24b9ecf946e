"""Components of indices whose values are known when planning.

In x[arange(n), labels] the first component of every index is its own row. jax.numpy makes of it an iota, wrapped for
negative values, broadcast and concatenated with the labels: integers that depend on no argument, folded here with numpy
as far back as the table goes. Every fold gives the value in the operation's own dtype, so that an index of eight bits
wraps as it does when the step runs; what is no integer or boolean on the way is not folded. Only asked for where a
gather or scatter indexes a split dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Atom, Graph, Op

#: Elements up to which a component is folded.
MOST = 1 << 24


def column(graph: Graph, producers: Mapping[int, Op], atom: Atom, component: int) -> NDArray[Any] | None:
    """Entries [..., component] of an array of indices, None if they are not known."""
    op = producers.get(atom) if isinstance(atom, int) else None
    if op is None or graph.type_of(atom).size > MOST:
        return None
    if op.name == "convert_element_type":
        known = column(graph, producers, op.inputs[0], component)
        return None if known is None else _converted(op, known)
    last = graph.type_of(atom).rank - 1
    if op.name != "concatenate" or op.params["dimension"] != last:
        known = _fold(graph, producers, atom)
        return None if known is None else known[..., component]
    for piece in op.inputs:
        width = graph.type_of(piece).shape[last]
        if component < width:
            known = _fold(graph, producers, piece)
            return None if known is None else known[..., component]
        component -= width
    return None


def _fold(graph: Graph, producers: Mapping[int, Op], atom: Atom) -> NDArray[Any] | None:
    """The value of an atom that depends on no argument."""
    dtype = graph.type_of(atom).dtype
    if dtype != "bool" and not dtype.startswith(("int", "uint")):
        return None
    if not isinstance(atom, int):
        return np.asarray(atom.value).astype(jnp.dtype(dtype))
    op = producers.get(atom)
    if op is None or op.name not in _FOLDED:
        return None
    operands = [_fold(graph, producers, a) for a in op.inputs]
    known = [x for x in operands if x is not None]
    if len(known) < len(operands):
        return None
    with np.errstate(over="ignore"):  # wraps, as on the device
        return _FOLDED[op.name](op, *known)


def _iota(op: Op) -> NDArray[Any]:
    shape, dim = op.params["shape"], op.params["dimension"]
    counted = np.arange(shape[dim]).astype(op.params["dtype"])
    return np.broadcast_to(counted.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def _broadcast(op: Op, x: NDArray[Any]) -> NDArray[Any]:
    shape, dims = op.params["shape"], op.params["broadcast_dimensions"]
    spread = [x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
    return np.broadcast_to(x.reshape(spread), shape)


def _converted(op: Op, x: NDArray[Any]) -> NDArray[Any]:
    return x.astype(op.params["new_dtype"])


def _select(op: Op, which: NDArray[Any], *cases: NDArray[Any]) -> NDArray[Any]:
    return np.choose(which.astype(np.int64), np.broadcast_arrays(*cases))


_FOLDED: Mapping[str, Callable[..., NDArray[Any]]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda op, x: x.reshape(op.params["new_sizes"]),
    "squeeze": lambda op, x: np.squeeze(x, tuple(op.params["dimensions"])),
    "convert_element_type": _converted,
    "select_n": _select,
    "add": lambda op, x, y: x + y,
    "sub": lambda op, x, y: x - y,
    "mul": lambda op, x, y: x * y,
    "lt": lambda op, x, y: x < y,
    "ge": lambda op, x, y: x >= y,
}
