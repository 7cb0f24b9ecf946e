"""Reinforcement learning: PPO with minibatch epochs, DQN with a target network, V-trace; rlax and distrax."""

from __future__ import annotations

from typing import Any, NamedTuple

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import rlax
from flax.training.train_state import TrainState

from tests.corpus.data import normal, tokens, uniform


class Transition(NamedTuple):
    done: jax.Array
    action: jax.Array
    value: jax.Array
    reward: jax.Array
    log_prob: jax.Array
    obs: jax.Array


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.orthogonal
        actor = nn.tanh(nn.Dense(32, kernel_init=init(2**0.5))(x))
        logits = nn.Dense(4, kernel_init=init(0.01))(nn.tanh(nn.Dense(32)(actor)))
        critic = nn.Dense(1, kernel_init=init(1.0))(nn.tanh(nn.Dense(32)(x)))
        return distrax.Categorical(logits=logits), jnp.squeeze(critic, axis=-1)


def ppo(scale=1):
    """Advantages by a reversed scan, two epochs of shuffled minibatches, clipped losses."""
    steps, envs = 8, 8 * scale
    network = ActorCritic()
    obs = normal(steps + 1, envs, 6)
    params = network.init(jax.random.key(0), obs[0])
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))
    state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
    trajectory = Transition(
        done=(uniform(steps, envs) < 0.1).astype(jnp.float32),
        action=tokens(steps, envs, below=4),
        value=normal(steps, envs, seed=1),
        reward=normal(steps, envs, seed=2),
        log_prob=-uniform(steps, envs, low=0.5, high=2.0),
        obs=obs[:-1],
    )

    def update(state, trajectory, last_obs, key):
        key = jax.random.fold_in(key, state.step)
        _, last_value = state.apply_fn(state.params, last_obs)

        def backwards(carry, t):
            gae, following = carry
            delta = t.reward + 0.99 * following * (1 - t.done) - t.value
            gae = delta + 0.99 * 0.95 * (1 - t.done) * gae
            return (gae, t.value), gae

        _, advantages = jax.lax.scan(backwards, (jnp.zeros_like(last_value), last_value), trajectory, reverse=True)
        targets = advantages + trajectory.value

        def loss_fn(params, t, gae, targets):
            pi, value = state.apply_fn(params, t.obs)
            clipped = t.value + (value - t.value).clip(-0.2, 0.2)
            value_loss = 0.5 * jnp.maximum((value - targets) ** 2, (clipped - targets) ** 2).mean()
            ratio = jnp.exp(pi.log_prob(t.action) - t.log_prob)
            gae = (gae - gae.mean()) / (gae.std() + 1e-8)
            actor_loss = -jnp.minimum(ratio * gae, jnp.clip(ratio, 0.8, 1.2) * gae).mean()
            return actor_loss + 0.5 * value_loss - 0.01 * pi.entropy().mean()

        def minibatch(state, batch):
            loss, grads = jax.value_and_grad(loss_fn)(state.params, *batch)
            return state.apply_gradients(grads=grads), loss

        def epoch(state, key):
            order = jax.random.permutation(key, steps * envs)
            flat = jax.tree.map(
                lambda x: x.reshape(steps * envs, *x.shape[2:])[order], (trajectory, advantages, targets)
            )
            batches = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), flat)
            return jax.lax.scan(minibatch, state, batches)

        state, losses = jax.lax.scan(epoch, state, jax.random.split(key, 2))
        return state, losses.mean()

    return update, (state, trajectory, obs[-1], jax.random.key(3))


class QState(TrainState):
    target: Any


def double_dqn(scale=1):
    """rlax's double Q-learning under vmap, Polyak-averaged target, prioritised weights."""

    class QNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(64)(x))
            advantage, value = nn.Dense(5)(nn.relu(nn.Dense(64)(x))), nn.Dense(1)(nn.relu(nn.Dense(64)(x)))
            return value + advantage - advantage.mean(-1, keepdims=True)

    net, n = QNet(), 16 * scale
    batch = {
        "obs": normal(n, 8),
        "action": tokens(n, below=5),
        "reward": normal(n, seed=1),
        "discount": (uniform(n) < 0.9).astype(jnp.float32) * 0.99,
        "next": normal(n, 8, seed=2),
        "weight": uniform(n, low=0.2),
    }
    params = net.init(jax.random.key(0), batch["obs"][:1])
    state = QState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3), target=params)

    def train_step(state, batch):
        def loss_fn(params):
            q, q_next = state.apply_fn(params, batch["obs"]), state.apply_fn(params, batch["next"])
            q_target = state.apply_fn(state.target, batch["next"])
            errors = jax.vmap(rlax.double_q_learning)(
                q, batch["action"], batch["reward"], batch["discount"], q_target, jax.lax.stop_gradient(q_next)
            )
            return jnp.mean(batch["weight"] * rlax.huber_loss(errors)), jnp.abs(errors)

        (loss, priorities), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        state = state.replace(target=optax.incremental_update(state.params, state.target, 0.005))
        return state, {"loss": loss, "priorities": priorities}

    return train_step, (state, batch)


def soft_actor_critic(scale=1):
    """A squashed Gaussian policy, two critics, a learnt temperature: three optimizers in one step."""

    class Policy(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(32)(x))
            mean, log_std = nn.Dense(2)(x), jnp.clip(nn.Dense(2)(x), -5, 2)
            base = distrax.MultivariateNormalDiag(mean, jnp.exp(log_std))
            return distrax.Transformed(base, distrax.Block(distrax.Tanh(), 1))

    class Critic(nn.Module):
        @nn.compact
        def __call__(self, obs, action):
            x = nn.relu(nn.Dense(32)(jnp.concatenate([obs, action], -1)))
            return nn.Dense(1)(nn.relu(nn.Dense(32)(x)))[..., 0]

    Critics = nn.vmap(Critic, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
    policy, critics, n = Policy(), Critics(), 16 * scale
    obs, action = normal(n, 6), uniform(n, 2, low=-0.9, high=0.9)
    k1, k2 = jax.random.split(jax.random.key(0))
    critic = critics.init(k2, obs[:1], action[:1])
    params = {"actor": policy.init(k1, obs[:1]), "critic": critic, "alpha": jnp.zeros(())}
    tx = {name: optax.adam(3e-4) for name in params}
    state = {
        "params": params,
        "opt": {name: tx[name].init(params[name]) for name in params},
        "target": critic,
        "key": jax.random.key(1),
    }
    batch = (obs, action, normal(n, seed=1), normal(n, 6, seed=2), (uniform(n) < 0.9).astype(jnp.float32))

    def train_step(state, batch):
        obs, action, reward, following, discount = batch
        key, k_next, k_now = jax.random.split(state["key"], 3)
        p = state["params"]
        next_action, next_log_prob = policy.apply(p["actor"], following).sample_and_log_prob(seed=k_next)
        next_q = critics.apply(state["target"], following, next_action).min(0)
        target = reward + 0.99 * discount * (next_q - jnp.exp(p["alpha"]) * next_log_prob)

        def critic_loss(c):
            return jnp.mean((critics.apply(c, obs, action) - jax.lax.stop_gradient(target)[None]) ** 2)

        def actor_loss(a):
            new_action, log_prob = policy.apply(a, obs).sample_and_log_prob(seed=k_now)
            q = critics.apply(p["critic"], obs, new_action).min(0)
            return jnp.mean(jnp.exp(p["alpha"]) * log_prob - q), log_prob

        losses, grads = {}, {}
        losses["critic"], grads["critic"] = jax.value_and_grad(critic_loss)(p["critic"])
        (losses["actor"], log_prob), grads["actor"] = jax.value_and_grad(actor_loss, has_aux=True)(p["actor"])
        losses["alpha"], grads["alpha"] = jax.value_and_grad(lambda a: -jnp.mean(jnp.exp(a) * (log_prob - 2.0)))(
            p["alpha"]
        )
        new, opt = {}, {}
        for name in p:
            updates, opt[name] = tx[name].update(grads[name], state["opt"][name], p[name])
            new[name] = optax.apply_updates(p[name], updates)
        target = optax.incremental_update(new["critic"], state["target"], 0.005)
        return {"params": new, "opt": opt, "target": target, "key": key}, losses

    return train_step, (state, batch)


def vtrace_actor_learner(scale=1):
    """IMPALA's learner: rlax's V-trace over trajectories, vmapped over the batch."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(48)(x))
            return nn.Dense(4)(x), nn.Dense(1)(x)[..., 0]

    net, steps, n = Net(), 8, 8 * scale
    obs = normal(n, steps + 1, 6)
    batch = {
        "obs": obs,
        "action": tokens(n, steps, below=4),
        "behaviour": normal(n, steps, 4, seed=1, scale=0.3),
        "reward": normal(n, steps, seed=2),
        "discount": 0.97 * jnp.ones((n, steps)),
    }
    state = TrainState.create(
        apply_fn=net.apply, params=net.init(jax.random.key(0), obs[:1]), tx=optax.rmsprop(1e-3, decay=0.99, eps=1e-2)
    )

    def train_step(state, batch):
        def loss_one(params, trajectory):
            logits, values = state.apply_fn(params, trajectory["obs"])
            logits = logits[:-1]
            ratios = rlax.categorical_importance_sampling_ratios(logits, trajectory["behaviour"], trajectory["action"])
            vtrace = rlax.vtrace_td_error_and_advantage(
                values[:-1], values[1:], trajectory["reward"], trajectory["discount"], ratios, lambda_=0.95
            )
            weights = jnp.ones_like(trajectory["reward"])
            pg = rlax.policy_gradient_loss(logits, trajectory["action"], vtrace.pg_advantage, weights)
            return pg + 0.5 * jnp.mean(vtrace.errors**2) + 0.01 * rlax.entropy_loss(logits, weights)

        def loss_fn(params):
            return jnp.mean(jax.vmap(loss_one, in_axes=(None, 0))(params, batch))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step, (state, batch)
