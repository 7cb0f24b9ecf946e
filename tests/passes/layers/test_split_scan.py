"""Scans over layers split into pieces: the same numbers, and a chain of layers that stages can consist of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import jax_compat, zoo
from autopar.ir.graph import Graph, verify
from autopar.ir.trace import Traced, trace
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers import split_scan

W = np.sin(np.arange(5 * 4 * 4)).reshape(5, 4, 4).astype(np.float32)
X = np.cos(np.arange(12)).reshape(3, 4).astype(np.float32)


def run(graph: Graph, leaves: list[Any]) -> list[Any]:
    """What a program computes."""
    values = {**dict(zip(graph.inputs, leaves, strict=True)), **dict(graph.constants)}
    for op in graph.ops:
        operands = [values[a] if isinstance(a, int) else a.value for a in op.inputs]
        values.update(zip(op.outputs, jax_compat.bind(op.equation, operands), strict=True))
    return [values[a] if isinstance(a, int) else a.value for a in graph.outputs]


def equal(traced: Traced, pieces: int, args: tuple[Any, ...], batch: tuple[int, ...] = ()) -> Graph:
    """The program with split scans, after a check that it computes the same."""
    cut = verify(split_scan.split_scans(traced.graph, pieces, batch))
    results = jax.jit(lambda leaves: [run(graph, leaves) for graph in (cut, traced.graph)])(jax.tree.leaves(args))
    for ours, other in zip(*results, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-6)
    return cut


def scans(graph: Graph) -> list[int]:
    return [op.params["length"] for op in graph.ops if op.name == "scan"]


def forward(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, w)


def backwards(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, w, reverse=True)


def chained(w: Any, x: Any) -> Any:
    """The second loop reads what the first one stacks."""
    x, kept = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w)
    return jax.lax.scan(lambda c, k: (c + jnp.sum(k * k), c), 0.0, kept), kept[0]


@pytest.mark.parametrize("fn", [forward, backwards, chained], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("pieces", "lengths"), [(2, [2, 3]), (3, [1, 2, 2]), (5, [1] * 5), (9, [1] * 5)])
def test_pieces_compute_what_the_scan_does(fn: Callable[..., Any], pieces: int, lengths: list[int]) -> None:
    trips = scans(equal(trace(fn, W, X), pieces, (W, X), (1,)))
    wanted = lengths[::-1] if fn is backwards else lengths
    assert trips == (wanted * 2 if fn is chained else wanted)


@pytest.mark.parametrize("remat", [False, True])
def test_the_backward_scan_reads_pieces_only(remat: bool) -> None:
    def step(w: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), None

        def loss(w: Any) -> Any:
            return jax.lax.scan(jax.checkpoint(body) if remat else body, x, w)[0].sum()

        value, grads = jax.value_and_grad(loss)(w)
        return w - grads, value

    cut = equal(trace(step, W, X), 2, (W, X), (1,))
    assert scans(cut) == [2, 3, 3, 2]
    joins = [op for op in cut.ops if op.name == "concatenate"]
    assert [cut.types[op.outputs[0]].shape for op in joins] == [W.shape]  # the gradient, for the update


def shared(w: Any, x: Any) -> Any:
    """A stacked weight, and one that all layers share."""

    def loss(stacked: Any, shared: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w + x @ shared), None), x, stacked)[0].sum()

    gradient, total = jax.grad(loss, argnums=(0, 1))(w, w[0])
    return w - gradient, w[0] - total


def test_the_gradient_of_a_shared_weight_is_summed_in_each_piece() -> None:
    cut = equal(trace(shared, W, X), 3, (W, X), (1,))
    *_, third, second, first = (op for op in cut.ops if op.name == "scan")
    sums = [op for op in cut.ops if op.name == "add" and op.phase == "backward"]
    producers = [cut.producers[a] for op in sums for a in op.inputs if isinstance(a, int)]
    assert producers == [third, second, sums[0], first]
    assert third.inputs[1] == second.inputs[1] == first.inputs[1]  # zeros


def read_in_the_body(c: Any, k: Any) -> Any:
    return c + jnp.sum(k), c * k


def doubled(c: Any, k: Any) -> Any:
    return c + c + jnp.sum(k), None


def replaced(c: Any, k: Any) -> Any:
    return c * 0.5 + jnp.sum(k), None


def added(c: Any, k: Any) -> Any:
    return c + jnp.sum(k) + k[0, 0], None


@pytest.mark.parametrize(
    ("body", "start", "is_summed"),
    [
        (added, 0.0, True),
        (added, 1.0, False),
        (read_in_the_body, 0.0, False),
        (doubled, 0.0, False),
        (replaced, 0.0, False),
    ],
)
def test_what_is_no_sum_from_zero_goes_from_piece_to_piece(body: Any, start: float, is_summed: bool) -> None:
    """A scan of the update that reads the pieces of the weights' gradient."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

        gradient = jax.grad(loss)(w)
        return w - gradient, jax.lax.scan(body, np.float32(start), gradient)

    cut = equal(trace(step, W, X), 2, (W, X), (1,))
    assert len(scans(cut)) == 6
    first, second = [op for op in cut.ops if op.name == "scan"][-2:]
    assert (second.inputs[0] not in first.outputs) == is_summed


@given(length=st.integers(1, 9), pieces=st.integers(1, 9))
def test_pieces_are_about_equal(length: int, pieces: int) -> None:
    bounds = split_scan.piece_bounds(length, pieces)
    sizes = [b - a for a, b in bounds]
    assert (bounds[0][0], bounds[-1][1]) == (0, length)
    assert sum(sizes) == length
    assert len(sizes) == min(length, pieces)
    assert max(sizes) - min(sizes) <= 1


def over_time(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w[0] + x), None), jnp.zeros(4), x)[0]


def decoder(w: Any, x: Any) -> Any:
    """Each position reads a sample of the one before: the weights are shared, and only random keys are stacked."""

    def body(h: Any, key: Any) -> Any:
        h = jnp.tanh(h @ w[0])
        return jax.nn.one_hot(jax.random.categorical(key, h), h.shape[-1]), None

    return jax.lax.scan(body, x, jax.random.split(jax.random.key(0), 6))[0]


def no_product(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (x * w[0], None), x, w)[0]


def effects(w: Any, x: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        jax.debug.print("{}", x.sum())
        return x @ w, None

    return jax.lax.scan(body, x, w)[0]


@pytest.mark.parametrize("fn", [over_time, decoder, no_product, effects], ids=lambda f: f.__name__)
def test_other_scans_are_not_split(fn: Callable[..., Any]) -> None:
    graph = trace(fn, W, X).graph
    assert split_scan.split_scans(graph, 2, (1,)) is graph


@pytest.mark.parametrize("name", ["gpt-toy-scan", "llama3-toy-scan", "gpt-toy-scan-remat"])
def test_layers_of_a_scanned_model_are_equal_pieces(name: str) -> None:
    model = zoo.build(name, layers=6)
    graph = trace(model.step, *model.abstract_args()).graph
    batch = [i for i, path in enumerate(graph.input_paths) if path.startswith("batch/")]
    layers = layers_pass.find(verify(split_scan.split_scans(graph, 3, batch)))
    assert [layer.kind for layer in layers.layers] == [0, 1, 1, 1, 2]
    assert [layer.trips for layer in layers.layers] == [1, 2, 2, 2, 1]
    assert [len(values) for values in layers.crossing] == [1] * 4
