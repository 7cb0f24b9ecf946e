"""Restores a checkpoint: every process reads what its devices want, whatever the layout was when it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from autopar.checkpoints import arrays, folder
from autopar.checkpoints.folder import Entry
from autopar.checkpoints.save import names
from autopar.errors import CheckpointError
from autopar.runtime.transport import is_key

SHOWN = 3  # names in an error


def restore(path: str | Path, like: Any) -> Any:
    """The newest whole checkpoint in a folder.

    Args:
        path: the folder.
        like: a pytree of arrays or `ShapeDtypeStruct`s with shardings, of the structure that was saved. A leaf
            without a sharding is restored as a NumPy array, whole in every process.

    Raises:
        CheckpointError: there is no whole checkpoint, it is damaged, or it is of other arrays.
    """
    checkpoint = folder.newest(Path(path))
    entries, wanted = folder.read_manifest(checkpoint), names(like)
    _check_names(checkpoint, entries, wanted)
    paths = folder.array_paths(checkpoint, entries)
    leaves = [_array(paths[name], name, entries[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def saved_names(path: str | Path) -> list[str]:
    """Paths of the leaves of the newest whole checkpoint in a folder. CheckpointError if there is none."""
    return [*folder.read_manifest(folder.newest(Path(path)))]


def _check_names(checkpoint: Path, entries: Mapping[str, Entry], wanted: Mapping[str, Any]) -> None:
    missing, further = [*(wanted.keys() - entries.keys())], [*(entries.keys() - wanted.keys())]
    if missing or further:
        lacks = f"lacks {', '.join(map(repr, sorted(missing)[:SHOWN]))}" if missing else ""
        has = f"has {', '.join(map(repr, sorted(further)[:SHOWN]))} besides" if further else ""
        raise CheckpointError(
            f"'{checkpoint}' is of another tree: it {' and '.join(filter(None, (lacks, has)))} "
            f"({len(missing)} of {len(wanted)} leaves are missing, {len(further)} are not wanted)"
        )


def _array(path: Path, name: str, entry: Entry, leaf: Any) -> Any:
    shape, dtype = np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    rank = len(shape)
    if entry.shape[:rank] != shape or (not entry.key and entry.dtype != str(dtype)) or is_key(leaf) != bool(entry.key):
        have = f"keys {entry.key}" if entry.key else entry.dtype
        raise CheckpointError(f"'{name}' is {have}{list(entry.shape)} in '{path}', and wanted as {dtype}{list(shape)}")
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, Sharding):
        return _typed(arrays.read(path, entry, tuple(slice(0, n) for n in entry.shape)), entry)
    data = jax.make_array_from_callback(
        entry.shape, sharding, lambda index: arrays.read(path, entry, index or ()), dtype=np.dtype(entry.dtype)
    )
    return jax.jit(lambda x: _typed(x, entry), out_shardings=sharding)(data) if entry.key else data


def _typed(data: Any, entry: Entry) -> Any:
    return jax.random.wrap_key_data(data, impl=entry.key) if entry.key else data
