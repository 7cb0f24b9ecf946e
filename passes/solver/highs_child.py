"""Child process: solve an MPS file with HiGHS. Arguments: model file, solution file, time limit in seconds, gap.

The LP relaxation comes first (dual simplex without presolve): it is integral more often than not, and then nothing is
left to branch on. The solution file is JSON: status, bound, values of the nonzero columns, message.
"""

from __future__ import annotations

import json
import sys
import time

import highspy

INTEGRAL = 1e-7  # distance from an integer that still counts as one
PROVEN = 1e-9  # relative distance of the objective from its bound that counts as none


def main(model_path: str, solution_path: str, limit: str, gap: str) -> None:
    """Solve, to a gap in the objective's units, and write the solution."""
    deadline = time.monotonic() + float(limit)
    solver = highspy.Highs()
    for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", float(gap))):
        solver.setOptionValue(option, value)
    solver.readModel(model_path)
    integer = [i for i, kind in enumerate(solver.getLp().integrality_) if kind != highspy.HighsVarType.kContinuous]
    status = _run(solver, deadline, relaxed=True)
    columns = solver.getSolution().col_value
    if status == "optimal" and any(abs(columns[i] - round(columns[i])) > INTEGRAL for i in integer):
        status = _run(solver, deadline, relaxed=False)
    with open(solution_path, "w") as file:
        json.dump(_answer(solver, status, float(gap)), file)


def _run(solver: highspy.Highs, deadline: float, *, relaxed: bool) -> str:
    solver.setOptionValue("solve_relaxation", relaxed)
    solver.setOptionValue("presolve", "off" if relaxed else "on")
    solver.setOptionValue("time_limit", max(solver.getRunTime() + deadline - time.monotonic(), 0.1))
    solver.run()
    kinds = {
        highspy.HighsModelStatus.kOptimal: "optimal",
        highspy.HighsModelStatus.kInfeasible: "infeasible",
        highspy.HighsModelStatus.kTimeLimit: "time-limit",
    }
    return kinds.get(solver.getModelStatus(), "failed")


def _answer(solver: highspy.Highs, status: str, gap: float) -> dict[str, object]:
    info, mip = solver.getInfo(), solver.getInfo().mip_node_count >= 0
    solved = status == "optimal" or (status == "time-limit" and mip and info.primal_solution_status == 2)
    names = solver.getLp().col_names_
    values = {n: x for n, x in zip(names, solver.getSolution().col_value, strict=True) if x} if solved else {}
    bound = info.mip_dual_bound if mip else info.objective_function_value
    known = (status == "optimal" or (status == "time-limit" and mip)) and abs(bound) < 1e300
    if status == "optimal" and gap > 0 and info.objective_function_value - bound > PROVEN * max(1.0, abs(bound)):
        status = "near-optimal"
    message = solver.modelStatusToString(solver.getModelStatus())
    return {
        "status": status,
        "bound": bound if known else None,
        "values": values,
        "message": message,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
