"""Language and sequences in plain JAX: parameters in dicts, optax, as many research repositories write them."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.corpus.data import normal, tokens


def _dense(*shape, seed):
    return normal(*shape, seed=seed, scale=shape[-2] ** -0.5)


def _rms(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attend(q, k, v, mask):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _block(width, seed):
    return {
        "norm1": jnp.ones(width),
        "norm2": jnp.ones(width),
        "q": _dense(width, width, seed=seed),
        "k": _dense(width, width, seed=seed + 1),
        "v": _dense(width, width, seed=seed + 2),
        "o": _dense(width, width, seed=seed + 3),
        "up": _dense(width, 2 * width, seed=seed + 4),
        "down": _dense(2 * width, width, seed=seed + 5),
    }


def _heads(x, n=4):
    return x.reshape(*x.shape[:-1], n, x.shape[-1] // n)


def _attention(p, x, memory, mask):
    q, k, v = _heads(x @ p["q"]), _heads(memory @ p["k"]), _heads(memory @ p["v"])
    return _attend(q, k, v, mask).reshape(x.shape) @ p["o"]


def _feed_forward(p, x):
    return jax.nn.silu(x @ p["up"]) @ p["down"]


def seq2seq_padding(scale=1):
    """Encoder and decoder with cross attention; masks made from lengths inside the step."""
    vocab, width, source, target = 48, 32, 12, 10
    params = {
        "embed": normal(vocab, width, scale=0.05),
        "encoder": [_block(width, 10), _block(width, 20)],
        "decoder": [{"self": _block(width, 30), "cross": _block(width, 40)}],
        "final": jnp.ones(width),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-3))
    n = 8 * scale
    batch = {
        "source": tokens(n, source, below=vocab),
        "source_length": tokens(n, below=source - 4) + 4,
        "target": tokens(n, target + 1, below=vocab, seed=1),
        "target_length": tokens(n, below=target - 3, seed=2) + 3,
    }

    def forward(params, batch):
        inside = jnp.arange(source) < batch["source_length"][:, None]
        x = params["embed"][batch["source"]]
        for p in params["encoder"]:
            h = _rms(x, p["norm1"])
            x = x + _attention(p, h, h, inside[:, None, None, :])
            x = x + _feed_forward(p, _rms(x, p["norm2"]))
        memory = x
        y = params["embed"][batch["target"][:, :-1]]
        causal = jnp.tril(jnp.ones((target, target), bool))[None, None]
        for p in params["decoder"]:
            h = _rms(y, p["self"]["norm1"])
            y = y + _attention(p["self"], h, h, causal)
            y = y + _attention(p["cross"], _rms(y, p["cross"]["norm1"]), memory, inside[:, None, None, :])
            y = y + _feed_forward(p["cross"], _rms(y, p["cross"]["norm2"]))
        return _rms(y, params["final"]) @ params["embed"].T

    def step(params, opt_state, batch):
        def loss_fn(params):
            losses = optax.softmax_cross_entropy_with_integer_labels(forward(params, batch), batch["target"][:, 1:])
            weights = (jnp.arange(target) < batch["target_length"][:, None]).astype(losses.dtype)
            return jnp.sum(losses * weights) / jnp.sum(weights)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, "norm": optax.global_norm(grads)}

    return step, (params, tx.init(params), batch)


def gpt_kv_cache(scale=1):
    """Greedy decoding: a scan over positions that fills a cache of keys and values."""
    vocab, width, length, heads = 48, 32, 12, 4
    params = {"embed": normal(vocab, width, scale=0.5), "blocks": [_block(width, 10), _block(width, 20)]}
    n = 8 * scale
    cache = [{name: jnp.zeros((n, length, heads, width // heads)) for name in ("k", "v")} for _ in params["blocks"]]

    def decode(cache, params, first):
        def one(carry, position):
            cache, token = carry
            x, filled = params["embed"][token][:, None], []
            for p, kept in zip(params["blocks"], cache, strict=True):
                h = _rms(x, p["norm1"])
                q = _heads(h @ p["q"])
                k = lax.dynamic_update_slice_in_dim(kept["k"], _heads(h @ p["k"]), position, axis=1)
                v = lax.dynamic_update_slice_in_dim(kept["v"], _heads(h @ p["v"]), position, axis=1)
                seen = (jnp.arange(length) <= position)[None, None, None, :]
                x = x + _attend(q, k, v, seen).reshape(x.shape) @ p["o"]
                x = x + _feed_forward(p, _rms(x, p["norm2"]))
                filled.append({"k": k, "v": v})
            token = jnp.argmax(x[:, 0] @ params["embed"].T, axis=-1).astype(token.dtype)
            return (filled, token), token

        (cache, _), out = lax.scan(one, (cache, first), jnp.arange(length))
        return cache, out.T

    return decode, (cache, params, tokens(n, below=vocab))


def lora_frozen(scale=1):
    """A frozen transformer with low-rank updates: gradients of the adapters alone, cast where they are used."""
    vocab, width, rank, length = 48, 32, 4, 12
    frozen = {"embed": normal(vocab, width, scale=0.1), "blocks": [_block(width, 10), _block(width, 20)]}
    names = ("q", "v", "up")
    adapters = [
        {
            name: {
                "a": normal(width, rank, seed=i, scale=width**-0.5),
                "b": jnp.zeros((rank, block[name].shape[1])),
            }
            for i, name in enumerate(names)
        }
        for block in frozen["blocks"]
    ]
    tx = optax.adamw(1e-3, weight_decay=0.0)
    ids = tokens(8 * scale, length + 1, below=vocab)

    def step(adapters, opt_state, frozen, ids):
        def merged(block, adapter):
            return block | {name: block[name] + 2.0 * adapter[name]["a"] @ adapter[name]["b"] for name in names}

        def loss_fn(adapters):
            x = frozen["embed"][ids[:, :-1]]
            causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
            for block, adapter in zip(frozen["blocks"], adapters, strict=True):
                p = merged(block, adapter)
                h = _rms(x, p["norm1"])
                x = x + _attention(p, h, h, causal)
                x = x + _feed_forward(p, _rms(x, p["norm2"]))
            logits = x @ frozen["embed"].T
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(adapters)
        updates, opt_state = tx.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, loss

    return step, (adapters, tx.init(adapters), frozen, ids)


def distillation(scale=1):
    """A small student learns from the softened logits of a frozen teacher."""

    def mlp(widths, seed):
        return [
            {"w": _dense(a, b, seed=seed + i), "b": jnp.zeros(b)} for i, (a, b) in enumerate(itertools.pairwise(widths))
        ]

    teacher, student = mlp([32, 128, 128, 10], 1), mlp([32, 32, 10], 9)
    tx = optax.sgd(0.05, momentum=0.9)
    x, y = normal(16 * scale, 32), tokens(16 * scale, below=10)

    def apply(layers, x):
        for layer in layers[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ layers[-1]["w"] + layers[-1]["b"]

    def step(student, opt_state, teacher, x, y, temperature=2.0, alpha=0.7):
        targets = jax.nn.softmax(lax.stop_gradient(apply(teacher, x)) / temperature)

        def loss_fn(student):
            logits = apply(student, x)
            soft = optax.losses.kl_divergence(jax.nn.log_softmax(logits / temperature), targets).mean()
            hard = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return alpha * temperature**2 * soft + (1 - alpha) * hard

        loss, grads = jax.value_and_grad(loss_fn)(student)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(student, updates), opt_state, loss

    return step, (student, tx.init(student), teacher, x, y)


def mamba_scan(scale=1):
    """A selective state space: the recurrence as an associative scan over time."""
    vocab, width, state, length = 48, 32, 4, 16
    params = {
        "embed": normal(vocab, width, scale=0.1),
        "in": _dense(width, 2 * width, seed=1),
        "conv": normal(4, width, seed=2, scale=0.5),
        "delta": _dense(width, width, seed=3),
        "bc": _dense(width, 2 * state, seed=4),
        "log_a": jnp.log(jnp.tile(jnp.arange(1.0, state + 1), (width, 1))),
        "skip": jnp.ones(width),
        "out": _dense(width, width, seed=5),
        "norm": jnp.ones(width),
    }
    tx = optax.adamw(1e-3)
    ids = tokens(8 * scale, length + 1, below=vocab)

    def mixer(p, x):
        u, gate = jnp.split(x @ p["in"], 2, axis=-1)
        padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = jax.nn.silu(sum(padded[:, i : i + length] * p["conv"][i] for i in range(4)))
        delta = jax.nn.softplus(u @ p["delta"])
        b, c = jnp.split(u @ p["bc"], 2, axis=-1)
        decay = jnp.exp(-delta[..., None] * jnp.exp(p["log_a"]))
        drive = (delta * u)[..., None] * b[:, :, None, :]

        def combine(left, right):
            return right[0] * left[0], right[0] * left[1] + right[1]

        _, h = lax.associative_scan(combine, (decay, drive), axis=1)
        y = jnp.einsum("btdn,btn->btd", h, c) + p["skip"] * u
        return (y * jax.nn.silu(gate)) @ p["out"]

    def step(params, opt_state, ids):
        def loss_fn(p):
            x = p["embed"][ids[:, :-1]]
            x = x + mixer(p, _rms(x, p["norm"]))
            return optax.softmax_cross_entropy_with_integer_labels(x @ p["embed"].T, ids[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), ids)


def moe_ragged_dot(scale=1):
    """Dropless mixture of experts: tokens sorted by expert, `lax.ragged_dot` over the groups, balance loss."""
    width, hidden, experts, top = 16, 32, 4, 2
    params = {
        "router": _dense(width, experts, seed=1),
        "up": normal(experts, width, hidden, seed=2, scale=width**-0.5),
        "down": normal(experts, hidden, width, seed=3, scale=hidden**-0.5),
    }
    tx = optax.adam(1e-3)
    x, y = normal(32 * scale, width), normal(32 * scale, width, seed=4)

    def moe(p, x):
        probs = jax.nn.softmax(x @ p["router"])
        gates, chosen = lax.top_k(probs, top)
        gates = gates / gates.sum(-1, keepdims=True)
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat)
        rows = order // top
        sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)
        h = jax.nn.gelu(lax.ragged_dot(x[rows], p["up"], sizes))
        out = lax.ragged_dot(h, p["down"], sizes) * gates.reshape(-1)[order][:, None]
        mixed = jnp.zeros_like(x).at[rows].add(out)
        share = jnp.mean(jax.nn.one_hot(chosen[:, 0], experts), axis=0)
        return mixed, experts * jnp.sum(share * probs.mean(0))

    def step(params, opt_state, x, y):
        def loss_fn(p):
            out, balance = moe(p, x)
            return jnp.mean((out - y) ** 2) + 0.01 * balance

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), x, y)


def scanned_remat_gpt(scale=1):
    """Layers stacked and scanned, each under `jax.checkpoint`; the logits in chunks."""
    vocab, width, length, layers = 64, 32, 16, 4
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[_block(width, 10 * i) for i in range(1, layers + 1)])
    params = {"embed": normal(vocab, width, scale=0.1), "layers": stacked, "head": _dense(width, vocab, seed=99)}
    tx = optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 1e-3, 5, 50), mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    )
    ids = tokens(8 * scale, length + 1, below=vocab)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer(x, p):
        h = _rms(x, p["norm1"])
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
        x = x + _attention(p, h, h, causal)
        return x + _feed_forward(p, _rms(x, p["norm2"])), None

    def step(params, opt_state, ids):
        def loss_fn(p):
            x, _ = lax.scan(layer, p["embed"][ids[:, :-1]], p["layers"])
            chunks = x.reshape(x.shape[0], 2, length // 2, width).swapaxes(0, 1)
            labels = ids[:, 1:].reshape(x.shape[0], 2, length // 2).swapaxes(0, 1)

            def chunk(total, piece):
                x, labels = piece
                return total + optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], labels).sum(), None

            total, _ = lax.scan(chunk, jnp.zeros((), x.dtype), (chunks, labels))
            return total / labels.size

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), ids)
