"""Programs of planned stages: every value constrained to its planned layout, gradients unreduced until the update.

`autopar.codegen.stages.programs` emits the programs of a planned stage, with a key per array. The runtime calls
programs with numbered arrays: here each key gets the number of the step in stages, or an unused one where that has
none, and the step in stages gets the lists of numbers that its programs read and write  -> value_numbering.py
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.codegen.context import AnyMesh
from autopar.codegen.host_memory import between_steps, to_device, to_host
from autopar.codegen.stages.programs import Key, ProgramInterfaces, StageEmitter, program_interfaces
from autopar.codegen.value_numbering import ValueNumbers, key_of, number_values, renumber
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.graph import Graph
from autopar.passes.microbatch.accumulators import Accumulator
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.programs import AccumulatedValue
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.graph import BEGIN, update_name
from autopar.passes.stages.offload import next_values
from autopar.passes.stages.plan_all import CodegenStage, StagePlans
from autopar.schedules.instructions import Kind

#: Arrays by number.
Values = Mapping[int, Any]


@dataclass(frozen=True, eq=False)
class PlannedPrograms:
    """The functions of the programs of planned stages, and the shardings of the arrays that they pass to each other.

    Attributes:
        stages: the step, with the lists of values that its programs have.
        meshes: the submesh of every stage.
        emitters: per stage.
        keys: per stage, number -> key of the arrays that its programs pass to each other.
        totals: total -> the stage whose passes accumulate it, and the total.
        programs: of the step in microbatches.
        offloaded: the arguments in host memory between steps.
    """

    stages: Stages
    meshes: tuple[AnyMesh, ...]
    emitters: tuple[StageEmitter, ...]
    keys: tuple[ValueNumbers, ...]
    totals: Mapping[int, tuple[int, AccumulatedValue]]
    programs: StepPrograms
    offloaded: frozenset[int] = frozenset()

    def graph(self, stage: int) -> Graph:
        """The graph whose operations the tags in a stage's programs name."""
        return self.emitters[stage].graph

    def stored(self, stage: int) -> frozenset[Key]:
        """Keys of the arrays that programs of a stage leave for later ones, totals included."""
        numbers, atoms = self.keys[stage], self.emitters[stage].plan.graph.local
        totals = (key_of(atoms[v]) for v, (s, _) in self.totals.items() if s == stage and v not in self._parts(stage))
        exchanged = (*numbers.whole.values(), *numbers.local.values(), *numbers.updates.values())
        return frozenset({*exchanged, *(key for key in totals if key is not None)})

    # Shardings

    def replicated(self, stage: int) -> NamedSharding:
        """A copy on every device of a stage."""
        return NamedSharding(self.meshes[stage], PartitionSpec())

    def value(self, stage: int, value: int) -> NamedSharding:
        """A value of one microbatch that a pass of the stage makes or reads."""
        out = self._sent(stage).get(value)
        if out is not None:
            return self.emitters[stage].result_sharding(out)
        return self._sharding_of(stage, self.keys[stage].local.get(value))

    def whole(self, stage: int, value: int) -> NamedSharding:
        """A value that is the same for every microbatch and that passes read: an argument, or one of the prologue."""
        return self._sharding_of(stage, self.keys[stage].whole.get(value))

    def argument(self, stage: int, value: int) -> NamedSharding:
        """An argument of the step; the batch is replicated, and each device takes its microbatches from it."""
        if value in self.stages.split.batch:
            return self.replicated(stage)
        on_device = self._sharding_of(stage, key_of(self.emitters[stage].plan.graph.arguments.get(value)))
        return between_steps(on_device, value in self.offloaded and self.stages.updates.owners[value] == stage)

    def blocks(self, stage: int, value: int) -> NamedSharding:
        """All microbatches of an argument, stacked along a leading dimension."""
        block = self._sharding_of(stage, key_of(self.emitters[stage].plan.graph.blocks[value]))
        return NamedSharding(self.meshes[stage], PartitionSpec(None, *block.spec))

    def total(self, stage: int, value: int) -> NamedSharding:
        """The accumulator of a total, in the stage whose passes make it."""
        part = self._parts(stage).get(value)
        if part is not None:
            spec = self.emitters[stage].result_sharding(part).spec
            return NamedSharding(self.meshes[stage], PartitionSpec(None, *spec))
        return self._sharding_of(stage, key_of(self.emitters[stage].plan.graph.local[value]))

    def update_total(self, number: int, value: int) -> NamedSharding:
        """The accumulator of a total, as update `number` reads it."""
        stage, source = self.stages.updates.programs[number].stage, self.totals[value][0]
        return self.total(stage, value) if stage == source else self.replicated(stage)

    def update_read(self, number: int, value: int) -> NamedSharding:
        """A value of another update, as update `number` reads it."""
        stage = self.stages.updates.programs[number].stage
        return self._sharding_of(stage, self.keys[stage].updates.get(value))

    def update_result(self, number: int, value: int) -> NamedSharding:
        """A value that update `number` writes."""
        stage = self.stages.updates.programs[number].stage
        out = self._results(stage).get(value)
        if out is None:
            return self.update_read(number, value)
        return between_steps(self.emitters[stage].result_sharding(out), value in self._returned_to_host(stage))

    def _sharding_of(self, stage: int, key: Key | None) -> NamedSharding:
        return self.replicated(stage) if key is None else self.emitters[stage].sharding(key)

    def _sent(self, stage: int) -> Mapping[int, int]:
        """Value sent to another stage -> position of the result of the graph."""
        return {v: i for i, v in self.emitters[stage].plan.graph.sent.items()}

    def _parts(self, stage: int) -> Mapping[int, int]:
        """Total whose parts are joined -> position of the result of the graph that is one part."""
        return self.emitters[stage].plan.graph.part_results

    def _results(self, stage: int) -> Mapping[int, int]:
        """Value of an update that leaves the stage -> position of the result of the graph."""
        return {v: i for i, (kind, v) in enumerate(self.emitters[stage].plan.graph.results) if kind == "made"}

    def _returned_to_host(self, stage: int) -> frozenset[int]:
        """The next values of the offloaded arguments of a stage."""
        owners = self.stages.updates.owners
        return next_values(self.stages, frozenset(v for v in self.offloaded if owners[v] == stage))

    # Functions

    def accumulator(self, stage: int, total: int) -> Accumulator:
        """How the parts of a total are accumulated over microbatches."""
        if total in self._parts(stage):  # the updates of the plan join the parts
            return replace(self.programs.accumulator(self.totals[total][1]), finish=lambda parts: parts)
        key = key_of(self.emitters[stage].plan.graph.local[total])
        lead = () if key is None else self.emitters[stage].lead(key)
        return self.programs.accumulator(self.totals[total][1], lead)

    def begin(self, stage: int, arguments: Values) -> Values:
        """The values of the prologue that passes read."""
        graph = self.emitters[stage].plan.graph
        inputs: dict[Key, Any] = {(graph.arguments[v], None): x for v, x in arguments.items() if v in graph.arguments}
        wanted = {n: key for n, key in self.keys[stage].whole.items() if n not in graph.arguments}
        emitted = self.emitters[stage].emit(BEGIN, inputs, wanted.values(), ()).values
        return {n: emitted[key] for n, key in wanted.items()}

    def run(
        self, stage: int, kind: Kind, whole: Values, local: Values, index: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """A pass on blocks and values of one microbatch: its part of every total, and the values that it writes."""
        emitter, keys, graph = self.emitters[stage], self.keys[stage], self.emitters[stage].plan.graph
        pass_, sent = self.stages.stages[stage].passes[kind], self._sent(stage)
        inputs: dict[Key, Any] = {(graph.index, None): index}
        inputs.update((keys.whole[n], array) for n, array in whole.items())
        inputs.update(((graph.blocks[n], None), x) for n, x in local.items() if n in pass_.blocks)
        inputs.update((keys.local[n], x) for n, x in local.items() if n in keys.local)
        joined = {t.value: graph.part_results[t.value] for t in pass_.totals if t.value in graph.part_results}
        results = [*(sent[n] for n in pass_.writes if n in sent), *joined.values()]
        summed = [t.value for t in pass_.totals if t.value not in joined]
        wanted = [key for v in summed if (key := key_of(graph.local[v])) is not None]
        wanted += [keys.local[n] for n in pass_.writes if n not in sent]
        emitted = emitter.emit(kind, inputs, wanted, results)
        parts = tuple(
            emitted.results[joined[t.value]] if t.value in joined else _part(emitted.values, graph.local[t.value])
            for t in pass_.totals
        )
        written = (emitted.results[sent[n]] if n in sent else emitted.values[keys.local[n]] for n in pass_.writes)
        return parts, tuple(written)

    def update(self, number: int, arguments: Values, totals: Values, reads: Values) -> tuple[Any, ...]:
        """The values that an update writes."""
        update = self.stages.updates.programs[number]
        emitter, graph = self.emitters[update.stage], self.emitters[update.stage].plan.graph
        keys, results = self.keys[update.stage].updates, self._results(update.stage)
        inputs: dict[Key, Any] = {
            (graph.arguments[v], None): to_device(x, self.argument(update.stage, v)) for v, x in arguments.items()
        }
        inputs.update((self._total_key(update.stage, v), self._reduced(update.stage, v, x)) for v, x in totals.items())
        inputs.update((keys[n], array) for n, array in reads.items())
        out = [results[n] for n in update.writes if n in results]
        emitted = emitter.emit(update_name(number), inputs, [keys[n] for n in update.writes if n not in results], out)
        written = (emitted.results[results[n]] if n in results else emitted.values[keys[n]] for n in update.writes)
        return tuple(to_host(x, self.update_result(number, n)) for n, x in zip(update.writes, written, strict=True))

    def _total_key(self, stage: int, total: int) -> Key:
        """The key under which the updates of a stage read a total."""
        graph = self.emitters[stage].plan.graph
        value = graph.accumulated(total)
        assert isinstance(value, int)
        return value, None

    def _reduced(self, stage: int, total: int, array: Any) -> Any:
        """A total as an update reads it: partial sums that another stage's devices sent are added."""
        source = self.totals[total][0]
        key = key_of(self.emitters[source].plan.graph.local[total])
        is_whole = source == stage or total in self._parts(source)
        lead = () if is_whole or key is None else self.emitters[source].lead(key)
        return jax_compat.reduce_sum(array, range(len(lead))) if lead else array


def _part(values: Mapping[Key, Any], atom: Any) -> Any:
    return values[atom, None] if isinstance(atom, int) else jnp.asarray(atom.value)


def local_mesh(mesh: Mesh) -> LogicalMesh:
    """A mesh of local devices with its cost model; ClusterError if no preset describes them."""
    return Cluster.local().part(0, mesh.size).logical_mesh(mesh.devices.shape, mesh.axis_names)


def planned_programs(plans: StagePlans[CodegenStage], meshes: Sequence[AnyMesh]) -> PlannedPrograms:
    """The programs of planned stages, for these submeshes.

    Args:
        plans: the stages.
        meshes: the submesh of every stage, its axes named and sized as planned for.
    """
    stages = plans.stages
    emitters = tuple(StageEmitter(plan, mesh) for plan, mesh in zip(plans.plans, meshes, strict=True))
    interfaces = tuple(_interfaces(stages, s, emitter) for s, emitter in enumerate(emitters))
    fresh = itertools.count(len(stages.split.graph.types))
    keys = tuple(number_values(*pair, fresh) for pair in zip(emitters, interfaces, strict=True))
    totals = {
        t.value: (s, t)
        for s, stage in enumerate(stages.stages)
        for pass_ in stage.passes.values()
        for t in pass_.totals
    }
    renumbered = renumber(stages, emitters, interfaces, keys)
    programs = StepPrograms(stages.split)
    return PlannedPrograms(renumbered, tuple(meshes), emitters, keys, totals, programs, plans.offloaded)


def _interfaces(stages: Stages, stage: int, emitter: StageEmitter) -> ProgramInterfaces:
    """What the programs of a stage read and write."""
    graph, passes = emitter.plan.graph, stages.stages[stage].passes
    sent, parts = {v: i for i, v in graph.sent.items()}, graph.part_results
    update_outputs = {v: i for i, (kind, v) in enumerate(graph.results) if kind == "made"}
    results: dict[str, list[int]] = {
        kind: [
            *(sent[v] for v in pass_.writes if v in sent),
            *(parts[t.value] for t in pass_.totals if t.value in parts),
        ]
        for kind, pass_ in passes.items()
    }
    for number, update in enumerate(stages.updates.programs):
        if update.stage == stage:
            results[update_name(number)] = [
                update_outputs[v] for v in dict.fromkeys(update.writes) if v in update_outputs
            ]
    atoms = {
        kind: [graph.local[t.value] for t in pass_.totals if t.value not in parts] for kind, pass_ in passes.items()
    }
    totals = {kind: [a for a in of_pass if isinstance(a, int)] for kind, of_pass in atoms.items()}
    return program_interfaces(emitter, results, totals)
