"""Trains a Mixture-of-Experts transformer block, written in Equinox, on 8 devices.

    python examples/train_moe_equinox.py

Each token goes to two of eight experts. An expert takes at most CAPACITY tokens of a sequence. A balance loss keeps the
router from sending most tokens to a few experts (Fedus et al., 2022). Nothing in the model says which device has which
expert. The text is the source of Python's standard library. The program shows the plan, trains, and ends with three
checks:

    the loss of the last steps is at least 0.5 nats below the unigram entropy of the text
    no expert gets more than three times its share of the tokens
    three parallel steps equal three steps of `eqx.filter_jit` on a single device

It exits with 1 when one fails. Without an accelerator it runs on 8 virtual CPU devices.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

Batch = dict[str, Any]

WIDTH, HEADS, EXPERTS, CHOSEN = 64, 4, 8, 2
BATCH, SEQ, STEPS = 16, 32, 60
CAPACITY = 2 * CHOSEN * SEQ // EXPERTS  # tokens of a sequence that an expert takes: twice an even share
BALANCE = 0.01  # weight of the balance loss
COMPARED_STEPS, LOSS_TOLERANCE, NEEDED_NATS, MOST_LOAD = 3, 1e-5, 0.5, 3.0


def rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


class Experts(eqx.Module):
    """A router, and two matrices for each expert."""

    router: jax.Array  # [D, E]
    up: jax.Array  # [E, D, F]
    down: jax.Array  # [E, F, D]

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.router = 0.1 * jax.random.normal(keys[0], (WIDTH, EXPERTS))
        self.up = 0.1 * jax.random.normal(keys[1], (EXPERTS, WIDTH, 2 * WIDTH))
        self.down = 0.1 * jax.random.normal(keys[2], (EXPERTS, 2 * WIDTH, WIDTH))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Outputs for one sequence x [S,D]; and the share of its tokens and mean probability of each expert, [2,E]."""
        probabilities = jax.nn.softmax(x @ self.router)  # [S, E]
        weights, experts = jax.lax.top_k(probabilities, CHOSEN)  # [S, 2]
        chosen = jax.nn.one_hot(experts.T, EXPERTS)  # [2, S, E], first choices before second ones
        order = jnp.cumsum(chosen.reshape(-1, EXPERTS), axis=0).reshape(chosen.shape) - 1
        order = jnp.where(chosen > 0, order, -1).astype(int)
        slots = jax.nn.one_hot(order, CAPACITY)  # [2, S, E, C]; zero beyond the capacity
        send = slots.sum(0)
        combine = jnp.einsum("ksec,sk->sec", slots, weights / weights.sum(-1, keepdims=True))
        y = jnp.einsum("sec,sd->ecd", send, x)
        y = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", y, self.up)), self.down)
        return jnp.einsum("sec,ecd->sd", combine, y), jnp.stack([chosen.mean((0, 1)), probabilities.mean(0)])


class Model(eqx.Module):
    """One transformer block between an embedding and a head."""

    embed: jax.Array
    positions: jax.Array
    attention: eqx.nn.MultiheadAttention
    experts: Experts
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 5)
        self.embed = 0.5 * jax.random.normal(keys[0], (256, WIDTH))
        self.positions = 0.02 * jax.random.normal(keys[1], (SEQ, WIDTH))
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[2])
        self.experts = Experts(keys[3])
        self.head = eqx.nn.Linear(WIDTH, 256, use_bias=False, key=keys[4])

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits of one sequence, and what `Experts` says of the router."""
        x = self.embed[tokens] + self.positions
        y = rms_norm(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((SEQ, SEQ), bool)))
        y, routed = self.experts(rms_norm(x))
        return jax.vmap(self.head)(rms_norm(x + y)), routed


def loss_fn(model: Model, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy (nats) and balance loss; with the cross-entropy and the load of each expert."""
    logits, routed = jax.vmap(model)(batch["tokens"])
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    load, probability = routed.mean(0)
    balance = EXPERTS * jnp.sum(load * probability)  # 1 if all experts are chosen equally often
    return entropy + BALANCE * balance, {"loss": entropy, "load": load}


optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))


@autopar.parallelize
def train_step(model: Model, opt_state: Any, batch: Batch) -> tuple[Model, Any, dict[str, jax.Array]]:
    (_, metrics), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, batch)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, metrics


def create(key: jax.Array) -> tuple[Model, Any]:
    model = Model(key)
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def batches(text: np.ndarray) -> Iterator[Batch]:
    """Windows that start anywhere in the text; the same ones in every run."""
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(text) - SEQ, size=BATCH)
        windows = text[starts[:, None] + np.arange(SEQ + 1)].astype(np.int32)
        yield {"tokens": windows[:, :-1], "labels": windows[:, 1:]}


def run(step: Any, state: tuple[Model, Any], text: np.ndarray, steps: int) -> list[dict[str, np.ndarray]]:
    """The metrics of every step."""
    model, opt_state = state
    metrics: list[dict[str, np.ndarray]] = []
    for batch in islice(batches(text), steps):
        model, opt_state, now = step(model, opt_state, batch)
        metrics.append(jax.device_get(now))
    return metrics


def main() -> int:
    """Runs the example; 0 when all checks hold."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    share = np.bincount(text, minlength=256)[np.unique(text)] / len(text)
    entropy = float(-(share * np.log(share)).sum())

    key = jax.random.key(0)
    shapes = eqx.filter_eval_shape(create, key)
    print("\n".join(train_step.plan(*shapes, next(batches(text))).summary().splitlines()[:16]))
    state = train_step.init(create, key)  # born sharded: never whole on one device
    arrays, rest = eqx.partition(state, eqx.is_array)
    on_one = eqx.combine(jax.device_put(autopar.gather(arrays), jax.devices()[0]), rest)
    single = run(eqx.filter_jit(train_step.__wrapped__), on_one, text, COMPARED_STEPS)
    parallel = run(train_step, state, text, STEPS)

    last = float(np.mean([step["loss"] for step in parallel[-10:]]))
    load = float(np.max(np.mean([step["load"] for step in parallel[-10:]], axis=0))) * EXPERTS
    distance = max(float(abs(a["loss"] - b["loss"]) / b["loss"]) for a, b in zip(parallel, single, strict=False))
    learnt, balanced, equal = entropy - last >= NEEDED_NATS, load <= MOST_LOAD, distance <= LOSS_TOLERANCE
    words = {True: "ok", False: "FAILED"}
    print(f"loss of the last steps {last:.2f} nats, unigram entropy {entropy:.2f}: {words[learnt]}")
    print(f"the busiest expert gets {load:.1f} times an even share of the tokens: {words[balanced]}")
    print(
        f"{COMPARED_STEPS} parallel steps equal the single-device run: loss within {distance:.1e} "
        f"(allowed {LOSS_TOLERANCE:.0e}): {words[equal]}"
    )
    return 0 if learnt and balanced and equal else 1


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
