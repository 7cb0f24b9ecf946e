"""`autopar bench sizes`: seconds that planning takes for models of published sizes on clusters of several hosts.

Everything is as a user has it who gives a cluster and nothing else, each plan in a fresh process (`bench plan`).

    limit    `SEARCHED` s; `ONE_MESH` s where the answer is a plan on one mesh
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar import zoo
from autopar.bench import plan
from autopar.bench import rows as rows_kept
from autopar.bench.references import alpa
from autopar.ir.text import seconds as pretty
from autopar.ir.text import table as grid

SEARCHED, ONE_MESH = 20.0, 10.0

#: Cluster -> hosts.
CLUSTERS: Mapping[str, int] = MappingProxyType({"p3.16xlarge": 8, "tpu-v5e": 4})

#: Families that Alpa measured, in its sizes and with its optimizers.
ALPA = ("gpt", "moe", "wresnet", "unet")

MODELS: tuple[str, ...] = (
    *("bert-large", "t5-large", "speech-large", "clip-l14", "resnet-101", "ctc-large"),
    *(
        name + alpa.OPTIMIZERS.get(name.partition("-")[0], "")
        for name in zoo.names()
        if name.partition("-")[0] in ALPA and not name.endswith("-toy")
    ),
)

Row = dict[str, Any]


def run(
    models: Sequence[str] = MODELS,
    clusters: Sequence[str] = tuple(CLUSTERS),
    resume: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """A row for each model on each cluster, the slowest first; those found in the resume file are not run again."""
    rows: list[Row] = rows_kept.read(resume)
    cases_done = {(row["model"], row["on"]) for row in rows}
    for model in models:
        for cluster in clusters:
            if (model, cluster) not in cases_done:
                measurement = plan.run({"model": model, "cluster": cluster, "hosts": CLUSTERS[cluster]}, 1)
                row = {**measurement, "on": cluster, "hosts": CLUSTERS[cluster]}
                rows.append(row)
                rows_kept.keep(resume, row)
                tell(table([row]))
    wanted = [row for row in rows if row["model"] in models and row["on"] in clusters]
    return sorted(wanted, key=lambda row: -row["total_s"])


def limit(row: Row) -> float:
    """Seconds that planning may take."""
    return SEARCHED if row["stages"] > 1 else ONE_MESH


def holds(row: Row) -> bool:
    """Whether planning took no longer than it may."""
    return row["total_s"] <= limit(row)


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    head = ("", "cluster", "planning", "limit", "step", "stages", "microbatches", "peak", "where")
    return grid("model", head, list(map(_cells, rows)))


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["model"],
        f"{row['on']} x {row['hosts']}",
        f"{row['total_s']:.1f} s",
        f"{limit(row):.0f} s",
        pretty(row["step_time_s"]),
        str(row["stages"]),
        str(row["num_microbatches"]),
        f"{row['peak_memory_bytes'] / 1e9:.1f} GB",
        ", ".join(f"{p} {s:.1f}" for p, s in row["phases"].items() if s >= 0.5),
    )
