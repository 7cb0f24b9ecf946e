"""Numbers for what the programs of planned stages leave to each other, and the lists that programs are called by.

A key (`autopar.codegen.stage_programs`) has the number that the step in stages has for its value, if it has one;
copies, and values that only the cut between programs brings to light, get new ones                     -> numbered
The passes and updates of the step in stages then list these numbers                                    -> relisted
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.codegen.stage_programs import Cuts, Emitter, Key
from autopar.passes.stages.divide import PASS_KINDS, Pass, Stage, Stages
from autopar.passes.stages.graph import BEGIN, update_name
from autopar.passes.stages.updates import Update
from autopar.schedules.instructions import Kind


def key_of(atom: Any) -> Key | None:
    """The key of a value where it lives; None for constants."""
    return (atom, None) if isinstance(atom, int) else None


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Numbers of what the programs of a stage leave to each other.

    Attributes:
        whole: of arguments, and of what `begin` makes for passes.
        local: of what passes read of each other and of other stages.
        made: of what updates read of each other and of other stages.
    """

    whole: Mapping[int, Key]
    local: Mapping[int, Key]
    made: Mapping[int, Key]


def numbered(emitter: Emitter, cuts: Cuts, fresh: Iterator[int]) -> Keys:
    """Numbers for one stage; `fresh` gives new ones."""
    graph = emitter.plan.graph
    blocks = {(v, None) for v in graph.blocks.values()} | {(graph.index, None)}
    whole = _Numbering({**graph.whole, **graph.arguments}, fresh)
    handed = {*graph.sent.values()}  # what goes to other stages may lie otherwise than what stays
    local = _Numbering({**{v: a for v, a in graph.local.items() if v not in handed}, **graph.received}, fresh)
    made = _Numbering(graph.made, fresh)
    for kind in PASS_KINDS:
        for key in cuts.reads[kind]:
            if key not in blocks:
                (whole if key[0] in emitter.once else local).of(key)
    given = {(graph.local[v] if v in graph.summed_in else a, None) for v, a in graph.totals.items()}
    for name in cuts.reads:
        if name not in (BEGIN, *PASS_KINDS):
            for key in cuts.reads[name]:
                if key not in given and key[0] not in graph.arguments.values():
                    made.of(key)
    return Keys(whole.found, local.found, made.found)


@dataclass(eq=False)
class _Numbering:
    """Gives numbers to keys: the one that the step has for a value, else a new one."""

    known: Mapping[int, Any]
    fresh: Iterator[int]
    found: dict[int, Key] = field(default_factory=dict)
    numbers: dict[Key, int] = field(default_factory=dict)

    @cached_property
    def same(self) -> Mapping[Key, int]:
        """Key -> the first number that the step has for it."""
        return {key: n for n, v in reversed([*self.known.items()]) if (key := key_of(v)) is not None}

    def of(self, key: Key) -> int:
        if key not in self.numbers:
            self.numbers[key] = self.same[key] if key in self.same else next(self.fresh)
            self.found[self.numbers[key]] = key
        return self.numbers[key]


# Lists


def relisted(stages: Stages, emitters: Sequence[Emitter], cuts: Sequence[Cuts], keys: Sequence[Keys]) -> Stages:
    """The step in stages with the lists of numbers that its planned programs have."""
    lists = _Lists(stages, emitters, cuts, keys)
    updates = tuple(lists.update(number) for number in range(len(stages.updates.programs)))
    found = tuple(lists.stage(stage) for stage in range(len(emitters)))
    return replace(stages, stages=found, updates=replace(stages.updates, programs=updates))


@dataclass(frozen=True, eq=False)
class _Lists:
    """Lists of values of the programs, by number."""

    stages: Stages
    emitters: Sequence[Emitter]
    cuts: Sequence[Cuts]
    keys: Sequence[Keys]

    def stage(self, stage: int) -> Stage:
        found, graph, cuts = self.stages.stages[stage], self.emitters[stage].plan.graph, self.cuts[stage]
        read = {key for name in (BEGIN, *PASS_KINDS) for key in cuts.reads[name]}
        arguments = tuple(v for v in self.stages.split.graph.inputs if key_of(graph.arguments.get(v)) in read)
        passes = {kind: self._pass(stage, kind, one) for kind, one in found.passes.items()}
        return replace(found, arguments=arguments, passes=passes)

    def _pass(self, stage: int, kind: Kind, one: Pass) -> Pass:
        graph, cuts, keys = self.emitters[stage].plan.graph, self.cuts[stage], self.keys[stage]
        reads, gives = {*cuts.reads[kind]}, {*cuts.gives[kind]}
        handed = [v for v in one.writes if v in graph.sent.values()]
        waiting = [v for v in one.reads if v in graph.sent.values()]  # made by an earlier pass, handed over by this
        return replace(
            one,
            whole=tuple(n for n, key in keys.whole.items() if key in reads),
            blocks=tuple(v for v, at in graph.blocks.items() if (at, None) in reads),
            reads=(*(n for n, key in keys.local.items() if key in reads), *waiting),
            writes=tuple(dict.fromkeys([*handed, *(n for n, key in keys.local.items() if key in gives)])),
        )

    def update(self, number: int) -> Update:
        update = self.stages.updates.programs[number]
        graph, cuts, keys = self.emitters[update.stage].plan.graph, self.cuts[update.stage], self.keys[update.stage]
        reads, gives = {*cuts.reads[update_name(number)]}, {*cuts.gives[update_name(number)]}
        out = {v for kind, v in graph.results if kind == "made"}
        atoms = {
            v: graph.local[v] if v in graph.summed_in else graph.totals[v] for v in (t.value for t in update.totals)
        }
        return replace(
            update,
            arguments=tuple(v for v, at in graph.arguments.items() if (at, None) in reads),
            totals=tuple(t for t in update.totals if (atoms[t.value], None) in reads),
            reads=tuple(n for n, key in keys.made.items() if key in reads),
            writes=tuple(
                dict.fromkeys(
                    [*(v for v in update.writes if v in out), *(n for n, key in keys.made.items() if key in gives)]
                )
            ),
        )
