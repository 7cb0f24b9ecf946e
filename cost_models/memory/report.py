"""What a device holds at the peak of a plan, for people: bytes by kind, and the largest tensors.

kind of an argument    parameters (read before the update), optimizer state, arguments (what is no state)
kind of a value        gradients (backward, read by the update), residuals (forward, read backward), results,
                       temporaries (all else, and what the body of a `shard_map` has while it runs)
resharding             copies in other layouts, and results before their partial sums are added up
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.sizes import Buffer
from autopar.ir.keyed import totals
from autopar.ir.problem import Ints
from autopar.ir.train_state import match_state

#: Tensors that a report lists.
LARGEST = 12

KINDS: tuple[str, ...] = (
    "parameters", "optimizer state", "arguments", "gradients", "residuals", "temporaries", "results", "resharding"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """Something large that lives at the peak.

    Attributes:
        name: path of an argument, or the operation that makes it.
        kind: one of `KINDS`.
        type: shape and dtype of the whole, such as "f32[8,16]".
        nbytes: bytes per device.
        source: the user's "file.py:line", empty if none.
    """

    name: str
    kind: str
    type: str
    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory of one plan.

    Attributes:
        peak_bytes: most bytes that a device holds at once.
        at: the operation that runs then.
        source: its line in the user's code, empty if none.
        phase: its phase, empty for the arguments and the results.
        kinds: kind of tensor -> bytes per device at the peak; with on-chip memory their sum exceeds the peak by it.
        largest: the largest tensors alive then, largest first.
    """

    peak_bytes: int
    at: str
    source: str
    phase: str
    kinds: Mapping[str, int]
    largest: tuple[Tensor, ...]


def report(liveness: Liveness, assignment: Ints) -> Memory:
    """What a device holds at the peak of one plan."""
    peak, moment, alive = liveness.at_peak(assignment)
    kinds = _Kinds(liveness)
    tensors = totals(((kinds.of(buffer), buffer.value), nbytes) for buffer, nbytes in alive)
    of_kind = totals((kind, nbytes) for (kind, _), nbytes in tensors.items())
    largest = sorted(tensors.items(), key=lambda item: (-item[1], item[0]))[:LARGEST]
    op = liveness.op_at(moment)
    return Memory(
        round(peak),
        ("the arguments" if moment is None else "the results") if op is None else f"{op.tag} {op.name}",
        "" if op is None else op.source,
        "" if op is None else op.phase,
        {kind: round(of_kind[kind]) for kind in KINDS if of_kind.get(kind)},
        tuple(kinds.tensor(kind, value, nbytes) for (kind, value), nbytes in largest if nbytes),
    )


@dataclass(frozen=True, slots=True)
class Moment:
    """What a device holds while one operation runs.

    Attributes:
        at: the operation, such as "op12 dot_general"; "the results" behind the last.
        source: its source line.
        phase: "forward", "backward" or "update".
        kinds: kind of tensor, one of `KINDS` -> bytes.
    """

    at: str
    source: str
    phase: str
    kinds: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """All of these bytes."""
        return sum(self.kinds.values())


def over_time(liveness: Liveness, assignment: Ints, points: int) -> tuple[Moment, ...]:
    """What a device holds in the course of a step, at up to so many moments: the fullest of each run of operations."""
    sizes, kinds = liveness.sizes(assignment), _Kinds(liveness)
    of_buffer = np.array([kinds.of(b) for b in liveness.buffers])
    constant = np.array([b.what == "argument" for b in liveness.buffers], bool)
    series = {
        kind: liveness.profile_of(np.where(of_buffer == kind, sizes, 0.0)) + sizes[constant & (of_buffer == kind)].sum()
        for kind in KINDS
    }
    total = np.sum(list(series.values()), axis=0)
    moments = [int(run[total[run].argmax()]) for run in np.array_split(np.arange(len(total)), min(points, len(total)))]
    return tuple(_moment(liveness, t, {kind: round(float(s[t])) for kind, s in series.items()}) for t in moments)


def _moment(liveness: Liveness, t: int, kinds: Mapping[str, int]) -> Moment:
    op = liveness.op_at(t)
    live = {kind: nbytes for kind, nbytes in kinds.items() if nbytes}
    return (
        Moment("the results", "", "", live) if op is None else Moment(f"{op.tag} {op.name}", op.source, op.phase, live)
    )


@dataclass
class _Kinds:
    """Tells what the tensors of one program are for."""

    liveness: Liveness
    updated: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        graph = self.liveness.graph
        for op in graph.walk():
            read = (a for a in op.inputs if isinstance(a, int))
            (self.updated if op.phase == "update" else self.used).update(read)
        self.leaving = {a for a in graph.outputs if isinstance(a, int)}
        kept = set(match_state(graph).values())
        self._state = {v for i, v in enumerate(graph.inputs) if i in kept}

    def of(self, b: Buffer) -> str:
        """The kind of one buffer."""
        if b.what == "workspace":
            return "temporaries"
        if b.what in ("copy", "unsummed"):
            return "residuals" if self._kept_for_backward(b) else "resharding"
        if b.what == "argument":
            if b.value not in self._state:
                return "arguments"
            return "parameters" if b.value in self.used else "optimizer state"
        if b.value in self.leaving:
            return "results"
        op = self.liveness.graph.producers.get(b.value)
        if op is None or op.phase == "update":
            return "temporaries"
        if op.phase == "backward":
            return "gradients" if b.value in self.updated else "temporaries"
        return "residuals" if self._lasts_into_backward(b) else "temporaries"

    def _lasts_into_backward(self, b: Buffer) -> bool:
        """The last that reads it, if any operation runs at all, is of the backward pass."""
        moments = self.liveness.moments
        return bool(moments) and moments[min(b.death, len(moments) - 1)].op.phase == "backward"

    def _kept_for_backward(self, b: Buffer) -> bool:
        """What the forward pass made and the backward pass reads, whatever layout it waits in."""
        op = self.liveness.graph.producers.get(b.value)
        return op is not None and op.phase == "forward" and self._lasts_into_backward(b)

    def tensor(self, kind: str, value: int, nbytes: float) -> Tensor:
        """The entry of a report."""
        graph, op = self.liveness.graph, self.liveness.graph.producers.get(value)
        name = graph.names.get(value) or (f"{op.tag} {op.name}" if op is not None else f"%{value}")
        return Tensor(name, kind, str(graph.types[value]), round(nbytes), op.source if op is not None else "")
