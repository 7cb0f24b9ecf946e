"""Strategies by name: the pins that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import PinError
from autopar.ir.trace import trace
from autopar.passes.strategies import expand
from autopar.rules import rules_of
from tests.programs.steps import array

FREE = P.UNCONSTRAINED


def expanded(pins: Mapping[str, P], step: Callable[..., Any], *args: Any, **mesh: int) -> Mapping[str, P]:
    graph = trace(step, *args).graph
    logical = dear(tuple(mesh.values())).logical_mesh(tuple(mesh.values()), tuple(mesh))
    return expand(pins, graph, logical, lambda: rules_of(graph))


def leaves(pins: Mapping[str, P]) -> dict[str, P]:
    return {key: spec for key, spec in pins.items() if not key.startswith("products at")}


def products(pins: Mapping[str, P]) -> list[tuple[str, P]]:
    """Shape and spec of every product that is pinned."""
    return [(key.rpartition(" ")[2], spec) for key, spec in pins.items() if key.startswith("products at")]


def train(loss: Callable[[Any, Any], jax.Array]) -> Callable[..., Any]:
    """Gradient descent with momentum on a loss of parameters and a batch."""

    def step(params: Any, opt: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        opt = jax.tree.map(lambda m, g: 0.9 * m + g, opt, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, opt), opt

    return step


def perceptron(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.sum((hidden @ params["down"]) ** 2)


MLP = {"up": array(16, 64), "bias": array(64), "down": array(64, 16)}
STEP = train(perceptron), MLP, MLP, array(8, 16)


def both(specs: Mapping[str, P]) -> dict[str, P]:
    """The same specs for parameters and their momentum."""
    return {f"{argument}/{name}": spec for argument in ("params", "opt") for name, spec in specs.items()}


WHOLE = {"bias": P(), "down": P(), "up": P()}


@pytest.mark.parametrize(
    ("name", "params", "opt", "batch"),
    [
        ("data_parallel", WHOLE, WHOLE, {"batch": P("x")}),
        ("zero1", WHOLE, {"bias": P("x"), "down": P("x"), "up": P(None, "x")}, {"batch": P("x")}),
        (
            "fsdp",
            {"bias": P("x"), "down": P("x"), "up": P(None, "x")},
            {"bias": P("x"), "down": P("x"), "up": P(None, "x")},
            {"batch": P("x")},
        ),
        (
            "megatron",
            {"bias": P("x"), "down": P("x"), "up": P(None, "x")},
            {"bias": P("x"), "down": P("x"), "up": P(None, "x")},
            {},
        ),
    ],
)
def test_leaves_of_a_perceptron(name, params, opt, batch):
    pins = leaves(expanded({name: P("x")}, *STEP, x=8))
    wanted = {f"params/{k}": v for k, v in params.items()} | {f"opt/{k}": v for k, v in opt.items()} | batch
    assert pins == wanted


def test_products_are_cut_as_the_strategy_says():
    by_batch = [("[*,64]", P("x", FREE)), ("[*,16]", P("x", FREE))]
    for name in ("data_parallel", "zero1", "fsdp"):
        assert products(expanded({name: P("x")}, *STEP, x=8)) == by_batch
    assert products(expanded({"megatron": P("x")}, *STEP, x=8)) == [("[*,64]", P(FREE, "x")), ("[*,16]", P(FREE))]


@pytest.mark.parametrize("order", [("fsdp", "megatron"), ("megatron", "fsdp")])
def test_strategies_share_a_leaf_in_any_order(order):
    axes = {"fsdp": P("d"), "megatron": P("m")}
    pins = expanded({name: axes[name] for name in order}, *STEP, d=2, m=4)
    specs = both({"bias": P("m"), "down": P("m", "d"), "up": P("d", "m")})
    assert leaves(pins) == {**specs, "batch": P("d")}
    assert products(pins) == [("[*,64]", P("d", "m")), ("[*,16]", P("d"))]


def test_a_strategy_over_two_axes():
    pins = leaves(expanded({"fsdp": P(("d", "m"))}, *STEP, d=2, m=4))
    assert pins == {
        **both({"bias": P(("d", "m")), "down": P(("d", "m")), "up": P(None, ("d", "m"))}),
        "batch": P(("d", "m")),
    }


def test_other_pins_come_last():
    pins = expanded({"params/up": P(), "fsdp": P("x")}, *STEP, x=8)
    assert [*expanded({"params/*": P(), "params/up": P("x"), "fsdp": P("x")}, *STEP, x=8)][-2:] == [
        "params/*",
        "params/up",
    ]
    assert [*pins][-1] == "params/up"
    assert pins["params/up"] == P()
    assert pins["opt/up"] == P(None, "x")


def test_a_leaf_that_does_not_divide_is_whole():
    loss = train(lambda p, x: jnp.sum((x @ p["w"]) ** 2) + jnp.sum(p["odd"] ** 2))
    params = {"w": array(16, 24), "odd": array(3, 5)}
    assert leaves(expanded({"fsdp": P("x")}, loss, params, params, array(8, 16), x=8)) == {
        **both({"odd": P(), "w": P(None, "x")}),
        "batch": P("x"),
    }


def test_of_equal_dimensions_the_first_is_cut():
    step = train(lambda p, x: jnp.sum((x @ p["w"]) ** 2))
    params = {"w": array(16, 16)}
    assert leaves(expanded({"fsdp": P("x")}, step, params, params, array(8, 16), x=4))["params/w"] == P("x")


def mixed(params: Any, master: Any, average: Any, opt: Any, batch: Any) -> Any:
    """Mixed precision: bfloat16 parameters, float32 masters, a float32 average of them, and momentum."""
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(perceptron)(params, batch))
    opt = jax.tree.map(lambda m, g: 0.9 * m + g, opt, grads)
    master = jax.tree.map(lambda p, m: p - 0.1 * m, master, opt)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, master)
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), master), master, average, opt


HALF = {name: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) for name, leaf in MLP.items()}
CUT = {"bias": P("x"), "down": P("x"), "up": P(None, "x")}


@pytest.mark.parametrize(
    ("name", "params"), [("data_parallel", WHOLE), ("zero1", WHOLE), ("fsdp", CUT), ("megatron", CUT)]
)
def test_copies_that_only_the_update_reads_are_state_of_the_optimizer(name, params):
    pins = leaves(expanded({name: P("x")}, mixed, HALF, MLP, MLP, MLP, array(8, 16), x=8))
    state = WHOLE if name == "data_parallel" else CUT
    for argument, specs in {"params": params, "master": state, "average": state, "opt": state}.items():
        assert {key.partition("/")[2]: spec for key, spec in pins.items() if key.startswith(argument)} == specs


# Megatron by the graph


def chain(params: Any, x: jax.Array) -> jax.Array:
    """Four products one after the other, through a transpose and a reshape."""
    h = x @ params["a"]
    h = (h.T + 1.0).T @ params["b"]
    h = (params["c"].T @ h.T).T
    return jnp.sum((h.reshape(8, 4, 8).reshape(8, 32) @ params["d"]) ** 2)


def loop(params: Any, x: jax.Array) -> jax.Array:
    """A pair of products in each iteration of a scan over stacked layers."""

    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return h + jax.nn.relu(h @ p["up"] + p["bias"]) @ p["down"], None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, params)[0])


def heads(params: Any, x: jax.Array) -> jax.Array:
    """Attention whose heads come from a reshape."""
    q, k, v = ((x @ params[name]).reshape(8, 4, 4, 8) for name in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    return jnp.sum((jnp.einsum("bhst,bthd->bshd", scores, v).reshape(8, 4, 32) @ params["o"]) ** 2)


def wide_heads(params: Any, x: jax.Array) -> jax.Array:
    """A projection to heads that are wider than they are many."""
    q = jnp.einsum("bsd,dhk->bshk", x, params["q"])
    return jnp.sum(jnp.einsum("bshk,hkd->bsd", jax.nn.softmax(q), params["o"]) ** 2)


def tied(params: Any, tokens: jax.Array) -> jax.Array:
    """A table that is looked up first, and is the last product, transposed."""
    return jnp.sum((params["table"][tokens[:, 0].astype(int)] @ params["table"].T) ** 2)


SQUARE = array(32, 32)
STACK = {"up": array(3, 16, 64), "bias": array(3, 64), "down": array(3, 64, 16)}


@pytest.mark.parametrize(
    ("loss", "params", "x", "specs"),
    [
        (
            chain,
            {"a": array(16, 32), "b": SQUARE, "c": SQUARE, "d": array(32, 8)},
            array(8, 16),
            {"a": P(None, "x"), "b": P("x"), "c": P(None, "x"), "d": P("x")},
        ),
        (loop, STACK, array(8, 16), {"up": P(None, None, "x"), "bias": P(None, "x"), "down": P(None, "x")}),
        (
            heads,
            dict.fromkeys("qkvo", SQUARE),
            array(8, 4, 32),
            {"q": P(None, "x"), "k": P(None, "x"), "v": P(None, "x"), "o": P("x")},
        ),
        (
            wide_heads,
            {"q": array(32, 4, 16), "o": array(4, 16, 32)},
            array(8, 4, 32),
            {"q": P(None, "x"), "o": P("x")},
        ),
        (tied, {"table": array(64, 16)}, array(8, 16), {"table": P("x")}),
    ],
)
def test_columns_and_rows_follow_the_graph(loss, params, x, specs):
    pins = leaves(expanded({"megatron": P("x")}, train(loss), params, params, x, x=4))
    assert pins == both(specs)


def test_a_strategy_is_that_of_the_table_of_a_model():
    """Blocks of GPT are cut as the zoo's table of Megatron's layouts says, which goes by names."""
    model = zoo.build("gpt-toy")
    pins = expanded({"megatron": P("model")}, model.step, *model.abstract_args(), data=2, model=4)
    table = {pattern: spec for pattern, spec in model.megatron if pattern != "embed"}
    blocks = {key: spec for key, spec in pins.items() if key.startswith("state/params/blocks")}
    assert len(blocks) == 30
    for key, spec in blocks.items():
        wanted = next((tuple(s) for name, s in table.items() if key.endswith(f"/{name.rpartition('/')[2]}")), ())
        assert tuple(spec) == wanted[: max((i + 1 for i, a in enumerate(wanted) if a), default=0)], key


@pytest.mark.parametrize(
    ("pins", "mesh", "message"),
    [
        ({"fsdp": P("data")}, {"x": 8}, "pin 'fsdp': axis 'data' not found. Mesh axes: x"),
        ({"fsdp": P()}, {"x": 8}, "takes one mesh axis, as in P.'data'.; it is P"),
        ({"fsdp": P("x", "y")}, {"x": 8}, "takes one mesh axis"),
        ({"fsdp": "x"}, {"x": 8}, "takes one mesh axis, as in P.'data'.; it is 'x'"),
        (
            {"data_parallel": P("x")},
            {"x": 3},
            r"data_parallel\('x'\): batch argument 'batch' of shape \(8, 16\) has 8 rows, .* the nearest: 6 or 9",
        ),
    ],
)
def test_what_does_not_fit_says_why(pins, mesh, message):
    with pytest.raises(PinError, match=message):
        expanded(pins, *STEP, **mesh)


def test_a_step_without_what_a_strategy_cuts():
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w * 0.9, jnp.sum(x)

    with pytest.raises(PinError, match=r"fsdp\('x'\): no parameter .* 8 devices divide: 'w' \(7,\)"):
        expanded({"fsdp": P("x")}, step, array(7), array(8), x=8)
    with pytest.raises(PinError, match=r"zero1\('x'\): no array of the optimizer's state .*: the step has none"):
        expanded({"zero1": P("x")}, step, array(8), array(8), x=8)
    with pytest.raises(PinError, match=r"megatron\('x'\): no product of an activation and a parameter"):
        expanded({"megatron": P("x")}, step, array(8), array(8), x=8)
