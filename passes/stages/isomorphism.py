"""Isomorphic stages: equal but for the numbers of their values and the names of their arguments.

    canonical_form   the programs of a stage, with values numbered in the order of their first use: stages with equal
                     keys have equal graphs
    renamed          the graph of one stage as that of another: value i of one for value i of the other

Most stages of a deep model are isomorphic, and tracing a graph takes 0.1 s for a few layers, against 0.01 s for a
canonical form. Names of operations (name stacks) are those of the first stage: renamed graphs are for planning, not for
programs that run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.graph import Atom
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.programs import PlacedOp
from autopar.passes.microbatch.rules.types import RuleResult
from autopar.passes.stages.divide import PASS_KINDS, Stages
from autopar.passes.stages.graph import GraphInput, StageGraph, Tracer, carried_by, results_of, update_name


@dataclass(frozen=True, eq=False)
class CanonicalForm:
    """The canonical form of a stage.

    Attributes:
        stage: its number.
        key: equal for isomorphic stages.
        values: of the step, in the order of their first use.
        updates: numbers of the stage's updates.
        inputs: arguments of the graph.
    """

    stage: int
    key: Hashable
    values: tuple[int, ...]
    updates: tuple[int, ...]
    inputs: tuple[GraphInput, ...]


def canonical_form(stages: Stages, stage: int, avals: Sequence[Any], programs: StepPrograms) -> CanonicalForm:
    """The canonical form of a stage; arguments as for `autopar.passes.stages.graph.stage_graph`."""
    tracer = Tracer.of(stages, stage, dict(zip(stages.split.graph.inputs, avals, strict=True)), programs)
    inputs = tuple(tracer.inputs())
    description = _Description(stages, frozenset(v for v, _ in stages.split.flat.constants))
    key = tuple(description.all(tracer, inputs))
    return CanonicalForm(stage, key, tuple(description.numbers), tuple(tracer.updates), inputs)


def renamed(graph: StageGraph, source: CanonicalForm, target: CanonicalForm) -> StageGraph:
    """The graph of a stage as that of an isomorphic one.

    Args:
        graph: the traced graph.
        source: the canonical form of its stage.
        target: that of the other stage, with an equal key.
    """
    new_value = dict(zip(source.values, target.values, strict=True))
    new_program = dict(zip(map(update_name, source.updates), map(update_name, target.updates), strict=True))

    def renumbered(map_: Mapping[int, Any]) -> dict[int, Any]:
        return {new_value[v]: atom for v, atom in map_.items()}

    return replace(
        graph,
        stage=target.stage,
        graph=replace(graph.graph, input_paths=tuple(path for _, _, path in target.inputs)),
        programs={new_program.get(name, name): ops for name, ops in graph.programs.items()},
        arguments=renumbered(graph.arguments),
        blocks=renumbered(graph.blocks),
        received=renumbered(graph.received),
        whole=renumbered(graph.whole),
        local=renumbered(graph.local),
        totals=renumbered(graph.totals),
        parts=renumbered(graph.parts),
        completed_in={new_value[v]: new_program.get(name, name) for v, name in graph.completed_in.items()},
        made=renumbered(graph.made),
        results=tuple((kind, new_value[v]) for kind, v in graph.results),
        sent={i: new_value[v] for i, v in graph.sent.items()},
        avals=tuple(aval for _, aval, _ in target.inputs),
    )


@dataclass(frozen=True, eq=False)
class _Description:
    """Describes one stage.

    Attributes:
        numbers: value of the step -> its number in the description.
        remat: index of a rematerialised region -> its number in the description.
    """

    stages: Stages
    constants: frozenset[int]
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    remat: dict[int, int] = field(default_factory=dict[int, int])

    def all(self, tracer: Tracer, inputs: Sequence[GraphInput]) -> Iterator[Hashable]:
        """All parts, in the order in which a graph is traced from them."""
        split, stage = self.stages.split, self.stages.stages[tracer.stage]
        yield split.count
        for (kind, v), aval, _ in inputs:
            yield kind, v if kind == "index" else self.value(v), aval.shape, str(aval.dtype), _is_weak(aval)
        yield from map(self.operation, stage.prologue)
        yield self.several(sorted({v for pass_ in stage.passes.values() for v in pass_.whole}))
        for kind in PASS_KINDS:
            pass_ = stage.passes[kind]
            yield (
                kind,
                tuple(map(self.operation, pass_.ops)),
                *map(self.several, (pass_.whole, pass_.blocks, pass_.reads)),
            )
            yield self.several(pass_.writes), tuple((self.value(t.value), t.combine) for t in pass_.totals)
        for update in tracer.updates.values():
            yield tuple(map(self.operation, update.ops)), tuple((self.value(t.value), t.combine) for t in update.totals)
            yield tuple(map(self.several, (update.arguments, update.reads, update.writes)))
        results = list(results_of(tracer))
        yield tuple((kind, self.value(v)) for kind, v in results)
        yield tuple(carried_by(tracer, results, [key for key, _, _ in inputs]).items())
        yield tuple(split.graph.types[v] for v in self.numbers)
        yield tuple((split.batch.get(v), split.states.get(v)) for v in self.numbers)

    def value(self, v: int) -> Hashable:
        """The number of a value; constants of the step keep their own."""
        number = self.numbers.setdefault(v, len(self.numbers))
        return ("constant", v) if v in self.constants else number

    def several(self, values: Sequence[int]) -> tuple[Hashable, ...]:
        return tuple(map(self.value, values))

    def atom(self, atom: Atom) -> Hashable:
        return self.value(atom) if isinstance(atom, int) else (str(atom), atom.type)

    def operation(self, placed: PlacedOp) -> Hashable:
        op = placed.op
        enclosing = self.stages.split.flat.remat.get(op.index, ())
        return (
            (op.signature, op.phase, op.source, op.trips),
            tuple(map(self.atom, op.inputs)),
            self.several(op.outputs),
            tuple((self.remat.setdefault(region.index, len(self.remat)), region.signature) for region in enclosing),
            (tuple(sorted(placed.outer)), tuple(sorted(placed.own_totals))),
            _block_rule(placed.rule_result),
        )


def _is_weak(aval: Any) -> bool:
    return bool(getattr(aval, "weak_type", False))


def _block_rule(result: RuleResult | None) -> Hashable:
    """How an operation runs on a block. Bodies of loops and constant indices are compared by identity."""
    if result is None:
        return None
    identity = id(result) if result.body is not None or result.local_indices else 0
    slices, params = str(sorted(result.slices.items())), str(sorted(result.params.items()))
    return result.results, slices, params, result.result_block, identity
