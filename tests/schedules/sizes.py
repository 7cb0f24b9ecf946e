"""Sizes at which the tests make every schedule."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar.schedules import SCHEDULES, Schedule, Size, make

#: Name -> size at which no two schedules have the same lists.
DISTINCT: dict[str, Size] = {
    name: Size(2, 4) for name in ("inference", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "chimera")
} | {
    "interleaved-1f1b": Size(2, 4, chunks=2),
    "terapipe": Size(2, 2, slices=2),
    "pipedream": Size(2, 4),
    "pipedream-2bw": Size(2, 2, batches=2),
    "ampnet": Size(2, 2, batches=2),
}

SYNCHRONOUS = tuple(name for name, row in SCHEDULES.items() if row.synchronous)


@st.composite
def named_sizes(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES), most: int = 5) -> tuple[str, Size]:
    """A schedule and a size that fits it."""
    name = draw(st.sampled_from(names))
    ranks, microbatches = draw(st.integers(1, most)), draw(st.integers(1, 2 * most))
    several = {word: draw(st.integers(1, 3)) for word in SCHEDULES[name].several}
    if name == "interleaved-1f1b":
        microbatches = ranks * draw(st.integers(1, 3))
    elif name == "chimera":
        ranks = 2 * draw(st.integers(1, 3))
    elif name == "pipedream-2bw":
        microbatches += ranks
    return name, Size(ranks, microbatches, **several)


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES), most: int = 4) -> Schedule:
    """Schedules, some with borders that skip stages."""
    name, size = draw(named_sizes(names, most))
    stages = size.ranks * size.chunks
    skips = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    chosen = draw(st.lists(st.sampled_from(skips), max_size=2, unique=True)) if skips else []
    return make(name, size, [(s, s + 1) for s in range(stages - 1)] + chosen)
