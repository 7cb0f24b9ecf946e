"""A pipeline stage as one flat graph, so that whatever plans a program plans a stage.

One function runs, in this order, what the stage runs in a step, and is traced:

    begin      the prologue                              once       -> Tracer.begin
    F, B, W    its passes, on the shapes of a microbatch  m times    -> Tracer.run
    update0..  its updates                               once       -> Tracer.update

Arguments are the state, the blocks of the batch, what other stages hand over, and totals and values of other stages'
updates; results are what others read, and the results of the step. There is no operation that adds up: the part that a
microbatch gives a sum is what the update reads, through a `sharding_constraint` that leaves everything open. It is
where the sum over devices ends if the pass leaves its parts partial, and it counts once -> Tracer.ended

`Graph.repeats` says what counts m times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.ir.graph import Atom, Graph, Op, Repeats
from autopar.ir.jaxpr import build_programs
from autopar.ir.train_state import match_state
from autopar.passes.microbatch.loop import Programs
from autopar.passes.microbatch.programs import Sweep, Total
from autopar.passes.microbatch.states import local_shape
from autopar.passes.stages.divide import KINDS, Stages
from autopar.passes.stages.updates import Update

BEGIN = "begin"


def update_name(number: int) -> str:
    """The program of an update, by its number in `Stages.updates.programs`."""
    return f"update{number}"


Key = tuple[str, int]
"""(map of StageGraph, value of the step)."""


@dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage as a graph, and where the values of the step in stages are in it.

    Attributes:
        stage: its number.
        graph: the program; `repeats` and `carried` are set.
        programs: "begin", "F", "B", "W", "update<number>" -> indices of its operations, in the order in which they run.
        index: the number of the microbatch, an argument.
        arguments: argument of the step -> argument of the graph.
        blocks: argument that holds the batch -> argument of the graph, one microbatch of it.
        received: value that another stage hands over -> argument of the graph.
        whole: value that the prologue makes -> its value.
        local: value that a pass makes -> its value.
        totals: total -> what the updates read: an argument of the graph if it is put together elsewhere (stacked parts,
            sums of other stages).
        marked: total -> the name of the program that ends its sum.
        made: value of an update -> its value; an argument of the graph if another stage's update makes it.
        results: per result of the graph, ("local", value handed over, or part or total for others) or ("made", value of
            an update).
        handed: position of a result -> the value handed over.
        avals: shape and dtype of every argument of the graph.
    """

    stage: int
    graph: Graph
    programs: Mapping[str, range]
    index: int
    arguments: Mapping[int, int]
    blocks: Mapping[int, int]
    received: Mapping[int, int]
    whole: Mapping[int, Atom]
    local: Mapping[int, Atom]
    totals: Mapping[int, Atom]
    marked: Mapping[int, str]
    made: Mapping[int, Atom]
    results: tuple[Key, ...]
    handed: Mapping[int, int]
    avals: tuple[Any, ...]

    def program_of(self, op: int) -> str:
        """The program of an operation, by index."""
        return next(name for name, ops in self.programs.items() if op in ops)

    @cached_property
    def maker(self) -> Mapping[int, str]:
        """Value -> the program that makes it; arguments, constants and values inside bodies are not in it."""
        return {v: self.program_of(op.index) for op in self.graph.ops for v in op.outputs}


def stage_graph(stages: Stages, stage: int, avals: Sequence[Any], programs: Programs | None = None) -> StageGraph:
    """The graph of one stage.

    Args:
        stages: the step in stages.
        stage: which.
        avals: shape and dtype of every argument of the step.
        programs: those of `stages.split`, where there are several stages to make graphs of.
    """
    of_step = programs or Programs(stages.split)
    tracer = Tracer.of(stages, stage, dict(zip(stages.split.graph.inputs, avals, strict=True)), of_step)
    names = list(tracer.inputs())
    found: list[Key] = []

    def run(*arrays: Any) -> list[Any]:
        values = tracer.run_all(dict(zip((key for key, _, _ in names), arrays, strict=True)))
        found.extend(values)
        return list(values.values())

    jaxpr = jax_compat.eliminate_dead_code(jax.make_jaxpr(run)(*(aval for _, aval, _ in names)))
    graph, ranges = build_programs(jaxpr, [path for _, _, path in names], [f"{k[0]} %{k[1]}" for k in found])
    return _assembled(tracer, names, found, graph, ranges)


Input = tuple[Key, Any, str]
"""Its key, type and path."""


@dataclass(frozen=True, eq=False)
class Tracer:
    """Runs the programs of a stage on arrays by key.

    Attributes:
        updates: number -> update, of this stage.
        sources: total -> the stage that makes it.
        stacked: totals whose parts are kept one by one.
    """

    stages: Stages
    stage: int
    types: Mapping[int, Any]
    programs: Programs
    updates: Mapping[int, Update]
    sources: Mapping[int, int]
    stacked: frozenset[int]
    marked: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(stages: Stages, stage: int, types: Mapping[int, Any], programs: Programs) -> Tracer:
        totals = {t.value: (s, t) for s, one in enumerate(stages.stages) for p in one.passes.values() for t in p.totals}
        stacked = frozenset(v for v, (_, t) in totals.items() if programs.accumulator(t).stacks)
        updates = {i: u for i, u in enumerate(stages.updates.programs) if u.stage == stage}
        return Tracer(stages, stage, types, programs, updates, {v: s for v, (s, _) in totals.items()}, stacked)

    # What comes in

    def inputs(self) -> Iterator[Input]:
        """Arguments of the graph."""
        names, passes = self.stages.split.graph.names, self.stages.stages[self.stage].passes
        read = {*self.stages.stages[self.stage].arguments, *(v for u in self.updates.values() for v in u.arguments)}
        for v in self.stages.split.graph.inputs:
            if v in read:
                yield ("arguments", v), self.types[v], names[v]
        yield ("index", 0), jax.ShapeDtypeStruct((), np.int32), "microbatch"
        for v in sorted({v for one in passes.values() for v in one.blocks}):
            yield ("blocks", v), self.local_type(v), f"block {names[v]}"
        given = {v for hand, values in self.stages.hands.items() if hand.target == self.stage for v in values}
        for v in sorted(given):
            yield ("received", v), self.local_type(v), "received"
        for v in sorted({t.value for u in self.updates.values() for t in u.totals}):
            if self.is_put_together(v):
                yield ("totals", v), self.whole_type(v), "total"
        own = {v for u in self.updates.values() for v in u.writes}
        for v in sorted({v for u in self.updates.values() for v in u.reads} - own):
            yield ("made", v), self.whole_type(v), "made"

    def is_put_together(self, total: int) -> bool:
        """The stage's updates do not read the part that its own pass makes."""
        return total in self.stacked or self.sources[total] != self.stage

    def whole_type(self, value: int) -> Any:
        aval = self.types.get(value) if value in self.types else self.programs.avals[value]
        assert aval is not None
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def local_type(self, value: int) -> Any:
        split, whole = self.stages.split, self.whole_type(value)
        state = split.batch.get(value, split.states.get(value))
        shape = whole.shape if state is None else local_shape(whole.shape, state, split.count)
        return jax.ShapeDtypeStruct(shape, whole.dtype)

    # What runs

    def run_all(self, arrays: Mapping[Key, Any]) -> dict[Key, Any]:
        """Everything in order; what the programs leave to each other and to others, by key."""
        known = dict(arrays)
        made: dict[Key, Any] = {}
        for name, program in self.all_programs():
            program.__name__ = name
            results = jax.jit(program)(known)
            known.update(results)
            made.update(results)
        return made

    def all_programs(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        yield BEGIN, lambda known: self.begin(known)
        for kind in KINDS:
            yield kind, lambda known, kind=kind: self.run(kind, known)
        for number, update in self.updates.items():
            name = update_name(number)
            yield name, lambda known, name=name, u=update: self.update(name, u, known)

    def begin(self, known: Mapping[Key, Any]) -> dict[Key, Any]:
        found = self.stages.stages[self.stage]
        wanted = {v for one in found.passes.values() for v in one.whole}
        whole = sorted(wanted & {v for p in found.prologue for v in p.op.outputs})
        outer = {**self.constants, **_of(known, "arguments")}
        made = self.programs.after(Sweep((), (), found.prologue if whole else ()), outer, ())
        return {("whole", v): made[v] for v in whole}

    def run(self, kind: Any, known: Mapping[Key, Any]) -> dict[Key, Any]:
        one = self.stages.stages[self.stage].passes[kind]
        given = {**self.constants, **_of(known, "arguments"), **_of(known, "whole")}
        local = {**_of(known, "received"), **_of(known, "local")}
        values = {**{v: known["blocks", v] for v in one.blocks}, **{v: local[v] for v in one.reads}}
        wanted = list(dict.fromkeys((*(t.value for t in one.totals), *one.writes)))
        outer = {v: given[v] for v in (*one.whole, *self.constants)}
        sweep = Sweep(one.ops, tuple(Total(v, "last") for v in wanted), ())
        made = self.programs.loop(sweep, outer, values, known["index", 0])
        return {("local", v): array for v, array in zip(wanted, made, strict=True)}

    def update(self, name: str, update: Update, known: Mapping[Key, Any]) -> dict[Key, Any]:
        arguments, made = _of(known, "arguments"), _of(known, "made")
        ended = self.ended(name, [t.value for t in update.totals], known)
        outer = {**self.constants, **{v: arguments[v] for v in update.arguments}, **{v: made[v] for v in update.reads}}
        after = self.programs.after(
            Sweep((), update.totals, update.ops), outer, [ended[t.value] for t in update.totals]
        )
        marked = {("totals", v): array for v, array in ended.items() if self.marked.get(v) == name}
        return {**marked, **{("made", v): after[v] for v in update.writes}}

    def ended(self, name: str, totals: Sequence[int], known: Mapping[Key, Any]) -> dict[int, Any]:
        """Totals as an update reads them; the first that reads a sum ends it."""
        found: dict[int, Any] = {}
        for v in totals:
            if ("totals", v) in known:
                found[v] = known["totals", v]
            else:
                self.marked[v] = name
                # what ends the sum reads its parts alone; those of narrow floats are in float32
                found[v] = _open(known["local", v]).astype(self.whole_type(v).dtype)
        return found

    @property
    def constants(self) -> dict[int, Any]:
        return dict(self.stages.split.flat.constants)


def _of(known: Mapping[Key, Any], kind: str) -> dict[int, Any]:
    return {v: array for (k, v), array in known.items() if k == kind}


def _open(array: Any) -> Any:
    """The array behind a constraint that leaves every dimension open."""
    if not jnp.ndim(array):
        return array
    mesh = jax_compat.auto_abstract_mesh((1,), ("all",))
    open_spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * jnp.ndim(array))
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, open_spec))


# Putting the graph together


def _assembled(
    tracer: Tracer, names: Sequence[Input], found: Sequence[Key], graph: Graph, programs: Mapping[str, range]
) -> StageGraph:
    """The graph with the results that leave the stage, and the maps."""
    stages, stage, count = tracer.stages, tracer.stage, tracer.stages.split.count
    entered: dict[Key, int] = {key: v for (key, _, _), v in zip(names, graph.inputs, strict=True)}
    atoms: dict[Key, Atom] = {**entered, **dict(zip(found, graph.outputs, strict=True))}
    results = list(results_of(tracer))
    state = carried_by(tracer, results, list(entered))
    handed = {i: v for i, (kind, v) in enumerate(results) if kind == "local" and v in _handed(stages, stage)}
    often = {
        i: count for i, (kind, v) in enumerate(results) if i in handed or (kind == "local" and v in tracer.stacked)
    }
    ops = {op.index: count for op in graph.ops for kind in KINDS if op.index in programs.get(kind, ())}
    inputs = {v: count for key, v in entered.items() if key[0] in ("index", "blocks", "received")}
    backward = any(op.phase == "backward" for op in graph.ops if op.index in ops)
    graph = replace(
        graph,
        ops=tuple(replace(op, phase="update") if backward and _is_update(programs, op) else op for op in graph.ops),
        outputs=tuple(atoms[key] for key in results),
        output_paths=tuple(f"{kind} {i}" for i, (kind, _) in enumerate(results)),
        repeats=Repeats(ops, inputs, often),
        carried=state,
    )
    order = [name for name, _ in tracer.all_programs()]
    maps = {kind: {v: atom for (k, v), atom in atoms.items() if k == kind} for kind in _MAPS}
    return StageGraph(
        stage=stage,
        graph=graph,
        programs={name: programs.get(name, range(0)) for name in order},
        index=entered["index", 0],
        marked=dict(tracer.marked),
        results=tuple(results),
        handed=handed,
        avals=tuple(aval for _, aval, _ in names),
        **maps,  # pyright: ignore[reportArgumentType]
    )


def _is_update(programs: Mapping[str, range], op: Op) -> bool:
    return not any(op.index in programs.get(name, ()) for name in (BEGIN, *KINDS))


_MAPS = ("arguments", "blocks", "received", "whole", "local", "totals", "made")


def _handed(stages: Stages, stage: int) -> list[int]:
    """What the passes of a stage hand over."""
    return sorted({v for hand, values in stages.hands.items() if hand.source == stage for v in values})


def results_of(tracer: Tracer) -> Iterator[Key]:
    """What leaves the stage: values handed over, parts that are stacked, totals and values for others, results."""
    stages, stage = tracer.stages, tracer.stage
    elsewhere = [u for u in stages.updates.programs if u.stage != stage]
    yield from (("local", v) for v in _handed(stages, stage))
    own = sorted(v for v, source in tracer.sources.items() if source == stage)
    foreign = {t.value for u in elsewhere for t in u.totals}
    yield from (("local", v) for v in own if v in tracer.stacked or v in foreign)
    wanted = {v for u in elsewhere for v in u.reads} | {v for v in stages.split.flat.outputs if isinstance(v, int)}
    yield from (("made", v) for u in tracer.updates.values() for v in u.writes if v in wanted)


def carried_by(tracer: Tracer, results: Sequence[Key], inputs: Sequence[Key]) -> Mapping[int, int]:
    """Results that carry an argument of this stage into the next step."""
    split = tracer.stages.split
    position = {key: i for i, key in enumerate(inputs)}
    place = {key: i for i, key in reversed(list(enumerate(results)))}
    found: dict[int, int] = {}
    for out, i in match_state(split.graph).items():
        made, argument = ("made", split.flat.outputs[out]), ("arguments", split.graph.inputs[i])
        if made in place and argument in position and position[argument] not in found.values():
            found.setdefault(place[made], position[argument])  # pyright: ignore[reportArgumentType]
    return found
