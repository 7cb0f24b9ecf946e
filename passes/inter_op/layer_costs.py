"""Costs of all consecutive layers on every submesh, from one stage per kind of layer.

Layers of one kind are the same program (`autopar.passes.layers.find`), so a step with few kinds of layers needs few
costs. One layer of every kind is divided off as a stage and planned on each submesh, with a few options
(`autopar.passes.inter_op.stage_options`). The cost of consecutive layers consists of that of single layers:

    seconds, state, sums, copies, stash          sums over the layers
    temporaries                                  the maximum over the layers, since they run one after the other

Resharding between neighbouring layers is left out: most neighbours are of one kind and have equal layouts.

The number of microbatches changes shapes only. So a step that is split once has costs for every number of microbatches
that divides the batch                                                                                -> at
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from autopar.hardware.cluster import LogicalMesh
from autopar.ir.problem import Floats
from autopar.passes.inter_op.dynamic_program import RunCosts
from autopar.passes.inter_op.stage_options import STAGE_OPTIONS, StageOption, StageOptions
from autopar.passes.layers.find import Layers
from autopar.passes.microbatch.constant_indices import constant_component
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.programs import PlacedOp
from autopar.passes.microbatch.regions import apply_rule, state_of
from autopar.passes.microbatch.slice_pushdown import rule_for_block
from autopar.passes.microbatch.states import INVARIANT, Split
from autopar.passes.remat.options import Options
from autopar.passes.remat.rewrite import FULL, NONE
from autopar.passes.stages.assign import transferred_values
from autopar.passes.stages.divide import Pass, Stages, divide
from autopar.passes.stages.graph import StageGraph, stage_graph
from autopar.rules import rules_of

OptionsByKind: TypeAlias = Mapping[int, tuple[StageOption, ...]]
"""Kind of a layer -> options to run it on a submesh, each with fewer bytes than those before."""


class _OtherProgramError(Exception):
    """The operations of a layer differ for blocks of another size."""


@dataclass(frozen=True, eq=False)
class LayerClasses:
    """One layer of every kind, divided off as a stage.

    Attributes:
        stages: the step, divided around these layers.
        stage: kind -> the number of its stage.
        of_layer: the kind of every layer.
        avals: shape and dtype of every input of the graph that is divided.
    """

    stages: Stages
    stage: Mapping[int, int]
    of_layer: tuple[int, ...]
    avals: tuple[Any, ...]

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.stages.split.count

    def at(self, count: int) -> LayerClasses | None:
        """The same for another number of microbatches; None if that needs another analysis."""
        # Only the passes of the layers that are costed are looked at: of equal layers that is one.
        split = self.stages.split
        try:
            stages = tuple(
                replace(stage, passes={k: _recounted(split, p, count) for k, p in stage.passes.items()})
                if number in self.stage.values()
                else stage
                for number, stage in enumerate(self.stages.stages)
            )
        except _OtherProgramError:
            return None
        return replace(self, stages=replace(self.stages, stages=stages, split=replace(split, count=count)))

    def graphs(self, kinds: Collection[int] | None = None) -> Mapping[int, StageGraph]:
        """Kind -> the layer as a graph; of these kinds, or of all."""
        programs, wanted = StepPrograms(self.stages.split), self.stage if kinds is None else kinds
        return {k: stage_graph(self.stages, s, self.avals, programs) for k, s in self.stage.items() if k in wanted}

    def owned(self, kind: int) -> tuple[frozenset[int], frozenset[int]]:
        """Arguments and totals of the step that a layer of this kind stores: its state, and the sums for it."""
        s, split = self.stage[kind], self.stages.split
        updates, programs = self.stages.updates, StepPrograms(split)
        read = {t.value for u in updates.programs if u.stage == s for t in u.totals}
        totals = [t for pass_ in self.stages.stages[s].passes.values() for t in pass_.totals if t.value in read]
        return (
            frozenset(v for v, owner in updates.owners.items() if owner == s),
            frozenset(t.value for t in totals if not programs.accumulator(t).is_stacked),
        )

    def least_bytes(self) -> Mapping[int, float]:
        """Kind -> bytes of the state and of the accumulators of gradients of a layer, over all devices, each once."""
        types = self.stages.split.graph.types
        nbytes: dict[int, float] = {}
        for kind in self.stage:
            arguments, totals = self.owned(kind)
            sums = [types[v] for v in totals if "float" in types[v].dtype]
            # gradients of 16 bits are accumulated in float32, hence 4 bytes at least
            of_sums = math.fsum(t.size * max(t.itemsize, 4) for t in sums)
            nbytes[kind] = sum(types[v].nbytes for v in arguments) + of_sums
        return nbytes


def layer_classes(split: Microbatches, layers: Layers, avals: Sequence[Any]) -> LayerClasses:
    """One layer of every kind: the second of equal layers, if there are two.

    Args:
        split: the step in microbatches.
        layers: its layers.
        avals: shape and dtype of every argument.
    """
    kinds = tuple(layer.kind for layer in layers.layers)
    of_kind = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)}
    # The first of equal layers may differ at its border, where it reads what the embedding makes; the second has equal
    # layers on both sides.
    chosen = {kind: positions[min(1, len(positions) - 1)] for kind, positions in of_kind.items()}
    borders = sorted({b for i in chosen.values() for b in (i, i + 1)} - {0, len(kinds)})
    first = [0, *borders]
    stages = divide(split, layers, borders)
    numbers = {kind: first.index(i) for kind, i in chosen.items()}
    return LayerClasses(stages, numbers, kinds, StepPrograms(stages.split).avals(avals))


def _recounted(split: Microbatches, pass_: Pass, count: int) -> Pass:
    return replace(pass_, ops=tuple(_on_blocks(split, placed, count) for placed in pass_.ops))


def _on_blocks(split: Microbatches, placed: PlacedOp, count: int) -> PlacedOp:
    """An operation on blocks for another number of microbatches, which may change its parameters and nothing else."""
    rule_result = placed.rule_result
    if rule_result is None or not (rule_result.params or rule_result.body or rule_result.local_indices):
        return placed
    if placed.own_totals:
        raise _OtherProgramError
    op, state_by_value = placed.op, {**split.states, **split.batch}
    states = tuple(INVARIANT if i in placed.outer else state_of(a, state_by_value) for i, a in enumerate(op.inputs))
    makers = {v: maker for maker in split.flat.ops for v in maker.outputs} if rule_result.local_indices else {}
    again = apply_rule(
        split.graph, op, states, count, lambda k, c: constant_component(split.graph, makers, op.inputs[k], c)
    )
    if (again is None or again.results != rule_result.results) and len(rule_result.results) == 1:
        state = rule_result.results[0]
        again = rule_for_block(split.graph, op, state, count) if isinstance(state, Split) else None
    if again is None or again.results != rule_result.results:
        raise _OtherProgramError
    return replace(placed, rule_result=again)


@dataclass(frozen=True, eq=False)
class SubmeshCosts:
    """Options of every kind of layer on one submesh.

    Attributes:
        by_kind: kind -> its options.
        penalties: kind -> number of penalty rates besides 0 that are costed; other options have lower bounds.
    """

    by_kind: Mapping[int, StageOptions]
    penalties: Mapping[int, int] = field(default_factory=dict[int, int])

    def option(self, kind: int, number: int, policy: str = NONE) -> StageOption:
        """An option of a layer; see `option_at`."""
        return option_at(self.options(kind), number, policy)

    def options(self, kind: int) -> tuple[StageOption, ...]:
        """The options of a kind of layer, as far as they are costed."""
        return self.by_kind[kind].up_to(self.penalties.get(kind, 0))

    def costed(self, kind: int) -> tuple[StageOption, ...]:
        """The options that are costed already."""
        if not self.by_kind[kind].costed:
            return ()
        return self.options(kind)[: None if self._is_whole(kind) else -1]

    def is_lower_bound(self, kind: int, number: int) -> bool:
        """Whether the option of this number is not costed."""
        return not self._is_whole(kind) and number + 1 >= len(self.options(kind))

    def _is_whole(self, kind: int) -> bool:
        return self.penalties.get(kind, 0) >= len(self.by_kind[kind].open)

    def deeper(self, kinds: Iterable[int]) -> SubmeshCosts:
        """The same with one penalty rate more for these kinds."""
        return replace(self, penalties={**self.penalties, **{k: self.penalties.get(k, 0) + 1 for k in kinds}})

    def whole(self) -> SubmeshCosts:
        """The same with all penalty rates for all kinds."""
        return replace(self, penalties=dict.fromkeys(self.by_kind, len(STAGE_OPTIONS.shares)))


class LayerCosts:
    """Costs the layers of one step for one number of microbatches, submesh after submesh."""

    def __init__(self, kinds: LayerClasses, options: Options) -> None:
        self.kinds, self.options = kinds, options
        self.graphs = kinds.graphs()
        self.rules = {kind: rules_of(graph.graph, options.rules) for kind, graph in self.graphs.items()}

    def on(self, mesh: LogicalMesh) -> SubmeshCosts:
        """The options of every kind of layer on a mesh; each is computed on demand."""
        by_kind = {
            k: StageOptions(g, mesh, self.rules[k], self.options, self._entering(k)) for k, g in self.graphs.items()
        }
        return SubmeshCosts(by_kind)

    def _entering(self, kind: int) -> Sequence[int]:
        """Values of a layer's graph that it receives from forward passes of other layers."""
        here = self.kinds.stage[kind]
        received = (
            vs
            for transfer, vs in self.kinds.stages.transfers.items()
            if transfer.kind == "F" and transfer.target == here
        )
        return sorted({self.graphs[kind].received[v] for values in received for v in values})


def option_at(options: Sequence[StageOption], number: int, policy: str) -> StageOption:
    """An option of a layer by number; the last one counts for all higher numbers."""
    option = options[min(number, len(options) - 1)]
    return option.recomputed() if policy == FULL else option


def run_options(policies: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """(rematerialisation policy, number of the option): the options of consecutive layers, in order."""
    return tuple(itertools.product(policies, range(1 + len(STAGE_OPTIONS.shares))))


def run_costs(by_kind: OptionsByKind, of_layer: Sequence[int], policies: Sequence[str]) -> RunCosts:
    """All consecutive layers on one submesh; all of them have the same one of `run_options`."""
    options = [
        {k: option_at(by_kind[k], n, policy) for k in dict.fromkeys(of_layer)} for policy, n in run_options(policies)
    ]
    runs = [_runs([option[kind] for kind in of_layer]) for option in options]
    return RunCosts(*(np.stack(arrays) for arrays in zip(*runs, strict=True)))


def _runs(layers: Sequence[StageOption]) -> tuple[Floats, ...]:
    """The arrays of `autopar.passes.inter_op.dynamic_program.RunCosts` for one option."""
    seconds = sums_of_runs([t.times.forward + t.times.backward + t.times.weight for t in layers])
    once = sums_of_runs([t.times.update + t.times.reduce for t in layers])
    fixed = sums_of_runs([t.memory.state + t.memory.sums for t in layers])
    copies = sums_of_runs([t.memory.copies for t in layers])
    most = _maxima([t.memory.temporaries for t in layers])
    batch = _maxima([t.memory.batch for t in layers])
    stash = sums_of_runs([t.memory.stash for t in layers])
    update = sums_of_runs([t.memory.update for t in layers])
    return seconds, once, fixed + copies + most + batch, stash, fixed + update


def sums_of_runs(values: Sequence[float]) -> Floats:
    """At [i, j] the sum of values i .. j - 1."""
    total = np.array([0.0, *itertools.accumulate(values)])
    return total[None, :] - total[:, None]


def _maxima(values: Sequence[float]) -> Floats:
    """At [i, j] the largest of values i .. j - 1."""
    n = len(values)
    upper = np.triu(np.ones((n, n), bool))
    maxima = np.zeros((n + 1, n + 1))
    running = np.maximum.accumulate(np.where(upper, np.array(values, np.float64), -np.inf), axis=1)
    maxima[:n, 1:] = np.where(upper, running, 0.0)
    return maxima


class Border(NamedTuple):
    """Bytes of the whole batch that cross a border between two layers.

    Attributes:
        forward: activations, without those that readers duplicate.
        backward: cotangents of all activations that cross.
    """

    forward: float
    backward: float


def border_bytes(split: Microbatches, layers: Layers) -> tuple[Border, ...]:
    """Bytes that cross the border in front of every layer but the first."""
    types = layers.graph.types

    def nbytes(values: Iterable[int]) -> float:
        return math.fsum(types[v].nbytes for v in sorted(values))

    def differentiable(values: Iterable[int]) -> list[int]:
        return [v for v in values if "float" in types[v].dtype]

    forward = transferred_values(split, layers)
    return tuple(Border(nbytes(a), nbytes(differentiable(b))) for a, b in zip(forward, layers.crossing, strict=True))
