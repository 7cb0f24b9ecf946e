"""The forms of parallelism of a plan (`autopar.plans.forms`) in a sentence.

    data parallel over x (32 ways); tensor parallel over y (8 ways: columns of weights, rows of weights); ...

A form is told if it has a twentieth of the FLOPs. The state is compared with the axes that have data parallelism:

    weights sharded          ZeRO-3, FSDP; without those that products read in parts, as weights of experts
    optimizer state sharded  ZeRO-2 if gradients are reduce-scattered, else ZeRO-1    -> _sharded_state

Two names depend on what else there is along an axis                                  -> _name

    sequence     context parallel, if attention shards the sequence as well (Liu et al., 2023)
    heads        sequence parallel, if no weight is sharded: the sequence of attention is exchanged for heads
                 (Jacobs et al., 2023, DeepSpeed Ulysses)

ZeRO: Rajbhandari et al. (2020).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import groupby

from autopar.ir.keyed import grouped, totals
from autopar.ir.train_state import of_parameter
from autopar.plans.forms import WHOLE_WEIGHTS, largest
from autopar.plans.record import PlanRecord
from autopar.plans.views.groups import sections

#: Form -> its name, and what is said of it besides.
NAMES: Mapping[str, tuple[str, ...]] = {
    "data": ("data parallel",),
    "columns": ("tensor parallel", "columns of weights"),
    "rows": ("tensor parallel", "rows of weights"),
    "batch rows": ("tensor parallel", "rows of weights", "batch sharded between products"),
    "scattered rows": ("tensor parallel", "rows of weights", "sequence parallel between products"),
    "heads": ("tensor parallel", "attention by heads"),
    "expert": ("expert parallel",),
    "sequence": ("sequence parallel",),
    "context": ("context parallel",),
    "ring": ("context parallel", "keys and values in a ring"),
    "contraction": ("tensor parallel", "features of activations"),
    "features": ("tensor parallel", "features of activations"),
}
SHARDED_WEIGHTS = ("columns", "rows", "batch rows", "scattered rows")
LEAST_SHARE = 0.05  # of the FLOPs of a form that is told, or of the elements of sharded state
LEAST_ATTENTION = 0.005  # the same of attention by heads: attention has few of the FLOPs of a wide model
MOST_SHARE = 0.9  # a share from which on it is not told


def describe(plan: PlanRecord) -> str:
    """The forms of parallelism of a plan in a sentence."""
    return "; ".join([*_stages(plan), *_axes(plan), *_sharded_state(plan), *_memory_savings(plan)])


def _axes(plan: PlanRecord) -> Iterator[str]:
    """The forms of all axes; neighbouring axes with the same forms are told together."""
    axes_with_forms = [axis for axis in plan.mesh_names if axis in plan.forms]
    for (names, details), group in groupby(axes_with_forms, key=lambda axis: _named(plan.forms[axis])):
        axes = list(group)
        over = f"over {listed(axes)}"
        ways = f"{_ways(plan, axes)} ways"
        if not names:
            yield f"computation replicated {over} ({ways})"
        else:
            alone = len(names) == 1 and names[0][1] >= 100 * MOST_SHARE
            shares = [name if alone else f"{name} ({share}%)" for name, share in names]
            yield f"{listed(shares)} {over} ({': '.join([ways, *filter(None, [', '.join(details)])])})"


def listed(parts: Sequence[str]) -> str:
    """Parts of a sentence with commas and an "and"."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _ways(plan: PlanRecord, axes: Sequence[str]) -> str:
    """The number of devices along axes; in a pipeline inside stages: "4", or "4 to 8" of different submeshes."""
    counts = sorted({math.prod(stage.submesh.get(axis, 1) for axis in axes) for stage in plan.stages})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _named(shares: Mapping[str, float]) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """The names of forms with their shares in percent, the largest first, and the details that are said of them.

    The share of a form that is nearly all is told as 100.
    """
    of_name = totals((_name(form, shares), share) for form, share in shares.items())
    names = {name: share for name, share in of_name.items() if share >= LEAST_SHARE}
    described = [
        form
        for form, share in shares.items()
        if share >= (LEAST_ATTENTION if form == "heads" else LEAST_SHARE) and _name(form, shares) in names
    ]
    details = tuple(sorted({detail for form in described for detail in NAMES[form][1:]}))
    ranked = sorted(names, key=lambda name: -names[name])
    if len(ranked) == 1 and names[ranked[0]] >= MOST_SHARE:
        return ((ranked[0], 100),), details
    return tuple((name, round(100 * names[name])) for name in ranked), details


def _name(form: str, shares: Mapping[str, float]) -> str:
    """The name of a form along an axis with such shares."""
    over_positions = shares.get("context", 0.0) + shares.get("ring", 0.0)
    if form == "sequence" and over_positions > shares.get("heads", 0.0):
        return NAMES["context"][0]
    sharded = sum(shares.get(other, 0.0) for other in SHARDED_WEIGHTS)
    if form == "heads" and sharded < LEAST_SHARE <= shares.get("sequence", 0.0):
        return NAMES["sequence"][0]
    return NAMES[form][0]


def _stages(plan: PlanRecord) -> list[str]:
    microbatches = f"{plan.num_microbatches} microbatch{'es' * (plan.num_microbatches > 1)}"
    if not plan.pipelined:
        return [microbatches] if plan.num_microbatches > 1 else []
    ranks = len({stage.rank for stage in plan.stages})
    on = "" if ranks == len(plan.stages) else f" on {ranks} submeshes"
    return [f"{len(plan.stages)} stages{on}, {microbatches}, schedule {plan.schedule}"]


def _sharded_state(plan: PlanRecord) -> Iterator[str]:
    """The stage of ZeRO along the axes that leave weights whole; axes that share a text are told together."""
    shares = {axis: plan.forms.get(axis, {}) for axis in plan.mesh_names}
    whole = [(i, axis) for i, (axis, of) in enumerate(shares.items()) if not of or largest(of) in WHOLE_WEIGHTS]
    texts = grouped((text, axis) for i, axis in whole for text in _sharded_along(plan, i, axis))
    yield from (text.format(listed(axes)) for text, axes in texts.items())


def _sharded_along(plan: PlanRecord, number: int, axis: str) -> Iterator[str]:
    """What is sharded along an axis and gathered where it is read; "{}" is the place of the axis."""
    members = sections(plan)
    parameters = members.get("parameters and other state", ())
    in_parts = {i for i in parameters if i in plan.read_in_parts.get(axis, ())}
    paths = {plan.input_paths[i].partition("params/")[2]: i for i in parameters}
    owned = {i: of_parameter(plan.input_paths[i], paths) for i in members.get("optimizer state", ())}
    in_parts |= {i for i, parameter in owned.items() if parameter and paths[parameter[1]] in in_parts}
    weights = _share(plan, parameters, number, in_parts)
    optimizer = _share(plan, members.get("optimizer state", ()), number, in_parts)
    if weights >= LEAST_SHARE:
        yield f"{_of(weights)}weights sharded over {{}} (FSDP, ZeRO-3)"
    if optimizer >= LEAST_SHARE and optimizer > weights + LEAST_SHARE:
        zero = 2 if _scatters(plan, axis) else 1
        yield f"{_of(optimizer)}optimizer state sharded over {{}} (ZeRO-{zero})"


def _of(share: float) -> str:
    return "" if share >= MOST_SHARE else f"{share:.0%} of the "


def _share(plan: PlanRecord, members: Sequence[int], axis: int, in_parts: Container[int]) -> float:
    """Share of the elements of these leaves that is in leaves sharded along an axis, those read in parts left out."""
    sizes = {i: math.prod(plan.input_shapes[i]) for i in members}
    whole = sum(sizes.values())
    sharded = sum(n for i, n in sizes.items() if plan.inputs[i][axis] >= 0 and i not in in_parts)
    return sharded / whole if whole else 0.0


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
