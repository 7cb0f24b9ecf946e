"""Layers found in programs: text out, and the same however the program is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.flops import work
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers.find import Layers
from autopar.passes.remat import rewrite as remat
from tests.support.effort import examples, sample
from tests.support.traces import traced

pytestmark = pytest.mark.core


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def of(fn: Callable[..., Any], *args: Any) -> Layers:
    return layers_pass.find(trace(fn, *args).graph)


def of_zoo(name: str, **sizes: int) -> Layers:
    return layers_pass.find(traced(name, **sizes).graph)


def alike(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w) + x
    return x.sum()


def unlike(ws: Any, x: Any) -> Any:
    for w, f in zip(ws, (jnp.tanh, jnp.sin, jnp.cos, jnp.exp), strict=True):
        x = f(x @ w)
    return x.sum()


def projected(ws: Any, x: Any) -> Any:
    """As in attention: products side by side, all of them read at the end."""
    a, b, c, d = (x @ w for w in ws)
    return (a * b + c * d).sum()


def looped(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.sin(x), jnp.stack(ws))[0].sum()


TEXTS = (
    (
        "equal layers are of one kind, with borders where one value crosses",
        jax.value_and_grad(alike),
        """\
layer 0: kind 0, 4 ops, passes on %8
layer 1: kind 0, 4 ops, passes on %12
layer 2: kind 0, 4 ops, passes on %16
layer 3: kind 0, 4 ops, passes on %20
layer 4: kind 1, 1 ops
""",
    ),
    (
        "where nothing repeats, four products make two layers",
        unlike,
        """\
layer 0: kind 0, 4 ops, passes on %8
layer 1: kind 1, 5 ops
""",
    ),
    (
        "products side by side are no round of layers",
        projected,
        """\
layer 0: kind 0, 2 ops, passes on %5, %6
layer 1: kind 1, 6 ops
""",
    ),
    (
        "a loop over layers is a chain by itself",
        looped,
        """\
layer 0: kind 0, 2 ops, passes on %5, %6
layer 1: kind 1, 1 ops x4, passes on %11
layer 2: kind 2, 1 ops
""",
    ),
)


@pytest.mark.parametrize(("title", "fn", "text"), TEXTS, ids=[t[0] for t in TEXTS])
def test_layers_print_as_text(title: str, fn: Callable[..., Any], text: str) -> None:
    assert str(of(fn, (array(8, 8),) * 4, array(4, 8))) == text


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", ["gpt-toy", "gpt-toy-tied", "gpt-toy-remat", "llama3-toy", "vit-toy"])
def test_blocks_of_a_transformer_are_equal_layers_between_embedding_and_head(name: str, count: int) -> None:
    layers = of_zoo(name, layers=count)
    assert [layer.kind for layer in layers.layers] == [0, *[1] * count, 2]
    assert [len(values) for values in layers.crossing] == [1] * (count + 1)


@pytest.mark.parametrize("name", ["gpt-toy-scan", "llama3-toy-scan", "gpt-toy-scan-remat"])
def test_a_scan_over_blocks_is_as_many_layers(name: str) -> None:
    assert [layer.trips for layer in of_zoo(name, layers=5).layers] == [1, 5, 1]


@pytest.mark.parametrize(
    "name", sample(["gpt-toy", "moe-toy", "wresnet-toy", "flax-nnx-toy"], ["gpt-toy", "wresnet-toy"])
)
def test_gradients_flow_back_through_the_layers(name: str) -> None:
    """A backward operation belongs to no later layer than the cotangents it reads, and every layer has some."""
    layers = of_zoo(name)
    layer_of = {v: layer for q, layer in layers.backward.items() for v in layers.graph.ops[q].outputs}
    for q, layer in layers.backward.items():
        above = [layer_of[a] for a in layers.graph.ops[q].inputs if isinstance(a, int) and a in layer_of]
        assert layer <= min(above, default=layer)
    heavy = {i for i in range(len(layers.layers)) if sum(work(layers.graph, op) for op in layers.ops(i))}
    assert heavy <= {*layers.backward.values()}


def crossing(graph: Graph, before: set[int]) -> list[int]:
    """Values that depend on the batch, made before a border and read by a forward operation behind it."""
    behind = [op for op in graph.ops if op.phase == "forward" and before.isdisjoint(op.outputs)]
    return sorted({a for op in behind for a in op.inputs if isinstance(a, int) and a in before})


@settings(max_examples=25)
@given(st.lists(st.sampled_from("tsrm"), min_size=1, max_size=9))
def test_layers_cover_the_forward_pass_with_the_values_that_cross(letters: list[str]) -> None:
    def loss(w: Any, x: Any) -> Any:
        first = x
        for letter in letters:
            x = {"t": jnp.tanh, "s": lambda v: v @ w, "r": lambda v: v + first, "m": lambda v: v * v @ w}[letter](x)
        return x.sum()

    layers = of(jax.value_and_grad(loss), array(8, 8), array(4, 8))
    graph = layers.graph
    assert [layer.start for layer in layers.layers] == [0, *(layer.stop for layer in layers.layers[:-1])]
    assert layers.forward == tuple(q for q, op in enumerate(graph.ops) if op.phase == "forward")
    before: set[int] = set()
    for i, values in enumerate(layers.crossing):
        before |= {v for op in layers.ops(i) for v in op.outputs}
        assert list(values) == crossing(graph, before)


@settings(max_examples=examples(25), derandomize=True)
@given(st.data())
def test_rematerialised_programs_keep_their_layers(data: st.DataObject) -> None:
    """Whichever layers are rematerialised, and however irregularly."""
    name, sizes = data.draw(st.sampled_from([("gpt-toy", {"layers": 5}), ("gpt-toy-scan", {}), ("wresnet-toy", {})]))
    layers = of_zoo(name, **sizes)
    frees = remat.recomputable(layers.graph)
    policies = [data.draw(st.sampled_from(["none", "dots", "full"])) if free else "none" for free in frees]
    same = layers_pass.same_layers(layers, remat.rewrite(layers.graph, policies))
    assert len(same.layers) == len(layers.layers)
    assert [layer.trips for layer in same.layers] == [layer.trips for layer in layers.layers]
    for i, layer in enumerate(layers.layers):
        before, after = ({v for op in program.ops(i) for v in op.outputs} for program in (layers, same))
        assert after
        assert after <= before or layer.trips > 1  # a loop over layers is another operation
    if not {"dots", "full"} & {*policies}:
        assert same.layers == layers.layers
