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
    # relative error of the step that is estimated for another number of microbatches; up to so far above the incumbent,
    # layers are costed for it (chosen on GPT-6.7B on two p3 hosts, where 256 are estimated 3.3% too slow: a step 0.9%
    # shorter; eight other models of the Alpa paper keep theirs, and at most one number more is costed; 2026-11)
    estimate_error: float = 0.03
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
