"""The problem as an integer linear program.

    minimise   sum_v sum_s  cost_v(s) x_vs   +   sum_e sum_kl  table_e(k, l) y_ekl                     -> _build
    one strategy per node          sum_s x_vs = 1,  x binary                                           -> _build
    flow between classes           sum_l y_ekl = sum_{s in k} x_us,   sum_k y_ekl = sum_{s in l} x_vs   -> _transport
                                   y >= 0, and no y for pairs of classes that the table forbids         -> _flows
    memory, at every row           constant + sum_vs bytes_v(s) x_vs + sum_ekl bytes_e(k, l) y_ekl  <=  budget   -> _fit

y is continuous: if x is integral, each edge has one class at either end, and one unit flows between these classes. This
is the ILP of Alpa (Zheng et al., OSDI 2022, section 4.2) with edge variables over layout classes instead of pairs of
strategies. Costs range from 1e-9 to 1e3 s. The least entry of each node and edge is therefore subtracted from the
objective, which is then scaled so that the largest cost still to be decided is about SCALE units -> scaling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.ir.problem import Edge, Floats, Ints, Problem
from autopar.passes.solver import backends as solvers

SCALE = 1e4  # largest cost at stake in units of the solver, whose tolerance is about 1e-7 units
FINE = 1e4  # memory budget in units of the solver, whose tolerance of 1e-7 units is 1e-11 of the budget
ACCURACY = 1e-9  # relative difference between a plan and its bound that a solver cannot resolve


Binaries = list[list[tuple[int, Any]]]  # per node, pairs of (strategy, variable)
Flows = dict[tuple[int, int], Any]  # (class at u, class at v) -> variable


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The memory rows of a problem.

    Attributes:
        budget: bytes, the limit at each of R program points.
        constants, nodes, edges: bytes, as in `autopar.passes.memory.presolve.ConstrainedProblem`.
    """

    budget: float
    constants: Floats
    nodes: Mapping[int, Floats]
    edges: Mapping[int, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The result of an ILP.

    Attributes:
        status: as in `backends.Result`.
        assignment: the plan, shape (nodes,), or None.
        lower: proven lower bound (s; bytes for `least`), -inf if none is proven.
        rows: number of rows of the ILP.
        columns: number of its variables.
        message: text for people.
    """

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
    """Solve to proven optimality. A failure of the solver is a status, never an exception.

    Args:
        problem: the problem.
        solver: "cbc" or "highs".
        time_limit: s.
        upper: cost (s) of a known plan; it scales the objective, and strategies that alone exceed it are left out.
        cutoff: tell the solver that plans above `upper` need not be found.
        memory: rows to satisfy.
        gap: absolute gap (s) at which the solver may stop.
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
    # slightly above `upper`, so that the solver's tolerance does not cut off the known plan
    limit = (upper - shift) / unit * (1 + 1e-6) + 1e-3 if cutoff and np.isfinite(upper) else None
    result = solvers.solve(model, solver, time_limit=time_limit, cutoff=limit, gap=gap / unit)
    lower = -np.inf if result.bound is None else shift + unit * result.bound
    return Answer(result.status, _decode(binaries, result.values), lower, rows, columns, result.message)


def least(memory: Memory, problem: Problem, solver: str, *, time_limit: float) -> Answer:
    """The plan with the least peak over the rows. `lower` is in bytes; `memory.budget` (bytes) only sets the scale."""
    if not all(np.isfinite(a.min()) for a in _arrays(problem)):
        return Answer("infeasible", None, np.inf, 0, 0, "a node or an edge is forbidden altogether")
    model = solvers.new_model("autopar")
    binaries, flows, rows, columns = _build(model, problem, 1.0)
    peak = solvers.continuous(model, "peak")
    rows += _fit(model, memory, binaries, flows, peak)
    solvers.minimise(model, {peak: 1.0})
    result = solvers.solve(model, solver, time_limit=time_limit)
    lower = -np.inf if result.bound is None else result.bound * _unit(memory)
    return Answer(result.status, _decode(binaries, result.values), lower, rows, columns + 1, result.message)


def _unit(memory: Memory) -> float:
    """Bytes per unit of the model's memory rows."""
    return memory.budget / FINE if memory.budget > 0 else 1.0


def _fit(model: Any, memory: Memory, binaries: Binaries, flows: Sequence[Flows], peak: Any = None) -> int:
    """Add a row per program point: bytes <= budget, or bytes <= the variable `peak`. Returns the number of rows."""
    unit = _unit(memory)
    for r, constant in enumerate(memory.constants):
        terms: dict[Any, float] = {} if peak is None else {peak: -1.0}
        for v, array in memory.nodes.items():
            terms.update((x, float(array[r, s]) / unit) for s, x in binaries[v] if array[r, s])
        for i, array in memory.edges.items():
            terms.update((y, float(array[r, k, l]) / unit) for (k, l), y in flows[i].items() if array[r, k, l])
        room = -float(constant) if peak is not None else memory.budget - float(constant)
        solvers.at_most(model, terms, room / unit, f"m{r}")
    return len(memory.constants)


def scaling(problem: Problem, upper: float = np.inf) -> tuple[float, float]:
    """(shift, stake) in seconds: every plan costs at least `shift`; the largest cost to be decided is about `stake`."""
    arrays = _arrays(problem)
    shift = float(sum(a.min() for a in arrays))
    if np.isfinite(upper) and upper > shift:
        return shift, upper - shift
    stake = max((float(a[np.isfinite(a)].max() - a.min()) for a in arrays), default=0.0)
    return shift, stake or 1.0


def _arrays(problem: Problem) -> list[Floats]:
    """The costs of all nodes, then the tables of all edges."""
    return [n.cost for n in problem.nodes] + [e.table for e in problem.edges]


def _trimmed(problem: Problem, stake: float) -> Problem:
    """The problem in which entries that exceed the minimum of their array by more than `stake` (s) are forbidden."""
    if not np.isfinite(stake):
        return problem
    # The margin keeps a plan of just this cost, which rounding may have put above it.
    most = stake + 1e-6 * abs(stake)
    nodes = tuple(replace(n, cost=_capped(n.cost, most)) for n in problem.nodes)
    return Problem(nodes, tuple(replace(e, table=_capped(e.table, most)) for e in problem.edges))


def _capped(array: Floats, most: float) -> Floats:
    return np.where(array - array.min() <= most, array, np.inf)


def _build(model: Any, problem: Problem, unit: float) -> tuple[Binaries, list[Flows], int, int]:
    """Add variables, objective and rows. Returns the variables of nodes and edges, and the row and column counts."""
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
    """Add a continuous variable per pair of classes that the table allows."""
    pairs = np.argwhere(np.isfinite(edge.table)).tolist()
    return {(k, l): solvers.continuous(model, f"y{i}_{k}_{l}") for k, l in pairs}


def _transport(model: Any, i: int, side: int, classes: Ints, own: list[tuple[int, Any]], flows: Flows) -> int:
    """Add a row per class of one end: flow out of it = sum of the binaries in it. Returns the number of rows."""
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
