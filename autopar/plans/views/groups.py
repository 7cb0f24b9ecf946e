"""The argument leaves of a plan in groups: by their role in a step, and by equal layers.

"params/blocks/0/w" and "params/blocks/1/w", of one type and layout    one group
"opt/0/mu/blocks/0/w"                                                  of its parameter, if sharded alike
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from autopar.ir.train_state import is_optimizer_state, of_parameter
from autopar.plans.record import PlanRecord, Stage


def sections(plan: PlanRecord) -> Mapping[str, tuple[int, ...]]:
    """Title -> argument leaves, in their order; empty sections are left out."""
    leaves_by_title: dict[str, list[int]] = {
        "parameters and other state": [],
        "optimizer state": [],
        "other arguments": [],
    }
    state = {*plan.state, *plan.donated}
    for i, path in enumerate(plan.input_paths):
        leaves_by_title[_title(i in state, is_optimizer_state(path))].append(i)
    return {title: tuple(members) for title, members in leaves_by_title.items() if members}


def _title(state: bool, optimizer: bool) -> str:
    return "other arguments" if not state else "optimizer state" if optimizer else "parameters and other state"


def argument_groups(plan: PlanRecord, members: Sequence[int]) -> Mapping[tuple[str, ...], Sequence[int]]:
    """The leaves by what they have in common: path but for layer numbers, type, layout, stage and memory.

    Leaves of the optimizer that are sharded as their parameters are one group, whose key has two entries.
    """
    parameter = _like_parameters(plan, members)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in members:
        path = without_numbers(plan.input_paths[i])
        hosted = host(plan, i)
        stage = owner(plan, i)
        same = path, plan.input_types[i], str(plan.inputs[i]), stage.name if stage else "", hosted
        groups.setdefault((parameter[i], hosted) if i in parameter else same, []).append(i)
    return groups


def without_numbers(path: str) -> str:
    """A path with "*" for layer numbers, which equal layers have in common."""
    return re.sub(r"(?<=/)\d+(?=/|$)", "*", path)


def _like_parameters(plan: PlanRecord, members: Sequence[int]) -> Mapping[int, str]:
    """Leaves of the optimizer that have shape and layout of the parameter they belong to -> their path before it."""
    parameter_by_path = {p.partition("params/")[2]: i for i, p in enumerate(plan.input_paths) if "params/" in p}
    prefix_by_leaf: dict[int, str] = {}
    for i in members:
        if belongs := of_parameter(plan.input_paths[i], parameter_by_path):
            j = parameter_by_path[belongs[1]]
            if (plan.inputs[i], plan.input_shapes[i]) == (plan.inputs[j], plan.input_shapes[j]):
                prefix_by_leaf[i] = belongs[0]
    return prefix_by_leaf


def label(paths: Sequence[str]) -> str:
    """The path that all have in common, with "*" where they differ, and how many there are.

    Of paths of several depths, what they begin with: "opt/0/mu/... x8".
    """
    columns = list(zip(*(path.split("/") for path in paths), strict=False))
    if len({path.count("/") for path in paths}) == 1:
        name = "/".join(parts[0] if len({*parts}) == 1 else "*" for parts in columns)
    else:
        common = itertools.takewhile(lambda parts: len({*parts}) == 1, columns)
        name = "/".join([*(parts[0] for parts in common), "..."])
    return name if len(paths) == 1 else f"{name} x{len(paths)}"


def owner(plan: PlanRecord, i: int) -> Stage | None:
    """The stage of a pipeline that stores an argument; None where none does, and on one mesh."""
    return next((stage for stage in plan.stages if i in stage.arguments), None)


def host(plan: PlanRecord, i: int) -> str:
    return "; in host memory" if i in plan.offloaded else ""
