"""What the devices send that run one operation together, for its price and for the collectives of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective of the devices that run an operation together.

    Attributes:
        kind: of the collective.
        array: of operands and results together, the array that it sends.
        factors: along the axes that cut one of these.
        share: of a device's piece of the array.
        least: number of devices from which on anything is sent.
        hops: it is sent as often as there are devices, and this much more often; None: once.
        ring: only if pieces are passed round, or only if they are not; None: in either case.
    """

    kind: Literal["all-reduce", "all-gather", "reduce-scatter", "collective-permute"]
    array: int
    factors: tuple[int, ...]
    share: float = 1.0
    least: int = 2
    hops: int | None = None
    ring: bool | None = None

    def times(self, devices: int) -> int:
        """How often so many devices send it."""
        return 1 if self.hops is None else devices + self.hops

    def dims(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """The factors that cut the larger of what it takes and gives; `dims`: those of the array."""
        whole = self.factors if self.kind in ("all-gather", "reduce-scatter") else ()
        return tuple(-1 if f in whole else f for f in dims)
