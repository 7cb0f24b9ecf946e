"""Whatever is cut as a rule of ours allows, the results are those of one device."""

from __future__ import annotations

import itertools

import pytest

from tests.rules import test_convolutions, test_megablox, test_ragged
from tests.support.effort import sample
from tests.support.random_plans import MESHES_AND_SEEDS, assert_random_plan_equals_jit

CASES = {
    f"{name}-{title}": (fn, args)
    for name, cases in (
        ("convolutions", test_convolutions.CASES),
        ("megablox", test_megablox.CASES),
        ("ragged", test_ragged.CASES),
    )
    for title, (fn, args, _) in cases.items()
}
#: Kernels of Megablox are slow here: in the sample those of both passes have all meshes, the others the last one.
RUNS = sample(
    [(case, *at) for case, at in itertools.product(CASES, MESHES_AND_SEEDS)],
    [
        (case, *at)
        for case, at in itertools.product(CASES, MESHES_AND_SEEDS)
        if not case.startswith("megablox") or case == "megablox-gradients" or at == MESHES_AND_SEEDS[-1]
    ],
)


@pytest.mark.core
@pytest.mark.parametrize(("case", "mesh", "seed"), RUNS)
def test_any_plan_gives_the_same_numbers(
    case: str, mesh: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, args = CASES[case]
    assert_random_plan_equals_jit(monkeypatch, fn, args, seed, mesh=mesh)
