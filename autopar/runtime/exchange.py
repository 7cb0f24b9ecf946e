"""Which device sends which part of an array to which other device, when the array moves between two shardings.

A sharding gives every device a box of the array, one range per dimension. Devices with equal boxes are replicas.

    parts     a target box is the union of its intersections with the distinct source boxes. Each intersection is sent
              once, by one of the replicas that hold it: the receiver itself, one of its process, or the next in turn
    copies    a target box goes to one of its replicas in each process that holds a part of it, or else to the first;
              from there to one in every other process, in ceil(log2 n) rounds; and then to the others of its process
    rounds    in a round a device sends at most one box and receives at most one, and all boxes have one shape, so
              that a round is one collective permutation

So a byte enters a process as often as the target's distinct boxes there contain it, and not at all if the process holds
it already: the lower bound (`least`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from autopar.ir.keyed import grouped

#: (begin, end) along every dimension.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box that one device sends to another.

    Attributes:
        sender, receiver: devices, as positions.
        box: in the coordinates of the whole array.
        forwarded: the sender takes it from its target box, not from its source box.
    """

    sender: int
    receiver: int
    box: Box
    forwarded: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.box)


def parts(source: Mapping[int, Box], target: Mapping[int, Box], owners: Mapping[int, Hashable]) -> tuple[Part, ...]:
    """The parts that bring an array from one sharding to another, parts that are forwarded last.

    Args:
        source, target: device -> its box. The boxes of the source cover the array.
        owners: device -> its process.
    """
    holders = grouped((box, device) for device, box in source.items())
    # devices that hold the same box send in turn
    turns = {box: cycle(devices) for box, devices in holders.items()}
    replicas = grouped((box, device) for device, box in target.items())

    def sender(box: Box, receiver: int) -> int:
        devices = holders[box]
        # from the device itself or its own process, if possible: that takes no network
        near = [d for d in devices if owners[d] == owners[receiver]]
        return receiver if receiver in devices else near[0] if near else next(turns[box])

    def holds_part(wanted: Box, devices: Sequence[int]) -> bool:
        """Whether the process of these devices holds a part of a box."""
        own = owners[devices[0]]
        return any(owners[d] == own and intersection(wanted, box) is not None for d, box in source.items())

    first, copies = list[Part](), list[Part]()
    for wanted, devices in replicas.items():
        groups = list(grouped((owners[device], device) for device in devices).values())
        # a device of each process that holds a part of the box, or of the first process if none does
        direct = [group[0] for group in groups if holds_part(wanted, group)] or [groups[0][0]]
        first += (
            Part(sender(box, device), device, common)
            for device in direct
            for box in holders
            if (common := intersection(wanted, box)) is not None
        )
        # the other processes get copies of theirs, and each process copies among its own devices
        leaders = [*direct, *(group[0] for group in groups if group[0] not in direct)]
        copies += _copies(wanted, leaders, len(direct))
        copies += (part for group in groups for part in _copies(wanted, group))
    return (*first, *copies)


def intersection(a: Box, b: Box) -> Box | None:
    """The common part of two boxes; None if it has no element. A box of rank 0 has one."""
    box = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return None if any(begin >= end for begin, end in box) else box


def _copies(box: Box, devices: Sequence[int], have: int = 1) -> Iterator[Part]:
    """Copies of a box from the first `have` devices to all, twice as many devices having it after each round."""
    while have < len(devices) and math.prod(end - begin for begin, end in box):
        for sender, receiver in zip(devices[:have], devices[have : 2 * have], strict=False):
            yield Part(sender, receiver, box, forwarded=True)
        have *= 2


def rounds(moves: Sequence[Part]) -> tuple[tuple[Part, ...], ...]:
    """The parts in rounds; a part is in a later round than those that its sender has received if it is forwarded."""
    filled: list[list[Part]] = []
    received: dict[int, int] = {}  # device -> the number of rounds until it has its box
    for part in moves:
        # what is forwarded has to have arrived; what is not may go in the first round that has room
        after = received.get(part.sender, 0) if part.forwarded else 0
        number = next((n for n in range(after, len(filled)) if _joins(part, filled[n])), len(filled))
        if number == len(filled):
            filled.append([])
        filled[number].append(part)
        received[part.receiver] = max(received.get(part.receiver, 0), number + 1)
    return tuple(map(tuple, filled))


def least(source: Mapping[int, Box], target: Mapping[int, Box], owners: Mapping[int, Hashable]) -> int:
    """The elements that have to enter a process: of its distinct target boxes, what it does not hold in the source."""
    own: dict[Hashable, set[Box]] = {}
    for device, box in source.items():
        own.setdefault(owners[device], set()).add(box)
    wanted = {(owners[device], box) for device, box in target.items()}
    return sum(_size(box) - sum(_size(intersection(box, x)) for x in own.get(p, ())) for p, box in wanted)


def _size(box: Box | None) -> int:
    return 0 if box is None else math.prod(end - begin for begin, end in box)


def _joins(part: Part, together: Sequence[Part]) -> bool:
    same = (together[0].shape, together[0].forwarded) == (part.shape, part.forwarded)
    return same and all(part.sender != o.sender and part.receiver != o.receiver for o in together)


def crossing(moves: Sequence[Part], owners: Mapping[int, Hashable]) -> int:
    """The number of elements that go from one process to another."""
    return sum(math.prod(p.shape) for p in moves if owners[p.sender] != owners[p.receiver])
