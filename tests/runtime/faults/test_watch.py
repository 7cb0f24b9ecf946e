"""A step that does not answer is named; one that does costs a thread for as long as its first run takes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.api import parallelize
from autopar.errors import ArgumentError, AutoparWarning
from autopar.runtime import executables
from autopar.runtime.faults.watch import PATIENCE, VARIABLE, patience, warn_if_slow
from tests.programs.steps import array

pytestmark = pytest.mark.core


def watchers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "autopar watch"]


def ended() -> bool:
    """Whether all threads that watch end within 5 s."""
    for thread in watchers():
        thread.join(5)
    return not watchers()


class Stuck:
    """Has what the watch reads of an array that nobody computes."""

    nbytes = 4

    def is_ready(self) -> bool:
        return False

    def is_deleted(self) -> bool:
        return False


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What warnings say, from any thread."""
    messages: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda text, kind, **_: messages.append(f"{kind.__name__}: {text}"))
    return messages


@pytest.mark.parametrize("where", ["in the call", "in its results"])
def test_a_step_that_does_not_answer_is_named(where: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "Array", object)

    def hangs() -> Sequence[Any]:
        if where == "in the call":
            time.sleep(0.3)
        return (Stuck(),) if where == "in its results" else ()

    warn_if_slow(hangs, "train_step on 8 CPU devices", 0.1)
    assert ended()
    assert len(said) == 1
    assert said[0].startswith(f"{AutoparWarning.__name__}: train_step on 8 CPU devices has not answered for 0.1 s")
    assert VARIABLE in said[0]


def test_what_answers_or_fails_ends_its_watch(said: list[str]) -> None:
    assert warn_if_slow(lambda: (jnp.ones(3), 2), "step", 5.0)[1] == 2

    def fails() -> Sequence[Any]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        warn_if_slow(fails, "step", 5.0)
    assert ended()
    assert not said


def test_only_a_first_run_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []

    def counted(run: Any, what: str, seconds: float) -> Any:
        seen.append((what, seconds))
        return run()

    monkeypatch.setattr(executables, "warn_if_slow", counted)

    def doubled(x: jax.Array) -> jax.Array:
        return 2 * x

    run = parallelize(doubled, mesh=(8,))
    for _ in range(3):
        run(array(16, 8))
    assert seen == [("doubled on 8 CPU devices", PATIENCE)]
    monkeypatch.setenv(VARIABLE, "0")
    run.compiled(array(8, 8))
    run(array(8, 8))
    assert len(seen) == 1


@pytest.mark.parametrize(("text", "seconds"), [("", PATIENCE), ("7.5", 7.5), ("0", 0.0)])
def test_patience_is_set_by_a_variable(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert patience() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_patience_that_is_no_number_of_seconds_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ArgumentError, match=f"{VARIABLE}='{text}' must be a number of seconds"):
        patience()


EXITS = """
import atexit, threading, time
atexit.register(lambda: print([t.name for t in threading.enumerate() if "watch" in t.name]))
from autopar.runtime.faults import watch
watch._answered = lambda array: False
import jax.numpy as jnp
watch.warn_if_slow(lambda: [jnp.ones(3)], "step", 60.0)
print([t.name for t in threading.enumerate() if "watch" in t.name])
"""


def test_an_interpreter_that_exits_ends_the_watch() -> None:
    """A thread that is in the runtime's C++ as the interpreter goes aborts the process."""
    done = subprocess.run([sys.executable, "-c", EXITS], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["['autopar watch']", "[]"]


LAPACK = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from autopar.api import parallelize
from autopar.hardware.cluster import Cluster

def step(w, x):
    m = jnp.einsum("bij,jk->bik", x, w)
    m = m @ m.transpose(0, 2, 1) + jnp.eye(32)
    return jnp.linalg.slogdet(m)[1].sum() + jnp.linalg.eigvalsh(m).sum()

rng = np.random.default_rng(0)
w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((32, 32), (9, 32, 32)))  # 9 matrices cannot be cut
dear = Cluster.custom((8,), 1e-7, 1e-11, {"float32": 1e9}, 1e9, 2**34)
run = parallelize(jax.value_and_grad(step), mesh=(8,), cluster=dear)
got, expected = run(w, x), jax.jit(jax.value_and_grad(step))(w, x)
assert "all-gather" in [c.kind for c in run.plan(w, x).collectives]
np.testing.assert_allclose(got[0], expected[0], rtol=1e-4)
"""


def test_a_step_with_kernels_of_lapack_between_collectives_ends() -> None:
    """In a process of its own: where it fails, it hangs."""
    subprocess.run([sys.executable, "-c", LAPACK], check=True, timeout=300)
