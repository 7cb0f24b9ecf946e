"""`autopar bench first-call`: seconds that a user waits for the first step, with everything at its default.

Each program of the corpus and each toy of the zoo has a process of its own, with 8 virtual CPU devices and nothing in
any cache. There it is planned as its user calls it, no option given but those that its author has to give, and then
compiled by `jax.jit` for one device, which is what its user waited for before:

    plan_s     from the arguments to the plan: tracing, the candidate meshes, their problems
    first_s    from the arguments to the result of the first step: plan_s, compilation, the step (`small` and toys only)
    jit_s      tracing, lowering and compiling the same step by `jax.jit`
    gap        of the plan, against every plan on every mesh that was a candidate
    cost       what tolerance costs (`--prove`): the plan's step over that of a plan with gap 0, less 1; absent where no
               proof ends within `PROOF` seconds

Every other program of the corpus, in the order of names, is set aside (`half` is "aside"): no threshold of the planner
is settled on these.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.bench import rows as rows_kept
from autopar.bench import worker
from autopar.bench.corpus import program as corpus_program

DEVICES = 8
SIZES = ("small", "large")
HALVES = ("settled", "aside", "zoo")
PROOF = 600.0  # seconds that a proof may take
WORST_S, MOST_GAP, MOST_COST = 10.0, 0.01, 0.005  # what planning may take, and what its plan may lack

Row = Mapping[str, Any]


def run(
    names: Sequence[str] = (),
    sizes: Sequence[str] = SIZES,
    table: str = corpus_program.TABLE,
    prove: bool = False,
    resume: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """A row for each program and size; ArgumentError for a name or size that is not known."""
    from autopar import zoo

    rows_kept.check_words("size", sizes, SIZES)
    programs = corpus_program.corpus(table)
    rows_kept.check_words("program", names, (*programs, *zoo.TOYS))
    cases = [(name, size) for name in (*programs, *zoo.TOYS) if name in (names or (*programs, *zoo.TOYS))
             for size in (sizes if name in programs else ("small",))]  # fmt: skip
    rows_by_case: dict[tuple[str, str], Row] = {(row["program"], row["size"]): row for row in rows_kept.read(resume)}
    for name, size in cases:
        if (name, size) in rows_by_case or (name in programs and programs[name].missing()):
            continue
        row = _measured(name, size, half_of(name, tuple(programs)), table, prove)
        rows_by_case[name, size] = row
        tell(line(row))
        rows_kept.keep(resume, row)
    return [rows_by_case[case] for case in cases if case in rows_by_case]


def half_of(name: str, corpus: Sequence[str]) -> str:
    """The half that a program belongs to: thresholds are settled on every other program of the corpus, by name."""
    return HALVES[sorted(corpus).index(name) % 2] if name in corpus else "zoo"


def _measured(name: str, size: str, half: str, table: str, prove: bool) -> Row:
    spec = {"program": name, "size": size, "table": table, "prove": prove}
    head = {"program": name, "size": size, "half": half}
    try:
        (row,) = worker.lines("autopar.bench.first_call", spec, {"AUTOPAR_TEST_JAX_CACHE": ""})
    except worker.WorkerError as error:
        return {**head, "error": str(error)[-600:]}
    return {**head, "error": "", **row}


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """The figures of one program."""
    import jax

    worker.cpu_devices(DEVICES)
    warnings.simplefilter("ignore")
    jax.devices()
    from autopar.bench.corpus.case import Subject

    programs = corpus_program.corpus(spec["table"])
    program = programs.get(spec["program"]) or _Toy(spec["program"], "", "", (), 1)
    subject = Subject(program, program.large if spec["size"] == "large" else 1)
    parallel, args = subject.parallel(), subject.arguments()
    begin = time.perf_counter()
    plan = parallel.plan(*args)
    plan_s = first_s = time.perf_counter() - begin
    if spec["size"] == "small":
        jax.block_until_ready(jax.tree.leaves(parallel(*args)))
        first_s = time.perf_counter() - begin
    yield {
        "plan_s": plan_s,
        "first_s": first_s,
        "jit_s": _compiled_s(subject),
        "phases": dict(plan.phases),
        "mesh": list(plan.mesh_sizes),
        "step_time_s": plan.step_time_s,
        "gap": plan.gap,
        "status": plan.solver_status,
        "variables": plan.variables_unfolded,
        "remat": sum(policy != "none" for policy in plan.remat),
        "cost": _cost(subject, plan.step_time_s) if spec["prove"] else None,
    }


class _Toy(corpus_program.Program):
    """A toy of the zoo as a program."""

    def built(self, scale: int = 1) -> corpus_program.Built:
        import jax

        from autopar import zoo

        model = zoo.build(self.name)
        return model.step, (model.init(jax.random.key(0)), model.make_batch(jax.random.key(1)))


def _compiled_s(subject: Any) -> float:
    from autopar.bench.corpus.case import lowered

    begin = time.perf_counter()
    lowered(subject).compile()
    return time.perf_counter() - begin


def _cost(subject: Any, found_s: float) -> float | None:
    """What the plan's step takes more than a proven one, relative; None where there is no proof in time."""
    proven = subject.parallel(gap=0.0, time_limit=PROOF).plan(*subject.arguments())
    return found_s / proven.step_time_s - 1 if proven.gap == 0 else None


def line(row: Row) -> str:
    """One program for people."""
    head = f"{row['program']:<24} {row['size']:<5} {row['half']:<7}"
    if row["error"]:
        return f"{head} {row['error']}"
    cost = "" if row["cost"] is None else f"  tolerance costs {100 * row['cost']:.2f}%"
    mesh = "x".join(map(str, row["mesh"]))
    return (
        f"{head} planned in {row['plan_s']:6.2f} s, jit {row['jit_s']:6.2f} s, first step after {row['first_s']:6.2f} s"
        f"  mesh {mesh:<6} {row['status']}, gap {100 * row['gap']:.2f}%{cost}"
    )


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """By half and size: medians, worst, and how many gaps are above `MOST_GAP`."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if not row["error"]:
            groups.setdefault(f"{row['half']} {row['size']}", []).append(row)
            groups.setdefault("all", []).append(row)
    return {name: _figures(group) for name, group in groups.items()} | {"failed": sum(bool(r["error"]) for r in rows)}


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    costs = [row["cost"] for row in rows if row["cost"] is not None]
    return {
        "programs": len(rows),
        "plan_s": statistics.median(row["plan_s"] for row in rows),
        "worst_s": max(row["plan_s"] for row in rows),
        "over_jit": statistics.median(row["plan_s"] / row["jit_s"] for row in rows),
        "wide": sum(row["gap"] > MOST_GAP for row in rows),
        "cost": max(costs, default=None),
        "proven": len(costs),
    }


def holds(rows: Sequence[Row]) -> bool:
    """Whether planning is as quick as it is to be, and its plans as good."""
    by_group = figures(rows)
    whole = by_group.get("all")
    if by_group["failed"] or whole is None:
        return False
    quick = whole["over_jit"] <= 1 and whole["worst_s"] <= WORST_S
    near = whole["wide"] <= 0.05 * whole["programs"] and (whole["cost"] or 0.0) <= MOST_COST
    return quick and near


def table(rows: Sequence[Row]) -> str:
    """Programs, worst first, and the figures of each half."""
    ordered = sorted(rows, key=lambda row: (not row["error"], -row.get("plan_s", 0.0)))
    parts = [line(row) for row in ordered]
    for name, f in figures(rows).items():
        if name == "failed":
            continue
        cost = f"; tolerance costs at most {100 * f['cost']:.2f}% ({f['proven']} proofs)" if f["proven"] else ""
        parts.append(
            f"{name:<14} {f['programs']:3} plans: median {f['plan_s']:.2f} s, {f['over_jit']:.2f} of jit; worst "
            f"{f['worst_s']:.1f} s; {f['wide']} with a gap above {100 * MOST_GAP:.0f}%{cost}"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    worker.serve(work)
