"""A digest of every plan of a set, to see that a refactoring changes none.

`python -m tests.support.digests > before` in one commit and `... > after` in another; equal files are equal plans, to
the bit of their JSON, but for what planning took and the version. Arguments are the name of a set, and parts of the
titles that are wanted, such as `equal zb-h1`:

    toys     six toys under several settings (about a minute); the default
    equal    the models, meshes, dtypes and schedules of `autopar bench equal`, on one mesh and in stages: of all their
             combinations as few as have every pair of two choices
    plan     the sizes of `autopar bench plan` in docs/benchmarks/planning/one-mesh.md
    alpa     the searches of `autopar bench alpa`
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import jax

import autopar
from autopar import zoo
from autopar.bench.equal import pipeline, pipeline_case, run
from autopar.bench.equal.case import dear
from autopar.bench.references import alpa
from autopar.hardware.cluster import Cluster
from autopar.plans import cache
from autopar.plans.plan import Plan

_Case = TypeVar("_Case", bound=tuple[Hashable, ...])

Planning = Callable[[], Plan]

TOYS = ("mlp-toy", "gpt-toy-scan", "moe-toy", "wresnet-toy", "t5-toy", "unet-toy")
#: Title -> options of `autopar.plan`. A memory budget is a share of the peak without one.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "8": {"mesh": (8,), "cluster": dear((8,))},
    "2x4": {"mesh": (2, 4), "cluster": dear((2, 4))},
    "2x4 on V100": {"mesh": (2, 4)},
    "memory budget": {"mesh": (8,), "memory_budget": 0.75},
    "two stages": {"mesh": (8,), "cluster": dear((8,)), "stages": 2, "num_microbatches": 4},
    "two microbatches": {"mesh": (4,), "cluster": dear((4,)), "num_microbatches": 2},
    "search": {"stages": "search"},
}
LLAMA = "llama3-8b"
#: Mesh -> memory budgets in bytes, at 90%, 50% and 10% of the way from the least peak to that without a budget.
BUDGETS: Mapping[tuple[int, ...], tuple[int, ...]] = {
    (32, 8): (129_180_000_000, 124_703_646_832, 120_220_000_000),
    (8, 8, 4): (127_920_000_000, 124_000_000_000, 120_080_000_000),
}
#: (model, sizes, options): rows of the page without a memory budget.
AS_WRITTEN: Mapping[str, Any] = {"remat": "none"}
SIZES: Sequence[tuple[str, Mapping[str, int], Mapping[str, Any]]] = (
    *((LLAMA, {"layers": n}, {"mesh": (32, 8), **AS_WRITTEN}) for n in (32, 4, 96)),
    (LLAMA, {}, {"mesh": (8, 8, 4), **AS_WRITTEN}),
    (f"{LLAMA}-scan", {}, {"mesh": (32, 8), **AS_WRITTEN}),
    *((LLAMA, {"layers": n}, {"mesh": (32, 8)}) for n in (32, 96)),
    (LLAMA, {}, {"mesh": (8, 8, 4)}),
    ("gpt-2.6b", {"batch": 256}, {"mesh": (8, 8), "cluster": Cluster.preset("p3.16xlarge", hosts=8)}),
    ("vit-h14", {}, {"mesh": (8,)}),
    ("wresnet-1b", {"batch": 512}, {"mesh": (8,), "cluster": Cluster.preset("p3.16xlarge")}),
    ("unet-1b", {}, {"mesh": (8,)}),
)
TIME_LIMIT = 120.0  # seconds: no plan may depend on the speed of the machine


def planned(model: zoo.Model, **options: Any) -> Plan:
    """A plan that ends by its bounds, not by the clock."""
    again = partial(autopar.plan, model.step, *model.abstract_args(), time_limit=TIME_LIMIT, progress=False)
    if isinstance(share := options.get("memory_budget"), float):
        free = again(**{**options, "memory_budget": None})
        options["memory_budget"] = int(share * free.peak_memory_bytes)
    return again(**options)


def toys() -> Iterator[tuple[str, Planning]]:
    for name in TOYS:
        for title, setting in SETTINGS.items():
            options = {"cluster": Cluster.preset("p3.16xlarge"), **setting}
            yield f"{name}, {title}", partial(_sized, name, {}, options)


def equal() -> Iterator[tuple[str, Planning]]:
    for model, mesh, dtype, _ in cover(run.Product().keys()):
        yield (
            f"{model}, {mesh}, {dtype}",
            partial(_sized, model, {"dtype": dtype}, {"mesh": mesh, "cluster": dear(mesh)}),
        )
    for case in cover(pipeline.Product().keys()):
        yield ", ".join(map(str, case)), partial(_staged, *case)


def plan() -> Iterator[tuple[str, Planning]]:
    for name, sizes, options in SIZES:
        title = {key: value.name if key == "cluster" else value for key, value in options.items()}
        yield f"{name}, {dict(sizes)}, {title}", partial(_sized, name, sizes, options)
    for mesh, budgets in BUDGETS.items():
        for budget in budgets:
            options = {"mesh": mesh, "memory_budget": budget, "offload": "none"}
            yield f"{LLAMA}, {options}", partial(_sized, LLAMA, {}, options)


def searches() -> Iterator[tuple[str, Planning]]:
    for name, published in alpa.PUBLISHED.items():
        family = name.partition("-")[0]
        options = {"cluster": alpa.hosts(published), "stages": "search"}
        if family == "wresnet":
            options["per_microbatch"] = "*"
        yield name, partial(_sized, name + alpa.OPTIMIZERS[family], {"batch": published.batch}, options)


def _sized(name: str, sizes: Mapping[str, Any], options: Mapping[str, Any]) -> Plan:
    with jax.enable_x64(sizes.get("dtype") == "float64"):
        return planned(zoo.build(name, **sizes), **options)


def _staged(name: str, schedule: str, stages: int, inner: str, dtype: str) -> Plan:
    with jax.enable_x64(dtype == "float64"):
        model = zoo.build(name, dtype=dtype, batch=pipeline_case.BATCH)
        return planned(model, **pipeline_case.options(model, schedule, stages, inner))


def cover(cases: Sequence[_Case]) -> Iterator[_Case]:
    """Some of the cases, in which every two choices that any case combines are together in one: a greedy choice."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set[object]().union(*pairs.values())
    while missing:
        best = max(cases, key=lambda case: len(missing & pairs[case]))
        missing -= pairs[best]
        yield best


SETS: Mapping[str, Callable[[], Iterator[tuple[str, Planning]]]] = {
    "toys": toys, "equal": equal, "plan": plan, "alpa": searches
}  # fmt: skip


def digest(plan: Plan) -> str:
    """A hash of a plan without what depends on the machine."""
    data = json.loads(plan.to_json())
    for name in ("phases", "version"):
        del data[name]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def attempted(planning: Planning) -> str:
    """The digest of a plan, or why there is none."""
    try:
        return digest(planning())
    except autopar.AutoparError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    name, *parts = sys.argv[1:] or ("toys",)
    with cache.use_folder(None):
        for title, planning in SETS[name]():
            if not parts or any(part in title for part in parts):
                print(f"{title}: {attempted(planning)}", flush=True)


if __name__ == "__main__":
    main()
