"""Residuals of the layers of a program: which values rematerialisation keeps, and which it drops.

A *residual* of a layer is a value of its forward operations that backward operations read. It is *dropped* unless it
leaves the layer (a later layer, the update or the caller reads it), the policy keeps it, or a side effect produced it.
Operations inside the user's own `jax.checkpoint` stay as they are: values that they read are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autopar import jax_compat
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.keyed import grouped
from autopar.ir.on_graph import cached_on_graph
from autopar.ir.op_sets import ALL_PRODUCTS
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers.find import Layers


class Residuals(NamedTuple):
    """A layer's values under one policy.

    Attributes:
        kept: values that stay in memory.
        dropped: other values.
        read: dropped values that the backward pass of the layer reads, ascending.
    """

    kept: frozenset[int]
    dropped: frozenset[int]
    read: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LayeredProgram:
    """A program with facts that all its rewritings need. Positions are those of its operations."""

    graph: Graph
    layers: Layers
    cache: dict[tuple[int, bool], Residuals] = field(default_factory=dict)  # by the arguments of `residuals`

    @cached_property
    def readers(self) -> Mapping[int, Sequence[int]]:
        """Value -> positions of the operations that read it; len(ops) is the caller."""
        reads = (*(op.inputs for op in self.graph.ops), self.graph.outputs)
        return grouped((v, position) for position, atoms in enumerate(reads) for v in values_of(atoms))

    @cached_property
    def producer(self) -> Mapping[int, int]:
        """Value -> position of the operation that produces it, without arguments."""
        return {v: position for position, op in enumerate(self.graph.ops) for v in op.outputs}

    @cached_property
    def constant(self) -> frozenset[int]:
        """Values that depend on no argument."""
        return _constants(self.graph.ops, [v for v, _ in self.graph.constants])

    @cached_property
    def avals(self) -> Mapping[int, object]:
        """JAX's types of all values that top-level operations read."""
        return {
            a: variable.aval
            for op in self.graph.ops
            for a, variable in zip(op.inputs, op.equation.invars, strict=True)
            if isinstance(a, int)
        }

    @cached_property
    def backward(self) -> Mapping[int, Sequence[int]]:
        """Layer -> positions of its backward operations, in order, without the user's own rematerialisation."""
        layers = self.layers.backward.items()
        return grouped((layer, i) for i, layer in layers if not is_user_remat(self.graph.ops[i]))

    @cached_property
    def returned_gradients(self) -> frozenset[int]:
        """Gradients of parameters: values that the backward pass produces and only changes in layout from then on."""
        returned: set[int] = set()
        for position in reversed(range(len(self.graph.ops))):
            for v in self.graph.ops[position].outputs if self.phase(position) == "backward" else ():
                if all(self._is_returned(q, returned) for q in self.readers.get(v, ())):
                    returned.add(v)
        return frozenset(returned)

    def _is_returned(self, position: int, returned: Set[int]) -> bool:
        """Whether a reader is outside the backward pass, or changes the layout of a returned gradient."""
        if self.phase(position) != "backward":
            return True
        op = self.graph.ops[position]
        return op.name in layers_pass.RELAYOUTS and returned >= {*op.outputs}

    @cached_property
    def last_signature(self) -> int:
        """The largest signature of an operation."""
        return max(op.signature for op in self.graph.walk())

    def residuals(self, layer: int, keeps_products: bool) -> Residuals:
        """Values of a layer that are kept and dropped; `keeps_products`: results of products stay, as by "dots"."""
        if (layer, keeps_products) not in self.cache:
            ops = self.layers.ops(layer)
            layer_values = frozenset(v for op in ops for v in op.outputs)
            kept = layer_values  # without a backward pass of its own, there is nothing in front of which to recompute
            if layer in self.backward:
                kept = frozenset(v for v in layer_values if _is_kept(self, v, layer_values, keeps_products))
            read = (v for v in sorted(layer_values - kept) if self._is_read_backward(v))
            self.cache[layer, keeps_products] = Residuals(kept, layer_values - kept, tuple(read))
        return self.cache[layer, keeps_products]

    def _is_read_backward(self, value: int) -> bool:
        return any(self.phase(q) == "backward" for q in self.readers.get(value, ()))

    def phase(self, position: int) -> str:
        """Phase of the operation at a position."""
        return self.graph.ops[position].phase if position < len(self.graph.ops) else "result"


@cached_on_graph
def layered(graph: Graph) -> LayeredProgram:
    return LayeredProgram(graph, layers_pass.find(graph))


def _is_kept(program: LayeredProgram, value: int, layer_values: Set[int], keeps_products: bool) -> bool:
    """Whether a value of a layer stays in memory.

    It does if it depends on no argument, if operations outside the layer's own passes read it, or by the policy.
    """
    op = program.graph.ops[program.producer[value]]
    if value in program.constant or op.equation.effects or (keeps_products and op.name in ALL_PRODUCTS):
        return True
    for q in program.readers.get(value, ()):
        phase = program.phase(q)
        within_layer = phase == "forward" and not layer_values.isdisjoint(program.graph.ops[q].outputs)
        if not within_layer and (phase != "backward" or is_user_remat(program.graph.ops[q])):
            return True
    return False


def _constants(ops: Sequence[Op], start: Iterable[int]) -> frozenset[int]:
    """Values that depend on constants alone."""
    constants = set(start)
    for op in ops:
        if not op.equation.effects and all(v in constants for v in values_of(op.inputs)):
            constants.update(op.outputs)
    return frozenset(constants)


def is_user_remat(op: Op) -> bool:
    """Whether an operation is the user's own rematerialisation."""
    return op.name == jax_compat.REMAT


def values_of(atoms: Iterable[Atom]) -> list[int]:
    return list(dict.fromkeys([a for a in atoms if isinstance(a, int)]))
