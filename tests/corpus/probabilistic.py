"""Probabilistic programs: numpyro's SVI and HMC, distrax policies and flows, gpjax and tinygp, flowjax, blackjax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from tests.corpus.data import normal, tokens, uniform


def numpyro_svi(scale=1):
    """Bayesian logistic regression, an automatic guide, `SVI.update` as the step."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x, y):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(x.shape[1]), 1.0).to_event(1))
        bias = numpyro.sample("bias", dist.Normal(0.0, 10.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.Bernoulli(logits=x @ weights + bias), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO(num_particles=2))
    x, y = normal(32 * scale, 16), tokens(32 * scale, below=2)
    state = svi.init(jax.random.key(0), x, y)
    return svi.update, (state, x, y)


def numpyro_vae(scale=1):
    """Encoder and decoder as parameters of an SVI program, minibatches by a plate."""
    import numpyro
    import numpyro.distributions as dist
    from jax.example_libraries import stax
    from numpyro.infer import SVI, Trace_ELBO

    hidden, latent, pixels = 32, 4, 64
    encode = stax.serial(
        stax.Dense(hidden),
        stax.Softplus,
        stax.FanOut(2),
        stax.parallel(stax.Dense(latent), stax.serial(stax.Dense(latent), stax.Exp)),
    )
    decode = stax.serial(stax.Dense(hidden), stax.Softplus, stax.Dense(pixels), stax.Sigmoid)

    def model(batch):
        net = numpyro.module("decoder", decode, (batch.shape[0], latent))
        with numpyro.plate("batch", batch.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([latent]).to_event(1))
            numpyro.sample("obs", dist.Bernoulli(net(z)).to_event(1), obs=batch)

    def guide(batch):
        net = numpyro.module("encoder", encode, (batch.shape[0], pixels))
        mean, std = net(batch)
        with numpyro.plate("batch", batch.shape[0]):
            numpyro.sample("z", dist.Normal(mean, std).to_event(1))

    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), Trace_ELBO())
    images = (uniform(16 * scale, pixels) > 0.5).astype(jnp.float32)
    state = svi.init(jax.random.key(0), images)

    def epoch_step(state, images):
        binarized = jax.random.bernoulli(jax.random.key(7), images * 0.8 + 0.1).astype(images.dtype)
        state, loss = svi.update(state, binarized)
        return state, loss

    return epoch_step, (state, images)


def numpyro_hmc(scale=1):
    """One transition of Hamiltonian Monte Carlo over the posterior of a linear model."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.hmc import hmc
    from numpyro.infer.util import initialize_model

    x, y = normal(64 * scale, 8), normal(64 * scale, seed=1)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(8), 1.0).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        numpyro.sample("obs", dist.Normal(x @ w, sigma), obs=y)

    info = initialize_model(jax.random.key(0), model, model_args=(x, y), dynamic_args=True)
    init, kernel = hmc(potential_fn_gen=info.potential_fn, algo="HMC")
    state = init(
        info.param_info,
        num_warmup=10,
        trajectory_length=0.5,
        step_size=0.05,
        model_args=(x, y),
        rng_key=jax.random.key(1),
    )

    def step(state, x, y):
        return kernel(state, (x, y))

    return step, (state, x, y)


def real_nvp(scale=1):
    """distrax: masked coupling layers with Haiku conditioners, maximum likelihood."""
    import distrax
    import haiku as hk

    dim = 6

    def conditioner(out):
        return hk.Sequential(
            [hk.nets.MLP([32, 32], activate_final=True), hk.Linear(2 * out, w_init=jnp.zeros), hk.Reshape((out, 2))]
        )

    def flow():
        layers = []
        mask = jnp.arange(dim) % 2 == 0
        for _ in range(4):
            layers.append(
                distrax.MaskedCoupling(
                    mask=mask,
                    bijector=lambda p: distrax.ScalarAffine(shift=p[..., 0], log_scale=jnp.tanh(p[..., 1])),
                    conditioner=conditioner(dim),
                )
            )
            mask = jnp.logical_not(mask)
        base = distrax.MultivariateNormalDiag(jnp.zeros(dim), jnp.ones(dim))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))

    log_prob = hk.without_apply_rng(hk.transform(lambda x: flow().log_prob(x)))
    optimizer = optax.adam(1e-3)
    data = normal(16 * scale, dim)
    params = log_prob.init(jax.random.PRNGKey(0), data[:1])

    def update(params, opt_state, x):
        loss, grads = jax.value_and_grad(lambda p: -jnp.mean(log_prob.apply(p, x)))(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return update, (params, optimizer.init(params), data)


def gaussian_process(scale=1):
    """gpjax: hyperparameters of an exact GP by its conjugate marginal likelihood."""
    import equinox as eqx
    import gpjax as gpx

    n = 64 * scale
    x = uniform(n, 1, low=-3.0, high=3.0)
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.RBF())
    posterior = prior * gpx.likelihoods.Gaussian()
    optimizer = optax.adam(1e-2)
    params, static = eqx.partition(posterior, eqx.is_inexact_array)

    def step(params, opt_state, data):
        def loss_fn(params):
            return -gpx.objectives.conjugate_mll(eqx.combine(params, static), data)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss

    return step, (params, optimizer.init(params), gpx.Dataset(X=x, y=jnp.sin(4 * x) + 0.1 * normal(n, 1)))


def tiny_gp(scale=1):
    """tinygp: log marginal likelihood of a quasi-periodic kernel."""
    from tinygp import GaussianProcess, kernels

    n = 64 * scale
    t, y = jnp.linspace(0.0, 10.0, n), normal(n)
    optimizer = optax.adam(1e-2)
    params = {
        "log_amp": jnp.zeros(()),
        "log_scale": jnp.zeros(()),
        "log_period": jnp.zeros(()),
        "log_jitter": jnp.zeros(()),
    }

    def step(params, opt_state, t, y):
        def loss_fn(p):
            kernel = jnp.exp(p["log_amp"]) * kernels.ExpSquared(scale=jnp.exp(p["log_scale"]))
            kernel *= kernels.ExpSineSquared(scale=jnp.exp(p["log_period"]), gamma=1.0)
            gp = GaussianProcess(kernel, t, diag=1e-2 + jnp.exp(p["log_jitter"]))
            return -gp.log_probability(y) / t.shape[0]

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, optimizer.init(params), t, y)


def spline_flow(scale=1):
    """flowjax: a masked autoregressive flow by maximum likelihood, modules partitioned by Equinox."""
    import equinox as eqx
    import paramax
    from flowjax.distributions import StandardNormal
    from flowjax.flows import masked_autoregressive_flow

    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=StandardNormal((4,)), flow_layers=2, nn_width=16, nn_depth=1
    )
    params, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=lambda x: isinstance(x, paramax.NonTrainable))
    optimizer = optax.adam(5e-4)
    x = normal(16 * scale, 4)

    def step(params, opt_state, x):
        def loss_fn(params):
            dist = paramax.unwrap(eqx.combine(params, static))
            return -dist.log_prob(x).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss

    return step, (params, optimizer.init(params), x)


def langevin_chains(scale=1):
    """blackjax: many chains of MALA at once, by vmap."""
    import blackjax

    x, y = normal(64, 6), tokens(64, below=2)
    chains = 16 * scale

    def logdensity(w):
        logits = x @ w
        return jnp.sum(y * logits - jax.nn.softplus(logits)) - 0.5 * jnp.sum(w**2)

    kernel = blackjax.mala(logdensity, step_size=1e-2)
    states = jax.vmap(kernel.init)(normal(chains, 6, seed=2))

    def one_step(states, key):
        keys = jax.random.split(key, chains)
        states, info = jax.vmap(kernel.step)(keys, states)
        return states, info.acceptance_rate.mean()

    return one_step, (states, jax.random.key(0))
