"""The options of planning one program on one mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.passes.op_groups.constraints import Pins
from autopar.passes.remat import choose_offload, memory_policy
from autopar.passes.remat import rewrite as remat


@dataclass(frozen=True)
class Options(memory_policy.SolverOptions):
    """The options of the user that concern one mesh; see `autopar.parallelize`.

    `batch`: positions of the argument leaves that hold the batch, if the user names them.
    """

    pins: Pins | None = None
    batch: tuple[int, ...] | None = None
    donate: tuple[int, ...] | str = "auto"
    rules: Mapping[str, str] | None = None
    memory_budget: float | str | None = None
    remat: str = remat.NONE
    offload: str = choose_offload.NONE
