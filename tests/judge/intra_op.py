"""The judge of intra-op optimality: what the optimizer finds against what exhaustive search finds, program by program.

    program(seed)      a small random train step or function on a random mesh     tests/programs/random_programs.py
    survey             its decisions and their seconds, worked out independently   tests/judge/survey.py
    optimum            over all assignments                                        tests/judge/model.py

`python -m tests.judge.intra_op --graphs 1000` judges that many programs of 4 to 10 clusters and prints what it counted;
`--zoo` prices the plans of all toy models instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar import zoo
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import optimize
from autopar.plans.builders.one_mesh import Planned, make_plan
from autopar.plans.record import Stage
from autopar.zoo.table import TOYS
from tests.judge.model import Judge
from tests.judge.survey import survey
from tests.programs.random_programs import program

CLUSTERS = range(4, 11)
ROUNDING = 1e-9  # relative

#: What else must find the same optimum, as options of `optimize`.
VARIANTS = {
    "unfolded": {"fold": False},
    "raw": {"presolve": False},
    "cbc": {"solver": "cbc"},
    "highs": {"solver": "highs"},
}


@dataclass(frozen=True)
class Verdict:
    """One program judged; everything in seconds per step but the counts.

    Attributes:
        planned: what the optimizer says its plan takes.
        priced: what the judge says that plan takes.
        optimum: the least that the judge finds, and how.
        variants: optima of the optimizer run in other ways.
        clusters, shared: clusters and shared copies.
        diamond: some decisions meet again on another way.
        weights_cut: some product reads a parameter that is cut, so the plan is not pure data parallel.
    """

    seed: int
    planned: float
    priced: float
    optimum: float
    method: str
    status: str
    variants: dict[str, float]
    clusters: int
    shared: int
    diamond: bool
    weights_cut: bool

    @property
    def worst(self) -> float:
        """The largest relative difference to the judge's optimum."""
        return max(abs(v / self.optimum - 1) for v in (self.planned, self.priced, *self.variants.values()))


@dataclass(frozen=True)
class Judged:
    """A planned program with the judge's own account of it."""

    planned: Planned
    judge: Judge


def judged(seed: int) -> Judged | None:
    """The program of this seed, planned and surveyed; None if it has too few or too many clusters."""
    p = program(seed)
    traced = trace(p.step, *p.args)
    planned = make_plan(traced, p.mesh, "random", Options())
    if len(planned.model.grouping.groups) not in CLUSTERS:
        return None
    return Judged(planned, survey(traced.graph, planned.rules, p.mesh))


def judged_programs(count: int) -> Iterator[tuple[int, Judged]]:
    """The first `count` seeds whose programs are of the right size."""
    seed = 0
    while count:
        if pair := judged(seed):
            yield seed, pair
            count -= 1
        seed += 1


def verdict(seed: int, subject: Judged, variants: Sequence[str]) -> Verdict:
    """Compare the optimizer, also run in these ways, with the judge."""
    planned, judge = subject.planned, subject.judge
    optimum, _, method = judge.optimum()
    problem = planned.model.problem
    objectives = {name: optimize(problem, **VARIANTS[name]).objective for name in variants}  # type: ignore[arg-type]
    return Verdict(
        seed=seed,
        planned=planned.plan.objective_s,
        priced=judge.price(planned.plan.stages[0]),
        optimum=optimum,
        method=method,
        status=planned.plan.solver_status,
        variants=objectives,
        clusters=len(planned.model.grouping.groups),
        shared=len(judge.copies),
        diamond=len(judge.tables) >= len(judge.decisions),
        weights_cut=cuts_weights(planned.graph, planned.plan.stages[0]),
    )


def cuts_weights(graph: Graph, stage: Stage) -> bool:
    """Some product reads a parameter in pieces."""
    params = {v for v, path in graph.names.items() if path.startswith("params")}
    return any(
        dim >= 0
        for op in graph.walk()
        if op.name == "dot_general"
        for k, atom in enumerate(op.inputs)
        if isinstance(atom, int) and atom in params
        for dim in stage.uses.get(f"{op.tag}.in{k}", stage.values[atom])
    )


def zoo_prices(names: Sequence[str], shape: tuple[int, ...] = (2, 4)) -> Iterator[tuple[str, float, float]]:
    """(model, the planner's price of its plan, the judge's)."""
    mesh = Cluster.custom(shape, (1e-6, 1e-7), (4e-9, 1e-10), 1e12, 1e11, 10**10).logical_mesh(shape)
    for name in names:
        model = zoo.build(name)
        traced = trace(model.step, *model.abstract_args())
        planned = make_plan(traced, mesh, "custom", Options())
        judge = survey(traced.graph, planned.rules, mesh)
        yield name, planned.plan.objective_s, judge.price(planned.plan.stages[0])


def summary(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """What was judged, counted."""
    return {
        "graphs": len(verdicts),
        "disagreements": [v.seed for v in verdicts if v.worst > ROUNDING],
        "worst": max(v.worst for v in verdicts),
        "not_data_parallel": sum(v.weights_cut for v in verdicts),
        "diamonds": sum(v.diamond for v in verdicts),
        "shared_reshards": sum(v.shared > 0 for v in verdicts),
        "clusters": dict(sorted(Counter(v.clusters for v in verdicts).items())),
        "methods": dict(Counter(v.method for v in verdicts)),
        "statuses": dict(Counter(v.status for v in verdicts)),
        "variants": dict(Counter(name for v in verdicts for name in v.variants)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.judge.intra_op", description="judge the optimizer on random programs"
    )
    parser.add_argument("--graphs", type=int, default=1000, help="random programs to judge")
    parser.add_argument("--every", type=int, default=10, help="each so many go through CBC and HiGHS as well")
    parser.add_argument("--zoo", action="store_true", help="price the plans of the toy models instead")
    chosen = parser.parse_args()
    if chosen.zoo:
        for name, ours, theirs in zoo_prices(TOYS):
            print(json.dumps({"model": name, "planned_s": ours, "judged_s": theirs, "difference": theirs / ours - 1}))
        return
    begin = time.perf_counter()
    variants = [("unfolded", "raw"), ("unfolded", "raw", "cbc", "highs")]
    verdicts = [
        verdict(seed, subject, variants[i % chosen.every == 0])
        for i, (seed, subject) in enumerate(judged_programs(chosen.graphs))
    ]
    print(json.dumps({**summary(verdicts), "seconds": round(time.perf_counter() - begin, 1)}))


if __name__ == "__main__":
    main()
