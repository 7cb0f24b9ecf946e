"""One step under way: what it holds, and what each kind of instruction does with it.

    begin       bring arguments to the submesh, cut the batch, empty sums                            -> Run.begin
    run         call the compiled pass; what later passes of the stage read stays in the stash       -> Run.run
    send        copy to the submesh of the reader, into its stash; `recv` is then nothing to do      -> Run.send
    free        give up the stash                                                                    -> Run.free
    accumulate  part of the pass
    update      with the totals of all stages, and what other updates make                           -> Run.update

An error in a pass leaves all arguments as they were. An update may have taken over state by then: its error says so.
Where instructions are not waited for (`PipelineStep.blocking`), what fails on a device may show up that late as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from autopar.errors import StageError
from autopar.passes.microbatch.programs import PlacedOp
from autopar.passes.stages.divide import Transfer
from autopar.runtime.failures import failure
from autopar.runtime.lowered_schedule import Source, Updating
from autopar.schedules.instructions import Instruction, Kind

if TYPE_CHECKING:
    from autopar.runtime.pipeline import PipelineStep

#: (stage, microbatch) -> arrays by value.
Stash = Mapping[tuple[int, int], Mapping[int, Any]]
#: Hears of every pass, send, free and update when it is dispatched, and what the stages hold then.
Watch = Callable[[Instruction, Stash], None]

LOST = "; state may be used up in part: go on from a saved one"


@dataclass(eq=False)
class Run:
    """One step under way.

    Attributes:
        whole: per stage, whole values that its passes read.
        given: per stage and kind of pass, the whole values and the blocks of the batch that it reads.
        sums: per stage and kind of pass.
        parts: per stage and kind, what each microbatch gave for totals that are stacked.
        stash: per stage and microbatch, values that later passes read.
        sent: values on their way to a stage on another rank.
        made: results of updates.
    """

    step: PipelineStep
    leaves: list[Any]
    whole: list[dict[int, Any]] = field(default_factory=list)
    given: dict[tuple[int, Kind], tuple[tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=dict)
    sums: dict[tuple[int, Kind], Any] = field(default_factory=dict)
    parts: dict[tuple[int, Kind], dict[int, Any]] = field(default_factory=dict)
    stash: dict[tuple[int, int], dict[int, Any]] = field(default_factory=dict)
    sent: dict[tuple[Transfer, int], list[Any]] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)

    def results(self) -> list[Any]:
        """Run everything."""
        step, watch = self.step, self.step.watch
        for stage, found in enumerate(step.stages.stages):
            with self._guard(stage, "its prologue", found.prologue):
                self.begin(stage)
        for i in step.script.order:
            try:
                _ACTIONS[i.op](self, i)
            except Exception as error:
                ops = step.stages.stages[i.stage].passes[i.kind].ops if i.op == "run" else ()
                raise failure(i.stage, str(i), error, step.stages.split.graph, ops) from error
            if watch is not None:
                watch(i, self.stash)
        self._updates()
        return self._collected()

    def _updates(self) -> None:
        """All updates, in an order in which each finds what it reads."""
        step, watch, last = self.step, self.step.watch, self.step.stages.split.count - 1
        lost = LOST if any(step.compiled.taken) else ""
        for update, ops in zip(step.script.updates, step.stages.updates.programs, strict=True):
            i = Instruction("update", "", update.stage, last)
            with self._guard(update.stage, str(i), ops.ops, lost):
                self.update(update)
            if watch is not None:
                watch(i, self.stash)

    def _collected(self) -> list[Any]:
        """The results of the step, from updates and arguments."""
        flat = self.step.stages.split.flat
        arguments = dict(zip(self.step.stages.split.graph.inputs, self.leaves, strict=True))
        known = {**arguments, **dict(flat.constants), **self.made}
        found = [known[a] if isinstance(a, int) else jnp.asarray(a.value) for a in flat.outputs]
        for position, where in self.step.returns.items():
            found[position] = jax.device_put(found[position], where)
        return found

    @contextmanager
    def _guard(self, stage: int, what: str, ops: Sequence[PlacedOp], lost: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:
            found = failure(stage, what, error, self.step.stages.split.graph, ops)
            raise (StageError(f"{found}{lost}") if lost else found) from error

    def argument(self, stage: int, source: Source) -> Any:
        """An argument on the submesh of a stage; copied once per step if it is not there."""
        value, position, wanted = source
        found = self.whole[stage].get(value)
        if found is None:
            array = self.leaves[position]
            lies = getattr(array, "sharding", None) == wanted
            found = self.whole[stage][value] = array if lies else jax.device_put(array, wanted)
        return found

    def begin(self, stage: int) -> None:
        begin = self.step.script.begins[stage]
        self.whole.append({})
        reads = {source[0]: self.argument(stage, source) for source in begin.arguments}
        made, cut, sums = begin.function(*(reads[v] for v in begin.reads))
        if self.step.blocking:
            jax.block_until_ready((made, cut, sums))
        whole = {**reads, **dict(zip(begin.whole, made, strict=True))}
        blocks = dict(zip(begin.blocks, cut, strict=True))
        for kind, total in sums.items():
            one = self.step.script.passes[stage, kind]
            self.sums[stage, kind], self.parts[stage, kind] = total, {}
            self.given[stage, kind] = tuple(whole[v] for v in one.whole), tuple(blocks[v] for v in one.blocks)

    # Instructions

    def run(self, i: Instruction) -> None:
        """A pass of one microbatch."""
        place: tuple[int, Kind] = (i.stage, i.kind)
        key = (i.stage, i.microbatch)
        one = self.step.script.passes[place]
        values = self.stash.setdefault(key, {})
        if one.function is not None:
            reads = tuple([values[v] for v in one.reads])
            index = self.step.indices[i.stage][i.microbatch]
            sums, parts, written = one.function(self.sums[place], index, *self.given[place], reads)
            self.sums[place], self.parts[place][i.microbatch] = sums, parts
            values.update(zip(one.writes, written, strict=True))
            if self.step.blocking:
                jax.block_until_ready((sums, parts, written))
        for transfer, same, handed in one.transfers:
            arrays = [values[v] for v in handed]
            if same:
                self._hand_over(transfer.target, i.microbatch, handed, arrays)
            else:
                self.sent[transfer, i.microbatch] = arrays
        for v in one.dropped:
            values.pop(v, None)
        if not values:
            del self.stash[key]

    def _hand_over(self, stage: int, microbatch: int, values: Sequence[int], arrays: Sequence[Any]) -> None:
        self.stash.setdefault((stage, microbatch), {}).update(zip(values, arrays, strict=True))

    def send(self, i: Instruction) -> None:
        """Copy to the submesh of the stage that reads."""
        transfer = Transfer(i.kind, i.stage, i.to)
        found = self.step.script.sends[transfer]
        arrays = jax.device_put(self.sent.pop((transfer, i.microbatch)), found.places)
        if self.step.blocking:
            jax.block_until_ready(arrays)
        self._hand_over(i.to, i.microbatch, found.values, arrays)

    def free(self, i: Instruction) -> None:
        """Nothing is left but what a pass of gradients of weights still reads."""
        values = self.stash.get((i.stage, i.microbatch))
        kept = self.step.script.passes[i.stage, "W"].reads if i.kind == "F" else ()
        if values is not None and not any(v in values for v in kept):
            del self.stash[i.stage, i.microbatch]

    # Updates

    def update(self, update: Updating) -> None:
        """One program of the updates."""
        made = update.function(
            tuple([self._own(update.stage, source) for source in update.taken]),
            tuple([self.argument(update.stage, source) for source in update.arguments]),
            tuple([_at(self._total(place, position), where) for place, position, where in update.totals]),
            tuple([_at(self.made[v], where) for v, where in update.reads]),
        )
        if self.step.blocking:
            jax.block_until_ready(made)
        self.made.update(zip(update.writes, made, strict=True))

    def _own(self, stage: int, source: Source) -> Any:
        """An argument to be taken over: the caller's array if it is in its place, and no other argument as well.

        A copy to another place may share memory with an array that the caller keeps, and so is copied again.
        """
        array = self.argument(stage, source)
        alone = array is self.leaves[source[1]] and self.times[id(array)] == 1
        return array if alone else array.copy()

    @cached_property
    def times(self) -> Mapping[int, int]:
        """How many arguments an array is, by its id."""
        return Counter(map(id, self.leaves))

    def _total(self, place: tuple[int, Kind], position: int) -> Any:
        """A sum, or the parts of a total that is stacked."""
        found = self.sums[place][position]
        if found is not None:
            return found
        parts = self.parts[place]
        return tuple(parts[i][position] for i in range(self.step.stages.split.count))


def _at(array: Any, where: Any) -> Any:
    """An array, or the parts of a total, in their place; None: they are there."""
    return array if where is None else jax.device_put(array, where)


_ACTIONS: Mapping[str, Callable[[Run, Instruction], None]] = {"run": Run.run, "send": Run.send, "free": Run.free}
"""What this process does for an instruction; the others come with these."""
