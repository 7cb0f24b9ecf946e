"""Which forms of parallelism the layouts of a program amount to, in the field's terms.

Each mesh axis shards at most one factor of each product (a dot or a convolution) of the forward pass. The factor says
which form of parallelism that is:

    factor                                                  form              source
    comes from the batch                                    data              -> batch_dimensions
    a free dimension of the weight                          columns           tensor parallel, Megatron [1], 3
    contracted, with a weight                               rows              tensor parallel, Megatron [1], 3
    the same, the result reduce-scattered along another     scattered rows    sequence parallel, Megatron [3], 4.2
    a batch dimension of two activations                    heads             tensor parallel, Megatron [1], 3
    a batch dimension of an activation and a weight         expert            GShard [2], 3
    a free dimension of the activation, beside a weight     sequence          GSPMD [5], 5.1
    a free dimension of an activation, beside another       context           Ring attention [4]
    contracted, of two activations                          contraction

The share of a form is that of its products in the FLOPs of all products of the forward pass: on one mesh of the
program, in a pipeline of all stages                                              -> axis_forms, pipeline_forms

[1] Shoeybi et al. (2019), Megatron-LM. [2] Lepikhin et al. (2020), GShard. [3] Korthikanti et al. (2022), Reducing
activation recomputation in large transformer models. [4] Liu et al. (2023), Ring attention. [5] Xu et al. (2021),
GSPMD.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.flops import work
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.layout import Layout
from autopar.ir.op_sets import PRODUCTS
from autopar.passes.microbatch.analysis import infer_batch
from autopar.passes.microbatch.batch_dimensions import propagated
from autopar.passes.microbatch.states import Split, State
from autopar.passes.stages.plan import StagePlan
from autopar.passes.stages.plan_all import PlannedStage, StagePlans
from autopar.plans.record import Stage
from autopar.rules import Rule

FORMS = ("data", "columns", "rows", "scattered rows", "heads", "expert", "sequence", "context", "contraction")
DIGITS = 4  # of shares: a plan is to be small

Forms = Mapping[str, Mapping[str, float]]
"""Mesh axis of more than one device -> form -> share of the FLOPs of the forward pass's products."""


def axis_forms(graph: Graph, stage: Stage, rules: Mapping[int, Rule]) -> Forms:
    """The forms of parallelism of a program.

    Args:
        graph: the program that is executed, rematerialisation and microbatches included.
        stage: its layouts.
        rules: signature of an operation -> its sharding rule.
    """
    batch = dict.fromkeys((graph.inputs[i] for i in infer_batch(graph)), frozenset({0}))
    return _weighed([_products(graph, stage, rules, batch, graph.walk())])


def pipeline_forms(plans: StagePlans[PlannedStage], stages: Sequence[Stage]) -> Forms:
    """The forms of parallelism inside the stages of a pipeline; axes of stages of different submeshes are one.

    Args:
        plans: the planned stages. Of isomorphic ones the first has the graph, and counts for all.
        stages: their layouts.
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
    return _weighed([products[stage.graph_hash] for stage in stages if stage.graph_hash in products])


def _split(states: Mapping[int, State], value: int) -> frozenset[int]:
    """The dimension of a value along which microbatches are blocks of it."""
    state = states.get(value)
    return frozenset({state.dim}) if isinstance(state, Split) else frozenset()


@dataclass(frozen=True)
class _StageProducts:
    """FLOPs of the products of a forward pass: in all, and by mesh axis of more than one device and form."""

    flops: float
    totals: Mapping[str, Mapping[str, float]]


def _products(
    graph: Graph, stage: Stage, rules: Mapping[int, Rule], batch: Mapping[int, frozenset[int]], ops: Iterable[Op]
) -> _StageProducts:
    """Classifies the products of the forward pass among some operations.

    `batch`: values that come from the batch -> their dimensions that do.
    """
    products = _Products(stage, rules, propagated(graph, rules, batch))
    totals: dict[str, dict[str, float]] = {axis: {} for axis, size in stage.submesh.items() if size > 1}
    flops = 0.0
    for op in ops:
        if op.name in PRODUCTS and op.phase == "forward":
            amount = work(graph, op) * graph.runs[op.index]
            flops += amount
            for number, axis in enumerate(stage.submesh):
                if axis in totals:
                    form = products.form(op, number)
                    totals[axis][form] = totals[axis].get(form, 0.0) + amount
    return _StageProducts(flops, totals)


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
    """Classifies products; `batch`: dimensions of values that come from the batch."""

    stage: Stage
    rules: Mapping[int, Rule]
    batch: Mapping[int, frozenset[int]]

    def form(self, op: Op, axis: int) -> str:
        """The form of parallelism of a product along a mesh axis, a key of `FORMS`; "" if it is replicated."""
        rule = self.rules[op.signature]
        factor = self._factor(op, rule, axis)
        if factor is None:
            return ""
        holders = [k for k, dims in enumerate(rule.operands) if factor in dims]
        if any(rule.operands[k].index(factor) in self.batch.get(_value(op.inputs[k]), ()) for k in holders):
            return "data"
        weights = [_value(atom) not in self.batch for atom in op.inputs]
        has_weight, in_result = any(weights), factor in rule.results[0]
        if len(holders) == 2:
            forms = ("expert", "heads") if in_result else (self._rows(op, rule, axis), "contraction")
            return forms[0] if has_weight else forms[1]
        if weights[holders[0]]:
            return "columns"
        return "sequence" if has_weight else "context"

    def _rows(self, op: Op, rule: Rule, axis: int) -> str:
        """The form of a product with a contracted factor, by what its partial sums become."""
        result = self.stage.values.get(op.outputs[0])
        if result is None or result[axis] < 0 or result[axis] in self.batch.get(op.outputs[0], ()):
            return "rows"
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
