"""Fine-tunes a byte-level transformer with LoRA (Hu et al., 2022) on 8 devices; the base model is frozen.

    python examples/finetune_lora.py

The base learns Python source; adapters of rank 4 then learn English, from the texts of Python's interactive help. The
base is an argument that the fine-tuning step only reads: it has no gradients, no moments, and nothing of it is summed
over devices. The program shows these parts of the plan, trains, and ends with three checks:

    the held-out loss on English is at least 0.1 nats below that of the base
    what the devices sum in a step is less than a quarter of the base's gradients
    three parallel steps equal three steps of plain `jax.jit` on a single device

It exits with 1 when one fails. Without an accelerator it runs on 8 virtual CPU devices.
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

import autopar

Tree = Any
Batch = dict[str, np.ndarray]

LAYERS, WIDTH, HEADS, RANK = 2, 64, 4, 4
BATCH, SEQ, STEPS = 16, 32, 60
COMPARED_STEPS, LOSS_TOLERANCE, NEEDED_NATS, MOST_SUMMED = 3, 1e-5, 0.1, 0.25
MATRICES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))


def init_base(random: np.random.Generator) -> Tree:
    """Matrices of all layers, stacked; an embedding, and a head."""
    shapes = {name: (LAYERS, *shape) for name, shape in MATRICES.items()}
    outer = {"embed": (256, WIDTH), "positions": (SEQ, WIDTH), "head": (WIDTH, 256)}
    weights = {name: 0.05 * random.standard_normal(shape, np.float32) for name, shape in {**shapes, **outer}.items()}
    return {"layers": {name: weights.pop(name) for name in shapes}, **weights, "embed": 10 * weights["embed"]}


def init_lora(random: np.random.Generator) -> Tree:
    """A pair of thin matrices beside each matrix, whose product starts out as zero."""
    return {
        name: {
            "a": 0.05 * random.standard_normal((LAYERS, rows, RANK), np.float32),
            "b": np.zeros((LAYERS, RANK, columns), np.float32),
        }
        for name, (rows, columns) in MATRICES.items()
    }


def rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def loss_fn(lora: Tree, base: Tree, batch: Batch) -> jax.Array:
    """Mean cross-entropy (nats) of the next byte."""

    def layer(x: jax.Array, weights: tuple[Tree, Tree]) -> tuple[jax.Array, None]:
        w, pairs = weights

        def linear(name: str, x: jax.Array) -> jax.Array:
            return x @ w[name] + x @ pairs[name]["a"] @ pairs[name]["b"]

        heads = linear("qkv", rms_norm(x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        y = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        x = x + linear("out", y.reshape(x.shape))
        return x + linear("down", jax.nn.gelu(linear("up", rms_norm(x)))), None

    x = base["embed"][batch["tokens"]] + base["positions"]
    x, _ = jax.lax.scan(layer, x, (base["layers"], lora))
    logits = rms_norm(x) @ base["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def pretrain(text: bytes, lora: Tree) -> Tree:
    """A base that has learnt some of the text, on one device; the adapters are zero."""

    @jax.jit
    def step(base: Tree, opt: Tree, batch: Batch) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn, argnums=1)(lora, base, batch)
        updates, opt = optimizer.update(grads, opt)
        return optax.apply_updates(base, updates), opt, loss

    base, losses = init_base(np.random.default_rng(0)), list[jax.Array]()
    opt = optimizer.init(base)
    for batch in islice(batches(text), STEPS):
        base, opt, loss = step(base, opt, batch)
        losses.append(loss)
    print(f"base: loss {losses[-1]:.2f} nats on Python after {STEPS} steps")
    return autopar.gather(base)


@autopar.parallelize
def train_step(base: Tree, lora: Tree, opt: Tree, batch: Batch) -> tuple[Tree, Tree, jax.Array]:
    """Trains the adapters; the base is read."""
    loss, grads = jax.value_and_grad(loss_fn)(lora, base, batch)
    updates, opt = optimizer.update(grads, opt)
    return optax.apply_updates(lora, updates), opt, loss


def batches(text: bytes, seed: int = 0) -> Iterator[Batch]:
    """Windows that start anywhere in the text; one seed, one sequence of batches."""
    data, random = np.frombuffer(text, np.uint8), np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(data) - SEQ, size=BATCH)
        windows = data[starts[:, None] + np.arange(SEQ + 1)].astype(np.int32)
        yield {"tokens": windows[:, :-1], "labels": windows[:, 1:]}


def main() -> int:
    """Runs the example; 0 when all checks hold."""
    root = Path(sysconfig.get_path("stdlib"))
    python = b"".join(file.read_bytes() for file in sorted(root.glob("*.py")))
    english = (root / "pydoc_data" / "topics.py").read_bytes()
    english, held_out = english[: len(english) * 9 // 10], english[len(english) * 9 // 10 :]

    lora = init_lora(np.random.default_rng(1))
    base = pretrain(python, lora)
    opt = optimizer.init(lora)
    plan = train_step.plan(base, lora, opt, next(batches(english)))
    sections = plan.summary().split("\n\n")
    print("\n\n".join(s for s in sections if s.startswith(("Plan", "other arguments", "collectives"))), "\n")

    single_step, single = jax.jit(train_step.__wrapped__), list[float]()
    one_lora, one_opt = lora, opt
    for batch in islice(batches(english), COMPARED_STEPS):
        one_lora, one_opt, loss = single_step(base, one_lora, one_opt, batch)
        single.append(float(loss))

    losses, adapted = list[float](), lora
    for batch in islice(batches(english), STEPS):
        adapted, opt, loss = train_step(base, adapted, opt, batch)
        losses.append(float(loss))

    def held_out_loss(lora: Tree) -> float:
        return float(np.mean([evaluate(lora, base, batch) for batch in islice(batches(held_out), 4)]))

    evaluate = jax.jit(loss_fn)
    before, after = held_out_loss(lora), held_out_loss(autopar.gather(adapted))
    summed = sum(c.count * c.bytes for c in plan.collectives if c.kind in ("all-reduce", "reduce-scatter"))
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(base))
    distance = max(abs(a - b) / b for a, b in zip(losses, single, strict=False))
    learnt, frozen, equal = before - after >= NEEDED_NATS, summed <= MOST_SUMMED * gradients, distance <= LOSS_TOLERANCE
    words = {True: "ok", False: "FAILED"}
    print(f"held-out loss on English {after:.2f} nats, {before:.2f} before fine-tuning: {words[learnt]}")
    print(
        f"devices sum {summed / 1e3:.0f} kB a step; the base's gradients are {gradients / 1e3:.0f} kB: {words[frozen]}"
    )
    print(
        f"{COMPARED_STEPS} parallel steps equal the single-device run: loss within {distance:.1e} "
        f"(allowed {LOSS_TOLERANCE:.0e}): {words[equal]}"
    )
    return 0 if learnt and frozen and equal else 1


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
