"""What each device does: counted piece by piece, and with the right reason."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.bench.equal.case import dear
from autopar.cost_models.compiler.backends import CPU
from autopar.ir.trace import trace
from autopar.passes.remat.options import Options
from autopar.plans import imbalance
from autopar.plans.builders.one_mesh import make_plan
from autopar.plans.record import Stage
from autopar.rules import rules_of
from tests.support.traces import traced as zoo_traced


def stage(sizes, values, uses=None):
    names = "xyz"[: len(sizes)]
    return Stage("all", dict(zip(names, sizes, strict=True)), math.prod(sizes), values, uses or {}, {})


def traced(fn, *shapes):
    return trace(fn, *(jax.ShapeDtypeStruct(s, "float32") for s in shapes)).graph


PRODUCT = traced(lambda a, b: a @ b, (8, 4), (4, 10))
RULES = rules_of(PRODUCT)


def of_product(sizes, left, right, result):
    (a, b), (c,) = PRODUCT.inputs, PRODUCT.outputs
    return imbalance.measure(PRODUCT, RULES, stage(sizes, {a: left, b: right, c: result}), CPU)


@given(st.data())
def test_the_ratio_is_what_the_busiest_device_computes(data):
    """Judge: the multiply-adds of device 0, whose pieces are never smaller than another's, counted one by one."""
    sizes = data.draw(st.sampled_from([(2,), (3,), (4,), (6,), (2, 2), (2, 3)]))
    cut = data.draw(st.tuples(*[st.sampled_from("mkn-")] * len(sizes)))  # the factor that each axis cuts
    extents = {"m": 8, "k": 4, "n": 10}
    dims = [tuple({d: i for i, d in enumerate(of)}.get(f, -1) for f in cut) for of in ("mk", "kn", "mn")]
    pieces = {f: math.prod(n for g, n in zip(cut, sizes, strict=True) if g == f) for f in extents}
    mine = [range(-(-n // pieces[f])) for f, n in extents.items()]
    counted = len(list(itertools.product(*mine)))
    expected = counted * math.prod(sizes) / math.prod(extents.values())
    assert of_product(sizes, *dims).ratio == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sizes", "layout", "kind", "why", "ratio"),
    [
        ((6,), (0,), "padded", "8 padded to 12 over 6 devices", 0.5),
        ((6,), (-1,), "indivisible", "whole along x=6", 5.0),
        ((4,), (-1,), "chosen", "whole along x=4, which is cheaper than moving data", 3.0),
        ((2, 3), (0, -1), "indivisible", "whole along y=3", 2.0),
        ((2, 5), (0, -1), "chosen", "whole along y=5, which is cheaper than moving data", 4.0),
        ((5,), (0,), "chosen", "8 padded to 10 over 5 devices", 0.25),
        ((1, 4), (-1, 0), None, "", 0.0),
    ],
)
def test_the_reason_is_in_the_extents(sizes, layout, kind, why, ratio):
    inner = tuple(-1 for _ in sizes)
    measured = of_product(sizes, layout, inner, layout)
    assert [(e.kind, e.why) for e in measured.excesses] == ([(kind, why)] if kind else [])
    assert measured.ratio == pytest.approx(1 + ratio)
    assert measured.avoidable == pytest.approx(ratio if kind == "chosen" else 0)


def test_a_line_names_extents_operations_and_the_user_line():
    (line,) = of_product((6,), (-1,), (-1,), (-1,)).lines()
    assert line.startswith("whole along x=6: 4, 8, 10 do not divide: +5.00 (dot_general; 100% of the FLOPs")
    assert "test_imbalance.py:" in line


def test_padding_and_repetition_multiply():
    measured = of_product((2, 3), (-1, 0), (-1, -1), (-1, 0))  # 8 rows in thirds of 3, on both x: 2 * 9 / 8
    assert measured.ratio == pytest.approx(2.25)
    assert [e.ratio for e in measured.excesses] == pytest.approx([1.125, 0.125])


def test_the_operands_tell_what_a_sum_over_pieces_runs_as():
    """The contracted dimension is cut in four: every device does a quarter, whatever becomes of the partial sums."""
    assert of_product((4,), (1,), (0,), (-1,)).ratio == pytest.approx(1.0)


def test_uses_take_the_place_of_values():
    (a, b), (c,) = PRODUCT.inputs, PRODUCT.outputs
    whole = {a: (-1,), b: (-1,), c: (-1,)}
    (op,) = (o for o in PRODUCT.walk() if o.name == "dot_general")
    measured = imbalance.measure(PRODUCT, RULES, stage((4,), whole, {f"{op.tag}.in0": (0,)}), CPU)
    assert measured.ratio == pytest.approx(1.0)


def test_loops_count_as_often_as_they_run_and_moves_not_at_all():
    def fn(x):
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=9)
        return jnp.cos(y).T

    graph = traced(fn, (4, 6))
    cos = next(o for o in graph.walk() if o.name == "cos")
    whole = {v: (-1,) for op in graph.walk() for v in op.outputs}
    measured = imbalance.measure(graph, rules_of(graph), stage((2,), whole, {f"{cos.tag}.in0": (0,)}), CPU)
    (excess,) = measured.excesses
    assert (excess.ops, excess.part) == (("sin",), pytest.approx(0.9))


def test_many_reasons_become_one_line_and_small_choices_none():
    padded = imbalance.Excess("padded", "p", 0.1, 0.5, ("mul",), (), "")
    many = imbalance.Imbalance(2.0, tuple(replace(padded, why=f"p{i}") for i in range(imbalance.SHOWN + 2)))
    assert many.lines()[-1] == "2 other reasons: +0.20"
    assert len(many.lines()) == imbalance.SHOWN + 1
    assert imbalance.Imbalance(1.0, (replace(padded, kind="chosen", ratio=0.01),)).lines() == ()


@pytest.mark.parametrize("target", ["mlp-toy", "gpt-toy", "llama3-toy", "rnn-toy"])
def test_powers_of_two_on_six_devices_are_padded_not_repeated(target):
    """Nothing of these models divides by 6; updates of the state run in uneven pieces like everything else."""
    mesh = dear((6,)).logical_mesh((6,))
    planned = make_plan(zoo_traced(target), mesh, "dear", Options())
    measured = imbalance.measure(planned.graph, planned.rules, planned.plan.stages[0], CPU)
    assert measured.ratio <= 1.25
    assert measured.excesses[0].kind == "padded"
    assert planned.plan.notes[-1].startswith("more than an even share per device: ")
    assert any("padded to" in note for note in planned.plan.notes)


def layers_of(operation, width):
    """Four layers of this width, each with an operation, and a step of gradient descent."""

    def step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = operation(h @ w)
            return (h**2).mean()

        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    square = jax.ShapeDtypeStruct((width, width), "float32")
    return step, [square] * 4, square


IN_STAGES = {
    "indivisible": (jnp.tanh, 6, r"stage 1: more than an even share per device: whole along x=4: 6 do not divide: \+3"),
    "padded": (jnp.tanh, 7, r"stage 1: more than an even share per device: 7 padded to 8 over 4 devices: \+0"),
    "uncuttable": (
        lambda x: x * jnp.linalg.slogdet(x)[1],
        16,
        r"(every stage|stage \d): lu runs replicated \(\d+ times\): it works on a single matrix",
    ),
}


@pytest.mark.parametrize("case", IN_STAGES.values(), ids=IN_STAGES)
def test_stages_note_what_one_mesh_notes(case):
    operation, width, message = case
    options = {"mesh": (8,), "cluster": dear((8,)), "stages": 2, "num_microbatches": 1}
    notes = autopar.plan(*layers_of(operation, width), **options).notes
    assert any(re.match(message, note) for note in notes), notes
