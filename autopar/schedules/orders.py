"""In which order each rank runs its passes: the published schedules as formulas.

p ranks (r from 0), m microbatches, v chunks per rank; stage c p + r is chunk c of rank r, and with v = 1 stage = rank.
A rank's order is that of its forward passes, that of its backward passes, and how the two are merged: `w` forward
passes to warm up, then one of each in turn, then the rest.

    inference         F 0 .. m-1
    gpipe             w = m, backward from the last microbatch to the first                        [G], figure 2
    1f1b              w = p - 1 - r                                                                [D], [N1]
    eager-1f1b        w = 2 (p - 1 - r): an activation has a whole pass to arrive                  [E]
    interleaved-1f1b  w = 2 (p - 1 - r) + (v - 1) p; groups of p microbatches go through one chunk
                      after the other, backward through the last chunk first                       [N2], section 2.2
    zb-h1             as 1f1b, and W(i) after B(i + r): every rank holds p microbatches at most    [Z], section 2.1
    terapipe          w = all slices; backward sequence by sequence, each from its last slice      [T]
    chimera           per unit of p microbatches half run down the ranks, half up; the j-th of either has its F at
                      slot s + 2 j of stage s and its B at 2 p - 1 - s + 2 j; units are 2 p apart  [C]
    pipedream         as 1f1b over all batches, an update after every B                            [D]
    pipedream-2bw     as 1f1b over all batches, an update per batch                                [N1]
    ampnet            whatever has arrived, B before F, p microbatches in flight                   [A]

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

Pass = tuple[Kind, int, int]
"""(kind, stage, microbatch)."""

Orders = tuple[tuple[Pass, ...], ...]
"""One order of passes per rank."""


#: Microbatches per rank from which on a schedule only repeats itself: what holds for so many holds for more.
REPEATING = 16


@dataclass(frozen=True)
class Size:
    """How large a pipeline is.

    Attributes:
        ranks: groups of devices, p.
        microbatches: microbatches of one batch, m.
        chunks: stages per rank, v.
        slices: parts of the sequence that every microbatch is cut into.
        batches: batches that follow each other without a flush.
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    slices: int = 1
    batches: int = 1

    @property
    def items(self) -> int:
        """Everything that runs through the pipeline one after the other."""
        return self.microbatches * self.slices * self.batches


def _passes(kind: Kind, stage: int, microbatches: Sequence[int]) -> list[Pass]:
    return [(kind, stage, i) for i in microbatches]


def _merge(forward: Sequence[Pass], backward: Sequence[Pass], warm_up: int) -> tuple[Pass, ...]:
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


def _interleaved_rank(size: Size, rank: int) -> tuple[Pass, ...]:
    p, v = size.ranks, size.chunks
    groups = [range(first, first + p) for first in range(0, size.items, p)]
    forward: list[Pass] = [("F", c * p + rank, i) for group in groups for c in range(v) for i in group]
    backward: list[Pass] = [("B", c * p + rank, i) for group in groups for c in reversed(range(v)) for i in group]
    return _merge(forward, backward, 2 * (p - 1 - rank) + (v - 1) * p)


def zb_h1(size: Size) -> Orders:
    return tuple(_delay_weights(order, delay) for delay, order in enumerate(one_f_one_b(size)))


def _delay_weights(order: Sequence[Pass], delay: int) -> tuple[Pass, ...]:
    """W(i) after B(i + delay), or at the end."""
    backward = [one for one in order if one[0] == "B"]
    weights: list[Pass] = [("W", stage, i) for _, stage, i in backward]
    place = {one: position for position, one in enumerate(backward)}
    found: list[Pass] = []
    for one in order:
        found.append(one)
        if place.get(one, -1) >= delay:
            found.append(weights[place[one] - delay])
    return (*found, *weights[max(len(weights) - delay, 0) :])


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
    """(copy, place among the microbatches of its unit and copy)."""
    p = size.ranks
    place = microbatch % p
    half = -(-min(p, size.items - (microbatch - place)) // 2)
    return (0, place) if place < half else (1, place - half)


def _chimera_rank(size: Size, rank: int) -> tuple[Pass, ...]:
    p = size.ranks
    slots: list[tuple[int, Pass]] = []
    for i in range(size.items):
        copy, place = _direction(size, i)
        s = p - 1 - rank if copy else rank
        start = 2 * p * (i // p) + 2 * place
        slots.append((start + s, ("F", copy * p + s, i)))
        slots.append((start + 2 * p - 1 - s, ("B", copy * p + s, i)))
    return tuple(one for _, one in sorted(slots))


def ampnet(size: Size) -> Orders:
    """What a run with passes of one tick each would do; in reality the order depends on the times."""
    p, n = size.ranks, size.items
    orders: list[list[Pass]] = [[] for _ in range(p)]
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
