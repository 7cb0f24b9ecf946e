"""State that one plan shards is saved with Orbax and resumed under another plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import autopar
from autopar.api.parallel_function import ParallelFunction

KEY = jax.random.key(0)
BATCH = jnp.ones((16, 32))


def init_params(key):
    return [0.1 * jax.random.normal(k, (32, 32)) for k in jax.random.split(key, 4)]


def train_step(params, batch):
    def loss_fn(params):
        x = batch
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], loss


def started(options) -> tuple[ParallelFunction, list[jax.Array]]:
    """The step, and a first state in its shardings."""
    step = autopar.parallelize(train_step, **options)
    step.plan(jax.eval_shape(init_params, KEY), BATCH)
    return step, step.init(init_params, KEY)


FSDP = {"mesh": {"data": 8}, "pins": autopar.pins.fsdp("data")}
TENSOR = {"mesh": {"data": 2, "model": 4}, "pins": {"params": jax.sharding.PartitionSpec(None, "model")}}
FOUR_STAGES = {"mesh": (4, 2), "stages": 4, "num_microbatches": 2}
TWO_STAGES = {"mesh": (2, 4), "stages": 2, "num_microbatches": 2}


@pytest.mark.parametrize(
    ("before", "after"),
    [(FSDP, TENSOR), (FOUR_STAGES, TWO_STAGES), (TWO_STAGES, FSDP)],
    ids=("another mesh", "fewer stages", "no stages"),
)
def test_resumed_under_another_plan(before, after, tmp_path):
    step, params = started(before)
    params, _ = step(params, BATCH)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", params)
    expected = autopar.gather(step(params, BATCH))

    resumed, like = started(after)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", target)
    assert [x.sharding for x in restored] == [x.sharding for x in like]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), resumed(restored, BATCH), expected
    )
