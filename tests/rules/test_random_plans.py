"""Whatever is cut as a rule of ours allows, the results are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.rules import test_convolutions, test_megablox, test_ragged
from tests.support.random_plans import MESHES_AND_SEEDS, assert_random_plan_equals_jit

CASES = [
    pytest.param(fn, args, id=f"{name}-{title}")
    for name, cases in (
        ("convolutions", test_convolutions.CASES),
        ("megablox", test_megablox.CASES),
        ("ragged", test_ragged.CASES),
    )
    for title, (fn, args, _) in cases.items()
]


@pytest.mark.core
@pytest.mark.parametrize(("mesh", "seed"), MESHES_AND_SEEDS)
@pytest.mark.parametrize(("fn", "args"), CASES)
def test_any_plan_gives_the_same_numbers(
    fn: Callable[..., Any], args: Sequence[Any], mesh: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_random_plan_equals_jit(monkeypatch, fn, args, seed, mesh=mesh)
