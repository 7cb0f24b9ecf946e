"""What the command line plans: a zoo name, or `file.py:function` whose function() returns (train_step, example_args).

fn, args = load("llama3-8b", batch=64)
fn, args = load("train.py:example")
cluster("dgx-h100", hosts=None, mesh=(32, 8))       as many hosts as the mesh needs
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from autopar import zoo
from autopar.errors import ArgumentError
from autopar.hardware.cluster import Cluster

Loaded = tuple[Callable[..., Any], tuple[Any, ...]]


def load(
    target: str,
    *,
    layers: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    attention: str | None = None,
    selective_scan: str | None = None,
) -> Loaded:
    """(step, arguments); the arguments of a zoo model are ShapeDtypeStructs.

    Raises:
        ArgumentError: an unknown name, a file or function that is not there, fails or returns something else, or sizes
            or a kernel for a file.
    """
    file, colon, name = target.rpartition(":")
    if target.endswith(".py"):
        raise ArgumentError(f"{target}: give a function too, such as {_functions(Path(target))}")
    if not colon:
        model = zoo.build(
            target, layers=layers, batch=batch, seq=seq, attention=attention, selective_scan=selective_scan
        )
        return model.step, model.abstract_args()
    if any(given is not None for given in (layers, batch, seq, attention, selective_scan)):
        raise ArgumentError(f"layers, batch, seq, attention and selective_scan change zoo models only, not {target!r}")
    return _from_file(Path(file), name)


def arrays(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with an array in place of each `ShapeDtypeStruct`: numbers of 1e-2, zeros, or equal keys."""
    return jax.tree.map(_array, args)


def _array(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.full(leaf.shape, 1e-2 if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0, leaf.dtype)


def _functions(path: Path, module: Any = None) -> str:
    """The functions of a file that need no arguments, as text of an error: "train.py:example or train.py:other"."""
    module = module or _module(path)
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and _needs_nothing(value)
    ]
    return " or ".join(f"{path}:{name}" for name in names or ["function"])


def _needs_nothing(function: Callable[..., Any]) -> bool:
    return all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in inspect.signature(function).parameters.values()
    )


def _from_file(path: Path, name: str) -> Loaded:
    module = _module(path)
    function = getattr(module, name, None)
    if not callable(function):
        raise ArgumentError(
            f"{path} has no function {name!r}; give one that it has, such as {_functions(path, module)}"
        )
    loaded = _called(path, f"{name}()", function)
    if not (
        isinstance(loaded, tuple) and len(loaded) == 2 and callable(loaded[0]) and isinstance(loaded[1], tuple | list)
    ):
        raise ArgumentError(f"{name}() of {path} must return (train_step, example_args), got {loaded!r:.100}")
    return loaded[0], tuple(loaded[1])


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        lack = "does not exist" if not path.exists() else "is no Python file"
        raise ArgumentError(f"{path} {lack}; a target is a zoo name or file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as `python file.py` would: the file may import its neighbours
    sys.modules[path.stem] = module
    try:
        _called(path, "importing it", partial(spec.loader.exec_module, module))
    finally:
        sys.path.remove(str(path.parent))
    return module


def _called(path: Path, what: str, run: Callable[[], Any]) -> Any:
    """What a user's file does without arguments; the cause of an ArgumentError is the file's own error."""
    try:
        return run()
    except Exception as error:
        raise ArgumentError(f"{path}: {what} fails: {type(error).__name__}: {error}") from error


def cluster(name: str, hosts: int | None, mesh: Sequence[int] | None) -> Cluster:
    """A preset, or the cluster of a TOML file. Without `hosts`, as many of a preset as the mesh needs, or one.

    Raises:
        ClusterError: an unknown preset, or a file that does not read.
    """
    return Cluster.named(name, hosts, None if mesh is None else math.prod(mesh))
