"""Programs as people write them give the same results under `parallelize` as under `jax.jit`."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

from autopar.api import parallelize
from tests.programs.kept_programs import KEPT
from tests.programs.real_programs import PROGRAMS

MESHES = ((2, 4), (8,))
CORE = ("typed keys", "mixed leaves", "adam", "scan of mixed carries", "branches", "remat", "taking and scattering")
PARAMS = [pytest.param(p, marks=[pytest.mark.core] if name in CORE else [], id=name) for name, p in PROGRAMS]


def values(tree: Any) -> Any:
    """Host arrays of a tree, random keys by their bits; None stays None."""

    def value(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(value, tree)


def assert_equal(got: Any, expected: Any) -> None:
    """Same tree, dtypes and weak types; integers, booleans and keys bit for bit, floats to rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    halves = any(leaf.dtype.itemsize == 2 for leaf in jax.tree.leaves(expected))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert jax.typeof(a).str_short() == jax.typeof(b).str_short(), name
        a, b = values(a), values(b)
        if not jax.numpy.issubdtype(a.dtype, jax.numpy.inexact):
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            scale = max(float(np.abs(b).max(initial=0.0)), 1e-30)
            tolerance = 2e-2 if halves else 2e-5
            assert np.abs(a.astype(b.dtype) - b).max(initial=0.0) <= tolerance * scale, name


@pytest.fixture(scope="module", params=PARAMS)
def program(request: pytest.FixtureRequest) -> Any:
    """(function, arguments, options, results under jit), compiled once for all meshes."""
    fn, args, *rest = request.param()
    options = rest[0] if rest else {}
    return fn, args, options, jax.jit(fn, static_argnums=options.get("static_argnums", ()))(*args)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_same_results_as_jit(program: Any, mesh: tuple[int, ...]) -> None:
    fn, args, options, expected = program
    step = parallelize(fn, mesh=mesh, donate_argnums=(), **options)
    assert_equal(step(*args), expected)


@pytest.mark.parametrize(("program", "note"), [(p, n) for _, p, n in KEPT], ids=[t for t, _, _ in KEPT])
def test_what_stays_as_it_is(program: Any, note: str, capfd: pytest.CaptureFixture[str]) -> None:
    fn, args = program()
    expected = jax.jit(fn)(*args)
    jax.effects_barrier()
    printed = sorted(capfd.readouterr().out.splitlines())
    step = parallelize(fn, mesh=(8,), donate_argnums=())
    got = step(*args)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == printed
    assert_equal(got, expected)
    assert re.fullmatch(note, "; ".join(step.plan(*args).notes[:1]))
