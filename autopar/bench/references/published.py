"""`autopar bench published`: GPT of the Alpa paper, counted and priced, beside what was published.

FLOPs per step of B sequences of S tokens, L layers of width H, vocabulary V (Narayanan et al., 2021, appendix; forward
24 B S L H^2 (1 + S / 6H) and the output layer, backward twice that, and the blocks' forward once more if recomputed):

    F        = 72 B S L H^2 (1 + S / 6H) + 6 B S H V
    F_remat  = 96 B S L H^2 (1 + S / 6H) + 6 B S H V

The formula recomputes a whole block. `jax.checkpoint` leaves out what the backward pass does not read: of each block
the product of the second feed-forward matrix, 8 B S H^2 (row `left out`).

The stage is one of the two of Alpa's plan for GPT-2.6B on eight V100 (dp2 x op2 x pp2, batch 32 in four microbatches,
recomputation: 2.464 s per step, 37.01 TFLOP/s and 8.745 GB per device): half of the layers on four devices, one
microbatch, batch cut over the first axis and Megatron's layouts of the parameters over the second as pins; where the
optimizer state is stored is searched. It keeps embedding and output layer, which the two stages share in the plan.

The step is the whole of that plan: two stages of 2 x 2 devices, each with half of the FLOPs, 1F1B. What is between
the products of a block is constrained by the model's author as Megatron has it (Shoeybi et al., 2019), batch over one
axis, heads and the hidden layer over the other, so that the planner has no say in it. Gradients are added up in float32
here; Alpa added them up in float16, so that the peak to compare has half of these bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autopar import api, jax_compat, zoo
from autopar.bench import compile_only
from autopar.cost_models.flops import model_flops
from autopar.hardware.cluster import Cluster
from autopar.ir.text import seconds, size
from autopar.ir.text import table as grid
from autopar.ir.trace import trace
from autopar.plans import cache as plan_cache
from autopar.plans.plan import Plan
from autopar.zoo import gpt
from autopar.zoo.layers import nn
from autopar.zoo.model import Model, Tree, token_batch, trainable_with_master

SIZES = ("350m", "1.3b", "2.6b", "6.7b", "15b", "39b")
STAGE, CLUSTER, MESH = "gpt-2.6b-remat-master", "p3.16xlarge", (2, 2)
MICROBATCH, LAYERS = 8, 16
PUBLISHED, AXES = replace(gpt.SIZES["2.6b"], batch=32), {"pipe": 2, "data": 2, "model": 2}
STEP_S, PEAK_BYTES = 2.464, 8.745e9  # published

Row = dict[str, Any]


def formula(config: gpt.Config, *, remat: bool) -> float:
    """FLOPs of one step as published, see above."""
    blocks = config.batch * config.seq * config.layers * config.width**2 * (1 + config.seq / (6 * config.width))
    return (96 if remat else 72) * blocks + 6 * config.batch * config.seq * config.width * config.vocab


def left_out(config: gpt.Config) -> float:
    """FLOPs of the recomputed forward pass that nothing reads."""
    return 8 * config.batch * config.seq * config.layers * config.width**2


def flops(name: str, *, remat: bool) -> Row:
    """Counted and published FLOPs of one step of a GPT size."""
    config = gpt.SIZES[name]
    model = zoo.build(f"gpt-{name}-remat" if remat else f"gpt-{name}")
    counted = model_flops(trace(model.step, *model.abstract_args()).graph)
    missing = left_out(config) if remat else 0.0
    return {
        "model": model.name,
        "counted": counted,
        "formula": formula(config, remat=remat),
        "left_out": missing,
        "ratio": (counted + missing) / formula(config, remat=remat),
    }


def stage() -> Plan:
    """The plan of the stage, Alpa's layouts pinned."""
    model = zoo.build(STAGE, layers=LAYERS, batch=MICROBATCH, dtype="float16")
    cluster = replace(Cluster.preset(CLUSTER), devices_per_host=4)
    megatron = compile_only.PLANS["megatron"](model, {"x": MESH[0], "y": MESH[1]})
    pins = {path: spec for path, spec in megatron.items() if path.startswith(("state/params/", "batch/"))}
    with plan_cache.off():
        return api.plan(model.step, *model.abstract_args(), mesh=MESH, cluster=cluster, pins=pins)


def step(config: gpt.Config = PUBLISHED) -> Plan:
    """The plan of the whole step as published, or of that of another GPT."""
    model = megatron(config)
    pins = {f"state/params/blocks/*/{name}": spec for name, spec in gpt.BLOCK_TABLE.items()}
    with plan_cache.off():
        return api.plan(
            *(model.step, *model.abstract_args()),
            mesh=AXES,
            cluster=Cluster.preset(CLUSTER),
            pins={**pins, "batch/*": PartitionSpec("data")},
            stages=AXES["pipe"],
            num_microbatches=config.batch // MICROBATCH,
            schedule="1f1b",
            remat="full",
        )


def megatron(config: gpt.Config) -> Model:
    """GPT in mixed precision whose author cuts activations over the axes "data" and "model"."""
    mesh = jax_compat.auto_abstract_mesh(tuple(AXES.values()), tuple(AXES))
    init, update = trainable_with_master(
        gpt.parameters(config), partial(_loss, config, mesh), optax.adamw(3e-4), config.precision.compute
    )
    return Model("gpt-megatron", "gpt", update, init, token_batch(config.batch, config.seq, config.vocab))


def _loss(config: gpt.Config, mesh: AbstractMesh, params: Tree, batch: Tree) -> jax.Array:
    def cut(x: jax.Array, *last: str | None) -> jax.Array:
        spec = PartitionSpec("data", None, *last)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    dtype = config.precision.compute
    x, bias = gpt.embed(params, batch["tokens"], dtype), nn.causal_bias(config.seq, dtype)
    for p in params["blocks"]:
        h = nn.layer_norm(x, p["ln1_scale"], p["ln1_bias"])
        query, value = (cut(nn.affine(h, p[f"w{n}"], p[f"b{n}"]), "model", None) for n in "qv")
        key = cut(nn.project(h, p["wk"]), "model", None)
        x = x + nn.add_bias(nn.merge_heads(nn.attend(query, key, value, bias), p["wo"]), p["bo"])
        h = nn.layer_norm(x, p["ln2_scale"], p["ln2_bias"])
        h = nn.gelu(cut(nn.affine(h, p["w1"], p["b1"]), "model"))
        x = cut(x + nn.affine(h, p["w2"], p["b2"]), None)
    return gpt.next_token_loss(params, x, batch["labels"])


def run() -> Row:
    """FLOPs of all sizes, with and without recomputation, the stage and the step."""
    counted = [flops(name, remat=remat) for name in SIZES for remat in (False, True)]
    return {"flops": counted, "stage": _stage_figures(stage()), "step": _step_figures(step())}


def _stage_figures(plan: Plan) -> Row:
    return {
        "step_s": plan.step_time_s,
        "flops_per_device": plan.flops_per_device,
        "flops_per_s": plan.flops_per_device / plan.step_time_s,
        "peak_bytes": plan.stages[0].peak_memory_bytes,
        "memory": dict(plan.stages[0].memory),
    }


def _step_figures(plan: Plan) -> Row:
    peaks = [s.peak_memory_bytes - s.memory["gradients"] / 2 for s in plan.stages]
    return {
        "step_s": plan.step_time_s,
        "step_error": plan.step_time_s / STEP_S - 1,
        "peak_bytes": max(s.peak_memory_bytes for s in plan.stages),
        "peak_as_published_bytes": max(peaks),
        "peak_error": max(peaks) / PEAK_BYTES - 1,
    }


def table(result: Row) -> str:
    """FLOPs, then the stage and its memory by kind."""
    heads = ("", "counted", "left out", "formula", "ratio")
    body = [
        (r["model"], *(f"{r[key]:.4g}" for key in ("counted", "left_out", "formula")), f"{r['ratio']:.4f}")
        for r in result["flops"]
    ]
    stage = result["stage"]
    kinds = [(kind, size(nbytes)) for kind, nbytes in sorted(stage["memory"].items(), key=lambda item: -item[1])]
    line = (
        f"one stage on 4 devices of {CLUSTER}: {seconds(stage['step_s'])} per microbatch of {MICROBATCH} and update, "
        f"{stage['flops_per_s'] / 1e12:.1f} TFLOP/s per device, {size(stage['peak_bytes'])} at the peak"
    )
    memory = grid("memory at the peak", ("", "per device"), kinds)
    return "\n".join([grid("FLOPs per step", heads, body), line, memory, _step_line(result["step"])])


def _step_line(step: Row) -> str:
    return (
        f"the published step: {seconds(step['step_s'])}, {step['step_error']:+.1%} of the {STEP_S} s measured; "
        f"{size(step['peak_as_published_bytes'])} at the peak, {step['peak_error']:+.1%} of {size(PEAK_BYTES)} "
        f"({size(step['peak_bytes'])} with gradients added up in float32)"
    )
