"""Which forms of parallelism the layouts of a program amount to, in the field's terms.

Each mesh axis shards at most one factor of each product (a dot, a convolution, fused attention) of the forward pass.
The factor says which form of parallelism that is:

    factor                                                  form              source
    comes from the batch                                    data              -> batch_dimensions
    a free dimension of the weight, groups of a convolution columns           tensor parallel, Megatron [1], 3
    contracted, with a weight                               rows              tensor parallel, Megatron [1], 3
    the same, the result reduce-scattered along the batch   batch rows        tensor parallel
    the same, along another dimension of the activation     scattered rows    sequence parallel, Megatron [3], 4.2
    a batch dimension of two activations                    heads             tensor parallel, Megatron [1], 3
    the heads of fused attention                            heads             the same
    the positions of queries in fused attention             context           Ring attention [4]
    the same, with keys and values passed round             ring              Ring attention [4]
    a batch dimension of an activation and a weight         expert            GShard [2], 3
    the experts in products that dispatch and combine       expert            GShard [2], 3   -> expert_dimensions
    a free dimension of the activation, beside a weight     sequence          GSPMD [5], 5.1
    the sequence in a product of two activations            context           Ring attention [4]  -> sequence_dimensions
    another dimension of two activations, contracted        contraction
    another dimension of one of them                        features

The share of a form is that of its products in the FLOPs of all products of the forward pass: on one mesh of the
program, in a pipeline of all stages                                              -> Parallelism.forms

A parameter that products read in parts along an axis is sharded for the sake of these products. One that is stored in
parts and read whole is gathered, as in FSDP                                      -> Parallelism.read_in_parts

[1] Shoeybi et al. (2019), Megatron-LM. [2] Lepikhin et al. (2020), GShard. [3] Korthikanti et al. (2022), Reducing
activation recomputation in large transformer models. [4] Liu et al. (2023), Ring attention. [5] Xu et al. (2021),
GSPMD.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar import jax_compat
from autopar.cost_models.flops import work
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.layout import Layout
from autopar.ir.op_sets import ALL_PRODUCTS, ATTENTION
from autopar.passes.microbatch.batch import infer_batch
from autopar.passes.microbatch.batch_dimensions import propagated
from autopar.passes.microbatch.states import Split, State
from autopar.passes.stages.plan import StagePlan
from autopar.passes.stages.plan_all import PlannedStage, StagePlans
from autopar.plans.dimensions import CONVOLUTION, Dimensions, expert_dimensions, sequence_dimensions, weight_leaves
from autopar.plans.record import Stage
from autopar.plans.views.groups import without_numbers
from autopar.rules import Rule, cudnn

FORMS = (
    *("data", "columns", "rows", "batch rows", "scattered rows", "heads", "expert", "sequence", "context"),
    *("ring", "contraction", "features"),
)
#: Forms under which a weight is whole for a product, so that one stored in parts is gathered.
WHOLE_WEIGHTS = ("data", "sequence", "context", "ring")
DIGITS = 4  # of shares: a plan is to be small

Forms = Mapping[str, Mapping[str, float]]
"""Mesh axis of more than one device -> form -> share of the FLOPs of the forward pass's products."""


@dataclass(frozen=True)
class Parallelism:
    """The parallelism of a program, or of all stages.

    Attributes:
        forms: the forms of parallelism along each axis.
        read_in_parts: mesh axis whose largest form is one of `WHOLE_WEIGHTS` -> positions of the argument leaves that
            products read in parts along it nevertheless.
    """

    forms: Forms
    read_in_parts: Mapping[str, tuple[int, ...]]


def mesh_parallelism(graph: Graph, stage: Stage, rules: Mapping[int, Rule]) -> Parallelism:
    """The parallelism of a program.

    Args:
        graph: the program that is executed. Products that are computed again count once.
        stage: its layouts.
        rules: signature of an operation -> its sharding rule.
    """
    batch = dict.fromkeys((graph.inputs[i] for i in infer_batch(graph)), frozenset({0}))
    products = _products(graph, stage, rules, batch, graph.walk())
    forms = _weighed([products])
    read = {axis: {v for v, a in products.read if a == axis} for axis in _with_whole_weights(forms)}
    positions = {axis: tuple(i for i, v in enumerate(graph.inputs) if v in values) for axis, values in read.items()}
    return Parallelism(forms, _filled(positions))


def pipeline_parallelism(
    plans: StagePlans[PlannedStage], stages: Sequence[Stage], arguments: Sequence[int], paths: Sequence[str]
) -> Parallelism:
    """The parallelism inside the stages of a pipeline; axes of stages of different submeshes are one.

    Args:
        plans: the planned stages. Of isomorphic ones the first has the graph, and counts for all.
        stages: their layouts.
        arguments: values of the argument leaves of the step.
        paths: of the argument leaves.
    """
    states, products = plans.stages.split.states, dict[str, _StageProducts]()
    for planned, stage in zip(plans.plans, stages, strict=True):
        if not isinstance(planned, StagePlan) or stage.graph_hash in products:
            continue
        program = planned.graph
        batch = {
            v: dims for value, v in {**program.blocks, **program.received}.items() if (dims := _split(states, value))
        }
        forward = (op for i in program.programs["F"] for op in program.graph.by_index[i].walk())
        products[stage.graph_hash] = _products(program.graph, stage, planned.rules, batch, forward)
    forms = _weighed([products[stage.graph_hash] for stage in stages if stage.graph_hash in products])
    # arguments of isomorphic stages correspond by their paths but for the numbers of layers
    position = {value: i for i, value in enumerate(arguments)}
    read: set[tuple[str, str, str]] = set()
    for planned, stage in zip(plans.plans, stages, strict=True):
        if isinstance(planned, StagePlan):
            of_step = {v: value for value, v in planned.graph.arguments.items() if value in position}
            in_stage = products[stage.graph_hash].read
            read |= {
                (axis, stage.graph_hash, without_numbers(paths[position[of_step[v]]]))
                for v, axis in in_stage
                if v in of_step
            }
    positions = {
        axis: tuple(
            sorted(i for s in stages for i in s.arguments if (axis, s.graph_hash, without_numbers(paths[i])) in read)
        )
        for axis in _with_whole_weights(forms)
    }
    return Parallelism(forms, _filled(positions))


def _with_whole_weights(forms: Forms) -> list[str]:
    return [axis for axis, shares in forms.items() if largest(shares) in WHOLE_WEIGHTS]


def _filled(positions: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    return {axis: leaves for axis, leaves in positions.items() if leaves}


def _split(states: Mapping[int, State], value: int) -> frozenset[int]:
    """The dimension of a value along which microbatches are blocks of it."""
    state = states.get(value)
    return frozenset({state.dim}) if isinstance(state, Split) else frozenset()


@dataclass(frozen=True)
class _StageProducts:
    """The products of a forward pass.

    Attributes:
        flops: in all.
        totals: FLOPs by mesh axis of more than one device and form.
        read: (argument, mesh axis): an argument that products read in parts along the axis.
    """

    flops: float
    totals: Mapping[str, Mapping[str, float]]
    read: frozenset[tuple[int, str]]


def _products(
    graph: Graph, stage: Stage, rules: Mapping[int, Rule], batch: Mapping[int, frozenset[int]], ops: Iterable[Op]
) -> _StageProducts:
    """Classifies the products of the forward pass among some operations.

    `batch`: values that come from the batch -> their dimensions that do.
    """
    from_batch = propagated(graph, rules, batch)
    sequence, experts = sequence_dimensions(graph, rules, batch), expert_dimensions(graph, rules, from_batch)
    products, leaves = _Products(stage, rules, from_batch, sequence, experts), weight_leaves(graph, from_batch)
    totals: dict[str, dict[str, float]] = {axis: {} for axis, size in stage.submesh.items() if size > 1}
    flops, read = 0.0, set[tuple[int, str]]()
    for op in ops:
        classified = op.name in (*ALL_PRODUCTS, *ATTENTION) and op.phase == "forward"
        if classified and not jax_compat.is_rematted(op.name_stack):
            amount = work(graph, op) * graph.runs[op.index]
            flops += amount
            for number, axis in enumerate(stage.submesh):
                if axis in totals:
                    form = products.form(op, number)
                    totals[axis][form] = totals[axis].get(form, 0.0) + amount
                    parts = products.operands_in_parts(op, number)
                    read.update((leaves[v], axis) for v in parts if v in leaves)
    return _StageProducts(flops, totals, frozenset(read))


def _weighed(stages: Sequence[_StageProducts]) -> Forms:
    """Shares of forms in the FLOPs of all stages that have an axis."""
    forms: dict[str, Mapping[str, float]] = {}
    for axis in dict.fromkeys(axis for stage in stages for axis in stage.totals):
        with_axis = [stage for stage in stages if axis in stage.totals]
        flops = sum(stage.flops for stage in with_axis)
        sums = {form: sum(stage.totals[axis].get(form, 0.0) for stage in with_axis) for form in FORMS}
        if flops:
            forms[axis] = {form: round(amount / flops, DIGITS) for form, amount in sums.items() if amount}
    return forms


def largest(shares: Mapping[str, float]) -> str:
    """The form with the most FLOPs, the first of `FORMS` of several; "" if everything is replicated."""
    return max((form for form in FORMS if form in shares), key=lambda form: shares[form], default="")


# Products


@dataclass(frozen=True, eq=False)
class _Products:
    """Classifies products.

    Attributes:
        stage: the layouts.
        rules: signature of an operation -> its sharding rule.
        batch, sequence, experts: dimensions of values that come from the batch, from a sequence, and of experts.
    """

    stage: Stage
    rules: Mapping[int, Rule]
    batch: Dimensions
    sequence: Dimensions = field(default_factory=dict[int, frozenset[int]])
    experts: Dimensions = field(default_factory=dict[int, frozenset[int]])

    def form(self, op: Op, axis: int) -> str:
        """The form of parallelism of a product along a mesh axis, a key of `FORMS`; "" if it is replicated."""
        rule = self.rules[op.signature]
        factor = self._factor(op, rule, axis)
        if factor is None:
            return ""
        if self._is_from(self.batch, op, rule, factor):
            return "data"
        if op.name in ATTENTION:
            over_positions = "ring" if op.tag in self.stage.rings else "context"
            return over_positions if factor == cudnn.POSITIONS else "heads"
        holders = [k for k, dims in enumerate(rule.operands) if factor in dims]
        weights = [_value(atom) not in self.batch for atom in op.inputs]
        in_result = factor in rule.results[0]
        if any(weights):
            if len(holders) == 2:
                if not in_result:
                    return self._rows(op, rule, axis)
                return "columns" if op.name == CONVOLUTION else "expert"
            return "columns" if weights[holders[0]] else "sequence"
        if len(holders) == 2 and in_result:
            return "heads"
        if self._is_from(self.experts, op, rule, factor):
            return "expert"
        if self._is_from(self.sequence, op, rule, factor):
            return "context"
        return "contraction" if len(holders) == 2 else "features"

    def operands_in_parts(self, op: Op, axis: int) -> list[int]:
        """The operands of a product that are read in parts along a mesh axis."""
        layouts = [(_value(atom), self._operand(op, k)) for k, atom in enumerate(op.inputs)]
        return [value for value, layout in layouts if layout is not None and layout[axis] >= 0]

    def _is_from(self, dimensions: Dimensions, op: Op, rule: Rule, factor: int) -> bool:
        """Whether a factor is one of the given dimensions in an operand of a product."""
        pairs = zip(op.inputs, rule.operands, strict=True)
        return any(factor in dims and dims.index(factor) in dimensions.get(_value(atom), ()) for atom, dims in pairs)

    def _rows(self, op: Op, rule: Rule, axis: int) -> str:
        """The form of a product with a contracted factor, by what its partial sums become."""
        result = self.stage.values.get(op.outputs[0])
        if result is None or result[axis] < 0:
            return "rows"
        if result[axis] in self.batch.get(op.outputs[0], ()):
            return "batch rows"
        activation = next((k for k, atom in enumerate(op.inputs) if _value(atom) in self.batch), 0)
        return "scattered rows" if rule.results[0][result[axis]] in rule.operands[activation] else "rows"

    def _factor(self, op: Op, rule: Rule, axis: int) -> int | None:
        """The factor that an axis shards: that of an operand as it is read, else that of the result.

        A reduction may leave its result sharded along another factor, so the operands come first.
        """
        for k, dims in enumerate(rule.operands):
            layout = self._operand(op, k)
            if layout is not None and layout[axis] >= 0:
                return dims[layout[axis]]
        result = self.stage.values.get(op.outputs[0])
        return None if result is None or result[axis] < 0 else rule.results[0][result[axis]]

    def _operand(self, op: Op, k: int) -> Layout | None:
        return self.stage.uses.get(f"{op.tag}.in{k}", self.stage.values.get(_value(op.inputs[k])))


def _value(atom: Atom) -> int:
    return atom if isinstance(atom, int) else -1
