"""`autopar bench fuzz`: many random train steps in parallel against the plain step; see `autopar.bench.fuzz`.

Workers take seeds in chunks, each chunk in a process of its own. A row is appended to the resume file as soon as it is
known; seeds found there are not run again. Failures are shrunk to files that run by themselves.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from autopar.bench import rows as rows_kept
from autopar.bench import worker
from autopar.bench.equal.run import quick_flags
from autopar.ir.keyed import totals

MODES = ("microbatches", "stages", "meshes")
CHUNK = 100  # programs of one process: starting JAX takes as long as some five of them
LIMIT_S = 300.0
X86 = ("x86_64", "amd64")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Campaign:
    """What to run.

    Attributes:
        programs: how many; their seeds are `seed`, `seed` + 1, ...
        modes: of `MODES`.
        workers: processes side by side.
        failures: folder for the files of failures; None: they are not shrunk.
        limit_s: seconds after which a program counts as hanging.
    """

    programs: int = 100
    seed: int = 0
    modes: tuple[str, ...] = MODES
    workers: int = 1
    failures: Path | None = None
    limit_s: float = LIMIT_S

    def __post_init__(self) -> None:
        rows_kept.check_words("mode", self.modes, MODES)

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.programs)


def run(
    campaign: Campaign,
    resume: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Rows of all seeds, in order; `tell` hears of each failure, and of every hundredth program."""
    if campaign.failures is not None:
        campaign.failures.mkdir(parents=True, exist_ok=True)
    wanted = {*campaign.modes}
    rows: dict[int, Row] = {
        row["seed"]: row for row in rows_kept.read(resume) if wanted <= {*row["seconds"]} or not row["ok"]
    }
    todo = [seed for seed in campaign.seeds if seed not in rows]
    lock = Lock()

    def keep(row: Row) -> None:
        with lock:
            rows[row["seed"]] = row
            rows_kept.keep(resume, row)
            if not row["ok"]:
                tell(line(row))
            elif len(rows) % 100 == 0:
                tell(f"{len(rows)} of {campaign.programs} programs, the last of seed {row['seed']}")

    with ThreadPoolExecutor(campaign.workers) as pool:
        list(pool.map(lambda chunk: _chunk(campaign, chunk, keep), _chunks(todo, campaign.workers)))
    return [rows[seed] for seed in campaign.seeds]


def _chunks(seeds: Sequence[int], workers: int) -> list[list[int]]:
    size = max(1, min(CHUNK, -(-len(seeds) // workers)))
    return [list(seeds[i : i + size]) for i in range(0, len(seeds), size)]


def flags() -> str:
    """XLA's flags: quick to compile, and a value is the same in every kernel that computes it.

    Every conversion to a narrow float rounds. Products and sums are not fused: one kernel fuses what another does not,
    and then `x == max(x, y)`, which the gradient of a maximum asks, fails for an x that is computed twice.
    """
    unfused = " --xla_cpu_max_isa=AVX" if platform.machine().lower() in X86 else ""
    return f"{quick_flags()} --xla_allow_excess_precision=false{unfused}"


def _chunk(campaign: Campaign, seeds: Sequence[int], keep: Callable[[Row], None]) -> None:
    """Rows of some seeds; a seed at which a worker dies has failed, and the next worker goes on behind it.

    One that dies behind the last seed has failed there.
    """
    left = list(seeds)
    while left:
        folder = None if campaign.failures is None else str(campaign.failures)
        spec = {"seeds": left, "modes": campaign.modes, "failures": folder, "limit": campaign.limit_s}
        try:
            for row in worker.lines("autopar.bench.fuzz.case", spec, {"XLA_FLAGS": flags()}):
                left.remove(row["seed"])
                keep(row)
        except worker.WorkerError as error:
            keep(_dead(left.pop(0) if left else seeds[-1], str(error)))


def _dead(seed: int, message: str) -> Row:
    from autopar.bench.fuzz.case import Row as Case

    return asdict(Case(seed, False, {"worker": message[-300:]}))


def line(row: Row) -> str:
    """One failed program for people."""
    return "\n".join(f"FAIL seed {row['seed']}, {variant}: {text}" for variant, text in row["failures"].items())


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts of all rows: what `--json` prints last."""
    refused = [row for row in rows if any("microbatches" in variant for variant in row["refusals"])]
    reasons = Counter(reason for row in rows for reason in dict.fromkeys(row["refusals"].values()))
    seconds = totals(item for row in rows for item in row["seconds"].items())
    primitives = sorted({name for row in rows for name in row["primitives"]})
    return {
        "programs": len(rows),
        "seeds": [rows[0]["seed"], rows[-1]["seed"]] if rows else [],
        "failed": [row["seed"] for row in rows if not row["ok"]],
        "refused_in_microbatches": len(refused),
        "refusals": dict(reasons.most_common()),
        "uncut_meshes": sum(row["uncut"] for row in rows),
        "primitives": primitives,
        "equations": sum(row["equations"] for row in rows) / max(1, len(rows)),
        "seconds_per_program": {mode: s / max(1, len(rows)) for mode, s in seconds.items()},
    }


def table(rows: Sequence[Row]) -> str:
    """Failures, refusals by reason, primitives, and the cost of a program."""
    counts = figures(rows)
    return "\n".join([*(line(row) for row in rows if not row["ok"]), *_figures(counts)])


def _figures(counts: Mapping[str, Any]) -> Iterator[str]:
    count = counts["programs"]
    yield f"{count - len(counts['failed'])} of {count} programs equal the plain step, or are refused"
    if count:
        yield f"seeds {counts['seeds'][0]} to {counts['seeds'][1]}, {counts['equations']:.0f} equations on average"
        refused = counts["refused_in_microbatches"]
        yield f"refused in microbatches: {refused}, {refused / count:.1%}; all refusals by reason:"
    yield from (f"  {times:>6} {reason}" for reason, times in counts["refusals"].items())
    yield f"meshes over which nothing was cut: {counts['uncut_meshes']}"
    yield f"{len(counts['primitives'])} primitives: {', '.join(counts['primitives'])}"
    costs = ", ".join(f"{mode} {s:.2f} s" for mode, s in counts["seconds_per_program"].items())
    yield f"processor time per program: {costs}"
