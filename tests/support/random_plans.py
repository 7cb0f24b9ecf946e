"""Plans that are chosen at random: any of them gives the numbers of one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from autopar.api import parallelize
from autopar.ir.problem import Problem
from autopar.passes.mesh_search import planner as planning
from autopar.passes.solver.optimize import Solution
from tests.programs.test_real_programs import assert_equal
from tests.support.effort import sample

MESHES = (8,), (2, 4), (2, 2, 2)
#: Meshes and seeds: one for each mesh, or eight.
MESHES_AND_SEEDS = sample(itertools.product(MESHES, range(8)), [*zip(MESHES, range(3), strict=True)])


def chosen_at_random(seed: int) -> Any:
    """An optimizer that takes any strategy for every node."""
    rng = np.random.default_rng(seed)

    def solve(problem: Problem, *_: Any) -> Solution:
        options_of = [np.flatnonzero(np.isfinite(node.cost)) for node in problem.nodes]
        assignment = np.array([rng.choice(options) for options in options_of], int)
        value = problem.value(assignment)
        return Solution(assignment, value, 0.0, 1.0, "random", "none", (), {}, 0, 0, 0)

    return solve


def assert_random_plan_equals_jit(
    monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], args: Sequence[Any], seed: int, **options: Any
) -> None:
    """The function under a plan of this seed gives what it gives under `jax.jit`; `options`: of `parallelize`."""
    monkeypatch.setattr(planning.memory_policy, "solve", chosen_at_random(seed))
    assert_equal(parallelize(fn, donate_argnums=(), **options)(*args), jax.jit(fn)(*args))
