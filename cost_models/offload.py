"""What it costs to keep arguments in the host's memory: each is copied to the device before the update, and back after.

    seconds(strategy)  =  2 * bytes of the device's piece(strategy) / host_bandwidth                 -> prices

The price is a term of the decision that lays the argument out, so that the optimizer cuts what it has to move. It is a
sum: neither the two directions nor computation hide anything. Compilers do better where memory is left (libtpu fetches
ahead as long as it lasts), but a plan that keeps state on the host is one that has none left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost_models.sharding.groups import Model
from autopar.cost_models.sharding.strategies import share, shares
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.keyed import grouped
from autopar.ir.problem import Floats, Ints, Node, Problem

WAYS = 2  # to the device and back


def priced(model: Model, graph: Graph, mesh: LogicalMesh, hosted: Sequence[int]) -> Model:
    """The model with the copies of the arguments at these positions in its costs."""
    if not hosted:
        return model
    nodes = list(model.problem.nodes)
    for group, leaves in grouped(_leaves(model, graph, hosted)).items():
        old = nodes[group]
        cost = old.cost + sum(_seconds(_bytes(model, group, *leaf, mesh), mesh) for leaf in leaves)
        nodes[group] = Node(old.name, cost, (old.signature, "host", tuple(leaves)))
    return replace(model, problem=Problem(tuple(nodes), model.problem.edges))


def host_bytes(model: Model, graph: Graph, mesh: LogicalMesh, hosted: Sequence[int], assignment: Ints) -> float:
    """Bytes in the host's memory per device under an assignment."""
    return sum(
        float(_bytes(model, group, *leaf, mesh)[assignment[group]])
        for group, leaves in grouped(_leaves(model, graph, hosted)).items()
        for leaf in leaves
    )


def seconds(nbytes: float, mesh: LogicalMesh) -> float:
    """Seconds per step to fetch and to bring back so many bytes per device."""
    return WAYS * nbytes / mesh.device.host_bandwidth


def _seconds(nbytes: Floats, mesh: LogicalMesh) -> Floats:
    return nbytes * seconds(1.0, mesh)


_Leaf = tuple[int, tuple[int, ...]]
"""Bytes of the whole argument, and its group's factor for each of its dimensions."""


def _leaves(model: Model, graph: Graph, hosted: Sequence[int]) -> Iterator[tuple[int, _Leaf]]:
    """(group, leaf) of every argument in host memory."""
    for position in sorted(hosted):
        value = graph.inputs[position]
        binding = model.grouping.bindings[value]
        yield binding.group, (graph.types[value].nbytes, binding.dims)


def _bytes(model: Model, group: int, nbytes: int, dims: tuple[int, ...], mesh: LogicalMesh) -> Floats:
    """Bytes of a device's piece under each strategy of a group."""
    s = model.grouping.groups[group].strategies
    return np.asarray(nbytes * share(shares(s.result, s.sizes, mesh.sizes), dims), np.float64)
