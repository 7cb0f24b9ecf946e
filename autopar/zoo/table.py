"""The table of families and the one function that turns a target's name into a model.

A target is family-size and then any of the suffixes the family knows: "gpt-2.6b-scan-remat". A suffix sets the field of
that name in the family's frozen `Config`; so do the keywords of `build`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import ArgumentError
from autopar.zoo import (
    bert,
    clip,
    ctc,
    gpt,
    llama3,
    mamba,
    mlp,
    moe,
    resnet,
    rnn,
    speech,
    t5,
    unet,
    vit,
    wresnet,
)
from autopar.zoo.libraries import build as libraries
from autopar.zoo.model import Model, Precision


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A family: its named configurations and the function that builds a model from one."""

    sizes: Mapping[str, Any]
    build: Callable[[str, Any], Model]


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "mlp": Family(mlp.SIZES, mlp.build),
        "gpt": Family(gpt.SIZES, gpt.build),
        "llama3": Family(llama3.SIZES, llama3.build),
        "mamba": Family(mamba.SIZES, mamba.build),
        "moe": Family(moe.SIZES, moe.build),
        "wresnet": Family(wresnet.SIZES, wresnet.build),
        "vit": Family(vit.SIZES, vit.build),
        "unet": Family(unet.SIZES, unet.build),
        "bert": Family(bert.SIZES, bert.build),
        "t5": Family(t5.SIZES, t5.build),
        "speech": Family(speech.SIZES, speech.build),
        "clip": Family(clip.SIZES, clip.build),
        "resnet": Family(resnet.SIZES, resnet.build),
        "ctc": Family(ctc.SIZES, ctc.build),
        "rnn": Family(rnn.SIZES, rnn.build),
        "flax-nnx": Family(libraries.SEQUENCE_TOY, libraries.lazily("flax_nnx", "flax")),
        "flax-linen": Family(libraries.TOY, libraries.lazily("flax_linen", "flax")),
        "equinox": Family(libraries.TOY, libraries.lazily("equinox_mlp", "equinox")),
    }
)

SUFFIXES = ("tied", "scan", "remat", "master", "dropless", "megablox", "adafactor", "sgd")

TOYS: tuple[str, ...] = (
    "mlp-toy",
    "gpt-toy",
    "gpt-toy-scan",
    "gpt-toy-remat",
    "gpt-toy-scan-remat",
    "gpt-toy-tied",
    "llama3-toy",
    "llama3-toy-scan",
    "mamba-toy",
    "moe-toy",
    "moe-toy-dropless",
    "wresnet-toy",
    "vit-toy",
    "unet-toy",
    "bert-toy",
    "t5-toy",
    "speech-toy",
    "clip-toy",
    "resnet-toy",
    "ctc-toy",
    "rnn-toy",
    "flax-nnx-toy",
    "flax-linen-toy",
    "equinox-toy",
)


def names() -> tuple[str, ...]:
    """Every family-size that `build` knows, without suffixes, in the order of the tables."""
    return tuple(f"{family}-{size}" for family, entry in FAMILIES.items() for size in entry.sizes)


def build(
    target: str,
    *,
    layers: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    attention: str | None = None,
    selective_scan: str | None = None,
) -> Model:
    """The model named by `target`, with some of its dimensions replaced.

    Args:
        target: family-size, then any of "-tied", "-scan" (scanned over layers), "-remat" (blocks recomputed in the
            backward pass), "-master" (parameters of the computing dtype, with a float32 copy for the optimizer),
            "-dropless" (experts of sorted rows instead of experts with slots), "-megablox" (the same, multiplied by
            JAX's kernel for TPUs), "-adafactor" and "-sgd" (the optimizers that Alpa trained the MoE and the
            Wide-ResNet with).
        layers: number of blocks.
        batch: global batch, in sequences, images or rows.
        seq: tokens per sequence.
        attention: "naive", "dot_product", "cudnn" or "splash" -> `autopar.zoo.layers.attention`.
        selective_scan: "associative" or "pallas" -> `autopar.zoo.layers.selective_scan`.
        dtype: the floating dtype of parameters, optimizer state and computation alike, such as "float64".

    Raises:
        ArgumentError: an unknown target, a suffix or keyword the family has no use for, a dtype that is not floating,
            a size below 1, an attention that does not take the model's sizes, a scan that is not known, or a library
            that is not installed.
    """
    base, suffixes = _split(target)
    family, size = _find(target, base)
    config = FAMILIES[family].sizes[size]
    given = {"layers": layers, "batch": batch, "seq": seq, "attention": attention, "selective_scan": selective_scan}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    changes |= dict.fromkeys(suffixes, True)
    if "scan" in suffixes and size == "toy" and layers is None:
        changes["layers"] = 2 * config.layers  # a scan of two is too short to cut into stages
    if dtype is not None:
        changes["precision"] = _uniform(dtype)
    return _model(family, target, _replace(target, config, changes))


@functools.lru_cache(maxsize=64)
def _model(family: str, target: str, config: Any) -> Model:
    """Equal calls share a model, so that whatever JAX has traced or compiled for it is found again."""
    return FAMILIES[family].build(target, config)


def _split(target: str) -> tuple[str, tuple[str, ...]]:
    """The target without its suffixes, and the suffixes in the order they were written."""
    words = target.split("-")
    count = len(words)
    while count > 1 and words[count - 1] in SUFFIXES:
        count -= 1
    return "-".join(words[:count]), tuple(words[count:])


def _find(target: str, base: str) -> tuple[str, str]:
    for family, entry in FAMILIES.items():
        size = base.removeprefix(f"{family}-")
        if size != base and size in entry.sizes:
            return family, size
    closest = sorted(names(), key=lambda name: (-difflib.SequenceMatcher(None, base, name).ratio(), name))
    raise ArgumentError(
        f"unknown zoo target {target!r}; known, closest first: {', '.join(closest)}; suffixes: "
        + ", ".join(f"-{suffix}" for suffix in SUFFIXES)
    )


def _replace(target: str, config: Any, changes: Mapping[str, Any]) -> Any:
    fields = {field.name for field in dataclasses.fields(config)}
    wrong = [key for key in changes if key not in fields]
    if wrong:
        alternatives = ("layers", "batch", "seq", "precision", "attention", "selective_scan", *SUFFIXES)
        usable = [key for key in alternatives if key in fields]
        raise ArgumentError(f"{target!r} takes no {wrong[0]!r}; it takes: {', '.join(usable)}")
    for key, value in changes.items():
        if isinstance(value, int) and value < 1:
            raise ArgumentError(f"{key}={value} of {target!r} must be at least 1")
    return dataclasses.replace(config, **changes)


def _uniform(dtype: str) -> Precision:
    try:
        name = jnp.dtype(dtype).name
    except TypeError as error:
        raise ArgumentError(f"dtype={dtype!r} is no dtype; use float32, float64, bfloat16 or float16") from error
    if not jnp.issubdtype(name, jnp.floating):
        raise ArgumentError(f"dtype={dtype!r} is not floating; use float32, float64, bfloat16 or float16")
    if name == "float64" and jax.dtypes.canonicalize_dtype(name) != name:
        raise ArgumentError(f"dtype={dtype!r} needs 64-bit mode: set jax_enable_x64 (JAX_ENABLE_X64=1) before building")
    return Precision(name, name)
