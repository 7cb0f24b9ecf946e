"""How many operands of a scan are constants and carries, which each release of JAX keeps in its own way.

    0.10    parameters num_consts and num_carry
    0.12    ft_in, a flat tree of (constants, carries, stacked operands), and ft_out, of (carries, stacked results)

Each entry is tried on 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import jax.extend.core as jex

_NAME = "jax._src.flattree"
#: JAX's module of flat trees; None on 0.10.
_flattree: Any = importlib.import_module(_NAME) if importlib.util.find_spec(_NAME) else None
_COUNTS = ("num_consts", "num_carry")
_FLAT_TREES = ("ft_in", "ft_out")


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def scan_equation(equation: jex.JaxprEqn, constants: int, carries: int) -> jex.JaxprEqn:
    """A scan's equation for other numbers of operands, as `scan_counts` reads it; its jaxpr no longer fits."""
    return equation.replace(
        params={**without_flat_trees(equation.params), "num_consts": constants, "num_carry": carries}
    )


def without_flat_trees(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of an equation; those of a scan are as 0.10 has them."""
    if "ft_in" not in params:
        return params
    counts: dict[str, int] = dict(zip(_COUNTS, scan_counts(params), strict=True))
    return _replaced(params, _FLAT_TREES, counts)


def with_flat_trees(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inverse of `without_flat_trees`; a scan's parameters include its jaxpr."""
    if _flattree is None or "num_carry" not in params:  # calls of functions with derivatives have num_consts too
        return params
    (constants, carries), body = scan_counts(params), params["jaxpr"]
    operands = (constants, carries, len(body.in_avals) - constants - carries)
    results = (carries, len(body.out_avals) - carries)
    packed = (_flattree.pack(tuple(map(_flattree.nones, counts))) for counts in (operands, results))
    return _replaced(params, _COUNTS, dict(zip(_FLAT_TREES, packed, strict=True)))


def _replaced(params: Mapping[str, Any], old: tuple[str, str], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters with others in the place of two."""
    parts = (new if key == old[0] else {key: value} for key, value in params.items() if key != old[1])
    return {key: value for part in parts for key, value in part.items()}
