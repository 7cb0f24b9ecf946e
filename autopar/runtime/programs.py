"""The programs of every stage, compiled for its submesh.

    begin     (arguments)                              -> whole values, blocks of the batch, empty sums
    pass      (sums, microbatch, whole values, blocks, values of other passes)
                                                       -> sums, what is stacked in place of summed, values for others
    update    (arguments that it takes over, others, totals, values of others)
                                                       -> values

What they compute and where it lies: `autopar.codegen.stage_shardings`. Sums are donated from pass to pass, so that
accumulating is part of the pass that makes a gradient. Of what belongs to the caller, updates alone take anything over
(donation.py): while passes run the state is as it was. All arguments are tuples of arrays in the order of the lists of
values in `autopar.passes.stages.divide`. Programs are traced one after another, since each is typed by those that it
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
from jax.sharding import NamedSharding

from autopar import jax_compat
from autopar.codegen.stage_shardings import Bodies, Places
from autopar.passes.microbatch.loop import slice_block
from autopar.passes.stages.assign import StagePass
from autopar.passes.stages.divide import PASS_KINDS, Pass, Stages
from autopar.schedules.instructions import Kind

#: Programs that are compiled at a time.
THREADS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The programs of a step in stages.

    Attributes:
        begin: per stage.
        passes: per stage and kind.
        updates: in the order of the updates.
        taken: per update, the arguments that it takes over.
    """

    begin: tuple[Callable[..., Any], ...]
    passes: tuple[Mapping[Kind, Callable[..., Any]], ...]
    updates: tuple[Callable[..., Any], ...]
    taken: tuple[tuple[int, ...], ...]


def needed(stages: Stages, stage: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(arguments that `begin` reads, whole values that it gives, arguments whose blocks it gives) of a stage."""
    found = stages.stages[stage]
    blocks = sorted({v for one in found.passes.values() for v in one.blocks})
    whole = sorted({v for one in found.passes.values() for v in one.whole} - {*stages.split.graph.inputs})
    reads = sorted({*found.arguments, *blocks} if whole else blocks)
    return tuple(reads), tuple(whole), tuple(blocks)


def compile_programs(
    places: Places,
    bodies: Bodies,
    avals: Sequence[Any],
    taken: tuple[tuple[int, ...], ...],
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """All programs of a step in stages, ready to be called.

    Args:
        places: the step, and where values lie.
        bodies: what programs compute.
        avals: shape and dtype of every argument of the step.
        taken: per update, the arguments that it takes over.
        options: of XLA's compiler.
    """
    stages = places.stages
    emission = _Emission(places, bodies, taken, dict(zip(stages.split.graph.inputs, avals, strict=True)))
    count = len(stages.stages)
    keys: list[StagePass] = [
        (s, kind) for kind in PASS_KINDS for s in (range(count) if kind == "F" else reversed(range(count)))
    ]
    with ThreadPoolExecutor(THREADS) as pool:

        def compiled(lowered: Any) -> Future[Callable[..., Any]]:
            return pool.submit(jax_compat.compiled, lowered, options)

        begin = [compiled(emission.begin(s)) for s in range(count)]
        passes = {(s, k): compiled(emission.run(s, k)) for s, k in keys if _does(stages.stages[s].passes[k])}
        updates = [compiled(emission.update(i)) for i in range(len(stages.updates.programs))]
    by_stage: tuple[Mapping[Kind, Callable[..., Any]], ...] = tuple(
        {kind: passes[s, kind].result() for kind in PASS_KINDS if (s, kind) in passes} for s in range(count)
    )
    return Compiled(tuple(b.result() for b in begin), by_stage, tuple(u.result() for u in updates), taken)


def _does(one: Pass) -> bool:
    return bool(one.ops or one.totals)


@dataclass(frozen=True, slots=True, eq=False)
class _Emission:
    """Lowers program after program.

    Attributes:
        taken: per update, the arguments that it takes over.
        arguments: type of every argument.
        whole, blocks, known, sums, totals: types of what the programs so far give.
    """

    places: Places
    bodies: Bodies
    taken: tuple[tuple[int, ...], ...]
    arguments: Mapping[int, Any]
    whole: dict[tuple[int, int], Any] = field(default_factory=dict)
    blocks: dict[tuple[int, int], Any] = field(default_factory=dict)
    known: dict[int, Any] = field(default_factory=dict)
    sums: dict[tuple[int, Kind], Any] = field(default_factory=dict)
    totals: dict[int, Any] = field(default_factory=dict)

    @property
    def stages(self) -> Stages:
        return self.places.stages

    def begin(self, stage: int) -> Any:
        """The program that runs before the passes of a stage."""
        reads, whole, blocks = needed(self.stages, stage)
        passes, split, to = self.stages.stages[stage].passes, self.stages.split, self.places

        def begin(*arrays: Any) -> Any:
            known = dict(zip(reads, arrays, strict=True))
            outer = self.bodies.begin(stage, known) if whole else {}
            cut = [[slice_block(known[v], split.batch[v], split.count, k) for k in range(split.count)] for v in blocks]
            # where everything is everywhere, no block has to be sent; left alone, XLA cuts the batch first
            stacks = [jax.lax.with_sharding_constraint(jnp.stack(ks), to.everywhere(stage)) for ks in cut]
            sums = {
                k: tuple(self.bodies.accumulator(stage, t.value).initial for t in one.totals)
                for k, one in passes.items()
            }
            return tuple(outer[v] for v in whole), tuple(stacks), sums

        out = (
            tuple(to.whole(stage, v) for v in whole),
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
        return tuple(None if self.stacks(stage, t.value) else self.places.total(stage, t.value) for t in one.totals)

    def run(self, stage: int, kind: Kind) -> Any:
        """The program of one pass."""
        one = self.stages.stages[stage].passes[kind]

        def run(sums: Any, index: Any, whole: Any, blocks: Any, reads: Any) -> Any:
            outer = dict(zip(one.whole, whole, strict=True))
            local = {
                v: jax.lax.dynamic_index_in_dim(a, index, 0, False) for v, a in zip(one.blocks, blocks, strict=True)
            }
            local.update(zip(one.reads, reads, strict=True))
            parts, written = self.bodies.run(stage, kind, outer, local, index)
            adding = [self.bodies.accumulator(stage, t.value).add for t in one.totals]
            both = [add(carry, part) for add, carry, part in zip(adding, sums, parts, strict=True)]
            return tuple(c for c, _ in both), tuple(s for _, s in both), written

        to = self.places
        whole = tuple(to.whole(stage, v) for v in one.whole)
        blocks = tuple(to.blocks(stage, v) for v in one.blocks)
        reads = tuple(to.value(stage, v) for v in one.reads)
        sums = self._summed(stage, one)
        stacked = tuple(to.total(stage, t.value) if self.stacks(stage, t.value) else None for t in one.totals)
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
            stacks = self.stacks(stage, total.value)
            self.totals[total.value] = (part,) * self.stages.split.count if stacks else carry
        return lowered

    def update(self, number: int) -> Any:
        """The program of one update."""
        update, taken = self.stages.updates.programs[number], self.taken[number]
        others = left(update.arguments, taken)

        def run(old: Any, arguments: Any, totals: Any, reads: Any) -> Any:
            ended = {t.value: self.ended(t.value, a) for t, a in zip(update.totals, totals, strict=True)}
            given = dict(zip((*taken, *others), (*old, *arguments), strict=True))
            return self.bodies.update(number, given, ended, dict(zip(update.reads, reads, strict=True)))

        to = self.places
        totals = tuple(self.totals[t.value] for t in update.totals)
        shardings = (
            tuple(to.argument(update.stage, v) for v in taken),
            tuple(to.argument(update.stage, v) for v in others),
            ended_shardings(to, number, totals),
            tuple(to.read(number, v) for v in update.reads),
        )
        types = (
            tuple(self.arguments[v] for v in taken),
            tuple(self.arguments[v] for v in others),
            totals,
            tuple(self.known[v] for v in update.reads),
        )
        lowered = _lower(run, types, shardings, tuple(to.result(number, v) for v in update.writes), donate=(0,))
        self.known.update(zip(update.writes, lowered.out_info, strict=True))
        return lowered

    # Totals

    def source(self, total: int) -> int:
        """The stage that makes a total."""
        stages = enumerate(self.stages.stages)
        return next(s for s, x in stages for one in x.passes.values() for t in one.totals if t.value == total)

    def stacks(self, stage: int, total: int) -> bool:
        """Parts of the total are kept one by one."""
        return self.bodies.accumulator(stage, total).is_stacked

    def ended(self, total: int, found: Any) -> Any:
        """The whole of a total, from its sum or its parts."""
        stage = self.source(total)
        end = self.bodies.accumulator(stage, total).finish
        return end(None, jnp.stack(found)) if self.stacks(stage, total) else end(found, None)


def left(arguments: Sequence[int], taken: Sequence[int]) -> tuple[int, ...]:
    """Arguments of an update that it does not take over."""
    return tuple(v for v in arguments if v not in taken)


def ended_shardings(places: Places, number: int, totals: Sequence[Any]) -> tuple[Any, ...]:
    """Where the totals that an update reads lie, each a sum or a tuple of parts."""
    values = [t.value for t in places.stages.updates.programs[number].totals]
    return tuple(
        jax.tree.map(lambda _, v=v: places.ended(number, v), found) for v, found in zip(values, totals, strict=True)
    )


def _lower(
    function: Callable[..., Any], types: Sequence[Any], shardings: Any, out: Any, donate: tuple[int, ...] = ()
) -> Any:
    jitted = jax.jit(function, in_shardings=shardings, out_shardings=out, donate_argnums=donate, keep_unused=True)
    return jitted.lower(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(types)))
