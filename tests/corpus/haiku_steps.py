"""dm-haiku: transformed functions, state of batch norm, recurrent cores; CTC and a small GAN written with it."""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.corpus.data import normal, tokens, uniform


def mlp_regularised(scale=1):
    """The MNIST example: weight decay in the loss, averaged parameters beside the trained ones."""

    class TrainingState(NamedTuple):
        params: hk.Params
        avg_params: hk.Params
        opt_state: optax.OptState

    def net_fn(images):
        mlp = hk.Sequential([hk.Flatten(), hk.Linear(64), jax.nn.relu, hk.Linear(32), jax.nn.relu, hk.Linear(10)])
        return mlp(images)

    network = hk.without_apply_rng(hk.transform(net_fn))
    optimiser = optax.adam(1e-3)
    images, labels = uniform(16 * scale, 8, 8, 1), tokens(16 * scale, below=10)
    params = network.init(jax.random.PRNGKey(0), images[:1])
    state = TrainingState(params, params, optimiser.init(params))

    def loss(params, images, labels):
        logits = network.apply(params, images)
        l2 = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        log_likelihood = jnp.sum(jax.nn.one_hot(labels, 10) * jax.nn.log_softmax(logits))
        return -log_likelihood / images.shape[0] + 1e-4 * l2

    @jax.jit
    def update(state, images, labels):
        grads = jax.grad(loss)(state.params, images, labels)
        updates, opt_state = optimiser.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        avg_params = optax.incremental_update(params, state.avg_params, step_size=0.001)
        return TrainingState(params, avg_params, opt_state)

    return update, (state, images, labels)


def resnet_with_state(scale=1):
    def forward(images, is_training):
        net = hk.Sequential([hk.Conv2D(16, 3), jax.nn.relu])
        x = net(images)
        for channels, stride in ((16, 1), (32, 2)):
            y = hk.Conv2D(channels, 3, stride=stride, with_bias=False)(x)
            y = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(y, is_training))
            y = hk.BatchNorm(True, True, 0.9, scale_init=jnp.zeros)(
                hk.Conv2D(channels, 3, with_bias=False)(y), is_training
            )
            x = jax.nn.relu(y + hk.Conv2D(channels, 1, stride=stride, with_bias=False)(x))
        return hk.Linear(10)(jnp.mean(x, axis=(1, 2)))

    network = hk.transform_with_state(forward)
    optimiser = optax.sgd(0.1, momentum=0.9)
    images, labels = normal(8 * scale, 16, 16, 3), tokens(8 * scale, below=10)
    params, state = network.init(jax.random.PRNGKey(0), images[:2], is_training=True)

    def train_step(params, state, opt_state, images, labels):
        def loss_fn(params):
            logits, new_state = network.apply(params, state, None, images, is_training=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new_state

        (loss, new_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new_state, opt_state, loss

    return train_step, (params, state, optimiser.init(params), images, labels)


def lstm_language_model(scale=1):
    """A deep recurrent core unrolled over time, as the Shakespeare example has it."""

    def forward(ids):
        core = hk.DeepRNN(
            [lambda x: jax.nn.one_hot(x, 32), hk.LSTM(32), jax.nn.relu, hk.LSTM(32), hk.nets.MLP([32, 32])]
        )
        logits, _ = hk.dynamic_unroll(core, ids, core.initial_state(ids.shape[1]))
        return logits

    network = hk.without_apply_rng(hk.transform(forward))
    optimiser = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    ids = tokens(13, 8 * scale, below=32)
    params = network.init(jax.random.PRNGKey(0), ids[:, :1])

    def update(params, opt_state, batch):
        def sequence_loss(params):
            logits = network.apply(params, batch["input"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
            return jnp.sum(losses) / batch["target"].size

        loss, grads = jax.value_and_grad(sequence_loss)(params)
        updates, opt_state = optimiser.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return update, (params, optimiser.init(params), {"input": ids[:-1], "target": ids[1:]})


def ctc_speech(scale=1):
    """Frames of unequal lengths through convolutions and a GRU, CTC loss."""

    def forward(frames):
        x = jax.nn.gelu(hk.Conv1D(32, 3)(frames))
        core = hk.GRU(32)
        x, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
        return hk.Linear(12)(x)

    network = hk.without_apply_rng(hk.transform(forward))
    optimiser = optax.adam(1e-3)
    n = 8 * scale
    frames, labels = normal(n, 16, 10), tokens(n, 5, below=11) + 1
    batch = {
        "frames": frames,
        "frame_padding": (jnp.arange(16) >= 16 - jnp.arange(n)[:, None] % 4).astype(jnp.float32),
        "labels": labels,
        "label_padding": (jnp.arange(5) >= 5 - jnp.arange(n)[:, None] % 3).astype(jnp.float32),
    }
    params = network.init(jax.random.PRNGKey(0), frames[:1])

    def update(params, opt_state, batch):
        def loss_fn(params):
            logits = network.apply(params, batch["frames"])
            return optax.ctc_loss(logits, batch["frame_padding"], batch["labels"], batch["label_padding"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return update, (params, optimiser.init(params), batch)


def gan_two_optimizers(scale=1):
    """Generator and discriminator, each with its optimizer, updated in one step."""

    class State(NamedTuple):
        gen: hk.Params
        disc: hk.Params
        gen_opt: optax.OptState
        disc_opt: optax.OptState

    generator = hk.without_apply_rng(hk.transform(lambda z: hk.nets.MLP([32, 32, 16])(z)))
    discriminator = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([32, 32, 1], activation=jax.nn.leaky_relu)(x))
    )
    gen_tx, disc_tx = optax.adam(1e-4, b1=0.5, b2=0.9), optax.adam(4e-4, b1=0.5, b2=0.9)
    real = normal(16 * scale, 16)
    k1, k2 = jax.random.split(jax.random.PRNGKey(0))
    gen, disc = generator.init(k1, real[:1, :8]), discriminator.init(k2, real[:1])
    state = State(gen, disc, gen_tx.init(gen), disc_tx.init(disc))

    def update(state, real, rng):
        rng_disc, rng_gen = jax.random.split(rng)

        def fake(gen, key):
            return generator.apply(gen, jax.random.normal(key, (real.shape[0], 8)))

        def disc_loss(disc):
            on_real = discriminator.apply(disc, real)
            on_fake = discriminator.apply(disc, fake(state.gen, rng_disc))
            return jnp.mean(jax.nn.softplus(-on_real)) + jnp.mean(jax.nn.softplus(on_fake))

        disc_value, grads = jax.value_and_grad(disc_loss)(state.disc)
        updates, disc_opt = disc_tx.update(grads, state.disc_opt)
        disc = optax.apply_updates(state.disc, updates)

        def gen_loss(gen):
            return jnp.mean(jax.nn.softplus(-discriminator.apply(disc, fake(gen, rng_gen))))

        gen_value, grads = jax.value_and_grad(gen_loss)(state.gen)
        updates, gen_opt = gen_tx.update(grads, state.gen_opt)
        gen = optax.apply_updates(state.gen, updates)
        return State(gen, disc, gen_opt, disc_opt), {"gen": gen_value, "disc": disc_value}

    return update, (state, real, jax.random.PRNGKey(5))
