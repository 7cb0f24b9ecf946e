"""Rules of JAX's operations as text: those that Shardy gives, and the few that autopar makes stricter or looser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import autopar
from autopar import rules as rules_package
from autopar.bench.equal.case import dear
from autopar.ir.trace import trace
from autopar.rules import RuleReader, rules_of
from autopar.rules.shardy import read_rules
from tests.programs.real_programs import PROGRAMS
from tests.programs.steps import array

X, Y, B = array(8, 4), array(4, 6), array(2, 8, 4)
I, IJ, J = jnp.zeros(5, jnp.int32), jnp.zeros((8, 2), jnp.int32), jnp.int32(1)
IMAGES, KERNEL = array(2, 3, 8, 8), array(6, 3, 3, 3)
KEY, KEYS = jax.random.key(0), jax.random.split(jax.random.key(0), 8)

#: (primitive, function, arguments, rule)
RULES: tuple[tuple[str, Callable[..., Any], Sequence[Any], str], ...] = (
    ("dot_general", lambda x, y: x @ y, (X, Y), "a b, b c -> a c | reduce b"),
    ("dot_general", lambda b: jnp.einsum("bmk,bnk->bmn", b, b), (B,), "a b c, a d c -> a b d | reduce c"),
    (
        "conv_general_dilated",
        lambda x, k: lax.conv(x, k, (1, 1), "SAME"),
        (IMAGES, KERNEL),
        "a b c d, e b f g -> a e c d | reduce b | keep c d f g",
    ),
    ("gather", lambda x, i: x[i], (X, I), "a b, c d -> c b | reduce a | keep d"),
    ("gather", lambda x, i: jnp.take_along_axis(x, i, 1), (X, IJ), "a b, a c d -> a c | reduce b | keep d"),
    ("scatter-add", lambda x, i: x.at[i].add(1.0), (X, I), "a b, c d, c b -> a b | reduce c | keep d"),
    ("scatter", lambda x, i: x.at[i].set(1.0), (X, I), "a b, c d, c b -> a b | keep c d"),
    ("sort", lambda x: jnp.sort(x, 1), (X,), "a b -> a b | keep b"),
    ("sort", lambda x: jnp.argsort(x, 0), (X,), "a b, a b -> a b, a b | keep a"),
    ("cumsum", lambda x: jnp.cumsum(x, 0), (X,), "a b -> a b | keep a"),
    ("reduce_sum", lambda x: x.sum(0), (X,), "a b -> b | reduce a"),
    ("reduce_max", lambda x: x.max(), (X,), "a b -> () | reduce a b"),
    ("argmax", lambda x: x.argmax(1), (X,), "a b -> a | keep b"),
    ("reshape", lambda x: x.reshape(32), (X,), "a b -> a | keep b"),
    ("reshape", lambda x: x.reshape(2, 4, 4), (X,), "a b -> a c b | keep c"),
    ("transpose", lambda x: x.T, (X,), "a b -> b a"),
    ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (3, 8, 4)), (X,), "a b -> c a b"),
    ("pad", lambda x: jnp.pad(x, ((1, 1), (0, 0))), (X,), "a b, () -> a b | keep a"),
    ("concatenate", lambda x: jnp.concatenate([x, x], 1), (X,), "a b, a b -> a b | keep b"),
    ("slice", lambda x: x[:4], (X,), "a b -> a b | keep a"),
    ("rev", lambda x: x[::-1], (X,), "a b -> a b | keep a"),
    ("dynamic_slice", lambda x, j: lax.dynamic_slice(x, (j, 0), (2, 4)), (X, J), "a b, (), () -> a b | keep a"),
    (
        "dynamic_update_slice",
        lambda x, j: lax.dynamic_update_slice(x, x[:2], (j, 0)),
        (X, J),
        "a b, c b, (), () -> d b | keep a c d",
    ),
    ("select_n", lambda x: jnp.where(x > 0, x, 0.0), (X,), "a b, a b, a b -> a b"),
    ("clamp", lambda x: lax.clamp(0.0, x, 1.0), (X,), "(), a b, () -> a b"),
    ("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 4), 1), (), " -> a b"),
    ("erf", lax.erf, (X,), "a b -> a b"),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint8), (X,), "a b -> a b c | keep c"),
    (
        "reduce_window_sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID"),
        (X,),
        "a b -> a b | keep a",
    ),
    ("cholesky", lambda b: lax.linalg.cholesky(b[:, :4]), (B,), "a b c -> a d e | keep b c d e"),
    ("fft", jnp.fft.fft, (X,), "a b -> a c | keep b c"),
    ("top_k", lambda x: lax.top_k(x, 2), (X,), "a b -> a c, a d | keep b c d"),
    ("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), (X, Y), "a b, c d -> a b, c d"),
    ("random_bits", lambda key: jax.random.bits(key, (8, 4)), (KEY,), "() -> a b"),
    ("random_split", jax.vmap(jax.random.split), (KEYS,), "a -> a b"),
    ("random_unwrap", jax.random.key_data, (KEYS,), "a -> a b | keep b"),
    (
        "pure_callback",
        lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        (X,),
        "a b -> c d | keep a b c d",
    ),
)


@pytest.mark.core
@pytest.mark.parametrize(("primitive", "fn", "args", "rule"), RULES, ids=[f"{r[0]}: {r[3]}" for r in RULES])
def test_rule(primitive: str, fn: Callable[..., Any], args: Sequence[Any], rule: str) -> None:
    graph = trace(fn, *args).graph
    rules = rules_of(graph)
    assert str(next(rules[op.signature] for op in graph.walk() if op.name == primitive)) == rule


@pytest.mark.parametrize(
    ("primitive", "fn", "args"),
    [
        ("concatenate", lambda x: jnp.concatenate([x[:1] * 2, x]), (X,)),
        ("slice", lambda x: x[3:4], (X,)),
        ("dynamic_slice", lambda x, j: lax.dynamic_slice(x, (j, 0), (1, 4)), (X, J)),
        ("concatenate", lambda x: jnp.roll(x, 1, 0), (X,)),
    ],
)
def test_a_factor_of_operands_of_which_one_has_extent_1_needs_replication(
    primitive: str, fn: Callable[..., Any], args: Sequence[Any]
) -> None:
    """An operand that is cut along such a dimension has to be gathered for the operation."""
    graph = trace(fn, *args).graph
    rules = rules_of(graph)
    rule = next(rules[op.signature] for op in graph.walk() if op.name == primitive)
    factor = max((*rule.operands, *rule.results), key=len)[0]
    assert factor in rule.need_replication
    assert rule.sizes[factor] > 1


def test_one_module_gives_the_same_rules_as_one_per_operation() -> None:
    for title in ("taking and scattering", "convolutions", "sorting", "one hot and einsum"):
        fn, args = dict(PROGRAMS)[title]()
        ops = list({op.signature: op for op in trace(fn, *args).graph.walk() if not op.regions}.values())
        avals = [[v.aval for v in op.equation.invars] for op in ops]
        together = read_rules(ops, avals)
        alone = tuple(read_rules([op], [a])[0] for op, a in zip(ops, avals, strict=True))
        assert tuple(map(str, together)) == tuple(map(str, alone))


def test_an_operation_that_cannot_be_lowered_alone_is_replicated_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def picky(ops: Sequence[Any], avals: Sequence[Any]) -> Any:
        if any(op.name == "sin" for op in ops):
            raise NotImplementedError("sin")
        return read_rules(ops, avals)

    monkeypatch.setattr(rules_package, "read_rules", picky)
    graph = trace(lambda x, y: (jnp.sin(x) @ y, jnp.cos(y).T), X, Y).graph
    rules = rules_of(graph)
    assert {op.name: str(rules[op.signature]) for op in graph.ops} == {
        "sin": "a b -> c d | keep a b c d",
        "cos": "a b -> a b",
        "dot_general": "a b, b c -> a c | reduce b",
        "transpose": "a b -> b a",
    }


def test_an_operand_that_the_lowering_ignores_is_not_read() -> None:
    first = core.Primitive("first_of_two")
    first.def_abstract_eval(lambda x, y: x)
    mlir.register_lowering(first, mlir.lower_fun(lambda x, y: 2 * x, multiple_results=False))
    (op,) = trace(first.bind, X, X).graph.ops
    (rule,) = read_rules([op], [[v.aval for v in op.equation.invars]])
    assert (str(rule), rule.unread) == ("a b, c d -> a b", (1,))
    plan = autopar.plan(first.bind, X, X, mesh={"x": 2}, cluster=dear((2,)), pins={"0": P("x"), "1": P(None, "x")})
    assert plan.collectives == ()


def test_operations_of_several_graphs_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[str] = []

    def counted(ops: Sequence[Any], avals: Sequence[Any]) -> Any:
        lowered.extend(op.name for op in ops)
        return read_rules(ops, avals)

    monkeypatch.setattr(rules_package, "read_rules", counted)
    reader = RuleReader()
    first = trace(lambda x, y: jnp.sin(x) @ y, X, Y).graph
    second = trace(lambda x, y: jnp.cos(jnp.sin(x) @ y + jnp.sin(x) @ y), X, Y).graph
    first_rules, other = reader.read(first, {}), reader.read(second, {})
    assert lowered == ["sin", "dot_general", "add", "cos"]
    assert [first_rules[op.signature] for op in first.ops] == [other[op.signature] for op in second.ops[:2]]
    reader.read(trace(lambda x, y: jnp.sin(x.T).T @ y, X, Y).graph, {})
    assert lowered[4:] == ["transpose", "sin", "transpose"]
