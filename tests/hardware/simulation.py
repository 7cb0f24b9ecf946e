"""Collectives run message by message: the judge of the closed forms in `autopar.hardware.algorithms`.

p workers hold real vectors cut into pieces, each under a key: chunk c of the message, or (source, destination) in an
all-to-all. A step is a list of messages, all of which leave before any arrives; a worker sends at most one and receives
at most one (full duplex); sending what one does not have is a KeyError. A step costs alpha + beta x its largest message
+ gamma x the most bytes that one worker adds. One element stands for one byte.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
State = list[dict[Hashable, Vector]]


@dataclass(frozen=True)
class Message:
    """Pieces under `keys`, put under the same ones or under `into`, or added to what is there."""

    sender: int
    receiver: int
    keys: tuple[Hashable, ...]
    add: bool = False
    into: tuple[Hashable, ...] | None = None


Step = list[Message]


@dataclass(frozen=True)
class Outcome:
    """What was sent: steps, bytes on the critical path, bytes in all, bytes added on the critical path."""

    state: State
    steps: int
    critical: int
    total: int
    reduced: int
    seconds: float


def run(state: State, steps: Iterable[Step], cost: Callable[[int, int], tuple[float, float]], gamma: float) -> Outcome:
    """Deliver all messages; `cost(sender, receiver)` is the (alpha, beta) of the link between them."""
    count = critical = total = reduced = 0
    seconds = 0.0
    for step in steps:
        assert step, "a step without messages"
        assert len({m.sender for m in step}) == len({m.receiver for m in step}) == len(step), "a link is used twice"
        cargo = [
            {to: state[m.sender][key].copy() for key, to in zip(m.keys, m.into or m.keys, strict=True)} for m in step
        ]
        sizes = [sum(map(len, load.values())) for load in cargo]
        for m, load in zip(step, cargo, strict=True):
            for key, piece in load.items():
                state[m.receiver][key] = state[m.receiver][key] + piece if m.add else piece
        added = max((size for m, size in zip(step, sizes, strict=True) if m.add), default=0)
        costs = [cost(m.sender, m.receiver) for m in step]
        seconds += max(a + b * size for (a, b), size in zip(costs, sizes, strict=True)) + gamma * added
        count, critical, total, reduced = count + 1, critical + max(sizes), total + sum(sizes), reduced + added
    return Outcome(state, count, critical, total, reduced, seconds)


def _tree(p: int) -> list[list[tuple[int, int, int]]]:
    """Per depth (root, first of the other half, end): the root of [root, end) keeps the larger half."""
    depths: list[list[tuple[int, int, int]]] = []
    groups = [(0, p)]
    while any(high - low > 1 for low, high in groups):
        split = [(low, low + (high - low + 1) // 2, high) for low, high in groups if high - low > 1]
        depths.append(split)
        groups = [half for low, mid, high in split for half in ((low, mid), (mid, high))]
    return depths


def mst_broadcast(p: int) -> list[Step]:
    return [[Message(low, mid, tuple(range(p))) for low, mid, _ in depth] for depth in _tree(p)]


def mst_reduce(p: int) -> list[Step]:
    return [[Message(mid, low, tuple(range(p)), True) for low, mid, _ in depth] for depth in reversed(_tree(p))]


def mst_scatter(p: int) -> list[Step]:
    return [[Message(low, mid, tuple(range(mid, high))) for low, mid, high in depth] for depth in _tree(p)]


def mst_gather(p: int) -> list[Step]:
    return [[Message(mid, low, tuple(range(mid, high))) for low, mid, high in depth] for depth in reversed(_tree(p))]


def ring_reduce_scatter(p: int) -> list[Step]:
    return [[Message(i, (i + 1) % p, ((i - t - 1) % p,), True) for i in range(p)] for t in range(p - 1)]


def ring_all_gather(p: int) -> list[Step]:
    return [[Message(i, (i + 1) % p, ((i - t) % p,)) for i in range(p)] for t in range(p - 1)]


def bruck_all_gather(p: int) -> list[Step]:
    """Worker i holds chunks i .. i + 2^k - 1 and sends the start of them 2^k back."""
    reach = [1 << k for k in range((p - 1).bit_length())]
    return [
        [Message(i, (i - r) % p, tuple((i + j) % p for j in range(min(r, p - r)))) for i in range(p)] for r in reach
    ]


def bruck_reduce_scatter(p: int) -> list[Step]:
    backwards = reversed(bruck_all_gather(p))
    return [[Message(m.receiver, m.sender, m.keys, True) for m in step] for step in backwards]


def recursive_halving(p: int) -> list[Step]:
    """Powers of two: partners half the group apart swap the halves that the other keeps."""
    steps: list[Step] = []
    span = p // 2
    while span:
        halves = [(i, i ^ span) for i in range(p)]
        steps.append([Message(i, j, tuple(range(j // span * span, j // span * span + span)), True) for i, j in halves])
        span //= 2
    return steps


def recursive_doubling(p: int) -> list[Step]:
    backwards = reversed(recursive_halving(p))
    return [[Message(m.receiver, m.sender, m.keys) for m in step] for step in backwards]


def butterfly(p: int) -> list[Step]:
    """Everything to the partner 2^k away; workers beyond a power of two hand in before and are told after."""
    inner, keys = 1 << (p.bit_length() - 1), tuple(range(p))
    before: list[Step] = [[Message(i, i - inner, keys, True) for i in range(inner, p)]]
    after: list[Step] = [[Message(i - inner, i, keys) for i in range(inner, p)]]
    rounds = [[Message(i, i ^ (1 << k), keys, True) for i in range(inner)] for k in range(inner.bit_length() - 1)]
    return rounds if inner == p else before + rounds + after


def parameter_server(p: int) -> list[Step]:
    keys = tuple(range(p))
    return [*([Message(i, p, keys, True)] for i in range(p)), *([Message(p, i, keys)] for i in range(p))]


def pipelined_server(p: int, chunks: int) -> list[Step]:
    """One chunk's sums go out while the next chunk comes in; chunk c + 1 begins when all have handed in chunk c."""
    steps: list[Step] = []
    for c in range(chunks + 1):
        for i in range(p):
            up = [Message(i, p, (c,), True)] if c < chunks else []
            down = [Message(p, i, (c - 1,))] if c > 0 else []
            steps.append(up + down)
    return steps


def sharded_server(p: int) -> list[Step]:
    up = [[Message(i, (i + t) % p, ((i + t) % p,), True) for i in range(p)] for t in range(1, p)]
    down = [[Message(i, (i + t) % p, (i,)) for i in range(p)] for t in range(1, p)]
    return up + down


def naive(p: int) -> list[Step]:
    """Everyone's own vector, kept besides the sum, to everyone."""
    keys, own = tuple(range(p)), tuple(("own", c) for c in range(p))
    return [[Message(i, (i + t) % p, own, True, keys) for i in range(p)] for t in range(1, p)]


def sequential(p: int) -> list[Step]:
    keys = tuple(range(p))
    return [*([Message(i, 0, keys, True)] for i in range(1, p)), *([Message(0, i, keys)] for i in range(1, p))]


def pairwise(p: int) -> list[Step]:
    return [[Message(i, (i + t) % p, ((i, (i + t) % p),)) for i in range(p)] for t in range(1, p)]


def bruck_all_to_all(p: int) -> list[Step]:
    """In round k the pieces whose distance has bit k set go 2^k further; those before it are already gone."""
    steps: list[Step] = []
    for k in range((p - 1).bit_length()):
        at = {(s, (s + d) % p): (s + (d & ((1 << k) - 1))) % p for s in range(p) for d in range(p) if d >> k & 1}
        steps.append(
            [Message(i, (i + (1 << k)) % p, tuple(key for key, here in at.items() if here == i)) for i in range(p)]
        )
    return steps


def two_level(hosts: int, per_host: int) -> list[Step]:
    """Rings inside all hosts, then rings of peers across, then rings inside: worker h per_host + d is device d of h.

    A message has hosts x per_host chunks; device d reduces those of [d hosts, (d + 1) hosts).
    """

    def inside(steps: list[Step]) -> list[Step]:
        return [
            [
                Message(
                    h * per_host + m.sender,
                    h * per_host + m.receiver,
                    tuple(share * hosts + c for share in m.keys if isinstance(share, int) for c in range(hosts)),
                    m.add,
                )
                for h in range(hosts)
                for m in step
            ]
            for step in steps
        ]

    def across(steps: list[Step]) -> list[Step]:
        return [
            [
                Message(
                    m.sender * per_host + d,
                    m.receiver * per_host + d,
                    tuple(d * hosts + c for c in m.keys if isinstance(c, int)),
                    m.add,
                )
                for d in range(per_host)
                for m in step
            ]
            for step in steps
        ]

    middle = across(ring_reduce_scatter(hosts) + ring_all_gather(hosts))
    return inside(ring_reduce_scatter(per_host)) + middle + inside(ring_all_gather(per_host))


Steps = Callable[[int], list[Step]]


def after(first: Steps, second: Steps) -> Steps:
    return lambda p: first(p) + second(p)


STEPS: Mapping[str, Mapping[str, Steps]] = {
    "broadcast": {"mst": mst_broadcast, "ring": after(mst_scatter, ring_all_gather)},
    "reduce": {"mst": mst_reduce, "ring": after(ring_reduce_scatter, mst_gather)},
    "scatter": {"mst": mst_scatter},
    "gather": {"mst": mst_gather},
    "reduce-scatter": {
        "mst": after(mst_reduce, mst_scatter),
        "ring": ring_reduce_scatter,
        "halving": recursive_halving,
        "bruck": bruck_reduce_scatter,
    },
    "all-gather": {
        "mst": after(mst_gather, mst_broadcast),
        "ring": ring_all_gather,
        "doubling": recursive_doubling,
        "bruck": bruck_all_gather,
    },
    "all-reduce": {
        "parameter-server": parameter_server,
        "sharded-server": sharded_server,
        "naive": naive,
        "sequential": sequential,
        "ring": after(ring_reduce_scatter, ring_all_gather),
        "tree": after(mst_reduce, mst_broadcast),
        "butterfly": butterfly,
        "halving-doubling": after(bruck_reduce_scatter, bruck_all_gather),
    },
    "all-to-all": {"pairwise": pairwise, "bruck": bruck_all_to_all},
}
"""Kind -> algorithm -> p -> its messages."""


def start(kind: str, p: int, chunk: int, data: np.random.Generator) -> tuple[State, State]:
    """What p workers hold before a collective of p chunks of `chunk` bytes, and what each must hold after it.

    Values are small integers, so that sums are exact in any order. Pieces that a worker may hold besides are not
    looked at. The state has one node more, for a server, whose accumulator is zero.
    """
    own = data.integers(-99, 99, size=(p, p, chunk)).astype(np.float64)
    total = own.sum(axis=0)
    every, nothing = range(p), {c: np.zeros(chunk) for c in range(p)}

    def only(holders: Sequence[int], rows: Callable[[int], Mapping[Hashable, Vector]]) -> State:
        return [dict(rows(i)) if i in holders else {} for i in range(p)]

    def full(i: int) -> dict[Hashable, Vector]:
        return {c: own[i, c] for c in every}

    summed: dict[Hashable, Vector] = {c: total[c] for c in every}
    before, wanted = {
        "broadcast": (only([0], full), only(every, lambda i: full(0))),
        "reduce": (only(every, full), only([0], lambda i: summed)),
        "scatter": (only([0], full), only(every, lambda i: {i: own[0, i]})),
        "gather": (only(every, lambda i: {i: own[i, i]}), only([0], lambda i: {c: own[c, c] for c in every})),
        "reduce-scatter": (only(every, full), only(every, lambda i: {i: total[i]})),
        "all-gather": (only(every, lambda i: {i: own[i, i]}), only(every, lambda i: {c: own[c, c] for c in every})),
        "all-reduce": (
            only(every, lambda i: full(i) | {("own", c): own[i, c] for c in every}),
            only(every, lambda i: summed),
        ),
        "all-to-all": (
            only(every, lambda i: {(i, j): own[i, j] for j in every}),
            only(every, lambda i: {(j, i): own[j, i] for j in every}),
        ),
    }[kind]
    return [*before, dict(nothing)], wanted
