"""The strategies of one operation on one mesh: all valid maps from mesh axes to factors.

Each mesh axis cuts one factor of the operation's rule, or none -> _options, _expand. If the factor is reduced, the
strategy also determines what happens to the partial sums along the axis:

    ALL_REDUCE      they are summed at once, and the result is replicated along the axis
    REDUCE_SCATTER  they are summed, and the axis cuts a dimension of the result
    DEFERRED        they are left to the consumers, if a linear operation can use them

What devices gather inside the operation, keys and values of attention, they may as well pass round along the axes that
cut them (RING).

Every strategy has two layouts: `assigned`, the factor that each axis cuts during execution, which is the layout that
the operands must have, and `result`, that of the results afterwards (a factor, REPLICATED, or PARTIAL).

    seconds = roofline(flops / parts, local bytes) + sum of the collectives that reduce partial sums       -> _cost
              + those of the devices that run a kernel together                                       -> _sent_cost
              + the work of a device on what is passed round                                          -> _ring_cost
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.collectives import collective_time
from autopar.cost_models.compute import op_time, product_efficiency
from autopar.cost_models.sharding.strategies import (
    ALL_REDUCE,
    DEFERRED,
    NOTHING,
    REDUCE_SCATTER,
    RING,
    Factors,
    StrategySet,
    piece_counts,
    sent_bytes,
    share,
    shares,
)
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Type
from autopar.ir.layout import PARTIAL, REPLICATED
from autopar.passes.op_groups.reduction_lowering import emitted
from autopar.rules import Rule

#: Largest extent of a dimension after padding to even pieces, as a multiple of its extent. All costs below are those of
#: the padded pieces.
MOST_PADDING = 1.5


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one execution of an operation that is not cut.

    Attributes:
        flops: FLOPs of the whole operation.
        operands, results: types of operands and results.
        dtype: data type that determines the peak rate.
        combined: the backend can combine its partial results; otherwise reduced factors are not cut.
        linear_sum: its reduction is a sum, so that partial results may be scattered or deferred.
        deferrable: consumers can use its partial sums.
        even: factors that must be cut evenly.
        product: it is a dot or a convolution, whose efficiency depends on its extents.
        behind: its reductions can overlap with computation.
        dot: it is a dot, whose partial sums may be reduced in stages
            (`autopar.passes.op_groups.reduction_lowering`).
        unread: results that nothing reads, whose partial sums are not reduced.
        in_groups: factors of the rows and of their groups, for each of which a product of its own runs; () for others.
    """

    flops: float
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    dtype: str
    combined: bool = True
    linear_sum: bool = True
    deferrable: bool = False
    even: tuple[int, ...] = ()
    product: bool = False
    behind: bool = False
    dot: bool = False
    unread: tuple[int, ...] = ()
    in_groups: tuple[int, ...] = ()


def layouts_of(
    shape: Sequence[int], mesh: LogicalMesh, index: int, most_padding: float = MOST_PADDING, *, partial: bool = False
) -> StrategySet:
    """All layouts of a value of this shape, as the strategies of an argument, a copy or a region's input or output.

    Args:
        shape: of the value. An empty value is replicated only: it costs nothing, and jaxlib 0.10 returns pieces of the
            wrong shape if it is cut.
        mesh: the mesh to plan for.
        index: of the strategy set.
        most_padding: as in `MOST_PADDING`; 1 for arguments and results of the program, which must divide.
        partial: the value may be a partial sum along any axes.
    """
    return replace(_layouts(tuple(shape), mesh.sizes, most_padding, partial), index=index)


#: Number of strategy sets that are kept: the programs of a step, one for every choice of rematerialised layers, of
#: stages and of pins, have nearly the same ones.
KEPT = 512


@lru_cache(maxsize=KEPT)
def _layouts(shape: tuple[int, ...], sizes: tuple[int, ...], most_padding: float, partial: bool) -> StrategySet:
    options = [REPLICATED] if 0 in shape else [REPLICATED, *(d for d, n in enumerate(shape) if n > 1)]
    result = _product([*options, PARTIAL] if partial and 0 not in shape else options, len(sizes))
    result = result[_fits(result, shape, sizes, most_padding)]
    return StrategySet(-1, result, result, np.zeros_like(result), np.zeros(len(result)), shape)


def strategies_of(rule: Rule, work: Work, mesh: LogicalMesh, index: int) -> StrategySet:
    """All strategies of an operation with this rule on this mesh, as strategy set number `index`."""
    return replace(_strategies(rule, work, mesh), index=index)


@lru_cache(maxsize=KEPT)
def _strategies(rule: Rule, work: Work, mesh: LogicalMesh) -> StrategySet:
    assigned, result, after = _expand(_options(rule, work), rule, mesh, _most_padding(rule, work))
    return StrategySet(-1, assigned, result, after, _cost(rule, work, assigned, result, after, mesh), rule.sizes)


def _most_padding(rule: Rule, work: Work) -> NDArray[np.float64]:
    """Largest extent of each factor after padding, as a multiple of its extent, shape (factors,).

    A factor that is only part of a dimension, as in a reshape, must be cut evenly: a padded third of 16 is 6 elements,
    but a padded third of 4 x 4 is 2 x 4.
    """
    most = np.full(len(rule.sizes), MOST_PADDING)
    most[list(work.even)] = 1.0
    for type_, dims in zip((*work.operands, *work.results), (*rule.operands, *rule.results), strict=True):
        most[[f for f, n in zip(dims, type_.shape, strict=True) if n != rule.sizes[f]]] = 1.0
    return most


def _expand(
    options: Sequence[tuple[int, int, int]], rule: Rule, mesh: LogicalMesh, most_padding: float | NDArray[np.float64]
) -> tuple[Factors, Factors, NDArray[np.int16]]:
    """(assigned, result, after), shape (n, axes) each, of all valid choices of one of `_options` per axis."""
    picks = _product(list(range(len(options))), len(mesh.sizes))
    table = np.array(options, np.int16)
    assigned, after, onto = table[picks, 0], table[picks, 1], table[picks, 2]
    result = np.where(after <= NOTHING, assigned, np.where(after == REDUCE_SCATTER, onto, REPLICATED)).astype(np.int16)
    result[after == DEFERRED] = PARTIAL
    valid = _fits(assigned, rule.sizes, mesh.sizes, most_padding) & _fits(result, rule.sizes, mesh.sizes, most_padding)
    valid &= _scatters_in_order(after, result) & _defers_evenly(after, assigned, rule.sizes, mesh.sizes)
    valid &= ~((after == RING).any(1) & (np.isin(assigned, rule.rings) & (after != RING)).any(1))  # one ring along all
    return assigned[valid], result[valid], after[valid].astype(np.int16)


def sum_strategies(work: Work, mesh: LogicalMesh, index: int, stays: bool) -> StrategySet:
    """Strategies of an elementwise sum of two values that may be partial sums.

    Each axis cuts a dimension or nothing, or both operands are partial along it. In the last case the sum is
    all-reduced, scattered onto a dimension, or, if `stays`, left partial. The cost includes collectives only: the HBM
    traffic is charged as for all light operations.
    """
    type_ = work.results[0]
    dims = [d for d, n in enumerate(type_.shape) if n > 1]
    options = [(REPLICATED, NOTHING, REPLICATED), *((d, NOTHING, REPLICATED) for d in dims)]
    options.append((PARTIAL, ALL_REDUCE, REPLICATED))
    if type_.rank > 1:
        options.extend((PARTIAL, REDUCE_SCATTER, d) for d in dims)
    if stays:
        options.append((PARTIAL, DEFERRED, REPLICATED))
    rule = Rule((tuple(range(type_.rank)),) * 2, (tuple(range(type_.rank)),), type_.shape, (), (), "autopar")
    assigned, result, after = _expand(options, rule, mesh, MOST_PADDING)
    return StrategySet(index, assigned, result, after, _sum_cost(rule, work, assigned, result, after, mesh), rule.sizes)


def _options(rule: Rule, work: Work) -> list[tuple[int, int, int]]:
    """The choices of one axis: (factor cut, treatment of the partial sum, factor that a reduce-scatter cuts)."""
    produced = sorted({f for dims in rule.results for f in dims})
    scatter = [
        f for f in (rule.results[0] if rule.results else ()) if rule.sizes[f] > 1 and f not in rule.need_replication
    ]
    options = [(REPLICATED, NOTHING, REPLICATED)]
    for factor in rule.free:
        if factor not in rule.reduced:
            # A factor that is neither in a result nor reduced cannot be cut: devices would have different results.
            if factor in produced or not rule.results:
                options.append((factor, NOTHING, REPLICATED))
                options.extend([(factor, RING, REPLICATED)] * (factor in rule.rings))
            continue
        if not work.combined:
            continue
        options.append((factor, ALL_REDUCE, REPLICATED))
        # Compilers lower the reduce-scatter of a vector as an all-reduce, so it is no option.
        if work.linear_sum and len(rule.results) == 1 and work.results[0].rank > 1:
            options.extend((factor, REDUCE_SCATTER, onto) for onto in scatter)
        if work.linear_sum and work.deferrable:
            options.append((factor, DEFERRED, REPLICATED))
    return options


def _product(options: Sequence[int], axes: int) -> NDArray[np.int16]:
    """All choices of one option per axis, shape (n, axes)."""
    return np.array(list(itertools.product(options, repeat=axes)), np.int16).reshape(-1, axes)


def _fits(
    factors: Factors, extents: Sequence[int], sizes: Sequence[int], most: float | NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Whether each row is valid, shape (n,).

    A row must not cut a factor into more pieces than it has elements, nor pad it to more than `most` times its extent.
    Only one axis may cut a factor unevenly: with two axes, the compiler gathers the value at the next reshard.
    """
    extent = np.array(extents, np.int64)
    parts = piece_counts(factors, len(extents), sizes)
    padded = -(-extent // parts) * parts  # -(-a // b) rounds up
    alone = (factors[:, :, None] == np.arange(len(extents))).sum(1) <= 1
    fits = (parts <= np.maximum(extent, 1)) & (padded <= most * extent) & (alone | (padded == extent))
    return fits.all(1)


def _scatters_in_order(after: NDArray[np.int16], result: Factors) -> NDArray[np.bool_]:
    """Whether reduce-scatters are valid, shape (n,).

    A reduce-scatter onto a dimension that other axes cut as well must run along the last of these axes: pieces are in
    major-to-minor order of the axes. Only one axis may scatter onto a dimension.
    """
    ok = np.ones(len(after), bool)
    for axis in range(after.shape[1]):
        scatter = after[:, axis] == REDUCE_SCATTER
        for other in range(after.shape[1]):
            if other == axis:
                continue
            same = scatter & (result[:, other] == result[:, axis])
            ok &= ~(same & ((after[:, other] == REDUCE_SCATTER) | (other > axis)))
    return ok


def _defers_evenly(
    after: NDArray[np.int16], assigned: Factors, extents: Sequence[int], sizes: Sequence[int]
) -> NDArray[np.bool_]:
    """Whether deferred sums are valid, shape (n,).

    With a deferred sum, each cut of a contracted factor becomes a dimension of its own, so the cuts must be even.
    """
    uneven = (np.array(extents, np.int64) % piece_counts(assigned, len(extents), sizes) > 0)[:, None]
    split = (after > NOTHING)[:, :, None] & (assigned[:, :, None] == np.arange(len(extents)))
    return ~((after == DEFERRED).any(1) & (split & uneven).any((1, 2)))


def _cost(
    rule: Rule, work: Work, assigned: Factors, result: Factors, after: NDArray[np.int16], mesh: LogicalMesh
) -> NDArray[np.float64]:
    """Seconds of one execution under each strategy, shape (n,)."""
    each = shares(assigned, rule.sizes, mesh.sizes)
    local = np.zeros(len(assigned))
    for type_, dims in zip((*work.operands, *work.results), (*rule.operands, *rule.results), strict=True):
        if type_.rank:
            local += type_.nbytes * share(each, dims)
    efficiency = _product_efficiency(rule, work, each, mesh) if work.product else 1.0
    cost = op_time(work.flops * each.prod(1), local, work.dtype, mesh.device, launches=1, efficiency=efficiency)
    cost = cost + _sum_cost(rule, work, assigned, result, after, mesh) + _sent_cost(rule, work, assigned, after, mesh)
    return cost + _ring_cost(rule, work, assigned, after, mesh) if rule.rings else cost


def _product_efficiency(rule: Rule, work: Work, each: NDArray[np.float64], mesh: LogicalMesh) -> NDArray[np.float64]:
    """Efficiency of a device's piece of a product, shape (n,).

    Its rows are the factors of the left operand, batch factors included; its columns are those of the right operand.
    Rows in groups (`Work.in_groups`) are taken to be evenly divided among them.
    """
    (left, right), (result,) = (map(set, rule.operands[:2]), map(set, rule.results))
    grouped, groups = work.in_groups or (-1, -1)
    extents = [*rule.sizes]
    if work.in_groups:  # of which a kernel has tiles as shards
        extents[grouped] = work.operands[0].shape[rule.operands[0].index(grouped)]
    everything = [f for f in range(len(rule.sizes)) if f != groups]
    rows = [f for f in everything if f in result - right]
    columns = [f for f in everything if f in result & right - left]
    contracted = [f for f in everything if f not in result]

    def local(factors: list[int]) -> NDArray[np.float64]:
        parts = extents[groups] if grouped in factors else 1
        return math.prod(extents[f] for f in factors) * share(each, factors) / parts

    return product_efficiency(local(rows), local(columns), local(contracted), mesh.device)


def _sum_cost(
    rule: Rule, work: Work, assigned: Factors, result: Factors, after: NDArray[np.int16], mesh: LogicalMesh
) -> NDArray[np.float64]:
    """Seconds of the collectives that reduce partial sums, shape (n,)."""
    cost = np.zeros(len(assigned))
    if not (after > NOTHING).any():
        return cost
    after = emitted(after, assigned, result, mesh.sizes, dot=work.dot)
    mesh = mesh.with_overlap() if work.behind else mesh
    each = shares(assigned, rule.sizes, mesh.sizes)
    piece_bytes = np.zeros(len(assigned))
    for i, (type_, dims) in enumerate(zip(work.results, rule.results, strict=True)):
        piece_bytes += 0.0 if i in work.unread else type_.nbytes * share(each, dims)
    for axis, size in enumerate(mesh.sizes):
        scatter = after[:, axis] == REDUCE_SCATTER
        cost += np.where(scatter, collective_time("reduce-scatter", piece_bytes, (axis,), mesh), 0.0)
        piece_bytes = np.where(scatter, piece_bytes / size, piece_bytes)
    reducing = after == ALL_REDUCE
    for axes in _axis_sets(len(mesh.sizes)):
        exactly = (reducing == np.isin(np.arange(len(mesh.sizes)), axes)).all(1)
        cost += np.where(exactly, collective_time("all-reduce", piece_bytes, axes, mesh), 0.0)
    return cost


def _sent_cost(
    rule: Rule, work: Work, assigned: Factors, after: NDArray[np.int16], mesh: LogicalMesh
) -> NDArray[np.float64]:
    """Seconds of the collectives of the devices that run an operation together, shape (n,)."""
    cost = np.zeros(len(assigned))
    types = *work.operands, *work.results
    each, passed = shares(assigned, rule.sizes, mesh.sizes), (after == RING).any(1)
    for sent in rule.sent:
        along = np.isin(assigned, sent.factors)
        here = True if sent.ring is None else passed == sent.ring
        nbytes = sent_bytes(sent, rule, types, each)
        for axes in _axis_sets(len(mesh.sizes)):
            devices = math.prod(mesh.sizes[a] for a in axes)
            if devices >= sent.least:
                exactly = here & (along == np.isin(np.arange(len(mesh.sizes)), axes)).all(1)
                seconds = sent.times(devices) * collective_time(sent.kind, nbytes, axes, mesh)
                cost += np.where(exactly, seconds, 0.0)
    return cost


def _ring_cost(
    rule: Rule, work: Work, assigned: Factors, after: NDArray[np.int16], mesh: LogicalMesh
) -> NDArray[np.float64]:
    """Seconds in which a device reads and writes its pieces again for each piece that it receives, shape (n,).

    The results of all pieces are merged one after the other, and two kernels run for each piece.
    """
    each = shares(assigned, rule.sizes, mesh.sizes)
    types, dims = (*work.operands, *work.results), (*rule.operands, *rule.results)
    nbytes = sum((times * types[i].nbytes * share(each, dims[i]) for i, times in rule.passing), np.zeros(len(assigned)))
    received = np.where(after == RING, mesh.sizes, 1).prod(1) - 1
    return received * op_time(0.0, nbytes, work.dtype, mesh.device, launches=2)


def _axis_sets(axes: int) -> list[tuple[int, ...]]:
    """All nonempty sets of axes, as ascending positions."""
    return [s for n in range(1, axes + 1) for s in itertools.combinations(range(axes), n)]
