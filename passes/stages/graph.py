"""A pipeline stage as one flat graph, which every pass that plans a program can plan.

One function is traced that runs the programs of the stage in this order:

    begin      the prologue                              once       -> Tracer.begin
    F, B, W    its passes, on the shapes of a microbatch  m times    -> Tracer.run
    update0..  its updates                               once       -> Tracer.update

Arguments are the state, the blocks of the batch, values received from other stages, and totals and values of other
stages' updates. Results are values that other stages read, and results of the step. No operation accumulates:

    sums      an update reads a microbatch's part through a `sharding_constraint` that leaves all dimensions open. If
              the pass leaves its parts unreduced, they are reduced over devices there, which counts once
    blocks    the parts of all microbatches are an argument with a leading dimension, which the update joins. A pass
              returns its part in the layout of this argument (`Repeats.parts`)           -> Tracer.completed

`Graph.repeats` tells which operations and values count m times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.ir.graph import Atom, Graph, Op, Repeats
from autopar.ir.jaxpr import build_programs
from autopar.ir.jaxpr.simplify import simplified
from autopar.ir.train_state import match_state
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.programs import AccumulatedValue, AccumulationLoop
from autopar.passes.microbatch.states import local_shape
from autopar.passes.stages.divide import PASS_KINDS, Stages
from autopar.passes.stages.updates import Update

BEGIN = "begin"


def update_name(number: int) -> str:
    """Name of the program of an update, by its number in `Stages.updates.programs`."""
    return f"update{number}"


ValueKey = tuple[str, int]
"""(map of StageGraph, value of the step)."""


@dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage as a graph, and the values of the step in stages that correspond to its values.

    Attributes:
        stage: its number.
        graph: the program; `repeats` and `carried` are set.
        programs: "begin", "F", "B", "W", "update<number>" -> indices of its operations, in the order in which they run.
        index: the number of the microbatch, an argument.
        arguments: argument of the step -> argument of the graph.
        blocks: argument that holds the batch -> argument of the graph, one microbatch of it.
        received: value received from another stage -> argument of the graph.
        whole: value computed by the prologue -> its value.
        local: value computed by a pass -> its value.
        totals: total -> the value that updates read: an argument of the graph if it is a sum of another stage.
        parts: total whose parts are joined -> argument of the graph with the parts along a leading dimension.
        completed_in: total -> the name of the program that completes its sum or joins its parts.
        made: value of an update -> its value; an argument of the graph if another stage's update computes it.
        results: per result of the graph, ("local", value sent, or sum for others), ("part", a part of a total), or
            ("made", value of an update).
        sent: position of a result -> the value sent.
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
    parts: Mapping[int, int]
    completed_in: Mapping[int, str]
    made: Mapping[int, Atom]
    results: tuple[ValueKey, ...]
    sent: Mapping[int, int]
    avals: tuple[Any, ...]

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step."""
        repeats = self.graph.repeats
        assert repeats is not None
        return repeats.inputs[self.index]

    def accumulated(self, total: int) -> Atom:
        """The value with the layout of a total's accumulator: one part of a sum, or the argument with all parts."""
        if total in self.parts:
            return self.parts[total]
        return self.local[total] if total in self.accumulators else self.totals[total]

    @cached_property
    def accumulators(self) -> tuple[int, ...]:
        """Totals whose parts the passes of the stage make, each with an accumulator; any stage's updates read them."""
        read_elsewhere = (v for i, (kind, v) in enumerate(self.results) if kind == "local" and i not in self.sent)
        return tuple(dict.fromkeys((*(v for v in self.completed_in if v in self.local), *read_elsewhere)))

    @cached_property
    def part_results(self) -> Mapping[int, int]:
        """Total whose parts are joined -> position of the result that is one part, if a pass of the stage makes it."""
        return {v: i for i, (kind, v) in enumerate(self.results) if kind == "part"}

    def program_of(self, op: int) -> str:
        """The program of an operation, by index."""
        return self._program_of[op]

    @cached_property
    def _program_of(self) -> Mapping[int, str]:
        return {op: name for name, ops in self.programs.items() for op in ops}

    @cached_property
    def maker(self) -> Mapping[int, str]:
        """Value -> the program that computes it, without arguments, constants and values inside regions."""
        return {v: self.program_of(op.index) for op in self.graph.ops for v in op.outputs}

    @cached_property
    def exchanged(self) -> frozenset[int]:
        """Values that one program of the stage computes and another reads."""
        reads = ((self.program_of(op.index), a) for op in self.graph.ops for a in op.inputs if isinstance(a, int))
        return frozenset(a for program, a in reads if self.maker.get(a, program) != program)


class Recomputation(NamedTuple):
    """What the backward pass of a rematerialised stage repeats of its forward pass.

    Attributes:
        ops: indices of the operations from which values that backward passes read are computed, up to kept values.
        read: values that these operations or backward passes read.
    """

    ops: frozenset[int]
    read: frozenset[int]


def recomputation(stage: StageGraph, kept: frozenset[int] = frozenset()) -> Recomputation:
    """What rematerialisation repeats that keeps these values, besides those that other stages read."""
    graph = stage.graph
    maker = {v: op for op in graph.ops for v in op.outputs}
    available = kept.union(graph.outputs[i] for i in stage.sent)
    later = (graph.by_index[i] for name in PASS_KINDS[1:] for i in stage.programs.get(name, ()))
    stack = [a for op in later for a in op.inputs if isinstance(a, int)]
    ops, read = set[int](), set(stack)
    while stack:
        value = stack.pop()
        op = None if value in available else maker.get(value)
        if op is not None and op.index not in ops and stage.program_of(op.index) == PASS_KINDS[0]:
            ops.add(op.index)
            operands = [a for a in op.inputs if isinstance(a, int)]
            stack.extend(operands)
            read.update(operands)
    return Recomputation(frozenset(ops), frozenset(read))


def stage_graph(stages: Stages, stage: int, avals: Sequence[Any], programs: StepPrograms | None = None) -> StageGraph:
    """The graph of one stage.

    Args:
        stages: the step in stages.
        stage: its number.
        avals: shape and dtype of every argument of the step.
        programs: those of `stages.split`; shared where graphs of several stages are traced.
    """
    programs_of_step = programs or StepPrograms(stages.split)
    tracer = Tracer.of(stages, stage, dict(zip(stages.split.graph.inputs, avals, strict=True)), programs_of_step)
    inputs = list(tracer.inputs())
    result_keys: list[ValueKey] = []

    def run(*arrays: Any) -> list[Any]:
        results = tracer.run_all(dict(zip((key for key, _, _ in inputs), arrays, strict=True)))
        result_keys.extend(results)
        return list(results.values())

    jaxpr = simplified(jax.make_jaxpr(run)(*(aval for _, aval, _ in inputs)))
    graph, ranges = build_programs(jaxpr, [path for _, _, path in inputs], [f"{k[0]} %{k[1]}" for k in result_keys])
    return _assemble(tracer, inputs, result_keys, graph, ranges)


GraphInput = tuple[ValueKey, Any, str]
"""(key, type, path)."""


@dataclass(frozen=True, eq=False)
class Tracer:
    """Runs the programs of a stage on arrays by key.

    Attributes:
        updates: number -> update, of this stage.
        sources: total -> the stage that computes it.
        stacked: totals whose parts are not summed but joined.
        completed_in: as of `StageGraph`, from the programs that have run.
    """

    stages: Stages
    stage: int
    types: Mapping[int, Any]
    programs: StepPrograms
    updates: Mapping[int, Update]
    sources: Mapping[int, int]
    stacked: frozenset[int]
    completed_in: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(stages: Stages, stage: int, types: Mapping[int, Any], programs: StepPrograms) -> Tracer:
        source_of = {
            t.value: (s, t) for s, stage_ in enumerate(stages.stages) for p in stage_.passes.values() for t in p.totals
        }
        stacked = frozenset(v for v, (_, t) in source_of.items() if programs.accumulator(t).is_stacked)
        updates = {i: u for i, u in enumerate(stages.updates.programs) if u.stage == stage}
        return Tracer(stages, stage, types, programs, updates, {v: s for v, (s, _) in source_of.items()}, stacked)

    # Arguments

    def inputs(self) -> Iterator[GraphInput]:
        """Arguments of the graph."""
        names, passes = self.stages.split.graph.names, self.stages.stages[self.stage].passes
        read = {*self.stages.stages[self.stage].arguments, *(v for u in self.updates.values() for v in u.arguments)}
        for v in self.stages.split.graph.inputs:
            if v in read:
                yield ("arguments", v), self.types[v], names[v]
        yield ("index", 0), jax.ShapeDtypeStruct((), np.int32), "microbatch"
        for v in sorted({v for pass_ in passes.values() for v in pass_.blocks}):
            yield ("blocks", v), self.local_type(v), f"block {names[v]}"
        sent = {
            v for transfer, values in self.stages.transfers.items() if transfer.target == self.stage for v in values
        }
        for v in sorted(sent):
            yield ("received", v), self.local_type(v), "received"
        for v in sorted({t.value for u in self.updates.values() for t in u.totals}):
            if v in self.stacked:
                part = self.local_type(v)
                stack = jax.ShapeDtypeStruct((self.stages.split.count, *part.shape), part.dtype)
                yield ("parts", v), stack, "parts"
            elif self.sources[v] != self.stage:
                yield ("totals", v), self.whole_type(v), "total"
        own_writes = {v for u in self.updates.values() for v in u.writes}
        for v in sorted({v for u in self.updates.values() for v in u.reads} - own_writes):
            yield ("made", v), self.whole_type(v), "made"

    def whole_type(self, value: int) -> Any:
        aval = self.types.get(value) if value in self.types else self.programs.aval(value)
        assert aval is not None
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def local_type(self, value: int) -> Any:
        split, whole = self.stages.split, self.whole_type(value)
        state = split.batch.get(value, split.states.get(value))
        shape = whole.shape if state is None else local_shape(whole.shape, state, split.count)
        return jax.ShapeDtypeStruct(shape, whole.dtype)

    # Programs

    def run_all(self, arrays: Mapping[ValueKey, Any]) -> dict[ValueKey, Any]:
        """Runs all programs in order; returns their results by key."""
        environment = dict(arrays)
        produced: dict[ValueKey, Any] = {}
        for name, program in self.all_programs():
            program.__name__ = name
            results = jax.jit(program)(environment)
            environment.update(results)
            produced.update(results)
        return produced

    def all_programs(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        yield BEGIN, lambda environment: self.begin(environment)
        for kind in PASS_KINDS:
            yield kind, lambda environment, kind=kind: self.run(kind, environment)
        for number, update in self.updates.items():
            name = update_name(number)
            yield name, lambda environment, name=name, u=update: self.update(name, u, environment)

    def begin(self, environment: Mapping[ValueKey, Any]) -> dict[ValueKey, Any]:
        stage = self.stages.stages[self.stage]
        needed = {v for pass_ in stage.passes.values() for v in pass_.whole}
        whole = sorted(needed & {v for p in stage.prologue for v in p.op.outputs})
        outer = {**self.constants, **_of_map(environment, "arguments")}
        prologue = self.programs.after(AccumulationLoop((), (), stage.prologue if whole else ()), outer, ())
        return {("whole", v): prologue[v] for v in whole}

    def run(self, kind: Any, environment: Mapping[ValueKey, Any]) -> dict[ValueKey, Any]:
        pass_ = self.stages.stages[self.stage].passes[kind]
        whole = {**self.constants, **_of_map(environment, "arguments"), **_of_map(environment, "whole")}
        local = {**_of_map(environment, "received"), **_of_map(environment, "local")}
        values = {**{v: environment["blocks", v] for v in pass_.blocks}, **{v: local[v] for v in pass_.reads}}
        written = list(dict.fromkeys((*(t.value for t in pass_.totals), *pass_.writes)))
        outer = {v: whole[v] for v in (*pass_.whole, *self.constants)}
        loop = AccumulationLoop(pass_.ops, tuple(AccumulatedValue(v, "last") for v in written), ())
        arrays = self.programs.loop_body(loop, outer, values, environment["index", 0])
        return {("local", v): array for v, array in zip(written, arrays, strict=True)}

    def update(self, name: str, update: Update, environment: Mapping[ValueKey, Any]) -> dict[ValueKey, Any]:
        arguments, updated = _of_map(environment, "arguments"), _of_map(environment, "made")
        totals = self.completed(name, update.totals, environment)
        outer = {
            **self.constants,
            **{v: arguments[v] for v in update.arguments},
            **{v: updated[v] for v in update.reads},
        }
        after = self.programs.after(
            AccumulationLoop((), update.totals, update.ops), outer, [totals[t.value] for t in update.totals]
        )
        completed = {("totals", v): array for v, array in totals.items() if self.completed_in.get(v) == name}
        return {**completed, **{("made", v): after[v] for v in update.writes}}

    def completed(
        self, name: str, totals: Sequence[AccumulatedValue], environment: Mapping[ValueKey, Any]
    ) -> dict[int, Any]:
        """Totals as an update reads them; the first update that reads a total completes it."""
        totals_read: dict[int, Any] = {}
        for total in totals:
            v = total.value
            if ("totals", v) in environment:
                totals_read[v] = environment["totals", v]
                continue
            self.completed_in[v] = name
            if v in self.stacked:
                totals_read[v] = self.programs.accumulator(total).finish(environment["parts", v])
            else:
                # only the constraint that completes a sum reads its parts; those of narrow floats are in float32
                totals_read[v] = _unconstrained(environment["local", v]).astype(self.whole_type(v).dtype)
        return totals_read

    @property
    def constants(self) -> dict[int, Any]:
        return dict(self.stages.split.flat.constants)


def _of_map(environment: Mapping[ValueKey, Any], map_name: str) -> dict[int, Any]:
    return {v: array for (k, v), array in environment.items() if k == map_name}


def _unconstrained(array: Any) -> Any:
    """The array behind a sharding constraint that leaves every dimension open."""
    if not jnp.ndim(array):
        return array
    mesh = jax_compat.auto_abstract_mesh((1,), ("all",))
    open_spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * jnp.ndim(array))
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, open_spec))


# Assembly of the graph


def _assemble(
    tracer: Tracer,
    inputs: Sequence[GraphInput],
    result_keys: Sequence[ValueKey],
    graph: Graph,
    programs: Mapping[str, range],
) -> StageGraph:
    """The graph with the results that leave the stage, and the maps."""
    stages, stage, count = tracer.stages, tracer.stage, tracer.stages.split.count
    inputs_by_key: dict[ValueKey, int] = {key: v for (key, _, _), v in zip(inputs, graph.inputs, strict=True)}
    atoms: dict[ValueKey, Atom] = {**inputs_by_key, **dict(zip(result_keys, graph.outputs, strict=True))}
    results = list(results_of(tracer))
    carried = carried_by(tracer, results, list(inputs_by_key))
    sent = {i: v for i, (kind, v) in enumerate(results) if kind == "local" and v in _sent(stages, stage)}
    result_counts = {i: count for i, (kind, _) in enumerate(results) if i in sent or kind == "part"}
    stacks = {v: i for i, ((kind, v), _, _) in enumerate(inputs) if kind == "parts"}
    parts = {i: stacks[v] for i, (kind, v) in enumerate(results) if kind == "part" and v in stacks}
    op_counts = {op.index: count for op in graph.ops for kind in PASS_KINDS if op.index in programs.get(kind, ())}
    input_counts = {v: count for key, v in inputs_by_key.items() if key[0] in ("index", "blocks", "received")}
    backward = any(op.phase == "backward" for op in graph.ops if op.index in op_counts)
    graph = replace(
        graph,
        ops=tuple(replace(op, phase="update") if backward and _is_update(programs, op) else op for op in graph.ops),
        outputs=tuple(atoms["local" if kind == "part" else kind, v] for kind, v in results),
        output_paths=tuple(f"{kind} {i}" for i, (kind, _) in enumerate(results)),
        repeats=Repeats(op_counts, input_counts, result_counts, parts),
        carried=carried,
    )
    order = [name for name, _ in tracer.all_programs()]
    maps = {kind: {v: atom for (k, v), atom in atoms.items() if k == kind} for kind in _MAPS}
    return StageGraph(
        stage=stage,
        graph=graph,
        programs={name: programs.get(name, range(0)) for name in order},
        index=inputs_by_key["index", 0],
        completed_in=dict(tracer.completed_in),
        results=tuple(results),
        sent=sent,
        avals=tuple(aval for _, aval, _ in inputs),
        **maps,  # pyright: ignore[reportArgumentType]
    )


def _is_update(programs: Mapping[str, range], op: Op) -> bool:
    return not any(op.index in programs.get(name, ()) for name in (BEGIN, *PASS_KINDS))


_MAPS = ("arguments", "blocks", "received", "whole", "local", "totals", "parts", "made")


def _sent(stages: Stages, stage: int) -> list[int]:
    """Values that the passes of a stage send."""
    return sorted({v for transfer, values in stages.transfers.items() if transfer.source == stage for v in values})


def results_of(tracer: Tracer) -> Iterator[ValueKey]:
    """Keys of values that leave the stage: values sent, parts, totals and values for other stages, results."""
    stages, stage = tracer.stages, tracer.stage
    elsewhere = [u for u in stages.updates.programs if u.stage != stage]
    yield from (("local", v) for v in _sent(stages, stage))
    own = sorted(v for v, source in tracer.sources.items() if source == stage)
    foreign = {t.value for u in elsewhere for t in u.totals}
    yield from (("part", v) for v in own if v in tracer.stacked)
    yield from (("local", v) for v in own if v in foreign and v not in tracer.stacked)
    read = {v for u in elsewhere for v in u.reads} | {v for v in stages.split.flat.outputs if isinstance(v, int)}
    yield from (("made", v) for u in tracer.updates.values() for v in u.writes if v in read)


def carried_by(tracer: Tracer, results: Sequence[ValueKey], inputs: Sequence[ValueKey]) -> Mapping[int, int]:
    """Result that carries an argument of this stage into the next step -> position of the argument."""
    split = tracer.stages.split
    argument_position = {key: i for i, key in enumerate(inputs)}
    result_position = {key: i for i, key in reversed(list(enumerate(results)))}
    carried: dict[int, int] = {}
    for out, i in match_state(split.graph).items():
        result, argument = ("made", split.flat.outputs[out]), ("arguments", split.graph.inputs[i])
        if (
            result in result_position
            and argument in argument_position
            and argument_position[argument] not in carried.values()
        ):
            carried.setdefault(result_position[result], argument_position[argument])  # pyright: ignore[reportArgumentType]
    return carried
