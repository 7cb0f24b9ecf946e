"""The schedules, one row each, and `make`, which turns a row and sizes into instruction lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.schedules import orders
from autopar.schedules.complete import complete
from autopar.schedules.orders import Orders, Size
from autopar.schedules.pipeline import Pipeline, Schedule, Weights


def _always(size: Size) -> str:
    return ""


def _chain(size: Size) -> tuple[int, ...]:
    return tuple(range(size.ranks)) * size.chunks


def _behind(size: Size, rank: int) -> int:
    """1f1b: as many as there are ranks from this one on."""
    return min(size.ranks - rank, size.items)


@dataclass(frozen=True)
class Row:
    """One schedule.

    Attributes:
        summary: what it is good for.
        order: size -> the passes of every rank in order; see `autopar.schedules.orders`.
        stash: (size, rank) -> stages x microbatches that the rank holds between F and the last pass that reads it, at
            most.
        synchronous: it computes what the undivided step computes.
        executable: the runtime can run it; the others are for the simulator.
        backward, split, weights: see `Pipeline`.
        several: which of the sizes "chunks", "slices", "batches" may be more than 1.
        placement: size -> rank of every stage.
        copy_of: size -> copy of every microbatch, for schedules with copies.
        window: size -> microbatches per update.
        complaint: size -> why the sizes do not fit, with alternatives; "" if they do.
    """

    summary: str
    order: Callable[[Size], Orders]
    stash: Callable[[Size, int], int]
    synchronous: bool = True
    executable: bool = True
    backward: bool = True
    split: bool = False
    weights: Weights = "stashed"
    several: tuple[str, ...] = ()
    placement: Callable[[Size], tuple[int, ...]] = _chain
    copies: int = 1
    copy_of: Callable[[Size], tuple[int, ...]] = lambda size: ()
    window: Callable[[Size], int] = lambda size: size.items
    complaint: Callable[[Size], str] = _always


def _groups_of_ranks(size: Size) -> str:
    if size.microbatches % size.ranks == 0:
        return ""
    below, above = size.microbatches // size.ranks * size.ranks, -(-size.microbatches // size.ranks) * size.ranks
    fitting = " or ".join(str(m) for m in (below, above) if m)
    return (
        f"needs microbatches in groups of {size.ranks}, one per rank, and got {size.microbatches}; "
        f"use {fitting}, or schedule 1f1b, which takes any number"
    )


def _pairs_of_ranks(size: Size) -> str:
    if size.ranks % 2 == 0:
        return ""
    return f"runs in two directions and needs an even number of ranks, not {size.ranks}; use {size.ranks + 1}, or 1f1b"


def _batch_covers_ranks(size: Size) -> str:
    if size.microbatches >= size.ranks:
        return ""
    return (
        f"keeps two versions of the weights only if a batch has at least as many microbatches as there are ranks, "
        f"{size.ranks}, and got {size.microbatches}; use {size.ranks} or more, or pipedream"
    )


SCHEDULES: Mapping[str, Row] = MappingProxyType(
    {
        "inference": Row(
            "forward passes only",
            orders.inference,
            lambda size, rank: 0,
            backward=False,
        ),
        "gpipe": Row("all forward, then all backward passes", orders.gpipe, lambda size, rank: size.items),
        "1f1b": Row(
            "the bubble of gpipe, at most p microbatches held",
            orders.one_f_one_b,
            _behind,
        ),
        "eager-1f1b": Row(
            "1f1b with forward passes early enough to hide their transfers",
            orders.eager_one_f_one_b,
            lambda size, rank: min(2 * (size.ranks - rank) - 1, size.items),
        ),
        "interleaved-1f1b": Row(
            "1f1b with several stages per rank: a smaller bubble, more transfers",
            orders.interleaved_one_f_one_b,
            lambda size, rank: min(
                2 * (size.ranks - rank) - 1 + (size.chunks - 1) * size.ranks, size.chunks * size.items
            ),
            several=("chunks",),
            complaint=_groups_of_ranks,
        ),
        "zb-h1": Row(
            "1f1b with gradients of weights put off into the bubble",
            orders.zb_h1,
            lambda size, rank: min(size.ranks, size.items),
            split=True,
        ),
        "terapipe": Row(
            "gpipe over slices of sequences under causal attention",
            orders.terapipe,
            lambda size, rank: size.items,
            executable=False,
            several=("slices",),
        ),
        "chimera": Row(
            "two copies of the model, run through in opposite directions",
            orders.chimera,
            lambda size, rank: min(size.ranks // 2 + 1 + min(rank, size.ranks - 1 - rank), size.items),
            executable=False,
            placement=lambda size: (*range(size.ranks), *reversed(range(size.ranks))),
            copies=2,
            copy_of=orders.chimera_copies,
            complaint=_pairs_of_ranks,
        ),
        "pipedream": Row(
            "1f1b without a flush, an update per microbatch, up to p versions of the weights",
            orders.one_f_one_b,
            _behind,
            synchronous=False,
            executable=False,
            several=("batches",),
            window=lambda size: 1,
        ),
        "pipedream-2bw": Row(
            "1f1b without a flush, an update per batch, two versions of the weights",
            orders.one_f_one_b,
            _behind,
            synchronous=False,
            executable=False,
            weights="double",
            several=("batches",),
            window=lambda size: size.microbatches,
            complaint=_batch_covers_ranks,
        ),
        "ampnet": Row(
            "whatever has arrived is run; weights may change between a forward pass and its backward pass",
            orders.ampnet,
            lambda size, rank: min(size.ranks, size.items),
            synchronous=False,
            executable=False,
            weights="latest",
            several=("batches",),
            window=lambda size: size.microbatches,
        ),
    }
)
"""Name -> row. Names as in `parallelize(schedule=...)`, for those that are executable."""


def make(name: str, size: Size, borders: Sequence[tuple[int, int]] | None = None) -> Schedule:
    """The instruction lists of a schedule.

    Args:
        name: one of `SCHEDULES`.
        size: ranks, microbatches, and what the schedule has several of. Stage c x ranks + r is chunk c of rank r.
        borders: (a, b), a < b: what stage a makes, stage b reads. None: each stage reads the one before.

    Raises:
        ScheduleError: an unknown name, a size below 1 or of no use to the schedule, sizes that do not fit each other,
            or borders that are none.
    """
    row = _row(name)
    _check_size(name, row, size)
    stages = size.ranks * size.chunks
    found = [(s, s + 1) for s in range(stages - 1)] if borders is None else sorted({(a, b) for a, b in borders})
    for a, b in found:
        if not 0 <= a < b < stages:
            raise ScheduleError(f"border ({a}, {b}) is no pair of stages 0 <= a < b < {stages}")
    pipeline = Pipeline(
        placement=row.placement(size),
        microbatches=size.items,
        borders=tuple((a + stages * c, b + stages * c) for c in range(row.copies) for a, b in found),
        window=row.window(size),
        backward=row.backward,
        split=row.split,
        weights=row.weights,
        copies=row.copies,
        copy_of=row.copy_of(size),
        slices=size.slices,
    )
    return Schedule(name, pipeline, complete(pipeline, row.order(size)))


def bounds(name: str, size: Size) -> tuple[int, ...]:
    """For each rank, how many (stage, microbatch) pairs the schedule holds at most; ScheduleError as for `make`."""
    row = _row(name)
    _check_size(name, row, size)
    return tuple(row.stash(size, rank) for rank in range(size.ranks))


def _row(name: str) -> Row:
    row = SCHEDULES.get(name)
    if row is None:
        raise ScheduleError(f"unknown schedule '{name}'; there are {', '.join(SCHEDULES)}")
    return row


def _check_size(name: str, row: Row, size: Size) -> None:
    for word, value in asdict(size).items():
        if value < 1:
            raise ScheduleError(f"schedule {name} needs {word} >= 1, not {value}")
        if value > 1 and word not in ("ranks", "microbatches", *row.several):
            fitting = [other for other, found in SCHEDULES.items() if word in found.several]
            raise ScheduleError(f"schedule {name} has one of {word}, not {value}; more: {', '.join(fitting)}")
    complaint = row.complaint(size)
    if complaint:
        raise ScheduleError(f"schedule {name} {complaint}")
