"""Programs of planned stages: every value constrained to its planned layout, gradients partial until the update.

A planned stage is cut into programs by `autopar.codegen.stage_programs`, which know arrays by key. Here keys get the
numbers that the runtime calls programs with, those of the step in stages where there is one, new ones for the rest,
and the step in stages gets the lists of values that the programs then have                        -> value_numbering.py
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.codegen.layouts import Layouts
from autopar.codegen.stage_programs import Cuts, Emitter, Key, cut
from autopar.codegen.stage_shardings import Values
from autopar.codegen.unplanned_programs import Plain
from autopar.codegen.value_numbering import Keys, key_of, numbered, relisted
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.passes.microbatch.loop import Accumulator, StepPrograms
from autopar.passes.microbatch.programs import AccumulatedValue
from autopar.passes.stages.divide import Stages
from autopar.passes.stages.graph import BEGIN, update_name
from autopar.passes.stages.plan_all import CodegenStage, StagePlans, plan_stages
from autopar.schedules.instructions import Kind


@dataclass(frozen=True, eq=False)
class Planned:
    """`Places` and `Bodies` of planned stages.

    Attributes:
        stages: the step, with the lists of values that its programs have.
        meshes: the submesh of every stage.
        emitters: per stage.
        keys: per stage, number -> key, of what its programs leave to each other.
        totals: total -> the stage whose passes make it, and how.
        programs: of the step in microbatches.
    """

    stages: Stages
    meshes: tuple[Mesh, ...]
    emitters: tuple[Emitter, ...]
    keys: tuple[Keys, ...]
    totals: Mapping[int, tuple[int, AccumulatedValue]]
    programs: StepPrograms

    # Places

    def everywhere(self, stage: int) -> NamedSharding:
        return NamedSharding(self.meshes[stage], PartitionSpec())

    def value(self, stage: int, value: int) -> NamedSharding:
        out = self._sent(stage).get(value)
        if out is not None:
            return self.emitters[stage].result_sharding(out)
        return self._at(stage, self.keys[stage].local.get(value))

    def whole(self, stage: int, value: int) -> NamedSharding:
        return self._at(stage, self.keys[stage].whole.get(value))

    def argument(self, stage: int, value: int) -> NamedSharding:
        if value in self.stages.split.batch:
            return self.everywhere(stage)
        return self._at(stage, key_of(self.emitters[stage].plan.graph.arguments.get(value)))

    def blocks(self, stage: int, value: int) -> NamedSharding:
        one = self._at(stage, key_of(self.emitters[stage].plan.graph.blocks[value]))
        return NamedSharding(self.meshes[stage], PartitionSpec(None, *one.spec))

    def total(self, stage: int, value: int) -> NamedSharding:
        return self._at(stage, key_of(self.emitters[stage].plan.graph.local[value]))

    def ended(self, number: int, value: int) -> NamedSharding:
        stage, source = self.stages.updates.programs[number].stage, self.totals[value][0]
        return self.total(stage, value) if stage == source else self.everywhere(stage)

    def read(self, number: int, value: int) -> NamedSharding:
        stage = self.stages.updates.programs[number].stage
        return self._at(stage, self.keys[stage].made.get(value))

    def result(self, number: int, value: int) -> NamedSharding:
        stage = self.stages.updates.programs[number].stage
        out = self._results(stage).get(value)
        return self.read(number, value) if out is None else self.emitters[stage].result_sharding(out)

    def _at(self, stage: int, key: Key | None) -> NamedSharding:
        return self.everywhere(stage) if key is None else self.emitters[stage].sharding(key)

    def _sent(self, stage: int) -> Mapping[int, int]:
        """Value handed over -> position of the result of the graph."""
        return {v: i for i, v in self.emitters[stage].plan.graph.sent.items()}

    def _results(self, stage: int) -> Mapping[int, int]:
        """Value of an update that leaves the stage -> position of the result of the graph."""
        found = enumerate(self.emitters[stage].plan.graph.results)
        return {v: i for i, (kind, v) in found if kind == "made"}

    # Bodies

    def accumulator(self, stage: int, total: int) -> Accumulator:
        key = key_of(self.emitters[stage].plan.graph.local[total])
        lead = () if key is None else self.emitters[stage].lead(key)
        return self.programs.accumulator(self.totals[total][1], lead)

    def begin(self, stage: int, arguments: Values) -> Values:
        graph = self.emitters[stage].plan.graph
        known: dict[Key, Any] = {(graph.arguments[v], None): x for v, x in arguments.items() if v in graph.arguments}
        wanted = {n: key for n, key in self.keys[stage].whole.items() if n not in graph.arguments}
        given = self.emitters[stage].emit(BEGIN, known, wanted.values(), ()).values
        return {n: given[key] for n, key in wanted.items()}

    def run(
        self, stage: int, kind: Kind, whole: Values, local: Values, index: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        emitter, keys, graph = self.emitters[stage], self.keys[stage], self.emitters[stage].plan.graph
        one, sent = self.stages.stages[stage].passes[kind], self._sent(stage)
        known: dict[Key, Any] = {(graph.index, None): index}
        known.update((keys.whole[n], array) for n, array in whole.items())
        known.update(((graph.blocks[n], None), x) for n, x in local.items() if n in one.blocks)
        known.update((keys.local[n], x) for n, x in local.items() if n in keys.local)
        results = [sent[n] for n in one.writes if n in sent]
        wanted = [key for t in one.totals if (key := key_of(graph.local[t.value])) is not None]
        wanted += [keys.local[n] for n in one.writes if n not in sent]
        given = emitter.emit(kind, known, wanted, results)
        parts = tuple(_given(given.values, graph.local[t.value]) for t in one.totals)
        written = (given.results[sent[n]] if n in sent else given.values[keys.local[n]] for n in one.writes)
        return parts, tuple(written)

    def update(self, number: int, arguments: Values, totals: Values, reads: Values) -> tuple[Any, ...]:
        update = self.stages.updates.programs[number]
        emitter, graph = self.emitters[update.stage], self.emitters[update.stage].plan.graph
        keys, results = self.keys[update.stage].made, self._results(update.stage)
        known: dict[Key, Any] = {(graph.arguments[v], None): array for v, array in arguments.items()}
        known.update((self._read_as(update.stage, v), self._gathered(update.stage, v, x)) for v, x in totals.items())
        known.update((keys[n], array) for n, array in reads.items())
        out = [results[n] for n in update.writes if n in results]
        given = emitter.emit(update_name(number), known, [keys[n] for n in update.writes if n not in results], out)
        return tuple(given.results[results[n]] if n in results else given.values[keys[n]] for n in update.writes)

    def _read_as(self, stage: int, total: int) -> Key:
        """The key under which the updates of a stage read a total."""
        graph = self.emitters[stage].plan.graph
        found = graph.local[total] if total in graph.summed_in else graph.totals[total]
        assert isinstance(found, int)
        return found, None

    def _gathered(self, stage: int, total: int, array: Any) -> Any:
        """A total as an update reads it: partial sums of another stage's devices have all come here."""
        source = self.totals[total][0]
        key = key_of(self.emitters[source].plan.graph.local[total])
        lead = () if source == stage or key is None else self.emitters[source].lead(key)
        return jax_compat.reduce_sum(array, range(len(lead))) if lead else array


def _given(values: Mapping[Key, Any], atom: Any) -> Any:
    return values[atom, None] if isinstance(atom, int) else jnp.asarray(atom.value)


def placed(
    stages: Stages, meshes: Sequence[Mesh], avals: Sequence[Any], layouts: Layouts | StagePlans[CodegenStage] | None
) -> Plain | Planned:
    """Where the values of a step in stages lie, and its programs.

    Args:
        stages: the step.
        meshes: the submesh of every stage.
        avals: shape and dtype of every argument of the step.
        layouts: by a function, or planned; None: planned for these meshes as local devices.
    """
    if callable(layouts):
        return Plain(stages, tuple(meshes), layouts)
    return planned(layouts or plan_stages(stages, avals, [local_mesh(mesh) for mesh in meshes]), meshes)


def local_mesh(mesh: Mesh) -> LogicalMesh:
    """A mesh of local devices with prices; ClusterError if no preset describes them."""
    return Cluster.local().part(0, mesh.size).logical_mesh(mesh.devices.shape, mesh.axis_names)


def planned(plans: StagePlans[CodegenStage], meshes: Sequence[Mesh]) -> Planned:
    """The programs of planned stages, for these submeshes.

    Args:
        plans: the stages.
        meshes: the submesh of every stage, its axes named and sized as planned for.
    """
    stages = plans.stages
    emitters = tuple(Emitter(plan, mesh) for plan, mesh in zip(plans.plans, meshes, strict=True))
    cuts = tuple(_cut(stages, s, emitter) for s, emitter in enumerate(emitters))
    fresh = itertools.count(len(stages.split.graph.types))
    keys = tuple(numbered(emitter, found, fresh) for emitter, found in zip(emitters, cuts, strict=True))
    totals = {
        t.value: (s, t) for s, stage in enumerate(stages.stages) for one in stage.passes.values() for t in one.totals
    }
    lists = relisted(stages, emitters, cuts, keys)
    return Planned(lists, tuple(meshes), emitters, keys, totals, StepPrograms(stages.split))


def _cut(stages: Stages, stage: int, emitter: Emitter) -> Cuts:
    graph, found = emitter.plan.graph, stages.stages[stage]
    handed = {v: i for i, v in graph.sent.items()}
    made = {v: i for i, (kind, v) in enumerate(graph.results) if kind == "made"}
    results: dict[str, list[int]] = {
        k: [handed[v] for v in one.writes if v in handed] for k, one in found.passes.items()
    }
    for number, update in enumerate(stages.updates.programs):
        if update.stage == stage:
            results[update_name(number)] = [made[v] for v in dict.fromkeys(update.writes) if v in made]
    atoms = {kind: [graph.local[t.value] for t in one.totals] for kind, one in found.passes.items()}
    totals = {kind: [a for a in found if isinstance(a, int)] for kind, found in atoms.items()}
    return cut(emitter, results, totals)
