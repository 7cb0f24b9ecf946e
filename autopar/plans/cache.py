"""Plans kept on disk: what one process has solved, the next one reads.

    question    program, mesh with all its figures, options, rules, versions       -> question
    file        FOLDER/sha256(question)-sha256(text).json, text: the plan's JSON   -> read, write
    bounds      at most `MOST_FILES` files and `MOST_BYTES` bytes, oldest use first  -> _prune

Only plans are kept whose proof does not hang on the clock (`settled`): what a time limit or a failing solver left
behind may be better next time. A file that is not as it was written, however little of it has changed, does not have
the hash that its name says: it counts as missing and is written again.

The folder is AUTOPAR_CACHE_DIR; else $XDG_CACHE_HOME/autopar; else ~/.cache/autopar. An empty AUTOPAR_CACHE_DIR turns
the cache off, as an empty JAX_COMPILATION_CACHE_DIR does JAX's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

from autopar import __version__, jax_compat
from autopar.errors import AutoparWarning
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.trace import Traced
from autopar.passes.intra_op.plan import Options
from autopar.plans.plan import Plan, from_json, graph_hash
from autopar.plans.schema import parsed

VARIABLE = "AUTOPAR_CACHE_DIR"
MOST_FILES = 256
MOST_BYTES = 512 * 2**20

#: Solver statuses that do not hang on the clock, see `autopar.passes.solver.optimize`; pipelines are "chosen".
PROVEN = ("certified", "optimal", "optimal-tied", "near-optimal", "open", "chosen")
SOLVING = ("fold", "presolve", "bound", "eliminate", "ilp", "memory")
HURRY = ("time_limit", "deadline")  # fields of `Options` that have no say in what is kept
UNHURRIED = 0.9  # share of the time limit below which the limit had no say


def folder() -> Path | None:
    """Where plans are kept; None where that is turned off, or there is no home."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base) / "autopar" if base else Path.home() / ".cache" / "autopar"
    except RuntimeError:
        return None


@contextlib.contextmanager
def kept_in(place: Path | None) -> Iterator[None]:
    """Plans are read from and kept in this folder meanwhile, in this process and in those that it starts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "" if place is None else str(place)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def off() -> contextlib.AbstractContextManager[None]:
    """No plan is read or kept meanwhile."""
    return kept_in(None)


# The question


def question(
    traced: Traced, mesh: LogicalMesh, cluster: str, options: Options, further: Mapping[str, object] | None = None
) -> str:
    """All that a plan follows from, as text that is the same in every process.

    Time limits are not part of it. `further`: what a search for a pipeline, or among meshes, is given besides.
    """
    parts = {
        "autopar": f"{__version__} {_sources()}",
        "jax": jax_compat.versions(),
        "program": graph_hash(traced.graph),
        "lines": _lines(traced.graph),
        "types": repr(sorted(traced.pins.items())),
        "mesh": repr(mesh),
        "cluster": repr(cluster),
        **{f.name: _option(getattr(options, f.name)) for f in fields(options) if f.name not in HURRY},
        **{name: repr(value) for name, value in (further or {}).items()},
    }
    return "\n".join(f"{name}: {text}" for name, text in parts.items())


def _option(value: object) -> str:
    """Text of an option; the order of pins counts, later ones win."""
    return repr(list(value.items())) if isinstance(value, Mapping) else repr(value)


def _lines(graph: Graph) -> str:
    """A hash of the source lines, which a plan shows, and of what the bodies of loops return."""
    digest = hashlib.sha256()
    for op in graph.walk():
        digest.update(f"{op.index} {op.phase} {op.source}\n".encode())
        for region in op.regions:
            atoms = " ".join(map(str, region.outputs))
            digest.update(f"{region.name} {region.inputs} {len(region.ops)} {atoms}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _sources() -> str:
    """A hash of this package's own files: two checkouts of one version need not plan alike."""
    digest = hashlib.sha256()
    for place, folders, names in os.walk(Path(__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(n for n in names if n.endswith((".py", ".toml"))):
            digest.update(name.encode() + Path(place, name).read_bytes())
    return digest.hexdigest()[:16]


# Files


def read(asked: str) -> Plan | None:
    """The plan kept for this question, or None. A plan that is read counts as used now."""
    for place in _files(asked):
        with contextlib.suppress(OSError, ValueError):  # PlanMismatchError is a ValueError
            text = place.read_bytes()
            if place == _file(asked, text):
                found = from_json(parsed(text), str(place))
                with contextlib.suppress(OSError):  # a folder that is only read
                    os.utime(place)
                return found
    return None


def write(asked: str, plan: Plan, time_limit: float) -> None:
    """Keep a plan, if it is settled, instead of any other of this question. A folder that cannot be written warns."""
    text = plan.to_json().encode()
    place = _file(asked, text)
    if place is None or not settled(plan, time_limit):
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _replace(place, text)
        with contextlib.suppress(FileNotFoundError):  # another process deletes as well
            for other in _files(asked):
                if other != place:
                    other.unlink()
            _prune(place.parent)
    except OSError as error:
        warnings.warn(
            f"plans cannot be kept in {place.parent} ({error}). Set {VARIABLE} to a folder that can be written, "
            "or to the empty string to keep none.",
            AutoparWarning,
            stacklevel=2,
        )


def settled(plan: Plan, time_limit: float) -> bool:
    """True if solving again, with more time, would give this plan."""
    spent = sum(plan.phases.get(phase, 0.0) for phase in SOLVING)
    return plan.solver_status in PROVEN and spent < UNHURRIED * time_limit


def _file(asked: str, text: bytes) -> Path | None:
    place = folder()
    return None if place is None else place / f"{_hash(asked.encode())}-{_hash(text)}.json"


def _files(asked: str) -> list[Path]:
    """Files of a question, damaged ones among them."""
    place = folder()
    try:
        return [] if place is None else sorted(place.glob(f"{_hash(asked.encode())}-*.json"))
    except OSError:
        return []


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _replace(place: Path, text: bytes) -> None:
    """The file is there whole or not at all, also for processes that read or write it now."""
    handle, name = tempfile.mkstemp(dir=place.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.replace(name, place)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _prune(place: Path) -> None:
    """Delete the plans that were not used for longest, beyond the bounds."""
    stats = [(path, path.stat()) for path in sorted(place.glob(f"{'?' * 64}*.json"))]
    total = 0
    for position, (path, stat) in enumerate(sorted(stats, key=lambda entry: entry[1].st_mtime, reverse=True)):
        total += stat.st_size
        if position >= MOST_FILES or total > MOST_BYTES:
            path.unlink(missing_ok=True)
