"""Strategies of an op group as arrays, and the pieces that they leave on a device.

parts    number of pieces into which each factor is cut                                             -> piece_counts
share    share of a value on one device, padding of uneven pieces included                          -> shares, share
sent     bytes of the collectives of devices that run an operation together                         -> sent_bytes
padding  factor by which uneven pieces increase the bytes of a reshard                              -> padding
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Type
from autopar.rules import Rule
from autopar.rules.sent import Sent

# What devices do along an axis besides the operation: from ALL_REDUCE on, with the partial sums that it leaves. RING:
# they pass pieces of operands round while they run it, and gather none.
RING, NOTHING, ALL_REDUCE, REDUCE_SCATTER, DEFERRED = range(-1, 4)

Factors = NDArray[np.int16]
"""Shape (strategies, mesh axes)."""


Layouts = NDArray[np.integer[Any]]
"""Factor or dimension that each mesh axis cuts, shape (n, axes)."""


@dataclass(frozen=True, slots=True, eq=False)
class StrategySet:
    """All strategies of one kind of operation (or the layouts of one shape).

    Attributes:
        index: identity within one planning run; equal sets share it.
        assigned: factor that each axis cuts during execution, shape (n, axes).
        result: factor of the results that each axis cuts, shape (n, axes).
        after: what devices do along each axis besides, RING to DEFERRED, shape (n, axes).
        cost: seconds of one execution, shape (n,).
        sizes: extent of each factor.
        projections: cache of `autopar.cost_models.sharding.groups.projection`; equal sets of several problems share it.
    """

    index: int
    assigned: Factors
    result: Factors
    after: NDArray[np.int16]
    cost: NDArray[np.float64]
    sizes: tuple[int, ...]
    projections: dict[tuple[tuple[int, ...], bool], tuple[NDArray[np.int64], NDArray[np.int8]]] = field(
        default_factory=dict[Any, Any], repr=False
    )

    def __len__(self) -> int:
        return len(self.cost)


def piece_counts(factors: Layouts, count: int, sizes: Sequence[int]) -> NDArray[np.int64]:
    """Number of pieces into which each of `count` factors is cut, shape (n, count)."""
    parts = np.ones((len(factors), count + 1), np.int64)
    rows = np.arange(len(factors))
    column = np.where(factors >= 0, factors, count)  # the last column collects axes that cut no factor
    for axis, size in enumerate(sizes):
        parts[rows, column[:, axis]] *= size
    return parts[:, :count]


def shares(factors: Factors, extents: Sequence[int], sizes: Sequence[int]) -> NDArray[np.float64]:
    """The share of every factor that is on one device, padding included; shape (n, factors)."""
    extent = np.array([max(n, 1) for n in extents], np.int64)
    return -(-extent // piece_counts(factors, len(extents), sizes)) / extent


def share(each: NDArray[np.float64], dims: Sequence[int]) -> NDArray[np.float64]:
    """The share of a value that is on one device, from the shares of its factors, `each`; shape (n,)."""
    return each[:, [d for d in dims if d >= 0]].prod(1)


def sent_bytes(sent: Sent, rule: Rule, types: Sequence[Type], each: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bytes per device of a collective of the devices that run an operation together, shape (n,).

    Args:
        sent: the collective.
        rule: of the operation.
        types: of its operands and results together.
        each: the shares of the rule's factors that are on one device.
    """
    dims = (*rule.operands, *rule.results)[sent.array]
    return sent.share * types[sent.array].nbytes * share(each, sent.dims(dims))


def padding(sources: Layouts, targets: Layouts, shape: Sequence[int], sizes: Sequence[int]) -> NDArray[np.float64]:
    """Factor >= 1 by which uneven pieces increase the bytes that a reshard moves, shape (sources, targets)."""
    if all(n <= 1 or n % math.prod(sizes) == 0 for n in shape):
        return np.ones((len(sources), len(targets)))
    extent = np.array([max(n, 1) for n in shape], np.int64)
    before, after = (piece_counts(layouts, len(shape), sizes) for layouts in (sources, targets))
    parts = np.maximum(before[:, None], after[None])
    return (-(-extent // parts) * parts / extent).prod(-1)
