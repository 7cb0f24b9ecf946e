"""Trains a byte-level LLaMA, written in Flax NNX, on 8 devices.

    python examples/train_llama_nnx.py

The train step takes modules and changes them, as under `nnx.jit`; `@autopar.parallelize` is the only difference. Layers
are created by `nnx.vmap` and run by `nnx.scan`, so that one layer is planned and compiled for all of them. The text is
the source of Python's standard library. The program shows the plan, trains, and ends with two checks:

    the loss of the last steps is at least 0.5 nats below the unigram entropy of the text
    three parallel steps equal three steps of `nnx.jit` on a single device

It exits with 1 when either fails. Without an accelerator it runs on 8 virtual CPU devices.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import autopar

Batch = dict[str, Any]


LAYERS, WIDTH, HEADS, KV_HEADS = 2, 64, 8, 4  # each key and value head serves HEADS / KV_HEADS query heads
BATCH, SEQ, STEPS = 32, 32, 80
COMPARED_STEPS, LOSS_TOLERANCE, NEEDED_NATS = 3, 1e-5, 0.5


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of x [B,S,H,K]."""
    seq, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(seq)[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        head = WIDTH // HEADS
        self.query = nnx.LinearGeneral(WIDTH, (HEADS, head), use_bias=False, rngs=rngs)
        self.key = nnx.LinearGeneral(WIDTH, (KV_HEADS, head), use_bias=False, rngs=rngs)
        self.value = nnx.LinearGeneral(WIDTH, (KV_HEADS, head), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, head), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = rotate(self.query(x)), rotate(self.key(x)), self.value(x)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = Attention(rngs)
        self.gate = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = create(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        return self.head(self.norm(run(self.blocks, self.embed(tokens))))


def loss_fn(model: Llama, batch: Batch) -> jax.Array:
    """Mean cross-entropy (nats) of the next byte."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["labels"]).mean()


@autopar.parallelize
def train_step(model: Llama, optimizer: nnx.Optimizer[Llama], batch: Batch) -> jax.Array:
    """One step; `model` and `optimizer` are updated in place."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def batches(text: np.ndarray) -> Iterator[Batch]:
    """Windows that start anywhere in the text; the same ones in every run."""
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(text) - SEQ, size=BATCH)
        windows = text[starts[:, None] + np.arange(SEQ + 1)].astype(np.int32)
        yield {"tokens": windows[:, :-1], "labels": windows[:, 1:]}


def main() -> int:
    """Runs the example; 0 when both checks hold."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    share = np.bincount(text, minlength=256)[np.unique(text)] / len(text)
    entropy = float(-(share * np.log(share)).sum())

    def create(seed: int = 0) -> tuple[Llama, nnx.Optimizer[Llama]]:
        model = Llama(nnx.Rngs(seed))
        return model, nnx.Optimizer(model, adam, wrt=nnx.Param)

    adam = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
    first = next(batches(text))
    print("\n".join(train_step.plan(*nnx.eval_shape(create), first).summary().splitlines()[:14]))
    model, optimizer = train_step.init(create)  # born sharded: never whole on one device

    structure, state = nnx.split((model, optimizer))
    on_one = nnx.merge(structure, jax.device_put(autopar.gather(state), jax.devices()[0]))
    single_step = nnx.jit(train_step.__wrapped__)
    single = [float(single_step(*on_one, batch)) for batch in islice(batches(text), COMPARED_STEPS)]

    losses: list[float] = []
    for step, batch in enumerate(islice(batches(text), STEPS)):
        losses.append(float(train_step(model, optimizer, batch)))
        if step % (STEPS // 4) == 0:
            print(f"  step {step:4d}  loss {losses[-1]:.3f}")

    last = float(np.mean(losses[-10:]))
    learnt = entropy - last >= NEEDED_NATS
    print(f"loss of the last steps {last:.2f} nats, unigram entropy {entropy:.2f}: {'ok' if learnt else 'FAILED'}")
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
