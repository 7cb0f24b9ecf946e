"""Planned collectives in, what a compiler makes of them out: a line each, on a mesh of x=2 by y=4."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.ir.trace import trace
from autopar.plans.comparison import compare
from autopar.plans.plan import Plan
from autopar.verification import exceptions as known_exceptions
from autopar.verification import lowering
from autopar.verification.dataflow import Context

MESH = (2, 4)
SIGNS = {"-": -1, "+": -2}
WEIGHT, ROWS = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((64, 512), jnp.float32)


def layout(text: str) -> Layout:
    return tuple(SIGNS[c] if c in SIGNS else int(c) for c in text)


def planned(lines: Sequence[str]) -> tuple[Collective, ...]:
    """ "2 x all-gather y 1024 op0.in1": twice, over y, 1024 bytes per device, for operand 1 of operation 0."""
    matches = [re.fullmatch(r"(?:(\d+) x )?(\S+) (\S+) (\d+) (\S+)", line) for line in lines]
    axes = [re.findall(r"\w(?::\(\d+\)\d+)?", m[3]) for m in matches if m]
    return tuple(
        Collective(m[2], tuple(over), int(m[4]), int(m[1] or 1), m[5])
        for m, over in zip(matches, axes, strict=True)
        if m
    )


def text(collectives: Sequence[Collective]) -> list[str]:
    return [f"{c.kind} {''.join(c.axes)} {c.bytes} {c.op}" for c in collectives]


def with_layouts(
    fn: Callable[..., Any],
    args: Sequence[Any],
    lines: Sequence[str],
    *,
    values: Mapping[int, str] | None = None,
    uses: Mapping[str, str] | None = None,
    copies: Mapping[int, str] | None = None,
    free: Sequence[int] = (),
) -> tuple[Plan, Graph]:
    """A plan of these lines; `values` are positions in the printed graph, replicated unless given here or `free`."""
    graph = trace(fn, *args).graph
    layouts = {n: layout(text) for n, text in (values or {}).items()}
    every = {n: layouts.get(n, layout("--")) for n, t in enumerate(graph.types) if t.rank and n not in free}
    plan: Plan = autopar.plan(fn, *args, mesh=MESH)
    stage = replace(
        plan.stages[0],
        values=every,
        uses={site: layout(text) for site, text in (uses or {}).items()},
        copies={n: layout(text) for n, text in (copies or {}).items()},
    )
    return replace(plan, stages=(stage,), collectives=planned(lines)), graph


def converted(
    platform: str, fn: Callable[..., Any], args: Sequence[Any], lines: Sequence[str], **layouts: Any
) -> list[str]:
    """What a platform makes of these lines; `layouts` as in `with_layouts`."""
    plan, graph = with_layouts(fn, args, lines, **layouts)
    return text(lowering.lower_collectives(platform, Context(graph, plan)))


# --- TPU: narrow_types ----------------------------------------------------------------------------------------

GATHER = ["all-gather y 1048576 op0.in1"]


@pytest.mark.parametrize(
    ("what", "fn", "factor"),
    [
        ("a product", lambda x, w: x @ w, 2),
        ("two products", lambda x, w: (x @ w) + (2 * x) @ w, 2),
        ("a product of highest precision", lambda x, w: jnp.dot(x, w, precision="highest"), 1),
        ("a product, and a sum", lambda x, w: (x @ w, w.sum()), 1),
        ("a product, and it is returned", lambda x, w: (x @ w, w), 1),
        ("a product of its transpose", lambda x, w: x @ w.T, 2),
    ],
)
def test_what_only_products_read_is_gathered_in_half_the_bytes(what: str, fn: Callable[..., Any], factor: int) -> None:
    graph = trace(fn, ROWS, WEIGHT).graph
    readers = [f"{op.tag}.in{k}" for op in graph.walk() for k, a in enumerate(op.inputs) if a == graph.inputs[1]]
    leaves = [f"out{i}" for i, a in enumerate(graph.outputs) if a == graph.inputs[1]]
    lines = [f"all-gather y 1048576 {readers[0]}"]
    lowered = converted("tpu", fn, (ROWS, WEIGHT), lines, values={1: "-0"}, uses=dict.fromkeys(readers + leaves, "--"))
    assert lowered == [f"all-gather y {1048576 // factor} {readers[0]}"], what


def test_who_reads_the_value_elsewhere_does_not_count() -> None:
    def fn(x: jax.Array, w: jax.Array) -> Any:
        return x @ w, w * 2  # the second reader takes w where it lies

    assert converted("tpu", fn, (ROWS, WEIGHT), GATHER, values={1: "-0", 3: "-0"}, uses={"op0.in1": "--"}) == [
        "all-gather y 524288 op0.in1"
    ]


def test_bfloat16_stays_what_it_is() -> None:
    args = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in (ROWS, WEIGHT)]
    lines = ["all-gather y 524288 op0.in1"]
    assert converted("tpu", lambda x, w: x @ w, args, lines, values={1: "-0"}, uses={"op0.in1": "--"}) == lines


def test_a_conversion_to_a_narrower_type_comes_before_the_move() -> None:
    def fn(w: jax.Array) -> Any:
        return w.astype(jnp.bfloat16) * 2

    assert converted("tpu", fn, (WEIGHT,), ["all-to-all y 4096 op0.in0"], values={0: "-0"}, uses={"op0.in0": "-1"}) == [
        "all-to-all y 2048 op0.in0"
    ]


def test_what_enters_a_loop_is_read_inside() -> None:
    def fn(x: jax.Array, w: jax.Array) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]

    sites = [f"op0.in{k}" for k in range(2)]
    for value, factor in ((0, 1), (1, 2)):  # x is carried: tanh writes it in full
        graph = trace(fn, ROWS, WEIGHT).graph
        site = sites[graph.ops[0].inputs.index(graph.inputs[value])]
        lowered = converted(
            "tpu", fn, (ROWS, WEIGHT), [f"all-gather y 4096 {site}"], values={value: "-0"}, uses={site: "--"}
        )
        assert lowered == [f"all-gather y {4096 // factor} {site}"]


def test_all_that_go_through_a_shared_copy_decide_on_the_way_to_it() -> None:
    def fn(x: jax.Array, w: jax.Array) -> Any:
        return x @ w, (x * 2) @ w, w.sum()

    ops = trace(fn, ROWS, WEIGHT).graph.ops
    dots = [f"{op.tag}.in1" for op in ops if op.name == "dot_general"]
    (summed,) = (f"{op.tag}.in0" for op in ops if op.name == "reduce_sum")
    lines = [f"all-gather y 4096 {dots[0]}", f"all-gather x 8192 {dots[0]}"]
    uses = {dots[0]: "--", dots[1]: "--", summed: "0-"}
    lowered = converted("tpu", fn, (ROWS, WEIGHT), lines, values={1: "00"}, uses=uses, copies={1: "0-"})
    assert lowered == [lines[0], f"all-gather x 4096 {dots[0]}"]


def test_a_products_sum_is_narrowed_with_its_readers_but_never_its_scatter() -> None:
    def fn(x: jax.Array, w: jax.Array) -> Any:
        return (x @ w) @ w

    lines = ["all-reduce y 131072 op0", "reduce-scatter y 131072 op1"]
    lowered = converted("tpu", fn, (ROWS, WEIGHT), lines, values={3: "-1"})
    assert lowered == ["all-reduce y 65536 op0", lines[1]]


# --- TPU: tiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "onto", "kind"),
    [
        (64, 64, "-0", "reduce-scatter"),
        (32, 64, "-0", "all-reduce"),  # a piece is one tile
        (16, 4096, "-0", "all-reduce"),  # four rows are left
        (16, 4096, "-1", "reduce-scatter"),
    ],
)
def test_sums_are_scattered_in_whole_tiles(rows: int, columns: int, onto: str, kind: str) -> None:
    args = jax.ShapeDtypeStruct((rows, 128), jnp.float32), jax.ShapeDtypeStruct((128, columns), jnp.float32)
    nbytes = 4 * rows * columns
    lowered = converted("tpu", lambda x, w: x @ w, args, [f"reduce-scatter y {nbytes} op0"], values={2: onto})
    assert lowered == [f"{kind} y {nbytes} op0"]


@pytest.mark.parametrize(("width", "kind"), [(256, "all-reduce"), (512, "reduce-scatter")])
def test_sums_are_scattered_in_whole_rows_of_a_tile(width: int, kind: str) -> None:
    args = jax.ShapeDtypeStruct((32, 8, 64), jnp.float32), jax.ShapeDtypeStruct((32, width), jnp.float32)
    nbytes = 4 * 8 * 64 * width
    lines, fn = [f"reduce-scatter y {nbytes} op0"], lambda a, b: jnp.einsum("nhk,nd->hkd", a, b)
    assert converted("tpu", fn, args, lines, values={2: "-2"}) == [f"{kind} y {nbytes} op0"]


def test_the_tiles_are_those_of_what_is_made() -> None:
    """A product that only a transpose reads is made the other way round: its pieces have whole rows then."""
    args = jax.ShapeDtypeStruct((32, 8, 64), jnp.float32), jax.ShapeDtypeStruct((32, 256), jnp.float32)
    nbytes = 4 * 8 * 64 * 256
    lines = [f"reduce-scatter y {nbytes} op0"]

    def gradient(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tensordot(a, b, (0, 0)).transpose(2, 0, 1)

    assert converted("tpu", gradient, args, lines, values={2: "-2", 3: "-0"}) == lines
    assert converted("tpu", gradient, args, lines, values={2: "-2", 3: "--"}) == [f"all-reduce y {nbytes} op0"]


@pytest.mark.parametrize(
    ("wanted", "columns", "kind"),
    [
        ("00", 512, "reduce-scatter"),
        ("11", 512, "reduce-scatter"),
        ("01", 512, "all-reduce"),  # two dimensions
        ("0-", 512, "all-reduce"),  # one axis leaves it whole
        ("00", 8, "all-reduce"),  # a piece is a tile
    ],
)
def test_a_sum_over_all_axes_is_scattered_onto_one_dimension(wanted: str, columns: int, kind: str) -> None:
    sums = jax.ShapeDtypeStruct((64, columns), jnp.float32)
    lines = converted(
        "tpu", lambda a: a * 2, (sums,), ["all-reduce xy 131072 op0.in0"], values={0: "++"}, uses={"op0.in0": wanted}
    )
    assert lines == [f"{kind} xy 131072 op0.in0"]


@pytest.mark.parametrize(("length", "kind"), [(256, "all-reduce"), (512, "all-gather")])
def test_short_vectors_are_gathered_as_sums(length: int, kind: str) -> None:
    args = (jax.ShapeDtypeStruct((length,), jnp.float32),)
    lines = [f"all-gather y {4 * length} op0.in0"]
    lowered = converted("tpu", lambda b: b * 2, args, lines, values={0: "-0"}, uses={"op0.in0": "--"})
    assert lowered == [f"{kind} y {4 * length} op0.in0"]


# --- CPU, GPU, Shardy -------------------------------------------------------------------------------------------------

SUMS = ["reduce-scatter x 1048576 op0", "reduce-scatter y 524288 op0", "all-gather y 4096 op0.in1"]


@pytest.mark.parametrize(
    ("platform", "lines", "result", "expected"),
    [
        ("cpu", SUMS, "01", ["all-reduce x 1048576 op0", "all-reduce y 524288 op0", SUMS[2]]),
        ("gpu", SUMS, "01", SUMS),
        ("shardy", SUMS, "01", ["reduce-scatter xy 1048576 op0", SUMS[2]]),
        ("shardy", [SUMS[0], "all-reduce y 524288 op0"], "0-", ["all-reduce xy 1048576 op0"]),
        ("shardy", [SUMS[0]], "0-", [SUMS[0]]),
    ],
)
def test_sums(platform: str, lines: list[str], result: str, expected: list[str]) -> None:
    lowered = converted(
        platform, lambda x, w: x @ w, (WEIGHT, WEIGHT), lines, values={1: "-0", 2: result}, uses={"op0.in1": "--"}
    )
    assert lowered == expected


@pytest.mark.parametrize(
    ("platform", "operands", "lines", "expected"),
    [
        ("cpu", "01", ["all-reduce xy 1024 op0"], ["all-reduce x 1024 op0", "all-reduce y 1024 op0"]),
        ("cpu", "10", ["3 x all-reduce xy 1024 op0"], ["all-reduce x 1024 op0", "all-reduce y 1024 op0"]),
        ("cpu", "00", ["all-reduce xy 1024 op0"], ["all-reduce xy 1024 op0"]),
        ("cpu", "01", ["all-reduce xy 1024 op0.in0"], ["all-reduce xy 1024 op0.in0"]),
        ("tpu", "01", ["all-reduce xy 1024 op0"], ["all-reduce xy 1024 op0"]),
        ("gpu", "01", ["all-reduce xy 1024 op0"], ["all-reduce xy 1024 op0"]),
        ("shardy", "01", ["all-reduce xy 1024 op0"], ["all-reduce xy 1024 op0"]),
    ],
)
def test_the_compiler_for_cpu_sums_over_one_dimension_after_another(
    platform: str, operands: str, lines: list[str], expected: list[str]
) -> None:
    args = jax.ShapeDtypeStruct((16, 32, 8), jnp.float32), jax.ShapeDtypeStruct((16, 32, 32), jnp.float32)
    lowered = converted(
        platform, lambda x, y: jnp.einsum("bsd,bsf->df", x, y), args, lines, values={0: operands, 1: operands, 2: "--"}
    )
    assert lowered == expected


# --- XLA everywhere ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(("places", "moves"), [(1, 0), (2, 1)])
def test_what_is_one_number_throughout_is_not_moved(platform: str, places: int, moves: int) -> None:
    def fn(at: jax.Array, x: jax.Array) -> jax.Array:
        mask = jnp.zeros((512, places)).at[:, at].add(-0.5, mode="promise_in_bounds")
        return x * mask

    args = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((512, 1), jnp.float32)
    ops = trace(fn, *args).graph.ops
    scatter = next(op for op in ops if op.name.startswith("scatter"))
    site = next(f"{op.tag}.in{op.inputs.index(scatter.outputs[0])}" for op in ops if scatter.outputs[0] in op.inputs)
    lines = [f"all-gather y 2048 {site}"]
    assert converted(platform, fn, args, lines, values={scatter.outputs[0]: "-0"}, uses={site: "--"}) == lines * moves


@pytest.mark.parametrize(
    ("home", "ways", "copies", "left"),
    [
        ("10", ("--", "-0"), {}, [0, 1]),  # x is gathered for both
        ("10", ("--", "0-"), {}, [0, 1, 2]),
        ("10", ("-0", "--"), {}, [0, 2]),
        ("00", ("--", "-0"), {1: "10"}, [0, 1, 2]),  # behind a shared copy, the way to which is planned once
        ("00", ("--", "0-"), {1: "10"}, [0, 1, 2, 3]),
        ("00", ("-0", "--"), {1: "10"}, [0, 1, 3]),
    ],
)
def test_ways_that_begin_alike_share_the_beginning(
    home: str, ways: Sequence[str], copies: Mapping[int, str], left: Sequence[int]
) -> None:
    def fn(x: jax.Array, w: jax.Array) -> Any:
        return x @ w, (2 * x) @ w

    dots = [f"{op.tag}.in1" for op in trace(fn, ROWS, WEIGHT).graph.ops if op.name == "dot_general"]
    steps = {"--": ["x 262144", "y 1048576"], "-0": ["x 262144"], "0-": ["y 524288"]}
    lines = [f"all-to-all x 131072 {dots[0]}"] if copies else []
    lines += [f"all-gather {step} {dot}" for dot, way in zip(dots, ways, strict=True) for step in steps[way]]
    uses = dict(zip(dots, ways, strict=True))
    lowered = converted("cpu", fn, (ROWS, WEIGHT), lines, values={1: home}, uses=uses, copies=copies)
    assert lowered == [lines[k] for k in left]


@pytest.mark.parametrize(("platform", "sums"), [("cpu", 3), ("gpu", 3), ("tpu", 2)])
def test_equal_sums_are_one_on_tpu(platform: str, sums: int) -> None:
    def fn(x: jax.Array) -> Any:
        return x.sum(0), jnp.tanh(x.sum(0)), x.sum(1)

    lines = [f"all-reduce y 2048 {op.tag}" for op in trace(fn, ROWS).graph.ops if op.name == "reduce_sum"]
    assert converted(platform, fn, (ROWS,), lines, values={0: "-1"}) == lines[:1] + lines[4 - sums :]


def test_equal_sums_in_other_layouts_are_two() -> None:
    def fn(x: jax.Array) -> Any:
        return x.sum(0), jnp.tanh(x.sum(0))

    lines = ["all-reduce y 2048 op0", "all-reduce y 512 op1"]
    assert converted("tpu", fn, (ROWS,), lines, values={0: "-0"}, uses={"op1.in0": "10"}) == lines


# --- exceptions -------------------------------------------------------------------------------------------------------


def explained(
    platform: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    mine: Sequence[str],
    theirs: Sequence[str],
    **layouts: Any,
) -> tuple[list[str], list[str], list[tuple[str, int]]]:
    """What no exception explains of either side, and how many collectives each exception explains."""
    plan, graph = with_layouts(fn, args, mine, **layouts)
    comparison = compare(plan.collectives, planned(theirs), dict(zip("xy", MESH, strict=True)))
    left, names = known_exceptions.apply_exceptions(platform, comparison, plan.collectives, Context(graph, plan))
    assert left.ratio == comparison.ratio
    return text(left.predicted_only), text(left.emitted_only), list(names.items())


def test_known_exceptions_are_named_and_cost_what_they_cost() -> None:
    mine = ["reduce-scatter y 4096 op0", "all-gather y 512 op1.in0", "all-gather x 2048 op0.in1"]
    theirs = ["all-reduce y 4096 op0", "all-reduce y 512 op9", "all-to-all x 2048 op2"]

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    predicted, emitted, names = explained("tpu", fn, (ROWS, WEIGHT), mine, theirs)
    assert [count for _, count in names] == [1, 1]
    assert (predicted, emitted) == (mine[2:], theirs[2:])
    assert explained("cpu", fn, (ROWS, WEIGHT), mine, theirs) == (mine, theirs, [])


def test_what_shardy_does_otherwise_has_a_name() -> None:
    """Sums scattered or left whole, padding of 7 rows over 4 devices, an exchange along half of another axis."""

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    uneven = jax.ShapeDtypeStruct((7, 512), jnp.float32)
    mine = [
        "reduce-scatter y 4096 op0",
        "all-reduce x 512 op1",
        "all-gather y 2048 op0.in0",
        "all-to-all x 640 op0.in1",
    ]
    theirs = ["all-reduce y 4096 op0", "reduce-scatter x 512 op1", "all-gather y 1792 op0.in0"]
    theirs = [*theirs, "all-to-all y:(2)2 640 op0.in1"]
    predicted, emitted, names = explained("shardy", fn, (uneven, WEIGHT), mine, theirs)
    assert (predicted, emitted, [count for _, count in names]) == ([], [], [1, 1, 1, 1])
    unexplained = ["all-gather y 1792 op0.in0", "all-gather y 896 op1", "all-to-all y 640 op0.in1"]
    predicted, emitted, _ = explained("shardy", fn, (ROWS, WEIGHT), mine[2:], unexplained)
    assert (predicted, emitted) == (mine[2:], unexplained)


def test_an_unrolled_loop_and_padding_on_shardys_side_have_names() -> None:
    """Five rounds at once or one by one; the sum of a product with 7 columns, of which two devices hold 4."""

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    mine = ["5 x reduce-scatter y 4096 op0", "reduce-scatter x 896 op0"]
    theirs = [*["all-reduce y 4096 op0"] * 5, "reduce-scatter x 1024 op0"]
    args = ROWS, jax.ShapeDtypeStruct((WEIGHT.shape[0], 7), jnp.float32)
    predicted, emitted, names = explained("shardy", fn, args, mine, theirs)
    assert (predicted, emitted, [count for _, count in names]) == ([], [], [5, 1])


@pytest.mark.parametrize(("moved", "left"), [("all-to-all y 128 op0", 0), ("all-reduce y 128 op0", 1)])
def test_what_is_made_of_constants_may_be_moved_by_shardy(moved: str, left: int) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return x + jax.lax.broadcast_in_dim(1.0, x.shape, ())

    _, emitted, names = explained("shardy", fn, (ROWS,), [], [moved], free=(1,))
    assert (len(emitted), [count for _, count in names]) == (left, [1] * (1 - left))
    assert explained("shardy", fn, (ROWS,), [], [moved.replace("op0", "op1")], free=(1,))[2] == []


@pytest.mark.parametrize(
    ("side", "second", "emitted", "unexplained"),
    [
        (1, "-3", 2, 0),
        (1, "-3", 1, 0),  # shared
        (1, "3-", 1, 1),  # another part of the kernel is at hand: this has to be gathered
        (3, "-3", 1, 1),  # the reverse differs
    ],
)
def test_a_kernel_of_one_tap_and_its_reverse_may_be_gathered_once(
    side: int, second: str, emitted: int, unexplained: int
) -> None:
    args = (jax.ShapeDtypeStruct((side, side, 8, 16), jnp.float32),)
    lines = [f"all-gather y 4096 {site}" for site in ("op1.in0", "op2.in0")]
    predicted, rest, names = explained(
        "tpu",
        lambda k: (jax.lax.rev(k, (0, 1)) * 2, k + 1),
        args,
        lines,
        lines[:emitted],
        values={0: "-3", 1: second},
        uses={"op1.in0": "--", "op2.in0": "--"},
    )
    assert (len(predicted), rest) == (unexplained, [])
    assert [count for _, count in names] == [1] * (2 - emitted - unexplained)


@pytest.mark.parametrize(("layouts", "left"), [(("--", "0-"), 0), (("--", "--"), 1)])
def test_a_broadcast_in_two_layouts_may_be_made_once_and_gathered(layouts: Sequence[str], left: int) -> None:
    def fn(x: jax.Array, b: jax.Array) -> Any:
        wide = jax.lax.broadcast_in_dim(b, (64, 512), (1,))
        return x * wide, jnp.tanh(wide)

    args = ROWS, jax.ShapeDtypeStruct((512,), jnp.float32)
    uses = dict(zip(("op1.in1", "op2.in0"), layouts, strict=True))
    _, emitted, names = explained("tpu", fn, args, [], ["all-gather x 131072 op0"], uses=uses, free=(2,))
    assert len(emitted) == left
    assert [count for _, count in names] == [1] * (1 - left)
