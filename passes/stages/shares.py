"""Memory limits of stages that share their devices: even shares first, uneven ones where these do not suffice.

    a rank of v stages has B bytes; a stage has B/v
    a stage that needs more, L bytes at least, has L; the others have even shares of what it leaves

This is repeated while a rank exceeds its bytes and one of its stages has not come to its least memory. So all stages of
a rank that does not fit have at last the least memory that is found for them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from autopar.passes.stages.memory import whole_bytes
from autopar.passes.stages.plan import MemoryLimit, StagePlan
from autopar.passes.stages.summary import SummarizedStage

P = TypeVar("P", bound=StagePlan | SummarizedStage)


def planned_within(
    limits: Sequence[MemoryLimit],
    placement: Sequence[int],
    plan: Callable[[Sequence[MemoryLimit]], Sequence[P]],
) -> Sequence[P]:
    """Plans of all stages whose ranks fit, if the search finds them.

    Args:
        limits: of every stage, those of one rank even.
        placement: of every stage, its rank.
        plan: plans all stages within limits; a stage that exceeds a thorough limit has its least memory.
    """
    stages_of: dict[int, list[int]] = defaultdict(list)
    for stage, rank in enumerate(placement):
        stages_of[rank].append(stage)
    least: dict[int, int] = {}
    while True:
        current = [*_shares(limits, stages_of, least)]
        planned = plan(current)
        memory = (stage.summary.memory.peak(limit.in_flight) for stage, limit in zip(planned, limits, strict=True))
        needed = [whole_bytes(nbytes) for nbytes in memory]
        exceeded = [
            stages
            for stages in stages_of.values()
            if sum(needed[s] for s in stages) > sum(limits[s].nbytes for s in stages)
        ]
        unfit = {s for s in itertools.chain(*exceeded) if needed[s] > current[s].nbytes and current[s].thorough}
        count = len(least)
        least.update((s, needed[s]) for s in unfit - least.keys())
        if len(least) == count or least.keys() >= {*itertools.chain(*exceeded)}:
            return planned


def _shares(
    limits: Sequence[MemoryLimit], stages_of: Mapping[int, Sequence[int]], least: Mapping[int, int]
) -> Iterator[MemoryLimit]:
    """Limits of all stages in order, where some need more than an even share: `least`, stage -> bytes."""
    shares: dict[int, int] = {}
    for stages in stages_of.values():
        flexible = [s for s in stages if s not in least]
        if len(flexible) < len(stages):
            remaining = sum(limits[s].nbytes for s in stages) - sum(least[s] for s in stages if s in least)
            shares.update((s, least.get(s, max(0, remaining // max(1, len(flexible))))) for s in stages)
    return (replace(limit, nbytes=shares.get(s, limit.nbytes)) for s, limit in enumerate(limits))
