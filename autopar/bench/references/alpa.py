"""`autopar bench alpa`: pipelines that are found against those that Alpa published, under one model of cost and memory.

Alpa's searched plans for p3.16xlarge hosts (Zheng et al., 2022; artefact of the paper, benchmark/alpa/suite_auto_*.py):
for each model the number of microbatches, groups of equal FLOPs per stage, and the submesh of each stage, everything
recomputed. A group is a run of blocks; embedding and stem go with the first, the head with the last. Such a plan is a
division like any other, priced by the tables of the search, its stages planned as well as the submesh allows: where
Alpa pinned the batch to one mesh axis, ours may do better, which only helps its plan.

    seconds     simulated, by the schedule 1f1b
    fits        its memory by our model; they ran, so one that does not fit is a fault of the model
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.bench import rows as rows_kept
from autopar.bench import worker
from autopar.cost_models.flops import work as flops_of
from autopar.hardware.cluster import Cluster
from autopar.ir.text import table as grid
from autopar.ir.trace import trace
from autopar.passes.inter_op.dynamic_program import Division, Part, Placement, Question
from autopar.passes.inter_op.search import InterOpSearch, SearchSpace, microbatch_counts, splittable_counts
from autopar.passes.inter_op.simulate import FoundPipeline
from autopar.passes.layers.find import Layers
from autopar.passes.mesh_search.planner import collector_paused
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.remat.options import Options
from autopar.passes.remat.rewrite import FULL
from autopar.zoo import targets

CLUSTER = "p3.16xlarge"
#: Family -> the suffix of the optimizer that it was trained with (benchmark/alpa/benchmark_3d_one_case_*.py): with Adam
#: the state of the largest MoE alone is more than all its devices hold.
OPTIMIZERS: Mapping[str, str] = {"gpt": "", "moe": "-adafactor", "wresnet": "-sgd"}


@dataclass(frozen=True)
class Published:
    """One plan: groups of layers per stage, devices per stage."""

    batch: int
    microbatches: int
    groups: tuple[int, ...]
    devices: tuple[int, ...]


PUBLISHED: Mapping[str, Published] = {
    "gpt-350m": Published(1024, 512, (1,), (1,)),
    "gpt-760m": Published(1024, 128, (3, 3), (1, 1)),
    "gpt-1.3b": Published(1024, 128, (3, 3), (2, 2)),
    "gpt-2.6b": Published(1024, 128, (2, 2, 4), (2, 2, 4)),
    "gpt-6.7b": Published(1024, 64, (4, 4), (8, 8)),
    "gpt-15b": Published(1024, 128, (4,) * 4, (8,) * 4),
    "gpt-39b": Published(1024, 1024, (1,) * 16, (4,) * 16),
    "moe-380m": Published(1024, 512, (1,), (1,)),
    "moe-690m": Published(1024, 32, (8,), (2,)),
    "moe-1.3b": Published(1024, 32, (4, 4), (2, 2)),
    "moe-2.4b": Published(1024, 32, (4, 4), (4, 4)),
    "moe-10b": Published(1024, 16, (4, 4), (8, 8)),
    "moe-27b": Published(1024, 128, (1,) * 8, (4,) * 8),
    "moe-70b": Published(1024, 64, (1,) * 8, (8,) * 8),
    "wresnet-250m": Published(1536, 24, (16,), (1,)),
    "wresnet-500m": Published(1536, 24, (16,), (2,)),
    "wresnet-1b": Published(1536, 24, (16,), (4,)),
    "wresnet-2b": Published(1536, 24, (8, 8), (4, 4)),
    "wresnet-4b": Published(1536, 32, (5, 4, 7), (4, 4, 8)),
    "wresnet-6.8b": Published(1536, 32, (5, 4, 4, 3), (8,) * 4),
    "wresnet-13b": Published(1520, 38, (4, 4, 4, 4, 4, 4, 5, 4), (8,) * 8),
}
"""Model -> plan; figures of the artefact."""

Row = dict[str, Any]


def hosts(published: Published) -> Cluster:
    """The devices of a plan: some of one host, or whole hosts."""
    count = sum(published.devices)
    return Cluster.preset(CLUSTER, hosts=max(1, count // 8)).part(0, count)


def borders(layers: Layers, groups: Sequence[int]) -> tuple[int, ...]:
    """The last layer of every stage: groups of equal FLOPs, as near as whole layers come to them."""
    amounts = [sum(flops_of(layers.graph, op) for op in layers.ops(i)) for i in range(len(layers.layers))]
    done = np.cumsum(amounts) / sum(amounts)
    wanted = [g / sum(groups) for g in itertools.accumulate(groups)]
    last_layers = [int(np.abs(done - share).argmin()) + 1 for share in wanted[:-1]]
    return (*last_layers, len(amounts))


def priced(
    searcher: InterOpSearch, question: Question, choice: SearchSpace, published: Published
) -> tuple[Division, bool]:
    """The published plan as a division, each stage in its fastest option that fits; False: some stage fits in none."""
    devices = itertools.pairwise((0, *itertools.accumulate(published.devices)))
    layers = itertools.pairwise((0, *borders(searcher.layers, published.groups)))
    parts, fits = list[Part](), True
    for s, ((start, stop), (first, last)) in enumerate(zip(devices, layers, strict=True)):
        submesh = next(p.submesh for p in question.placements if (p.start, p.stop) == (start, stop))
        prices, flight = question.prices[submesh], question.in_flight(len(published.devices) - s)
        seconds = prices.times(question.microbatches)[:, first, last]
        most = prices.peaks(flight)[:, first, last]
        fit = most <= question.memory[submesh]
        fits = fits and bool(fit.any())
        option = int(np.where(fit, seconds, np.inf).argmin()) if fit.any() else int(most.argmin())
        parts.append(Part(first, last, Placement(start, stop, submesh), option))
    return Division(tuple(parts), 0.0, 0.0), fits


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """One model."""
    name = spec["model"]
    published = PUBLISHED[name]
    fn, args = targets.load(name + OPTIMIZERS[name.partition("-")[0]], batch=published.batch)
    per = ("*",) if name.startswith("wresnet") else ()
    with collector_paused():
        traced = trace(fn, *args)
        batch = batch_leaves(traced.graph, 1)
        searcher = InterOpSearch(traced.graph, traced.in_avals, hosts(published), batch, Options(), per)
        counts = splittable_counts(traced.graph, microbatch_counts(published.batch), batch, per)
        ours = searcher.best(SearchSpace(batch, counts, per_microbatch=per))
        theirs = SearchSpace(
            batch, (published.microbatches,), policies=(FULL,), schedules=("1f1b",), per_microbatch=per
        )
        question = replace(
            searcher.question(published.microbatches, theirs, "1f1b"), memory=searcher.capacity(theirs)
        )  # they ran
        division, fits = priced(searcher, question, theirs, published)
        unlimited = replace(question, memory=(np.inf,) * len(question.memory))
        alpa = searcher.simulated(division, unlimited, theirs)
        assert alpa is not None
    yield {
        "model": name,
        "devices": sum(published.devices),
        "autopar_s": None if ours is None else ours.seconds,
        "alpa_s": alpa.seconds,
        "ratio": None if ours is None else ours.seconds / alpa.seconds,
        "alpa_fits": fits,
        "alpa_peak_bytes": max(alpa.peaks),
        "autopar": None if ours is None else describe(ours),
        "alpa": describe(alpa),
    }


def describe(pipeline: FoundPipeline) -> str:
    """A pipeline in a line: microbatches, schedule, layers and submesh of every stage."""
    stages = [f"{s.last - s.first}@{'x'.join(map(str, s.shape))}" for s in pipeline.stages]
    runs = [(len(list(same)), key) for key, same in itertools.groupby(stages)]
    listed = " ".join(key if count == 1 else f"{count}*{key}" for count, key in runs)
    again = sum(policy == FULL for policy in pipeline.remat)
    return f"m={pipeline.microbatches} {pipeline.schedule} {listed}; recomputed {again}"


def run(
    models: Sequence[str] = tuple(PUBLISHED),
    resume: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Rows of all models, each in a process of its own; those found in the resume file are not run again."""
    rows: list[Row] = rows_kept.read(resume)
    models_done = {row["model"] for row in rows}
    for model in models:
        if model not in models_done:
            for row in worker.lines("autopar.bench.references.alpa", {"model": model}):
                rows.append(row)
                rows_kept.keep(resume, row)
                tell(table([row]))
    return [row for row in rows if row["model"] in models]


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    head = ("", "devices", "autopar", "Alpa's", "ratio", "its peak", "autopar's plan", "Alpa's plan")
    lines = [
        (
            row["model"],
            str(row["devices"]),
            "-" if row["autopar_s"] is None else f"{row['autopar_s']:.2f} s",
            f"{row['alpa_s']:.2f} s",
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{row['alpa_peak_bytes'] / 2**30:.1f} GiB{'' if row['alpa_fits'] else ' (does not fit)'}",
            row["autopar"] or "-",
            row["alpa"],
        )
        for row in rows
    ]
    return grid("model", head, lines)


if __name__ == "__main__":
    worker.serve(work)
