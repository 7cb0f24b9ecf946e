"""Stages that are one program: equal but for the numbers of their values and the names of their arguments.

    likeness      all that a stage's graph is made from, its values numbered in the order in which they are met: stages
                  whose likenesses have equal keys have equal graphs
    renamed       the graph of one as that of the other: value i of the one for value i of the other

Most stages of a deep model are alike, and making a graph means tracing: 0.1 s for a few layers, against 0.01 s. Names
of operations (name stacks) are those of the first stage: renamed graphs are for planning, not for programs that run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.graph import Atom
from autopar.passes.microbatch.loop import Programs
from autopar.passes.microbatch.programs import Placed
from autopar.passes.microbatch.rule_types import Outcome
from autopar.passes.stages.divide import KINDS, Stages
from autopar.passes.stages.graph import Input, StageGraph, Tracer, carried_by, results_of, update_name


@dataclass(frozen=True, eq=False)
class Likeness:
    """What the graph of a stage is made from.

    Attributes:
        stage: its number.
        key: the same for stages that are alike.
        values: of the step, in the order in which they are met.
        updates: numbers of the stage's updates.
        inputs: what comes in.
    """

    stage: int
    key: Hashable
    values: tuple[int, ...]
    updates: tuple[int, ...]
    inputs: tuple[Input, ...]


def likeness(stages: Stages, stage: int, avals: Sequence[Any], programs: Programs) -> Likeness:
    """What the graph of a stage is made from; arguments as for `autopar.passes.stages.graph.stage_graph`."""
    tracer = Tracer.of(stages, stage, dict(zip(stages.split.graph.inputs, avals, strict=True)), programs)
    inputs = tuple(tracer.inputs())
    described = _Described(stages, frozenset(v for v, _ in stages.split.flat.constants))
    key = tuple(described.all(tracer, inputs))
    return Likeness(stage, key, tuple(described.numbers), tuple(tracer.updates), inputs)


def renamed(graph: StageGraph, of: Likeness, to: Likeness) -> StageGraph:
    """The graph of a stage as that of one that is like it.

    Args:
        graph: made.
        of: the likeness of its stage.
        to: that of the other, with an equal key.
    """
    value = dict(zip(of.values, to.values, strict=True))
    program = dict(zip(map(update_name, of.updates), map(update_name, to.updates), strict=True))

    def over(found: Mapping[int, Any]) -> dict[int, Any]:
        return {value[v]: one for v, one in found.items()}

    return replace(
        graph,
        stage=to.stage,
        graph=replace(graph.graph, input_paths=tuple(path for _, _, path in to.inputs)),
        programs={program.get(name, name): ops for name, ops in graph.programs.items()},
        arguments=over(graph.arguments),
        blocks=over(graph.blocks),
        received=over(graph.received),
        whole=over(graph.whole),
        local=over(graph.local),
        totals=over(graph.totals),
        marked={value[v]: program.get(name, name) for v, name in graph.marked.items()},
        made=over(graph.made),
        results=tuple((kind, value[v]) for kind, v in graph.results),
        handed={i: value[v] for i, v in graph.handed.items()},
        avals=tuple(aval for _, aval, _ in to.inputs),
    )


@dataclass(frozen=True, eq=False)
class _Described:
    """Describes one stage; `numbers`: value of the step -> its number in the description."""

    stages: Stages
    constants: frozenset[int]
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    remat: dict[int, int] = field(default_factory=dict[int, int])

    def all(self, tracer: Tracer, inputs: Sequence[Input]) -> Iterator[Hashable]:
        """Everything, in the order in which a graph is made from it."""
        split, found = self.stages.split, self.stages.stages[tracer.stage]
        yield split.count
        for (kind, v), aval, _ in inputs:
            yield kind, v if kind == "index" else self.value(v), aval.shape, str(aval.dtype), _is_weak(aval)
        yield from map(self.operation, found.prologue)
        yield self.several(sorted({v for one in found.passes.values() for v in one.whole}))
        for kind in KINDS:
            one = found.passes[kind]
            yield kind, tuple(map(self.operation, one.ops)), *map(self.several, (one.whole, one.blocks, one.reads))
            yield self.several(one.writes), tuple((self.value(t.value), t.how) for t in one.totals)
        for update in tracer.updates.values():
            yield tuple(map(self.operation, update.ops)), tuple((self.value(t.value), t.how) for t in update.totals)
            yield tuple(map(self.several, (update.arguments, update.reads, update.writes)))
        results = list(results_of(tracer))
        yield tuple((kind, self.value(v)) for kind, v in results)
        yield tuple(carried_by(tracer, results, [key for key, _, _ in inputs]).items())
        yield tuple(split.graph.types[v] for v in self.numbers)
        yield tuple((split.batch.get(v), split.states.get(v)) for v in self.numbers)

    def value(self, v: int) -> Hashable:
        """Constants of the step are what they are."""
        number = self.numbers.setdefault(v, len(self.numbers))
        return ("constant", v) if v in self.constants else number

    def several(self, values: Sequence[int]) -> tuple[Hashable, ...]:
        return tuple(map(self.value, values))

    def atom(self, atom: Atom) -> Hashable:
        return self.value(atom) if isinstance(atom, int) else (str(atom), atom.type)

    def operation(self, placed: Placed) -> Hashable:
        op = placed.op
        around = self.stages.split.flat.remat.get(op.index, ())
        return (
            (op.signature, op.phase, op.source, op.trips),
            tuple(map(self.atom, op.inputs)),
            self.several(op.outputs),
            tuple((self.remat.setdefault(one.index, len(self.remat)), one.signature) for one in around),
            (tuple(sorted(placed.outer)), tuple(sorted(placed.own))),
            _outcome(placed.outcome),
        )


def _is_weak(aval: Any) -> bool:
    return bool(getattr(aval, "weak_type", False))


def _outcome(found: Outcome | None) -> Hashable:
    """How an operation runs on a block. Bodies of loops and known columns are like themselves alone."""
    if found is None:
        return None
    own = id(found) if found.body is not None or found.columns else 0
    return found.results, str(sorted(found.cuts.items())), str(sorted(found.params.items())), found.block, own
