"""Where a function can have kept a value: reached through closures, globals, objects, classes; not through packages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import TraceError
from autopar.ir.arguments import Static
from autopar.ir.side_effects import find
from autopar.ir.trace import trace

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


class Bare:
    """An object without attributes of its own."""

    count = 0


class WithSlots:
    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0


class Lazy:
    def __init__(self) -> None:
        self.width = 8

    @functools.cached_property
    def table(self) -> Any:
        return np.arange(self.width)

    @functools.cached_property
    def traced(self) -> Any:
        return jnp.zeros(self.width)


def traced_with(method: Callable[[Any, Any], Any], x: Any) -> None:
    trace(method, Static(x, by_identity=True), np.ones(8))


@pytest.mark.parametrize("kind", [Bare, WithSlots, Lazy])
@pytest.mark.parametrize("name", ["count", "last"])
def test_an_attribute_that_is_set_while_it_is_traced(kind: Callable[[], Any], name: str) -> None:
    def method(self: Any, x: Any) -> Any:
        setattr(self, name, x if name == "last" else getattr(self, "count", 0) + 1)
        return 2 * x

    with pytest.raises(TraceError, match=f"method sets the attribute '{name}' of 'self' "):
        traced_with(method, kind())


def test_an_attribute_that_is_deleted_while_it_is_traced() -> None:
    def method(self: Any, x: Any) -> Any:
        del self.count
        return x

    with pytest.raises(TraceError, match="sets the attribute 'count' of 'self'"):
        traced_with(method, WithSlots())


def test_a_cached_property_is_no_change_unless_it_keeps_a_traced_value() -> None:
    lazy = Lazy()
    traced_with(lambda self, x: x * self.table, lazy)
    assert list(lazy.table) == list(range(8))

    def keeps(self: Any, x: Any) -> Any:
        vars(self)["traced"] = 2 * x
        return x

    with pytest.raises(TraceError, match="sets the attribute 'traced' of 'self'"):
        traced_with(keeps, lazy)


def test_an_object_that_computes_its_attributes() -> None:
    traced_with(lambda self, x: 2 * x, Strange(3))


@pytest.mark.parametrize(
    "leaf",
    [jnp.float32, 2 + 3j, Bare, jax.jit(jnp.sin), functools.partial(max, 3), "text"],
    ids=["type of numpy", "number", "class", "jitted", "partial", "text"],
)
def test_what_no_code_of_the_step_sets(leaf: Any) -> None:
    traced_with(lambda self, x: x * len(getattr(self, "__annotations__", ())), leaf)
