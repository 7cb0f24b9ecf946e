"""Why an operation none of whose dimensions can be sharded runs replicated: the reason in a plan's note.

Most of these work along all dimensions that they have. A stack of such operations (`jax.vmap`) does not: in its rule
the stacked dimension is free. An operation without a reason here lacks a rule, and a rule can be registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar import jax_compat
from autopar.ir.graph import Op
from autopar.ir.op_sets import (
    ALL_PRODUCTS,
    ATTENTION,
    CALLBACKS,
    CUMULATIVE_REDUCTIONS,
    INDEX_REDUCTIONS,
    JOINS,
    LAPACK,
    LOGICAL_REDUCTIONS,
    SCATTERS,
    SLICES,
    WINDOW_REDUCTIONS,
)
from autopar.rules import cudnn, pallas, partitioned

UNKNOWN = "no rule says how it may be cut; autopar.register_rule adds one"

_GROUPS: Mapping[str, tuple[str, ...]] = {
    "it runs on the host": (*CALLBACKS, "debug_print"),
    "it orders all of its elements": ("sort", "top_k", "approx_top_k", *INDEX_REDUCTIONS),
    "it runs along its only dimension": CUMULATIVE_REDUCTIONS,
    "it transforms all of its dimensions": ("fft",),
    "it works on a single matrix": (*LAPACK, "cholesky_update", "lu_pivots_to_permutation", "symmetric_product"),
    "it moves elements along every dimension": (
        *(*SLICES, "dynamic_update_slice", *JOINS, "rev", "split", "tile", "reshape", "bitcast_convert_type"),
    ),
    "random access over the only dimension that could be cut": ("gather", *SCATTERS, "scatter-sub"),
    "it contracts all dimensions that could be cut, in its own way": (
        *("reduce", *LOGICAL_REDUCTIONS, "reduce_xor", "reduce_window", *WINDOW_REDUCTIONS),
        *ALL_PRODUCTS,
    ),
    "it draws its elements one after the other": ("random_gamma", "rng_uniform", "rng_bit_generator"),
    "XLA gathers what it reads in types of 8 bytes": ("select_and_scatter_add",),
}

#: Operation -> why no dimension of it can be cut.
REASONS: Mapping[str, str] = MappingProxyType({name: reason for reason, names in _GROUPS.items() for name in names})


def reason(operation: Op) -> str:
    """Why an operation that cannot be sharded runs replicated."""
    if operation.name == "pallas_call":
        return f"{pallas.obstacles(operation.params)}; autopar.register_rule adds a rule"
    if operation.name == "custom_partitioning":
        why = "; ".join(partitioned.analyse(operation.params).obstacles) or "its rule has no factor to cut"
        return f"{partitioned.name(operation.params)}: {why}"
    if operation.name in ATTENTION:
        shapes = [jax_compat.shape_of(v) for v in operation.equation.invars]
        obstacles = cudnn.obstacles(operation.name, operation.params, shapes)
        return "; ".join(dict.fromkeys(obstacles.values())) or "it has one example and one head of keys"
    return REASONS.get(operation.name, UNKNOWN)
