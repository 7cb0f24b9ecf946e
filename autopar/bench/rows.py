"""Rows of a benchmark that takes long, kept as JSON lines: what a file has is not run again.

And the words that a benchmark is asked with, checked where they are given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError


def read(resume: Path | None) -> list[dict[str, Any]]:
    """The rows of a file; none if there is no file. ArgumentError if it cannot be read."""
    if resume is None or not resume.exists():
        return []
    try:
        return [json.loads(text) for text in resume.read_text().splitlines() if text.strip()]
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--resume {str(resume)!r} has no rows of a benchmark: {error}") from error


def keep(resume: Path | None, row: Mapping[str, Any]) -> None:
    """Append a row, where rows are kept. ArgumentError if it cannot be written."""
    if resume is None:
        return
    try:
        with resume.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise ArgumentError(f"--resume {str(resume)!r} cannot be written: {error}") from error


def check_words(what: str, names: Sequence[str], available: Sequence[str]) -> None:
    """ArgumentError for the first word that is not known, with those that are."""
    for name in names:
        if name not in available:
            raise ArgumentError(f"{what} {name!r} is not known. Available: {', '.join(available)}")


def beside_the_expert(row: Mapping[str, Any]) -> str:
    """What the parameters of a row differ by, and those of the step written by hand, where that was run."""
    expert = f" (by hand {row['by_hand']:.1e})" if row["by_hand_devices"] else ""
    return f"params {row['params']:.1e}{expert}"


def differences(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many rows hold, and the largest differences from the single-device run."""
    return {
        "rows": len(rows),
        "ok": sum(bool(r["ok"]) for r in rows),
        "loss_float32": max((r["loss"] for r in rows if r["dtype"] == "float32"), default=0.0),
        "leaf_float64": max((r["leaf"] for r in rows if r["dtype"] == "float64"), default=0.0),
    }
