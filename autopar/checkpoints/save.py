"""Saves a pytree: host copies at once, files in a thread.

    all processes     copy the boxes of which they have the first replica to the host
    process 0         creates the folder and the arrays, and says so
    all processes     write their boxes, and say so
    process 0         gives the folder its name, and says so

The caller may donate the arrays to the next step as soon as `save` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.checkpoints import arrays, folder
from autopar.checkpoints.arrays import Index
from autopar.checkpoints.folder import Entry
from autopar.errors import CheckpointError, DonatedError
from autopar.runtime.processes import agree
from autopar.runtime.transport import is_key

OK = b"ok"


@dataclass(frozen=True, eq=False)
class Leaf:
    """One array that is to be saved.

    Attributes:
        entry: its shape and dtype.
        chunk: shape of the box of a device.
        boxes: the boxes that this process writes, on the host.
    """

    entry: Entry
    chunk: tuple[int, ...]
    boxes: Sequence[tuple[Index, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: its folder, once it is whole.
    """

    path: Path
    _thread: threading.Thread
    _errors: list[Exception]

    @staticmethod
    def begun(path: Path, write: Callable[[], None]) -> Saving:
        """A save whose files `write` writes in a thread."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                write()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="autopar checkpoint")
        thread.start()
        return Saving(path, thread, errors)

    def wait(self) -> Path:
        """Wait until the checkpoint is whole, and return its folder. CheckpointError if it could not be written."""
        self._thread.join()
        if self._errors:
            raise CheckpointError(f"'{self.path}' is not written: {self._errors[0]}") from self._errors[0]
        return self.path


def names(tree: Any) -> Mapping[str, Any]:
    """Path of a leaf, such as "params/blocks/0/up" -> the leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def save(path: str | Path, state: Any, plan: str | None = None, keep: int = 1) -> Saving:
    """Begin to save a pytree; all processes call it with the same tree.

    Args:
        path: a folder; the newest whole checkpoint in it counts.
        state: a pytree of arrays and numbers.
        plan: text of the plan, kept beside the arrays.
        keep: how many checkpoints stay in the folder.

    Raises:
        ArgumentError: a value that every process has whole differs between them.
        DonatedError: an array was donated to a step.
    """
    values = names(state)
    for name, value in values.items():
        if isinstance(value, jax.Array) and value.is_deleted():
            raise DonatedError(
                f"'{name}' of shape {value.shape} was donated to an earlier step and its memory reused. Save the state "
                "that the step returned."
            )
    is_global = agree(list(values.values()), list(values)) if jax.process_count() > 1 else (True,) * len(values)
    leaves = {name: _leaf(x, part) for (name, x), part in zip(values.items(), is_global, strict=True)}
    into = Path(path)
    talk = jax_compat.process_store().conversation("checkpoint")
    number = int(talk.from_first("number", lambda: str(max(folder.numbers(into), default=-1) + 1).encode()))
    writing = _Writing(into, number, leaves, plan, keep, talk)
    return Saving.begun(folder.path_of(into, number), writing.run)


def _leaf(value: Any, is_global: bool) -> Leaf:
    """A leaf, its boxes copied to the host; one that every process has whole is written by process 0."""
    key = jax_compat.key_implementation(value.dtype) if is_key(value) else ""
    data = jax.random.key_data(value) if key else value
    if not isinstance(data, jax.Array):
        data = np.asarray(data)
        whole = tuple(slice(0, n) for n in data.shape)
        return Leaf(Entry(data.shape, str(data.dtype), key), data.shape, [(whole, data)] if _is_first() else [])
    mine = [s for s in data.addressable_shards if s.replica_id == 0 and (is_global or _is_first())]
    for shard in mine:
        shard.data.copy_to_host_async()
    boxes = [(shard.index, np.array(shard.data)) for shard in mine]  # copies, since the array may be donated
    return Leaf(Entry(data.shape, str(data.dtype), key), data.sharding.shard_shape(data.shape), boxes)


def _is_first() -> bool:
    return jax.process_index() == 0


@dataclass(frozen=True, eq=False)
class _Writing:
    """What the thread of a save does.

    Attributes:
        into: the folder of checkpoints; `number`: of this one.
        leaves: by name; `plan`, `keep`: see `save`.
        talk: with the other processes.
    """

    into: Path
    number: int
    leaves: Mapping[str, Leaf]
    plan: str | None
    keep: int
    talk: jax_compat.Conversation

    @property
    def path(self) -> Path:
        """The folder while it is written."""
        return self.into / f"{self.number:06}{folder.UNFINISHED}"

    def run(self) -> None:
        """Write the checkpoint; CheckpointError in every process if one of them fails."""
        self._check([self.talk.from_first("begun", self._said(self._begin))])
        said = self.talk.from_all("written", self._said(self._write))
        self._check([self.talk.from_first("whole", self._said(lambda: self._finish(said)))])

    def _said(self, act: Callable[[], None]) -> Callable[[], bytes]:
        """A function that acts and says "ok", or the error."""

        def said() -> bytes:
            try:
                act()
            except CheckpointError as error:  # of another process
                return str(error).encode()
            except Exception as error:
                return f"process {jax.process_index()}: {type(error).__name__}: {error}".encode()
            return OK

        return said

    def _check(self, said: Sequence[bytes]) -> None:
        for answer in said:
            if answer != OK:
                raise CheckpointError(answer.decode())

    @property
    def _entries(self) -> Mapping[str, Entry]:
        return {name: leaf.entry for name, leaf in self.leaves.items()}

    def _begin(self) -> None:
        folder.begin(self.into, self.number)
        for name, path in folder.array_paths(self.path, self._entries).items():
            arrays.create(path, self.leaves[name].entry, self.leaves[name].chunk)

    def _write(self) -> None:
        for name, path in folder.array_paths(self.path, self._entries).items():
            if self.leaves[name].boxes:
                arrays.write(path, self.leaves[name].entry, self.leaves[name].boxes)

    def _finish(self, said: Sequence[bytes]) -> None:
        self._check(said)
        if self.plan is not None:
            (self.path / folder.PLAN).write_text(self.plan)
        folder.write_manifest(self.path, self._entries)
        folder.finish(self.into, self.number, self.keep)
