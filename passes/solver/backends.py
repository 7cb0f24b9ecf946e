"""ILP solvers behind one interface, and the only module that depends on the version of PuLP.

A model is built with PuLP 3 or 4 (`new_model`, `binary`, `continuous`, `equal`, `at_most`, `minimise`). Coefficients
are passed as dicts, which is several times faster than sums of products. `solve` writes the model as an MPS file into a
temporary folder and runs a solver as a child process. A solver that crashes, is killed or hangs does not affect this
process:

    cbc     the binary of PuLP 3, or that of `pulp[cbc]` for PuLP 4, or `cbc` on the PATH                -> _cbc_path
    highs   `highs_child.py` under this Python                                                      -> _highs_command

Both solvers run on one thread, by default with a gap of zero, and write their output to the folder. `solve` reports
every failure of a solver as a status and never raises for it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pulp

# CBC's options: a relative gap of zero, one thread, and no cuts, heuristics or preprocessing. The relaxation is tight
# and a good plan is known, so branching alone is 3 to 10 times faster.
PLAIN = ["-ratio", "0", "-threads", "0", "-cuts", "off", "-heuristicsOnOff", "off", "-preprocess", "off"]
GRACE = 1.0  # time (s) beyond its time limit after which a solver is killed


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a solver.

    Attributes:
        status: "optimal", "near-optimal" (within the gap), "infeasible", "time-limit" or "failed".
        bound: proven lower bound in the units of the model, None if none is proven.
        values: name of a variable -> value, nonzero ones only; empty without a solution.
        message: text for people.
    """

    status: str
    bound: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    message: str = ""


def new_model(name: str) -> Any:
    """An empty minimisation problem."""
    return pulp.LpProblem(name, pulp.LpMinimize)


def binary(model: Any, name: str) -> Any:
    """A new 0-1 variable."""
    return model.add_variable(name, 0, 1, "Binary")


def continuous(model: Any, name: str) -> Any:
    """A new variable >= 0."""
    return model.add_variable(name, 0, None, "Continuous")


def equal(model: Any, coefficients: dict[Any, float], rhs: float, name: str) -> None:
    """Add the constraint sum of coefficient * variable == rhs."""
    model.addConstraint(_expression(coefficients) == rhs, name)


def at_most(model: Any, coefficients: dict[Any, float], rhs: float, name: str) -> None:
    """Add the constraint sum of coefficient * variable <= rhs."""
    model.addConstraint(_expression(coefficients) <= rhs, name)


def minimise(model: Any, coefficients: dict[Any, float]) -> None:
    """Set the objective to the sum of coefficient * variable."""
    model.setObjective(_expression(coefficients))


def _expression(coefficients: dict[Any, float]) -> Any:
    expression: Any = pulp.LpAffineExpression
    make = getattr(expression, "from_dict", expression)  # PuLP 4, PuLP 3
    return make(coefficients)


def available() -> tuple[str, ...]:
    """Names of the solvers that are installed."""
    return tuple(name for name, command in COMMANDS.items() if command(Path(), 1.0, None, 0.0))


def quickest() -> str:
    """The fastest installed solver: HiGHS, else CBC."""
    return "highs" if "highs" in available() else "cbc"


def solve(model: Any, solver: str, *, time_limit: float, cutoff: float | None = None, gap: float = 0.0) -> Result:
    """Solve a model in a child process.

    Args:
        model: from `new_model`.
        solver: a key of `COMMANDS`.
        time_limit: s.
        cutoff: solutions above this value (units of the model) need not be found; HiGHS ignores it.
        gap: absolute gap (units of the model) at which the solver may stop.

    Returns:
        The result, with status "failed" if the solver is not installed, crashes or writes no solution.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name)
        command = COMMANDS[solver](folder, max(time_limit, 0.1), cutoff, gap)
        if not command:
            return Result("failed", message=f"the solver {solver!r} is not installed; found: {available()}")
        model.writeMPS(str(folder / "model.mps"))
        error = _run(command, folder, time_limit)
        if error or not (folder / "solution").is_file():  # of a child that was killed the file may end anywhere
            return Result("failed", message=error or f"{solver} ended without a solution file")
        return READERS[solver](folder)


def _run(command: list[str], folder: Path, time_limit: float) -> str:
    """Run the child until it ends or is killed. Returns a description of the failure, or the empty string."""
    with open(folder / "log", "wb") as log:
        try:
            child = start(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
        except OSError as problem:
            return f"{command[0]} could not be started: {problem}"
        try:
            code = child.wait(timeout=max(time_limit, 0.1) + GRACE)
        except subprocess.TimeoutExpired:
            return f"{Path(command[0]).name} was stopped {GRACE:.0f} s after its time limit of {time_limit:.1f} s"
        finally:
            child.kill()
            child.wait()
    return "" if code == 0 else f"{Path(command[0]).name} ended with exit code {code}"


start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # replaced by tests with a child that crashes


def _cbc_command(folder: Path, time_limit: float, cutoff: float | None, gap: float) -> list[str]:
    """The command line of CBC; empty if it is not installed."""
    path = _cbc_path()
    if not path:
        return []
    bound = [] if cutoff is None else ["-cutoff", repr(cutoff)]
    limit = ["-timeMode", "elapsed", "-sec", f"{time_limit:.2f}"]
    settings = [*limit, *PLAIN, "-allow", repr(gap), *bound]
    return [path, str(folder / "model.mps"), *settings, "-solve", "-solution", str(folder / "solution")]


def _cbc_path() -> str | None:
    """The path of CBC, None if it is not installed."""
    carried = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)  # PuLP 3
    candidates = [carried or pulp.COIN_CMD(msg=False).path, "cbc"]
    return next((path for c in candidates if c and (path := shutil.which(c))), None)


def _highs_command(folder: Path, time_limit: float, cutoff: float | None, gap: float) -> list[str]:
    """The command line of the HiGHS child; empty if HiGHS is not installed."""
    if importlib.util.find_spec("highspy") is None:
        return []
    script = Path(__file__).with_name("highs_child.py")
    del cutoff  # HiGHS has no cutoff for its branch and bound
    numbers = (f"{time_limit:.2f}", repr(gap))
    return [sys.executable, "-I", str(script), str(folder / "model.mps"), str(folder / "solution"), *numbers]


def _read_cbc(folder: Path) -> Result:
    """Read CBC's solution file, and its log for the bound.

    The first line of the file is, for example, "Optimal - objective value 12.3". Each further line has index, name,
    value and reduced cost of a nonzero column; "**" marks infeasible ones.
    """
    head, *lines = (folder / "solution").read_text().splitlines() or [""]
    values = {name: float(value) for _, name, value, *_ in (line.replace("**", "").split() for line in lines)}
    log = (folder / "log").read_text(errors="replace")
    lowest = re.findall(r"Lower bound:\s+(\S+)", log)
    if "within gap tolerance" in log and lowest:
        return Result("near-optimal", float(lowest[-1]), values, head)
    if head.startswith("Optimal"):
        return Result("optimal", float(head.split()[-1]), values, head)
    if "infeasible" in head.lower():
        return Result("infeasible", message=head)
    solved = head.startswith("Stopped") and "no integer" not in head
    return Result("time-limit", float(lowest[-1]) if lowest else None, values if solved else {}, head)


def _read_highs(folder: Path) -> Result:
    """Read the JSON that `highs_child.py` wrote."""
    answer = json.loads((folder / "solution").read_text())
    return Result(answer["status"], answer["bound"], answer["values"], answer["message"])


# Command lines from folder, time limit (s), cutoff and gap (units of the model).
COMMANDS: Mapping[str, Callable[[Path, float, float | None, float], list[str]]] = {
    "cbc": _cbc_command,
    "highs": _highs_command,
}
READERS: Mapping[str, Callable[[Path], Result]] = {"cbc": _read_cbc, "highs": _read_highs}
