"""What is kept because products wait: a compiler hides transfers behind products that are not urgent.

Nothing but updates waits for the products that make weights' gradients. libtpu puts those made before a gather of
activations off until it runs, the last ones first, as many as fit into the time of the transfer, and keeps their
operands:

    j waits for a gather   <=>   T(gather)  >  sum of seconds(i) over the products i between j and the gather
    bytes kept              =    what j reads that nothing reads later, each device its even share

T depends on layouts, on both ends of one edge. The seconds of a product and the bytes of what it reads depend on other
decisions; they are taken as if the mesh shared them evenly. Products are taken together in groups of 1, 1, 2, 4, ... by
how far before the gather they were made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from autopar.cost_models.compute import op_time
from autopar.cost_models.flops import work
from autopar.cost_models.memory.sizes import Sizes


class Kept(NamedTuple):
    """What a group of products keeps by waiting.

    Attributes:
        seconds: of the products between the group and the gather: a gather that takes longer reaches it.
        nbytes: of one device's share of what is kept.
        birth: when the first of it would have been gone.
    """

    seconds: float
    nbytes: float
    birth: int


@dataclass(frozen=True, eq=False)
class Waiting:
    """The products of a program that may wait for transfers."""

    sizes: Sizes
    reads: dict[int, Sequence[tuple[int, int]]] = field(default_factory=dict)  # by moment
    seconds: dict[int, float] = field(default_factory=dict)  # by moment
    shares: dict[int, float] = field(default_factory=dict)  # by value

    def delays(self, moment: int) -> bool:
        """Whether products may wait for what a moment gathers: it is of the backward pass, and none of them."""
        lives, n = self.sizes.lives, bisect_left(self.sizes.lives.late, moment)
        one_of_them = n < len(lives.late) and lives.late[n] == moment
        return moment < lives.end and lives.moments[moment].op.phase == "backward" and not one_of_them

    def kept(self, moment: int, seconds: float) -> Iterator[Kept]:
        """What is kept until something starts to be gathered at a moment that takes at most so many seconds."""
        lives, bodies = self.sizes.lives, self.sizes.bodies
        before = (lives.late[i] for i in range(bisect_left(lives.late, moment) - 1, -1, -1))
        near = (m for m in before if bodies[m] == bodies[moment])
        seen: set[int] = set()
        passed, done = 0.0, 0
        while passed < seconds and (group := [*islice(near, max(done, 1))]):
            gone = {v: d + 1 for m in group for v, d in self._read(m) if d < moment and v not in seen}
            seen.update(gone)
            if gone:
                yield Kept(passed, sum(map(self._share, gone)), min(gone.values()))
            passed += sum(map(self._seconds, group))
            done += len(group)

    def _read(self, moment: int) -> Sequence[tuple[int, int]]:
        """What is written and read by the product of a moment, and when that is last read."""
        if moment not in self.reads:
            self.reads[moment] = tuple(self._last_read(moment))
        return self.reads[moment]

    def _last_read(self, moment: int) -> Iterator[tuple[int, int]]:
        program, lives = self.sizes.program, self.sizes.lives
        for v in self.sizes.w.reads(lives.moments[moment]):
            root = program.behind(v) if v in program.tokens else v
            if root in self.sizes.w.values and root not in program.graph.names and root in lives.death:
                yield root, max(lives.death[root], lives.death.get(v, 0))

    def _share(self, v: int) -> float:
        if v not in self.shares:
            size = self.sizes.program.type_of(v).size * self.sizes.kind(v).itemsize
            self.shares[v] = size / self.sizes.mesh.size
        return self.shares[v]

    def _seconds(self, moment: int) -> float:
        if moment not in self.seconds:
            self.seconds[moment] = self._even_seconds(moment)
        return self.seconds[moment]

    def _even_seconds(self, moment: int) -> float:
        s, op = self.sizes, self.sizes.lives.moments[moment].op
        nbytes = sum(s.graph.type_of(a).nbytes for a in op.inputs) + sum(s.graph.types[v].nbytes for v in op.outputs)
        dtype = s.graph.type_of(op.inputs[0]).dtype
        return float(op_time(work(s.graph, op) / s.mesh.size, nbytes / s.mesh.size, dtype, s.mesh.device, launches=1))
