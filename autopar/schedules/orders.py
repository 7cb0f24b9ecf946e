"""The order in which each rank runs its passes: the published schedules as formulas.

p ranks (r from 0), m microbatches, v chunks per rank; stage c p + r is chunk c of rank r, and with v = 1 stage = rank.
A rank's order is that of its forward passes, that of its backward passes, and how the two are merged: `w` forward
passes to warm up, then one of each in turn, then the rest.

    inference         F 0 .. m-1
    gpipe             w = m, backward from the last microbatch to the first                        [G], figure 2
    1f1b              w = p - 1 - r                                                                [D], [N1]
    eager-1f1b        w = 2 (p - 1 - r): the transfer of an activation may take a whole pass       [E]
    interleaved-1f1b  w = 2 (p - 1 - r) + (v - 1) p; groups of p microbatches go through one chunk
                      after the other, backward through the last chunk first                       [N2], section 2.2
    zb-h1             as 1f1b, and W(i) after B(i + r): at most p microbatches in every stash      [Z], section 2.1
    terapipe          w = all slices; backward sequence by sequence, each from its last slice      [T]
    chimera           per unit of p microbatches half run down the ranks, half up; the j-th of either has its F at
                      slot s + 2 j of stage s and its B at 2 p - 1 - s + 2 j; units are 2 p apart  [C]
    pipedream         as 1f1b over all batches, an update after every B                            [D]
    pipedream-2bw     as 1f1b over all batches, an update per batch                                [N1]
    ampnet            the passes whose inputs have arrived, B before F, p microbatches in flight   [A]

Sources: [G] Huang et al. (2019), GPipe. [D] Narayanan et al. (2019), PipeDream. [N1] Narayanan et al. (2021),
Memory-efficient pipeline-parallel DNN training. [N2] Narayanan et al. (2021), Efficient large-scale language model
training on GPU clusters using Megatron-LM. [E] Zhuang et al. (2023), On optimizing the communication of model
parallelism. [Z] Qi et al. (2023), Zero bubble pipeline parallelism. [T] Li et al. (2021), TeraPipe. [C] Li and Hoefler
(2021), Chimera. [A] Gaunt et al. (2017), AMPNet.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.schedules.instructions import Kind

PassId = tuple[Kind, int, int]
"""(kind, stage, microbatch)."""

Orders = tuple[tuple[PassId, ...], ...]
"""One order of passes per rank."""


#: Microbatches per rank from which on a schedule is periodic: a property of this many holds for more.
REPEATING = 16


@dataclass(frozen=True)
class Size:
    """The dimensions of a pipeline.

    Attributes:
        ranks: groups of devices, p.
        microbatches: microbatches of one batch, m.
        chunks: stages per rank, v.
        slices: parts into which the sequence of every microbatch is split.
        batches: batches that follow each other without a flush.
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    slices: int = 1
    batches: int = 1

    @property
    def items(self) -> int:
        """Number of slices of microbatches, of all batches, that run through the pipeline one after the other."""
        return self.microbatches * self.slices * self.batches


def _passes(kind: Kind, stage: int, microbatches: Sequence[int]) -> list[PassId]:
    return [(kind, stage, i) for i in microbatches]


def _merge(forward: Sequence[PassId], backward: Sequence[PassId], warm_up: int) -> tuple[PassId, ...]:
    """`warm_up` forward passes, then one forward and one backward in turn, then the rest of the backward passes."""
    w = min(warm_up, len(forward))
    pairs = [both for pair in zip(forward[w:], backward, strict=False) for both in pair]
    return (*forward[:w], *pairs, *backward[len(forward) - w :])


def inference(size: Size) -> Orders:
    return tuple(tuple(_passes("F", r, range(size.items))) for r in range(size.ranks))


def gpipe(size: Size) -> Orders:
    n = size.items
    return tuple(_merge(_passes("F", r, range(n)), _passes("B", r, range(n - 1, -1, -1)), n) for r in range(size.ranks))


def _one_forward_one_backward(size: Size, stride: int) -> Orders:
    n, p = size.items, size.ranks
    return tuple(_merge(_passes("F", r, range(n)), _passes("B", r, range(n)), stride * (p - 1 - r)) for r in range(p))


def one_f_one_b(size: Size) -> Orders:
    return _one_forward_one_backward(size, 1)


def eager_one_f_one_b(size: Size) -> Orders:
    return _one_forward_one_backward(size, 2)


def interleaved_one_f_one_b(size: Size) -> Orders:
    return tuple(_interleaved_rank(size, r) for r in range(size.ranks))


def _interleaved_rank(size: Size, rank: int) -> tuple[PassId, ...]:
    p, v = size.ranks, size.chunks
    groups = [range(first, first + p) for first in range(0, size.items, p)]
    forward: list[PassId] = [("F", c * p + rank, i) for group in groups for c in range(v) for i in group]
    backward: list[PassId] = [("B", c * p + rank, i) for group in groups for c in reversed(range(v)) for i in group]
    return _merge(forward, backward, 2 * (p - 1 - rank) + (v - 1) * p)


def zb_h1(size: Size) -> Orders:
    return tuple(_delay_weights(order, delay) for delay, order in enumerate(one_f_one_b(size)))


def _delay_weights(order: Sequence[PassId], delay: int) -> tuple[PassId, ...]:
    """W(i) after B(i + delay), or at the end."""
    backward = [pass_id for pass_id in order if pass_id[0] == "B"]
    weights: list[PassId] = [("W", stage, i) for _, stage, i in backward]
    index = {pass_id: position for position, pass_id in enumerate(backward)}
    with_weights: list[PassId] = []
    for pass_id in order:
        with_weights.append(pass_id)
        if index.get(pass_id, -1) >= delay:
            with_weights.append(weights[index[pass_id] - delay])
    return (*with_weights, *weights[max(len(weights) - delay, 0) :])


def terapipe(size: Size) -> Orders:
    n, k = size.items, size.slices
    back = [i for first in range(0, n, k) for i in reversed(range(first, first + k))]
    return tuple(_merge(_passes("F", r, range(n)), _passes("B", r, back), n) for r in range(size.ranks))


def chimera(size: Size) -> Orders:
    return tuple(_chimera_rank(size, r) for r in range(size.ranks))


def chimera_copies(size: Size) -> tuple[int, ...]:
    """The copy of every microbatch: of each unit of p, the first half runs down (0), the second up (1)."""
    return tuple(_direction(size, i)[0] for i in range(size.items))


def _direction(size: Size, microbatch: int) -> tuple[int, int]:
    """(copy, index among the microbatches of its unit and copy)."""
    p = size.ranks
    index = microbatch % p
    half = -(-min(p, size.items - (microbatch - index)) // 2)
    return (0, index) if index < half else (1, index - half)


def _chimera_rank(size: Size, rank: int) -> tuple[PassId, ...]:
    p = size.ranks
    slots: list[tuple[int, PassId]] = []
    for i in range(size.items):
        copy, index = _direction(size, i)
        s = p - 1 - rank if copy else rank
        start = 2 * p * (i // p) + 2 * index
        slots.append((start + s, ("F", copy * p + s, i)))
        slots.append((start + 2 * p - 1 - s, ("B", copy * p + s, i)))
    return tuple(pass_id for _, pass_id in sorted(slots))


def ampnet(size: Size) -> Orders:
    """The order of a simulation with passes of one tick each; in a real run the order depends on the times."""
    p, n = size.ranks, size.items
    orders: list[list[PassId]] = [[] for _ in range(p)]
    ready: list[list[tuple[bool, int]]] = [[] for _ in range(p)]  # (is forward, microbatch), best first
    ready[0] = [(True, i) for i in range(min(p, n))]
    started = len(ready[0])
    while any(ready):
        chosen = [(r, *heapq.heappop(queue)) for r, queue in enumerate(ready) if queue]
        for r, is_forward, i in chosen:
            orders[r].append(("F" if is_forward else "B", r, i))
            if is_forward:
                heapq.heappush(ready[min(r + 1, p - 1)], (r + 1 < p, i))
            elif r:
                heapq.heappush(ready[r - 1], (False, i))
            elif started < n:
                heapq.heappush(ready[0], (True, started))
                started += 1
    return tuple(map(tuple, orders))
