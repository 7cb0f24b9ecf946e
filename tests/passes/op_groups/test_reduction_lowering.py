"""Sums that end on several axes: what is priced is what XLA emits, and what codegen asks for is what is priced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from autopar import jax_compat
from autopar.cost_models.sharding.strategies import ALL_REDUCE, DEFERRED, NOTHING, REDUCE_SCATTER
from autopar.ir.layout import PARTIAL, REPLICATED, Layout, route, spec
from autopar.passes.op_groups.reduction_lowering import emitted, first_stage
from autopar.verification import hlo

NAMES = ("x", "y", "z")
SIDE = 64
LETTERS = {NOTHING: ".", ALL_REDUCE: "A", REDUCE_SCATTER: "S", DEFERRED: "D"}
SIGNS = {"-": REPLICATED, "+": PARTIAL}


def parse(text: str) -> Layout:
    return tuple(SIGNS[c] if c in SIGNS else int(c) for c in text)


def codes(source: Layout, target: Layout) -> list[int]:
    ends = {True: REDUCE_SCATTER, False: ALL_REDUCE}
    return [
        NOTHING if s != PARTIAL else DEFERRED if t == PARTIAL else ends[t >= 0]
        for s, t in zip(source, target, strict=True)
    ]


def carried_out(source: Layout, target: Layout, sizes: tuple[int, ...], *, dot: bool = True) -> list[int]:
    row, assigned, held = (np.array([v], np.int16) for v in (codes(source, target), source, target))
    return emitted(row, assigned, held, sizes, dot=dot)[0].tolist()


@pytest.mark.parametrize(
    "line",
    [
        "++ -> 01: SS, first 0-",
        "++ -> 0-: SA, first 0-",
        "++ -> -1: AS, first -1",
        "++ -> --: AA",
        "+- -> 0-: S.",  # one axis needs no stage
        "+++ -> 01-: SAA, first 0--",  # after the first, the others end together
        "+++ -> 012: SAA, first 0--",
        "++- -> 01-: AA.",  # an idle axis
        "++0 -> 1-0: SA., first 1-0",
        "++0 -> 0-0: AA.",  # another axis cuts the dimension
        "+++ -> 01+: none",  # what stays partial
    ],
)
def test_what_becomes_of_sums(line: str) -> None:
    way, _, expected = line.partition(": ")
    source, target = (parse(text) for text in way.split(" -> "))
    sizes = (2, 4) if len(source) == 2 else (2, 2, 2)
    if expected == "none":
        assert first_stage(source, target, sizes) == ()
        return
    carried = "".join(LETTERS[c] for c in carried_out(source, target, sizes))
    stage = first_stage(source, target, sizes)
    signs = {value: sign for sign, value in SIGNS.items()}
    shown = "".join(signs.get(d, str(d)) for d in stage[0]) if stage else ""
    assert f"{way}: {carried}{', first ' + shown if shown else ''}" == line


def test_only_dots_end_in_stages() -> None:
    assert carried_out(parse("++"), parse("01"), (2, 4), dot=False) == [ALL_REDUCE] * 2
    assert carried_out(parse("+-"), parse("0-"), (2, 4), dot=False) == [REDUCE_SCATTER, NOTHING]


def test_an_axis_of_one_device_is_not_idle() -> None:
    assert carried_out(parse("++-"), parse("01-"), (2, 4, 1)) == [REDUCE_SCATTER, REDUCE_SCATTER, NOTHING]


# --- what XLA does ----------------------------------------------------------------------------------------------------


def problems(axes: int) -> Iterator[tuple[Layout, Layout]]:
    """Every way in which a product of two matrices can be cut and its sums end, as the planner allows them."""
    for source in itertools.product((PARTIAL, REPLICATED, 0, 1), repeat=axes):
        for target in itertools.product(*[(REPLICATED, 0, 1) if s == PARTIAL else (s,) for s in source]):
            scattered = [a for a, s in enumerate(source) if s == PARTIAL and target[a] >= 0]
            if PARTIAL in source and not any(target[b] == target[a] for a in scattered for b in range(a + 1, axes)):
                yield source, target


def predicted(source: Layout, target: Layout, sizes: tuple[int, ...]) -> list[tuple[str, tuple[str, ...], int]]:
    """Collectives on CPU, where every reduce-scatter is an all-reduce."""
    held = 4 * SIDE**2 // math.prod(sizes[a] for a, s in enumerate(source) if s >= 0)
    out: list[tuple[str, tuple[str, ...], int]] = []
    ends = carried_out(source, target, sizes)
    for axis, end in enumerate(ends):
        if end == REDUCE_SCATTER:
            out.append(("all-reduce", (NAMES[axis],), held))
            held //= sizes[axis]
    together = tuple(NAMES[axis] for axis, end in enumerate(ends) if end == ALL_REDUCE)
    return sorted([*out, *([("all-reduce", together, held)] if together else [])])


@pytest.mark.parametrize(("sizes", "every"), [((2, 4), 1), ((2, 2, 2), 5)])
def test_xla_adds_up_a_dot_as_it_is_priced(sizes: tuple[int, ...], every: int) -> None:
    names = NAMES[: len(sizes)]
    mesh = jax_compat.auto_mesh(np.array(jax.devices()[:8]).reshape(sizes), names)
    cases = list(problems(len(sizes)))[::every]

    def placed(layout: Layout) -> NamedSharding:
        return NamedSharding(mesh, spec(layout, 2, names))

    def function(*operands: jax.Array) -> list[Any]:
        out: list[Any] = []
        for i, (source, target) in enumerate(cases):
            with jax.named_scope(f"op{i}"):
                result = operands[2 * i] @ operands[2 * i + 1]
                for stop in (*(first_stage(source, target, sizes) or route(source, target, sizes)), target):
                    result = jax.lax.with_sharding_constraint(result, placed(stop))
                out.append(result)
        return out

    contracted = {PARTIAL: 1, 0: 0, 1: REPLICATED, REPLICATED: REPLICATED}
    other = {PARTIAL: 0, 1: 1, 0: REPLICATED, REPLICATED: REPLICATED}
    shardings = [placed(tuple(side[d] for d in source)) for source, _ in cases for side in (contracted, other)]
    arguments = [jax.ShapeDtypeStruct((SIDE, SIDE), np.float32)] * len(shardings)
    outs = [placed(target) for _, target in cases]
    lowered = jax.jit(function, in_shardings=shardings, out_shardings=outs).lower(*arguments)
    compiled = lowered.compile(compiler_options={"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})
    collectives = hlo.collectives(compiled.as_text(), names, sizes)
    for i, (source, target) in enumerate(cases):
        got = sorted((c.kind, c.axes, c.bytes) for c in collectives if c.op == f"op{i}")
        assert got == predicted(source, target, sizes), f"{source} -> {target}"
