"""Child process that solves an MPS file with HiGHS.

Arguments of the command line: model file, solution file, time limit (s), absolute gap (units of the objective).

The LP relaxation is solved first, by dual simplex. Its solution is integral more often than not, and then no branch and
bound is needed. Nothing is presolved: with presolve HiGHS 1.16 ends with a dearer optimum for two of 14,400 random
problems with memory rows. The solution file is JSON: status, bound, values of the nonzero columns, message.

The package `highspy` imports NumPy, which takes ten times as long as a small problem. Its compiled module needs none of
NumPy for what is read here; vectors such as `col_cost_` would.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
import time
from typing import Any


def _highspy() -> Any:
    """The compiled module of the package highspy, or the package where it has no such module. Tried on 1.16.0."""
    spec = importlib.util.find_spec("highspy")
    assert spec is not None
    sys.modules["highspy"] = importlib.util.module_from_spec(spec)  # not executed
    try:
        return importlib.import_module("highspy._core")
    except ImportError:
        del sys.modules["highspy"]
        return importlib.import_module("highspy")


highspy = _highspy()

INTEGRAL = 1e-7  # largest distance from an integer at which a value counts as integral
PROVEN = 1e-9  # largest relative distance between objective and bound at which the objective counts as optimal


def main(model_path: str, solution_path: str, limit: str, gap: str) -> None:
    """Solve the model to the absolute gap and write the solution file."""
    deadline = time.monotonic() + float(limit)
    solver: Any = (highspy._Highs if hasattr(highspy, "_Highs") else highspy.Highs)()
    options = {"output_flag": False, "threads": 1, "presolve": "off", "mip_rel_gap": 0.0, "mip_abs_gap": float(gap)}
    for option, value in options.items():
        solver.setOptionValue(option, value)
    solver.readModel(model_path)
    integer = [i for i, kind in enumerate(solver.getLp().integrality_) if kind != highspy.HighsVarType.kContinuous]
    status = _run(solver, deadline, relaxed=True)
    columns = solver.getSolution().col_value
    if status == "optimal" and any(abs(columns[i] - round(columns[i])) > INTEGRAL for i in integer):
        # from where the relaxation ended HiGHS 1.16 may report the optimum with the values of a dearer solution
        solver.clearSolver()
        status = _run(solver, deadline, relaxed=False)
    with open(solution_path, "w") as file:
        json.dump(_answer(solver, status, float(gap)), file)


def _run(solver: Any, deadline: float, *, relaxed: bool) -> str:
    """Solve the model or its LP relaxation. Returns "optimal", "infeasible", "time-limit" or "failed"."""
    solver.setOptionValue("solve_relaxation", relaxed)
    # HiGHS counts the time of earlier runs towards the limit
    solver.setOptionValue("time_limit", max(solver.getRunTime() + deadline - time.monotonic(), 0.1))
    solver.run()
    kinds = {
        highspy.HighsModelStatus.kOptimal: "optimal",
        highspy.HighsModelStatus.kInfeasible: "infeasible",
        highspy.HighsModelStatus.kTimeLimit: "time-limit",
    }
    return kinds.get(solver.getModelStatus(), "failed")


def _answer(solver: Any, status: str, gap: float) -> dict[str, object]:
    """The content of the solution file."""
    # the node count is -1 if only the relaxation was solved; primal status 2 is "feasible"
    info, mip = solver.getInfo(), solver.getInfo().mip_node_count >= 0
    solved = status == "optimal" or (status == "time-limit" and mip and info.primal_solution_status == 2)
    names = solver.getLp().col_names_
    values = {n: x for n, x in zip(names, solver.getSolution().col_value, strict=True) if x} if solved else {}
    bound = info.mip_dual_bound if mip else info.objective_function_value
    # without a bound HiGHS reports infinity, as a number near the largest
    proven = (status == "optimal" or (status == "time-limit" and mip)) and abs(bound) < 1e300
    objective = math.fsum(solver.getCol(i)[1] * values[name] for i, name in enumerate(names) if name in values)
    if status == "optimal" and objective - bound > PROVEN * max(1.0, abs(bound)):
        status = "near-optimal" if gap > 0 else "failed"
    message = solver.modelStatusToString(solver.getModelStatus())
    return {"status": status, "bound": bound if proven else None, "values": values, "message": message}


if __name__ == "__main__":
    main(*sys.argv[1:])
