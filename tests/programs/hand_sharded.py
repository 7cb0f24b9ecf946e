"""Steps that people shard by hand in `jax.shard_map`, each beside the same step on one device.

    megatron    a layer whose hidden features are cut: the parts of its output are summed
    fsdp        layers in a loop whose weights are gathered one by one, and whose gradients are scattered
    ring        attention on cut sequences: keys and values are passed round, blocks merged by the log-sum-exp
    experts     a token's expert may be on another device: tokens are exchanged, and exchanged back

Each is a function of a mesh that gives (loss as written by hand, loss on one device, parameters, batch). The last axis
of the mesh cuts the model, all others the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Loss = Callable[[Any, Any], jax.Array]
Case = tuple[Loss, Loss, Any, Any]

WIDTH, HIDDEN, LAYERS, EXPERTS = 16, 32, 3, 8


def array(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape) / shape[-1] ** 0.5


def axes(mesh: Mesh) -> tuple[tuple[str, ...], str]:
    """Axes of the batch, axis of the model."""
    return mesh.axis_names[:-1], mesh.axis_names[-1]


def megatron(mesh: Mesh) -> Case:
    batch, model = axes(mesh)
    specs = (P(batch), {"up": P(None, model), "down": P(model)})

    @jax.shard_map(mesh=mesh, in_specs=specs, out_specs=P(batch))
    def mlp(x: jax.Array, w: Any) -> jax.Array:
        return lax.psum(jax.nn.gelu(x @ w["up"]) @ w["down"], model)

    def whole(x: jax.Array, w: Any) -> jax.Array:
        return jax.nn.gelu(x @ w["up"]) @ w["down"]

    params = {"up": array(0, WIDTH, HIDDEN), "down": array(1, HIDDEN, WIDTH)}
    return squares(mlp), squares(whole), params, array(2, 16, WIDTH)


def squares(layer: Callable[..., jax.Array]) -> Loss:
    return lambda params, x: (layer(x, params) ** 2).mean()


def fsdp(mesh: Mesh) -> Case:
    """All axes cut the batch, the last one the weights."""
    _, model = axes(mesh)
    whole_batch = P(mesh.axis_names)

    @jax.shard_map(mesh=mesh, in_specs=(whole_batch, P(None, model)), out_specs=whole_batch)
    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(x @ lax.all_gather(w, model, tiled=True)), None

        return lax.scan(layer, x, weights)[0]

    def whole(x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    return squares(layers), squares(whole), array(0, LAYERS, WIDTH, WIDTH), array(1, 16, WIDTH)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention of (batch, positions, features)."""
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


def ring(mesh: Mesh) -> Case:
    batch, model = axes(mesh)
    count, spec = mesh.shape[model], P(batch, model)

    @jax.shard_map(mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    def in_a_ring(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        turn = [(i, (i + 1) % count) for i in range(count)]

        def block(carry: Any, _: None) -> Any:
            most, total, out, k, v = carry
            scores = jnp.einsum("bqd,bkd->bqk", q, k)
            new_most = jnp.maximum(most, lax.stop_gradient(scores.max(-1)))
            weights, old = jnp.exp(scores - new_most[..., None]), jnp.exp(most - new_most)
            out = out * old[..., None] + jnp.einsum("bqk,bkd->bqd", weights, v)
            k, v = (lax.ppermute(x, model, turn) for x in (k, v))
            return (new_most, total * old + weights.sum(-1), out, k, v), None

        least = 0 * q[..., 0] - 1e30
        start = (least, jnp.zeros_like(least), jnp.zeros_like(q), k, v)
        (_, total, out, _, _), _ = lax.scan(block, start, None, length=count)
        return out / total[..., None]

    def attended(attend: Callable[..., jax.Array]) -> Loss:
        return lambda w, x: (attend(*(x @ w[name] for name in "qkv")) ** 2).mean()

    params = {name: array(i, WIDTH, WIDTH) for i, name in enumerate("qkv")}
    return attended(in_a_ring), attended(attention), params, array(3, 4, 16, WIDTH)


def experts(mesh: Mesh) -> Case:
    """Every token has one expert; each device has room for all its tokens with each."""
    _, model = axes(mesh)
    tokens, weights = P(mesh.axis_names), {"router": P(), "up": P(model), "down": P(model)}

    @jax.shard_map(mesh=mesh, in_specs=(tokens, weights), out_specs=tokens)
    def exchanged(x: jax.Array, w: Any) -> jax.Array:
        scores = jax.nn.softmax(x @ w["router"])
        chosen = jax.nn.one_hot(scores.argmax(-1), EXPERTS)
        sent = jnp.einsum("te,td->etd", chosen, x)  # for each expert, a place for each token
        here = lax.all_to_all(sent, model, 0, 1, tiled=True)
        hidden = jax.nn.relu(jnp.einsum("etd,edf->etf", here, w["up"]))
        back = lax.all_to_all(jnp.einsum("etf,efd->etd", hidden, w["down"]), model, 1, 0, tiled=True)
        return jnp.einsum("etd,te->td", back, chosen * scores)

    def whole(x: jax.Array, w: Any) -> jax.Array:
        scores = jax.nn.softmax(x @ w["router"])
        chosen = scores.argmax(-1)
        hidden = jax.nn.relu(jnp.einsum("td,tdf->tf", x, w["up"][chosen]))
        out = jnp.einsum("tf,tfd->td", hidden, w["down"][chosen])
        return out * jnp.take_along_axis(scores, chosen[:, None], 1)

    params = {
        "router": array(0, WIDTH, EXPERTS),
        "up": array(1, EXPERTS, WIDTH, HIDDEN),
        "down": array(2, EXPERTS, HIDDEN, WIDTH),
    }
    return squares(exchanged), squares(whole), params, array(3, 32, WIDTH)


CASES: Mapping[str, Callable[[Mesh], Case]] = {"megatron": megatron, "fsdp": fsdp, "ring": ring, "experts": experts}


def train_step(loss: Loss) -> Callable[[Any, Any], Any]:
    """A step of gradient descent."""

    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    return step
