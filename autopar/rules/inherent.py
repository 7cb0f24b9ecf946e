"""Why an operation none of whose dimensions can be sharded runs replicated: the reason in a plan's note.

Most of these work along all dimensions that they have. A stack of such operations (`jax.vmap`) does not: in its rule
the stacked dimension is free. An operation without a reason here lacks a rule, and a rule can be registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

UNKNOWN = "no rule says how it may be cut; autopar.register_rule adds one"

_GROUPS: Mapping[str, tuple[str, ...]] = {
    "it runs on the host": ("pure_callback", "io_callback", "debug_callback", "debug_print"),
    "it is cut by the program's own shard_map": ("shard_map",),
    "it orders all of its elements": ("sort", "top_k", "approx_top_k", "argmax", "argmin"),
    "it runs along its only dimension": ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    "it transforms all of its dimensions": ("fft",),
    "it works on a single matrix": (
        *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu"),
        *("lu_pivots_to_permutation", "qr", "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal"),
        *("tridiagonal_solve", "custom_linear_solve"),
    ),
    "it moves elements along every dimension": (
        *("slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "rev", "split", "tile", "reshape"),
        "bitcast_convert_type",
    ),
    "random access over the only dimension that could be cut": (
        *("gather", "scatter", "scatter-add", "scatter_mul", "scatter_min", "scatter_max", "scatter-mul"),
        *("scatter-min", "scatter-max", "scatter_sub", "scatter-sub"),
    ),
    "it contracts all dimensions that could be cut, in its own way": (
        *("reduce", "reduce_and", "reduce_or", "reduce_xor", "reduce_window", "reduce_window_sum", "reduce_window_max"),
        *("reduce_window_min", "select_and_gather_add", "dot_general", "ragged_dot", "ragged_dot_general"),
    ),
    "it draws its elements one after the other": ("random_gamma", "rng_uniform", "rng_bit_generator"),
    "XLA gathers what it reads in types of 8 bytes": ("select_and_scatter_add",),
    "XLA gathers what convolutions in groups read": ("conv_general_dilated",),
}

#: Operation -> why no dimension of it can be cut.
REASONS: Mapping[str, str] = MappingProxyType({name: reason for reason, names in _GROUPS.items() for name in names})


def reason(operation: str) -> str:
    """Why an operation that cannot be sharded runs replicated."""
    return REASONS.get(operation, UNKNOWN)
