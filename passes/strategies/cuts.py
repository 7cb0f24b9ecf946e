"""What strategies cut: dimensions of argument leaves and of products, and the axes that cut them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

from autopar.ir.graph import Graph
from autopar.ir.op_sets import ALL_PRODUCTS
from autopar.ir.train_state import match_state, optimizer_leaves, parameter_copies, parameter_leaves
from autopar.passes.microbatch.batch import infer_batch
from autopar.passes.microbatch.batch_dimensions import batch_dimensions
from autopar.passes.op_groups.constraints import Pins
from autopar.passes.op_groups.pin_keys import products_key
from autopar.rules import Rule

Axes = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """A step, as strategies see it.

    Attributes:
        graph: the step.
        rules: signature of an operation -> its sharding rule.
        named_batch: positions of the argument leaves that hold the batch; None: inferred.
    """

    graph: Graph
    rules: Mapping[int, Rule]
    named_batch: Sequence[int] | None

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an argument leaf."""
        return self.graph.types[self.graph.inputs[position]].shape

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """Argument leaves that hold the batch, but for scalars."""
        leaves = infer_batch(self.graph) if self.named_batch is None else self.named_batch
        return tuple(i for i in leaves if self.shape(i))

    @cached_property
    def state(self) -> tuple[int, ...]:
        """Argument leaves that the step returns anew, but for scalars."""
        return tuple(sorted(i for i in match_state(self.graph).values() if self.shape(i)))

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Argument leaves that are parameters, but for scalars and for copies that only the update reads."""
        copies = parameter_copies(self.graph)
        return tuple(i for i in parameter_leaves(self.graph) if self.shape(i) and i not in copies)

    @cached_property
    def optimizer(self) -> tuple[int, ...]:
        """Argument leaves that are state of the optimizer, float32 masters among them, but for scalars."""
        leaves = sorted({*optimizer_leaves(self.graph), *parameter_copies(self.graph)})
        return tuple(i for i in leaves if self.shape(i))

    @cached_property
    def products(self) -> tuple[int, ...]:
        """Results of the matrix products and convolutions of the forward pass that have a source line."""
        ops = (op for op in self.graph.walk() if op.name in ALL_PRODUCTS and op.phase == "forward" and op.source)
        return tuple(op.outputs[0] for op in ops)

    @cached_property
    def batch_dimensions(self) -> Mapping[int, frozenset[int]]:
        """Value -> its dimensions that come from the batch."""
        return batch_dimensions(self.graph, self.rules, self.batch)


@dataclass(frozen=True)
class Cut:
    """What one strategy cuts.

    Attributes:
        leaves: argument leaf -> the dimension; None: the leaf is pinned, and the axis leaves it whole.
        values: product -> the dimension.
        sums: products that sum over a cut dimension; of their results only the batch is cut.
    """

    leaves: Mapping[int, int | None]
    values: Mapping[int, int]
    sums: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Cuts:
    """What strategies cut.

    Attributes:
        leaves, values: argument leaf, or product -> dimension -> the axes that cut it, in the order of the mesh.
        sums: products that sum over a cut dimension.
    """

    leaves: Mapping[int, Mapping[int, Axes]]
    values: Mapping[int, Mapping[int, Axes]]
    sums: frozenset[int] = frozenset()

    def merged(self, cut: Cut, axes: Axes, order: Sequence[str]) -> Cuts:
        """These, and what one more strategy cuts over `axes`; a leaf that one of the axes cuts already stays."""
        leaves = {i: _with(self.leaves.get(i, {}), dim, axes, order) for i, dim in cut.leaves.items()}
        values = {v: _with(self.values.get(v, {}), dim, axes, order) for v, dim in cut.values.items()}
        return Cuts({**self.leaves, **leaves}, {**self.values, **values}, self.sums | cut.sums)

    def pins(self, step: Step) -> Pins:
        """Ordinary pins: leaves by their path, products by line and shape."""
        graph = step.graph
        specs = {i: _spec([dims.get(d) for d in range(len(step.shape(i)))]) for i, dims in self.leaves.items()}
        return {**{graph.input_paths[i]: spec for i, spec in specs.items()}, **self._products(step)}

    def _products(self, step: Step) -> Pins:
        """Pins of products; those of one line and shape that are not cut alike have none."""
        pins: dict[str, set[PartitionSpec | None]] = {}
        for v in step.products:
            shape, batch = step.graph.types[v].shape, step.batch_dimensions.get(v, ())
            extents = ["*" if d in batch else n for d, n in enumerate(shape)]
            key = products_key(step.graph.producers[v].source, extents)
            pins.setdefault(key, set()).add(self._product(v, len(shape), batch))
        single = {key: next(iter(specs)) for key, specs in pins.items() if len(specs) == 1}
        return {key: spec for key, spec in single.items() if spec is not None}

    def _product(self, value: int, rank: int, batch: Collection[int]) -> PartitionSpec | None:
        """The spec of a product; None if nothing concerns it. Dimensions that are not cut are free for other axes."""
        dims = self.values.get(value, {})
        if not dims and value not in self.sums:
            return None
        free = [PartitionSpec.UNCONSTRAINED if value not in self.sums or d in batch else None for d in range(rank)]
        return _spec([dims.get(d, free[d]) for d in range(rank)])


def _with(dims: Mapping[int, Axes], dim: int | None, axes: Axes, order: Sequence[str]) -> Mapping[int, Axes]:
    if dim is None or any(axis in used for used in dims.values() for axis in axes):
        return dims
    return {**dims, dim: tuple(sorted((*dims.get(dim, ()), *axes), key=order.index))}


def _spec(entries: Sequence[Any]) -> PartitionSpec:
    named = [entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in entries]
    while named and named[-1] is None:
        named.pop()
    return PartitionSpec(*named)
