"""`autopar bench transfers`: bytes that cross between processes in a transfer, counted in its compiled program.

Arrays move between submeshes of different sizes and layouts. The permutations of the compiled program (the text of its
HLO) are counted: bytes of a permuted box times pairs of devices in different processes. That is compared with

    lower bound    sum over processes of the bytes of its distinct target boxes that it does not hold in the source

Eight virtual devices of this process are divided among pretended processes: which device belongs to which process only
decides who sends. Where the target is replicated inside its submesh, a second program gathers it there from a sharding
without replicas; for that sharding the bound is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.runtime.transport import Exchange

DEVICES = 8
_PERMUTATION = re.compile(
    r"= [a-z]+\d+\[([\d,]*)\]\S* collective-permute\(.*source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}"
)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Submesh:
    """A sharding on consecutive devices: the first, sizes of the mesh axes "a", "b", and what they divide."""

    first: int
    sizes: tuple[int, ...]
    spec: tuple[Any, ...]

    def sharding(self) -> NamedSharding:
        devices = np.array(jax.devices()[self.first : self.first + prod(self.sizes)]).reshape(self.sizes)
        return NamedSharding(jax_compat.auto_mesh(devices, ("a", "b")[: len(self.sizes)]), PartitionSpec(*self.spec))


@dataclass(frozen=True)
class Case:
    """A transfer: shape and dtype, from where to where, and how many devices a process has."""

    name: str
    shape: tuple[int, ...]
    source: Submesh
    target: Submesh
    per_process: int
    dtype: str = "float32"


CASES = (
    Case("rows of 4 to columns of 4", (64, 32), Submesh(0, (4,), ("a",)), Submesh(4, (4,), (None, "a")), 4),
    Case("2 x 2 to 4 replicas", (64, 32), Submesh(0, (2, 2), ("a", "b")), Submesh(4, (4,), ()), 4),
    Case("rows of 2 to rows of 6", (48, 8), Submesh(0, (2,), ("a",)), Submesh(2, (6,), ("a",)), 4),
    Case("rows of 6 to 2 replicas", (48, 8), Submesh(0, (6,), ("a",)), Submesh(6, (2,), ()), 2),
    Case("4 replicas to 2 x 2", (16, 16), Submesh(0, (4,), ()), Submesh(4, (2, 2), ("b", "a")), 2),
    Case("rows to columns, 4 processes", (16, 16), Submesh(0, (4,), ("a",)), Submesh(4, (4,), (None, "a")), 2),
    Case("odd sizes to 4 replicas", (3, 5), Submesh(0, (4,), ()), Submesh(4, (4,), ()), 2),
    Case("rows of 2 to 3 dimensions", (4, 8, 6), Submesh(0, (2,), ("a",)), Submesh(2, (2, 2), ("b", None, "a")), 2),
    Case("2 x 4 to 4 x 2, same devices", (64, 64), Submesh(0, (2, 4), ("a", "b")), Submesh(0, (4, 2), ("a", "b")), 2),
    Case("half precision", (64, 32), Submesh(0, (2, 2), ("a",)), Submesh(4, (4,), ("a",)), 4, "bfloat16"),
)


def run(cases: Sequence[Case] = CASES, tell: Callable[[str], None] = lambda text: None) -> list[Row]:
    """A row per case."""
    rows = list[Row]()
    for case in cases:
        rows.append(counted(case))
        tell(line(rows[-1]))
    return rows


def counted(case: Case) -> Row:
    """The bytes that cross in a compiled transfer, and the lower bound."""
    source, target = case.source.sharding(), case.target.sharding()
    exchange = Exchange([(case.shape, np.dtype(case.dtype), source, target)], lambda d: d.id // case.per_process)
    owners = [d.id // case.per_process for d in exchange.devices]
    sent = crossing_bytes(exchange.as_text(), owners, np.dtype(case.dtype).itemsize)
    least = exchange.least_bytes()
    return {"case": case.name, "sent": sent, "least": least, "ok": sent == least}


def crossing_bytes(text: str, owners: Sequence[int], itemsize: int) -> int:
    """Bytes that go from one process to another by the permutations of a compiled program.

    Args:
        text: of its HLO.
        owners: the process of every device of the program.
        itemsize: bytes of an element.
    """
    assert "collective-permute-start" not in text, "a program with asynchronous permutations"
    permutations = [(shape, pairs) for line in text.splitlines() for shape, pairs in _PERMUTATION.findall(line)]
    return sum(
        itemsize * prod(map(int, shape.split(",") if shape else ())) * _crossing(pairs, owners)
        for shape, pairs in permutations
    )


def _crossing(pairs: str, owners: Sequence[int]) -> int:
    ends = re.findall(r"\{(\d+),(\d+)\}", pairs)
    return sum(owners[int(sender)] != owners[int(receiver)] for sender, receiver in ends)


def line(row: Row) -> str:
    """One case for people."""
    return f"{'ok' if row['ok'] else 'FAIL'} {row['case']}: {row['sent']:,} bytes cross, lower bound {row['least']:,}"


def table(rows: Sequence[Row]) -> str:
    """How many meet the bound."""
    total = sum(row["sent"] for row in rows)
    return f"{sum(row['ok'] for row in rows)} of {len(rows)} transfers meet the lower bound, {total:,} bytes in all"
