"""A digest of every plan of some toys under several settings, to see that a refactoring changes none.

`python -m tests.digests > before` in one commit and `... > after` in another; equal files are equal plans, to the bit
of their JSON, but for what planning took and the version. Names of toys as arguments; by default six.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.plans import cache
from autopar.plans.plan import Plan

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
TIME_LIMIT = 120.0  # seconds: no plan may depend on the speed of the machine


def digest(plan: Plan) -> str:
    """A hash of a plan without what depends on the machine."""
    data = json.loads(plan.to_json())
    for name in ("phases", "version"):
        del data[name]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def digests(name: str) -> Iterator[tuple[str, str]]:
    """(setting, digest or error) of one toy."""
    model = zoo.build(name)
    args = model.abstract_args()
    common: dict[str, Any] = {
        "cluster": autopar.Cluster.preset("p3.16xlarge"), "time_limit": TIME_LIMIT, "progress": False
    }  # fmt: skip
    for title, setting in SETTINGS.items():
        options: Any = {**common, **setting}
        if isinstance(share := options.get("memory_budget"), float):
            options["memory_budget"] = None
            free = autopar.plan(model.step, *args, **options)
            options["memory_budget"] = int(share * free.peak_memory_bytes)
        try:
            yield title, digest(autopar.plan(model.step, *args, **options))
        except autopar.AutoparError as error:
            yield title, f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    with cache.use_folder(None):
        for name in sys.argv[1:] or TOYS:
            for title, hashed in digests(name):
                print(f"{name}, {title}: {hashed}", flush=True)


if __name__ == "__main__":
    main()
