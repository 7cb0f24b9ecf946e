"""Reduction lowering: the collectives that compilers emit for partial sums over several mesh axes.

XLA's partitioner does the same on CPU, GPU and TPU (on CPU a reduce-scatter is an all-reduce and a slice):

    axes of the sum            collectives                                                             -> emitted
    one                        an all-reduce, or a reduce-scatter if the result is cut along the axis
    several, result not cut    one all-reduce over all of them
    several, result cut        for a dot: a reduce-scatter along the first axis that cuts the result, then the other
                               axes together: another reduce-scatter if they are one axis that cuts the result, else
                               one all-reduce and a slice
                               for all other operations: one all-reduce over all axes and a slice

A dot is reduced in these stages only if every mesh axis takes part (XLA uses an idle axis in its own way) and no other
axis cuts the dimension that is scattered onto first -> _in_stages. Codegen has to request the first stage by a
constraint -> first_stage. Measured for all layouts of a matrix on meshes of 8 devices:
docs/benchmarks/layout-changes.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.sharding.strategies import ALL_REDUCE, DEFERRED, NOTHING, REDUCE_SCATTER, Factors
from autopar.ir.layout import PARTIAL, REPLICATED, Layout


def emitted(after: Factors, assigned: Factors, result: Factors, sizes: Sequence[int], *, dot: bool) -> Factors:
    """`after` as compilers lower it: a reduce-scatter that is not emitted becomes ALL_REDUCE, followed by a slice.

    The reduce-scatters run first, in the order of the axes, then the all-reduce.

    Args:
        after, assigned, result: as in `autopar.cost_models.sharding.strategies.StrategySet`, shape (n, axes).
        sizes: of the mesh axes.
        dot: the operation is a dot.
    """
    scatters = after == REDUCE_SCATTER
    ending = scatters | (after == ALL_REDUCE)
    several = (ending.sum(1) > 1) & scatters.any(1)
    if not several.any():
        return after
    first = np.arange(after.shape[1]) == scatters.argmax(1)[:, None]
    stays = (
        scatters & (first | (ending.sum(1) == 2)[:, None]) & _in_stages(after, assigned, result, sizes)[:, None] & dot
    )
    return np.where(several[:, None] & scatters & ~stays, ALL_REDUCE, after).astype(np.int16)


def _in_stages(after: Factors, assigned: Factors, result: Factors, sizes: Sequence[int]) -> NDArray[np.bool_]:
    """Whether a dot is reduced in stages, per row, if its partial sum is over several axes; shape (n,)."""
    onto = np.take_along_axis(result, (after == REDUCE_SCATTER).argmax(1)[:, None], 1)
    unreduced = (after == NOTHING) & (np.array(sizes) > 1)
    unfit = unreduced & ((assigned == REPLICATED) | (assigned == onto))
    return ~((after == DEFERRED) | unfit).any(1)


def first_stage(source: Layout, target: Layout, sizes: Sequence[int]) -> tuple[Layout, ...]:
    """The layout to which the result of a dot has to be constrained before its own; empty if not reduced in stages.

    Args:
        source: layout of the result before the reduction, with partial sums.
        target: its layout after the reduction.
        sizes: of the mesh axes.
    """
    ending = [s == PARTIAL != t for s, t in zip(source, target, strict=True)]
    codes = [
        NOTHING if s != PARTIAL else DEFERRED if t == PARTIAL else REDUCE_SCATTER if t >= 0 else ALL_REDUCE
        for s, t in zip(source, target, strict=True)
    ]
    row, assigned, result = (np.array([values], np.int16) for values in (codes, source, target))
    if sum(ending) < 2 or not (emitted(row, assigned, result, sizes, dot=True) == REDUCE_SCATTER).any():
        return ()
    first = codes.index(REDUCE_SCATTER)
    return (tuple(target[a] if a == first else REPLICATED if e else source[a] for a, e in enumerate(ending)),)
