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
        n: {
            kind: _between(count, near, far, near_options, there[kind])
            for kind, near_options in options.items()
            if kind in there
        }
        for n, options in priced[near].items()
        if (there := priced[far].get(n))
    }


def options_anywhere(count: int, priced: Mapping[int, Mapping[int, OptionsByKind]]) -> Mapping[int, OptionsByKind]:
    """The same for every kind and submesh that is costed for some number, from the two nearest of these."""
    estimates: dict[int, dict[int, tuple[StageOption, ...]]] = {}
    for n, kind in dict.fromkeys(
        (n, kind) for by_submesh in priced.values() for n, options in by_submesh.items() for kind in options
    ):
        near, far = _nearest(count, [m for m, by_submesh in priced.items() if kind in by_submesh.get(n, {})])
        near_options, other = priced[near][n][kind], priced[far][n][kind]
        estimates.setdefault(n, {})[kind] = _between(count, near, far, near_options, other)
    return estimates


def _nearest(count: int, numbers: Iterable[int]) -> tuple[int, int]:
    """The nearest number and the next; equal if there is only one."""
    near, *further = sorted(numbers, key=lambda m: (abs(math.log(m / count)), m))
    return near, further[0] if further else near


def _between(
    count: int, near: int, far: int, near_options: Sequence[StageOption], far_options: Sequence[StageOption]
) -> tuple[StageOption, ...]:
    """The options of one kind, from those for the nearest number and those for the next."""
    grown = (1 / count - 1 / near) / (1 / near - 1 / far) if far != near else None
    return _all_at(near_options, far_options, grown, min(1.0, near / count))


def _all_at(
    near_options: Sequence[StageOption], far_options: Sequence[StageOption], grown: float | None, least: float
) -> tuple[StageOption, ...]:
    """The options of one kind of layers; one without a counterpart for the other number scales as the fastest does."""
    alike = {option.share: option for option in reversed(far_options)}

    def at(option: StageOption) -> StageOption:
        other, there = (option, alike[option.share]) if option.share in alike else (near_options[0], far_options[0])

        def value(of: Callable[[StageOption], float]) -> float:
            if grown is None or not of(other):
                return of(option) * least
            return of(option) * max(1 + grown * (1 - of(there) / of(other)), least)

        times = replace(
            option.times,
            forward=value(lambda t: t.times.forward),
            backward=value(lambda t: t.times.backward),
            weight=value(lambda t: t.times.weight),
            recomputation=value(lambda t: t.times.recomputation),
        )
        stash, temporaries = value(lambda t: t.memory.stash), value(lambda t: t.memory.temporaries)
        memory = replace(option.memory, stash=stash, temporaries=temporaries)
        return replace(option, times=times, memory=memory, entering=value(lambda t: t.entering))

    return tuple(map(at, near_options))
