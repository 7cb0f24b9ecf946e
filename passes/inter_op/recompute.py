"""How many layers of each stage are rematerialised, where the stages are given: few, so that every stage fits.

    none fits with 0 layers     -> all layers of the stages that do not fit, and of those that then do not fit
    those fit                   -> bisection of every stage between a number that does not fit and one that does

A question is a number of layers for every stage, and its answer, which takes a planning of all stages, says which
stages fit. A stage that fits with some number is assumed to fit with more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Counts: TypeAlias = tuple[int, ...]
"""Of every stage, the number of its layers that are rematerialised."""


@dataclass(frozen=True, slots=True)
class RecomputeEffort:
    """How many numbers of layers are tried."""

    # rounds of bisection, each with a planning of all stages (GPT-2.6B in stages of 6 to 10 layers on four p3 hosts,
    # 64 microbatches: 1, 2, and 3 rounds take 17, 25, and 36 s for steps of 14.71, 14.56, and 14.48 s; all layers, 5 s
    # for 15.35 s; 2026-11)
    rounds: int = 2


RECOMPUTE = RecomputeEffort()


def fewest_layers(
    stages: int,
    most: Callable[[], Sequence[int]],
    fits: Callable[[Counts], Sequence[bool]],
    effort: RecomputeEffort = RECOMPUTE,
) -> Counts | None:
    """Numbers of layers with which all stages fit, fewer where that is found; None if they do not fit with all.

    Args:
        stages: number of stages.
        most: gives the number of layers of every stage that can be rematerialised; called if any are needed.
        fits: plans the stages with these numbers, and says of each whether it fits.
        effort: how many numbers are tried.
    """
    none = fitting = (0,) * stages
    answer = fits(fitting)
    # stages that do not fit get all the layers that they can have
    while not all(answer):
        raised = tuple(n if fit else top for n, fit, top in zip(fitting, answer, most(), strict=True))
        if raised == fitting:
            return None
        fitting, answer = raised, fits(raised)
    # bisection, of all stages at once
    too_few, best = none, fitting
    for _ in range(effort.rounds):
        middle = tuple((a + b) // 2 if b - a > 1 else b for a, b in zip(too_few, fitting, strict=True))
        if middle == fitting:
            break
        answer = fits(middle)
        too_few = tuple(a if fit else m for fit, m, a in zip(answer, middle, too_few, strict=True))
        fitting = tuple(m if fit else b for fit, m, b in zip(answer, middle, fitting, strict=True))
        best = middle if all(answer) else best
    # the numbers come from different rounds, and together may not fit
    return fitting if fitting == best or all(fits(fitting)) else best


def fitting(
    placement: Sequence[int], exceeded: Sequence[bool], over: Sequence[bool], raised: Sequence[bool]
) -> Sequence[bool]:
    """Whether each stage fits, or further layers of it need not be rematerialised.

    Where a rank does not fit, these are the stages above their share of its memory, if more of their layers can be
    rematerialised; or else all whose layers can; or else all.

    Args:
        placement: of every stage, its rank.
        exceeded: of every rank, whether its stages together exceed its memory.
        over: of every stage, whether it exceeds its share.
        raised: of every stage, whether all its layers are rematerialised.
    """
    fits = [True] * len(placement)
    for rank in (rank for rank, exceeds in enumerate(exceeded) if exceeds):
        stages = [s for s, other in enumerate(placement) if other == rank]
        can_shrink = [s for s in stages if not raised[s]]
        for s in [s for s in can_shrink if over[s]] or can_shrink or stages:
            fits[s] = False
    return fits
