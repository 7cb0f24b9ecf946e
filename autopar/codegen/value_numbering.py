"""Numbers for the arrays that the programs of planned stages pass to each other.

A key (`autopar.codegen.stages.programs`) gets the number that the step in stages has for its value. Copies, and values
that only planned programs exchange, get unused numbers                                            -> number_values
The passes and updates of the step in stages then list these numbers as what they read and write   -> renumber
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.codegen.stages.programs import Key, ProgramInterfaces, StageEmitter
from autopar.passes.stages.divide import PASS_KINDS, Pass, Stage, Stages
from autopar.passes.stages.graph import BEGIN, update_name
from autopar.passes.stages.updates import Update
from autopar.schedules.instructions import Kind


def key_of(atom: Any) -> Key | None:
    """The key of a value in its planned layout; None for constants."""
    return (atom, None) if isinstance(atom, int) else None


@dataclass(frozen=True, slots=True, eq=False)
class ValueNumbers:
    """Number -> key of the arrays that the programs of a stage pass to each other.

    Attributes:
        whole: arguments, and values that `begin` makes for passes.
        local: values of one microbatch that passes read from other passes, of this stage or another.
        updates: values that updates read from other updates, of this stage or another.
    """

    whole: Mapping[int, Key]
    local: Mapping[int, Key]
    updates: Mapping[int, Key]


def number_values(emitter: StageEmitter, interfaces: ProgramInterfaces, fresh: Iterator[int]) -> ValueNumbers:
    """Numbers for one stage.

    Args:
        emitter: the stage.
        interfaces: what its programs read and write.
        fresh: unused numbers.
    """
    graph = emitter.plan.graph
    blocks = {(v, None) for v in graph.blocks.values()} | {(graph.index, None)}
    whole = _Numbering({**graph.whole, **graph.arguments}, fresh)
    sent = {*graph.sent.values()}  # the array sent to another stage may have another layout than the one that stays
    # what is received comes first: a value of this stage may be the same array, such as its conversion to its own type
    local = _Numbering({**graph.received, **{v: a for v, a in graph.local.items() if v not in sent}}, fresh)
    updates = _Numbering(graph.made, fresh)
    for kind in PASS_KINDS:
        for key in interfaces.reads[kind]:
            if key not in blocks:
                (whole if key[0] in emitter.loop_invariant else local).of(key)
    totals = {(graph.accumulated(v), None) for v in graph.totals}
    for name in interfaces.reads:
        if name not in (BEGIN, *PASS_KINDS):
            for key in interfaces.reads[name]:
                if key not in totals and key[0] not in graph.arguments.values():
                    updates.of(key)
    return ValueNumbers(whole.keys, local.keys, updates.keys)


@dataclass(eq=False)
class _Numbering:
    """Assigns numbers to keys: the number that the step in stages has for a value, otherwise an unused one.

    Attributes:
        existing: number in the step in stages -> atom of the stage's graph.
        fresh: unused numbers.
        keys: number -> key, of the keys so far.
        numbers: the inverse.
    """

    existing: Mapping[int, Any]
    fresh: Iterator[int]
    keys: dict[int, Key] = field(default_factory=dict)
    numbers: dict[Key, int] = field(default_factory=dict)

    @cached_property
    def existing_number(self) -> Mapping[Key, int]:
        """Key -> the first number that the step has for it."""
        return {key: n for n, v in reversed([*self.existing.items()]) if (key := key_of(v)) is not None}

    def of(self, key: Key) -> int:
        """The number of a key."""
        if key not in self.numbers:
            self.numbers[key] = self.existing_number[key] if key in self.existing_number else next(self.fresh)
            self.keys[self.numbers[key]] = key
        return self.numbers[key]


# Lists


def renumber(
    stages: Stages,
    emitters: Sequence[StageEmitter],
    interfaces: Sequence[ProgramInterfaces],
    keys: Sequence[ValueNumbers],
) -> Stages:
    """The step in stages, with the numbers that its planned programs read and write.

    Args:
        stages: the step.
        emitters, interfaces, keys: per stage.
    """
    lists = _Lists(stages, emitters, interfaces, keys)
    updates = tuple(lists.update(number) for number in range(len(stages.updates.programs)))
    renumbered = tuple(lists.stage(stage) for stage in range(len(emitters)))
    return replace(stages, stages=renumbered, updates=replace(stages.updates, programs=updates))


@dataclass(frozen=True, eq=False)
class _Lists:
    """Stages, passes and updates with the numbers that their planned programs read and write."""

    stages: Stages
    emitters: Sequence[StageEmitter]
    interfaces: Sequence[ProgramInterfaces]
    keys: Sequence[ValueNumbers]

    def stage(self, stage: int) -> Stage:
        unplanned, graph, interfaces = (
            self.stages.stages[stage],
            self.emitters[stage].plan.graph,
            self.interfaces[stage],
        )
        read = {key for name in (BEGIN, *PASS_KINDS) for key in interfaces.reads[name]}
        arguments = tuple(v for v in self.stages.split.graph.inputs if key_of(graph.arguments.get(v)) in read)
        passes = {kind: self._pass(stage, kind, pass_) for kind, pass_ in unplanned.passes.items()}
        return replace(unplanned, arguments=arguments, passes=passes)

    def _pass(self, stage: int, kind: Kind, pass_: Pass) -> Pass:
        graph, interfaces, keys = self.emitters[stage].plan.graph, self.interfaces[stage], self.keys[stage]
        reads, writes = {*interfaces.reads[kind]}, {*interfaces.writes[kind]}
        sent = [v for v in pass_.writes if v in graph.sent.values()]
        forwarded = [v for v in pass_.reads if v in graph.sent.values()]  # made by an earlier pass, sent by this one
        return replace(
            pass_,
            whole=tuple(n for n, key in keys.whole.items() if key in reads),
            blocks=tuple(v for v, at in graph.blocks.items() if (at, None) in reads),
            reads=(*(n for n, key in keys.local.items() if key in reads), *forwarded),
            writes=tuple(dict.fromkeys([*sent, *(n for n, key in keys.local.items() if key in writes)])),
        )

    def update(self, number: int) -> Update:
        update = self.stages.updates.programs[number]
        graph, interfaces, keys = (
            self.emitters[update.stage].plan.graph,
            self.interfaces[update.stage],
            self.keys[update.stage],
        )
        reads, writes = {*interfaces.reads[update_name(number)]}, {*interfaces.writes[update_name(number)]}
        out = {v for kind, v in graph.results if kind == "made"}
        atoms = {t.value: graph.accumulated(t.value) for t in update.totals}
        return replace(
            update,
            arguments=tuple(v for v, at in graph.arguments.items() if (at, None) in reads),
            totals=tuple(t for t in update.totals if (atoms[t.value], None) in reads),
            reads=tuple(n for n, key in keys.updates.items() if key in reads),
            writes=tuple(
                dict.fromkeys(
                    [*(v for v in update.writes if v in out), *(n for n, key in keys.updates.items() if key in writes)]
                )
            ),
        )
