"""What the first lines of a plan say, beside what an expert calls the plan after reading its layouts.

Each case has in a comment what was read: layouts of arguments, the layouts in which products read their operands, and
collectives (`wq`, `wo`: weights of attention; `w1`, `w2`: of the feed-forward layer; "cut y": sharded over axis y).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import pins, zoo
from autopar.bench.equal.case import dear
from autopar.plans.views.parallelism import describe
from tests.support.source_lines import EXPERT_PRODUCTS


@dataclass(frozen=True)
class Case:
    """A zoo model with its sizes, the options of its plan, and what the plan is called."""

    model: str
    options: Mapping[str, Any]
    words: str
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])


def on(*mesh: int, **options: Any) -> Mapping[str, Any]:
    """Options for a mesh of slow devices on a fast network, on which toys are worth cutting."""
    return {"mesh": mesh, "cluster": dear(mesh), "remat": "none", **options}


data, zero1, fsdp, megatron = pins.data_parallel, pins.zero1, pins.fsdp, pins.megatron
WHOLE = {"params": P(), "opt": P()}
ATTENTION = "attention by heads, columns of weights, rows of weights"

CASES: Mapping[str, Case] = {
    # Data parallelism and its state
    #
    # Parameters and moments whole, x and y of the batch cut x; both products of a layer along the batch.
    "mlp, data parallel": Case("mlp-toy", on(8, pins=data("x")), "data parallel over x (8 ways)"),
    # All kernels whole, images cut x, every convolution along its images; gradients all-reduced.
    "wresnet, data parallel": Case("wresnet-toy", on(8, pins=data("x")), "data parallel over x (8 ways)"),
    # Parameters of encoder and decoder whole, moments cut x; all products, and convolutions, along the batch; 143 kB of
    # gradients reduce-scattered, new parameters all-gathered.
    "speech, zero1": Case(
        "speech-toy", on(8, pins=zero1("x")), "data parallel over x (8 ways); optimizer state sharded over x (ZeRO-2)"
    ),
    # The same with a loop over two microbatches of 4 sequences; 123 kB of gradients reduce-scattered.
    "gpt, zero1, microbatches": Case(
        "gpt-toy",
        on(4, pins=zero1("x"), num_microbatches=2),
        "2 microbatches; data parallel over x (4 ways); optimizer state sharded over x (ZeRO-2)",
    ),
    # Parameters and moments cut x; products read weights whole: all-gathers before, reduce-scatters after.
    "gpt, fsdp": Case(
        "gpt-toy", on(8, pins=fsdp("x")), "data parallel over x (8 ways); weights sharded over x (FSDP, ZeRO-3)"
    ),
    # The same of weights stacked over layers, read whole inside of the scan.
    "gpt, scanned, fsdp": Case(
        "gpt-toy-scan", on(8, pins=fsdp("x")), "data parallel over x (8 ways); weights sharded over x (FSDP, ZeRO-3)"
    ),
    # Images, texts and all weights cut x and y together; all-gathers of weights over x and y.
    "clip, fsdp over two axes": Case(
        "clip-toy",
        on(2, 4, pins=fsdp(("x", "y"))),
        "data parallel over x and y (8 ways); weights sharded over x and y (FSDP, ZeRO-3)",
    ),
    # Batch cut x and y; weights cut y alone and gathered over y; whole along x, and so are moments.
    "gpt, fsdp inside, data parallel outside": Case(
        "gpt-toy",
        on(2, 4, pins=data("x") | fsdp("y")),
        "data parallel over x and y (8 ways); weights sharded over y (FSDP, ZeRO-3)",
    ),
    # Tensor parallelism
    #
    # wq cut y over heads, wo y over heads (rows), w1 y over columns, w2 y over rows; an all-reduce after wo and w2.
    "gpt, megatron": Case(
        "gpt-toy",
        on(2, 4, pins=data("x") | megatron("y")),
        f"data parallel over x (2 ways); tensor parallel over y (4 ways: {ATTENTION})",
    ),
    # The same; the pooler and the transform are columns, what follows them rows.
    "bert, megatron": Case(
        "bert-toy",
        on(4, 2, pins=data("x") | megatron("y")),
        f"data parallel over x (4 ways); tensor parallel over y (2 ways: {ATTENTION})",
    ),
    # Weights cut y as above in both halves and in cross attention; moments cut x besides; gradients reduce-scattered.
    "t5, megatron and zero1": Case(
        "t5-toy",
        on(2, 4, pins=zero1("x") | megatron("y")),
        f"data parallel over x (2 ways); tensor parallel over y (4 ways: {ATTENTION}); "
        "optimizer state sharded over x (ZeRO-2)",
    ),
    # w1 and w3 columns, w2 rows over y; the values of attention by heads, its scores over features of a head, 5% of
    # FLOPs each; all weights cut x and gathered.
    "llama, megatron and fsdp": Case(
        "llama3-toy",
        on(2, 4, pins=fsdp("x") | megatron("y")),
        f"data parallel over x (2 ways); tensor parallel over y (4 ways: {ATTENTION}); "
        "weights sharded over x (FSDP, ZeRO-3)",
    ),
    # Patches cut z over columns, then wq and w1 over rows, wo and w2 over columns, attention by heads; weights cut x
    # and y, gathered over both.
    "vit, three axes": Case(
        "vit-toy",
        on(2, 2, 2, pins=fsdp(("x", "y")) | megatron("z")),
        f"data parallel over x and y (4 ways); tensor parallel over z (2 ways: {ATTENTION}); "
        "weights sharded over x and y (FSDP, ZeRO-3)",
    ),
    # wx and wh of the first layer cut y over columns, wx of the second and the head over rows.
    "rnn, megatron": Case(
        "rnn-toy",
        on(4, 2, pins=data("x") | megatron("y")),
        "data parallel over x (4 ways); tensor parallel over y (2 ways: columns of weights, rows of weights)",
    ),
    # Kernels cut y over input channels (rows, 57%; of 19% the results are reduce-scattered along the batch) or output
    # channels (columns, 38%); cross attention by heads.
    "unet, megatron": Case(
        "unet-toy",
        on(2, 4, pins=data("x") | megatron("y")),
        "data parallel over x (2 ways); tensor parallel over y (4 ways: attention by heads, batch sharded between "
        "products, columns of weights, rows of weights)",
    ),
    # Weights as in Megatron; results of wo and w2 reduce-scattered over y along the batch, and gathered again before
    # the next columns.
    "gpt, megatron, tokens cut": Case(
        "gpt-toy",
        on(2, 4, pins={"batch": P("x", "y")} | megatron("y")),
        "data parallel over x (2 ways); tensor parallel over y (4 ways: attention by heads, batch sharded between "
        "products, columns of weights, rows of weights)",
    ),
    # w1 cut x over rows and y over columns, w2 the other way round; partial sums all-reduced over x, then over y.
    "mlp in two dimensions": Case(
        "mlp-1b",
        {"mesh": (2, 4), "cluster": "p4d.24xlarge:1", "remat": "none"},
        "tensor parallel over x and y (8 ways: columns of weights, rows of weights)",
        {"layers": 2, "batch": 64},
    ),
    # w1 cut x over columns, w2 over rows; activations gathered before and reduce-scattered after, along features.
    "mlp on one host": Case(
        "mlp-1b",
        {"mesh": (8,), "cluster": "dgx-h100:1", "remat": "none"},
        "tensor parallel over x (8 ways: columns of weights, rows of weights)",
        {"layers": 2},
    ),
    # w1 and w2 cut x and y over columns; the input of both is gathered.
    "mlp, free": Case("mlp-toy", on(4, 2), "tensor parallel over x and y (8 ways: columns of weights)"),
    # wq and w1 cut x and y over columns, wo and w2 over rows. Their results are cut y along the sequence, x along
    # features. The head reads the sequence cut y, and is cut x over rows, its result x along the batch.
    "gpt, free": Case(
        "gpt-toy",
        on(2, 4),
        "tensor parallel over x (2 ways: attention by heads, batch sharded between products, columns of weights, rows "
        "of weights); tensor parallel (93%) and sequence parallel (7%) over y (4 ways: attention by heads, columns of "
        "weights, rows of weights, sequence parallel between products)",
    ),
    # The sequence
    #
    # The sequence cut x in every product, keys and values gathered; weights whole.
    "gpt, context parallel": Case(
        "gpt-toy",
        on(
            4,
            pins={
                **WHOLE,
                "batch": P(None, "x"),
                "products at nn.py:25": P(None, "x"),
                "products at nn.py:114": P(None, None, "x"),
                "products at nn.py:116": P(None, None, "x"),
                "products at nn.py:121": P(None, "x"),
            },
        ),
        "context parallel over x (4 ways)",
    ),
    # The sequence cut x in products with weights, heads in attention, all-to-alls between; weights whole.
    "gpt, sequence exchanged for heads": Case(
        "gpt-toy",
        on(
            4,
            pins={
                **WHOLE,
                "batch": P(None, "x"),
                "products at nn.py:25": P(None, "x"),
                "products at nn.py:114": P(None, "x"),
                "products at nn.py:116": P(None, "x"),
                "products at nn.py:121": P(None, "x"),
            },
        ),
        "sequence parallel over x (4 ways: attention by heads)",
    ),
    # Along y: wq, w1 and w3 columns (26%), attention by heads (12%), the sequence in wo, w2 and the head (62%), whose
    # weights, and the embedding's, are cut y and gathered: 1.2 of 1.49 billion elements. All are cut x and gathered.
    "llama on 256": Case(
        "llama3-8b",
        {"mesh": (32, 8), "cluster": "dgx-h100:32", "remat": "none"},
        "data parallel over x (32 ways); sequence parallel (62%) and tensor parallel (38%) over y (8 ways: attention "
        "by heads, columns of weights); weights sharded over x (FSDP, ZeRO-3); 81% of the weights sharded over y "
        "(FSDP, ZeRO-3)",
        {"layers": 2},
    ),
    # wx and wh cut x over columns (43%); the head reads time steps cut x (57%). Embedding and head, 131 of 181 million
    # elements, are cut x and gathered, all weights cut y and gathered.
    "rnn on one host": Case(
        "rnn-200m",
        {"mesh": (4, 2), "cluster": "dgx-h100:1", "remat": "none"},
        "sequence parallel (57%) and tensor parallel (43%) over x (4 ways: columns of weights); data parallel over y "
        "(2 ways); 72% of the weights sharded over x (FSDP, ZeRO-3); weights sharded over y (FSDP, ZeRO-3)",
        {"layers": 2},
    ),
    # Experts
    #
    # Weights of experts cut x and read so, all-to-alls before and after; all other products along the batch, weights
    # whole. No weight is gathered.
    "moe, experts along the batch's axis": Case(
        "moe-toy",
        on(
            8,
            pins={
                "params/*expert*": P("x"),
                "opt/*expert*": P("x"),
                **{f"products at {of}": P("x") for of in EXPERT_PRODUCTS},
            }
            | data("x"),
        ),
        "data parallel (70%) and expert parallel (30%) over x (8 ways)",
    ),
    # Weights of experts cut x as well, but gathered: products along the groups of tokens. They are 65% of the weights.
    "moe, experts gathered": Case(
        "moe-toy",
        on(8, pins={"params/*expert*": P("x"), "opt/*expert*": P("x")} | data("x")),
        "data parallel over x (8 ways); 65% of the weights sharded over x (FSDP, ZeRO-3)",
    ),
    # Along x: columns and rows of attention and feed-forward layer, experts and their dispatch (34%), features of the
    # combination (4%). Along y: columns, rows whose results are cut along the batch, experts (30%), and the batch in
    # gate, dispatch, combination and head (16%).
    "moe, free": Case(
        "moe-toy",
        on(2, 4),
        "tensor parallel (65%) and expert parallel (34%) over x (2 ways: attention by heads, columns of weights, rows "
        "of weights, sequence parallel between products); tensor parallel (53%), expert parallel (30%) and data "
        "parallel (16%) over y (4 ways: attention by heads, batch sharded between products, columns of weights, rows "
        "of weights)",
    ),
    # Stages
    #
    # Two stages of (2, 2). Inside: products along the batch cut y; wq and w1 cut z over columns, wo and w2 over rows;
    # an all-reduce over z after each. What is sent over y are gradients and new parameters.
    "gpt, megatron in stages": Case(
        "gpt-toy",
        on(2, 2, 2, pins=data("y") | megatron("z"), stages=2, num_microbatches=2),
        "2 stages, 2 microbatches, schedule 1f1b; data parallel over y (2 ways); tensor parallel over z (2 ways: "
        f"{ATTENTION})",
    ),
    # Memory
    #
    # Within 700 MB: w1 cut x over columns, w2 over rows with a reduce-scatter along the batch, which is gathered before
    # the next w1. No weight is sent.
    "mlp, within a budget": Case(
        "mlp-1b",
        {"mesh": (8,), "cluster": "dgx-h100:1", "memory_budget": "700MB", "pins": {"batch": P("x")}},
        "tensor parallel over x (8 ways: batch sharded between products, columns of weights, rows of weights)",
        {"layers": 2, "batch": 1024},
    ),
    # w1, w2, embedding and head cut x and gathered, 139 of 156 million elements; wq, wk, wv, wo whole with moments cut
    # x; gradients reduce-scattered. All layers but the head's are recomputed.
    "gpt, recomputed": Case(
        "gpt-350m",
        {"mesh": (8,), "cluster": "dgx-a100:1", "remat": "full"},
        "data parallel over x (8 ways); 89% of the weights sharded over x (FSDP, ZeRO-3); optimizer state sharded over "
        "x (ZeRO-2); layers 0 to 4 recomputed (full)",
        {"layers": 4, "batch": 128},
    ),
    # The batch cut x and y; all weights cut x and y, and gathered over both.
    "gpt on one host of V100": Case(
        "gpt-1.3b",
        {"mesh": (2, 4), "cluster": "p3.16xlarge:1", "remat": "none"},
        "data parallel over x and y (8 ways); weights sharded over x and y (FSDP, ZeRO-3)",
        {"layers": 2, "batch": 64},
    ),
}


@pytest.mark.parametrize("title", CASES)
def test_a_plan_is_called_what_an_expert_calls_it(title: str) -> None:
    case = CASES[title]
    model = zoo.build(case.model, **case.sizes)
    plan = autopar.plan(model.step, *model.abstract_args(), progress=False, **case.options)
    assert describe(plan) == case.words
    assert case.words in " ".join(line.strip() for line in plan.summary().splitlines())
