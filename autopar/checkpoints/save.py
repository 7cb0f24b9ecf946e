"""Saves a pytree: host copies at once, files in a thread.

    all processes     copy the boxes of which they have the first replica to the host
    process 0         creates the folder and the arrays, and says so
    all processes     write their boxes, and say so
    process 0         gives the folder its name, and says so

The caller may donate the arrays to the next step as soon as `save` returns.

Saves of one process into one folder are written one after the other. Their threads are looked up among those of the
interpreter, and are waited for in the thread that calls `save`. So one save at a time has copies on the host.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
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
#: Locked while a save starts, not while it is written: a folder has one writer, whichever threads save into it.
#: A handler of a signal that arrives meanwhile may save as well.
START_LOCK = threading.RLock()


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


class _Writer(threading.Thread):
    """The thread that writes a checkpoint.

    Attributes:
        into: the folder of checkpoints, resolved.
    """

    def __init__(self, into: Path, write: Callable[[], None]) -> None:
        super().__init__(target=write, name="autopar checkpoint")
        self.into = into

    def writes(self, into: Path) -> bool:
        """Whether it has started, has not ended, and is for this folder; only such a thread can be joined."""
        return self.into == into and self.is_alive()


@dataclass(frozen=True, eq=False)
class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: its folder, once it is whole.
    """

    path: Path
    _thread: _Writer
    _errors: list[Exception]

    @staticmethod
    def begun(path: Path, into: Path, write: Callable[[], None]) -> Saving:
        """A save whose files `write` writes in a thread; `into`: the folder of checkpoints, resolved."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                write()
            except Exception as error:
                errors.append(error)

        thread = _Writer(into, run)
        thread.start()
        return Saving(path, thread, errors)

    def wait(self) -> Path:
        """Wait until the checkpoint is whole, and return its folder. CheckpointError if it could not be written."""
        self._thread.join()
        if self._errors:
            raise CheckpointError(f"'{self.path}' is not written: {self._errors[0]}") from self._errors[0]
        return self.path


def names(tree: Any) -> Mapping[str, Any]:
    """Path of a leaf, such as "params/blocks/0/up" -> the leaf. CheckpointError if leaves have the same path."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in flat]
    for name, count in Counter(name for name, _ in leaves).items():
        if count > 1:
            raise CheckpointError(
                f"{count} leaves of the tree have the path '{name}', and a checkpoint has one array for a path. Rename "
                "keys of the tree, such as those that contain '/'"
            )
    return dict(leaves)


def called(name: str) -> str:
    """The path of a leaf in errors; a tree that is one array has none."""
    return f"'{name}'" if name else "the bare array"


def save(path: str | Path, state: Any, plan: str | None = None, keep: int = 1) -> Saving:
    """Begin to save a pytree; all processes call it with the same tree.

    Waits for an unfinished save of this process into the same folder. An error of that save is left to its own `wait`.

    Args:
        path: a folder; the newest whole checkpoint in it counts.
        state: a pytree of arrays and numbers.
        plan: text of the plan, kept beside the arrays.
        keep: how many checkpoints stay in the folder.

    Raises:
        ArgumentError: a value that every process has whole differs between them.
        CheckpointError: leaves have the same path.
        DonatedError: an array was donated to a step.
    """
    values = names(state)
    for name, value in values.items():
        if isinstance(value, jax.Array) and value.is_deleted():
            raise DonatedError(
                f"{called(name)} of shape {value.shape} was donated to an earlier step and its memory reused. Save the "
                "state that the step returned."
            )
    is_global = agree(list(values.values()), list(values)) if jax.process_count() > 1 else (True,) * len(values)
    into = Path(os.path.realpath(path))  # also if the working directory changes before all is written
    _wait_for_earlier(into)  # whose copies leave the host before new ones are made
    leaves = {name: _leaf(x, part) for (name, x), part in zip(values.items(), is_global, strict=True)}
    with START_LOCK:
        _wait_for_earlier(into)  # also for saves that other threads have started meanwhile
        talk = jax_compat.process_store().conversation("checkpoint")
        number = int(talk.from_first("number", lambda: str(max(folder.numbers(into), default=-1) + 1).encode()))
        writing = _Writing(into, number, leaves, plan, keep, talk)
        return Saving.begun(folder.path_of(Path(path), number), into, writing.run)


def _wait_for_earlier(into: Path) -> None:
    """Wait until no thread of this process writes into a resolved folder.

    Threads that write wait for those of other processes alone, so that all processes may be here.
    """
    while earlier := [t for t in threading.enumerate() if isinstance(t, _Writer) and t.writes(into)]:
        for thread in earlier:
            thread.join()


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
        into: the folder of checkpoints, resolved; `number`: of this one.
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
