"""The one place that knows PuLP's versions and the solvers.

A model is built with PuLP 3 or 4 (`new_model`, `binary`, `continuous`, `equal`, `minimise`: coefficients are passed
as dicts, which is several times faster than sums of products), written as an MPS file into a temporary folder, and
solved by a child process, so that a solver that crashes, is killed or hangs takes nothing along:

    cbc     the binary that PuLP 3 carries, or that `pulp[cbc]` brings along for PuLP 4, or `cbc` on the PATH
    highs   `highs_child.py` under this Python

Both run on one thread with a gap of zero, and their output goes to the folder. `solve` answers every mishap with a
status.
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

# CBC's options: one thread, and none of its cuts, heuristics and preprocessing. The relaxation is tight and a
# good plan is known, so branching alone ends 3 to 10 times sooner.
PLAIN = ["-ratio", "0", "-threads", "0", "-cuts", "off", "-heuristicsOnOff", "off", "-preprocess", "off"]
GRACE = 1.0  # seconds that a solver may take beyond its time limit before it is killed


@dataclass(frozen=True, slots=True)
class Result:
    """What a solver said.

    status: "optimal", "near-optimal" (within the gap), "infeasible", "time-limit" or "failed".
    values: name -> value, empty without a solution.
    bound is the solver's proven lower bound in its own units, None if it proved none.
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
    """Add the row sum coefficients == rhs."""
    model.addConstraint(_expression(coefficients) == rhs, name)


def at_most(model: Any, coefficients: dict[Any, float], rhs: float, name: str) -> None:
    """Add the row sum coefficients <= rhs."""
    model.addConstraint(_expression(coefficients) <= rhs, name)


def minimise(model: Any, coefficients: dict[Any, float]) -> None:
    """Set the objective."""
    model.setObjective(_expression(coefficients))


def _expression(coefficients: dict[Any, float]) -> Any:
    expression: Any = pulp.LpAffineExpression
    make = getattr(expression, "from_dict", expression)  # PuLP 4, PuLP 3
    return make(coefficients)


def available() -> tuple[str, ...]:
    """Names of the solvers that can be run here."""
    return tuple(name for name, command in COMMANDS.items() if command(Path(), 1.0, None, 0.0))


def quickest() -> str:
    """The solver that takes least time where it is installed: HiGHS, else CBC."""
    return "highs" if "highs" in available() else "cbc"


def solve(model: Any, solver: str, *, time_limit: float, cutoff: float | None = None, gap: float = 0.0) -> Result:
    """Solve within `time_limit` seconds; plans above `cutoff` (in the model's units) need not be found.

    `gap`: how far from the optimum, in the model's units, the solver may stop.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name)
        command = COMMANDS[solver](folder, max(time_limit, 0.1), cutoff, gap)
        if not command:
            return Result("failed", message=f"the solver {solver!r} is not installed; found: {available()}")
        model.writeMPS(str(folder / "model.mps"))
        error = _run(command, folder, time_limit)
        if not (folder / "solution").is_file():
            return Result("failed", message=error or f"{solver} ended without a solution file")
        return READERS[solver](folder)


def _run(command: list[str], folder: Path, time_limit: float) -> str:
    """Run the child to its end; what went wrong, or the empty string."""
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


start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # tests put a child in here that dies


def _cbc_command(folder: Path, time_limit: float, cutoff: float | None, gap: float) -> list[str]:
    path = _cbc_path()
    if not path:
        return []
    bound = [] if cutoff is None else ["-cutoff", repr(cutoff)]
    limit = ["-timeMode", "elapsed", "-sec", f"{time_limit:.2f}"]
    near = ["-allow", repr(gap)]
    return [
        path,
        str(folder / "model.mps"),
        *limit,
        *PLAIN,
        *near,
        *bound,
        "-solve",
        "-solution",
        str(folder / "solution"),
    ]


def _cbc_path() -> str | None:
    carried = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)  # PuLP 3
    candidates = [carried or pulp.COIN_CMD(msg=False).path, "cbc"]
    return next((found for c in candidates if c and (found := shutil.which(c))), None)


def _highs_command(folder: Path, time_limit: float, cutoff: float | None, gap: float) -> list[str]:
    if importlib.util.find_spec("highspy") is None:
        return []
    script = Path(__file__).with_name("highs_child.py")
    del cutoff  # HiGHS has no cutoff for its branch and bound
    numbers = (f"{time_limit:.2f}", repr(gap))
    return [sys.executable, "-I", str(script), str(folder / "model.mps"), str(folder / "solution"), *numbers]


def _read_cbc(folder: Path) -> Result:
    """First line: "Optimal - objective value 12.3"; then index, name, value, reduced cost of each nonzero column."""
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
    answer = json.loads((folder / "solution").read_text())
    return Result(answer["status"], answer["bound"], answer["values"], answer["message"])


COMMANDS: Mapping[str, Callable[[Path, float, float | None, float], list[str]]] = {
    "cbc": _cbc_command,
    "highs": _highs_command,
}
READERS: Mapping[str, Callable[[Path], Result]] = {"cbc": _read_cbc, "highs": _read_highs}
