"""Small models in other people's libraries, to prove that a step written for them needs no change.

The modules `flax_nnx`, `flax_linen` and `equinox_mlp` import their library at the top, as a user's file would; this one
imports them only when such a model is asked for, since Flax and Equinox are optional (`pip install autopar[zoo]`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from autopar.errors import ArgumentError
from autopar.zoo.model import SINGLE, Model, Precision


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions: `layers` blocks of `width`; `classes` outputs (or vocabulary); `batch` rows."""

    layers: int = 2
    width: int = 32
    classes: int = 64
    batch: int = 8
    precision: Precision = SINGLE


@dataclass(frozen=True, slots=True)
class SequenceConfig(Config):
    """A `Config` with `seq` tokens per row."""

    seq: int = 16


TOY: Mapping[str, Config] = MappingProxyType({"toy": Config()})
SEQUENCE_TOY: Mapping[str, Config] = MappingProxyType({"toy": SequenceConfig()})


def lazily(module: str, library: str) -> Callable[[str, Config], Model]:
    """The `build` of `autopar.zoo.libraries.<module>`, imported when called.

    Without `library`, the call raises ArgumentError.
    """
    return partial(_build, module, library)


def _build(module: str, library: str, name: str, config: Config) -> Model:
    try:
        library_module = importlib.import_module(f"autopar.zoo.libraries.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != library:
            raise
        raise ArgumentError(f"{name!r} needs {library}, which is not installed: pip install autopar[zoo]") from error
    return library_module.build(name, config)
