"""Strategies by name, expanded to ordinary pins of one step on one mesh.

    "data_parallel", "zero1", "fsdp"    batch and state over an axis            -> autopar/passes/strategies/data.py
    "megatron"                          pairs of products over an axis          -> autopar/passes/strategies/tensor.py

    pins={"fsdp": P("data"), "megatron": P("model"), "params/embed": P()}

Each strategy gives an axis to at most one dimension of every leaf and value. Several strategies share a leaf: each adds
its own axis. A dimension that tensor parallelism cuts is not cut again for the sake of memory, so that it comes first
-> STRATEGIES. All other pins come after the strategies, and override them.

Source: Rajbhandari et al. (2020), ZeRO; Shoeybi et al. (2019), Megatron-LM; Xu et al. (2021), GSPMD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import PinError
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.passes.op_groups.constraints import Pins
from autopar.passes.op_groups.pin_keys import STRATEGY_NAMES, matches
from autopar.passes.strategies.cuts import Cut, Cuts, Step
from autopar.passes.strategies.data import data_parallel, fsdp, zero1
from autopar.passes.strategies.tensor import megatron
from autopar.rules import Rule

Strategy = Callable[[Step, str, int, Cuts], Cut]
"""(step, name of the axis for messages, its size, what strategies before it cut) -> what it cuts."""

#: Name -> strategy, in the order in which they choose dimensions.
STRATEGIES: Mapping[str, Strategy] = dict(zip(STRATEGY_NAMES, (megatron, fsdp, zero1, data_parallel), strict=True))


def names_strategy(key: str, graph: Graph) -> bool:
    """Whether a key of pins is the name of a strategy, and no path."""
    return key in STRATEGIES and not matches(key, graph)


def expand(
    pins: Mapping[str, Any],
    graph: Graph,
    mesh: LogicalMesh,
    rules: Callable[[], Mapping[int, Rule]],
    batch: Sequence[int] | None = None,
) -> Pins:
    """The pins with those of strategies in place of their names, first.

    Args:
        pins: key -> spec; of a strategy, the spec names the axis.
        graph: the step.
        mesh: the mesh to plan for.
        rules: makes the rules of its operations.
        batch: positions of the argument leaves that hold the batch; None: inferred.

    Raises:
        PinError: a strategy names an axis that the mesh lacks, or fits no leaf of the step.
    """
    named = {key: axes_of(key, pins[key]) for key in STRATEGIES if key in pins and names_strategy(key, graph)}
    if not named:
        return pins
    step, cuts = Step(graph, rules(), batch), Cuts({}, {})
    for key, axes in named.items():
        _check_axes(key, axes, mesh)
        size = math.prod(mesh.shape[axis] for axis in axes)
        cuts = cuts.merged(STRATEGIES[key](step, f"{key}({_text(axes)})", size, cuts), axes, mesh.names)
    rest = {key: spec for key, spec in pins.items() if key not in named}
    expanded = cuts.pins(step)
    return {**{key: spec for key, spec in expanded.items() if key not in rest}, **rest}


def axes_of(key: str, spec: Any) -> tuple[str, ...]:
    """The axes of a strategy, from a spec of one entry. Raises PinError."""
    entries = tuple(spec.spec if isinstance(spec, NamedSharding) else spec) if _is_spec(spec) else ()
    if len(entries) != 1 or not entries[0] or entries[0] is PartitionSpec.UNCONSTRAINED:
        raise PinError(f"pin '{key}' is a strategy, and takes one mesh axis, as in P('data'); it is {spec!r:.60}")
    return entries[0] if isinstance(entries[0], tuple) else (entries[0],)


def _is_spec(spec: Any) -> bool:
    return isinstance(spec, PartitionSpec | NamedSharding)


def _check_axes(key: str, axes: Sequence[str], mesh: LogicalMesh) -> None:
    missing = [axis for axis in axes if axis not in mesh.names]
    if missing:
        raise PinError(f"pin '{key}': axis '{missing[0]}' not found. Mesh axes: {', '.join(mesh.names)}")


def _text(axes: Sequence[str]) -> str:
    return ", ".join(map(repr, axes))
