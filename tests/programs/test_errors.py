"""Every mistake ends in an `AutoparError` that names the value, its shape and the user's line, and says what to do."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autopar.api import parallelize
from autopar.errors import ArgumentError, AutoparError, AutoparWarning, MemoryBudgetError, PlanMismatchError
from autopar.passes.solver import backends as solvers
from autopar.plans.plan import Plan
from tests.programs.mistaken import W, X, planned, product
from tests.programs.mistakes import SETTINGS
from tests.programs.mistakes_in_functions import FUNCTIONS

CASES = (*SETTINGS, *FUNCTIONS)


@pytest.mark.parametrize(("mistake", "error", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_message(mistake: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        mistake()
    assert isinstance(caught.value, AutoparError)
    assert type(caught.value) is error
    assert re.fullmatch(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "stages": [{"values": 3}]}'])
def test_a_damaged_plan_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanMismatchError, match=r"plan\.json is (no|a damaged) plan"):
        Plan.load(path)


@pytest.mark.core
def test_what_the_function_itself_raises_is_left_alone() -> None:
    def wrong(x: jax.Array) -> Any:
        raise KeyError("missing weight")

    with pytest.raises(KeyError, match="missing weight"):
        planned(wrong, (X,))
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        planned(product, (W,))


def test_a_function_is_usable_after_its_errors() -> None:
    step = parallelize(product, mesh=(8,), donate_argnums=())
    with pytest.raises(ArgumentError):
        step(W, object())
    np.testing.assert_allclose(step(W, X)[1], X.sum(), rtol=1e-5)


# Solvers that die


def dying(code: str) -> Callable[..., subprocess.Popen[bytes]]:
    """A stand-in for subprocess.Popen that starts a Python child instead of the solver."""
    return lambda _, **how: subprocess.Popen([sys.executable, "-c", code], **how)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
        ("raise SystemExit(3)", "exit code 3"),
        ("pass", "without a solution file"),
        ("import time; time.sleep(60)", "was stopped"),
    ],
    ids=["killed", "failed", "silent", "hanging"],
)
def test_a_step_runs_although_its_solver_dies(monkeypatch: pytest.MonkeyPatch, code: str, how: str) -> None:
    monkeypatch.setattr(solvers, "start", dying(code))
    monkeypatch.setattr(solvers, "GRACE", 0.1)
    step = parallelize(product, mesh=(8,), solver="cbc", time_limit=1.0, donate_argnums=())
    with pytest.warns(AutoparWarning, match=rf"product: .*cbc.*{how}") as caught:
        result = step(W, X)
    assert [w.filename for w in caught] == [__file__]
    np.testing.assert_allclose(result[0], jax.jit(product)(W, X)[0], rtol=1e-5)
    assert any(how in note for note in step.plan(W, X).notes)


def test_what_no_budget_fits_comes_whole_from_another_process() -> None:
    again = pickle.loads(pickle.dumps(MemoryBudgetError("no plan fits", 1e9, 2 * 10**9, 10**9)))
    assert isinstance(again, MemoryBudgetError)
    assert (str(again), again.budget, again.least_bytes, again.bound_bytes) == ("no plan fits", 1e9, 2 * 10**9, 10**9)
