"""One array on disk: a zarr array whose chunks are the boxes of devices, each with a checksum.

Elements are stored as bytes along a trailing dimension, so that every dtype is kept as it is, bfloat16, float8 and int4
included. TensorStore reads and writes; several processes write different chunks of one array at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.checkpoints.folder import Entry
from autopar.errors import CheckpointError

#: A box: a slice for every dimension.
Index = tuple[slice, ...]


def create(path: Path, entry: Entry, chunk: Sequence[int]) -> None:
    """Create an array without elements on disk.

    Args:
        path: its folder.
        entry: its shape and dtype.
        chunk: shape of a box; every extent divides that of the array.
    """
    width = width_of(entry)
    codecs = [{"name": "bytes"}, {"name": "crc32c"}]
    metadata = {
        "shape": [*entry.shape, width],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*(max(1, n) for n in chunk), width]}},
        "codecs": codecs,
    }
    _open({**_spec(path), "metadata": metadata, "create": True, "open": True})


def write(path: Path, entry: Entry, boxes: Sequence[tuple[Index, np.ndarray]]) -> None:
    """Write boxes of an array that exists on disk."""
    store = _open({**_spec(path), "open": True})
    writes = [store[index].write(as_bytes(values, entry)) for index, values in boxes if values.size]
    for pending in writes:
        pending.result()


def read(path: Path, entry: Entry, index: Index) -> np.ndarray:
    """A box of an array. CheckpointError if it is damaged."""
    shape = tuple(len(range(*part.indices(n))) for part, n in zip(index, entry.shape, strict=True))
    if not all(shape):
        return np.zeros(shape, entry.dtype)
    try:
        store = _open({**_spec(path), "open": True})
        raw = np.ascontiguousarray(store[index].read().result())
    except ValueError as error:
        raise CheckpointError(f"'{path}' is damaged: {str(error)[:300]}") from error
    return raw.view(np.dtype(entry.dtype)).reshape(shape)


def width_of(entry: Entry) -> int:
    """Bytes of an element on the host."""
    return np.dtype(entry.dtype).itemsize


def as_bytes(values: np.ndarray, entry: Entry) -> np.ndarray:
    """The elements as bytes along a trailing dimension."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, width_of(entry))


def _spec(path: Path) -> Mapping[str, Any]:
    # zeros are written like all else, so that a chunk that is missing is an error
    complete = {"store_data_equal_to_fill_value": True, "fill_missing_data_reads": False}
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path.absolute())}, **complete}


def _open(spec: Mapping[str, Any]) -> Any:
    return _tensorstore().open(spec).result()


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise CheckpointError("checkpoints need TensorStore: pip install 'autopar[checkpoint]'") from error
    return tensorstore
