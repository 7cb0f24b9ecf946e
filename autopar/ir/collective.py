"""One collective: the common form of what the plan predicts, Shardy inserts and the compiler emits.

Bytes are per device and count the larger of the operand and the result buffer:

    all-reduce          b = operand = result           wire 2 (n-1)/n b
    all-gather          b = result  (gathered)         wire   (n-1)/n b
    reduce-scatter      b = operand (to be scattered)  wire   (n-1)/n b
    all-to-all          b = operand = result           wire   (n-1)/n b
    collective-permute  b = operand = result           wire           b

with n the number of devices in one group (the product of the sizes of `axes`). These are the volumes of the ring
algorithms, which meet the lower bounds of Chan et al. (2007), "Collective communication: theory, practice, experience".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

WIRE_FRACTION: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all-reduce": lambda n: 2 * (n - 1) / n,
        "all-gather": lambda n: (n - 1) / n,
        "reduce-scatter": lambda n: (n - 1) / n,
        "all-to-all": lambda n: (n - 1) / n,
        "collective-permute": lambda n: 1.0,
    }
)


@dataclass(frozen=True, slots=True, order=True)
class Collective:
    """A collective operation, as predicted or as compiled.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        axes: names of the mesh axes along which devices communicate, in mesh order.
        bytes: bytes per device of the larger of operand and result.
        count: executions per step, which is the trip count of the loops around it.
        op: tag of the operation it belongs to, such as "op12", "op12.in0" or "out3".
        source: source line of the user, "file.py:line"; "" if unknown.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int = 1
    op: str = ""
    source: str = ""

    def bytes_sent(self, sizes: Mapping[str, int]) -> float:
        """Bytes that each device sends per step under the ring algorithm (Chan et al., 2007).

        Args:
            sizes: name of a mesh axis -> number of devices along it.
        """
        return self.count * wire_bytes(self.kind, self.bytes, math.prod(sizes[a] for a in self.axes))


def wire_bytes(kind: str, nbytes: float, group: int) -> float:
    """Bytes one device sends for one collective over `group` devices under the ring algorithms."""
    return WIRE_FRACTION[kind](group) * nbytes if group > 1 else 0.0
