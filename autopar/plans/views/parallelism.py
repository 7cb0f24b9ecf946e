"""Which forms of parallelism a plan has, in the field's terms, recognised from layouts.

Each mesh axis shards at most one factor of each product (a dot or a convolution) of the forward pass. The factor says
which form of parallelism that is:

    factor                                                      form                              source
    comes from the batch                                        data                              -> _batch_dimensions
    a free dimension of the weight                              tensor: columns                   Megatron [1], 3
    contracted, with a weight                                   tensor: rows                      Megatron [1], 3
    the same, the result reduce-scattered along another         tensor: sequence parallel between Megatron [3], 4.2
    a batch dimension of two activations                        tensor: heads                     Megatron [1], 3
    a batch dimension of an activation and a weight             expert                            GShard [2], 3
    a free dimension of the activation, beside a weight         sequence                          GSPMD [5], 5.1
    a free dimension of an activation, beside another           context                           Ring attention [4]

A form is reported for an axis if its products have a twentieth of all FLOPs              -> axis_forms
The state is compared with the axes that have data parallelism:

    weights sharded          ZeRO-3, FSDP [6]
    optimizer state sharded  ZeRO-2 if gradients are reduce-scattered, else ZeRO-1 [6]    -> _sharded_state

[1] Shoeybi et al. (2019), Megatron-LM. [2] Lepikhin et al. (2020), GShard. [3] Korthikanti et al. (2022), Reducing
activation recomputation in large transformer models. [4] Liu et al. (2023), Ring attention. [5] Xu et al. (2021),
GSPMD. [6] Rajbhandari et al. (2020), ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar import jax_compat
from autopar.cost_models.flops import work
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.layout import Layout
from autopar.ir.op_sets import PRODUCTS
from autopar.ir.train_state import match_state
from autopar.plans.record import PlanRecord, Stage
from autopar.plans.views.groups import sections
from autopar.rules import Rule

#: Form -> its name, and what is said of it besides.
FORMS: Mapping[str, tuple[str, str]] = {
    "data": ("data parallel", ""),
    "columns": ("tensor parallel", "columns of weights"),
    "rows": ("tensor parallel", "rows of weights"),
    "scattered rows": ("tensor parallel", "sequence parallel between products"),
    "heads": ("tensor parallel", "attention by heads"),
    "expert": ("expert parallel", ""),
    "sequence": ("sequence parallel", ""),
    "context": ("context parallel", ""),
    "contraction": ("contractions of activations sharded", ""),
}
LEAST_SHARE = 0.05  # of the FLOPs of a form that is reported, or of the bytes of sharded state
MOST_SHARE = 0.9  # a share from which on it is not told
DIGITS = 4  # of shares: a plan is to be small


Forms = Mapping[str, Mapping[str, float]]
"""Mesh axis of more than one device -> form -> share of the FLOPs of the forward pass's products."""


def describe(plan: PlanRecord) -> str:
    """The forms of parallelism of a plan in a sentence."""
    return "; ".join([*_stages(plan), *_axes(plan), *_sharded_state(plan), *_memory_savings(plan)])


def _axes(plan: PlanRecord) -> Iterator[str]:
    """The forms of all axes; neighbouring axes with the same forms are told together."""
    known = [axis for axis in plan.mesh_names if axis in plan.forms]  # JSON does not keep their order
    for (names, details), group in groupby(known, key=lambda axis: _named(plan.forms[axis])):
        axes = list(group)
        over = f"over {' and '.join(axes)}"
        ways = f"{math.prod(plan.mesh[axis] for axis in axes)} ways"
        if not names:
            yield f"everything replicated {over} ({ways})"
        else:
            alone = len(names) == 1 and names[0][1] >= 100 * MOST_SHARE
            shares = [name if alone else f"{name} ({share}%)" for name, share in names]
            yield f"{' and '.join(shares)} {over} ({': '.join([ways, *filter(None, [', '.join(details)])])})"


def _named(shares: Mapping[str, float]) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """The names of forms with their shares in percent, the largest first, and the details that are said of them."""
    told = {form: share for form, share in shares.items() if share >= LEAST_SHARE}
    names: dict[str, float] = {}
    for form, share in told.items():
        names[FORMS[form][0]] = names.get(FORMS[form][0], 0.0) + share
    details = tuple(sorted(detail for form in told if (detail := FORMS[form][1])))
    ranked = sorted(names, key=lambda name: -names[name])
    return tuple((name, round(100 * names[name])) for name in ranked), details


def axis_forms(graph: Graph, stage: Stage, rules: Mapping[int, Rule]) -> Forms:
    """The forms of parallelism of a program.

    Args:
        graph: the program that is executed, rematerialisation and microbatches included.
        stage: its layouts.
        rules: signature of an operation -> its sharding rule.
    """
    products = _Products(stage, rules, _batch_dimensions(graph, rules))
    totals: list[dict[str, float]] = [{} for _ in stage.submesh]
    flops = 0.0
    for op in graph.walk():
        if op.name in PRODUCTS and op.phase == "forward":
            amount = work(graph, op)
            flops += amount
            for axis, total in enumerate(totals):
                form = products.form(op, axis)
                total[form] = total.get(form, 0.0) + amount
    sizes = zip(stage.submesh.items(), totals, strict=True)
    return {axis: _shares(total, flops) for (axis, size), total in sizes if size > 1 and flops}


def largest(shares: Mapping[str, float]) -> str:
    """The form with the most FLOPs, the first of `FORMS` of several; "" if everything is replicated."""
    return max((form for form in FORMS if form in shares), key=lambda form: shares[form], default="")


def _shares(total: Mapping[str, float], flops: float) -> Mapping[str, float]:
    return {form: round(total[form] / flops, DIGITS) for form in FORMS if form in total}


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


def _batch_dimensions(graph: Graph, rules: Mapping[int, Rule]) -> Mapping[int, frozenset[int]]:
    """Value that depends on the batch -> its dimensions that come from the leading dimension of the batch."""
    found = dict.fromkeys(_batch_arguments(graph), frozenset({0}))
    _propagate(graph, graph.ops, rules, found)
    return found


def _batch_arguments(graph: Graph) -> list[int]:
    """Arguments outside of the state whose leading extent is that of the largest of them."""
    state = set(match_state(graph).values())
    leaves = [v for i, v in enumerate(graph.inputs) if i not in state and graph.types[v].rank]
    if not leaves:
        return []
    extent = graph.types[max(leaves, key=lambda v: graph.types[v].size)].shape[0]
    return [v for v in leaves if graph.types[v].shape[0] == extent]


def _propagate(graph: Graph, ops: Sequence[Op], rules: Mapping[int, Rule], found: dict[int, frozenset[int]]) -> None:
    for op in ops:
        if op.regions:
            _propagate_body(graph, op, rules, found)
        elif op.phase == "forward" and any(_value(atom) in found for atom in op.inputs):
            for v, dims in zip(op.outputs, _results(graph, op, rules[op.signature], found), strict=True):
                found[v] = dims


def _results(graph: Graph, op: Op, rule: Rule, found: Mapping[int, frozenset[int]]) -> Iterator[frozenset[int]]:
    """The dimensions of each result that come from the batch."""
    if op.name == "reshape":
        (value,) = (_value(atom) for atom in op.inputs[:1])
        yield _reshaped(graph.types[value].shape, graph.types[op.outputs[0]].shape, found[value])
        return
    factors = {
        dims[d] for atom, dims in zip(op.inputs, rule.operands, strict=True) for d in found.get(_value(atom), ())
    }
    yield from (frozenset(d for d, factor in enumerate(dims) if factor in factors) for dims in rule.results)


def _reshaped(source: Sequence[int], target: Sequence[int], dims: frozenset[int]) -> frozenset[int]:
    """Dimensions of the reshaped array whose strides are within those of the given dimensions."""

    def spans(shape: Sequence[int]) -> list[tuple[int, int]]:
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        return [(stride, stride * extent) for stride, extent in zip(strides, shape, strict=True)]

    sources = [span for d, span in enumerate(spans(source)) if d in dims]
    return frozenset(d for d, (low, high) in enumerate(spans(target)) if any(low < b and a < high for a, b in sources))


def _propagate_body(graph: Graph, op: Op, rules: Mapping[int, Rule], found: dict[int, frozenset[int]]) -> None:
    """Through the body of a loop, twice, so that carries that depend on the batch are known; through other bodies."""
    region = op.regions[-1]
    skipped = len(op.inputs) - len(region.inputs)
    stacked = sum(jax_compat.scan_counts(op.params)) if op.name == "scan" else len(op.inputs)
    for _ in range(2 if op.name in ("scan", "while") else 1):
        for k, value in enumerate(region.inputs):
            outer = op.inputs[k + skipped] if 0 <= k + skipped < len(op.inputs) else None
            if outer is not None and (dims := found.get(_value(outer))) is not None:
                found[value] = frozenset(d - 1 for d in dims if d) if k >= stacked else dims
        _propagate(graph, region.ops, rules, found)
        for v, atom in zip(op.outputs, region.outputs, strict=False):
            if (dims := found.get(_value(atom))) is not None:
                shift = graph.types[v].rank - graph.type_of(atom).rank
                found[v] = frozenset(d + shift for d in dims)
        if op.name == "scan":
            constants, carries = jax_compat.scan_counts(op.params)
            for value, atom in zip(region.inputs[constants:stacked], region.outputs[:carries], strict=True):
                if (dims := found.get(_value(atom))) is not None:
                    found[value] = dims


# State


def _stages(plan: PlanRecord) -> list[str]:
    microbatches = f"{plan.num_microbatches} microbatches"
    if not plan.pipelined:
        return [microbatches] if plan.num_microbatches > 1 else []
    ranks = len({stage.rank for stage in plan.stages})
    on = "" if ranks == len(plan.stages) else f" on {ranks} submeshes"
    return [f"{len(plan.stages)} stages{on}, {microbatches}, schedule {plan.schedule}"]


def _sharded_state(plan: PlanRecord) -> Iterator[str]:
    """The stage of ZeRO along the axes with data parallelism."""
    members = sections(plan)
    for number, axis in enumerate(plan.mesh_names):
        if largest(plan.forms.get(axis, {})) != "data":
            continue
        weights = _share(plan, members.get("parameters and other state", ()), number)
        optimizer = _share(plan, members.get("optimizer state", ()), number)
        if weights >= LEAST_SHARE:
            yield f"{_of(weights)}weights sharded over {axis} (FSDP, ZeRO-3)"
        if optimizer >= LEAST_SHARE and optimizer > weights + LEAST_SHARE:
            zero = 2 if _scatters(plan, axis) else 1
            yield f"{_of(optimizer)}optimizer state sharded over {axis} (ZeRO-{zero})"


def _of(share: float) -> str:
    return "" if share >= MOST_SHARE else f"{share:.0%} of the "


def _share(plan: PlanRecord, members: Sequence[int], axis: int) -> float:
    """Share of the elements of these leaves that is in leaves sharded along an axis."""
    sizes = {i: math.prod(plan.input_shapes[i]) for i in members}
    whole = sum(sizes.values())
    return sum(n for i, n in sizes.items() if plan.inputs[i][axis] >= 0) / whole if whole else 0.0


def _scatters(plan: PlanRecord, axis: str) -> bool:
    """Whether more bytes are reduce-scattered than all-reduced along an axis."""
    sent = {
        kind: math.fsum(c.bytes_sent(plan.mesh) for c in plan.collectives if c.kind == kind and axis in c.axes)
        for kind in ("reduce-scatter", "all-reduce")
    }
    return sent["reduce-scatter"] > sent["all-reduce"]


def _memory_savings(plan: PlanRecord) -> Iterator[str]:
    """Rematerialised layers as ranges, and state in host memory."""
    for policy, run in groupby(enumerate(plan.remat), key=lambda layer: layer[1]):
        layers = [number for number, _ in run]
        if policy != "none":
            span = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
            yield f"{span} recomputed ({policy})"
    if plan.offloaded:
        yield "optimizer state in host memory"
