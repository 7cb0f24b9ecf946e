"""The problem as an integer linear program, written with PuLP.

    minimise   sum_v sum_s  cost_v(s) x_vs   +   sum_e sum_kl  table_e(k, l) y_ekl                     -> _build
    one strategy per node          sum_s x_vs = 1,  x binary                                           -> _build
    transport from class to class  sum_l y_ekl = sum_{s in k} x_us,   sum_k y_ekl = sum_{s in l} x_vs   -> _transport
                                   y >= 0, no y where the table forbids

    memory, where a plan has to fit  sum_v bytes_v(s) x_vs + sum_e bytes_e(k, l) y_ekl <= budget - constant  -> _fit

y is continuous: once x is integral each edge has one class at either end and the whole unit flows between them. This
is the ILP of Alpa (Zheng et al., OSDI 2022, section 4.2) with edge variables over layout classes instead of pairs of
strategies. Costs may lie anywhere between 1e-9 and 1e3 s, so the objective is shifted by each node's and edge's
cheapest entry and scaled: what is left to decide is worth SCALE in the solver's units -> scaling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.ir.problem import Edge, Floats, Ints, Problem
from autopar.passes.solver import backends as solvers

SCALE = 1e4  # solver units of the largest cost at stake; solvers decide to about 1e-7
FINE = 1e4  # solver units of the budget: their tolerance of 1e-7 is 1e-11 of it
ACCURACY = 1e-9  # relative difference between a plan and its bound that a solver cannot resolve


Binaries = list[list[tuple[int, Any]]]  # per node the (strategy, variable) pairs
Flows = dict[tuple[int, int], Any]  # pair of classes -> variable


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Bytes at R program points, in the arrays of `loaded.Loaded`, and the budget (bytes) that holds at all of them."""

    budget: float
    constants: Floats
    nodes: Mapping[int, Floats]
    edges: Mapping[int, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a solver said. value and lower in seconds; status as in solvers.Result, message for people."""

    status: str
    assignment: Ints | None
    lower: float
    rows: int
    columns: int
    message: str


def solve(
    problem: Problem,
    solver: str,
    *,
    time_limit: float,
    upper: float = np.inf,
    cutoff: bool = False,
    memory: Memory | None = None,
    gap: float = 0.0,
) -> Answer:
    """Solve to proven optimality with "cbc" or "highs", within a budget where `memory` is given.

    `upper` (s) is the value of a known plan: it scales the objective, forbids what alone costs more, and is told to the
    solver as a bound if `cutoff`; `gap` (s) is how far from the optimum it may stop. Never raises for what happens to
    the solver: see `Answer.status`.
    """
    if not all(np.isfinite(a.min()) for a in _arrays(problem)):
        return Answer("infeasible", None, np.inf, 0, 0, "a node or an edge is forbidden altogether")
    shift, stake = scaling(problem, upper)
    unit = stake / SCALE
    model = solvers.new_model("autopar")
    trimmed = _trimmed(problem, upper - shift)
    binaries, flows, rows, columns = _build(model, trimmed, unit)
    if memory is not None:
        rows += _fit(model, memory, binaries, flows)
    limit = (upper - shift) / unit * (1 + 1e-6) + 1e-3 if cutoff and np.isfinite(upper) else None
    result = solvers.solve(model, solver, time_limit=time_limit, cutoff=limit, gap=gap / unit)
    lower = -np.inf if result.bound is None else shift + unit * result.bound
    return Answer(result.status, _decode(binaries, result.values), lower, rows, columns, result.message)


def least(memory: Memory, problem: Problem, solver: str, *, time_limit: float) -> Answer:
    """The plan with the least peak over the rows; `lower` is in bytes, and `memory.budget` only sets the scale."""
    if not all(np.isfinite(a.min()) for a in _arrays(problem)):
        return Answer("infeasible", None, np.inf, 0, 0, "a node or an edge is forbidden altogether")
    model = solvers.new_model("autopar")
    binaries, flows, rows, columns = _build(model, problem, 1.0)
    peak = solvers.continuous(model, "peak")
    rows += _fit(model, memory, binaries, flows, peak)
    solvers.minimise(model, {peak: 1.0})
    result = solvers.solve(model, solver, time_limit=time_limit)
    lower = -np.inf if result.bound is None else result.bound * memory.budget / FINE
    return Answer(result.status, _decode(binaries, result.values), lower, rows, columns + 1, result.message)


def _fit(model: Any, memory: Memory, binaries: Binaries, flows: Sequence[Flows], peak: Any = None) -> int:
    """One row per program point: bytes held <= budget, or <= the variable `peak`. Returns the number of rows."""
    unit = memory.budget / FINE if memory.budget > 0 else 1.0
    for r, constant in enumerate(memory.constants):
        held: dict[Any, float] = {} if peak is None else {peak: -1.0}
        for v, array in memory.nodes.items():
            held.update((x, float(array[r, s]) / unit) for s, x in binaries[v] if array[r, s])
        for i, array in memory.edges.items():
            held.update((y, float(array[r, k, l]) / unit) for (k, l), y in flows[i].items() if array[r, k, l])
        room = -float(constant) if peak is not None else memory.budget - float(constant)
        solvers.at_most(model, held, room / unit, f"m{r}")
    return len(memory.constants)


def scaling(problem: Problem, upper: float = np.inf) -> tuple[float, float]:
    """(shift, stake) in seconds: every plan costs at least shift, and what is to be decided is worth about stake."""
    arrays = _arrays(problem)
    shift = float(sum(a.min() for a in arrays))
    if np.isfinite(upper) and upper > shift:
        return shift, upper - shift
    stake = max((float(a[np.isfinite(a)].max() - a.min()) for a in arrays), default=0.0)
    return shift, stake or 1.0


def _arrays(problem: Problem) -> list[Floats]:
    return [n.cost for n in problem.nodes] + [e.table for e in problem.edges]


def _trimmed(problem: Problem, stake: float) -> Problem:
    """Entries that alone exceed their array's minimum by more than `stake` (s) become forbidden."""
    if not np.isfinite(stake):
        return problem
    most = stake + 1e-6 * abs(stake)
    nodes = tuple(replace(n, cost=_capped(n.cost, most)) for n in problem.nodes)
    return Problem(nodes, tuple(replace(e, table=_capped(e.table, most)) for e in problem.edges))


def _capped(array: Floats, most: float) -> Floats:
    return np.where(array - array.min() <= most, array, np.inf)


def _build(model: Any, problem: Problem, unit: float) -> tuple[Binaries, list[Flows], int, int]:
    """Variables, objective and rows; returns the variables of nodes and edges, and how many rows and columns."""
    objective: dict[Any, float] = {}
    binaries: Binaries = []
    every: list[Flows] = []
    for v, node in enumerate(problem.nodes):
        own = [(int(s), solvers.binary(model, f"x{v}_{s}")) for s in np.flatnonzero(np.isfinite(node.cost))]
        low = node.cost.min()
        objective.update((x, float(node.cost[s] - low) / unit) for s, x in own)
        solvers.equal(model, {x: 1.0 for _, x in own}, 1.0, f"one{v}")
        binaries.append(own)
    rows = len(binaries)
    for i, edge in enumerate(problem.edges):
        flows = _flows(model, i, edge)
        every.append(flows)
        low = edge.table.min()
        objective.update((y, float(edge.table[k, l] - low) / unit) for (k, l), y in flows.items())
        rows += _transport(model, i, 0, edge.gu, binaries[edge.u], flows)
        rows += _transport(model, i, 1, edge.gv, binaries[edge.v], flows)
    solvers.minimise(model, objective)
    return binaries, every, rows, len(objective)


def _flows(model: Any, i: int, edge: Edge) -> Flows:
    """One continuous variable per pair of classes that the table allows."""
    pairs = np.argwhere(np.isfinite(edge.table)).tolist()
    return {(k, l): solvers.continuous(model, f"y{i}_{k}_{l}") for k, l in pairs}


def _transport(model: Any, i: int, side: int, classes: Ints, own: list[tuple[int, Any]], flows: Flows) -> int:
    """Per class of one end: flow out of it = sum of the binaries in it. Returns the number of rows."""
    rows: dict[int, dict[Any, float]] = {}
    for pair, y in flows.items():
        rows.setdefault(pair[side], {})[y] = 1.0
    for s, x in own:
        rows.setdefault(int(classes[s]), {})[x] = -1.0
    for k, row in rows.items():
        solvers.equal(model, row, 0.0, f"t{i}_{side}_{k}")
    return len(rows)


def _decode(binaries: Binaries, values: Mapping[str, float]) -> Ints | None:
    """The strategy with the largest value per node; None without a solution."""
    if not values:
        return None
    chosen = [max(own, key=lambda pair: values.get(pair[1].name, 0.0))[0] for own in binaries]
    return np.array(chosen, dtype=np.int64)
