"""A folder of checkpoints, of which the newest whole one counts.

    FOLDER/000003/manifest.json     names, shapes and dtypes of the arrays
    FOLDER/000003/plan.json         the plan, if one was given
    FOLDER/000003/arrays/00000/     zarr arrays, in the order of the manifest
    FOLDER/000004.tmp/              being written, or left behind by a writer that was killed

A checkpoint is written under a temporary name and renamed when all processes are done; renaming a folder is atomic. So
a folder without the suffix is whole. The one before is deleted only then.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.errors import CheckpointError

UNFINISHED = ".tmp"
MANIFEST, PLAN, ARRAYS = "manifest.json", "plan.json", "arrays"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of a checkpoint.

    Attributes:
        shape: of the whole array.
        dtype: name of its dtype; of the data, for random keys.
        key: implementation of random keys; "" for another array.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str = ""


def numbers(folder: Path) -> list[int]:
    """The numbers of the whole checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and (path / MANIFEST).exists())


def path_of(folder: Path, number: int) -> Path:
    """The path of a whole checkpoint."""
    return folder / f"{number:06}"


def newest(folder: Path) -> Path:
    """The newest whole checkpoint. CheckpointError if there is none."""
    whole = numbers(folder)
    if whole:
        return path_of(folder, whole[-1])
    left = [path.name for path in folder.iterdir() if path.name.endswith(UNFINISHED)] if folder.is_dir() else []
    there = f"only what an unfinished save has left: {', '.join(sorted(left))}" if left else "none"
    raise CheckpointError(f"'{folder}' has no whole checkpoint; there is {there}")


def begin(folder: Path, number: int) -> Path:
    """An empty folder for a checkpoint that is to be written; what unfinished ones have left is deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.endswith(UNFINISHED):
            shutil.rmtree(path)
    unfinished = folder / f"{number:06}{UNFINISHED}"
    (unfinished / ARRAYS).mkdir(parents=True)
    return unfinished


def finish(folder: Path, number: int, keep: int) -> None:
    """Give a checkpoint its name, and delete all but the newest `keep`."""
    unfinished = folder / f"{number:06}{UNFINISHED}"
    os.replace(unfinished, path_of(folder, number))
    for old in numbers(folder)[:-keep]:
        shutil.rmtree(path_of(folder, old))


def array_paths(checkpoint: Path, entries: Mapping[str, Entry]) -> Mapping[str, Path]:
    """Name -> the folder of its array."""
    return {name: checkpoint / ARRAYS / f"{i:05}" for i, name in enumerate(entries)}


def write_manifest(checkpoint: Path, entries: Mapping[str, Entry]) -> None:
    """Write names, shapes and dtypes."""
    manifest = {"format": FORMAT, "arrays": {name: asdict(entry) for name, entry in entries.items()}}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=1))


def read_manifest(checkpoint: Path) -> Mapping[str, Entry]:
    """Names, shapes and dtypes. CheckpointError if the file is damaged."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"'{path}' is of format {manifest['format']}, this version reads format {FORMAT}")
        return {name: Entry(tuple(e["shape"]), e["dtype"], e["key"]) for name, e in manifest["arrays"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"'{path}' is no manifest of a checkpoint: {error!r:.200}") from error
