"""Rules that users register: a primitive of their own is planned replicated without one, and cut with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autopar
from autopar.api import parallelize
from autopar.errors import RuleError
from autopar.ir.trace import trace
from autopar.rules import registry, rules_of
from autopar.rules.inherent import UNKNOWN
from tests.programs.steps import array

scaled_product = Primitive("scaled_product")
scaled_product.def_abstract_eval(lambda x, y: x.update(shape=(x.shape[0], y.shape[1])))
mlir.register_lowering(scaled_product, mlir.lower_fun(lambda x, y: 2.0 * jax.lax.erf(x @ y), multiple_results=False))

X, Y = array(64, 128), array(128, 256)


def program(x: jax.Array, y: jax.Array) -> Any:
    return jnp.tanh(scaled_product.bind(x, y))


@pytest.fixture(autouse=True)
def forgotten_afterwards() -> Iterator[None]:
    before = registry._REGISTERED.set(registry.registered_rules())
    yield
    registry._REGISTERED.reset(before)


@pytest.fixture
def opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shardy can look into this lowering, as it cannot into a custom call's."""
    monkeypatch.setattr("autopar.rules.OPAQUE", ("scaled_product", "pallas_call"))


@pytest.mark.usefixtures("opaque")
def test_a_registered_rule_changes_the_plan() -> None:
    without = parallelize(program, mesh=(8,))
    (note,) = without.plan(X, Y).notes
    assert note == f"scaled_product runs replicated (1 times, first at test_registry.py:{LINE}): {UNKNOWN}"
    autopar.register_rule(scaled_product, "m k, k n -> m n | keep k")
    with_rule = parallelize(program, mesh=(8,))
    plan = with_rule.plan(X, Y)
    assert plan.notes == ()
    assert plan.step_time_s < without.plan(X, Y).step_time_s / 4
    expected = jnp.tanh(2.0 * jax.lax.erf(X @ Y))
    for step in (without, with_rule):
        np.testing.assert_allclose(step(X, Y), expected, rtol=1e-5, atol=1e-5)
    assert not with_rule.lower(X, Y).compile().plan.collectives
    assert max(s.data.size for s in with_rule(X, Y).addressable_shards) == 64 * 256 // 8


LINE = program.__code__.co_firstlineno + 1


def kernel(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


def calls_pallas(x: jax.Array) -> jax.Array:
    return pallas.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="twice")(x)


@pytest.mark.parametrize("name", ["twice", "pallas_call"])
def test_a_kernel_is_found_by_its_name(name: str) -> None:
    autopar.register_rule(name, "a b -> a b")
    graph = trace(calls_pallas, X).graph
    rule = rules_of(graph)[graph.ops[0].signature]
    assert (str(rule), rule.origin) == ("a b -> a b", "user")


def test_the_last_registration_wins() -> None:
    autopar.register_rule("scaled_product", "m k, k n -> m n")
    autopar.register_rule("scaled_product", "m k, k n -> m n | keep m")
    assert registry.registered_rules()["scaled_product"] == "m k, k n -> m n | keep m"


def test_a_rule_that_does_not_fit_names_the_line() -> None:
    autopar.register_rule(scaled_product, "m k -> m")
    with pytest.raises(RuleError) as caught:
        autopar.plan(program, X, Y, mesh=(8,))
    assert str(caught.value) == (
        "rule 'm k -> m' names 1 operands, the operation has 2 "
        f"(registered for 'scaled_product', used at test_registry.py:{LINE})"
    )


@pytest.mark.parametrize(
    ("primitive", "rule", "message"),
    [
        (3, "a -> a", "register_rule needs a primitive or its name, got 3"),
        ("", "a -> a", "register_rule needs a primitive or its name, got ''"),
        ("mine", "a b", "rule 'a b' needs exactly one '->', as in 'b m k, k n -> b m n'"),
        ("mine", "a? -> a", "rule 'a? -> a': 'a?' is no dimension name"),
    ],
)
def test_invalid_rules_are_refused(primitive: Any, rule: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        autopar.register_rule(primitive, rule)
    assert str(caught.value) == message
    assert "mine" not in registry.registered_rules()


def test_planning_sees_one_set_of_rules() -> None:
    inside = copy_context()
    inside.run(autopar.register_rule, "scaled_product", "m k, k n -> m n")
    assert "scaled_product" in inside.run(registry.registered_rules)
    assert "scaled_product" not in registry.registered_rules()
