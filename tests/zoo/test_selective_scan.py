"""The selective scan: the kernel gives what compositions give, and is cut by batch and channels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError, TraceError
from autopar.hardware.cluster import Cluster
from autopar.ir.trace import trace
from autopar.rules import pallas, rules_of
from autopar.verification.verify import verify_compiled
from autopar.zoo.layers import selective_scan
from tests.support.effort import sample

OPTIONS = {"xla_backend_optimization_level": 0}  # what runs twice need not be fast
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on CPU, in several blocks of channels and chunks of the sequence."""
    kernel = partial(selective_scan.pallas, interpret=True)
    monkeypatch.setattr(selective_scan, "SCANS", {**selective_scan.SCANS, "pallas": kernel})
    monkeypatch.setattr(selective_scan, "CHANNELS", 8)
    monkeypatch.setattr(selective_scan, "STEPS", 4)


def operands(seq: int, channels: int) -> tuple[jax.Array, ...]:
    """x, delta, A, B, C and the gradient by y."""
    keys = jax.random.split(jax.random.key(0), 6)
    wide, narrow = (2, seq, channels), (2, seq, 4)
    x, delta, b, c, g = (
        jax.random.normal(k, s) for k, s in zip(keys, (wide, wide, narrow, narrow, wide), strict=False)
    )
    a = -jnp.exp(jax.random.normal(keys[5], (channels, 4)))
    return x, jax.nn.softplus(delta), a, b, c, g


def with_gradients(scan: Callable[..., jax.Array], *args: jax.Array) -> Any:
    def run(*args: jax.Array) -> Any:
        y, backward = jax.vjp(scan, *args[:-1])
        return y, backward(args[-1])

    return jax.jit(run, compiler_options=OPTIONS)(*args)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("seq", "channels"), [(12, 16), (7, 6)])
def test_the_kernel_equals_compositions_forward_and_backward(seq: int, channels: int) -> None:
    """The second in one block and one chunk, of sizes that nothing divides."""
    args = operands(seq, channels)
    jax.tree.map(close, *(with_gradients(scan, *args) for scan in selective_scan.SCANS.values()))


def test_compositions_equal_the_recurrence() -> None:
    x, delta, a, b, c, _ = map(np.asarray, operands(12, 16))
    state, rows = np.zeros((2, 16, 4)), []
    for t in range(12):
        state = np.exp(delta[:, t, :, None] * a) * state + (delta * x)[:, t, :, None] * b[:, t, None]
        rows.append((state * c[:, t, None]).sum(-1))
    close(selective_scan.associative(x, delta, a, b, c), np.stack(rows, 1))


# Rules


RULES = {
    "forward": "a c b, a d b, e b, a f g, a h i -> a j b, a k l b | keep c d e f g h i j k l",
    "backward": "a c b, a d b, e b, a f g, a h i, a j k b, a l b -> a m b, a n b, a o b, a b p q, a b r s "
    "| keep c d e f g h i j k l m n o p q r s",
}


@pytest.mark.core
def test_rules_are_derived_along_the_batch_and_along_channels() -> None:
    """Each keeps what it does not cut: the sequence, and the states of a channel."""
    model = zoo.build("mamba-130m", selective_scan="pallas", layers=1)
    graph = trace(model.step, *model.abstract_args()).graph
    rules = {op.params["name"]: rules_of(graph)[op.signature] for op in graph.walk() if op.name == "pallas_call"}
    assert {name.removeprefix("selective_scan_"): str(rule) for name, rule in rules.items()} == RULES
    for rule in rules.values():
        assert [rule.sizes[factor] for factor in rule.free] == [256, 1536 // 128]


# In plans


MESHES = ((8,), (2, 4), (2, 2, 2))


@cache
def toy() -> tuple[Any, Any, Any]:
    """A model of one layer, its arguments, and what a step gives on one device."""
    model = zoo.build("mamba-toy", selective_scan="pallas", layers=1, batch=4, seq=8)
    args = jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    return model, args, jax.jit(model.step, compiler_options=OPTIONS)(*args)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("mesh", sample(MESHES, [(8,), (2, 2, 2)]))
def test_a_step_equals_the_single_device(mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[int, ...]] = []

    def bind_part(equation: Any, results: Any, operands: Any, specs: Any) -> Any:
        parts.append(operands[0].shape)
        return plain(equation, results, operands, specs)

    plain = pallas.bind_part
    monkeypatch.setattr(pallas, "bind_part", bind_part)
    model, args, (state, metrics) = toy()
    parallel = autopar.parallelize(model.step, mesh=mesh, cluster=dear(mesh), donate_argnums=())
    compiled = parallel.lower(*args).compile(OPTIONS)
    assert verify_compiled(compiled, model.step, *args).ok
    assert {4 // batch * (64 // channels) for batch, _, channels in parts} == {8}, "devices do the same"
    assert any(channels < 64 for _, _, channels in parts)
    after, also = compiled(*args)
    jax.tree.map(close, (after["opt"], also), (state["opt"], metrics))


def test_a_plan_says_why_the_sequence_is_whole() -> None:
    model = zoo.build("mamba-130m", selective_scan="pallas", layers=2, batch=16)
    plan = autopar.plan(model.step, *model.abstract_args(), mesh=(2, 4), cluster="tpu-v5p")
    for name, why in (
        ("forward", "the kernel reads scratch memory that a run before has written"),
        ("backward", "result 2 has no dimension of it: it accumulates over this axis"),
    ):
        (note,) = [note for note in plan.notes if f"pallas_call selective_scan_{name} is not cut" in note]
        assert note.endswith(f"along grid axis 2: {why}")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("mesh", sample([(2,), (2, 2)], [(2, 2)]))
def test_stages_and_microbatches_equal_the_single_device(mesh: tuple[int, ...]) -> None:
    model = zoo.build("mamba-toy", selective_scan="pallas", batch=4, seq=8)
    args = jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    options: dict[str, Any] = {"stages": 2, "num_microbatches": 2, "schedule": "1f1b", "donate_argnums": ()}
    parallel = autopar.parallelize(model.step, mesh=mesh, cluster=dear(mesh), **options)
    whole, staged = jax.jit(model.step, compiler_options=OPTIONS)(*args), parallel(*args)
    for ours, theirs in zip(staged, whole, strict=True):
        jax.tree.map(close, ours.get("opt", ours), theirs.get("opt", theirs))


# What is refused


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("mamba-toy", {"selective_scan": "cuda"}, "'cuda' of 'mamba-toy' is not known; use associative, pallas"),
        (
            "gpt-toy",
            {"selective_scan": "pallas"},
            "'gpt-toy' takes no 'selective_scan'; it takes: layers, batch, seq, ",
        ),
        (
            "mamba-toy",
            {"attention": "splash"},
            "it takes: layers, batch, seq, precision, selective_scan, tied, scan, remat",
        ),
    ],
)
def test_a_scan_that_the_model_cannot_have_is_refused_with_the_others(
    target: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        zoo.build(target, **options)
    assert message in str(caught.value)


def test_the_kernel_is_not_planned_for_gpus() -> None:
    model = zoo.build("mamba-130m", selective_scan="pallas", layers=1, batch=8)
    with pytest.raises(TraceError, match=r"uses a Pallas kernel for TPUs at .*, and 'dgx-h100' has H100"):
        autopar.plan(model.step, *model.abstract_args(), mesh=(2,), cluster=Cluster.named("dgx-h100", None, 2))
