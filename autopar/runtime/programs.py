"""The programs of every stage, compiled for its submesh.

    begin     (arguments)                              -> whole values, blocks of the batch, zero accumulators
    pass      (accumulators, microbatch, whole values, blocks, values of other passes)
                                                       -> accumulators, values for other passes
    update    (donated arguments, other arguments, totals, values of other updates)
                                                       -> values

`autopar.codegen.stages.planned` gives their functions and shardings. Whole values are the same for every microbatch.
Accumulators are donated from pass to pass, so that accumulation is part of the pass that makes a gradient. Arguments of
the caller are donated to updates alone (donation.py): the state is valid while passes run. All operands are tuples of
arrays in the order of the lists of values in `autopar.passes.stages.divide`. Programs are traced one after another,
since the types of operands are those of earlier results, and then compiled in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar import jax_compat
from autopar.codegen.stages.planned import PlannedPrograms
from autopar.ir.graph import Graph
from autopar.passes.microbatch.loop import slice_block
from autopar.passes.stages.divide import PASS_KINDS, Pass, Stages
from autopar.passes.stages.graph import BEGIN
from autopar.runtime.faults.nans import CheckedProgram
from autopar.runtime.transport import is_here
from autopar.schedules.instructions import Kind

#: Number of threads that compile programs.
THREADS = 2

ProgramKey = tuple[int, str | int]
"""A program: its stage, and `BEGIN`, a kind of pass, or the number of an update."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPrograms:
    """The programs of a step in stages.

    Attributes:
        begin: per stage.
        passes: per stage and kind.
        updates: in the order of the updates.
        donated: per update, the arguments that are donated to it.
    """

    begin: tuple[Callable[..., Any], ...]
    passes: tuple[Mapping[Kind, Callable[..., Any]], ...]
    updates: tuple[Callable[..., Any], ...]
    donated: tuple[tuple[int, ...], ...]


def begin_interface(stages: Stages, stage: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(arguments that `begin` reads, whole values that it returns, arguments whose blocks it returns) of a stage."""
    programs = stages.stages[stage]
    blocks = sorted({v for pass_ in programs.passes.values() for v in pass_.blocks})
    whole = sorted({v for pass_ in programs.passes.values() for v in pass_.whole} - {*stages.split.graph.inputs})
    reads = sorted({*programs.arguments, *blocks} if whole else blocks)
    return tuple(reads), tuple(whole), tuple(blocks)


def compile_programs(
    planned: PlannedPrograms,
    avals: Sequence[Any],
    donated: tuple[tuple[int, ...], ...],
    options: Mapping[str, Any] | None = None,
    prefix: str = "",
    debug_nans: bool = False,
) -> CompiledPrograms:
    """Compile all programs of a step in stages.

    Args:
        planned: the step, the shardings of its values, and the functions of its programs.
        avals: shape and dtype of every argument of the step.
        donated: per update, the arguments that are donated to it.
        options: of XLA's compiler.
        prefix: of the names of compiled modules.
        debug_nans: search results for NaN; nothing is donated, and `donated` has to be empty.
    """
    stages = planned.stages
    with ThreadPoolExecutor(THREADS) as pool:
        futures = {
            key: pool.submit(program.compiled, planned.replicated(key[0]), options)
            for key, program in lower_programs(planned, avals, donated, None, prefix, debug_nans)
        }
    programs: Mapping[ProgramKey, Callable[..., Any]] = {key: future.result() for key, future in futures.items()}
    count = range(len(stages.stages))
    by_stage: tuple[Mapping[Kind, Callable[..., Any]], ...] = tuple(
        {kind: programs[s, kind] for kind in PASS_KINDS if (s, kind) in programs} for s in count
    )
    updates = (programs[update.stage, i] for i, update in enumerate(stages.updates.programs))
    return CompiledPrograms(tuple(programs[s, BEGIN] for s in count), by_stage, tuple(updates), donated)


@dataclass(frozen=True, slots=True, eq=False)
class Absent:
    """A program of a submesh of which this process addresses no device; calling it does nothing.

    Attributes:
        results: types of its results, with their shardings.
    """

    results: Any

    def __call__(self, *args: Any) -> Any:
        return self.results


@dataclass(frozen=True, slots=True, eq=False)
class LoweredProgram:
    """A program before compilation.

    Attributes:
        lowered: the lowered object of JAX.
        jaxpr: what was lowered.
        graph: the operations that its tags name.
        checked: search the results for NaN.
    """

    lowered: Any
    jaxpr: Any
    graph: Graph
    checked: bool = False

    def compiled(self, submesh: NamedSharding, options: Mapping[str, Any] | None) -> Callable[..., Any]:
        """The program, compiled if this process addresses a device of its submesh."""
        if not is_here(submesh):
            return Absent(self.lowered.out_info)
        program = jax_compat.compiled(self.lowered, options)
        return CheckedProgram(program, self.jaxpr, self.graph) if self.checked else program


def lower_programs(
    planned: PlannedPrograms,
    avals: Sequence[Any],
    donated: tuple[tuple[int, ...], ...],
    platform: str | None = None,
    prefix: str = "",
    debug_nans: bool = False,
) -> Iterator[tuple[ProgramKey, LoweredProgram]]:
    """Every program, lowered, in an order in which each reads results of earlier ones.

    Args:
        planned, avals, donated: as of `compile_programs`.
        platform: to lower for; None: that of the devices.
        prefix: of the names of compiled modules.
        debug_nans: as of `compile_programs`.
    """
    stages = planned.stages
    arguments = dict(zip(stages.split.graph.inputs, avals, strict=True))
    lowering = _ProgramLowering(planned, donated, arguments, platform, prefix, debug_nans)
    for key in program_order(stages):
        yield key, lowering.program(*key)


def program_order(stages: Stages) -> tuple[ProgramKey, ...]:
    """The programs of a step in stages, each after those whose results it reads."""
    count = len(stages.stages)
    passes: list[tuple[int, Kind]] = [
        (s, kind) for kind in PASS_KINDS for s in (range(count) if kind == "F" else reversed(range(count)))
    ]
    return (
        *((s, BEGIN) for s in range(count)),
        *((s, kind) for s, kind in passes if _has_work(stages.stages[s].passes[kind])),
        *((update.stage, i) for i, update in enumerate(stages.updates.programs)),
    )


def program_name(key: ProgramKey) -> str:
    """The name of a program: "stage 0 begin", "stage 0 F", "stage 1 update 0"."""
    stage, part = key
    return f"stage {stage} {f'update {part}' if isinstance(part, int) else part}"


def _has_work(pass_: Pass) -> bool:
    return bool(pass_.ops or pass_.totals)


@dataclass(frozen=True, slots=True, eq=False)
class _ProgramLowering:
    """Lowers one program after another.

    Attributes:
        planned: the step, the shardings of its values, and the functions of its programs.
        donated: per update, the arguments that are donated to it.
        arguments: type of every argument.
        platform: to lower for; None: that of the devices.
        prefix: of the names of compiled modules.
        debug_nans: the programs are to be searched for NaN, and nothing is donated to them.
        whole, blocks, value_types, sums, totals: types of the results of the programs so far.
    """

    planned: PlannedPrograms
    donated: tuple[tuple[int, ...], ...]
    arguments: Mapping[int, Any]
    platform: str | None = None
    prefix: str = ""
    debug_nans: bool = False
    whole: dict[tuple[int, int], Any] = field(default_factory=dict)
    blocks: dict[tuple[int, int], Any] = field(default_factory=dict)
    value_types: dict[int, Any] = field(default_factory=dict)
    sums: dict[tuple[int, Kind], Any] = field(default_factory=dict)
    totals: dict[int, Any] = field(default_factory=dict)

    @property
    def stages(self) -> Stages:
        return self.planned.stages

    def program(self, stage: int, part: str | int) -> LoweredProgram:
        """A program of `program_order`; those before it are lowered."""
        if isinstance(part, int):
            return self.update(part)
        return self.begin(stage) if part == BEGIN else self.run(stage, cast(Kind, part))

    def begin(self, stage: int) -> LoweredProgram:
        """The program that runs before the passes of a stage."""
        reads, whole, blocks = begin_interface(self.stages, stage)
        passes, split, to = self.stages.stages[stage].passes, self.stages.split, self.planned

        def begin(*arrays: Any) -> Any:
            inputs = dict(zip(reads, arrays, strict=True))
            outer = self.planned.begin(stage, inputs) if whole else {}
            cut = [[slice_block(inputs[v], split.batch[v], split.count, k) for k in range(split.count)] for v in blocks]
            # replicated, so that making blocks needs no communication; unconstrained, XLA would shard the batch first
            stacks = [jax.lax.with_sharding_constraint(jnp.stack(ks), to.replicated(stage)) for ks in cut]
            sums = {
                k: tuple(self.planned.accumulator(stage, t.value).zero() for t in pass_.totals)
                for k, pass_ in passes.items()
            }
            return tuple(outer[v] for v in whole), tuple(stacks), sums

        out = (
            tuple(to.whole(stage, v) for v in whole),
            tuple(to.blocks(stage, v) for v in blocks),
            {k: self._summed(stage, pass_) for k, pass_ in passes.items()},
        )
        program = self._lower(
            (stage, BEGIN),
            begin,
            [self.arguments[v] for v in reads],
            tuple(to.argument(stage, v) for v in reads),
            out,
        )
        values, stacks, sums = program.lowered.out_info
        self.whole.update(((stage, v), a) for v, a in zip(whole, values, strict=True))
        self.blocks.update(((stage, v), a) for v, a in zip(blocks, stacks, strict=True))
        self.sums.update(((stage, k), a) for k, a in sums.items())
        return program

    def _summed(self, stage: int, pass_: Pass) -> tuple[NamedSharding, ...]:
        return tuple(self.planned.total(stage, t.value) for t in pass_.totals)

    def run(self, stage: int, kind: Kind) -> LoweredProgram:
        """The program of one pass."""
        pass_ = self.stages.stages[stage].passes[kind]

        def run(sums: Any, index: Any, whole: Any, blocks: Any, reads: Any) -> Any:
            outer = dict(zip(pass_.whole, whole, strict=True))
            local = {
                v: jax.lax.dynamic_index_in_dim(a, index, 0, False) for v, a in zip(pass_.blocks, blocks, strict=True)
            }
            local.update(zip(pass_.reads, reads, strict=True))
            parts, written = self.planned.run(stage, kind, outer, local, index)
            adding = [self.planned.accumulator(stage, t.value).add for t in pass_.totals]
            added = (add(carry, part, index) for add, carry, part in zip(adding, sums, parts, strict=True))
            return tuple(added), written

        to = self.planned
        whole = tuple(to.whole(stage, v) for v in pass_.whole)
        blocks = tuple(to.blocks(stage, v) for v in pass_.blocks)
        reads = tuple(to.value(stage, v) for v in pass_.reads)
        sums = self._summed(stage, pass_)
        out = (sums, tuple(to.value(stage, v) for v in pass_.writes))
        types = (
            self.sums[stage, kind],
            jax.ShapeDtypeStruct((), np.int32),
            tuple(self.whole.get((stage, v), self.arguments.get(v)) for v in pass_.whole),
            tuple(self.blocks[stage, v] for v in pass_.blocks),
            tuple(self.value_types[v] for v in pass_.reads),
        )
        program = self._lower(
            (stage, kind), run, types, (sums, to.replicated(stage), whole, blocks, reads), out, donate=(0,)
        )
        summed, written = program.lowered.out_info
        self.value_types.update(zip(pass_.writes, written, strict=True))
        self.totals.update((total.value, carry) for total, carry in zip(pass_.totals, summed, strict=True))
        return program

    def update(self, number: int) -> LoweredProgram:
        """The program of one update."""
        update, donated = self.stages.updates.programs[number], self.donated[number]
        rest = not_donated(update.arguments, donated)

        def run(old: Any, arguments: Any, totals: Any, reads: Any) -> Any:
            totals_by_value = {
                t.value: self.planned.accumulator(self.source(t.value), t.value).finish(a)
                for t, a in zip(update.totals, totals, strict=True)
            }
            values = dict(zip((*donated, *rest), (*old, *arguments), strict=True))
            return self.planned.update(number, values, totals_by_value, dict(zip(update.reads, reads, strict=True)))

        to = self.planned
        totals = tuple(self.totals[t.value] for t in update.totals)
        shardings = (
            tuple(to.argument(update.stage, v) for v in donated),
            tuple(to.argument(update.stage, v) for v in rest),
            tuple(to.update_total(number, t.value) for t in update.totals),
            tuple(to.update_read(number, v) for v in update.reads),
        )
        types = (
            tuple(self.arguments[v] for v in donated),
            tuple(self.arguments[v] for v in rest),
            totals,
            tuple(self.value_types[v] for v in update.reads),
        )
        program = self._lower(
            (update.stage, number),
            run,
            types,
            shardings,
            tuple(to.update_result(number, v) for v in update.writes),
            donate=(0,),
        )
        self.value_types.update(zip(update.writes, program.lowered.out_info, strict=True))
        return program

    # Totals

    def source(self, total: int) -> int:
        """The stage that makes a total."""
        stages = enumerate(self.stages.stages)
        return next(s for s, x in stages for pass_ in x.passes.values() for t in pass_.totals if t.value == total)

    def _lower(
        self,
        key: ProgramKey,
        function: Callable[..., Any],
        types: Sequence[Any],
        shardings: Any,
        out: Any,
        donate: tuple[int, ...] = (),
    ) -> LoweredProgram:
        # the compiled module has the name, for profilers
        function.__name__ = f"{self.prefix}{program_name(key)}".replace(", ", "_").replace(" ", "_")
        donate = () if self.debug_nans else donate
        jitted = jax.jit(function, in_shardings=shardings, out_shardings=out, donate_argnums=donate, keep_unused=True)
        traced = jitted.trace(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(types)))
        lowered = traced.lower(lowering_platforms=(self.platform,) if self.platform else None)
        return LoweredProgram(lowered, traced.jaxpr, self.planned.graph(key[0]), self.debug_nans)


def not_donated(arguments: Sequence[int], donated: Sequence[int]) -> tuple[int, ...]:
    """Arguments of an update that are not donated to it."""
    return tuple(v for v in arguments if v not in donated)
