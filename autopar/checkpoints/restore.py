"""Restores a checkpoint: every process reads what its devices want, whatever the layout was when it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from autopar.checkpoints import arrays, folder, layers
from autopar.checkpoints.folder import Entry
from autopar.checkpoints.layers import Source
from autopar.checkpoints.save import called, names
from autopar.errors import CheckpointError
from autopar.runtime.transport import is_key

SHOWN = 3  # names in an error


def restore(path: str | Path, like: Any) -> Any:
    """The newest whole checkpoint in a folder.

    Args:
        path: the folder.
        like: a pytree of arrays or `ShapeDtypeStruct`s with shardings, of the structure that was saved, but that layers
            may be stacked in one of them (`autopar.checkpoints.layers`). A leaf without a sharding is restored as a
            NumPy array, whole in every process.

    Raises:
        CheckpointError: there is no whole checkpoint, it is damaged, or it is of other arrays. Or leaves of `like` have
            the same path.
    """
    checkpoint = folder.newest(Path(path))
    entries, wanted = folder.read_manifest(checkpoint), names(like)
    sources = layers.sources({name: np.shape(leaf) for name, leaf in wanted.items()}, entries)
    _check_names(checkpoint, entries, wanted, sources)
    paths = folder.array_paths(checkpoint, entries)
    leaves = [_array(_Saved(sources[name], paths, entries), name, leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def saved_names(path: str | Path) -> list[str]:
    """Sorted paths of the leaves of the newest whole checkpoint in a folder. CheckpointError if there is none."""
    return sorted(folder.read_manifest(folder.newest(Path(path))))


def is_saved(path: str | Path, like: Any) -> bool:
    """Whether the newest whole checkpoint in a folder has the leaves of a tree and no others, layers stacked or not.

    Raises:
        CheckpointError: there is no whole checkpoint.
    """
    entries = folder.read_manifest(folder.newest(Path(path)))
    try:
        wanted = {name: np.shape(leaf) for name, leaf in names(like).items()}
    except CheckpointError:  # leaves of the same path, which no checkpoint has
        return False
    sources = layers.sources(wanted, entries)
    return sources.keys() == wanted.keys() and not layers.unread(sources, entries)


def _check_names(
    checkpoint: Path, entries: Mapping[str, Entry], wanted: Mapping[str, Any], sources: Mapping[str, Source]
) -> None:
    missing, further = [*(wanted.keys() - sources.keys())], layers.unread(sources, entries)
    if missing or further:
        lacks = f"lacks {', '.join(map(called, sorted(missing)[:SHOWN]))}" if missing else ""
        has = f"has {', '.join(map(called, sorted(further)[:SHOWN]))} besides" if further else ""
        raise CheckpointError(
            f"'{checkpoint}' is of another tree: it {' and '.join(filter(None, (lacks, has)))} "
            f"({len(missing)} of {len(wanted)} leaves are missing, {len(further)} are not wanted)"
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    """A wanted leaf in a checkpoint.

    Attributes:
        source: the saved leaves that it is read from.
        paths: saved leaf -> path of its array.
        entries: saved leaf -> its shape and dtype.
    """

    source: Source
    paths: Mapping[str, Path]
    entries: Mapping[str, Entry]

    @property
    def path(self) -> Path:
        """Of the first saved leaf."""
        return self.paths[self.source.names[0]]

    @property
    def entry(self) -> Entry:
        """Shape and dtype as the leaf is wanted."""
        entry = self.entries[self.source.names[0]]
        if self.source.row is not None:
            return replace(entry, shape=entry.shape[1:])
        return replace(entry, shape=(len(self.source.names), *entry.shape)) if self.source.is_stack else entry

    def read(self, index: arrays.Index) -> np.ndarray:
        """A box of the wanted leaf. CheckpointError if it is damaged."""
        names, row = self.source.names, self.source.row
        if row is not None:
            return self._read(names[0], (slice(row, row + 1), *index))[0]
        if not self.source.is_stack:
            return self._read(names[0], index)
        rows = range(*index[0].indices(len(names)))
        return np.stack([self._read(names[i], index[1:]) for i in rows])

    def _read(self, name: str, index: arrays.Index) -> np.ndarray:
        return arrays.read(self.paths[name], self.entries[name], index)


def _array(saved: _Saved, name: str, leaf: Any) -> Any:
    entry = saved.entry
    shape, dtype = np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    rank = len(shape)
    if entry.shape[:rank] != shape or (not entry.key and entry.dtype != str(dtype)) or is_key(leaf) != bool(entry.key):
        have = f"keys {entry.key}" if entry.key else entry.dtype
        raise CheckpointError(
            f"{called(name)} is {have}{list(entry.shape)} in '{saved.path}', and wanted as {dtype}{list(shape)}"
        )
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, Sharding):
        return _typed(saved.read(tuple(slice(0, n) for n in entry.shape)), entry)
    data = jax.make_array_from_callback(
        entry.shape, sharding, lambda index: saved.read(index or ()), dtype=np.dtype(entry.dtype)
    )
    return jax.jit(lambda x: _typed(x, entry), out_shardings=sharding)(data) if entry.key else data


def _typed(data: Any, entry: Entry) -> Any:
    return jax.random.wrap_key_data(data, impl=entry.key) if entry.key else data
