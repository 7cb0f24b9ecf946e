"""Runs a deep transformer for inference in a pipeline of four stages of two devices each.

    python examples/pipelined_inference.py

The function has no gradients and no marks of stages. `stages=4` divides its layers into four runs. Each stage has a
submesh of two devices, which store its weights and no others. The batch is divided into eight microbatches, so that all
stages work at the same time. The program shows the plan and ends with two checks:

    each device stores at most a third of the weights
    the probabilities that the pipeline computes are those of `jax.jit` on a single device

It exits with 1 when either fails. Without an accelerator it runs on 8 virtual CPU devices.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

Tree = Any

LAYERS, WIDTH, HEADS, VOCAB = 4, 64, 4, 256
BATCH, SEQ = 32, 32
STAGES, MICROBATCHES = 4, 8
TOLERANCE, MOST_WEIGHTS = 1e-5, 1 / 3


def init_params(key: jax.Array) -> Tree:
    """An embedding, a head, and a dict of matrices for each layer."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    tree = {"embed": (VOCAB, WIDTH), "layers": [shapes] * LAYERS, "head": (WIDTH, VOCAB)}
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([0.1 * jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)])


def rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def layer(weights: Tree, x: jax.Array) -> jax.Array:
    """One block; x is f32[B,S,D]."""
    heads = (rms_norm(x) @ weights["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
    y = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
    x = x + y.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(rms_norm(x) @ weights["up"]) @ weights["down"]


@autopar.parallelize(stages=STAGES, num_microbatches=MICROBATCHES, mesh=(STAGES, 2))
def predict(params: Tree, tokens: jax.Array) -> jax.Array:
    """Probabilities of the token after each sequence, f32[B,V]; tokens are int32[B,S]."""
    x = params["embed"][tokens]
    for weights in params["layers"]:
        x = layer(weights, x)
    return jax.nn.softmax(rms_norm(x[:, -1]) @ params["head"])


def main() -> int:
    """Runs the example; 0 when both checks hold."""
    key = jax.random.key(0)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ), np.int32)
    shapes = jax.eval_shape(init_params, key)
    plan = predict.plan(shapes, tokens)
    print(plan.summary())
    params = predict.init(init_params, key)  # the weights of each stage are created on its devices
    parallel = np.asarray(predict(params, tokens))

    with jax.default_device(jax.devices()[0]):
        single = np.asarray(jax.jit(predict.__wrapped__)(jax.jit(init_params)(key), tokens))

    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    on_device = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            on_device[shard.device] += shard.data.size
    most, distance = max(on_device.values()) / total, float(np.abs(parallel - single).max() / single.max())
    divided, equal = most <= MOST_WEIGHTS, distance <= TOLERANCE
    words = {True: "ok", False: "FAILED"}
    print(f"{LAYERS} layers in {STAGES} stages: a device stores at most {most:.0%} of the weights: {words[divided]}")
    print(
        f"the pipeline equals the single-device run: probabilities within {distance:.1e} of the largest "
        f"(allowed {TOLERANCE:.0e}): {words[equal]}"
    )
    return 0 if divided and equal else 1


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
