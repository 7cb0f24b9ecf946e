"""`autopar bench named`: what the search answers beside every plan that a user can name for the same devices.

    one mesh         every mesh of up to two axes, all else at its default; and with as many microbatches as the answer
    pipelines        (p, d, t): p stages of equal FLOPs on submeshes of (d, t), for all p d t = devices; `PER_STAGE`
                     microbatches per stage; recomputed nowhere, and everywhere

Only named plans that fit into memory count. The search is to be slower than none of them by more than its tolerance:

    ratio  =  its predicted step / the shortest named one
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar import api
from autopar.bench import rows as rows_kept
from autopar.bench import worker
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.hardware.meshes import factorisations
from autopar.ir.text import seconds as pretty
from autopar.ir.text import table as grid
from autopar.passes.remat import memory_policy
from autopar.plans import cache as plan_cache
from autopar.plans.plan import Plan
from autopar.zoo import targets

#: Microbatches for each stage of a named pipeline.
PER_STAGE = 4
#: Share of the shortest named step by which an answer may be longer.
PLANNED_GAP = memory_policy.GAP

Row = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """A model of a batch (0: its own), and whole hosts of a preset."""

    model: str
    batch: int
    cluster: str
    hosts: int

    @property
    def name(self) -> str:
        """Such as "gpt-350m of 64 on dgx-h100 x 2"."""
        return f"{self.model}{f' of {self.batch}' if self.batch else ''} on {self.cluster} x {self.hosts}"


PAIRS: tuple[Pair, ...] = (
    Pair("gpt-350m", 64, "dgx-h100", 2),
    Pair("gpt-350m", 64, "tpu-v5e", 4),
    Pair("gpt-350m", 1024, "p3.16xlarge", 1),
    Pair("gpt-760m", 64, "p4d.24xlarge", 2),
    Pair("gpt-1.3b", 256, "p3.16xlarge", 2),
    Pair("gpt-2.6b", 256, "p3.16xlarge", 2),
    Pair("gpt-2.6b", 128, "dgx-h100", 2),
    Pair("gpt-2.6b-scan", 128, "tpu-v5e", 4),
    Pair("llama3-8b", 32, "dgx-h100", 2),
    Pair("moe-380m", 128, "p3.16xlarge", 2),
    Pair("moe-690m", 128, "dgx-h100", 2),
    Pair("moe-1.3b", 128, "p4d.24xlarge", 2),
    Pair("wresnet-250m", 512, "p3.16xlarge", 2),
    Pair("wresnet-500m", 512, "dgx-h100", 2),
    Pair("vit-b16", 1024, "tpu-v5e", 4),
    Pair("vit-l16", 1024, "p3.16xlarge", 2),
    Pair("vit-h14", 512, "dgx-h100", 2),
    Pair("unet-470m", 256, "p4d.24xlarge", 2),
    Pair("unet-470m", 256, "p3.16xlarge", 1),
    Pair("mlp-toy", 0, "dgx-h100", 2),
)


def named(devices: int, microbatches: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What users call the plans for so many devices, and the options that they give.

    `microbatches`: those of the answer.
    """
    for sizes in factorisations(devices):
        for count in dict.fromkeys((1, microbatches)):
            many = {"num_microbatches": count} if count > 1 else {}
            yield f"mesh {_sizes(sizes)}{f' m={count}' if count > 1 else ''}", {"mesh": sizes, **many}
    for stages in (p for p in range(2, devices + 1) if devices % p == 0):
        inner = factorisations(devices // stages) if stages < devices else ((),)
        for sizes in inner:
            for remat in ("none", "full"):
                options = {"mesh": (stages, *sizes), "stages": stages, "num_microbatches": PER_STAGE * stages}
                yield f"{stages} stages of {_sizes(sizes) or 1}, {remat}", {**options, "remat": remat}


def _sizes(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """One pair: its answer first, then the named plans."""
    pair = Pair(**spec)
    fn, args = targets.load(pair.model, batch=pair.batch or None)
    cluster = targets.cluster(pair.cluster, pair.hosts, None)
    begin = time.perf_counter()
    answer = _plan(fn, args, cluster, {})
    elapsed = time.perf_counter() - begin
    options = named(cluster.num_devices, answer.num_microbatches)
    plans = [(name, _named_plan(fn, args, cluster, chosen)) for name, chosen in options]
    fitting = [(plan.step_time_s, name) for name, plan in plans if plan is not None and _fits(plan, cluster)]
    shortest, best = min(fitting, default=(math.inf, "none fits"))
    yield {
        "pair": pair.name,
        "planning_s": elapsed,
        "answer_s": answer.step_time_s,
        "answer": _words(answer),
        "fits": _fits(answer, cluster),
        "named_s": shortest,
        "named": best,
        "ratio": answer.step_time_s / shortest,
        "fitting": len(fitting),
        "refused": sum(plan is None for _, plan in plans),
    }


def _plan(fn: Callable[..., Any], args: Sequence[Any], cluster: Cluster, options: Mapping[str, Any]) -> Plan:
    with warnings.catch_warnings(), plan_cache.use_folder(None):
        warnings.simplefilter("ignore")
        return api.plan(fn, *args, cluster=cluster, progress=False, **options)


def _named_plan(
    fn: Callable[..., Any], args: Sequence[Any], cluster: Cluster, options: Mapping[str, Any]
) -> Plan | None:
    """The plan with these options; None where they are refused, such as a batch that no axis divides."""
    try:
        return _plan(fn, args, cluster, options)
    except AutoparError:
        return None


def _fits(plan: Plan, cluster: Cluster) -> bool:
    mesh = cluster.logical_mesh((cluster.num_devices,))
    return memory_policy.fits(plan.peak_memory_bytes, mesh, None)


def _words(plan: Plan) -> str:
    where = ", ".join(dict.fromkeys(_sizes(tuple(stage.submesh.values())) for stage in plan.stages))
    again = sum(policy != "none" for policy in plan.remat)
    return (
        f"{len(plan.stages)} stage{'s' * (len(plan.stages) > 1)} on {where}, m={plan.num_microbatches}"
        f"{f', recomputed {again}' if again else ''}"
    )


def run(
    pairs: Sequence[Pair] = PAIRS, resume: Path | None = None, tell: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Rows of all pairs, each in a process of its own; those found in the resume file are not run again."""
    rows: list[Row] = rows_kept.read(resume)
    pairs_done = {row["pair"] for row in rows}
    for pair in pairs:
        if pair.name not in pairs_done:
            spec = {"model": pair.model, "batch": pair.batch, "cluster": pair.cluster, "hosts": pair.hosts}
            for row in worker.lines("autopar.bench.references.named", spec):
                rows.append(row)
                rows_kept.keep(resume, row)
                tell(table([row]))
    names = [pair.name for pair in pairs]
    return sorted((row for row in rows if row["pair"] in names), key=lambda row: -row["ratio"])


def holds(row: Row) -> bool:
    """Whether no named plan is shorter than the answer by more than the tolerance."""
    return row["fits"] and row["ratio"] <= 1 + PLANNED_GAP


def table(rows: Sequence[Row]) -> str:
    """The rows for people, worst first."""
    head = ("", "planning", "answer", "shortest named", "ratio", "the answer", "the named plan", "that fit")
    lines = [
        (
            row["pair"],
            f"{row['planning_s']:.1f} s",
            pretty(row["answer_s"]),
            pretty(row["named_s"]) if math.isfinite(row["named_s"]) else "-",
            f"{row['ratio']:.3f}",
            row["answer"],
            row["named"],
            str(row["fitting"]),
        )
        for row in rows
    ]
    return grid("pair", head, lines)


if __name__ == "__main__":
    worker.serve(work)
