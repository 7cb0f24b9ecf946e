"""Flax NNX in its functional style, split before the step and merged inside it, and with objects as arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.corpus.data import normal, tokens, uniform


def _split(model, tx):
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return nnx.split((model, optimizer))


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.linear1 = nnx.Linear(4 * 4 * 16, 64, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.025)
        self.linear2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x, rngs):
        def pool(x):
            return nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))

        x = pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        return self.linear2(self.dropout2(nnx.relu(self.linear1(x)), rngs=rngs))


def nnx_cnn(scale=1):
    """The MNIST tutorial: batch norm, dropout from a stream of keys, metrics."""
    model, rngs = CNN(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graphdef, state = nnx.split((model, optimizer, metrics, rngs))
    batch = {"image": uniform(8 * scale, 16, 16, 1), "label": tokens(8 * scale, below=10)}

    @jax.jit
    def train_step(state, batch):
        model, optimizer, metrics, rngs = nnx.merge(graphdef, state)

        def loss_fn(model, rngs, batch):
            logits = model(batch["image"], rngs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"])
            return losses.mean(), logits

        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)
        return nnx.state((model, optimizer, metrics, rngs)), loss

    return train_step, (state, batch)


class TransformerBlock(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.mha = nnx.MultiHeadAttention(num_heads=heads, in_features=width, decode=False, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))
        x = self.norm1(x + self.dropout(self.mha(x, mask=mask)))
        return self.norm2(x + self.dropout(self.linear2(nnx.relu(self.linear1(x)))))


class MiniGPT(nnx.Module):
    def __init__(self, vocab, length, width, layers, rngs):
        self.tokens = nnx.Embed(vocab, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([TransformerBlock(width, 4, rngs) for _ in range(layers)])
        self.out = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def nnx_minigpt(scale=1):
    """A small GPT that owns its dropout keys; `nnx.split` by kind, parameters apart from the rest."""
    model = MiniGPT(64, 16, 32, 2, nnx.Rngs(0))
    tx = optax.adam(1e-3)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    ids = tokens(8 * scale, 17, below=64)

    def train_step(params, rest, opt_state, batch):
        def loss_fn(params, rest):
            model = nnx.merge(graphdef, params, rest, copy=True)
            logits = model(batch[:, :-1])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
            return loss, nnx.split(model, nnx.Param, ...)[2]

        (loss, new_rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rest)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new_rest, opt_state, loss

    return train_step, (params, rest, tx.init(params), ids)


class LoRABlock(nnx.Module):
    def __init__(self, width, rngs):
        self.dense = nnx.LoRALinear(width, width, lora_rank=4, rngs=rngs)
        self.out = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.gelu(self.dense(x)))


def nnx_lora(scale=1):
    """`nnx.LoRALinear`: only parameters of kind LoRAParam have gradients and moments."""
    model = LoRABlock(32, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    graphdef, state = nnx.split((model, optimizer))
    x, y = normal(16 * scale, 32), tokens(16 * scale, below=10)

    def train_step(state, x, y):
        model, optimizer = nnx.merge(graphdef, state)

        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return train_step, (state, x, y)


def nnx_scan_over_layers(scale=1):
    """Layers built by `nnx.vmap` and run by `nnx.scan`."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(32, 32, rngs=rngs)
            self.norm = nnx.RMSNorm(32, rngs=rngs)

        def __call__(self, x):
            return x + nnx.gelu(self.linear(self.norm(x)))

    class MLP(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=4)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def create(rngs):
                return Block(rngs)

            self.layers = create(rngs)
            self.head = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def forward(block, x):
                return block(x)

            return self.head(forward(self.layers, x))

    graphdef, state = _split(MLP(nnx.Rngs(0)), optax.lion(1e-3))
    x, y = normal(16 * scale, 32), normal(16 * scale, 4, seed=1)

    def train_step(state, x, y):
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return train_step, (state, x, y)


# Objects as arguments, for `nnx.jit`


def nnx_cnn_objects(scale=1):
    """The MNIST tutorial as it is written: the step takes objects and changes them."""
    model, rngs = CNN(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    batch = {"image": uniform(8 * scale, 16, 16, 1), "label": tokens(8 * scale, below=10)}

    def loss_fn(model, rngs, batch):
        logits = model(batch["image"], rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"])
        return losses.mean(), logits

    def train_step(model, optimizer, metrics, rngs, batch):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    return train_step, (model, optimizer, metrics, rngs, batch)


def nnx_minigpt_objects(scale=1):
    """A small GPT with dropout; the module and its optimizer are the arguments."""
    model = MiniGPT(64, 16, 32, 2, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), wrt=nnx.Param)
    ids = tokens(8 * scale, 17, below=64)

    def train_step(model, optimizer, ids):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(ids[:, :-1]), ids[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return train_step, (model, optimizer, ids)


class Critic(nnx.Module):
    def __init__(self, rngs):
        self.linear1, self.linear2 = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.linear2(self.dropout(nnx.leaky_relu(self.linear1(x), 0.2)))


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.linear1, self.linear2 = nnx.Linear(8, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)

    def __call__(self, z):
        return nnx.tanh(self.linear2(nnx.relu(self.norm(self.linear1(z)))))


def nnx_gan_objects(scale=1):
    """Two modules, two optimizers and a stream of noise, all changed by one step."""
    generator, critic = Generator(nnx.Rngs(0)), Critic(nnx.Rngs(1))
    generating = nnx.Optimizer(generator, optax.adam(2e-4, b1=0.5), wrt=nnx.Param)
    judging = nnx.Optimizer(critic, optax.adam(2e-4, b1=0.5), wrt=nnx.Param)
    real = normal(16 * scale, 16)

    def train_step(generator, critic, generating, judging, noise, real):
        z = noise.normal((real.shape[0], 8), real.dtype)

        def critic_loss(critic, fake):
            losses = optax.sigmoid_binary_cross_entropy(critic(real), jnp.ones((real.shape[0], 1)))
            return (losses + optax.sigmoid_binary_cross_entropy(critic(fake), jnp.zeros((real.shape[0], 1)))).mean()

        def generator_loss(generator, critic):
            logits = critic(generator(z))
            return optax.sigmoid_binary_cross_entropy(logits, jnp.ones_like(logits)).mean()

        judged, grads = nnx.value_and_grad(critic_loss)(critic, jax.lax.stop_gradient(generator(z)))
        judging.update(critic, grads)
        generated, grads = nnx.value_and_grad(generator_loss)(generator, critic)
        generating.update(generator, grads)
        return {"critic": judged, "generator": generated}

    return train_step, (generator, critic, generating, judging, nnx.Rngs(2), real)
