"""Execution of one step: its arrays, and what each kind of instruction does with them.

    begin       copy arguments to the submesh, split the batch, zero the accumulators            -> StepExecution.begin
    run         call the compiled pass; values for later passes of the stage go into the stash   -> StepExecution.run
    send        copy to the submesh of the reader, into its stash; `recv` then does nothing      -> StepExecution.send
    free        drop the stash                                                                   -> StepExecution.free
    accumulate  part of the pass
    update      from the totals of all stages, and values of other updates                       -> StepExecution.update

An error in a pass leaves all arguments valid. An error in an update says that state may already be donated. Unless each
instruction is waited for (`PipelineStep.blocking`), an error on a device may also be reported that late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.codegen.stages.planned import PlannedPrograms
from autopar.errors import ArgumentError, StageError
from autopar.ir.trace import Traced
from autopar.ir.train_state import match_state
from autopar.passes.microbatch.programs import PlacedOp
from autopar.passes.stages.divide import Stages, Transfer
from autopar.passes.stages.graph import BEGIN
from autopar.runtime.faults.failures import failure
from autopar.runtime.faults.nans import CheckedProgram
from autopar.runtime.lowered_schedule import ArgumentSource, LoweredSchedule, LoweredUpdate, lower_schedule
from autopar.runtime.programs import CompiledPrograms, ProgramKey, program_name
from autopar.runtime.transport import Transport, absent, everywhere, host_view, is_here, place
from autopar.schedules.instructions import Instruction, Kind
from autopar.schedules.pipeline import Schedule

#: Prefix of the names of programs of a loop that runs first.
FIRST_LOOP = "first loop, "
#: (stage, microbatch) -> arrays by value.
Stash = Mapping[tuple[int, int], Mapping[int, Any]]
#: Called after each pass, send, free and update is dispatched, with the instruction and the stash.
Observer = Callable[[Instruction, Stash], None]

#: Results of at most so many elements, unless they are state, come out on the same devices.
SHARED = 1024
STATE_LOST = "; state may be used up in part: go on from a saved one"


@dataclass(eq=False)
class StepExecution:
    """Execution of one step.

    Attributes:
        step: the compiled step.
        leaves: of the arguments.
        shares: small results come out on the same devices.
        whole: per stage, value -> array, of the values that are the same for every microbatch.
        pass_operands: (stage, kind of pass) -> the whole values and the blocks of the batch that it reads.
        sums: (stage, kind of pass) -> accumulators.
        stash: (stage, microbatch) -> value -> array, of values that later passes read.
        in_flight: (transfer, microbatch) -> arrays that a pass has made and no send has copied yet.
        update_results: value -> array, of the updates so far.
    """

    step: PipelineStep
    leaves: list[Any]
    shares: bool = True
    whole: list[dict[int, Any]] = field(default_factory=list)
    pass_operands: dict[tuple[int, Kind], tuple[tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=dict)
    sums: dict[tuple[int, Kind], Any] = field(default_factory=dict)
    stash: dict[tuple[int, int], dict[int, Any]] = field(default_factory=dict)
    in_flight: dict[tuple[Transfer, int], list[Any]] = field(default_factory=dict)
    update_results: dict[int, Any] = field(default_factory=dict)

    def results(self) -> list[Any]:
        """Run all instructions and updates; the leaves of the results."""
        step, observer = self.step, self.step.observer
        for stage, program in enumerate(step.stages.stages):
            with self._guard(stage, "its prologue", program.prologue):
                self.begin(stage)
        for i in step.lowered_schedule.order:
            try:
                _ACTIONS[i.op](self, i)
            except Exception as error:
                ops = step.stages.stages[i.stage].passes[i.kind].ops if i.op == "run" else ()
                raise failure(i.stage, str(i), error, step.stages.split.graph, ops, i.microbatch) from error
            if observer is not None:
                observer(i, self.stash)
        self._updates()
        return self._collected()

    def _updates(self) -> None:
        """Run all updates, each after those whose values it reads."""
        step, observer, last = self.step, self.step.observer, self.step.stages.split.count - 1
        lost = STATE_LOST if any(step.compiled.donated) else ""
        for update, ops in zip(step.lowered_schedule.updates, step.stages.updates.programs, strict=True):
            i = Instruction("update", "", update.stage, last)
            with self._guard(update.stage, str(i), ops.ops, lost):
                self.update(update)
            if observer is not None:
                observer(i, self.stash)

    def _collected(self) -> list[Any]:
        """The results of the step, from updates and arguments."""
        flat = self.step.stages.split.flat
        arguments = dict(zip(self.step.stages.split.graph.inputs, self.leaves, strict=True))
        values = {**arguments, **dict(flat.constants), **self.update_results}
        results = [values[a] if isinstance(a, int) else jnp.asarray(a.value) for a in flat.outputs]
        for position, sharding in self.step.result_shardings.items():
            results[position] = self._put(results[position], sharding)
        where = self.step.shared
        for position in self.step.shared_results if self.shares else ():
            if getattr(results[position], "sharding", None) != where:
                results[position] = self._put(results[position], where)
        return [absent(x) if isinstance(x, jax.ShapeDtypeStruct) else x for x in results]

    @contextmanager
    def _guard(self, stage: int, what: str, ops: Sequence[PlacedOp], lost: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:
            stage_error = failure(stage, what, error, self.step.stages.split.graph, ops)
            raise (StageError(f"{stage_error}{lost}") if lost else stage_error) from error

    def argument(self, stage: int, source: ArgumentSource) -> Any:
        """An argument on the submesh of a stage; copied once per step unless it already has this sharding."""
        value, position, sharding = source
        array = self.whole[stage].get(value)
        if array is None:
            leaf = self.leaves[position]
            if getattr(leaf, "sharding", None) != sharding:
                leaf = self._put(host_view(leaf) if self.step.transport.alone else leaf, sharding)
            array = self.whole[stage][value] = leaf
        return array

    def begin(self, stage: int) -> None:
        """Copy arguments to the submesh of a stage, split the batch, zero the accumulators."""
        begin = self.step.lowered_schedule.begins[stage]
        self.whole.append({})
        reads = {source[0]: self.argument(stage, source) for source in begin.arguments}
        values, block_arrays, sums = begin.function(*(reads[v] for v in begin.reads))
        if self.step.blocking:
            jax.block_until_ready((values, block_arrays, sums))
        whole = {**reads, **dict(zip(begin.whole, values, strict=True))}
        blocks = dict(zip(begin.blocks, block_arrays, strict=True))
        for kind, total in sums.items():
            lowered_pass = self.step.lowered_schedule.passes[stage, kind]
            self.sums[stage, kind] = total
            self.pass_operands[stage, kind] = (
                tuple(whole[v] for v in lowered_pass.whole),
                tuple(blocks[v] for v in lowered_pass.blocks),
            )

    # Instructions

    def run(self, i: Instruction) -> None:
        """Run a pass of one microbatch."""
        place: tuple[int, Kind] = (i.stage, i.kind)
        key = (i.stage, i.microbatch)
        lowered_pass = self.step.lowered_schedule.passes[place]
        values = self.stash.setdefault(key, {})
        if lowered_pass.function is not None:
            reads = tuple([values[v] for v in lowered_pass.reads])
            index = self.step.indices[i.stage][i.microbatch]
            sums, written = lowered_pass.function(self.sums[place], index, *self.pass_operands[place], reads)
            self.sums[place] = sums
            values.update(zip(lowered_pass.writes, written, strict=True))
            if self.step.blocking:
                jax.block_until_ready((sums, written))
        for transfer, same_rank, numbers in lowered_pass.transfers:
            arrays = [values[v] for v in numbers]
            if same_rank:
                self._deliver(transfer.target, i.microbatch, numbers, arrays)
            else:
                self.in_flight[transfer, i.microbatch] = arrays
        for v in lowered_pass.dropped:
            values.pop(v, None)
        if not values:
            del self.stash[key]

    def _deliver(self, stage: int, microbatch: int, values: Sequence[int], arrays: Sequence[Any]) -> None:
        self.stash.setdefault((stage, microbatch), {}).update(zip(values, arrays, strict=True))

    def send(self, i: Instruction) -> None:
        """Copy to the submesh of the stage that reads."""
        transfer = Transfer(i.kind, i.stage, i.to)
        send = self.step.lowered_schedule.sends[transfer]
        arrays = self.step.transport.move(self.in_flight.pop((transfer, i.microbatch)), send.shardings)
        if self.step.blocking:
            jax.block_until_ready(arrays)
        self._deliver(i.to, i.microbatch, send.values, arrays)

    def free(self, i: Instruction) -> None:
        """Drop the stash of a microbatch, unless a pass W (gradients of weights) still reads of it."""
        values = self.stash.get((i.stage, i.microbatch))
        read_by_w = self.step.lowered_schedule.passes[i.stage, "W"].reads if i.kind == "F" else ()
        if values is not None and not any(v in values for v in read_by_w):
            del self.stash[i.stage, i.microbatch]

    # Updates

    def update(self, update: LoweredUpdate) -> None:
        """Run the program of one update."""
        results = update.function(
            tuple([self._donatable(update.stage, source) for source in update.donated]),
            tuple([self.argument(update.stage, source) for source in update.arguments]),
            tuple([self._moved(self.sums[place][position], where) for place, position, where in update.totals]),
            tuple([self._moved(self.update_results[v], where) for v, where in update.reads]),
        )
        if self.step.blocking:
            jax.block_until_ready(results)
        self.update_results.update(zip(update.writes, results, strict=True))

    def _donatable(self, stage: int, source: ArgumentSource) -> Any:
        """An argument to donate: the caller's array if it has the right sharding and is no other argument; else a copy.

        `jax.device_put` may return an array that shares memory with one that the caller keeps, so its result is copied.
        """
        array = self.argument(stage, source)
        in_place = array is self.leaves[source[1]] and self.occurrences[id(array)] == 1
        return array if in_place or not is_here(source[2]) else array.copy()

    @cached_property
    def occurrences(self) -> Mapping[int, int]:
        """id of an array -> number of argument leaves that it is."""
        return Counter(map(id, self.leaves))

    def _moved(self, array: Any, where: NamedSharding | None) -> Any:
        """An array copied to a sharding; None: unchanged."""
        return array if where is None else self.step.transport.move([array], [where])[0]

    def _put(self, value: Any, sharding: NamedSharding) -> Any:
        """An array on the devices of a sharding; a NumPy array, or a number, which every process has, is placed."""
        is_array = isinstance(value, jax.Array | jax.ShapeDtypeStruct)
        return self.step.transport.move([value], [sharding])[0] if is_array else place(value, sharding)


_ACTIONS: Mapping[str, Callable[[StepExecution, Instruction], None]] = {
    "run": StepExecution.run,
    "send": StepExecution.send,
    "free": StepExecution.free,
}
"""Instruction -> its action; accumulate comes with run, recv with send, and updates run at the end."""


# The step


@dataclass(frozen=True, eq=False, repr=False)
class PipelineStep:
    """A step that runs as a pipeline, called as the step is.

    Attributes:
        traced: the step.
        stages: its stages.
        schedule: the order of its instructions.
        planned: its programs before compilation, with the shardings of what they pass to each other.
        compiled: its programs.
        indices: per stage, the number of every microbatch, on its devices.
        blocking: wait for every instruction. An error then names its instruction and, before the updates, leaves the
            state valid; measured times are those of single instructions.
        before: a loop over the microbatches that runs first; its results are further arguments.
        observer: called after every instruction that is dispatched, in order.
        transport: moves arrays between submeshes.
    """

    traced: Traced
    stages: Stages
    schedule: Schedule
    planned: PlannedPrograms
    compiled: CompiledPrograms
    indices: tuple[tuple[Any, ...], ...]
    blocking: bool = False
    before: PipelineStep | None = None
    observer: Observer | None = None
    transport: Transport = field(default_factory=Transport)

    @cached_property
    def shared(self) -> NamedSharding:
        """The sharding of small results: copies on the last stage, whose passes compute most of them;
        with several processes a copy on one device of each, which can then read them.
        """
        last = len(self.stages.stages) - 1
        return self.planned.replicated(last) if jax.process_count() == 1 else everywhere()

    @cached_property
    def shared_results(self) -> tuple[int, ...]:
        """Positions of small results that are no state, which users compute with: they come out on equal devices."""
        state, computed = match_state(self.traced.graph), self.stages.updates.computed_in
        results = enumerate(zip(self.stages.split.flat.outputs, self.traced.out_avals, strict=True))
        return tuple(
            i
            for i, (v, aval) in results
            if i not in state and isinstance(v, int) and v in computed and math.prod(aval.shape) <= SHARED
        )

    @cached_property
    def lowered_schedule(self) -> LoweredSchedule:
        """The schedule, lowered to calls of the compiled programs."""
        return lower_schedule(self.planned, self.schedule, self.compiled)

    @cached_property
    def argument_shardings(self) -> tuple[NamedSharding | None, ...]:
        """The sharding of every argument between steps; None for the batch."""
        batch, owners = self.stages.split.batch, self.stages.updates.owners
        return tuple(None if v in batch else self.planned.argument(owners[v], v) for v in self.traced.graph.inputs)

    @cached_property
    def result_shardings(self) -> Mapping[int, NamedSharding]:
        """Position of a result that is state -> its sharding between steps, if another stage makes than stores it."""
        graph, updates = self.stages.split.graph, self.stages.updates
        carried = [(out, self.stages.split.flat.outputs[out], i) for out, i in match_state(graph).items()]
        new_state = [
            (out, updates.programs[updates.computed_in[v]].stage, i)
            for out, v, i in carried
            if isinstance(v, int) and v in updates.computed_in
        ]
        return {
            out: sharding
            for out, stage, i in new_state
            if (sharding := self.argument_shardings[i]) is not None and updates.owners[graph.inputs[i]] != stage
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the step.

        Raises:
            ArgumentError: the arguments differ from those that were traced.
            StageError: a stage failed. The arguments are still valid, except after an error in an update, whose message
                says that the state may be used up.
        """
        flat = self.traced.leaves(*args, **kwargs)
        for path, array, aval in zip(self.traced.graph.input_paths, flat, self.traced.in_avals, strict=True):
            if np.shape(array) != aval.shape:
                raise ArgumentError(
                    f"argument '{path}' has shape {np.shape(array)}, the step was traced for {aval.shape}"
                )
        return jax.tree.unflatten(self.traced.out_tree, self.results(flat))

    def results(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves of the results from those of the arguments; StageError as for a call."""
        first_loop = [] if self.before is None else StepExecution(self.before, [*leaves], shares=False).results()
        return StepExecution(self, [*leaves, *first_loop]).results()

    @cached_property
    def programs(self) -> Mapping[str, Any]:
        """Name -> JAX's compiled object: "stage 0 begin", "stage 0 F", "stage 1 update 0", and so on."""
        programs: dict[ProgramKey, Any] = {}
        for stage, begin in enumerate(self.compiled.begin):
            programs[stage, BEGIN] = begin
            programs.update(((stage, kind), program) for kind, program in self.compiled.passes[stage].items())
        updates = zip(self.stages.updates.programs, self.compiled.updates, strict=True)
        programs.update(((update.stage, i), program) for i, (update, program) in enumerate(updates))
        first = {} if self.before is None else {f"{FIRST_LOOP}{n}": p for n, p in self.before.programs.items()}
        compiled = {
            program_name(key): program.program if isinstance(program, CheckedProgram) else program
            for key, program in programs.items()
        }
        return {**first, **compiled}
