"""The table of schedules, and `make`, which turns a schedule and sizes into instruction lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.schedules import orders
from autopar.schedules.complete import complete
from autopar.schedules.orders import Orders, Size
from autopar.schedules.pipeline import Pipeline, Schedule, Weights


def _any_size(size: Size) -> str:
    return ""


def _chain(size: Size) -> tuple[int, ...]:
    return tuple(range(size.ranks)) * size.chunks


def _ranks_from_here(size: Size, rank: int) -> int:
    """Stash of 1f1b: the number of ranks from this one on."""
    return min(size.ranks - rank, size.items)


@dataclass(frozen=True)
class ScheduleSpec:
    """One schedule of the table.

    Attributes:
        summary: its advantage.
        order: size -> the passes of every rank in order; see `autopar.schedules.orders`.
        stash: (size, rank) -> bound on the number of (stage, microbatch) pairs in the rank's stash, from F to the last
            pass.
        synchronous: whether it computes the same as the undivided step.
        executable: whether the runtime can run it; if not, it is for the simulator alone.
        backward, split, weights: see `Pipeline`.
        several: which of the sizes "chunks", "slices", "batches" may be more than 1.
        placement: size -> rank of every stage.
        copies: number of copies of every stage.
        copy_of: size -> copy of every microbatch, for schedules with copies.
        window: size -> microbatches per update.
        size_error: size -> why the sizes do not fit, with alternatives; "" if they fit.
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
    size_error: Callable[[Size], str] = _any_size


def groups_needed(ranks: int) -> str:
    """What a schedule in groups of microbatches needs: the beginning of an error."""
    return f"needs microbatches in groups of {ranks}, one per rank, and"


def _groups_of_ranks(size: Size) -> str:
    if size.microbatches % size.ranks == 0:
        return ""
    below, above = size.microbatches // size.ranks * size.ranks, -(-size.microbatches // size.ranks) * size.ranks
    fitting = " or ".join(str(m) for m in (below, above) if m)
    return (
        f"{groups_needed(size.ranks)} got {size.microbatches}; use {fitting}, or schedule 1f1b, which takes any number"
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


SCHEDULES: Mapping[str, ScheduleSpec] = MappingProxyType(
    {
        "inference": ScheduleSpec(
            "forward passes only",
            orders.inference,
            lambda size, rank: 0,
            backward=False,
        ),
        "gpipe": ScheduleSpec("all forward, then all backward passes", orders.gpipe, lambda size, rank: size.items),
        "1f1b": ScheduleSpec(
            "the bubble of gpipe, at most p microbatches held",
            orders.one_f_one_b,
            _ranks_from_here,
        ),
        "eager-1f1b": ScheduleSpec(
            "1f1b with forward passes early enough to hide their transfers",
            orders.eager_one_f_one_b,
            # one more microbatch per border behind the rank than 1F1B, whose output is on its way meanwhile
            lambda size, rank: min(2 * (size.ranks - rank) - 1, size.items),
        ),
        "interleaved-1f1b": ScheduleSpec(
            "1f1b with several stages per rank: a smaller bubble, more transfers",
            orders.interleaved_one_f_one_b,
            # warm-up of the last chunk, and one group of `ranks` microbatches for each chunk before it
            lambda size, rank: min(
                2 * (size.ranks - rank) - 1 + (size.chunks - 1) * size.ranks, size.chunks * size.items
            ),
            several=("chunks",),
            size_error=_groups_of_ranks,
        ),
        "zb-h1": ScheduleSpec(
            "1f1b with gradients of weights put off into the bubble",
            orders.zb_h1,
            lambda size, rank: min(size.ranks, size.items),
            split=True,
        ),
        "terapipe": ScheduleSpec(
            "gpipe over slices of sequences under causal attention",
            orders.terapipe,
            lambda size, rank: size.items,
            executable=False,
            several=("slices",),
        ),
        "chimera": ScheduleSpec(
            "two copies of the model, run through in opposite directions",
            orders.chimera,
            # half of the microbatches go down and half up; a rank in the middle is far from the end of both
            lambda size, rank: min(size.ranks // 2 + 1 + min(rank, size.ranks - 1 - rank), size.items),
            executable=False,
            placement=lambda size: (*range(size.ranks), *reversed(range(size.ranks))),
            copies=2,
            copy_of=orders.chimera_copies,
            size_error=_pairs_of_ranks,
        ),
        "pipedream": ScheduleSpec(
            "1f1b without a flush, an update per microbatch, up to p versions of the weights",
            orders.one_f_one_b,
            _ranks_from_here,
            synchronous=False,
            executable=False,
            several=("batches",),
            window=lambda size: 1,
        ),
        "pipedream-2bw": ScheduleSpec(
            "1f1b without a flush, an update per batch, two versions of the weights",
            orders.one_f_one_b,
            _ranks_from_here,
            synchronous=False,
            executable=False,
            weights="double",
            several=("batches",),
            window=lambda size: size.microbatches,
            size_error=_batch_covers_ranks,
        ),
        "ampnet": ScheduleSpec(
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
"""Name -> schedule. Names are those of `parallelize(schedule=...)`, for schedules that are executable."""


def make(name: str, size: Size, borders: Sequence[tuple[int, int]] | None = None) -> Schedule:
    """The instruction lists of a schedule.

    Args:
        name: one of `SCHEDULES`.
        size: ranks, microbatches, chunks, slices and batches. Stage c x ranks + r is chunk c of rank r.
        borders: (a, b), a < b: stage b reads outputs of stage a. None: each stage reads the one before.

    Raises:
        ScheduleError: an unknown name, a size below 1 or more than 1 where the schedule has one, sizes that do not fit
            each other, or an invalid border.
    """
    spec = _spec(name)
    _check_size(name, spec, size)
    stages = size.ranks * size.chunks
    pairs = [(s, s + 1) for s in range(stages - 1)] if borders is None else sorted({(a, b) for a, b in borders})
    for a, b in pairs:
        if not 0 <= a < b < stages:
            raise ScheduleError(f"border ({a}, {b}) is no pair of stages 0 <= a < b < {stages}")
    pipeline = Pipeline(
        placement=spec.placement(size),
        microbatches=size.items,
        borders=tuple((a + stages * c, b + stages * c) for c in range(spec.copies) for a, b in pairs),
        window=spec.window(size),
        backward=spec.backward,
        split=spec.split,
        weights=spec.weights,
        copies=spec.copies,
        copy_of=spec.copy_of(size),
        slices=size.slices,
    )
    return Schedule(name, pipeline, complete(pipeline, spec.order(size)))


def bounds(name: str, size: Size) -> tuple[int, ...]:
    """For each rank, the bound on its stash in (stage, microbatch) pairs; ScheduleError as for `make`."""
    spec = _spec(name)
    _check_size(name, spec, size)
    return tuple(spec.stash(size, rank) for rank in range(size.ranks))


def _spec(name: str) -> ScheduleSpec:
    spec = SCHEDULES.get(name)
    if spec is None:
        raise ScheduleError(f"unknown schedule '{name}'; there are {', '.join(SCHEDULES)}")
    return spec


def _check_size(name: str, spec: ScheduleSpec, size: Size) -> None:
    for word, value in asdict(size).items():
        if value < 1:
            raise ScheduleError(f"schedule {name} needs {word} >= 1, not {value}")
        if value > 1 and word not in ("ranks", "microbatches", *spec.several):
            fitting = [other for other, candidate in SCHEDULES.items() if word in candidate.several]
            raise ScheduleError(f"schedule {name} has one of {word}, not {value}; more: {', '.join(fitting)}")
    size_error = spec.size_error(size)
    if size_error:
        raise ScheduleError(f"schedule {name} {size_error}")
