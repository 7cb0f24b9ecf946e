"""Train steps written as the guides of their packages have it: one table, one file per family.

`autopar bench corpus` checks all of them, `tests/corpus/test_corpus.py` a handful. Sizes are small; `large` is the
scale at which one of eight devices needs 32 MiB or more. `carried`: how many of the first results are the first
arguments of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.bench.corpus.program import Program

#: name, title, packages, large scale, carried, and fields of `Program` that are not the default.
Row = tuple[str, str, str, int, int] | tuple[str, str, str, int, int, Mapping[str, Any]]

#: file of a family -> its programs
FAMILIES: Mapping[str, Sequence[Row]] = {
    "linen": (
        ("resnet_batch_norm", "ResNet, batch statistics mutable", "flax optax", 256, 1),
        ("dropout_mlp", "MLP with dropout, key in the TrainState", "flax optax", 8192, 1),
        ("masked_lm", "masked LM, padding mask, tied embedding", "flax optax", 512, 1),
        ("vae", "VAE, reparametrised noise", "flax optax", 16384, 1),
    ),
    "nnx": (
        ("nnx_cnn", "MNIST tutorial: batch norm, dropout stream, metrics", "flax optax", 1024, 1),
        ("nnx_minigpt", "GPT that owns its dropout keys", "flax optax", 512, 3, {"precision": "float32"}),
        ("nnx_lora", "LoRALinear, gradients of LoRAParam alone", "flax optax", 65536, 1),
        ("nnx_scan_over_layers", "layers by nnx.vmap and nnx.scan", "flax optax", 8192, 1),
        ("nnx_cnn_objects", "MNIST tutorial with nnx.jit's objects", "flax optax", 1024, 4, {"in_place": True}),
        (
            "nnx_minigpt_objects",
            "GPT and its optimizer as objects",
            "flax optax",
            512,
            2,
            {"in_place": True, "precision": "float32"},
        ),
        ("nnx_gan_objects", "GAN, two modules and two optimizers", "flax optax", 8192, 5, {"in_place": True}),
    ),
    "equinox_modules": (
        ("cnn", "CNN, filter_value_and_grad", "equinox optax", 1024, 2),
        ("gru_scan", "GRU classifier, scan over time", "equinox optax", 4096, 2),
        ("vit", "ViT with class token and dropout", "equinox optax", 256, 2),
        ("stateful_batch_norm", "BatchNorm in eqx.nn.State", "equinox optax", 32768, 3),
        ("spectral_norm", "SpectralNorm critic, hinge loss", "equinox optax", 65536, 3),
        ("neural_ode", "neural ODE, adaptive Tsit5", "equinox diffrax optax", 4096, 2),
        ("neural_sde", "neural SDE, a Brownian tree per example", "equinox diffrax optax", 4096, 2),
    ),
    "haiku_steps": (
        ("mlp_regularised", "MNIST example, averaged parameters", "dm-haiku optax", 32768, 1),
        ("resnet_with_state", "ResNet, transform_with_state", "dm-haiku optax", 256, 3),
        ("lstm_language_model", "deep LSTM unrolled over time", "dm-haiku optax", 1024, 2),
        ("ctc_speech", "GRU over frames, optax.ctc_loss", "dm-haiku optax", 2048, 2),
        ("gan_two_optimizers", "GAN with two optimizers", "dm-haiku optax", 16384, 1),
    ),
    "graphs": (
        ("graph_network", "GraphNetwork on padded molecules", "jraph flax optax", 2048, 2),
        ("graph_attention", "GAT, node classification", "jraph flax optax", 2048, 2),
        ("equivariant_energy", "energies and forces, tensor products of irreps", "e3nn-jax flax optax", 1024, 2),
    ),
    "probabilistic": (
        ("numpyro_svi", "logistic regression, AutoNormal, SVI", "numpyro", 131072, 1),
        ("numpyro_vae", "VAE as an SVI program", "numpyro", 16384, 1),
        ("numpyro_hmc", "one transition of HMC", "numpyro", 131072, 1),
        ("real_nvp", "RealNVP, maximum likelihood", "distrax dm-haiku optax", 16384, 2),
        ("gaussian_process", "exact GP, conjugate marginal likelihood", "gpjax equinox optax", 32, 2),
        ("tiny_gp", "quasi-periodic kernel, marginal likelihood", "tinygp optax", 32, 2),
        ("spline_flow", "masked autoregressive flow", "flowjax equinox optax", 65536, 2),
        ("langevin_chains", "chains of MALA", "blackjax", 32768, 1),
    ),
    "named": (
        ("haliax_transformer", "decoder with named attention", "haliax equinox optax", 512, 2),
        ("penzai_mlp", "MLP with unbound parameters", "penzai optax", 16384, 2),
    ),
    "language": (
        ("seq2seq_padding", "encoder-decoder, padding masks, Adafactor", "optax", 512, 2),
        ("gpt_kv_cache", "greedy decoding with a KV cache", "optax", 4096, 1),
        ("lora_frozen", "LoRA on a frozen transformer", "optax", 1024, 2),
        ("distillation", "distillation from a frozen teacher", "optax", 32768, 2),
        ("mamba_scan", "selective state space, associative scan", "optax", 256, 2),
        ("moe_ragged_dot", "sorted mixture of experts, ragged_dot", "optax", 8192, 2),
        ("scanned_remat_gpt", "scan over rematerialised layers, loss in chunks", "optax", 512, 2),
    ),
    "generative": (
        ("ddpm_unet", "DDPM, U-Net, EMA of weights", "flax optax", 512, 1),
        ("mlp_mixer", "MLP-Mixer, mixup, LAMB", "flax optax", 512, 1),
        ("clip_contrastive", "CLIP-like pairs, learnt temperature", "flax optax", 256, 2),
    ),
    "reinforcement": (
        ("ppo", "PPO, GAE by a scan, epochs of minibatches", "flax distrax rlax optax", 8192, 1),
        ("double_dqn", "double DQN, target network", "flax distrax rlax optax", 8192, 1),
        ("soft_actor_critic", "SAC, three optimizers", "flax distrax rlax optax", 16384, 1),
        ("vtrace_actor_learner", "IMPALA learner, V-trace", "flax distrax rlax optax", 8192, 1),
    ),
    "optimizers": (
        ("muon", "optax.contrib.muon", "optax", 16384, 2),
        ("schedule_free", "optax.contrib.schedule_free_adamw", "optax", 16384, 2),
        ("sam", "optax.contrib.sam, opaque", "optax", 32768, 2),
        ("prodigy", "optax.contrib.prodigy", "optax", 16384, 2),
        ("sophia_like_hutchinson", "optax.contrib.sophia", "optax", 16384, 2),
        ("multi_steps", "optax.MultiSteps", "optax", 16384, 2, {"precision": "float32"}),
        ("ema_and_lookahead", "lookahead over Adam with EMA", "optax", 32768, 2),
        ("grouped_with_schedules", "multi_transform, injected schedules", "optax", 16384, 2),
        ("dynamic_loss_scaling", "float16 with dynamic loss scaling", "optax", 16384, 1, {"precision": "float16"}),
        ("lbfgs", "L-BFGS, zoom line search", "optax", 65536, 2),
        ("dp_sgd", "DP-SGD, per-example gradients", "optax", 2048, 2),
    ),
    "learning": (
        ("maml", "MAML, second order", "optax", 8192, 2),
        ("deep_equilibrium", "fixed point, implicit gradients", "optax", 65536, 2),
        ("mixture_density", "mixture density network", "optax", 32768, 2),
        ("hypernetwork", "weights from a network", "optax", 16384, 2),
        ("lstm_peepholes", "bidirectional LSTM, masked lengths", "optax", 4096, 2),
        ("physics_informed", "PINN, Hessians by vmap", "optax", 4096, 2),
        ("simclr_with_queue", "momentum encoder, ring buffer of keys", "optax", 512, 1),
        ("implicit_ridge", "Cholesky solves inside the loss", "optax", 4096, 2),
    ),
}


def _program(family: str, row: Row) -> Program:
    name, title, packages, large, carried, *more = row
    fields = more[0] if more else {}
    return Program(name, title, f"tests.corpus.{family}:{name}", tuple(packages.split()), large, carried, **fields)


PROGRAMS = tuple(_program(family, row) for family, rows in FAMILIES.items() for row in rows)
