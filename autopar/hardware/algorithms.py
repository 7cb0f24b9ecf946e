"""Every algorithm of a collective with its closed form: messages, bytes one after the other, bytes reduced and in all.

p workers each hold (or end up with) a message of n bytes; a step sends at most one message out of and one into every
worker and costs alpha + beta x its largest message + gamma x the bytes that a worker adds. An algorithm then takes

    t(p, n) = S(p) alpha + V(p) n beta + R(p) n gamma      -> Algorithm.time
    and moves T(p) n bytes over all links together         -> Algorithm.total

with alpha in s, beta in s/byte, gamma in s/byte reduced. n is the whole message: of a gathering or scattering kind,
that of all workers together, as in `autopar.ir.collective`. Sources:

    [C] Chan, Heimlich, Purkayastha, van de Geijn (2007), "Collective communication: theory, practice, and experience"
    [T] Thakur, Rabenseifner and Gropp (2005), "Optimization of collective communication operations in MPICH"
    [B] Bruck et al. (1997), "Efficient algorithms for all-to-all communications in multiport message-passing systems"
    [L] Li et al. (2014), "Scaling distributed machine learning with the parameter server"

Short messages go down a minimum spanning tree [C], which halves the group each step, the root keeping the larger half;
long ones go round a ring, [C]'s bucket. A composition is the sum of its parts and is written as one -> _after.
All forms hold for every p with log p = ceil(log2 p), except where `workers` says "powers of two": recursive halving and
doubling need partners at all distances 2^k, so that beyond powers of two Bruck's order takes their place at the same
cost, and the butterfly folds the workers that are left over into the others, two rounds more.

The textbook table of gradient exchange counts in round figures. It has N where N - 1 messages are sent, since
a worker's message to itself is free here; and the time of one parameter server is that of one direction of its link,
which pipelining approaches: with k chunks (k + 1) / k of it, and twice with one, the form below.

On one level of a network t(b) = S(n) alpha + V(n) beta b, in bytes b per device, is a line  -> line_of
The fastest of the algorithms that run there is the envelope of their lines                  -> one_level
`autopar.cost_models.collectives` composes these over several levels and mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.hardware.links import Level, Link

Count = Callable[[int], float]

ANY, POWERS_OF_TWO = "any number", "powers of two"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm of a collective over p >= 2 workers.

    Attributes:
        messages: p -> S(p), steps one after the other.
        volume: p -> V(p), bytes on the critical path per byte of the message.
        total: p -> T(p), bytes over all links per byte of the message.
        reduced: p -> R(p), bytes added on the critical path per byte of the message.
        workers: the numbers of workers for which it is defined, `ANY` or `POWERS_OF_TWO`.
    """

    messages: Count
    volume: Count
    total: Count
    reduced: Count = lambda p: 0.0
    workers: str = ANY

    def time(self, workers: int, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Seconds for `nbytes` bytes; 0 for one worker."""
        if workers == 1:
            return 0.0
        slope = self.volume(workers) * beta + self.reduced(workers) * gamma
        return self.messages(workers) * alpha + slope * nbytes

    def runs_on(self, workers: int) -> bool:
        """Whether the algorithm is defined for this number of workers."""
        return self.workers == ANY or workers & (workers - 1) == 0


def log(p: int) -> int:
    """ceil(log2 p): steps in which a message known to one worker can reach p."""
    return (p - 1).bit_length()


def share(p: int) -> float:
    """(p - 1) / p: what a worker lacks when it holds one of p pieces."""
    return (p - 1) / p


def _once(p: int) -> int:
    return 1


def _all(p: int) -> int:
    return p


def _others(p: int) -> int:
    return p - 1


def _twice(p: int) -> int:
    return 2 * p


def _there_and_back(p: int) -> int:
    return 2 * (p - 1)


def _after(first: Algorithm, second: Algorithm) -> Algorithm:
    """Both, one after the other."""
    return Algorithm(
        lambda p: first.messages(p) + second.messages(p),
        lambda p: first.volume(p) + second.volume(p),
        lambda p: first.total(p) + second.total(p),
        lambda p: first.reduced(p) + second.reduced(p),
        POWERS_OF_TWO if POWERS_OF_TWO in (first.workers, second.workers) else ANY,
    )


def _floor_power(p: int) -> int:
    """The largest power of two that is at most p."""
    return 1 << (p.bit_length() - 1)


def _doubling_rounds(p: int) -> int:
    """Beyond a power of two the workers left over hand in before and get the result after [T]."""
    return log(p) if p == _floor_power(p) else log(_floor_power(p)) + 2


def _doubling_reductions(p: int) -> int:
    return _doubling_rounds(p) - (p != _floor_power(p))


def _doubling_total(p: int) -> int:
    inner = _floor_power(p)
    return inner * log(inner) + 2 * (p - inner)


def _bruck_volume(p: int) -> float:
    """Round k of Bruck's all-to-all sends the pieces whose distance has bit k set [B]."""
    return sum(j.bit_count() for j in range(p)) / p


def _mst_pieces(p: int) -> float:
    """Pieces that the edges of the spanning tree carry: every edge those of the half below it, of p."""
    halves = {1: 0, 2: 1}

    def carried(size: int) -> int:
        if size not in halves:
            halves[size] = size // 2 + carried(size - size // 2) + carried(size // 2)
        return halves[size]

    return carried(p) / p


MST_BROADCAST = Algorithm(log, log, _others)
MST_REDUCE = Algorithm(log, log, _others, log)
MST_SCATTER = MST_GATHER = Algorithm(log, share, _mst_pieces)
RING_ALL_GATHER = Algorithm(_others, share, _others)
RING_REDUCE_SCATTER = Algorithm(_others, share, _others, share)
BRUCK_ALL_GATHER = Algorithm(log, share, _others)
BRUCK_REDUCE_SCATTER = Algorithm(log, share, _others, share)
MEET = Algorithm(_all, share, _others)

ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = MappingProxyType(
    {
        "broadcast": {"mst": MST_BROADCAST, "ring": _after(MST_SCATTER, RING_ALL_GATHER)},
        "reduce": {"mst": MST_REDUCE, "ring": _after(RING_REDUCE_SCATTER, MST_GATHER)},
        # Already optimal in both latency and bytes: long messages have no other form [C].
        "scatter": {"mst": MST_SCATTER},
        "gather": {"mst": MST_GATHER},
        "reduce-scatter": {
            "mst": _after(MST_REDUCE, MST_SCATTER),
            "ring": RING_REDUCE_SCATTER,
            "halving": Algorithm(log, share, _others, share, POWERS_OF_TWO),  # recursive halving
            "bruck": BRUCK_REDUCE_SCATTER,  # Bruck's all-gather backwards
            "copy": MEET,
        },
        "all-gather": {
            "mst": _after(MST_GATHER, MST_BROADCAST),
            "ring": RING_ALL_GATHER,
            "doubling": Algorithm(log, share, _others, workers=POWERS_OF_TWO),  # recursive doubling
            "bruck": BRUCK_ALL_GATHER,
            "copy": MEET,
        },
        "all-reduce": {
            # The server adds N messages to an accumulator that starts at zero, then answers each worker.
            "parameter-server": Algorithm(_twice, _twice, _twice, lambda p: p),  # [L]
            # Every worker serves a share: N - 1 shares come in, the sum goes out to N - 1.
            "sharded-server": _after(RING_REDUCE_SCATTER, RING_ALL_GATHER),  # [L]
            "naive": Algorithm(_others, _others, lambda p: p * (p - 1), _others),  # everyone sends all to everyone
            # One worker takes from each other in turn, adds, and answers each in turn.
            "sequential": Algorithm(_there_and_back, _there_and_back, _there_and_back, _others),
            "ring": _after(RING_REDUCE_SCATTER, RING_ALL_GATHER),
            "tree": _after(MST_REDUCE, MST_BROADCAST),
            "butterfly": Algorithm(_doubling_rounds, _doubling_rounds, _doubling_total, _doubling_reductions),
            # Recursive halving and doubling; beyond powers of two in Bruck's order, at the same cost [T, B].
            "halving-doubling": _after(BRUCK_REDUCE_SCATTER, BRUCK_ALL_GATHER),
            "copy": Algorithm(_all, lambda p: 2 * share(p), _there_and_back),
        },
        "all-to-all": {
            "pairwise": Algorithm(_others, share, _others),
            "bruck": Algorithm(log, _bruck_volume, lambda p: p * _bruck_volume(p)),
            # Along a ring the piece for distance j goes min(j, p - j) hops; over all j that is floor(p^2 / 4).
            "shift": Algorithm(_others, lambda p: (p * p // 4) / p, lambda p: p * p // 4),
            # Pieces are split before and joined after, which costs as much as the copy between the workers.
            "copy": Algorithm(_all, lambda p: 2 * share(p), _others),
        },
        "collective-permute": {
            "direct": Algorithm(_once, lambda p: 1.0, lambda p: p),
            "copy": Algorithm(_all, lambda p: 1.0, lambda p: p),
            # A ring's rate counts both directions, of which a shift uses one.
            "shift": Algorithm(_once, lambda p: 2.0, lambda p: p),
        },
    }
)
"""Kind -> name -> algorithm; "copy" is the one rendezvous of threads in one memory; S(p) counts who comes."""


def two_level_time(
    inside: tuple[Algorithm, Algorithm],
    outside: Algorithm,
    hosts: int,
    per_host: int,
    nbytes: float,
    intra: tuple[float, float],
    inter: tuple[float, float],
    gamma: float = 0.0,
) -> float:
    """Seconds of an all-reduce over hosts of `per_host` devices: scattered inside, reduced across, gathered inside.

    Args:
        inside: the reduce-scatter and the all-gather, on all bytes.
        outside: the all-reduce; each device of a host runs it on its share with its peers on the others, all at once.
        hosts, per_host: the two levels.
        nbytes: bytes per device.
        intra, inter: (alpha, beta) in a host and between hosts, s and s/byte.
        gamma: s per byte reduced.
    """
    within = sum(part.time(per_host, nbytes, *intra, gamma) for part in inside)
    return within + outside.time(hosts, nbytes / per_host, *inter, gamma)


# On one level of a network: a minimum of lines in the bytes per device

Lines = tuple[tuple[float, float], ...]
"""(s, s/byte) pairs; the time of b bytes is min over pairs of first + second * b."""

_ALONG = {"ring": ("ring",), "line": ("ring",), "mesh": ("ring",)}
_HALVES = {**_ALONG, "switch": ("ring", "bruck"), "memory": ("copy",)}
_SHIFTED = {"ring": ("shift",), "mesh": ("shift",)}

COLLECTIVES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "all-reduce": {**_HALVES, "switch": ("ring", "halving-doubling", "butterfly")},
        "all-gather": _HALVES,
        "reduce-scatter": _HALVES,
        "all-to-all": {**_SHIFTED, "switch": ("pairwise", "bruck"), "line": ("shift",), "memory": ("copy",)},
        "collective-permute": {**_SHIFTED, "switch": ("direct",), "line": ("direct",), "memory": ("copy",)},
    }
)
"""Kind -> network -> the algorithms that run on it at the link's full rate, by their names in `ALGORITHMS`."""


def line_of(algorithm: Algorithm, size: int, link: Link) -> tuple[float, float]:
    """(s, s/byte) over `size` groups on `link`."""
    return algorithm.messages(size) * link.alpha, algorithm.volume(size) * link.beta


def envelope(lines: Sequence[tuple[float, float]]) -> Lines:
    """The lines that are the minimum for some b >= 0, by rising intercept and falling slope."""
    hull: list[tuple[float, float]] = []
    for a, s in sorted(lines):
        if hull and s >= hull[-1][1]:
            continue
        # Drop the last line where this one takes over before the last has taken over from the one before it.
        while len(hull) > 1 and (a - hull[-2][0]) * (hull[-2][1] - hull[-1][1]) <= (hull[-1][0] - hull[-2][0]) * (
            hull[-2][1] - s
        ):
            hull.pop()
        hull.append((a, s))
    return tuple(hull)


def one_level(kind: str, level: Level) -> Lines:
    """The lines of the algorithms that run on a level of the network."""
    names = COLLECTIVES[kind][level.link.network]
    return envelope([line_of(ALGORITHMS[kind][name], level.size, level.link) for name in names])
