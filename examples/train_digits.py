"""Trains an image classifier with batch norm, written in Flax Linen, on 8 devices.

    python examples/train_digits.py

The images are the 1,797 handwritten digits that come with scikit-learn (`pip install scikit-learn`). The batch is
sharded over devices, and batch norm still normalises by the mean and variance of the whole batch: the plan has the
all-reduces that this takes. The program shows the plan, trains, and ends with two checks:

    the accuracy on held-out images is at least 95%
    three parallel steps equal three steps of plain `jax.jit` on a single device

It exits with 1 when either fails. Without an accelerator it runs on 8 virtual CPU devices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import autopar

Batch = dict[str, Any]

HELD_OUT, BATCH, STEPS = 360, 128, 50
COMPARED_STEPS, LOSS_TOLERANCE, NEEDED_ACCURACY = 3, 1e-5, 0.95


class State(TrainState):
    """Parameters and optimizer state, and the running statistics of batch norm."""

    batch_stats: Any


class Classifier(nn.Module):
    """Two convolutions with batch norm, and a dense layer; images are f32[B,8,8,1], logits f32[B,10]."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


@autopar.parallelize
def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    """One step; the loss is that of the batch."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), updates

    (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads).replace(batch_stats=updates["batch_stats"]), loss


def load() -> tuple[Batch, Batch]:
    """Images and labels to learn from, and those held out."""
    digits: Any = load_digits()
    data = {"image": (digits.images[..., None] / 16).astype(np.float32), "label": digits.target.astype(np.int32)}
    order = np.random.default_rng(0).permutation(len(digits.target))
    return {k: x[order[HELD_OUT:]] for k, x in data.items()}, {k: x[order[:HELD_OUT]] for k, x in data.items()}


def batches(data: Batch) -> Iterator[Batch]:
    """Batches of whole epochs; the last images of an epoch, too few for a batch, are left out."""
    random = np.random.default_rng(1)
    while True:
        order = random.permutation(len(data["label"]))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            yield {name: x[order[start : start + BATCH]] for name, x in data.items()}


def main() -> int:
    """Runs the example; 0 when both checks hold."""
    data, held_out = load()
    model, optimizer = Classifier(), optax.adamw(1e-2)

    def create(key: jax.Array) -> State:
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
        return State.create(
            apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=optimizer
        )

    key = jax.random.key(0)
    first = next(batches(data))
    plan = train_step.plan(jax.eval_shape(create, key), first)
    print("\n".join(plan.summary().splitlines()[:16]))
    state = train_step.init(create, key)

    on_one = jax.device_put(autopar.gather(state), jax.devices()[0])
    single_step, single = jax.jit(train_step.__wrapped__), list[float]()
    for batch in islice(batches(data), COMPARED_STEPS):
        on_one, loss = single_step(on_one, batch)
        single.append(float(loss))

    losses: list[float] = []
    for step, batch in enumerate(islice(batches(data), STEPS)):
        state, loss = train_step(state, batch)
        losses.append(float(loss))
        if step % 20 == 0:
            print(f"  step {step:3d}  loss {losses[-1]:.3f}")

    variables = autopar.gather({"params": state.params, "batch_stats": state.batch_stats})
    logits = jax.jit(lambda variables, x: model.apply(variables, x, train=False))(variables, held_out["image"])
    accuracy = float(np.mean(np.argmax(logits, axis=-1) == held_out["label"]))
    learnt = accuracy >= NEEDED_ACCURACY
    print(
        f"accuracy on {HELD_OUT} held-out images {accuracy:.1%} (needed {NEEDED_ACCURACY:.0%}): "
        f"{'ok' if learnt else 'FAILED'}"
    )
    distance = max(abs(a - b) / b for a, b in zip(losses, single, strict=False))
    equal = distance <= LOSS_TOLERANCE
    print(
        f"{COMPARED_STEPS} parallel steps equal the single-device run: loss within {distance:.1e} "
        f"(allowed {LOSS_TOLERANCE:.0e}): {'ok' if equal else 'FAILED'}"
    )
    return 0 if learnt and equal else 1


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
