"""Where a function can have kept a value: reached through closures, globals, objects, classes; not through packages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.side_effects import find

KEPT = object()
HOLDER: dict[str, Any] = {"list": [(1, KEPT)]}


@dataclass
class Model:
    weights: dict[str, Any] = field(default_factory=dict)

    def step(self) -> None: ...


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Strange:
    """What it is asked for by name, it computes, and cannot."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Cached:
    cache = Slotted(KEPT)


def calls_another() -> Any:
    def inner() -> Any:
        return HOLDER

    return inner()


def closes_over(value: Any) -> Callable[[], Any]:
    return lambda: value


FOUND: dict[str, Any] = {
    "closure": closes_over([KEPT]),
    "global of a function inside": calls_another,
    "object of a method": Model({"w": [KEPT]}).step,
    "argument of a partial": functools.partial(np.sum, Slotted(KEPT)),
    "class": closes_over(Cached),
    "behind an array of JAX": closes_over([jnp.ones(2), Strange(KEPT)]),
    "wrapped": functools.wraps(calls_another)(closes_over(None)),
}
NOT_FOUND: dict[str, Any] = {
    "another value": closes_over([object()]),
    "another object": Model().step,
    "module": closes_over(functools),
    "function of a package": closes_over(np.linalg.svd),
}


@pytest.mark.parametrize("root", FOUND.values(), ids=FOUND.keys())
def test_reachable_values_are_found(root: Any) -> None:
    assert find(root, lambda x: x is KEPT) is KEPT


@pytest.mark.parametrize("root", NOT_FOUND.values(), ids=NOT_FOUND.keys())
def test_unreachable_values_are_not_found(root: Any) -> None:
    assert find(root, lambda x: x is KEPT) is None
