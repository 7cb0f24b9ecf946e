"""Which saved leaves a wanted leaf is read from, where one tree stacks its layers and the other does not.

    the same path is saved             that leaf
    saved stacked, wanted unstacked    "blocks/3/w" of shape s is row 3 of "blocks/w" of shape (L, *s)
    saved unstacked, wanted stacked    "blocks/w" of shape (L, *s) is the stack of "blocks/0/w" to "blocks/(L-1)/w"

So a step that scans over its layers goes on from the state of one that does not, and the other way round. The number of
a layer is a component of the path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.checkpoints.folder import Entry

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """What a wanted leaf is read from.

    Attributes:
        names: the saved leaf; several are stacked, the first as row 0.
        row: of the saved leaf; None: all of it.
        is_stack: the saved leaves, or the one there is, are the rows of the wanted leaf.
    """

    names: tuple[str, ...]
    row: int | None = None
    is_stack: bool = False


def sources(wanted: Mapping[str, Shape], saved: Mapping[str, Entry]) -> Mapping[str, Source]:
    """Wanted leaf -> what it is read from; leaves of which nothing is saved are left out.

    Args:
        wanted: path -> shape.
        saved: path -> what is saved.
    """
    unstacked: dict[tuple[str, int], dict[int, str]] = {}  # (path of a stack, position of the number) -> number -> path
    for name in saved:
        for stacked, position, number in _without_number(name):
            unstacked.setdefault((stacked, position), {})[number] = name
    stacks: dict[str, list[Mapping[int, str]]] = {}
    for (stacked, _), rows in unstacked.items():
        stacks.setdefault(stacked, []).append(rows)
    pairs = ((name, _source(name, shape, saved, stacks)) for name, shape in wanted.items())
    return {name: source for name, source in pairs if source is not None}


def unread(sources: Mapping[str, Source], saved: Mapping[str, Entry]) -> list[str]:
    """The saved leaves of which a part is not wanted."""
    read: dict[str, set[int | None]] = {}
    for source in sources.values():
        for name in source.names:
            read.setdefault(name, set()).add(source.row)
    return [name for name, entry in saved.items() if not _is_whole(read.get(name, set()), entry)]


def _is_whole(rows: set[int | None], entry: Entry) -> bool:
    return None in rows or (bool(rows) and len(rows) == entry.shape[0])


def _source(
    name: str, shape: Shape, saved: Mapping[str, Entry], stacks: Mapping[str, list[Mapping[int, str]]]
) -> Source | None:
    if name in saved:
        return Source((name,))
    for stacked, _, number in _without_number(name):
        entry = saved.get(stacked)
        if entry is not None and not entry.key and entry.shape[1:] == shape and number < (entry.shape or (0,))[0]:
            return Source((stacked,), number)
    for rows in stacks.get(name, ()):
        names = tuple(rows[i] for i in sorted(rows))
        if shape and [*sorted(rows)] == [*range(shape[0])] and all(_is_row(saved[row], shape) for row in names):
            return Source(names, is_stack=True)
    return None


def _is_row(entry: Entry, shape: Shape) -> bool:
    return not entry.key and entry.shape == shape[1:]


def _without_number(name: str) -> Iterator[tuple[str, int, int]]:
    """The path without each of its components that is a number, the position of that, and the number."""
    parts = name.split("/")
    for i, part in enumerate(parts):
        if part.isdecimal():
            yield "/".join([*parts[:i], *parts[i + 1 :]]), i, int(part)
