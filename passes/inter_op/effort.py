"""How far the search for stages goes: what it may miss, and what it does not try."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InterOpEffort:
    """How far the search for stages goes."""

    # relative step time by which the dynamic program may miss a better division (not recorded; `bench sensitivity`,
    # 2026-11: no effect on small programs)
    near: float = 1e-3
    # divisions that are simulated per number of microbatches and per schedule of `MADE_FOR` (not recorded; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    simulated: int = 8
    # relative gain over the incumbent that the estimate of another number of microbatches must promise (not
    # measured)
    gain_of_count: float = 0.02
    # relative error of the dynamic program's step time against the simulated one (not measured)
    formula_error: float = 0.05
    # relative gain that further submeshes must promise before layers are costed on them (not recorded; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    gain_of_submeshes: float = 0.01
    # share of the memory that divisions leave free, as whole stages take more than their layers (not recorded; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    reserve: float = 0.03
    # microbatches per stage after the first at which the bubble is an eighth of the computation (by the formula; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    bubble: int = 8
    # most examples per microbatch (not recorded; `bench sensitivity`, 2026-11: no effect on small programs)
    examples: int = 128
    # on clusters with more devices than this, the size of a submesh divides the number of devices (not recorded;
    # `bench sensitivity`, 2026-11: halved: 26% less time)
    any_size: int = 8


INTER_OP = InterOpEffort()
