"""Every line of the table of the microbatch analysis is exercised, and a sample of it equals the whole operation.

The rest is behind `python -m tests.passes.microbatch.soundness`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
import pytest

from autopar.passes.microbatch.rules import table
from autopar.passes.microbatch.rules.types import NUMBER, PartialOperands
from autopar.passes.microbatch.states import Partial
from tests.passes.microbatch.samples import USES
from tests.passes.microbatch.soundness import PLACES, Accepted, accepted, cases, differing, lines

#: Between them these have all lines.
DTYPES = ("float32", "int32", "bool", "complex64")
#: dtypes and extents of which some are drawn for every use besides.
OTHERS = [(d, e) for d in ("int8", "uint8", "bfloat16", "float16", "float64", *DTYPES) for e in ("even", "one", "none")]
#: Primitives of JAX 0.12 that 0.10 lacks.
NEWER = {"log2", "one_minus_square", "polynomial"}
#: Cases that run in each place.
CASES = 8
_WINDOWS = ("select_and_gather_add", "select_and_scatter_add")
_DECOMPOSITIONS = ("cholesky", "eigh", "householder_product", "lu", "qr", "svd", "tridiagonal_solve")
#: dtype -> primitives that XLA:CPU of JAX 0.10.2 lacks for it. With one of them a whole program does not compile.
LACKING = {
    "bool": ("clamp",),
    "complex64": ("argmax", "argmin", "clamp", "eq_to", "pallas_call", *_WINDOWS),
    **dict.fromkeys(("int8", "uint8", "int32"), ("cumlogsumexp",)),
    **dict.fromkeys(("float16", "bfloat16"), _DECOMPOSITIONS),
}


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def accepted_cases() -> Sequence[Accepted]:
    """What the analysis accepts, for every use of some dtypes, and of one drawn at random."""
    rng = np.random.default_rng(0)
    drawn = [OTHERS[rng.integers(len(OTHERS))] for _ in USES]
    pairs = [(use, dtype, "even") for dtype in DTYPES for use in enumerate(USES)]
    pairs += [(use, *drawn_dtype) for use, drawn_dtype in zip(enumerate(USES), drawn, strict=True)]
    return [case for pair in pairs for case in accepted(*pair)]


def test_every_row_of_the_table_is_exercised(accepted_cases: Sequence[Accepted]) -> None:
    """As far as this version of JAX has the primitive."""
    primitives = {p.name for p in gc.get_objects() if isinstance(p, jex.Primitive)}
    exercised = {line for case in accepted_cases for line in case.lines}
    missing = [line for line in lines() if line not in exercised and line[0] in primitives]
    assert missing == []
    assert {name for name in table.RULES if name not in primitives} <= NEWER


@pytest.mark.parametrize("place", PLACES)
def test_a_sample_in_microbatches_is_the_whole(accepted_cases: Sequence[Accepted], place: str) -> None:
    """Cases of lines that have had none yet come first, so that between them the places have all lines."""
    assert differing(drawn(accepted_cases, list(PLACES).index(place)), place) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_of_sums_that_kernels_round_are_converted(dtype: str) -> None:
    """A kernel is traced for its own types, so that its operands stay narrow."""
    place = next(iter(PLACES))
    kernels = list(cases([dtype], ["custom_partitioning"]))
    assert any("sum" in str(case) for case in kernels)
    assert differing(kernels, place) == []


def drawn(accepted_cases: Sequence[Accepted], place: int) -> list[Accepted]:
    accepted_cases = [case for case in accepted_cases if case.use.primitive not in LACKING.get(case.dtype, ())]
    order = np.random.default_rng(place).permutation(len(accepted_cases))
    turn = {line: i % len(PLACES) for i, line in enumerate(lines())}
    mine = [line for line, of in turn.items() if of == place]
    first = {line: accepted_cases[i] for i in order[::-1] for line in accepted_cases[i].lines if line in mine}
    return list({id(case): case for case in (*first.values(), *(accepted_cases[i] for i in order[:CASES]))}.values())


# A wrong table is found


def _convert_anything(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setattr(table, "homomorphic", lambda kind, before, after: True)
    return "convert_element_type", "int8"


def _fill_anything(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    lines_of_gather = tuple(
        replace(pattern, condition=lambda case, kind: True) for pattern in table.RULES["gather"].partial_operands
    )
    wrong = {**table.RULES, "gather": replace(table.RULES["gather"], partial_operands=lines_of_gather)}
    monkeypatch.setattr(table, "RULES", wrong)
    return "gather", "int32"


def _divide_integers(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    wrong = {
        **table.RULES,
        "div": replace(table.RULES["div"], partial_operands=(PartialOperands("pi", ("sum",), NUMBER),)),
    }
    monkeypatch.setattr(table, "RULES", wrong)
    return "div", "int32"


@pytest.mark.parametrize("mistake", [_convert_anything, _fill_anything, _divide_integers])
def test_a_wrong_row_is_found(mistake: Callable[[pytest.MonkeyPatch], tuple[str, str]], monkeypatch: Any) -> None:
    primitive, dtype = mistake(monkeypatch)
    drawn_cases = (case for case in cases([dtype], [primitive]) if case.extents == "even")
    assert differing([case for case in drawn_cases if Partial("sum") in case.states][:30], "scan") != []
