"""What planned stages cost: seconds of their passes, and bytes on their devices.

    seconds of a program  =  operations, with the collectives that end their sums                    -> _operations
                          +  light traffic of what follows them                                      -> _light
                          +  reshards, where they are read                                           -> _reshards

so that over all programs of a stage, passes m times, they are the optimizer's objective but for local slices, which it
prices at next to nothing.

    bytes per device  =  state + sums + batch + copies + microbatches in flight x stash + temporaries    -> stage_memory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Protocol

from autopar.cost_models.pipeline import Prices
from autopar.ir.graph import Type
from autopar.ir.layout import device_share
from autopar.passes.intra_op import extract
from autopar.passes.stages.divide import KINDS
from autopar.passes.stages.graph import BEGIN

if TYPE_CHECKING:
    from autopar.passes.stages.plan import StagePlan
    from autopar.passes.stages.plan_all import Accounted, StagePlans

UPDATE = "update"


class Piece(Protocol):
    """Bytes per device of a value; `wide`: at least four per number."""

    def __call__(self, plan: StagePlan, value: int, *, wide: bool = False) -> float: ...


@dataclass(frozen=True)
class StagePrices:
    """Predicted seconds of one planned stage.

    Attributes:
        forward, backward, weight: s of a pass F, B, W of one microbatch.
        update: s of all that runs once per step, without `reduce`.
        reduce: s per step of the collectives in updates: sums of gradients over devices.
        handed: value handed over -> bytes of one microbatch of it, over the whole submesh.
    """

    forward: float
    backward: float
    weight: float
    update: float
    reduce: float
    handed: Mapping[int, int]

    def scaled(self, share: float) -> StagePrices:
        """So much of all seconds; the same is handed over."""
        forward, backward, weight = share * self.forward, share * self.backward, share * self.weight
        return StagePrices(forward, backward, weight, share * self.update, share * self.reduce, self.handed)

    def seconds(self, microbatches: int) -> float:
        """s per step of the stage alone."""
        return microbatches * (self.forward + self.backward + self.weight) + self.update + self.reduce


@dataclass(frozen=True)
class StageMemory:
    """Predicted bytes per device of one planned stage.

    Attributes:
        state: arguments that it holds or reads whole: parameters, optimizer state.
        sums: accumulators, from the first pass to the update.
        batch: the blocks of all microbatches.
        copies: what the prologue makes, and copies of that and of arguments in other layouts, while passes run.
        stash: per microbatch, what forward passes leave for backward passes, values received included.
        temporaries: the most that passes hold besides.
        update: the most that updates hold besides state and sums, new state included.
    """

    state: float
    sums: float
    batch: float
    copies: float
    stash: float
    temporaries: float
    update: float

    def scaled(self, share: float) -> StageMemory:
        """So much of everything."""
        return StageMemory(*(share * nbytes for nbytes in astuple(self)))

    def peak(self, in_flight: int) -> float:
        """Most bytes held at once with so many microbatches between F and the last pass."""
        passes = self.batch + self.copies + in_flight * self.stash + self.temporaries
        return self.state + self.sums + max(passes, self.update)


def stage_prices(plan: StagePlan) -> StagePrices:
    """Seconds of a planned stage."""
    graph, count = plan.graph.graph, _count(plan)
    found: dict[str, float] = dict.fromkeys((*KINDS, UPDATE), 0.0)
    for program, seconds in (*_operations(plan), *_light(plan), *_reshards(plan, ended=False)):
        found[program] += seconds
    reduce = sum(seconds for _, seconds in _reshards(plan, ended=True))
    handed = {v: graph.type_of(graph.outputs[i]).nbytes for i, v in plan.graph.handed.items()}
    forward, backward, weight = (found[kind] / count for kind in KINDS)
    return StagePrices(forward, backward, weight, found[UPDATE], reduce, handed)


def prices(plans: StagePlans[Accounted]) -> Prices:
    """Prices of all stages, as the simulator of schedules takes them; transfers are left to whoever knows the links.

    `Prices.border` has the bytes; see `autopar.cost_models.pipeline.transfer_times`.
    """
    found = [plan.account.prices for plan in plans.plans]
    border: dict[tuple[int, int], float] = {}
    for hand, values in plans.stages.hands.items():
        pair = (hand.source, hand.target)
        border[pair] = border.get(pair, 0.0) + sum(found[hand.source].handed[v] for v in values)
    return Prices(
        forward=tuple(p.forward for p in found),
        backward=tuple(p.backward for p in found),
        weight=tuple(p.weight for p in found),
        reduce=tuple(p.reduce for p in found),
        update=tuple(p.update for p in found),
        stash=tuple(plan.account.memory.stash for plan in plans.plans),
        border=border,
    )


def _count(plan: StagePlan) -> int:
    """Microbatches."""
    repeats = plan.graph.graph.repeats
    assert repeats is not None
    return repeats.inputs[plan.graph.index]


def _of(plan: StagePlan, op: int) -> str:
    """F, B, W, or that which runs once."""
    name = plan.graph.program_of(op)
    return name if name in KINDS else UPDATE


# Seconds per step, by program


def _operations(plan: StagePlan) -> Iterator[tuple[str, float]]:
    for op, seconds in extract.operation_seconds(plan.model, plan.solution.assignment):
        yield _of(plan, op), seconds


def _light(plan: StagePlan) -> Iterator[tuple[str, float]]:
    groups, readers = plan.model.grouping.groups, _first_readers(plan)
    for charge, seconds in extract.traffic_seconds(plan.model, plan.solution.assignment, plan.mesh):
        value = groups[charge.group].value
        yield _of(plan, charge.op) if charge.op >= 0 else readers.get(value, UPDATE), seconds


def _first_readers(plan: StagePlan) -> Mapping[int, str]:
    """Argument -> the program that first reads it."""
    found: dict[int, str] = {}
    for op in plan.graph.graph.ops:
        for atom in op.inputs:
            if isinstance(atom, int) and atom in plan.graph.graph.names:
                found.setdefault(atom, _of(plan, op.index))
    return found


def _reshards(plan: StagePlan, *, ended: bool) -> Iterator[tuple[str, float]]:
    """Collectives between operations; `ended`: those of updates, and no others."""
    mesh, overlap = plan.mesh, plan.model.grouping.overlap
    behind, uses = mesh.behind_computation(), {use.site: use for use in plan.model.grouping.uses}
    for c in plan.collectives:
        use = uses.get(c.op)
        if use is None:
            continue  # at an operation, whose price has it
        program = _at(plan, use.op, c.op)
        if (program == UPDATE) == ended:
            on = behind if overlap.moves(use.value, use.op) else mesh
            once = c.count < _count(plan)  # a copy that all passes share
            yield UPDATE if once else program, extract.collective_seconds(c, on)


def _at(plan: StagePlan, op: int, site: str) -> str:
    """The program that moves what is read at a site; a result is handed out by the program that makes it."""
    if op >= 0:
        return _of(plan, op)
    atom = plan.graph.graph.outputs[int(site.removeprefix("out"))]
    made = plan.graph.maker.get(atom, BEGIN) if isinstance(atom, int) else BEGIN
    return made if made in KINDS else UPDATE


# Bytes


def stage_memory(plan: StagePlan) -> StageMemory:
    """Bytes per device of a planned stage.

    The stash counts every value once, in the layout where it lives: what backward passes read of forward passes through
    values that are made where they are read is what these are made of.
    """
    long, copies = _long_held(plan, held), _shared(plan)
    passes, update = _besides(plan)
    return replace(long, copies=copies, temporaries=max(0.0, passes - copies - long.stash), update=update)


def least_memory(plan: StagePlan) -> StageMemory:
    """What no plan of a stage holds less of: the same in even pieces, without copies and temporaries."""
    return _long_held(plan, even)


def _long_held(plan: StagePlan, piece: Piece) -> StageMemory:
    """State, sums, the batch and the stash by the bytes of one device's piece, and nothing else."""
    graph, count = plan.graph, _count(plan)
    state = sum(piece(plan, v) for v in graph.arguments.values())
    sums = sum(piece(plan, a, wide=True) for v in graph.marked if isinstance(a := graph.local[v], int))
    batch = sum(count * piece(plan, v) for v in graph.blocks.values())
    stash = sum(piece(plan, v) for v in _kept(plan))
    return StageMemory(state, sums, batch, 0.0, stash, 0.0, 0.0)


def _shared(plan: StagePlan) -> float:
    """Bytes per device of what passes share: of whole values and of arguments in other layouts, the largest each."""
    graph, sizes = plan.graph, plan.liveness.sizes(plan.solution.assignment)
    whole = {a for a in graph.whole.values() if isinstance(a, int)}
    shared = {"value": whole, "copy": whole | {*graph.arguments.values()}}
    running = [m for m, step in enumerate(plan.liveness.moments) if _of(plan, step.op.index) in KINDS]
    largest: dict[int, float] = {}
    for buffer, size in zip(plan.liveness.buffers, sizes, strict=True):
        seen = running and buffer.birth <= running[-1] and buffer.death >= running[0]
        if seen and buffer.value in shared.get(buffer.what, ()):
            largest[buffer.value] = max(largest.get(buffer.value, 0.0), float(size))
    return sum(largest.values())


def held(plan: StagePlan, value: int, *, wide: bool = False) -> float:
    """Bytes per device of a value where it lives; `wide`: at least four per number, as sums have."""
    type_, layout = plan.graph.graph.types[value], plan.layout(value)
    return _whole(type_, wide) * device_share(layout, type_.shape, plan.mesh.sizes)


def even(plan: StagePlan, value: int, *, wide: bool = False) -> float:
    """The same of a value that is cut evenly over the whole submesh."""
    return _whole(plan.graph.graph.types[value], wide) / plan.mesh.size


def _whole(type_: Type, wide: bool) -> float:
    return type_.size * (max(type_.itemsize, 4) if wide and "float" in type_.dtype else type_.itemsize)


def _kept(plan: StagePlan) -> Sequence[int]:
    """Values that later passes read of earlier ones or of other stages."""
    graph, homed = plan.graph, plan.layouts.values
    made, received = graph.maker, {*graph.received.values()}
    producer = {v: op for op in graph.graph.ops for v in op.outputs}
    kept: dict[int, None] = {}
    for op in graph.graph.ops:
        name = made.get(op.outputs[0], BEGIN) if op.outputs else BEGIN
        if name not in ("B", "W"):
            continue
        waiting, seen = [a for a in op.inputs if isinstance(a, int)], set[int]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            source = made.get(value, "F" if value in received else BEGIN)
            lazy = value in producer and value not in homed and graph.graph.types[value].rank > 0
            if lazy and source != BEGIN:
                waiting.extend(a for a in producer[value].inputs if isinstance(a, int))
            elif source in KINDS and KINDS.index(source) < KINDS.index(name):
                kept[value] = None
    return tuple(sorted(kept))


def _besides(plan: StagePlan) -> tuple[float, float]:
    """The most bytes besides arguments while passes run, and while updates run."""
    profile = plan.liveness.profile(plan.solution.assignment)
    passes, update = 0.0, 0.0
    for moment, step in enumerate(plan.liveness.moments):
        if _of(plan, step.op.index) in KINDS:
            passes = max(passes, float(profile[moment]))
        else:
            update = max(update, float(profile[moment]))
    return passes, update
