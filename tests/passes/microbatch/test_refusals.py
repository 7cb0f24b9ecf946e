"""What a refusal of microbatches says: each reason once, and only advice that is enough."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import ArgumentError, MicrobatchError
from autopar.ir.trace import trace
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.microbatch.loop import split_step
from tests.support.traces import traced as zoo_traced

COUNT = 4


def two_layers(between: Callable[[Any], Any], layers: int = 2) -> Any:
    """A train step, traced, with this between its last product and its loss."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(between(x @ w if layers == 1 else jnp.tanh(x @ w) @ w.T) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value

    return trace(step, jnp.eye(4) + 0.1, jnp.sin(jnp.arange(32.0)).reshape(8, 4))


#: Operations on rows of the batch, none of which gives a total.
MIXED: Mapping[str, Callable[[Any], Any]] = {
    "rev": lambda h: h[::-1],
    "slice": lambda h: jnp.roll(h, 1, 0),
    "concatenate": lambda h: jnp.concatenate([h, jnp.ones((4, 4))])[:8],
    "argmax": lambda h: h[jnp.argmax(h[:, 0])],
    "sort": lambda h: jnp.sort(h, 0),
    "scan": lambda h: jax.lax.scan(lambda c, r: (c + jnp.sin(r), c), jnp.zeros(4), h)[1],
}


@pytest.mark.parametrize("name", MIXED)
def test_own_totals_are_advised_only_where_they_help(name: str) -> None:
    traced = two_layers(MIXED[name])
    for own in ((), ("*",)):
        with pytest.raises(MicrobatchError, match=f": {name} at .*Use one microbatch, or rewrite the operation per"):
            split_step(traced, COUNT, per_microbatch=own)


def test_products_of_the_whole_batch_with_itself_are_no_totals() -> None:
    traced = zoo_traced("clip-toy")
    for own in ((), ("*",)):
        with pytest.raises(MicrobatchError, match="Use one microbatch, or rewrite the operation per example"):
            split_step(traced, COUNT, per_microbatch=own)


def test_the_advice_includes_the_globs_that_are_given_and_is_enough() -> None:
    traced = two_layers(lambda h: jnp.tanh((h - h.mean(0)) @ jnp.eye(4)) - 1)
    with pytest.raises(MicrobatchError, match="per_microbatch=") as refused:
        split_step(traced, COUNT, per_microbatch=("tanh",))
    advised = re.search(r"per_microbatch=(\(.*?\)) or '\*' for all", str(refused.value))
    assert advised is not None
    patterns = ast.literal_eval(advised[1])
    assert patterns[0] == "tanh"
    split_step(traced, COUNT, per_microbatch=patterns)


def test_a_glob_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    traced = two_layers(lambda h: jnp.tanh(h))
    split_step(traced, COUNT, per_microbatch=("tan*",))
    with pytest.raises(ArgumentError, match=r"per_microbatch='tahn' matches no source line .*; the nearest: 'tanh'"):
        split_step(traced, COUNT, per_microbatch=("tan*", "tahn"))


def test_all_totals_are_advised_where_those_that_a_refusal_names_do_not_suffice() -> None:
    """A refusal names few lines, and each of these norms has its own."""

    def normed(h: Any) -> Any:
        h = jnp.tanh(h - h.mean(0)) @ jnp.eye(4)
        h = jnp.tanh(h - h.mean(0)) @ jnp.eye(4)
        h = jnp.tanh(h - h.mean(0)) @ jnp.eye(4)
        h = jnp.tanh(h - h.mean(0)) @ jnp.eye(4)
        return jnp.tanh(h - h.mean(0)) @ jnp.eye(4)

    traced = two_layers(normed)
    with pytest.raises(MicrobatchError, match=r"own totals with per_microbatch='\*', or rewrite"):
        split_step(traced, COUNT)
    split_step(traced, COUNT, per_microbatch=("*",))


@pytest.mark.parametrize("name", [name for name in MIXED if name not in ("argmax", "sort")])
def test_what_is_split_exactly_is_split_with_own_totals_too(name: str) -> None:
    """The gradient of one layer is a product, and the last part of the step is computed on the whole batch."""
    traced = two_layers(MIXED[name], layers=1)
    w, x = jnp.eye(4) + 0.1, jnp.sin(jnp.arange(32.0)).reshape(8, 4)
    exact = jax.jit(split_step(traced, COUNT))(w, x)
    for a, b in zip(jax.jit(split_step(traced, COUNT, per_microbatch=("*",)))(w, x), exact, strict=True):
        np.testing.assert_array_equal(a, b)


def balanced(stacks: bool, w: Any, x: Any) -> Any:
    """A train step of layers in a scan with a balance loss, which is carried, or computed from what the scan stacks."""

    def loss(w: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            gates = jax.nn.softmax(carry[0] @ w)
            means = jnp.mean(gates > 0.2, 0, dtype=w.dtype), jnp.mean(gates, 0)
            return (jnp.tanh(gates @ w), carry[1] + (0.0 if stacks else means[0] @ means[1])), means

        (x_, balance), means = jax.lax.scan(layer, (x, 0.0), w)
        return jnp.mean(x_**2) + balance + jnp.sum(means[0] * means[1])

    value, gradient = jax.value_and_grad(loss)(w)
    return w - gradient, value


def test_a_balance_loss_in_a_carry_is_refused_with_what_helps() -> None:
    w, x = jnp.sin(jnp.arange(48.0)).reshape(3, 4, 4), jnp.sin(jnp.arange(32.0)).reshape(8, 4)
    with pytest.raises(
        MicrobatchError, match=r"dot_general at .*inside the scan at .*; return that total from the scan"
    ):
        split_step(trace(partial(balanced, False), w, x), COUNT)
    step = partial(balanced, True)
    got = jax.jit(split_step(trace(step, w, x), COUNT))(w, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), got, jax.jit(step)(w, x))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a running maximum", r"scan at .*: its iterations go through the examples in order"),
        ("a counter", r"dynamic_slice at .* combines examples of the whole batch\."),
        ("a norm", r"sub at .*: it reads a total over the batch inside the scan at test_refusals.py:\d+\. Use"),
    ],
)
def test_what_a_loop_needs_of_other_examples_is_named(name: str, why: str) -> None:
    loops: Mapping[str, Callable[[Any], Any]] = {
        "a running maximum": lambda h: jax.lax.scan(lambda c, r: (jnp.maximum(c, r), None), jnp.zeros(4), h)[0],
        "a counter": lambda h: jax.lax.fori_loop(0, 8, lambda i, c: c + h[i] ** 2, jnp.zeros(4)),
        "a norm": lambda h: jax.lax.scan(lambda c, w: (c @ w - (c @ w).mean(0), None), h, jnp.ones((2, 4, 4)))[0],
    }
    with pytest.raises(MicrobatchError, match=why):
        split_step(two_layers(loops[name]), COUNT)


def test_a_refusal_gives_each_reason_once() -> None:
    def likelihood(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky((x @ w) @ (x @ w).T + jnp.eye(8)))))

        return jax.value_and_grad(loss)(w)

    with pytest.raises(MicrobatchError, match="need more than one of them") as refused:
        split_step(trace(likelihood, jnp.eye(4), jnp.ones((8, 4))), 2)
    reasons = str(refused.value).split("of them: ", 1)[1].split(". Use")[0].split("; ")
    assert len(reasons) == len({*reasons}) > 1


@pytest.mark.parametrize("chosen", ["auto", (1,)], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_without_examples_is_said_to_have_none(chosen: Any, count: int) -> None:
    graph = trace(lambda w, x: (w, x @ w), jnp.eye(4), jnp.ones((0, 4))).graph
    with pytest.raises(MicrobatchError, match=r"'x' of shape \(0, 4\)") as refused:
        batch_leaves(graph, count, chosen)
    assert "no examples" in str(refused.value)


@pytest.mark.parametrize("chosen", [(), (2,)], ids=["nothing", "a number"])
def test_what_is_named_has_to_have_examples_for_several_microbatches(chosen: tuple[int, ...]) -> None:
    graph = trace(lambda w, x, rate: (w - rate * (x @ w).sum(0), x), jnp.eye(4), jnp.ones((8, 4)), jnp.ones(())).graph
    assert batch_leaves(graph, 1, chosen) == ()
    with pytest.raises(MicrobatchError, match=r"batch_argnums has a dimension that 2 microbatches"):
        batch_leaves(graph, 2, chosen)
