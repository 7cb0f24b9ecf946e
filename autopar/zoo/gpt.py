"""GPT: pre-norm transformer decoder with learned positions and GELU (Radford et al., 2019).

    x <- x + Attention(LN(x)) Wo + bo        Wq, Wk, Wv [D,H,K], Wo [H,K,D]
    x <- x + gelu(LN(x) W1 + b1) W2 + b2     W1 [D,4D], W2 [4D,D]

The named sizes are those of the Alpa paper (Zheng et al., 2022), section 8, table of GPT models, and of its public
benchmark suite: sequence length 1024, vocabulary 51200, global batch 1024. Its parameter formula,
L (12 D^2 + 11 D) + V (D + 1), counts one embedding table and leaves out positions, the last norm and some biases; here
the "-tied" variants agree with it within 1%, and the untied ones have V D more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
import optax
from jax.sharding import PartitionSpec

from autopar.zoo.layers import attention as attentions
from autopar.zoo.layers import nn
from autopar.zoo.model import (
    HALF,
    SINGLE,
    Batch,
    Model,
    Param,
    Precision,
    Tree,
    block_params,
    repeat_blocks,
    token_batch,
    trainable,
    trainable_with_master,
    with_layer_axis,
)

Activation = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` (L) of `width` (D) and `heads` (H), `vocab` (V), `seq` tokens, `batch` sequences."""

    layers: int
    width: int
    heads: int
    vocab: int = 51200
    seq: int = 1024
    batch: int = 1024
    precision: Precision = HALF
    scan: bool = False
    remat: bool = False
    attention: str = "naive"
    tied: bool = False
    master: bool = False


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(layers=2, width=32, heads=8, vocab=64, seq=16, batch=8, precision=SINGLE),
        "3m": Config(layers=4, width=256, heads=8, vocab=256, seq=128, batch=32, precision=SINGLE),
        "10m": Config(layers=6, width=384, heads=8, vocab=256, seq=256, batch=32, precision=SINGLE),
        "125m": Config(layers=12, width=768, heads=12),
        "350m": Config(layers=24, width=1024, heads=16),
        "760m": Config(layers=24, width=1536, heads=16),
        "1.3b": Config(layers=24, width=2048, heads=32),
        "2.6b": Config(layers=32, width=2560, heads=32),
        "6.7b": Config(layers=32, width=4096, heads=32),
        "15b": Config(layers=48, width=5120, heads=40),
        "39b": Config(layers=48, width=8192, heads=64),
        "76b": Config(layers=60, width=10240, heads=80),
    }
)

ATTENTION_TABLE = {
    "wq": PartitionSpec(None, "model", None),
    "wk": PartitionSpec(None, "model", None),
    "wv": PartitionSpec(None, "model", None),
    "bq": PartitionSpec("model", None),
    "bv": PartitionSpec("model", None),
    "wo": PartitionSpec("model", None, None),
}
BLOCK_TABLE = {
    **ATTENTION_TABLE,
    "w1": PartitionSpec(None, "model"),
    "b1": PartitionSpec("model"),
    "w2": PartitionSpec("model", None),
}
EMBEDDING_TABLE = {"embed": PartitionSpec("model", None), "head": PartitionSpec(None, "model")}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"tokens", "labels"}, both int32[batch, seq]."""
    attentions.check(
        name, config.attention, head=config.width // config.heads, seq=config.seq, dtype=config.precision.compute
    )
    make_step, dtype = trainable, config.precision.params
    if config.master:
        make_step, dtype = trainable_with_master, config.precision.compute
    init, step = make_step(parameters(config), partial(_loss, config), optax.adamw(3e-4), dtype)
    names = frozenset(BLOCK_TABLE) if config.scan else frozenset[str]()
    table = with_layer_axis({**BLOCK_TABLE, **EMBEDDING_TABLE}, names)
    return Model(name, "gpt", step, init, token_batch(config.batch, config.seq, config.vocab), table, _notes(config))


def _notes(config: Config) -> str:
    head = "shares the embedding" if config.tied else "has its own table of vocab x width"
    return f"Dimensions: Alpa (Zheng et al., 2022), section 8. The output layer {head}."


def parameters(config: Config) -> Tree:
    """What `trainable` makes the state of."""
    blocks = block_params(block_spec(config.width, config.heads), config.layers, scan=config.scan)
    return {**embedding_spec(config.vocab, config.seq, config.width, tied=config.tied), "blocks": blocks}


def embedding_spec(vocab: int, seq: int, width: int, *, tied: bool) -> dict[str, Param]:
    """Parameters around the blocks: V D + S D + 2 D, and V D more for an output layer of its own."""
    params = {
        "embed": Param((vocab, width), 0.02),
        "positions": Param((seq, width), 0.02),
        "ln_scale": Param((width,), mean=1.0),
        "ln_bias": Param((width,)),
    }
    return params if tied else {**params, "head": Param((width, vocab), 0.02)}


def attention_spec(width: int, heads: int) -> dict[str, Param]:
    """Parameters of a pre-norm attention layer: 4 D^2 + 5 D.

    Keys have no bias: it would add the same to all scores of a query and cancel in the softmax, so that its gradient
    is rounding noise, which Adam then scales up to full steps.
    """
    split, merge = (width, heads, width // heads), (heads, width // heads, width)
    return {
        "ln1_scale": Param((width,), mean=1.0),
        "ln1_bias": Param((width,)),
        **{name: Param(split, 0.02) for name in ("wq", "wk", "wv")},
        **{name: Param(split[1:]) for name in ("bq", "bv")},
        "wo": Param(merge, 0.02),
        "bo": Param((width,)),
    }


def feed_forward_spec(width: int, hidden: int) -> dict[str, Param]:
    """Parameters of a pre-norm feed-forward layer with biases: 2 D F + F + 3 D."""
    return {
        "ln2_scale": Param((width,), mean=1.0),
        "ln2_bias": Param((width,)),
        "w1": Param((width, hidden), 0.02),
        "b1": Param((hidden,)),
        "w2": Param((hidden, width), 0.02),
        "b2": Param((width,)),
    }


def block_spec(width: int, heads: int) -> dict[str, Param]:
    """Parameters of one block: 12 D^2 + 12 D."""
    return {**attention_spec(width, heads), **feed_forward_spec(width, 4 * width)}


def attention(
    params: Tree,
    x: jax.Array,
    bias: jax.Array | None,
    source: jax.Array | None = None,
    kernel: attentions.Kernel | None = None,
) -> jax.Array:
    """x [B,S,D] plus attention of its norm: to itself, or to a source [B,T,D]."""
    h = nn.layer_norm(x, params["ln1_scale"], params["ln1_bias"])
    return x + nn.multi_head(params, h, h if source is None else source, bias, kernel=kernel)


def feed_forward(params: Tree, x: jax.Array, activation: Activation = nn.gelu) -> jax.Array:
    """x [B,S,D] plus the feed-forward layer of its norm."""
    h = nn.layer_norm(x, params["ln2_scale"], params["ln2_bias"])
    return x + nn.affine(activation(nn.affine(h, params["w1"], params["b1"])), params["w2"], params["b2"])


def block(
    params: Tree,
    x: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation = nn.gelu,
    kernel: attentions.Kernel | None = None,
) -> jax.Array:
    """One transformer block on x [B,S,D].

    `bias` is the mask, as `nn.attend` takes it, and None attends to everything; a kernel has a mask of its own.
    """
    return feed_forward(params, attention(params, x, bias, kernel=kernel), activation)


def with_kernel(block: Callable[..., Tree], name: str, *, causal: bool) -> Callable[..., Tree]:
    """The block with the kernel of that name, as its argument `kernel`; with "naive" the block itself."""
    kernel = attentions.kernel_of(name, causal=causal)
    return block if kernel is None else partial(block, kernel=kernel)


def embed(params: Tree, tokens: jax.Array, dtype: str) -> jax.Array:
    """Token and position embeddings of tokens int32[B,S] -> [B,S,D]."""
    return nn.add_bias(nn.lookup(params["embed"], tokens, dtype), params["positions"])


def next_token_loss(params: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of the output layer on x [B,S,D]; without a "head" it is the embedding, transposed."""
    x = nn.layer_norm(x, params["ln_scale"], params["ln_bias"])
    head = params["head"] if "head" in params else params["embed"].T
    return nn.cross_entropy(nn.project(x, head), labels)


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    dtype = config.precision.compute
    x = embed(params, batch["tokens"], dtype)
    mask = nn.causal_bias(config.seq, dtype) if config.attention == "naive" else None
    body = with_kernel(block, config.attention, causal=True)
    x = repeat_blocks(body, params["blocks"], x, mask, scan=config.scan, remat=config.remat)
    return next_token_loss(params, x, batch["labels"])
