"""Steps with a `shard_map` of the user's in microbatches: equal to one device, or refused with the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import MicrobatchError
from tests.programs.hand_sharded import CASES, WIDTH, Case, Loss, array, squares, train_step
from tests.programs.test_real_programs import assert_equal

MESHES = {"8": ((8,), ("model",)), "2x4": ((2, 4), ("data", "model"))}
COUNT = 2


def mesh_of(name: str) -> Mesh:
    sizes, names = MESHES[name]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def check(case: Case, count: int = COUNT) -> autopar.Plan:
    """The plan of a step in microbatches, whose result is that of the whole step on one device."""
    by_hand, whole, params, batch = case
    step = train_step(by_hand)
    plan = autopar.plan(step, params, batch, num_microbatches=count)
    assert plan.num_microbatches == count
    got = autopar.parallelize(step, donate_argnums=(), plan=plan)(params, batch)
    assert_equal(got, jax.jit(train_step(whole))(params, batch))
    return plan


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_steps_sharded_by_hand_run_in_microbatches(mesh: str, name: str) -> None:
    check(CASES[name](mesh_of(mesh)))


@pytest.mark.parametrize("name", CASES)
def test_what_they_send_is_predicted(name: str) -> None:
    by_hand, _, params, batch = CASES[name](mesh_of("2x4"))
    step = train_step(by_hand)
    plan = autopar.plan(step, params, batch, num_microbatches=COUNT)
    report = autopar.verify(plan, step, params, batch)
    assert report.ok, str(report)


def test_a_device_computes_its_own_examples_in_every_microbatch() -> None:
    """Rows move between no devices: those of a microbatch are a part of every shard."""
    by_hand, _, params, batch = CASES["fsdp"](mesh_of("8"))
    plan = autopar.plan(train_step(by_hand), params, batch, num_microbatches=COUNT)
    assert {c.kind for c in plan.collectives} <= {"all-gather", "reduce-scatter", "all-reduce"}


def scattered(x: jax.Array, w: jax.Array) -> jax.Array:
    every = jnp.tanh(lax.all_gather(x, "data", tiled=True) @ w)
    return lax.psum_scatter(every, "data", tiled=True) / 2


def features(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(lax.all_gather(x @ w, "model", axis=1, tiled=True)[:, :WIDTH])


def placed(x: jax.Array, w: jax.Array) -> jax.Array:
    """Depends on where a device is."""
    return jnp.tanh(x @ w) * jnp.where(lax.axis_index("data") < 2, 1.0, 0.0)


def rematerialised(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("body", [scattered, features, placed, rematerialised])
def test_bodies_in_microbatches(body: Callable[..., jax.Array], checked: bool) -> None:
    if checked and body is features:
        pytest.skip("JAX takes its result, which is the same over the axis model, for one that is not")
    mapped = jax.shard_map(body, mesh=mesh_of("2x4"), in_specs=(P("data"), P()), out_specs=P("data"), check_vma=checked)
    check((squares(mapped), squares(product), array(0, WIDTH, WIDTH), array(1, 16, WIDTH)))


def greatest(h: jax.Array) -> jax.Array:
    return lax.pmax(h.max(1, keepdims=True), "model")


def greatest_by_the_least(h: jax.Array) -> jax.Array:
    return -lax.pmin((-h).min(1, keepdims=True), "model")


@pytest.mark.parametrize("most", [greatest, greatest_by_the_least])
def test_a_softmax_over_devices(most: Callable[[jax.Array], jax.Array]) -> None:
    """A maximum and a sum over an axis that cuts no examples."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        h = x * w
        h = jnp.exp(h - most(lax.stop_gradient(h)))
        return h / lax.psum(h.sum(1, keepdims=True), "model")

    specs = (P("data", "model"), P("model"))
    mapped = jax.shard_map(body, mesh=mesh_of("2x4"), in_specs=specs, out_specs=P("data", "model"))
    check((squares(mapped), squares(lambda x, w: jax.nn.softmax(x * w)), array(0, WIDTH), array(1, 16, WIDTH)))


def test_layers_in_a_scan_and_narrow_floats() -> None:
    """A `shard_map` in the body of a scan; gradients of weights in bfloat16 are summed in float32."""
    layer = jax.shard_map(
        lambda x, w: jnp.tanh(lax.psum(x @ w, "model")),
        mesh=mesh_of("2x4"),
        in_specs=(P("data", "model"), P("model")),
        out_specs=P("data"),
    )

    def loss(layer_of: Callable[..., jax.Array]) -> Loss:
        return lambda w, x: (lax.scan(lambda h, w: (layer_of(h, w), None), x, w)[0].astype(jnp.float32) ** 2).mean()

    weights, x = array(0, 3, WIDTH, WIDTH), array(1, 16, WIDTH)
    check((loss(layer), loss(lambda x, w: jnp.tanh(x @ w)), weights, x))
    narrow, step = weights.astype(jnp.bfloat16), train_step(loss(layer))
    got = autopar.parallelize(step, donate_argnums=(), num_microbatches=COUNT)(narrow, x.astype(jnp.bfloat16))
    want = jax.jit(step)(narrow, x.astype(jnp.bfloat16))
    assert jnp.allclose(got[0].astype(jnp.float32), want[0].astype(jnp.float32), atol=2e-2)
    assert jnp.allclose(got[1], want[1], rtol=2e-2)


def test_axes_that_are_not_manual() -> None:
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    mapped = jax.shard_map(product, mesh=mesh_of("2x4"), axis_names={"data"}, **specs)
    check((squares(mapped), squares(product), array(0, WIDTH, WIDTH), array(1, 16, WIDTH)))


def refused(body: Callable[..., Any], count: int = COUNT, rows: int = 16) -> str:
    mapped = jax.shard_map(body, mesh=mesh_of("2x4"), in_specs=(P("data"), P()), out_specs=P("data"))
    step, args = train_step(squares(mapped)), (array(0, WIDTH, WIDTH), array(1, rows, WIDTH))
    with pytest.raises(MicrobatchError) as error:
        autopar.plan(step, *args, num_microbatches=count)
    return str(error.value)


def test_bodies_that_combine_examples_are_refused_with_the_line() -> None:
    def centred(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w - lax.pmean((x @ w).mean(0), "data")

    def contrastive(x: jax.Array, w: jax.Array) -> jax.Array:
        every = lax.all_gather(x @ w, "data", tiled=True)
        return jax.nn.softmax((x @ w) @ every.T) @ every

    def shifted(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.roll(x @ w, 1, axis=0)

    for body in (centred, contrastive, shifted):
        message = refused(body)
        assert re.search(r"shard_map at \S+ does not run on a part of the batch: \w+ at test_hand_sharded_mic", message)
        assert "in its body combines examples" in message or "in its body reads a total over the batch" in message


def test_shards_that_do_not_divide_are_refused() -> None:
    message = refused(lambda x, w: jnp.tanh(x @ w), 8, 8)
    assert "does not run on a part of the batch" in message
    assert "gives devices pieces that do not divide into 8 microbatches" in message


def test_examples_may_change_devices() -> None:
    """Examples that a permutation sends on are those of the same microbatch."""
    turn = [(0, 1), (1, 0)]
    by_hand = jax.shard_map(
        lambda x, w: lax.ppermute(jnp.tanh(x @ w), "data", turn),
        mesh=mesh_of("2x4"),
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )

    def whole(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.roll(jnp.tanh(x @ w), 8, axis=0)

    def weighted(f: Callable[..., jax.Array]) -> Loss:
        weights = jnp.arange(16.0)[:, None]  # of examples, so that their order matters
        return lambda w, x: ((f(x, w) * weights) ** 2).mean()

    check((weighted(by_hand), weighted(whole), array(0, WIDTH, WIDTH), array(1, 16, WIDTH)))
