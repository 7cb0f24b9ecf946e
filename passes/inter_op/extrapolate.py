"""Costs of layers for a number of microbatches that is not costed, extrapolated from other numbers.

The size of a microbatch, s = 1 / number of microbatches, scales nearly all seconds and bytes of a pass; launches,
latencies and the traffic of weights are equal for all sizes. So seconds and bytes are about affine in s. With the two
nearest numbers that are costed, of sizes s_b and, next, s_a,

    t(s)  =  t_b + (t_b - t_a) (s - s_b) / (s_b - s_a),     and at least      t_b min(1, s / s_b)         -> options_at

The lower bound always holds: a larger microbatch takes no less than a smaller one, and no more per example. It is the
estimate if only one number is costed. Seconds and bytes per step are equal for all numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.passes.inter_op.layer_costs import OptionsByKind
from autopar.passes.inter_op.stage_options import StageOption


def options_at(count: int, priced: Mapping[int, Mapping[int, OptionsByKind]]) -> Mapping[int, OptionsByKind]:
    """Estimated options of layers for a number of microbatches, from the two nearest numbers that are costed.

    Args:
        count: number of microbatches.
        priced: other numbers, at least one -> submesh -> options of layers of every kind, or of some.
    """
    near, far = _nearest(count, priced)
    return {
        n: {kind: _between(count, near, far, found, there[kind]) for kind, found in options.items() if kind in there}
        for n, options in priced[near].items()
        if (there := priced[far].get(n))
    }


def options_anywhere(count: int, priced: Mapping[int, Mapping[int, OptionsByKind]]) -> Mapping[int, OptionsByKind]:
    """The same for every kind and submesh that is costed for some number, from the two nearest of these."""
    found: dict[int, dict[int, tuple[StageOption, ...]]] = {}
    for n, kind in dict.fromkeys(
        (n, kind) for some in priced.values() for n, options in some.items() for kind in options
    ):
        near, far = _nearest(count, [m for m, some in priced.items() if kind in some.get(n, {})])
        one, other = priced[near][n][kind], priced[far][n][kind]
        found.setdefault(n, {})[kind] = _between(count, near, far, one, other)
    return found


def _nearest(count: int, numbers: Iterable[int]) -> tuple[int, int]:
    """The nearest number and the next; equal if there is only one."""
    near, *others = sorted(numbers, key=lambda m: (abs(math.log(m / count)), m))
    return near, others[0] if others else near


def _between(
    count: int, near: int, far: int, found: Sequence[StageOption], others: Sequence[StageOption]
) -> tuple[StageOption, ...]:
    """The options of one kind, from those for the nearest number and those for the next."""
    grown = (1 / count - 1 / near) / (1 / near - 1 / far) if far != near else None
    return _all_at(found, others, grown, min(1.0, near / count))


def _all_at(
    found: Sequence[StageOption], others: Sequence[StageOption], grown: float | None, least: float
) -> tuple[StageOption, ...]:
    """The options of one kind of layers; one without a counterpart for the other number scales as the fastest does."""
    alike = {one.share: one for one in reversed(others)}

    def at(one: StageOption) -> StageOption:
        other, there = (one, alike[one.share]) if one.share in alike else (found[0], others[0])

        def value(of: Callable[[StageOption], float]) -> float:
            if grown is None or not of(other):
                return of(one) * least
            return of(one) * max(1 + grown * (1 - of(there) / of(other)), least)

        times = replace(
            one.times,
            forward=value(lambda t: t.times.forward),
            backward=value(lambda t: t.times.backward),
            weight=value(lambda t: t.times.weight),
        )
        stash, temporaries = value(lambda t: t.memory.stash), value(lambda t: t.memory.temporaries)
        memory = replace(one.memory, stash=stash, temporaries=temporaries)
        return replace(one, times=times, memory=memory, entering=value(lambda t: t.entering))

    return tuple(map(at, found))
