"""Train steps as people write them, by what they do to the batch: the cases of `test_analysis.py`.

Every entry of `EXACT` falls into microbatches; every entry of `REFUSED` lets examples depend on each other. A step is a
function of (params, optimizer state, batch) or (params, optimizer state, batch, key), of `OCCUPIED` shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from autopar import jax_compat
from autopar.ir.trace import Traced, trace

BATCH, SEQ, WIDTH, HIDDEN, VOCAB, LAYERS = 8, 4, 8, 16, 16, 2

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def params() -> Any:
    """Embedding, blocks, and a mixture of experts' gate, in JAX's default floating type."""
    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.3)

    def block() -> dict[str, jax.Array]:
        return {
            "scale": array(WIDTH) + 1,
            "qkv": array(WIDTH, 3, WIDTH),
            "up": array(WIDTH, HIDDEN),
            "bias": array(HIDDEN),
            "down": array(HIDDEN, WIDTH),
        }

    return {
        "embed": array(VOCAB, WIDTH),
        "positions": array(SEQ, WIDTH),
        "blocks": [block() for _ in range(LAYERS)],
        "gate": array(WIDTH, 4),
    }


def batch(size: int = BATCH) -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, (2, size, SEQ))
    return {
        "x": jnp.asarray(tokens[0]),
        "y": jnp.asarray(tokens[1]),
        "mask": jnp.asarray(rng.random((size, SEQ)) > 0.3),
    }


def block(p: Any, x: jax.Array) -> jax.Array:
    """A causal transformer block of one head."""
    h = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"]
    query, key, value = jnp.moveaxis(jnp.einsum("bsd,dte->tbse", h, p["qkv"]), 0, 0)
    scores = jnp.einsum("bqe,bke->bqk", query, key)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    x = x + jnp.einsum("bqk,bke->bqe", jax.nn.softmax(jnp.where(seen, scores, -1e9)), value)
    return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def embed(p: Any, b: Any) -> jax.Array:
    return p["embed"][b["x"]] + p["positions"]


def hidden(p: Any, b: Any, apply: Callable[..., Any] = block) -> jax.Array:
    return apply(p["blocks"][0], embed(p, b))


def logits(p: Any, b: Any, apply: Callable[..., Any] = block) -> jax.Array:
    return hidden(p, b, apply) @ p["embed"].T


# Losses


def mean(p: Any, b: Any) -> jax.Array:
    return cross_entropy(logits(p, b), b["y"]).mean()


def total(p: Any, b: Any) -> jax.Array:
    return cross_entropy(logits(p, b), b["y"]).sum()


def masked(p: Any, b: Any) -> jax.Array:
    return jnp.sum(cross_entropy(logits(p, b), b["y"]) * b["mask"]) / jnp.sum(b["mask"])


def masked_where(p: Any, b: Any) -> jax.Array:
    losses = cross_entropy(logits(p, b), b["y"])
    return jnp.mean(losses, where=b["mask"])


def masked_per_example(p: Any, b: Any) -> jax.Array:
    losses = cross_entropy(logits(p, b), b["y"]) * b["mask"]
    return (losses.sum(-1) / jnp.maximum(b["mask"].sum(-1), 1)).mean()


def weighted_by_lengths(p: Any, b: Any) -> jax.Array:
    """Every example weighted by its share of all tokens: a total of the batch in the forward pass."""
    weight = b["mask"].sum(-1) / b["mask"].sum()
    return (cross_entropy(logits(p, b), b["y"]).mean(-1) * weight).sum()


def flattened(p: Any, b: Any) -> jax.Array:
    """(B, S) -> (B S), picked by a pair of index arrays."""
    log_probabilities = jax.nn.log_softmax(logits(p, b).reshape(-1, VOCAB))
    labels = b["y"].reshape(-1)
    return -log_probabilities[jnp.arange(labels.shape[0]), labels].mean()


def one_hot(p: Any, b: Any) -> jax.Array:
    return -(jax.nn.one_hot(b["y"], VOCAB) * jax.nn.log_softmax(logits(p, b))).sum(-1).mean()


def sequence_major(p: Any, b: Any) -> jax.Array:
    """(S, B) -> (S B): blocks of the batch lie with a stride."""
    layer = p["blocks"][0]
    x = p["embed"][b["x"].T].reshape(-1, WIDTH)
    y = jax.nn.gelu(x @ layer["up"]) @ layer["down"] @ p["embed"].T
    return cross_entropy(y, b["y"].T.reshape(-1)).mean()


def position_in_batch(p: Any, b: Any) -> jax.Array:
    losses = cross_entropy(logits(p, b), b["y"])
    weight = 1 + jnp.arange(losses.shape[0]) / losses.shape[0]
    return (losses * weight[:, None]).mean()


def mask_by_position(p: Any, b: Any) -> jax.Array:
    """Weights that do not depend on the batch, wanted in blocks and, for their sum, whole."""
    weight = b["mask"] * (1 + jnp.arange(b["mask"].shape[0]))[:, None]
    return (cross_entropy(logits(p, b), b["y"]) * weight).sum() / weight.sum()


def mapped(p: Any, b: Any) -> jax.Array:
    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(block(p["blocks"][0], p["embed"][x][None])[0] @ p["embed"].T, y).mean()

    return jax.vmap(one)(b["x"], b["y"]).mean()


def halves(p: Any, b: Any) -> jax.Array:
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    return cross_entropy(logits(low, b).astype(jnp.float32), b["y"]).mean()


def with_norm_of_weights(p: Any, b: Any) -> jax.Array:
    return mean(p, b) + 0.01 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))


def rematerialised(p: Any, b: Any, **options: Any) -> jax.Array:
    return cross_entropy(logits(p, b, jax.checkpoint(block, **options)), b["y"]).mean()


SAVES_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def nested_remat(p: Any, b: Any) -> jax.Array:
    inner = jax.checkpoint(block)
    outer = jax.checkpoint(lambda p, x: inner(p["blocks"][1], inner(p["blocks"][0], x)))
    return cross_entropy(outer(p, embed(p, b)) @ p["embed"].T, b["y"]).mean()


def stacked(p: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *p["blocks"])


def scanned(p: Any, b: Any, apply: Callable[..., Any] = block) -> jax.Array:
    x, _ = lax.scan(lambda x, layer: (apply(layer, x), None), embed(p, b), stacked(p))
    return cross_entropy(x @ p["embed"].T, b["y"]).mean()


def scanned_shared(p: Any, b: Any) -> jax.Array:
    """One layer over and over: its gradient is summed in a carry."""
    x, _ = lax.scan(lambda x, _: (block(p["blocks"][0], x), None), embed(p, b), None, length=3)
    return cross_entropy(x @ p["embed"].T, b["y"]).mean()


def penalised(p: Any, b: Any, apply: Callable[..., Any] = lambda f: f) -> jax.Array:
    """Layers in two scans, through which a penalty of their activations is carried."""

    def layer(carry: Any, weights: Any) -> Any:
        x, penalty = carry
        x = block(weights, x)
        return (x, penalty + 0.1 * jnp.mean(x**2)), None

    first, second = ([w[:1] for w in jax.tree.leaves(stacked(p))], [w[1:] for w in jax.tree.leaves(stacked(p))])
    tree = jax.tree.structure(stacked(p))
    carry, _ = lax.scan(apply(layer), (embed(p, b), 0.0), tree.unflatten(first))
    (x, penalty), _ = lax.scan(apply(layer), carry, tree.unflatten(second))
    return cross_entropy(x @ p["embed"].T, b["y"]).mean() + penalty


def one_by_one(p: Any, b: Any) -> jax.Array:
    """A loop over the examples, which are independent."""
    return lax.map(lambda b: mean(p, jax.tree.map(lambda x: x[None], b)), b).mean()


def added_one_by_one(p: Any, b: Any, apply: Callable[..., Any] = lambda f: f) -> jax.Array:
    """A loop over the examples that adds up their losses and their counts."""

    def example(carry: Any, b: Any) -> Any:
        loss, count = carry
        losses = cross_entropy(logits(p, jax.tree.map(lambda x: x[None], b)), b["y"][None])
        return (loss + jnp.sum(losses * b["mask"]), count + b["mask"].sum()), None

    (loss, count), _ = lax.scan(apply(example), (0.0, 0), b)
    return loss / count


def two_views(p: Any, b: Any) -> jax.Array:
    """Both views of every example in one batch, which are compared in pairs afterwards."""
    both = jnp.concatenate([b["x"], b["y"]])
    h = hidden(p, {**b, "x": both}).mean(1)
    first, second = jnp.split(h, 2)
    return jnp.mean((first - lax.stop_gradient(h[b["x"].shape[0] :])) ** 2) - jnp.mean(first * second)


def two_kinds(p: Any, b: Any) -> jax.Array:
    """The halves of the batch have different losses."""
    x, half = logits(p, b), b["y"].shape[0] // 2
    return cross_entropy(x, b["y"])[:half].mean() + 0.1 * jnp.mean(x[half:] ** 2)


def recurrent(p: Any, b: Any) -> jax.Array:
    weight = p["blocks"][0]["up"][:, :WIDTH]
    inputs = embed(p, b).swapaxes(0, 1)
    _, hs = lax.scan(lambda h, x: (jnp.tanh(h @ weight + x),) * 2, jnp.zeros_like(inputs[0]), inputs)
    return cross_entropy(hs.swapaxes(0, 1) @ p["embed"].T, b["y"]).mean()


def branching(p: Any, b: Any) -> jax.Array:
    x = hidden(p, b)
    x = lax.cond(p["gate"][0, 0] > 0, lambda x: block(p["blocks"][0], x), lambda x: x * 2, x)
    other = jnp.sin(jnp.arange(x.size)).reshape(x.shape)
    x = x + lax.cond(p["gate"][0, 0] > 9, lambda x, y: x, lambda x, y: y, x, other)
    return cross_entropy(x @ p["embed"].T, b["y"]).mean()


def dropped(keep: float, p: Any, b: Any) -> jax.Array:
    def apply(layer: Any, x: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.fold_in(b["key"], int(layer["up"].size)), keep, x.shape)
        return jnp.where(kept, block(layer, x) / keep, 0)

    return cross_entropy(logits(p, b, apply), b["y"]).mean()


def dropped_in_scan(p: Any, b: Any) -> jax.Array:
    def layer(x: jax.Array, both: Any) -> Any:
        weights, key = both
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), block(weights, x), 0), None

    x, _ = lax.scan(layer, embed(p, b), (stacked(p), jax.random.split(b["key"], LAYERS)))
    return cross_entropy(x @ p["embed"].T, b["y"]).mean()


def balanced_experts(p: Any, b: Any) -> jax.Array:
    """Switch Transformer's balance loss (Fedus et al., 2022): a product of two means over the batch."""
    x = hidden(p, b)
    gates = jax.nn.softmax(x @ p["gate"])
    routed = jax.nn.one_hot(gates.argmax(-1), 4).mean((0, 1))
    return cross_entropy(x @ p["embed"].T, b["y"]).mean() + 0.4 * jnp.sum(routed * gates.mean((0, 1)))


def balanced_every_layer(p: Any, b: Any) -> jax.Array:
    x, extra = embed(p, b), 0.0
    for layer in p["blocks"]:
        x = block(layer, x)
        gates = jax.nn.softmax(x @ p["gate"])
        extra += jnp.sum(jax.nn.one_hot(gates.argmax(-1), 4).mean((0, 1)) * gates.mean((0, 1)))
    return cross_entropy(x @ p["embed"].T, b["y"]).mean() + 0.4 * extra


def contrastive(p: Any, b: Any) -> jax.Array:
    z = hidden(p, b).mean(1)
    return cross_entropy(z @ z.T, jnp.arange(z.shape[0])).mean()


def batch_norm(p: Any, b: Any) -> jax.Array:
    x = embed(p, b)
    for layer in p["blocks"]:
        x = block(layer, x)
        x = (x - x.mean((0, 1))) * lax.rsqrt(x.var((0, 1)) + 1e-3)
    return cross_entropy(x @ p["embed"].T, b["y"]).mean()


@jax.custom_vjp
def own_tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


own_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


def own_gradient(p: Any, b: Any) -> jax.Array:
    return cross_entropy(own_tanh(hidden(p, b)) @ p["embed"].T, b["y"]).mean()


# Steps

Step = Callable[..., Any]


def descent() -> Any:
    return optax.sgd(0.1)


def trained(loss: Callable[..., jax.Array], make: Callable[[], Any] = descent, aux: bool = False) -> Step:
    """One step of an optimizer on a loss; the key, if there is one, is part of the batch that the loss sees."""
    optimizer = make()

    def step(p: Any, state: Any, b: Any, key: Any = None) -> Any:
        b = b if key is None else {**b, "key": key}
        value, grads = jax.value_and_grad(loss, has_aux=aux)(p, b)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


def metrics(p: Any, b: Any) -> Any:
    scores = logits(p, b)
    losses = cross_entropy(scores, b["y"])
    guesses = scores.argmax(-1)
    return losses.mean(), {
        "accuracy": (guesses == b["y"]).mean(),
        "per example": losses.mean(-1),
        "perplexity": jnp.exp(losses.mean()),
        "worst": losses.max(),
        "best": losses.min(),
        "last": (guesses - VOCAB).max(),
        "worst example": losses.mean(-1).argmax(),
        "any": (guesses == b["y"]).any(),
        "counts": jnp.bincount(guesses.reshape(-1), length=VOCAB),
        "sorted": jnp.sort(losses.reshape(-1)),
    }


def sgd(p: Any, grads: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)


def by_vjp(p: Any, state: Any, b: Any) -> Any:
    value, pull = jax.vjp(lambda p: own_gradient(p, b), p)
    return sgd(p, pull(jnp.ones_like(value))[0]), state, value


def by_linearize(p: Any, state: Any, b: Any) -> Any:
    value, push = jax.linearize(lambda p: mean(p, b), p)
    return sgd(p, jax.linear_transpose(push, p)(jnp.ones_like(value))[0]), state, value


def by_hand(p: Any, state: Any, b: Any) -> Any:
    """A bilinear language model with its gradient written out."""
    rows = p["embed"][b["x"]]
    error = (jax.nn.softmax(rows @ p["embed"].T) - jax.nn.one_hot(b["y"], VOCAB)) / b["y"].size
    grad = jnp.einsum("bsv,bsd->vd", error, rows) + jnp.zeros_like(p["embed"]).at[b["x"]].add(error @ p["embed"])
    return {**p, "embed": p["embed"] - 0.1 * grad}, state, jnp.max(error)


def accumulated(p: Any, state: Any, b: Any) -> Any:
    """The user's own loop over two halves of the batch."""
    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), b)

    def add(grads: Any, part: Any) -> Any:
        value, more = jax.value_and_grad(mean)(p, part)
        return jax.tree.map(jnp.add, grads, more), value

    grads, values = lax.scan(add, jax.tree.map(jnp.zeros_like, p), parts)
    return sgd(p, jax.tree.map(lambda g: g / 2, grads)), state, values.mean()


def evaluated(p: Any, state: Any, b: Any) -> Any:
    return metrics(p, b)


def generated(p: Any, state: Any, b: Any) -> Any:
    """Tokens drawn one after another in a loop that runs forward only."""

    def extend(i: jax.Array, tokens: jax.Array) -> jax.Array:
        scores = logits(p, {"x": tokens})
        picked = lax.dynamic_index_in_dim(scores.argmax(-1), i, 1)
        return lax.dynamic_update_slice_in_dim(tokens, picked.astype(tokens.dtype), i + 1, 1)

    return lax.fori_loop(0, 2 + jnp.isnan(p["gate"][0, 0]), extend, b["x"])


def clipped() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(1e-3, 10)))


EXACT: Mapping[str, Step] = {
    "mean": trained(mean, partial(optax.adamw, 1e-3)),
    "sum": trained(total),
    "masked mean": trained(masked),
    "mean where": trained(masked_where),
    "masked per example": trained(masked_per_example),
    "weighted by lengths": trained(weighted_by_lengths),
    "global norm": trained(mean, clipped),
    "metrics": trained(metrics, aux=True),
    "flattened": trained(flattened),
    "one hot": trained(one_hot),
    "sequence major": trained(sequence_major),
    "position in batch": trained(position_in_batch),
    "mask by position": trained(mask_by_position),
    "vmap": trained(mapped),
    "norm of weights": trained(with_norm_of_weights),
    "remat": trained(rematerialised),
    "remat with policy": trained(partial(rematerialised, policy=SAVES_DOTS)),
    "remat in remat": trained(nested_remat),
    "scan": trained(scanned),
    "scan of remat": trained(partial(scanned, apply=jax.checkpoint(block))),
    "scan of one layer": trained(scanned_shared),
    "penalty in a carry": trained(penalised),
    "penalty in a carry, remat": trained(partial(penalised, apply=jax.checkpoint)),
    "map over examples": trained(one_by_one),
    "sums over examples": trained(added_one_by_one),
    "sums over examples, remat": trained(partial(added_one_by_one, apply=jax.checkpoint)),
    "two views": trained(two_views),
    "two kinds of examples": trained(two_kinds),
    "recurrent": trained(recurrent),
    "branches": trained(branching),
    "dropout": trained(partial(dropped, 0.8)),
    "dropout in scan": trained(dropped_in_scan),
    "adafactor": trained(mean, partial(optax.adafactor, 1e-3, min_dim_size_to_factor=4)),
    "lamb": trained(mean, partial(optax.lamb, 1e-3)),
    "lion": trained(mean, partial(optax.lion, 1e-3)),
    "muon": trained(mean, partial(optax.contrib.muon, 1e-3)),
    "custom vjp": trained(own_gradient),
    "jax.vjp": by_vjp,
    "linearize": by_linearize,
    "by hand": by_hand,
    "accumulated": accumulated,
    "evaluation": evaluated,
    "generation": generated,
    "balanced experts": trained(balanced_experts),
    "balanced experts in every layer": trained(balanced_every_layer),
}

#: Needs totals of the forward pass in the backward pass: two loops.
TWO_LOOPS = (
    "balanced experts",
    "balanced experts in every layer",
    "sums over examples",
    "sums over examples, remat",
)

REFUSED: Mapping[str, Step] = {"contrastive": trained(contrastive), "batch norm": trained(batch_norm)}

HALVES = trained(halves)


def arguments(name: str, step: Step, size: int = BATCH) -> tuple[Any, ...]:
    """Arguments of a step with a batch of some size."""
    p = params()
    optimizer = getattr(step, "optimizer", None)
    state = () if optimizer is None else optimizer.init(p)
    return (p, state, batch(size), *((jax.random.key(7),) if "dropout" in name else ()))


def traced(name: str) -> Traced:
    """An exact or refused step, traced once in a process."""
    return _traced(name, jax_compat.trace_context())


@cache
def _traced(name: str, _context: Hashable) -> Traced:
    step = {**EXACT, **REFUSED}[name]
    return trace(step, *arguments(name, step))
