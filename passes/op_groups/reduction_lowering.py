"""How compilers add up the partial sums of one operation that end on several mesh axes.

XLA's partitioner does the same on CPU, GPU and TPU (on CPU a reduce-scatter stays an all-reduce and a slice):

    one axis                an all-reduce; a reduce-scatter where the sum ends cut along the axis
    several, none cut       one all-reduce over all of them
    several, some cut       of a dot: a reduce-scatter along the first that is cut, then the others together: another
                            reduce-scatter if that is one axis and cut, else one all-reduce and a slice
                            of anything else: one all-reduce over all of them and a slice

A dot is added up in stages only where every mesh axis takes part (XLA puts an idle one to use in its own way) and no
other axis cuts the dimension that is scattered onto first; codegen has to ask for the first stage by a constraint
(-> `first_stage`). Measured for all layouts of a matrix on meshes of 8 devices: docs/design.md, "Partial sums".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.ir.layout import PARTIAL, REPLICATED, Layout

NOTHING, ALL_REDUCE, REDUCE_SCATTER, DEFERRED = range(4)

Factors = NDArray[np.int16]
"""Shape (strategies, mesh axes)."""


def emitted(after: Factors, assigned: Factors, held: Factors, sizes: Sequence[int], *, dot: bool) -> Factors:
    """`after` (see `autopar.passes.op_groups.strategies`) as it is carried out: what is not scattered is summed and
    sliced.

    The reduce-scatters run in the order of the axes, then the all-reduce.
    """
    scatters = after == REDUCE_SCATTER
    ending = scatters | (after == ALL_REDUCE)
    several = (ending.sum(1) > 1) & scatters.any(1)
    if not several.any():
        return after
    first = np.arange(after.shape[1]) == scatters.argmax(1)[:, None]
    stays = scatters & (first | (ending.sum(1) == 2)[:, None]) & _in_stages(after, assigned, held, sizes)[:, None] & dot
    return np.where(several[:, None] & scatters & ~stays, ALL_REDUCE, after).astype(np.int16)


def _in_stages(after: Factors, assigned: Factors, held: Factors, sizes: Sequence[int]) -> NDArray[np.bool_]:
    """Rows of which a dot is summed in stages, should they end on several axes."""
    onto = np.take_along_axis(held, (after == REDUCE_SCATTER).argmax(1)[:, None], 1)
    others = (after == NOTHING) & (np.array(sizes) > 1)
    unfit = others & ((assigned == REPLICATED) | (assigned == onto))
    return ~((after == DEFERRED) | unfit).any(1)


def first_stage(source: Layout, target: Layout, sizes: Sequence[int]) -> tuple[Layout, ...]:
    """The layout that a dot's result is to be constrained to first, on its way from partial sums to its own layout.

    Empty where its sums are not added up in stages.
    """
    ending = [s == PARTIAL != t for s, t in zip(source, target, strict=True)]
    codes = [
        NOTHING if s != PARTIAL else DEFERRED if t == PARTIAL else REDUCE_SCATTER if t >= 0 else ALL_REDUCE
        for s, t in zip(source, target, strict=True)
    ]
    row, assigned, held = (np.array([values], np.int16) for values in (codes, source, target))
    if sum(ending) < 2 or not (emitted(row, assigned, held, sizes, dot=True) == REDUCE_SCATTER).any():
        return ()
    first = codes.index(REDUCE_SCATTER)
    return (tuple(target[a] if a == first else REPLICATED if e else source[a] for a, e in enumerate(ending)),)
