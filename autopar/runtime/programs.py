"""The programs of every stage, compiled for its submesh.

    begin     (arguments)                              -> whole values, blocks of the batch, empty sums
    pass      (sums, microbatch, whole values, blocks, values of other passes)
                                                       -> sums, what is stacked in place of summed, values for others
    update    (arguments, totals, values of others)    -> values

Sums are donated from pass to pass, so that accumulating is part of the pass that makes a gradient. Nothing that belongs
to the caller is donated: after an error its state is as it was. All arguments are tuples of arrays in the order of the
lists of values in `autopar.passes.stages`. Programs are traced one after another, since each is typed by those that it
reads, and then compiled side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.microbatches import Accumulator, Programs, take
from autopar.passes.microbatch_programs import Sweep, Total
from autopar.passes.stage_passes import Place
from autopar.passes.stage_updates import Update
from autopar.passes.stages import KINDS, Pass, Stages
from autopar.passes.state import match_state
from autopar.runtime.layouts import Layouts
from autopar.schedules.instructions import Kind

#: Programs that are compiled at a time.
THREADS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The programs of a step in stages: per stage; per stage and kind of pass; in the order of the updates."""

    begin: tuple[Callable[..., Any], ...]
    passes: tuple[Mapping[Kind, Callable[..., Any]], ...]
    updates: tuple[Callable[..., Any], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where values lie: the submesh of every stage, and layouts on it."""

    stages: Stages
    meshes: tuple[Mesh, ...]
    layouts: Layouts

    def everywhere(self, stage: int) -> NamedSharding:
        """A copy on every device of a stage."""
        return NamedSharding(self.meshes[stage], PartitionSpec())

    def value(self, stage: int, value: int) -> NamedSharding:
        """A value of the microbatch, or a whole value that passes read."""
        return NamedSharding(self.meshes[stage], self.layouts(stage, value))

    def argument(self, stage: int, value: int) -> NamedSharding:
        """An argument of the step; the batch is on every device, to be cut into microbatches there."""
        return self.everywhere(stage) if value in self.stages.split.batch else self.value(stage, value)

    def blocks(self, stage: int, value: int) -> NamedSharding:
        """All microbatches of an argument, stacked in front."""
        return NamedSharding(self.meshes[stage], PartitionSpec(None, *self.layouts(stage, value)))


def needed(stages: Stages, stage: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(arguments that `begin` reads, whole values that it gives, arguments whose blocks it gives) of a stage."""
    found = stages.stages[stage]
    blocks = sorted({v for one in found.passes.values() for v in one.blocks})
    made = {v for placed in found.prologue for v in placed.op.outputs}
    whole = sorted({v for one in found.passes.values() for v in one.whole} & made)
    reads = sorted({*found.arguments, *blocks} if whole else blocks)
    return tuple(reads), tuple(whole), tuple(blocks)


def compile_programs(
    stages: Stages, places: Places, avals: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Compiled:
    """All programs of a step in stages, ready to be called.

    Args:
        stages: the step.
        places: where values lie.
        avals: shape and dtype of every argument of the step.
        options: of XLA's compiler.
    """
    arguments = dict(zip(stages.split.graph.inputs, avals, strict=True))
    emission = _Emission.of(stages, places, arguments)
    count = len(stages.stages)
    keys: list[Place] = [(s, kind) for kind in KINDS for s in (range(count) if kind == "F" else reversed(range(count)))]
    with ThreadPoolExecutor(THREADS) as pool:

        def compiled(lowered: Any) -> Future[Callable[..., Any]]:
            return pool.submit(lowered.compile, options)

        begin = [compiled(emission.begin(s)) for s in range(count)]
        passes = {(s, k): compiled(emission.run(s, k)) for s, k in keys if _does(stages.stages[s].passes[k])}
        updates = [compiled(emission.update(u)) for u in stages.updates.programs]
    by_stage: tuple[Mapping[Kind, Callable[..., Any]], ...] = tuple(
        {kind: passes[s, kind].result() for kind in KINDS if (s, kind) in passes} for s in range(count)
    )
    return Compiled(tuple(b.result() for b in begin), by_stage, tuple(u.result() for u in updates))


def _does(one: Pass) -> bool:
    return bool(one.ops or one.totals)


@dataclass(frozen=True, slots=True, eq=False)
class _Emission:
    """Lowers program after program.

    Attributes:
        arguments: type of every argument.
        accumulators: how the parts of every total come together.
        carried: new value of an argument -> the argument.
        whole, blocks, known, sums, totals: types of what the programs so far give.
    """

    programs: Programs
    stages: Stages
    places: Places
    arguments: Mapping[int, Any]
    accumulators: Mapping[int, Accumulator]
    carried: Mapping[Any, int]
    whole: dict[tuple[int, int], Any] = field(default_factory=dict)
    blocks: dict[tuple[int, int], Any] = field(default_factory=dict)
    known: dict[int, Any] = field(default_factory=dict)
    sums: dict[tuple[int, Kind], Any] = field(default_factory=dict)
    totals: dict[int, Any] = field(default_factory=dict)

    @staticmethod
    def of(stages: Stages, places: Places, arguments: Mapping[int, Any]) -> _Emission:
        programs, graph = Programs(stages.split), stages.split.graph
        totals = [t for stage in stages.stages for one in stage.passes.values() for t in one.totals]
        found = {t.value: programs.accumulator(t) for t in totals}
        carried = {stages.split.flat.outputs[out]: graph.inputs[i] for out, i in match_state(graph).items()}
        return _Emission(programs, stages, places, arguments, found, carried)

    def begin(self, stage: int) -> Any:
        """The program that runs before the passes of a stage."""
        reads, whole, blocks = needed(self.stages, stage)
        prologue, split = self.stages.stages[stage].prologue, self.stages.split
        passes = self.stages.stages[stage].passes

        def begin(*arrays: Any) -> Any:
            known = {**self.constants, **dict(zip(reads, arrays, strict=True))}
            outer = self.programs.after(Sweep((), (), prologue if whole else ()), known, ())
            cut = [[take(known[v], split.batch[v], split.count, k) for k in range(split.count)] for v in blocks]
            sums = {k: tuple(self.accumulators[t.value].begin for t in one.totals) for k, one in passes.items()}
            return tuple(outer[v] for v in whole), tuple(map(jnp.stack, cut)), sums

        to = self.places
        out = (
            tuple(to.value(stage, v) for v in whole),
            tuple(to.blocks(stage, v) for v in blocks),
            {k: self._summed(stage, one) for k, one in passes.items()},
        )
        lowered = _lower(begin, [self.arguments[v] for v in reads], tuple(to.argument(stage, v) for v in reads), out)
        given, stacks, sums = lowered.out_info
        self.whole.update(((stage, v), a) for v, a in zip(whole, given, strict=True))
        self.blocks.update(((stage, v), a) for v, a in zip(blocks, stacks, strict=True))
        self.sums.update(((stage, k), a) for k, a in sums.items())
        return lowered

    def _summed(self, stage: int, one: Pass) -> tuple[NamedSharding | None, ...]:
        return tuple(None if self.stacks(t) else self.places.everywhere(stage) for t in one.totals)

    def run(self, stage: int, kind: Kind) -> Any:
        """The program of one pass."""
        one = self.stages.stages[stage].passes[kind]
        wanted = tuple(Total(v, "last") for v in (*(t.value for t in one.totals), *one.writes))

        def run(sums: Any, index: Any, whole: Any, blocks: Any, reads: Any) -> Any:
            outer = {**self.constants, **dict(zip(one.whole, whole, strict=True))}
            local = {
                v: jax.lax.dynamic_index_in_dim(a, index, 0, False) for v, a in zip(one.blocks, blocks, strict=True)
            }
            local.update(zip(one.reads, reads, strict=True))
            made = self.programs.loop(Sweep(one.ops, wanted, ()), outer, local, index)
            parts = zip(one.totals, sums, made, strict=False)
            both = [self.accumulators[t.value].add(carry, part) for t, carry, part in parts]
            return tuple(c for c, _ in both), tuple(s for _, s in both), made[len(one.totals) :]

        to = self.places
        whole = tuple(to.argument(stage, v) for v in one.whole)
        blocks = tuple(to.blocks(stage, v) for v in one.blocks)
        reads = tuple(to.value(stage, v) for v in one.reads)
        sums = self._summed(stage, one)
        stacked = tuple(to.value(stage, t.value) if self.stacks(t) else None for t in one.totals)
        out = (sums, stacked, tuple(to.value(stage, v) for v in one.writes))
        types = (
            self.sums[stage, kind],
            jax.ShapeDtypeStruct((), np.int32),
            tuple(self.whole.get((stage, v), self.arguments.get(v)) for v in one.whole),
            tuple(self.blocks[stage, v] for v in one.blocks),
            tuple(self.known[v] for v in one.reads),
        )
        lowered = _lower(run, types, (sums, to.everywhere(stage), whole, blocks, reads), out, donate=(0,))
        summed, parts, written = lowered.out_info
        self.known.update(zip(one.writes, written, strict=True))
        for total, carry, part in zip(one.totals, summed, parts, strict=True):
            self.totals[total.value] = (part,) * self.stages.split.count if self.stacks(total) else carry
        return lowered

    def update(self, update: Update) -> Any:
        """The program of one update."""

        def run(arguments: Any, totals: Any, reads: Any) -> Any:
            known = {**self.constants, **dict(zip(update.arguments, arguments, strict=True))}
            known.update(zip(update.reads, reads, strict=True))
            ended = [self.ended(t, a) for t, a in zip(update.totals, totals, strict=True)]
            made = self.programs.after(Sweep((), update.totals, update.ops), known, ended)
            return tuple(made[v] for v in update.writes)

        to, stage = self.places, update.stage
        everywhere = to.everywhere(stage)
        totals = tuple(self.totals[t.value] for t in update.totals)
        shardings = (
            tuple(to.argument(stage, v) for v in update.arguments),
            jax.tree.map(lambda _: everywhere, totals),
            (everywhere,) * len(update.reads),
        )
        types = (
            tuple(self.arguments[v] for v in update.arguments),
            totals,
            tuple(self.known[v] for v in update.reads),
        )
        lowered = _lower(run, types, shardings, tuple(self._result(stage, v) for v in update.writes))
        self.known.update(zip(update.writes, lowered.out_info, strict=True))
        return lowered

    def _result(self, stage: int, value: int) -> NamedSharding:
        """The state comes out as it goes in."""
        known = self.carried.get(value)
        return self.places.everywhere(stage) if known is None else self.places.argument(stage, known)

    # Totals

    def stacks(self, total: Total) -> bool:
        """Parts of the total are kept one by one."""
        return self.accumulators[total.value].begin is None

    def ended(self, total: Total, found: Any) -> Any:
        """The whole of a total, from its sum or its parts."""
        end = self.accumulators[total.value].end
        return end(None, jnp.stack(found)) if self.stacks(total) else end(found, None)

    @property
    def constants(self) -> dict[int, Any]:
        """Arrays that the step closes over, wherever they lie."""
        return {v: _unplaced(array) for v, array in self.stages.split.flat.constants}


def _unplaced(array: Any) -> Any:
    extended = jnp.issubdtype(jax.typeof(array).dtype, jax.dtypes.extended)
    return array if extended else np.asarray(array)


def _lower(
    function: Callable[..., Any], types: Sequence[Any], shardings: Any, out: Any, donate: tuple[int, ...] = ()
) -> Any:
    jitted = jax.jit(function, in_shardings=shardings, out_shardings=out, donate_argnums=donate, keep_unused=True)
    return jitted.lower(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(types)))
