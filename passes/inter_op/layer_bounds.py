"""Lower bounds on the seconds and bytes of layers, in whichever stage they are.

One layer is cut off as a stage. In a longer stage, or beside other neighbours, it can only take less where it shares
something with them:

    values received and sent     are neither written nor read by it, in any layout
    cheap operations             that every reader repeats are computed by another layer        -> surroundings_of

With these at no cost, and resharding between layers left out, the seconds of a stage are at least the sum over its
layers. What runs once per step may run beside the passes of other stages, so that passes are bounded by themselves,
too. A rematerialised layer takes as long as its forward pass alone, and the rest with as much of the forward pass as
its residuals are computed from; where it keeps the results of its products, what it repeats takes at least the least
that each operation takes                                                                               -> bound_on

Within a memory limit M, bytes may have a price w >= 0 (s/byte; Everett, 1963). The bound on a stage is again a sum over
its layers:

    seconds  >=  sum over layers of  min over layouts ( seconds + w bytes )  +  w (other bytes - M)      -> priced_on

with the bytes of state, accumulators, and copies of weights in their layouts.

Other bytes are those of even shards: the state and the accumulators of gradients, and the residuals, each counted for
the first layer that keeps it. A rematerialised layer keeps what it receives    -> BoundedLayers.residual_bytes

Layers are of one class if they are isomorphic as stages, backward pass and updates included -> bounded_layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.cost_models.compiler.backends import Backend, backend_of
from autopar.cost_models.compiler.flatten import flatten
from autopar.cost_models.compiler.lifetimes import lifetimes
from autopar.cost_models.compiler.written_values import written
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.row import weighted_sum
from autopar.cost_models.sharding.groups import Grouping, Model
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.op_sets import ALL_PRODUCTS
from autopar.ir.problem import Edge, Problem
from autopar.passes.inter_op.layer_costs import LayerClasses
from autopar.passes.intra_op import build as intra_op
from autopar.passes.layers.find import Layers
from autopar.passes.memory.penalised import penalised
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.op_groups import merge as op_groups
from autopar.passes.op_groups.merge import Surroundings
from autopar.passes.remat import rewrite
from autopar.passes.solver.optimize import optimize
from autopar.passes.stages.assign import is_cheap
from autopar.passes.stages.divide import PASS_KINDS, divide
from autopar.passes.stages.graph import BEGIN, Recomputation, StageGraph, recomputation
from autopar.passes.stages.isomorphism import CanonicalForm, canonical_form, renamed
from autopar.passes.stages.memory import StageLiveness, stashed_values
from autopar.rules import Rule


@dataclass(frozen=True, slots=True)
class BoundEffort:
    """How near its optimum the bound of a layer is."""

    # relative gap at which the dual ascent ends (0.3%: the same bounds on four large models in the same time; 2026-11)
    until: float = 1e-2
    # remaining strategies above which the ILP is not run (that of `stage_options.OptionEffort`)
    largest: int = 2_000


BOUND = BoundEffort()


#: Residuals without rematerialisation where all passes are one program, beside those of policies.
FUSED = "fused"


@dataclass(frozen=True, slots=True)
class LayerBound:
    """What a layer takes at least on a mesh.

    Attributes:
        passes: rematerialisation policy -> s per step of its passes.
        seconds: the same with what runs once per step.
    """

    passes: Mapping[str, float]
    seconds: Mapping[str, float]

    def highest(self, other: LayerBound, share: float) -> LayerBound:
        """The higher of these seconds and of shares of others."""
        return LayerBound(
            {policy: max(s, share * other.passes[policy]) for policy, s in self.passes.items()},
            {policy: max(s, share * other.seconds[policy]) for policy, s in self.seconds.items()},
        )


NOTHING = LayerBound(*[dict.fromkeys(rewrite.POLICIES, 0.0)] * 2)


@dataclass(frozen=True, eq=False)
class BoundedLayers:
    """The layers of a step, one of every class as a graph.

    Attributes:
        classes: one layer of every class, divided off as a stage.
        forms: the canonical form of every layer.
    """

    classes: LayerClasses
    forms: tuple[CanonicalForm, ...]

    def at(self, count: int) -> BoundedLayers | None:
        """The same for another number of microbatches; None if that needs another analysis."""
        classes = self.classes if self.classes.microbatches == count else self.classes.at(count)
        return classes and BoundedLayers(classes, self.forms)

    def residual_bytes(
        self, graphs: Mapping[int, StageGraph], rules: Mapping[int, Mapping[int, Rule]], mesh: LogicalMesh
    ) -> Mapping[str, Sequence[int]]:
        """Bytes of residuals of one microbatch over all devices, of every layer without those of earlier layers.

        Args:
            graphs: class -> the layer as a graph.
            rules: class -> those of its operations.
            mesh: any.

        Returns:
            Rematerialisation policy -> bytes of every layer; `FUSED`: without rematerialisation where all passes are
            one program.
        """
        kept: dict[int, Mapping[str, frozenset[int]]] = {}
        for c, layer in graphs.items():
            grouping = op_groups.group(layer.graph, rules[c], mesh, surroundings=surroundings_of(layer))
            kept[c] = self._residuals(c, layer, grouping, _in_order(mesh))
        return {
            p: self._without_earlier(graphs, {c: values[p] for c, values in kept.items()})
            for p in (*rewrite.POLICIES, FUSED)
        }

    def _residuals(
        self, class_: int, layer: StageGraph, grouping: Grouping, backend: Backend
    ) -> Mapping[str, frozenset[int]]:
        """Values that the layer keeps for its backward pass at least; keys as of `residual_bytes`."""
        stage, transfers = self.classes.stage[class_], self.classes.stages.transfers.items()
        sent = {
            v for transfer, values in transfers if transfer.kind == "F" and transfer.target == stage for v in values
        }
        received = frozenset(layer.received.values())
        entering = frozenset(layer.received[v] for v in sent)
        stashed = frozenset(stashed_values(layer, grouping.bindings))
        kept = {rewrite.NONE: stashed, FUSED: _written_residuals(layer, grouping.views, backend)}
        return {
            **{policy: values - (received - entering) for policy, values in kept.items()},
            **{p: (entering | _products(layer, p)) & _repeated(layer, p).read for p in (rewrite.DOTS, rewrite.FULL)},
        }

    def _without_earlier(
        self, graphs: Mapping[int, StageGraph], residuals: Mapping[int, frozenset[int]]
    ) -> Sequence[int]:
        """Bytes of the residuals of every layer that no earlier layer keeps; `residuals`: by class."""
        kept: set[int] = set()
        nbytes: list[int] = []
        for form, c in zip(self.forms, self.classes.of_layer, strict=True):
            first = self.forms[self.classes.stage[c]]
            here = graphs[c] if form is first else renamed(graphs[c], first, form)
            received = {v: a for v, a in here.received.items() if a in residuals[c]}
            own = residuals[c].difference(received.values())
            new = own.union(a for v, a in received.items() if v not in kept)
            kept.update(received, (v for v, a in here.local.items() if a in own))
            nbytes.append(_nbytes(graphs[c], new))
        return nbytes


def bounded_layers(split: Microbatches, layers: Layers, avals: Sequence[Any]) -> BoundedLayers:
    """Each of the step's layers cut off as a stage; arguments as for `autopar.passes.inter_op.layer_costs`."""
    count = len(layers.layers)
    stages = divide(split, layers, range(1, count))
    programs = StepPrograms(stages.split)
    inputs = programs.avals(avals)
    forms = tuple(canonical_form(stages, i, inputs, programs) for i in range(count))
    number: dict[Any, int] = {}
    of_layer = tuple(number.setdefault(form.key, len(number)) for form in forms)
    return BoundedLayers(LayerClasses(stages, {c: of_layer.index(c) for c in number.values()}, of_layer, inputs), forms)


def bound_on(
    layer: StageGraph,
    mesh: LogicalMesh,
    rules: Mapping[int, Rule],
    *,
    remat: bool = True,
    once: bool = False,
    effort: BoundEffort = BOUND,
) -> LayerBound:
    """The bound of a layer, cut off as a stage, on a mesh.

    Args:
        layer: the layer.
        mesh: the mesh.
        rules: of its operations.
        remat: whether what rematerialisation takes is bounded too; otherwise it is taken to be nothing.
        once: whether what runs once per step is bounded together with the passes, or by itself.
        effort: how near its optimum.
    """
    parts = _LayerProblems(layer, mesh, rules)
    forward = _least(parts.forward.problem, effort) if remat else 0.0
    passes = _of_policies(parts, forward, effort, once=False, remat=remat)
    updates = _least(parts.updates.problem, effort)
    seconds = {policy: s + updates for policy, s in passes.items()}
    if once:
        together = _of_policies(parts, forward, effort, once=True, remat=remat)
        seconds = {policy: max(s, together[policy]) for policy, s in seconds.items()}
    return LayerBound(passes, seconds)


def _of_policies(
    parts: _LayerProblems, forward: float, effort: BoundEffort, *, once: bool, remat: bool
) -> Mapping[str, float]:
    """Rematerialisation policy -> s per step; `forward`: bound (s) on the forward passes alone."""
    layer, least = parts.layer, _least(parts.whole(once=once).problem, effort)
    seconds = dict.fromkeys(rewrite.POLICIES, least)
    if remat:
        # of a loop over layers no more than its body is repeated in part
        repeated = {i for i in _repeated(layer, rewrite.DOTS).ops if not layer.graph.by_index[i].regions}
        seconds[rewrite.DOTS] += math.fsum(s for op, s in parts.least_of_ops if op in repeated)
        seconds[rewrite.FULL] = max(least, forward + _least(parts.rest(once=once).problem, effort))
    return seconds


@dataclass(frozen=True, slots=True)
class ByteRates:
    """Prices of a byte (s per step): of state, of accumulators of gradients, and of copies of state."""

    state: float
    sums: float
    copies: float


def priced_on(
    layer: StageGraph,
    mesh: LogicalMesh,
    rules: Mapping[int, Rule],
    owned: tuple[frozenset[int], frozenset[int]],
    rates: Sequence[ByteRates],
    *,
    recomputed: bool = False,
    effort: BoundEffort = BOUND,
) -> Sequence[float]:
    """Lower bounds on the seconds of a layer plus the price of the bytes that it stores.

    Args:
        layer, mesh, rules, effort: as for `bound_on`.
        owned: arguments and totals of the step that are priced, which no other layer stores.
        rates: prices; a bound for each.
        recomputed: whether the layer is rematerialised.
    """
    parts, graph = _LayerProblems(layer, mesh, rules), layer.graph
    model = parts.rest(once=True) if recomputed else parts.whole(once=True)
    fixed = _least(parts.forward.problem, effort) if recomputed else 0.0
    backend, donated = _in_order(mesh), sorted((graph.carried or {}).values())
    stage = StageLiveness(layer, model, mesh, Liveness(graph, model, mesh, backend, donated))
    rows = (*stage.stored_row(*owned), stage.copies_row(_computed_from(layer, owned[0])))

    def bound(of: ByteRates) -> float:
        price = weighted_sum("price", *zip((of.state, of.sums, of.copies), rows, strict=True))
        return fixed + _least(penalised(model.problem, price, 1.0), effort) + price.constant

    return [bound(of) for of in rates]


def _computed_from(layer: StageGraph, arguments: frozenset[int]) -> frozenset[int]:
    """These arguments of the step as values of the graph, and results of the prologue that depend on them alone."""
    values = {layer.arguments[v] for v in arguments if v in layer.arguments}
    for i in layer.programs.get(BEGIN, ()):
        op = layer.graph.by_index[i]
        reads = [a for a in op.inputs if isinstance(a, int)]
        if reads and all(a in values for a in reads):
            values.update(op.outputs)
    return frozenset(values)


def _least(problem: Problem, effort: BoundEffort) -> float:
    """Lower bound (s) on all plans of a problem."""
    solution = optimize(problem, gap=2 * effort.until, until=effort.until, largest=effort.largest, fold=False, rounds=0)
    return max(solution.lower_bound, 0.0)


@dataclass(frozen=True, eq=False)
class _LayerProblems:
    """A layer cut off as a stage on a mesh, as problems in which what it shares with others costs nothing.

    Attributes:
        layer: the layer.
        mesh: the mesh.
        rules: of its operations.
    """

    layer: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]

    @cached_property
    def grouping(self) -> Grouping:
        return op_groups.group(self.layer.graph, self.rules, self.mesh, surroundings=surroundings_of(self.layer))

    def whole(self, *, once: bool) -> Model:
        """All passes; `once`: with what runs once per step."""
        return self._without(frozenset(), once=once)

    @cached_property
    def forward(self) -> Model:
        """The forward pass alone, without copies of state that it shares with other passes."""
        return self._without(self._passes - self._forward, once=False)

    def rest(self, *, once: bool) -> Model:
        """The rest, with as much of the forward pass as residuals are computed from; `once` as for `whole`."""
        return self._without(self._forward - _repeated(self.layer, rewrite.FULL).ops, once=once)

    @cached_property
    def updates(self) -> Model:
        """What runs once per step alone."""
        return self._without(self._passes, once=True)

    @property
    def least_of_ops(self) -> Iterator[tuple[int, float]]:
        """Operations with the least seconds per step that each takes in any layout."""
        for group in self.grouping.groups:
            if group.op >= 0 and group.op not in self.grouping.free:
                yield group.op, float(group.strategies.cost.min()) * group.weight

    @property
    def _forward(self) -> frozenset[int]:
        return frozenset(self.layer.programs.get("F", ()))

    @cached_property
    def _passes(self) -> frozenset[int]:
        return frozenset(i for i in self.layer.graph.by_index if self.layer.program_of(i) in PASS_KINDS)

    def _without(self, free: frozenset[int], *, once: bool) -> Model:
        """The problem where these operations cost nothing either, nor what they read.

        `once`: otherwise nothing costs anything that runs once per step, copies of state that passes share included.
        """
        layer = self.layer
        free = free if once else free | (frozenset(layer.graph.by_index) - self._passes)
        model = intra_op.build(layer.graph, self.grouping.without(free) if free else self.grouping, self.mesh)
        if once:
            return model
        bindings, executions = self.grouping.bindings, self.grouping.executions
        shared = {copy for v, copy in model.copies.items() if executions(bindings[v]) < layer.microbatches}
        edges = tuple(_at_no_cost(edge) if edge.v in shared else edge for edge in model.problem.edges)
        return replace(model, problem=replace(model.problem, edges=edges))


def _at_no_cost(edge: Edge) -> Edge:
    return replace(edge, table=np.zeros_like(edge.table), key=(*edge.key, -1))


def surroundings_of(layer: StageGraph) -> Surroundings:
    """What a layer, cut off as a stage, shares with other layers.

    Operations that others may compute for it: those of the prologue, those computed cheaply from arguments alone, and
    those computed cheaply from values at most half as large that enter (`autopar.passes.stages.assign`).
    """
    graph = layer.graph
    entering = frozenset(layer.received.values())
    sources: dict[int, frozenset[int]] = {v: frozenset([v]) for v in entering}
    sources.update((v, frozenset[int]()) for v in graph.inputs if v not in entering)
    sources.update((v, frozenset[int]()) for v, _ in graph.constants)
    repeated = set(layer.programs.get(BEGIN, ()))
    for op in graph.ops:
        reads = [a for a in op.inputs if isinstance(a, int)]
        if op.index not in repeated and (not is_cheap(op) or any(a not in sources for a in reads)):
            continue
        read = frozenset[int]().union(*(sources.get(a, frozenset[int]()) for a in reads))
        if op.index in repeated or 2 * _nbytes(layer, read) <= _nbytes(layer, op.outputs):
            sources.update(dict.fromkeys(op.outputs, read))
            repeated.add(op.index)
    return Surroundings(entering, frozenset(layer.sent), frozenset(repeated))


def _in_order(mesh: LogicalMesh) -> Backend:
    """The compiler for a mesh, with operations in the order of the program: a layer runs beside others."""
    return replace(backend_of(mesh.device), runs_eagerly=False)


def _written_residuals(layer: StageGraph, views: frozenset[int], backend: Backend) -> frozenset[int]:
    """Values in memory between the forward and the backward pass of a layer if both are one program.

    What the compiler fuses into both is not, but what it is computed from.
    """
    program = flatten(layer.graph, backend, {}, 1, views)
    lives = lifetimes(program, written(program))
    passes = {i: kind for kind in PASS_KINDS for i in layer.programs.get(kind, ())}
    at = [(moment, passes.get(step.op.index)) for moment, step in enumerate(lives.moments)]
    last = max((moment for moment, kind in at if kind == "F"), default=-1)
    first = min((moment for moment, kind in at if kind in ("B", "W")), default=lives.end)
    values = (*layer.received.values(), *(v for op in layer.graph.ops for v in op.outputs))
    return frozenset(v for v in values if lives.birth.get(v, lives.end) <= last and first <= lives.death[v] < lives.end)


def _repeated(layer: StageGraph, policy: str) -> Recomputation:
    return recomputation(layer, _products(layer, policy))


def _products(layer: StageGraph, policy: str) -> frozenset[int]:
    """Results of products of the forward pass, where a policy for rematerialisation keeps them."""
    if policy != rewrite.DOTS:
        return frozenset()
    forward = (layer.graph.by_index[i] for i in layer.programs.get("F", ()))
    return frozenset(v for op in forward if op.name in ALL_PRODUCTS for v in op.outputs)


def _nbytes(layer: StageGraph, values: Iterable[int]) -> int:
    return sum(layer.graph.types[v].nbytes for v in values)
