"""The judge of plans within a budget: certificates against HiGHS, on toys of the zoo and random programs.

    case(seed)     a program, a mesh with random prices, and a budget between the least peak and that of the free plan
    judged(case)   what `optimize_within` finds and proves, beside what HiGHS finds           tests/judge/budget_milp.py

`python -m tests.judge.budgets --cases 100` judges that many and prints what it counted. A certificate holds if no plan
that fits is cheaper than the bound, and the plan fits and costs what is said.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from autopar import zoo
from autopar.cost_models.compiler.backends import BACKENDS
from autopar.cost_models.memory.liveness import Liveness
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.trace import Traced, trace
from autopar.passes.intra_op import build as intra_op
from autopar.passes.memory.budget import optimize_within
from autopar.passes.memory.min_memory import least_memory
from autopar.passes.mesh_search.planner import make_model
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import optimize
from tests.judge.budget_milp import within
from tests.programs.random_programs import program

ROUNDING = 1e-8  # relative
SECONDS = 60.0  # for either side of a case
LARGEST = 2500  # strategies of all nodes: larger cases would take most of a survey's time
MESHES = ((2,), (4,), (8,), (2, 2), (2, 4), (4, 2))
#: Toys and their sizes; two layers where that tells layers apart.
TOYS: dict[str, dict[str, int]] = {
    "mlp-toy": {"layers": 3, "batch": 256},
    "equinox-toy": {"batch": 256},
    "flax-linen-toy": {"batch": 64},
    "gpt-toy": {"layers": 1},
    "gpt-toy-scan": {},
    "gpt-toy-remat": {"layers": 2},
    "llama3-toy": {"layers": 1},
    "rnn-toy": {},
    "vit-toy": {"layers": 1},
}


@dataclass(frozen=True, eq=False)
class Case:
    """One problem with its memory, and a budget in bytes per device."""

    seed: int
    name: str
    mesh: tuple[int, ...]
    backend: str
    problem: intra_op.Problem
    source: Liveness
    budget: float


@dataclass(frozen=True)
class Verdict:
    """One case judged; seconds per step.

    Attributes:
        objective, lower: what the plan costs, and what is proven.
        optimum, bound: what HiGHS finds (None: nothing in its time) and proves.
        honest: the plan fits and costs what is said.
    """

    seed: int
    name: str
    mesh: tuple[int, ...]
    backend: str
    variables: int
    objective: float
    lower: float
    optimum: float | None
    bound: float
    honest: bool
    status: str

    @property
    def holds(self) -> bool:
        """Nothing that HiGHS says contradicts the plan or its certificate."""
        within_optimum = self.optimum is None or self.lower <= self.optimum * (1 + ROUNDING)
        return self.honest and within_optimum and self.objective >= self.bound * (1 - ROUNDING)

    @property
    def gap(self) -> float:
        """What the certificate leaves open, relative."""
        return (self.objective - self.lower) / self.objective

    @property
    def excess(self) -> float:
        """How much dearer than HiGHS' optimum the plan is, relative; zero where there is none."""
        return 0.0 if self.optimum is None else self.objective / self.optimum - 1


def case(seed: int) -> Case | None:
    """The case of this seed; None if it is too large, or the fastest plan the smallest, so that no budget matters."""
    rng = Random(seed)
    name, traced, mesh = _subject(rng, seed)
    backend = BACKENDS[rng.choice(("cpu", "gpu"))]
    model = make_model(traced, mesh, Options())
    if sum(len(n.cost) for n in model.problem.nodes) > LARGEST:
        return None
    source = Liveness(traced.graph, model, mesh, backend)
    budget = _budget(model.problem, source, rng.random())
    return None if budget is None else Case(seed, name, mesh.sizes, backend.name, model.problem, source, budget)


def _subject(rng: Random, seed: int) -> tuple[str, Traced, LogicalMesh]:
    """A random program or a toy, in turns."""
    if seed % 2:
        p = program(seed)
        return "random", trace(p.step, *p.args), p.mesh
    name = rng.choice(tuple(TOYS))
    model = zoo.build(name, layers=TOYS[name].get("layers"), batch=TOYS[name].get("batch"))
    return name, trace(model.step, *model.abstract_args()), _mesh(rng)


def _mesh(rng: Random) -> LogicalMesh:
    """Prices over three orders of magnitude."""
    sizes = rng.choice(MESHES)
    alpha, beta = ([_drawn(rng, a, b) for _ in sizes] for a, b in ((1e-8, 1e-5), (1e-11, 1e-8)))
    speeds = _drawn(rng, 1e10, 1e13), _drawn(rng, 1e10, 1e12)
    return Cluster.custom(sizes, alpha, beta, *speeds, 10**10).logical_mesh(sizes)


def _drawn(rng: Random, least: float, most: float) -> float:
    """Between these, every order of magnitude alike."""
    return math.exp(rng.uniform(math.log(least), math.log(most)))


def _budget(problem: intra_op.Problem, source: Liveness, share: float) -> float | None:
    """This share of the way from the least peak found to that of the free plan, between two whole numbers of bytes."""
    free, _ = source.peak(optimize(problem).assignment)
    least = least_memory(problem, source, exact=False).peak_bytes
    return math.floor(least + share * (free - least)) + 0.5 if free > least + 1 else None


def cases(count: int) -> Iterator[Case]:
    """The first `count` cases in which a budget matters."""
    seed = 0
    while count:
        if drawn := case(seed):
            yield drawn
            count -= 1
        seed += 1


def judged(c: Case, seconds: float = SECONDS) -> Verdict:
    """What was found and proven, beside what HiGHS finds, each in so many seconds."""
    solution = optimize_within(c.problem, c.source, c.budget, time_limit=seconds)
    price, (peak, _) = c.problem.value(solution.assignment), c.source.peak(solution.assignment)
    honest = peak <= c.budget and math.isclose(price, solution.objective, rel_tol=ROUNDING)
    answer = within(c.problem, c.source, c.budget, seconds)
    variables = sum(len(n.cost) for n in c.problem.nodes)
    said = (solution.objective, solution.lower_bound, answer.optimum, answer.bound, honest, solution.status)
    return Verdict(c.seed, c.name, c.mesh, c.backend, variables, *said)


def summary(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """What was judged, counted."""
    gaps, solved = [v.gap for v in verdicts], [v for v in verdicts if v.optimum is not None]
    return {
        "cases": len(verdicts),
        "contradicted": [v.seed for v in verdicts if not v.holds],
        "solved by HiGHS": len(solved),
        "equal to its optimum": sum(abs(v.excess) <= ROUNDING for v in solved),
        "median gap": statistics.median(gaps),
        "worst gap": max(gaps),
        "worst excess": max(v.excess for v in solved),
        "largest": max(v.variables for v in verdicts),
        "of the zoo": sum(v.name != "random" for v in verdicts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.judge.budgets", description="judge plans in random budgets")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for either side of a case")
    chosen = parser.parse_args()
    begin, verdicts = time.perf_counter(), list[Verdict]()
    for drawn in cases(chosen.cases):
        verdicts.append(judged(drawn, chosen.seconds))
        v = verdicts[-1]
        said = "holds" if v.holds else "CONTRADICTED", "optimal" if v.optimum is not None else "not solved by HiGHS"
        print(v.seed, v.name, v.mesh, v.variables, f"{v.gap:.2e} {v.excess:.2e}", v.status, *said, file=sys.stderr)
    print(json.dumps({**summary(verdicts), "seconds": round(time.perf_counter() - begin, 1)}))
    sys.exit(0 if all(v.holds for v in verdicts) else 1)


if __name__ == "__main__":
    main()
