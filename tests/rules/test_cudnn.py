"""cuDNN's attention without a GPU: planned by batch and heads, and equal to the whole with a reference in its place.

The primitives that JAX lowers to cuDNN get a lowering for CPU here: plain attention, whose backward pass reads the
softmax statistic and the output as cuDNN's does. So what is tested are the rules, and what is bound on each device.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autopar
from autopar import jax_compat
from autopar.bench.equal.case import dear
from autopar.codegen import emit
from autopar.cost_models.flops import model_flops, work
from autopar.errors import TraceError
from autopar.ir.graph import Graph, Op
from autopar.ir.op_sets import ATTENTION
from autopar.ir.trace import trace
from autopar.rules import cudnn, rules_of
from autopar.rules.inherent import reason
from autopar.verification.verify import verify_compiled
from tests.support.effort import sample

pytestmark = pytest.mark.core

BF16 = jnp.bfloat16


# A reference on CPU


def scores(q: Any, k: Any, bias: Any, lengths: Any, params: Any) -> Any:
    s = params["scale"] * jnp.einsum("btnh,bsnh->bnts", q, k)
    s = s + bias if params["variadic_args"][0] else s
    t, length = s.shape[2:]
    if "CAUSAL" in params["mask_type"].name:
        s = jnp.where(jnp.tril(jnp.ones((t, length), bool)), s, -1e9)
    if "PADDING" in params["mask_type"].name:
        s = jnp.where(jnp.arange(length) < lengths[:, None, None, None], s, -1e9)
    return s


def wide(*arrays: Any) -> list[Any]:
    return [a.astype(jnp.float32) for a in arrays]


def grouped(x: Any, heads: int) -> Any:
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def forward(q: Any, k: Any, v: Any, bias: Any, _: Any, lengths: Any, *rest: Any, **params: Any) -> list[Any]:
    heads, dtype = q.shape[2], q.dtype
    q, k, v, bias = wide(q, grouped(k, heads), grouped(v, heads), bias)
    s = scores(q, k, bias, lengths, params)
    statistic = jax.nn.logsumexp(s, axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(s - statistic[..., None]), v).astype(dtype)
    return [out, statistic] if params["is_training"] else [out]


def backward(q: Any, k: Any, v: Any, bias: Any, _: Any, lengths: Any, *rest: Any, **params: Any) -> list[Any]:
    statistic, out, grad = rest[4:7]
    shapes, dtype, heads = [x.shape for x in (q, k, v, bias)], q.dtype, q.shape[2]
    q, k, v, bias, out, grad = wide(q, grouped(k, heads), grouped(v, heads), bias, out, grad)
    p = jnp.exp(scores(q, k, bias, lengths, params) - statistic[..., None])
    mean = jnp.einsum("btnh,btnh->bnt", out, grad)[..., None]
    ds = p * (jnp.einsum("btnh,bsnh->bnts", grad, v) - mean)
    grads = [
        params["scale"] * jnp.einsum("bnts,bsnh->btnh", ds, k),
        params["scale"] * jnp.einsum("bnts,btnh->bsnh", ds, q),
        jnp.einsum("bnts,btnh->bsnh", p, grad),
    ]
    grads = [g.reshape(*s[:3], -1, s[3]).sum(3) if g.shape != s else g for g, s in zip(grads, shapes, strict=False)]
    if params["variadic_args"][1]:
        axes = tuple(d for d, n in enumerate(shapes[3]) if n == 1)
        grads.append(ds.sum(axes, keepdims=True))
    return [g.astype(dtype) for g in grads]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's primitives below those that programs record run on CPU; steps with them may be run here."""
    names = {"dot_product_attention_fwd": forward, "dot_product_attention_bwd": backward}
    for name, function in names.items():
        lowering: Any = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(jax_compat.primitive(name), lowering, platform="cpu")
    monkeypatch.setattr("autopar.compile._check_attention", lambda *args: None)


# Steps


def attend(q: Any, k: Any, v: Any, bias: Any = None, lengths: Any = None, causal: bool = True) -> Any:
    return jax.nn.dot_product_attention(
        q, k, v, bias, is_causal=causal, key_value_seq_lengths=lengths, implementation="cudnn"
    )


def arrays(b: int = 8, t: int = 16, n: int = 4, k: int = 4, h: int = 8, dtype: Any = BF16) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (b, t, m, h), dtype) for key, m in zip(keys, (n, k, k), strict=True)]


def gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The mean square of a function's result, and its gradients."""

    def loss(*args: Any) -> Any:
        return (function(*args).astype(jnp.float32) ** 2).mean()

    return jax.value_and_grad(loss, tuple(range(count)))


def of(name: str, fn: Any, *args: Any) -> Op:
    return next(op for op in trace(fn, *args).graph.walk() if op.name == name)


FORWARD, BACKWARD = ATTENTION[:2]


def test_batch_heads_and_positions_of_queries_are_free() -> None:
    graph = trace(gradients(attend, 3), *arrays()).graph
    read = rules_of(graph)
    first, second = (read[op.signature] for op in graph.walk() if op.name in ATTENTION)
    assert [rule.free for rule in (first, second)] == [(0, 1, 2)] * 2
    sides = [
        [["bnt.."[min(f, 3)] for f in dims] for dims in (*rule.operands[:3], *rule.results)] for rule in (first, second)
    ]
    whole, statistic = ["b", "t", "n", "."], ["b", "n", "t"]
    assert sides == [[whole] * 4 + [statistic], [whole] * 6]


def test_groups_of_heads_stay_whole() -> None:
    op = of(FORWARD, gradients(attend, 3), *arrays(n=8, k=2))
    assert rules_of(trace(gradients(attend, 3), *arrays(n=8, k=2)).graph)[op.signature].sizes[:2] == (8, 2)


def test_one_head_of_keys_is_not_cut_by_heads() -> None:
    graph = trace(gradients(attend, 3), *arrays(n=8, k=1)).graph
    assert {rules_of(graph)[op.signature].free for op in graph.walk() if op.name in ATTENTION} == {(0, 2)}


def test_dropout_is_not_cut() -> None:
    op = of(FORWARD, gradients(attend, 3), *arrays())
    shapes = [jax_compat.shape_of(v) for v in op.equation.invars]
    obstacles = cudnn.obstacles(op.name, {**op.params, "dropout_rate": 0.1}, shapes)
    assert obstacles == dict.fromkeys("bnt", "its dropout depends on the place in the kernel's operands")


def test_one_example_with_one_head_of_keys_says_why_it_is_whole() -> None:
    op = of(FORWARD, attend, *arrays(b=1, k=1), None, jnp.arange(1, dtype=jnp.int32) + 3)
    assert reason(op) == "positions under a mask of the kind PADDING_CAUSAL are not cut"


WHOLE = {
    "lengths": (
        attend,
        [*arrays(), None, jnp.arange(8, dtype=jnp.int32) + 3],
        "under a mask of the kind PADDING_CAUSAL",
    ),
    "window": (
        lambda *args: jax.nn.dot_product_attention(*args, local_window_size=(4, 0), implementation="cudnn"),
        arrays(),
        "under a sliding window",
    ),
    "bias": (attend, [*arrays(), jnp.zeros((1, 4, 16, 16), BF16)], "with a bias under a causal mask"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_positions_stay_whole_where_blocks_are_not_known(name: str) -> None:
    fn, args, why = WHOLE[name]
    op = of(FORWARD, fn, *args)
    assert rules_of(trace(fn, *args).graph)[op.signature].free == (0, 1)
    shapes = [jax_compat.shape_of(v) for v in op.equation.invars]
    assert why in cudnn.obstacles(op.name, op.params, shapes)["t"]


def test_largest_magnitudes_of_fp8_attention_are_combined() -> None:
    whole, statistic, number = (8, 128, 4, 128), (8, 4, 128), (1, 1, 1, 1)
    forward, backward = ATTENTION[2:]
    rule = cudnn.rule(forward, {"layout": 0}, [whole] * 3 + [number] * 6, [whole, number, number, statistic])
    assert rule.free == (0, 1)
    assert [rule.results[i][:1] for i in (0, 3)] == [(0,)] * 2
    assert [cudnn.combined(forward, i) for i in range(4)] == [None, "max", "max", None]
    rule = cudnn.rule(backward, {"layout": 0}, [whole] * 5 + [statistic] + [number] * 12, [whole] * 3 + [number] * 4)
    assert [dims[0] for dims in (*rule.operands[:6], *rule.results[:3])] == [0] * 9
    assert [cudnn.combined(backward, i) for i in range(7)] == [None, "sum", "sum"] + ["max"] * 4


# FLOPs and memory


def test_flops_of_the_products() -> None:
    b, t, n, h = 8, 16, 4, 8
    graph = trace(gradients(partial(attend, causal=False), 3), *arrays(b, t, n, n, h)).graph
    done = {op.name: work(graph, op) for op in graph.walk() if op.name in ATTENTION}
    assert done == {FORWARD: 4 * b * n * t * t * h, BACKWARD: 10 * b * n * t * t * h}
    assert model_flops(graph) == sum(done.values())


def test_masked_pairs_do_not_count() -> None:
    q, k, v = arrays(t=16)
    causal = of(FORWARD, attend, q, k, v)
    shapes = [jax_compat.shape_of(x) for x in causal.equation.invars]
    pairs = cudnn.flops(causal.name, causal.params, shapes) / (4 * 8 * 4 * 8)
    windowed = cudnn.flops(causal.name, {**causal.params, "sliding_window_length": 3}, shapes) / (4 * 8 * 4 * 8)
    assert pairs == sum(1 for i in range(16) for j in range(16) if j <= i)
    assert windowed == sum(1 for i in range(16) for j in range(16) if i - 3 < j <= i)


def training(implementation: str) -> Callable[..., Any]:
    def step(weights: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[i]) for i in range(3))
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
            return (jnp.einsum("btnh,nhd->btd", out, w[3].reshape(out.shape[2], -1, x.shape[2])) ** 2).mean()

        return weights - 0.1 * jax.grad(loss)(weights)

    return step


SHAPES = jax.ShapeDtypeStruct((4, 512, 8, 64), BF16), jax.ShapeDtypeStruct((2, 2048, 512), BF16)


def test_planned_for_a_dgx_without_a_gpu() -> None:
    pins = {"x": P("x"), "weights": P(None, None, "y")}
    fused, naive = (
        autopar.plan(training(name), *SHAPES, mesh=(2, 4), cluster="dgx-h100", pins=pins) for name in ("cudnn", "xla")
    )
    assert not any("replicated" in note for note in fused.notes)
    scores = 2 * 8 * 2048 * 2048 * 2 / 8  # bytes of one array of scores on each device
    assert naive.peak_memory_bytes - fused.peak_memory_bytes > scores
    assert fused.step_time_s < naive.step_time_s
    assert re.search(
        r"data parallel over x \(2 ways\); tensor parallel .*over y \(4 ways: attention by heads", str(fused)
    )


def test_long_sequences_are_cut_along_their_positions() -> None:
    """More devices than examples and heads of keys together: one example, two heads of keys, sixteen devices."""
    q, k = (jax.ShapeDtypeStruct((1, 65536, n, 64), BF16) for n in (8, 2))
    plan = autopar.plan(gradients(attend, 3), q, k, k, mesh=(2, 8), cluster="dgx-h100:2")
    assert plan.flops_per_device == pytest.approx(plan.hfu * 989e12 * plan.step_time_s, rel=1e-2)
    assert not any("more than an even share" in note for note in plan.notes)
    assert "context parallel" in str(plan)
    inside = {(c.kind, c.axes) for c in plan.collectives if c.source.startswith("test_cudnn")}
    assert {kind for kind, _ in inside} >= {"all-gather", "reduce-scatter", "collective-permute"}
    # keys and values, gradients of both in two bytes, and their sums in four: one of the two heads on each device
    assert plan.stages[0].memory["temporaries"] >= (2 + 2 + 4) * (k.size // 2) * 2


# Errors


SAID = r"uses attention of cuDNN at test_cudnn.py:\d+, which runs on GPUs; {}\. Use .*implementation=\"xla\""


def test_running_on_cpu_is_refused_with_the_line() -> None:
    said = SAID.format("the devices here are of the kind 'cpu'")
    with pytest.raises(TraceError, match=said):
        autopar.parallelize(attend, mesh=(8,))(*arrays())
    with pytest.raises(TraceError, match=said):
        autopar.check(attend, *arrays(), mesh=(8,))


def test_planning_for_a_tpu_is_refused() -> None:
    with pytest.raises(TraceError, match=SAID.format("'tpu-v5e' has TPU v5e")):
        autopar.plan(attend, *arrays(), mesh=(8,), cluster="tpu-v5e")


def test_wide_heads_are_refused_on_gpus_before_hopper() -> None:
    autopar.plan(attend, *arrays(h=256), mesh=(8,), cluster="dgx-h100")
    with pytest.raises(TraceError, match=r"on A100-SXM4-80GB for heads of at most 128 elements, not of 256"):
        autopar.plan(attend, *arrays(h=256), mesh=(8,), cluster="dgx-a100")


@pytest.mark.parametrize("target", ["cpu", "shardy"])
def test_compiling_for_anything_else_is_refused(target: str) -> None:
    plan = autopar.plan(attend, *arrays(), mesh=(8,), cluster="dgx-h100")
    with pytest.raises(TraceError, match=SAID.format(f"target='{target}' is none")):
        autopar.verify(plan, attend, *arrays(), target=target)


def test_the_described_gpu_is_forgotten_afterwards() -> None:
    seen: list[str] = []

    def asks() -> None:
        try:
            jax.eval_shape(attend, *arrays())
        except RuntimeError as error:
            seen.append(str(error))

    with jax_compat.described_gpu():
        jax.eval_shape(lambda *args: attend(*args), *arrays())
        other = threading.Thread(target=asks)
        other.start()
        other.join()
    asks()
    assert seen == ["cuDNN is not detected."] * 2


# Equality


def as_one_device(fn: Any, *args: Any) -> Any:
    with jax_compat.described_gpu():
        return jax.jit(fn)(*args)


MESHES = (8,), (2, 4), (2, 2, 2)
BIAS = jax.random.normal(jax.random.key(1), (1, 4, 16, 16), BF16)
CASES: dict[str, tuple[Any, list[Any]]] = {
    "causal": (gradients(attend, 3), arrays()),
    "grouped queries": (gradients(attend, 3), arrays(n=8, k=4)),
    "bias of all examples": (gradients(attend, 4), [*arrays(), BIAS]),
    "lengths": (gradients(attend, 3), [*arrays(), None, jnp.arange(8, dtype=jnp.int32) + 3]),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("name", "mesh"),
    sample(
        itertools.product(CASES, MESHES),
        [
            *(("causal", mesh) for mesh in MESHES),
            ("grouped queries", (2, 4)),
            ("bias of all examples", (2, 2, 2)),
            ("lengths", (8,)),
        ],
    ),
)
def test_equal_to_one_device(name: str, mesh: tuple[int, ...]) -> None:
    fn, args = CASES[name]
    step = autopar.parallelize(fn, mesh=mesh, cluster=dear(mesh))
    assert not any("replicated (" in note and "attention" in note for note in step.plan(*args).notes)
    for ours, theirs in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(as_one_device(fn, *args)), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=2e-2, atol=2e-5)


def bidirectional(*args: Any) -> Any:
    return attend(*args, causal=False)


half = partial(arrays, dtype=jnp.float16)
LAST = jax.random.normal(jax.random.key(1), (1, 1, 16, 16), jnp.float16)
#: Title -> function, arguments, layout of the queries on the mesh (2, 4): the dimension that each axis cuts.
CONTEXT: dict[str, tuple[Any, list[Any], tuple[int, int]]] = {
    "along two axes": (gradients(attend, 3), half(b=1, n=1, k=1), (1, 1)),
    "beside the batch": (gradients(attend, 3), half(b=2, n=1, k=1), (0, 1)),
    "beside heads": (gradients(attend, 3), half(b=1, n=2, k=2), (2, 1)),
    "grouped queries": (gradients(attend, 3), half(b=1, n=8, k=2), (2, 1)),
    "one head of keys": (gradients(attend, 3), half(b=1, k=1), (1, 1)),
    "longer": (gradients(attend, 3), half(b=1, t=96, n=1, k=1), (1, 1)),
    "no gradient": (lambda *args: attend(*args).astype(jnp.float32), half(b=1, n=1, k=1), (1, 1)),
    "no mask": (gradients(bidirectional, 3), half(b=1, n=1, k=1), (1, 1)),
    "no mask, fewer keys": (
        gradients(bidirectional, 3),
        [half(b=1, n=1, k=1)[0], *(x[:, :12] for x in half(b=1, n=1, k=1)[1:])],
        (1, 1),
    ),
    "no mask, a bias": (gradients(bidirectional, 4), [*half(b=2, n=1, k=1), LAST], (0, 1)),
}


def cut_along(name: str) -> tuple[Any, list[Any], Any]:
    """The function of a row of `CONTEXT`, its arguments, and the parallelized function."""
    fn, args, layout = CONTEXT[name]
    axes = {d: tuple(a for a, cut in zip("xy", layout, strict=True) if cut == d) for d in layout if d >= 0}
    spec = P(*(axes.get(d) for d in range(4)))
    return fn, args, autopar.parallelize(fn, mesh={"x": 2, "y": 4}, cluster=dear((2, 4)), pins={"arg:0": spec})


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", CONTEXT)
def test_queries_cut_along_their_positions_equal_one_device(name: str) -> None:
    fn, args, step = cut_along(name)
    graph, plan = trace(fn, *args).graph, step.plan(*args)
    op = next(op for op in graph.walk() if op.name == FORWARD)
    assert plan.stages[0].uses.get(f"{op.tag}.in0", plan.inputs[0]) == CONTEXT[name][2]
    for ours, theirs in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(as_one_device(fn, *args)), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=0, atol=4e-3 * np.abs(theirs).max())


def in_rings(plan: autopar.Plan, graph: Graph) -> autopar.Plan:
    """The plan with keys and values passed round in all attention, whatever that costs."""
    tags = tuple(op.tag for op in graph.walk() if op.name in ATTENTION)
    return replace(plan, stages=(replace(plan.stages[0], rings=tags),))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", [n for n in CONTEXT if "bias" not in n and "fewer" not in n])
def test_keys_and_values_passed_round_equal_one_device(name: str) -> None:
    fn, args, step = cut_along(name)
    plan = in_rings(step.plan(*args), trace(fn, *args).graph)
    ring = autopar.parallelize(fn, plan=plan)
    for ours, theirs in zip(jax.tree.leaves(ring(*args)), jax.tree.leaves(as_one_device(fn, *args)), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=0, atol=4e-3 * np.abs(theirs).max())


#: Title -> function of many keys and values, and the share of its memory within which it is planned again.
SHORT: dict[str, tuple[Any, float]] = {
    "causal": (gradients(attend, 3), 0.6),
    "no mask": (gradients(bidirectional, 3), 0.6),
    "forward pass alone": (lambda *args: attend(*args).astype(jnp.float32), 0.8),
}


#: Of `SHORT`, those in which the backward pass alone is a ring; a plan is called by its forward pass.
GRADIENTS = ("causal", "no mask")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", SHORT)
def test_keys_and_values_are_passed_round_where_memory_is_short(name: str) -> None:
    """Everything that they send is predicted; what both passes exchange alike, the compiler for CPU may send once."""
    (fn, share), args = SHORT[name], half(b=1, t=256, n=1, k=1)
    options: dict[str, Any] = {
        "mesh": {"x": 2, "y": 4},
        "cluster": dear((2, 4)),
        "pins": {"arg:0": P(None, ("x", "y"))},
    }
    plan = autopar.plan(fn, *args, **options)
    budget = int(share * plan.peak_memory_bytes)
    step = autopar.parallelize(fn, memory_budget=budget, **options)
    short = step.plan(*args)
    assert not plan.stages[0].rings
    assert short.stages[0].rings
    assert short.peak_memory_bytes <= budget
    assert short.step_time_s > plan.step_time_s
    assert any("keys and values are passed round in a ring along x and y" in note for note in short.notes)
    assert ("context parallel over x and y (8 ways: keys and values in a ring)" in str(short)) == (
        name not in GRADIENTS
    )
    at = [c for c in short.collectives if c.source.startswith("test_cudnn") and c.kind != "all-reduce"]
    predicted = Counter((c.kind, c.axes, c.bytes) for c in at for _ in range(c.count))
    report = verify_compiled(step.compiled(*args), fn, *args)
    emitted = Counter((c.kind, c.axes, c.bytes) for c in report.collectives for _ in range(c.count))
    assert predicted
    for key, count in predicted.items():
        assert count // 2 <= emitted[key] <= count, key
    for ours, theirs in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(as_one_device(fn, *args)), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=0, atol=4e-3 * np.abs(theirs).max())


@pytest.mark.usefixtures("on_cpu")
def test_each_block_is_two_calls_of_cudnn_in_either_pass() -> None:
    """Lowered for CUDA: without a device to run it, the calls are all that can be seen."""
    fn, args, step = cut_along("grouped queries")
    traced, mesh = trace(fn, *args), jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax_compat.described_gpu():
        program = emit.program(traced.graph, step.plan(*args), rules_of(traced.graph), mesh)
        text = program.jit().trace(*traced.in_avals).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@__cudnn$fmha" in line]
    kinds = Counter(("Backward" in line, re.findall(r"mask_type\\22: \\22(\w+)\\22", line)[0]) for line in calls)
    assert kinds == {(backward, mask): 2 for backward in (False, True) for mask in ("CAUSAL", "PADDING")}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["along two axes", "beside heads", "no mask, a bias"])
def test_what_devices_send_inside_the_kernel_is_predicted(name: str) -> None:
    """The compiler for CPU ignores barriers: what both passes gather or exchange alike, it may send once for both."""
    fn, args, step = cut_along(name)
    at = [c for c in step.plan(*args).collectives if c.source.startswith("test_cudnn") and c.kind != "all-reduce"]
    predicted = Counter((c.kind, c.axes, c.bytes) for c in at for _ in range(c.count))
    report = verify_compiled(step.compiled(*args), fn, *args)
    emitted = Counter((c.kind, c.axes, c.bytes) for c in report.collectives for _ in range(c.count))
    assert predicted
    for key, count in predicted.items():
        fewest = count if key[0] == "reduce-scatter" else count // 2
        assert fewest <= emitted[key] <= count, key


def two_layers(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            q, k, v = (jnp.einsum("btd,dnh->btnh", h, w[i]) for i in range(3))
            h = h + attend(q, k, v).reshape(h.shape)
        return (h.astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, grads), value


MICROBATCHES: dict[str, Any] = {"num_microbatches": 2}
STAGES: dict[str, Any] = {"stages": 2, "schedule": "1f1b"}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("options", "share"),
    sample(
        [({}, 1.0), *((options, share) for options in (MICROBATCHES, STAGES) for share in (1.0, 0.75))],
        [(MICROBATCHES, 0.75), (STAGES, 1.0), (STAGES, 0.75)],
    ),
    ids=str,
)
def test_positions_are_cut_in_microbatches_and_in_stages(options: dict[str, Any], share: float) -> None:
    """Within 75% of the memory, keys and values are passed round."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [0.3 * jax.random.normal(key, (3, 8, 1, 8), jnp.float16) for key in keys[:2]]
    x = jax.random.normal(keys[2], (4, 32, 8), jnp.float16)
    options = {"mesh": {"x": 2, "y": 4}, "cluster": dear((2, 4)), **options}
    if share < 1:
        peak = autopar.plan(two_layers, weights, x, **options).peak_memory_bytes
        options["memory_budget"] = int(share * peak)
    step = autopar.parallelize(two_layers, **options)
    plan = step.plan(weights, x)
    assert any("context" in forms for forms in plan.forms.values())
    assert any(stage.rings for stage in plan.stages) == (share < 1)
    whole = as_one_device(two_layers, weights, x)
    for ours, theirs in zip(jax.tree.leaves(step(weights, x)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=0, atol=4e-3 * np.abs(theirs).max())


@pytest.mark.usefixtures("on_cpu")
def test_microbatches_equal_the_whole_batch() -> None:
    def step(weights: Any, bias: Any, x: Any) -> Any:
        def loss(weights: Any, bias: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights)
            return (attend(q, k, v, bias).astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss, (0, 1))(weights, bias)
        return value, grads

    weights = jax.random.normal(jax.random.key(2), (3, 32, 4, 8), BF16) / 4
    args = weights, BIAS, jax.random.normal(jax.random.key(3), (8, 16, 32), BF16)
    whole = as_one_device(step, *args)
    parallel = autopar.parallelize(step, mesh=(2,), cluster=dear((2,)), num_microbatches=2, batch_argnums=(2,))
    for ours, theirs in zip(jax.tree.leaves(parallel(*args)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=2e-2, atol=2e-5)
