"""The difference of two arrays, and the share of it that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: dtype -> difference, relative to the magnitude of a leaf, that sums in another order may cause.
# Some thousand units in the last place of float64, a hundred of float32, five of the 16-bit types: a sum of n terms
# in another order differs by about sqrt(n) units, and steps of training carry few digits of bfloat16 at best.
TOLERANCES: Mapping[str, float] = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float16": 5e-3,
    "bfloat16": 3e-2,
}
_OF_LESS_PRECISE = 0.25  # float8 and the like: two or three bits of mantissa


def host(x: Any) -> np.ndarray:
    """The values of an array; for random keys, their key data."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x = jax.random.key_data(x)
    return np.asarray(x)


def is_inexact(x: Any) -> bool:
    """Whether an array holds floating-point or complex numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def magnitude(x: Any) -> float:
    """The largest finite absolute value; 0 for exact types."""
    if not is_inexact(x):
        return 0.0
    values = np.abs(_wide(host(x)))
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


def absolute(first: Any, second: Any) -> float:
    """The largest absolute difference; infinite if one is nan or infinite where the other is not the same."""
    x, y = host(first), host(second)
    if x.shape != y.shape:
        return math.inf
    same = (x == y) | ((x != x) & (y != y))  # nan is what differs from itself
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(_wide(x) - _wide(y)))
    difference = np.nan_to_num(difference, nan=math.inf, posinf=math.inf)
    least = 0.0 if same.all() or is_inexact(second) else 1.0  # large integers may differ by less than a float64 tells
    return float(np.max(difference, initial=least))


def tolerance(dtypes: Iterable[str]) -> float:
    """The tolerance of the least precise of these types; 0 if all are exact."""
    inexact = (name for name in dtypes if name.startswith(("float", "bfloat", "complex")))
    return max((TOLERANCES.get(name, _OF_LESS_PRECISE) for name in inexact), default=0.0)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
