"""The printed form of graphs and its reader: round trips, what is left out, and what each mistake says."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar import jax_compat
from autopar.bench.fuzz import program
from autopar.bench.fuzz.generator import generate
from autopar.errors import GraphTextError
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.text.parser import parse
from autopar.ir.trace import trace
from autopar.rules import rules_of
from autopar.zoo import TOYS, build
from tests.programs import random_programs
from tests.support.effort import sample
from tests.support.traces import traced

pytestmark = pytest.mark.core


def assert_equal(left: Graph, other: Graph) -> None:
    """Equal in all that passes read."""
    assert str(left) == str(other)
    assert left.types == other.types
    assert left.effects == other.effects
    pairs = list(zip(left.walk(), other.walk(), strict=True))
    assert [(a.index, a.tag, a.trips, str(a.name_stack)) for a, _ in pairs] == [
        (b.index, b.tag, b.trips, str(b.name_stack)) for _, b in pairs
    ]
    classes = {(a.signature, b.signature) for a, b in pairs}
    assert len(classes) == len({b for _, b in classes}), "equal operations are no longer equal"
    assert {(a.signature, b.signature) for a, b in pairs if not a.regions} == {
        (a.signature, b.signature) for a, b in pairs if not b.regions
    }
    for a, b in pairs:
        assert a.params.keys() == b.params.keys()
        assert bool(a.equation.effects) == bool(b.equation.effects)
        shapes = [[(v.aval.shape, v.aval.dtype) for v in (*e.invars, *e.outvars)] for e in (a.equation, b.equation)]
        assert shapes[0] == shapes[1]
    for (_, a), (_, b) in zip(left.constants, other.constants, strict=True):
        np.testing.assert_array_equal(a, b)


#: Between them they have every kind of operation and of region.
KEPT = ("gpt-toy-scan-remat", "moe-toy", "resnet-toy", "unet-toy", "speech-toy", "rnn-toy", "flax-linen-toy")


@pytest.mark.parametrize("name", sample(TOYS, KEPT))
def test_toys_are_read_as_they_were_traced(name: str) -> None:
    graph = traced(name).graph
    parsed = parse(str(graph))
    assert_equal(graph, parsed)
    assert graph_hash(graph) == graph_hash(parsed)


#: Types of parameters that have no written form, in random programs.
REFUSED = ("function", "_LinearSolveTuple", "DotsSaveable", "Primitive")


def test_random_programs_are_read_as_they_were_traced() -> None:
    read = 0
    with jax.enable_x64(True):
        for seed in range(12):
            drawn = generate.program(seed)
            step = program.load(drawn.source(), seed)
            graph = trace(step.function, *step.arguments).graph
            refusal = next((reason for reason in REFUSED if f"opaque('{reason}')" in str(graph)), None)
            if refusal is None:
                assert_equal(graph, parse(str(graph)))
                read += 1
                continue
            with pytest.raises(GraphTextError, match=f"a {refusal} has no written form"):
                parse(str(graph))
    assert read >= 9


def test_rules_of_a_parsed_graph_are_those_of_the_traced_one() -> None:
    for seed in range(6):
        drawn = random_programs.program(seed)
        graph = trace(drawn.step, *drawn.args).graph
        again = parse(str(graph))
        traced, parsed = rules_of(graph), rules_of(again)
        for a, b in zip(graph.walk(), again.walk(), strict=True):
            assert traced.get(a.signature) == parsed.get(b.signature)


def written(text: str) -> str:
    return dedent(text).lstrip()


# What the text may leave out


def test_defaults_and_comments_are_left_out() -> None:
    graph = parse("""
        # a comment
        graph(%0: f32[2,3] "x") {
          %7: f32[3,2] = transpose[permutation=(1, 0)](%0)
          %8: f32[6] = reshape(%7)
          %9: bf16[6] = convert_element_type(%8)  # update
          return %9 "y"
        }
    """)
    assert str(graph) == written("""
        graph(%0: f32[2,3] "x") {
          %7: f32[3,2] = transpose[permutation=(1, 0)](%0)  # forward
          %8: f32[6] = reshape(%7)  # forward
          %9: bf16[6] = convert_element_type(%8)  # update
          return %9 "y"
        }
    """)
    assert graph.ops[1].params == {"new_sizes": (6,), "dimensions": None, "sharding": None}


def test_shardings_are_written_without_devices() -> None:
    mesh = jax_compat.auto_mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    pinned = NamedSharding(mesh, PartitionSpec("x", None))
    graph = trace(lambda a: jax.lax.with_sharding_constraint(a, pinned), jnp.ones((4, 4))).graph
    assert "NamedSharding({'x': 2, 'y': 2}, P('x', None))" in str(graph)
    parsed = parse(str(graph))
    assert_equal(graph, parsed)
    assert parsed.ops[0].params["sharding"].spec == pinned.spec


def test_jaxprs_among_parameters_are_blocks() -> None:
    # JAX 0.12 has no open jaxprs
    text = written("""
        graph(%0: f32[8] "x", %1: i32[2,1] "i", %2: f32[2] "u") {
          %3: f32[8] = scatter-add[update_jaxpr=open0, dimension_numbers=ScatterDimensionNumbers(update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)), mode=GatherScatterMode.CLIP](%0, %1, %2)  # forward
            open0(%0: f32[], %1: f32[]) {
              %2: f32[] = mul(%1, 2.0:f32[])
              %3: f32[] = add(%0, %2)
              return %3
            }
          return %3 "y"
        }
    """).replace("open0", "jaxpr0" if jex.Jaxpr is jex.ClosedJaxpr else "open0")  # noqa: E501
    graph = parse(text)
    assert str(graph) == text
    assert [e.primitive.name for e in graph.ops[0].params["update_jaxpr"].eqns] == ["mul", "add"]


def test_a_parsed_program_runs_as_the_traced_one() -> None:
    graph = parse("""
        graph(%0: f32[4] "x") {
          %5: f32[4] = scan[num_consts=0, num_carry=1](%0) x3
            body(%1: f32[4]) {
              %2: f32[4] = mul(%1, 2.0:f32[])
              return %2
            }
          return %5 "y"
        }
    """)
    (total,) = jax_compat.bind(graph.ops[0].equation, [jnp.ones(4)])
    np.testing.assert_array_equal(total, np.full(4, 8.0))


def test_a_plan_of_a_parsed_graph_is_that_of_the_traced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mlp-toy")
    plan = autopar.plan(model.step, *model.abstract_args(), mesh=(2, 4))
    real, reads = autopar.ir.jaxpr.build_graph, []

    def through_text(*args: Any) -> Graph:
        reads.append(1)
        return parse(str(real(*args)))

    monkeypatch.setattr("autopar.ir.trace.build_graph", through_text)
    again = autopar.plan(model.step, *model.abstract_args(), mesh=(2, 4))
    assert reads
    assert (again.graph_hash, again.step_time_s) == (plan.graph_hash, plan.step_time_s)
    assert [s.values for s in again.stages] == [s.values for s in plan.stages]


# Mistakes

MISTAKES = (
    ("graph(%0: f32[4] 'x') {", "line 1: expected string, found '''"),
    ('graph(%0: g32[4] "x") {', "line 1: data type 'g32' not understood"),
    ('graph(%0: f32[4] "x") {\n%1: f32[4] = sin(%0)', "line 2: expected return or an operation, found 'the end'"),
    ('graph(%0: f32[4] "x") {\n%1: f32[4] = sine(%0)', "line 2: no operation of JAX is called 'sine'"),
    ('graph(%0: f32[4] "x") {\n\n%1: f32[4] = sin(%3)', "line 3: %3 is not defined"),
    ('graph(%0: f32[4] "x") {\n%0: f32[4] = sin(%0)', "line 2: %0 is defined in line 1 already"),
    ('graph(%0: f32[4] "x") {\n%1: f32[8] = sin(%0)', "line 2: sin gives f32[4], not f32[8]"),
    ('graph(%0: f32[4] "x") {\n%1: f32[4] = add(%0)', "line 2: add does not fit its operands: "),
    ('graph(%0: f32[4] "x") {\n%1: f32[4] = transpose(%0)', "line 2: transpose does not fit its operands: "),
    ('graph(%0: f32[4] "x") {\n%1: f32[] = reduce_sum[axes=f(3)](%0)', "line 2: reduce_sum: parameter 'axes': 'f'"),
    ('graph(%0: f32[4] "x") {\n%1: f32[4] = sin(%0)  # sideways', "line 2: 'sideways' is no phase"),
    ('graph(%0: f32[4] "x") {\n%1: f32[4] = sin[accuracy=opaque("X")](%0)', "line 2: sin: parameter 'accuracy': a X"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[m.partition(": ")[2][:40] for _, m in MISTAKES])
def test_mistakes_are_told_with_their_line(text: str, message: str) -> None:
    end = '\nreturn %1 "y"\n}' if "the end" not in message else ""
    with pytest.raises(GraphTextError) as caught:
        parse(text + end)
    assert str(caught.value).startswith(message)


def test_a_callback_has_no_written_form() -> None:
    graph = trace(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4,), "float32"), x), jnp.ones(4)).graph
    with pytest.raises(GraphTextError, match=r"line 2: pure_callback: parameter 'callback': a \w+ has no written form"):
        parse(str(graph))
