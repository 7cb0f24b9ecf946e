"""How far the results of two runs differ, leaf by leaf.

    difference of a leaf = max |ours - theirs| / scale
    scale                = max |theirs|, or the largest of its kind where the leaf has no digits of its own

A leaf has no digits of its own if it is zero but for rounding: the bias of a key before a softmax, the bias before a
normalisation. It is known by its magnitude beside the largest of its kind (parameters, first moments, second moments),
as in `autopar.bench.equal.case`. Integers, booleans and random keys are equal or infinitely different; so are values
that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from autopar.bench.equal.case import NOISE, NOISE_ELSEWHERE, kind
from autopar.verification.differences import absolute, is_inexact, magnitude
from autopar.verification.differences import host as value

Leaves = Mapping[str, np.ndarray[Any, Any]]


def host(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Path -> value on the host; random keys by their bits."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): value(leaf) for path, leaf in leaves}


def differences(ours: Leaves, theirs: Leaves) -> dict[str, float]:
    """Path -> difference; infinite where a path, a shape or a dtype is another one."""
    scales = _scales(theirs)
    by_path = {path: _difference(ours[path], y, scales[path]) for path, y in theirs.items() if path in ours}
    return by_path | {path: math.inf for path in [*theirs, *ours] if path not in by_path}


def worst(leaf_differences: Mapping[str, float]) -> tuple[float, str]:
    """The largest difference and its path."""
    return max(((v, path) for path, v in leaf_differences.items()), default=(0.0, ""))


def _scales(leaves: Leaves) -> dict[str, float]:
    own = {path: magnitude(x) for path, x in leaves.items()}
    largest: dict[str, float] = {}
    for path, size in own.items():
        largest[kind(path)] = max(largest.get(kind(path), 0.0), size)
    return {
        path: size if size > NOISE.get(kind(path), NOISE_ELSEWHERE) * largest[kind(path)] else largest[kind(path)]
        for path, size in own.items()
    }


def _difference(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], scale: float) -> float:
    distance = absolute(x, y) if x.dtype == y.dtype else math.inf
    if not is_inexact(y):
        return math.inf if distance else 0.0
    return distance / scale if scale else distance
