"""Trains a pipeline in two processes of four devices each, connected by `jax.distributed`.

    autopar launch --processes 2 --devices-per-process 4 examples/train_in_processes.py
    python examples/train_in_processes.py      # does the same

A cluster of several hosts runs one process per host. Here both are on this machine, on virtual CPU devices. Each
process loads its own half of the batch. Process 0 plans. Each process compiles and runs the stage that is on its
devices. The program shows the plan and ends with two checks:

    the loss falls to a half
    three parallel steps equal the single-device run

It exits with 1 when either fails.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar

Tree = Any

LAYERS, WIDTH, BATCH, STEPS = 2, 64, 64, 30
PROCESSES, DEVICES = 2, 4
RATE, TOLERANCE, FALL = 0.4, 1e-5, 0.5


def init_params(key: jax.Array) -> Tree:
    """Two matrices for each layer."""
    shapes = [{"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}] * LAYERS
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([0.05 * jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)])


def loss_fn(params: Tree, batch: Tree) -> jax.Array:
    x = batch["x"]
    for w in params:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean((x - batch["y"]) ** 2)


@autopar.parallelize(stages=2, num_microbatches=4, schedule="1f1b", mesh=(2, DEVICES))
def train_step(params: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), loss


def load(step: int) -> Tree:
    """The batch of a step, f32[B,D] each; a real loader would read the rows of this process alone."""
    x = np.random.default_rng(step).standard_normal((BATCH, WIDTH), np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def global_batch(step: int) -> Tree:
    """The batch as global arrays, whose rows are divided among all devices: each process gives its own rows."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("batch",)), PartitionSpec("batch"))
    rows = BATCH // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x[mine]), load(step))


def main() -> int:
    """Runs the example; 0 when both checks hold."""
    key = jax.random.key(0)
    plan = train_step.plan(jax.eval_shape(init_params, key), global_batch(0))
    is_first = jax.process_index() == 0
    if is_first:
        print(plan.summary())
    params = train_step.init(init_params, key)  # the weights of each stage are created on its devices
    losses, after_three = [], None
    for step in range(STEPS):
        params, loss = train_step(params, global_batch(step))
        losses.append(float(loss))  # every process can read it
        if step == 2:
            after_three = autopar.gather(params)

    single, plain_step = jax.jit(init_params)(key), jax.jit(train_step.__wrapped__)
    for step in range(3):
        single, _ = plain_step(single, load(step))
    pairs = zip(jax.tree.leaves(after_three), jax.tree.leaves(single), strict=True)
    distance = max(float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in pairs)
    fell, equal = losses[-1] <= FALL * losses[0], distance <= TOLERANCE
    if is_first:
        words = {True: "ok", False: "FAILED"}
        print(f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps: {words[fell]}")
        print(
            f"{jax.process_count()} processes, 3 parallel steps equal the single-device run: parameters within "
            f"{distance:.1e} of their largest entry (allowed {TOLERANCE:.0e}): {words[equal]}"
        )
    return 0 if fell and equal else 1


if __name__ == "__main__":
    if not jax.distributed.is_initialized():
        counts = ["--processes", str(PROCESSES), "--devices-per-process", str(DEVICES)]
        sys.exit(subprocess.call([sys.executable, "-m", "autopar", "launch", *counts, __file__]))
    sys.exit(main())
