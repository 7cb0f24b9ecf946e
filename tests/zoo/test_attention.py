"""The choice of attention: kernels give what einsums give, are cut by batch and heads, and refuse what they cannot."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError, TraceError
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import graph_hash
from autopar.ir.op_sets import ATTENTION
from autopar.ir.trace import trace
from autopar.plans.plan import Plan
from autopar.zoo.layers import attention

MESH = (2, 4)
SIZES: dict[str, Any] = {"layers": 1, "batch": 4}


@cache
def by_einsum(target: str, seq: int | None) -> tuple[Any, Any, Any]:
    """State, batch, and what a step of naive attention gives on one device."""
    model = zoo.build(target, seq=seq, **SIZES)
    state, batch = model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))
    return state, batch, jax.jit(model.step)(state, batch)


def assert_equal_when_cut(target: str, name: str, seq: int | None = None) -> None:
    """One step on a mesh equals that of the single device, and that of naive attention, to 1e-5 of the gradients."""
    model = zoo.build(target, attention=name, seq=seq, **SIZES)
    state, batch, expected = by_einsum(target, seq)
    whole = jax.jit(model.step)(state, batch)
    parallel = autopar.parallelize(model.step, mesh=MESH, cluster=dear(MESH), donate_argnums=())
    assert not any("replicated" in note for note in parallel.plan(state, batch).notes)
    cut = parallel(state, batch)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for (state, metrics), reference in ((whole, expected), (cut, whole)):
        jax.tree.map(close, (state["opt"], metrics), (reference[0]["opt"], reference[1]))


@pytest.mark.parametrize("target", ["gpt-toy", "llama3-toy", "vit-toy", "moe-toy"])
def test_dot_product_attention_of_jax_equals_naive_attention(target: str) -> None:
    if target == "moe-toy":  # its layers come in pairs
        model = zoo.build(target, attention="dot_product")
        state, batch = model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))
        losses = [jax.jit(m.step)(state, batch)[1]["loss"] for m in (model, zoo.build(target))]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    else:
        assert_equal_when_cut(target, "dot_product")


def test_splash_attention_of_grouped_queries_equals_naive_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "splash_kernel", partial(attention.splash_kernel, interpret=True))
    assert_equal_when_cut("llama3-toy", "splash", seq=128)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [4, 2])
def test_splash_attention_sees_the_keys_that_naive_attention_sees(
    causal: bool, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of queries and keys, so that whole blocks are left out."""
    monkeypatch.setattr(attention, "splash_kernel", partial(attention.splash_kernel, interpret=True))
    monkeypatch.setattr(attention, "BLOCK", 128)
    query, key, value = (jax.random.normal(jax.random.key(i), (2, 256, n, 8)) for i, n in enumerate((4, heads, heads)))
    ours, theirs = (attention.kernel_of(name, causal=causal) for name in ("splash", "dot_product"))
    assert ours is not None
    assert theirs is not None
    np.testing.assert_allclose(ours(query, key, value), theirs(query, key, value), rtol=1e-5, atol=1e-6)


# In plans


@cache
def planned(target: str, name: str, cluster: str) -> Plan:
    model, devices = zoo.build(target, attention=name, layers=2, batch=8), Cluster.named(cluster, None, 8)
    return autopar.plan(model.step, *model.abstract_args(), mesh=MESH, cluster=devices, remat="none")


@pytest.mark.parametrize(("cluster", "name"), [("dgx-h100", "cudnn"), ("tpu-v5p", "splash")])
def test_fused_attention_takes_less_time_and_less_memory_than_naive_attention(cluster: str, name: str) -> None:
    naive, fused = (planned("llama3-8b", which, cluster) for which in ("naive", name))
    assert not any("replicated" in note for note in fused.notes)
    assert fused.step_time_s < naive.step_time_s
    scores = 2 * 8 * 32 * 8192**2 * 2 / 8  # of both layers, kept in bfloat16 for the backward pass
    assert fused.peak_memory_bytes < naive.peak_memory_bytes - scores


@pytest.mark.parametrize("target", ["gpt-125m", "moe-380m", "vit-b16", "gpt-125m-scan-remat"])
def test_attention_of_cudnn_is_cut_in_every_model_that_has_it(target: str) -> None:
    plan = planned(target, "cudnn", "dgx-h100")
    assert not any("replicated" in note for note in plan.notes)


# What is refused


def test_naive_attention_is_what_is_built_if_nothing_is_said() -> None:
    assert zoo.build("gpt-toy", attention="naive") is zoo.build("gpt-toy")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("gpt-toy", {"attention": "flash"}, "'flash' of 'gpt-toy' is not known; use naive, dot_product, cudnn, splash"),
        ("mlp-toy", {"attention": "cudnn"}, "'mlp-toy' takes no 'attention'; it takes: layers, batch, precision, "),
        ("gpt-toy", {"attention": "cudnn"}, "takes float16 and bfloat16, and this model computes in float32"),
        ("vit-b16", {"attention": "splash"}, "takes sequences of a multiple of 128 tokens, not 196"),
        ("llama3-toy", {"attention": "cudnn", "dtype": "bfloat16"}, "takes heads of a multiple of 8 and at most 256"),
    ],
)
def test_an_attention_that_the_model_cannot_have_is_refused_with_the_others(
    target: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        zoo.build(target, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "has_scores"), [("naive", True), ("dot_product", True), ("cudnn", False), ("splash", False)]
)
def test_fused_attention_has_no_scores_in_memory_and_keeps_a_number_per_query(name: str, has_scores: bool) -> None:
    model = zoo.build("gpt-125m", attention=name, layers=1, batch=3)
    graph = trace(model.step, *model.abstract_args()).graph
    shapes = [type_.shape for type_ in graph.types]
    assert any(shape[-2:] == (1024, 1024) and len(shape) > 2 for shape in shapes) == has_scores
    if not has_scores:
        (statistic,) = {shape for shape in shapes if shape in ((3, 12, 1024), (3, 12, 1, 1024))}
        assert math.prod(statistic) == 3 * 12 * 1024


@pytest.mark.parametrize("name", ["naive", "dot_product", "cudnn", "splash"])
def test_a_step_that_is_traced_again_is_the_same_program(name: str) -> None:
    """Saved plans and `autopar.verify` compare hashes of programs."""
    model = zoo.build("llama3-8b", attention=name, layers=2, batch=3, seq=1024)
    first, again = (graph_hash(trace(model.step, *model.abstract_args()).graph) for _ in range(2))
    assert first == again


def test_splash_attention_is_not_planned_for_gpus() -> None:
    with pytest.raises(TraceError, match=r"uses a Pallas kernel for TPUs at .*, and 'dgx-h100' has H100") as caught:
        planned("llama3-8b", "splash", "dgx-h100")
    assert 'cluster="tpu-v5p"' in str(caught.value)


def test_the_kernels_of_grouped_queries_get_the_heads_of_keys_once() -> None:
    """No key is repeated for the heads that share it."""
    model = zoo.build("llama3-8b", attention="cudnn", layers=1, batch=2)
    graph = trace(model.step, *model.abstract_args()).graph
    keys = [graph.type_of(op.inputs[1]).shape for op in graph.walk() if op.name in ATTENTION]
    assert keys == [(2, 8192, 8, 128)] * 2
