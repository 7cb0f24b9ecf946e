"""A cache of plans on disk: a plan that one process has solved is read by the next one.

    key         program, mesh with all its figures, options, rules, versions     -> question
    file        FOLDER/sha256(key)-sha256(text).json, text: the plan's JSON      -> read, write
    bounds      at most `MAX_FILES` files and `MAX_BYTES` bytes, least recently used first out  -> _prune

Only plans that do not depend on time limits are cached (`settled`): where a time limit or a failing solver ended the
search, the next search may find a better plan. A file that was changed in any way does not have the hash that its name
says: it counts as missing and is written again.

The folder is AUTOPAR_CACHE_DIR; else $XDG_CACHE_HOME/autopar; else ~/.cache/autopar. An empty AUTOPAR_CACHE_DIR turns
the cache off, as an empty JAX_COMPILATION_CACHE_DIR does for JAX's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

from autopar import jax_compat
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.text.warning import warn
from autopar.ir.trace import Traced
from autopar.passes.remat.options import Options
from autopar.plans.plan import Plan, from_json
from autopar.plans.validation.schema import parsed
from autopar.version import VERSION

VARIABLE = "AUTOPAR_CACHE_DIR"
# Plans of toys take 40 kB, of the largest pipelines some MB: the number binds for the first, the bytes for the others.
MAX_FILES = 256
MAX_BYTES = 512 * 2**20

#: Solver statuses that do not depend on time limits, see `autopar.passes.solver.optimize`; pipelines are "chosen".
PROVEN = ("certified", "optimal", "optimal-tied", "near-optimal", "open", "chosen")
SOLVING = ("fold", "presolve", "bound", "eliminate", "ilp", "memory")
TIME_LIMITS = ("time_limit", "deadline")  # fields of `Options` that have no say in what is kept
MAX_TIME_SHARE = 0.9  # share of the time limit below which the limit had no say


def folder() -> Path | None:
    """The cache folder; None if the cache is off, or the user has no directory."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base) / "autopar" if base else Path.home() / ".cache" / "autopar"
    except RuntimeError:
        return None


@contextlib.contextmanager
def use_folder(path: Path | None) -> Iterator[None]:
    """A context in which this folder is the cache, in this process and in processes that it starts; None: no cache."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "" if path is None else str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def off() -> contextlib.AbstractContextManager[None]:
    """A context without a cache."""
    return use_folder(None)


# The question


def question(
    traced: Traced, mesh: LogicalMesh, cluster: str, options: Options, further: Mapping[str, object] | None = None
) -> str:
    """All that a plan follows from, as text that is the same in every process.

    Time limits are not part of it. `further`: what a search for a pipeline, or among meshes, is given besides.
    """
    parts = {
        "autopar": f"{VERSION} {_sources()}",
        "jax": jax_compat.versions(),
        "program": graph_hash(traced.graph),
        "lines": _lines(traced.graph),
        "types": repr(sorted(traced.pins.items())),
        "mesh": repr(mesh),
        "cluster": repr(cluster),
        **{f.name: _option(getattr(options, f.name)) for f in fields(options) if f.name not in TIME_LIMITS},
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
    for path, folders, names in os.walk(Path(__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(n for n in names if n.endswith((".py", ".toml"))):
            digest.update(name.encode() + Path(path, name).read_bytes())
    return digest.hexdigest()[:16]


# Files


def read(key: str) -> Plan | None:
    """The plan kept for this question, or None. A plan that is read counts as used now."""
    for path in _files(key):
        with contextlib.suppress(OSError, ValueError):  # PlanMismatchError is a ValueError
            text = path.read_bytes()
            if path == _file(key, text):
                plan = from_json(parsed(text), str(path))
                with contextlib.suppress(OSError):  # a folder that is only read
                    os.utime(path)
                return plan
    return None


def write(key: str, plan: Plan, time_limit: float) -> None:
    """Keep a plan, if it is settled, instead of any other of this question. A folder that cannot be written warns."""
    text = plan.to_json().encode()
    path = _file(key, text)
    if path is None or not settled(plan, time_limit):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
        with contextlib.suppress(FileNotFoundError):  # another process deletes as well
            for other in _files(key):
                if other != path:
                    other.unlink()
            _prune(path.parent)
    except OSError as error:
        warn(
            f"plans cannot be kept in {path.parent} ({error}). Set {VARIABLE} to a folder that can be written, "
            "or to the empty string to keep none."
        )


def settled(plan: Plan, time_limit: float) -> bool:
    """Whether solving again, with more time, would give the same plan."""
    spent = sum(plan.phases.get(phase, 0.0) for phase in SOLVING)
    return plan.solver_status in PROVEN and spent < MAX_TIME_SHARE * time_limit


def _file(key: str, text: bytes) -> Path | None:
    path = folder()
    return None if path is None else path / f"{_hash(key.encode())}-{_hash(text)}.json"


def _files(key: str) -> list[Path]:
    """Files of a question, damaged ones among them."""
    path = folder()
    try:
        return [] if path is None else sorted(path.glob(f"{_hash(key.encode())}-*.json"))
    except OSError:
        return []


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _replace(path: Path, text: bytes) -> None:
    """Writes a file atomically, so that concurrent readers and writers see it whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _prune(directory: Path) -> None:
    """Deletes the least recently used plans beyond the bounds."""
    stats = [(path, path.stat()) for path in sorted(directory.glob(f"{'?' * 64}*.json"))]
    total = 0
    for position, (path, stat) in enumerate(sorted(stats, key=lambda entry: entry[1].st_mtime, reverse=True)):
        total += stat.st_size
        if position >= MAX_FILES or total > MAX_BYTES:
            path.unlink(missing_ok=True)
