"""CLIP: an image and a text tower trained to agree, by a contrastive loss over the batch (Radford et al., 2021).

    image [N,H,W,3] -> patches, class token, positions, LN -> pre-norm blocks -> LN of the class token -> U [N,E]
    text [N,S] -> embedding, positions -> causal pre-norm blocks -> LN at the end-of-text token -> V [N,E]
    logits = exp(t) u v^T of the normalised features [N,N]; example i has label i by rows and by columns

The batch mixes: every image is compared with every text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import log
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from autopar.zoo import gpt, vit
from autopar.zoo.layers import nn
from autopar.zoo.model import (
    MIXED,
    SINGLE,
    Batch,
    Model,
    Param,
    Precision,
    Tree,
    block_params,
    ended_text,
    normals,
    repeat_blocks,
    trainable,
    with_layer_axis,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions of the image tower: `layers` of `width` and `heads`, square `image` and `patch` sides in pixels.

    Those of the text tower: `text_layers` of `text_width` and `text_heads`, `vocab`, `seq` tokens (S). Both end in
    `features` (E); the batch is `batch` pairs (N).
    """

    layers: int
    width: int
    heads: int
    patch: int
    text_layers: int
    text_width: int
    text_heads: int
    features: int
    image: int = 224
    vocab: int = 49408
    seq: int = 77
    batch: int = 32768
    precision: Precision = MIXED
    scan: bool = False
    remat: bool = False


SIZES: Mapping[str, Config] = MappingProxyType(
    {
        "toy": Config(2, 32, 8, 4, 2, 32, 8, features=16, image=16, vocab=64, seq=8, batch=8, precision=SINGLE),
        "b32": Config(12, 768, 12, 32, 12, 512, 8, features=512),
        "l14": Config(24, 1024, 16, 14, 12, 768, 12, features=768),
    }
)

TABLE = {"embed": PartitionSpec("model", None)}


def build(name: str, config: Config) -> Model:
    """The model of one `Config`; batch = {"images" [N,H,W,3], "texts" int32[N,S]}, the end of a text its largest id."""
    optimizer = optax.adamw(4e-4, b2=0.98, eps=1e-6, weight_decay=0.2)
    init, step = trainable(_params(config), partial(_loss, config), optimizer, config.precision.params)
    names = frozenset(gpt.BLOCK_TABLE) if config.scan else frozenset[str]()
    table = with_layer_axis({**gpt.BLOCK_TABLE, **TABLE}, names)
    notes = (
        "Dimensions, batch and optimizer: Radford et al. (2021), tables 18 to 20. No key bias, which cancels in the "
        "softmax."
    )
    return Model(name, "clip", step, init, jax.jit(partial(_batch, config)), table, notes)


def _batch(config: Config, key: jax.Array) -> Batch:
    image_key, two = jax.random.split(key)
    (images,) = normals([(config.batch, config.image, config.image, 3)], image_key, config.precision.params)
    end = config.vocab - 1
    return {"images": images, "texts": ended_text(two, config.batch, config.seq, end, (1, end))}


def _params(config: Config) -> Tree:
    width, text_width = config.width, config.text_width
    tokens = (config.image // config.patch) ** 2 + 1
    blocks, scan = gpt.block_spec(width, config.heads), config.scan
    text_blocks = gpt.block_spec(text_width, config.text_heads)
    return {
        "image": {
            "patches": Param((3 * config.patch**2, width), 0.02),
            "class": Param((width,), width**-0.5),
            "positions": Param((tokens, width), width**-0.5),
            "pre_scale": Param((width,), mean=1.0),
            "pre_bias": Param((width,)),
            "blocks": block_params(blocks, config.layers, scan=scan),
            "ln_scale": Param((width,), mean=1.0),
            "ln_bias": Param((width,)),
            "project": Param((width, config.features), width**-0.5),
        },
        "text": {
            **gpt.embedding_spec(config.vocab, config.seq, text_width, tied=True),
            "blocks": block_params(text_blocks, config.text_layers, scan=scan),
            "project": Param((text_width, config.features), text_width**-0.5),
        },
        "temperature": Param((), mean=log(1 / 0.07)),
    }


def _block(params: Tree, x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return gpt.block(params, x, bias, activation=nn.quick_gelu)


def _features(params: Tree, x: jax.Array) -> jax.Array:
    """Normalised features [N,E] of one token's activations x [N,D], in float32 or wider."""
    x = nn.project(nn.layer_norm(x, params["ln_scale"], params["ln_bias"]), params["project"])
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _see(config: Config, params: Tree, images: jax.Array) -> jax.Array:
    """Features [N,E] of images [N,H,W,3]."""
    x = nn.project(vit.patches(images.astype(config.precision.compute), config.patch), params["patches"])
    first = jnp.broadcast_to(params["class"].astype(x.dtype), (x.shape[0], 1, config.width))
    x = nn.add_bias(jnp.concatenate([first, x], axis=1), params["positions"])
    x = nn.layer_norm(x, params["pre_scale"], params["pre_bias"])
    x = repeat_blocks(_block, params["blocks"], x, None, scan=config.scan, remat=config.remat)
    return _features(params, x[:, 0])


def _read(config: Config, params: Tree, texts: jax.Array) -> jax.Array:
    """Features [N,E] of texts int32[N,S], taken where the text ends."""
    dtype = config.precision.compute
    x = gpt.embed(params, texts, dtype)
    mask = nn.causal_bias(config.seq, dtype)
    x = repeat_blocks(_block, params["blocks"], x, mask, scan=config.scan, remat=config.remat)
    return _features(params, x[jnp.arange(x.shape[0]), jnp.argmax(texts, axis=-1)])


def _loss(config: Config, params: Tree, batch: Batch) -> jax.Array:
    images, texts = _see(config, params["image"], batch["images"]), _read(config, params["text"], batch["texts"])
    scale = jnp.minimum(jnp.exp(params["temperature"]), 100.0)
    logits = scale * images @ texts.T
    labels = jnp.arange(logits.shape[0])
    return (nn.cross_entropy(logits, labels) + nn.cross_entropy(logits.T, labels)) / 2
