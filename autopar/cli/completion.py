"""Completion of a half-written command line in a shell, once `autopar --install-completion` has told it to ask.

Each function takes what is written so far and returns what may follow. Modules that take long to import are imported
when they are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import get_args, get_type_hints


def targets(incomplete: str) -> list[str]:
    """Zoo names and Python files."""
    from autopar.zoo.table import names

    return [*_beginning(names(), incomplete), *_files(incomplete, (".py",))]


def targets_and_plans(incomplete: str) -> list[str]:
    """Zoo names, Python files and saved plans."""
    return [*targets(incomplete), *_files(incomplete, (".json",))]


def clusters(incomplete: str) -> list[str]:
    """Cluster presets and TOML files."""
    from autopar.hardware.cluster import Cluster

    return [*_beginning(Cluster.presets(), incomplete), *_files(incomplete, (".toml",))]


def attentions(incomplete: str) -> list[str]:
    """Names of the attention of a zoo model."""
    from autopar.zoo.layers.attention import NAMES

    return _beginning(NAMES, incomplete)


def selective_scans(incomplete: str) -> list[str]:
    """Names of the selective scan of a zoo model."""
    from autopar.zoo.layers.selective_scan import SCANS

    return _beginning(SCANS, incomplete)


def strategies(incomplete: str) -> list[str]:
    """Strategies, each with the colon before its axis."""
    from autopar.passes.strategies import STRATEGIES

    return _beginning([f"{name}:" for name in STRATEGIES], incomplete)


def values(option: str) -> Callable[[str], list[str]]:
    """A function that gives the words for an option of `autopar.parallelize`."""
    return lambda incomplete: _values(option, incomplete)


def _values(option: str, incomplete: str) -> list[str]:
    from autopar.options import Options

    members = get_args(get_type_hints(Options)[option])  # of a union, literals among them, or of a literal
    words = [word for member in members for word in (get_args(member) or (member,))]
    return _beginning([word for word in words if isinstance(word, str)], incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str, endings: Sequence[str]) -> list[str]:
    """Files with one of these endings, and folders, whose path begins so."""
    before, slash, name = incomplete.rpartition("/")
    folder = Path(f"{before}{slash}" or ".")
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if path.name.startswith(name) and not path.name.startswith(".")]
    shown = [
        f"{before}{slash}{path.name}{'/' if path.is_dir() else ''}"
        for path in paths
        if path.is_dir() or path.suffix in endings
    ]
    return sorted(shown)
