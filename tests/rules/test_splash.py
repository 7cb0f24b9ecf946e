"""Positions of queries in JAX's splash attention: cut over devices they give the whole result."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info

import autopar
from autopar.bench.equal.case import dear
from autopar.ir.graph import Op
from autopar.ir.trace import trace
from autopar.rules import pallas, rules_of
from autopar.rules.pallas import splash
from autopar.rules.pallas.axes import Queries
from autopar.verification.verify import verify_compiled
from tests.support.effort import examples

BLOCK, WIDTH = 128, 128


def stored(seq: int) -> Any:
    """A mask whose blocks are stored: keys up to the query, but for every fifth."""
    rows, columns = np.indices((seq, seq))
    return masks.NumpyMask((columns <= rows) & ((columns % 5 > 0) | (columns == rows)))


MASKS: dict[str, Callable[[int], Any]] = {
    "causal": lambda seq: masks.CausalMask((seq, seq)),
    "full": lambda seq: masks.FullMask((seq, seq)),
    "window": lambda seq: masks.LocalMask((seq, seq), (BLOCK, 0), 0),
    "stored": stored,
}


def attention(name: str, seq: int, heads: int = 2, *, multi_query: bool = True) -> Callable[..., jax.Array]:
    """Attention of queries [b,h,s,d] to keys and values [b,s,d], or [b,h,s,d]."""
    make = kernels.make_splash_mqa if multi_query else kernels.make_splash_mha
    sizes = {
        f"block_{x}": BLOCK for x in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    }
    mask = masks.MultiHeadMask([MASKS[name](seq) for _ in range(heads)])
    with jax.ensure_compile_time_eval():
        kernel = make(mask, head_shards=1, q_seq_shards=1, block_sizes=kernels.BlockSizes(**sizes), interpret=True)
    return jax.vmap(kernel)


def calls(name: str, seq: int, batch: int = 8, heads: int = 4, **options: Any) -> dict[str, tuple[Op, Any]]:
    """The kernels of both passes, "fwd", "dq" and "dkv", and their rules."""
    run = attention(name, seq, heads, **options)
    q = jax.ShapeDtypeStruct((batch, heads, seq, WIDTH), jnp.float32)
    k = q if options else jax.ShapeDtypeStruct((batch, seq, WIDTH), jnp.float32)
    graph = trace(jax.grad(lambda q, k, v: run(q, k, v).sum(), (0, 1, 2)), q, k, k).graph
    read = rules_of(graph)
    ops = [op for op in graph.walk() if op.name == "pallas_call"]
    return {op.params["name"].split("_")[2]: (op, read[op.signature]) for op in ops}


@pytest.mark.core
def test_batch_heads_and_pairs_of_blocks_are_cut() -> None:
    """In JAX 0.10 scratch memory is results that all heads share and nothing reads."""
    by_pass = calls("causal", 4 * BLOCK, multi_query=False)
    assert set(by_pass) == {"fwd", "dq", "dkv"}
    for name, (_, rule) in by_pass.items():
        assert [rule.sizes[f] for f in rule.free] == [8, 4, 2]
        assert len(rule.reduced) == (name == "dkv")


@pytest.mark.core
def test_an_odd_number_of_blocks_has_no_pairs() -> None:
    for _, rule in calls("causal", 3 * BLOCK, multi_query=False).values():
        assert [rule.sizes[f] for f in rule.free] == [8, 4, 3]


@pytest.mark.core
def test_rows_of_a_window_are_fewer_than_blocks_of_queries() -> None:
    """Blocks of the table of dkv are moved together, and a device's own might not fit."""
    by_pass = calls("window", 4 * BLOCK, multi_query=False)
    free = {name: [rule.sizes[f] for f in rule.free] for name, (_, rule) in by_pass.items()}
    assert free == {"fwd": [8, 4, 2], "dq": [8, 4, 2], "dkv": [8, 4]}


@pytest.mark.core
def test_a_kernel_of_another_name_is_no_sum() -> None:
    op, _ = calls("causal", 4 * BLOCK)["dkv"]
    renamed = {**op.params, "name": "my_dkv"}
    assert any(axis.queries for axis in pallas.grid_axes(op.params))
    assert not any(axis.queries for axis in pallas.grid_axes(renamed))
    assert "accumulates" in pallas.obstacles(renamed)


@pytest.mark.core
def test_a_kernel_that_uses_its_row_in_another_way_is_no_sum() -> None:
    """The row is compared with the second row as well."""
    op, _ = calls("causal", 4 * BLOCK)["dkv"]
    body = op.params["jaxpr"]
    ends = [e for e in body.eqns if e.primitive.name == "eq"]
    last = next(
        e for e in ends if getattr(e.invars[1], "val", None) == 3 and any(e.invars[0] is f.invars[0] for f in ends)
    )
    second = last.replace(invars=[last.invars[0], type(last.invars[1])(np.int32(1), last.invars[1].aval)])
    changed = body.replace(eqns=[second if e is last else e for e in body.eqns])
    assert not any(axis.queries for axis in pallas.grid_axes({**op.params, "jaxpr": changed}))


# Tables


@settings(max_examples=examples(24))
@given(st.data())
def test_a_device_computes_the_blocks_of_its_queries_that_the_mask_has(data: Any) -> None:
    rows, columns, parts = 4, data.draw(st.sampled_from([2, 3, 5])), data.draw(st.sampled_from([1, 2, 4]))
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)))
    blocks = kept.reshape(rows, columns)
    blocks[:, 0] = True  # or no table would have as many rows as there are blocks of queries
    mask = np.kron(blocks, np.ones((8, 8), bool))
    info, _ = mask_info.process_mask_dkv(masks.MultiHeadMask([masks.NumpyMask(mask)]), (8, 8))
    tables = [jnp.asarray(table) for table in (info.data_next, info.block_mask)]
    own = data.draw(st.permutations(range(rows)))[: rows // parts]
    place, computed = splash.local_tables(tables, jnp.array(own), Queries(sums=True, pairs=False))
    assert place.shape == computed.shape == info.block_mask.shape
    np.testing.assert_array_equal(computed[0, : len(own)] > 0, blocks[own])
    assert not computed[0, len(own) :].any()
    np.testing.assert_array_equal(place[0, : len(own)], np.arange(len(own))[:, None] * np.ones((1, columns)))


# In plans


def step_of(run: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of attention of one head, which only positions are cut of, to keys and values of one head."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            q, k, v = weights
            mixed = run(jnp.einsum("bsd,dhe->bhse", x, q), x @ k, x @ v)
            return (mixed**2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(jnp.subtract, weights, gradients), value

    return step


@cache
def as_it_is(name: str, blocks: int, examples: int) -> tuple[Callable[..., Any], Any, Any, Any]:
    """A step, its arguments, and its results on one device."""
    seq = blocks * BLOCK
    step = step_of(attention(name, seq, 1))
    rng = np.random.default_rng(0)
    shapes = (16, 1, WIDTH), (16, WIDTH), (16, WIDTH), (examples, seq, 16)
    *w, x = (rng.normal(size=shape).astype(np.float32) / 4 for shape in shapes)
    return step, w, x, jax.jit(step)(w, x)


def planned(name: str, mesh: tuple[int, ...], blocks: int, examples: int = 1) -> tuple[Any, Any, Any]:
    """The plan of a step with a microbatch for each example, and its results beside those of the step as it is."""
    step, w, x, whole = as_it_is(name, blocks, examples)
    options: Any = {"mesh": mesh, "cluster": dear(mesh), "num_microbatches": examples}
    parallel = autopar.parallelize(step, donate_argnums=(), **options)
    plan = parallel.plan(w, x)
    assert verify_compiled(parallel.compiled(w, x), step, w, x).ok
    return plan, parallel(w, x), whole


CASES = {
    "pairs of blocks": ("causal", (4,), 8, {"fwd", "dq", "dkv"}),
    "blocks": ("causal", (3,), 3, {"fwd", "dq", "dkv"}),
    "full": ("full", (2, 2), 4, {"fwd", "dq", "dkv"}),
    "window": ("window", (4,), 8, {"fwd", "dq"}),
    "stored": ("stored", (4,), 8, {"fwd", "dq", "dkv"}),
}


@pytest.mark.filterwarnings("ignore:step. the mesh .x=3. leaves 5 of the 8 devices")
@pytest.mark.parametrize("name", [pytest.param("pairs of blocks", marks=pytest.mark.core), *[*CASES][1:]])
def test_positions_are_cut_and_give_the_whole(name: str) -> None:
    mask, mesh, blocks, cut = CASES[name]
    plan, ours, theirs = planned(mask, mesh, blocks)
    devices = math.prod(mesh)
    by_pass = calls(mask, blocks * BLOCK, 1, 1)
    assert {kind for kind, (_, rule) in by_pass.items() if devices in [rule.sizes[f] for f in rule.free]} >= cut
    assert any("pallas_call runs replicated" in note for note in plan.notes) == ("dkv" not in cut)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_positions_are_cut_in_microbatches() -> None:
    plan, ours, theirs = planned("causal", (4,), 8, examples=2)
    assert "collective-permute" in plan.summary()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [(8,), (2, 4), (2, 2, 2)])
def test_positions_are_cut_over_eight_devices(mesh: tuple[int, ...]) -> None:
    _, ours, theirs = planned("causal", mesh, 16)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_tables_of_the_whole_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device takes the first rows of the tables."""
    monkeypatch.setattr(splash, "local_tables", lambda tables, *_: tables)
    _, ours, theirs = planned("causal", (4,), 8)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(ours[0][0], theirs[0][0], rtol=1e-5, atol=1e-6)
