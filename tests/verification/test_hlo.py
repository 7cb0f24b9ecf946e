"""HLO text in, collectives out: hand-written fragments first, then what XLA really emits on eight CPU devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.codegen.tags import last_tag
from autopar.errors import MeshError
from autopar.ir.collective import Collective
from autopar.verification.hlo import collectives, unknown_trip_counts

AXES, SIZES = ("x", "y"), (2, 4)


def read(*body: str) -> list[tuple[str, tuple[str, ...], int]]:
    """(kind, axes, bytes) of an entry computation with these instructions."""
    text = "\n".join(["HloModule m", "", "ENTRY %main (p: f32[]) -> f32[] {", *(f"  {line}" for line in body), "}"])
    return [(c.kind, c.axes, c.bytes) for c in collectives(text, AXES, SIZES)]


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "nbytes"),
    [
        ("f32[2,3]{1,0}", 24),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("f64[5]{0}", 40),
        ("pred[7]{0}", 7),
        ("s4[8]{0:E(4)}", 8),
        ("f8e4m3fn[16]{0}", 16),
        ("c64[4]{0}", 32),
        ("f32[]", 4),
    ],
)
def test_bytes_of_a_result(type_: str, nbytes: int) -> None:
    assert read(f"%ar = {type_} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add") == [
        ("all-reduce", ("y",), nbytes)
    ]


Y = "channel_id=1, replica_groups=[2,4]<=[8]"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"%r = (f32[4], /*index=1*/bf16[8]) all-reduce(%a, %b), {Y}", [("all-reduce", 16), ("all-reduce", 16)]),
        (f"%r = f32[4]{{0}} reduce-scatter(%a), {Y}, dimensions={{0}}", [("reduce-scatter", 64)]),
        (f"%r = (f32[4], f32[4], f32[4], f32[4]) all-to-all(%a, %b, %c, %d), {Y}", [("all-to-all", 64)]),
        (f"%r = f32[4,4]{{1,0}} all-to-all(%a), {Y}, dimensions={{0}}", [("all-to-all", 64)]),
        (f"%r = f32[16] ragged-all-to-all(%a), {Y}", [("all-to-all", 64)]),
        (f"%r = f32[16] collective-broadcast(%a), {Y}", [("collective-permute", 64)]),
        (f"%r = (f32[4], f32[16]) all-gather-start(%a), {Y}", [("all-gather", 64)]),
        (
            f"%r = ((f32[4], u8[4]), (f32[16], u8[16])) all-gather-start(%a, %b), {Y}",
            [("all-gather", 64), ("all-gather", 16)],
        ),
        (f"%r = f32[16] all-reduce-start(%a), {Y}, to_apply=%add", [("all-reduce", 64)]),
        (
            f"%r = (f32[16], f32[4]) all-reduce-start(%a, %b), {Y}, to_apply=%add",
            [("all-reduce", 64), ("all-reduce", 16)],
        ),
        (f"%r = ((f32[64]{{0:T(8,128)}}), f32[16]) reduce-scatter-start(%a), {Y}", [("reduce-scatter", 256)]),
        (
            "%r = (f32[16], f32[16], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}",
            [("collective-permute", 64)],
        ),
        ("%r = f32[16] all-gather-done(%s)", []),
        (f'%r = f32[16] custom-call(%a), custom_call_target="all-reduce", {Y}', []),
    ],
)
def test_pieces_of_an_instruction(line: str, expected: list[tuple[str, int]]) -> None:
    assert [(kind, nbytes) for kind, _, nbytes in read(line)] == expected


def test_what_stays_on_one_device_is_left_out() -> None:
    own = "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add"
    assert (
        read(f"%r = f32[16] all-reduce(%p), {own}", "%c = f32[4] collective-permute(%p), source_target_pairs={{0,0}}")
        == []
    )


# --- computations -----------------------------------------------------------------------------------------------------

LOOPS = """\
HloModule m, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%inner_body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %ar = f32[16]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add, metadata={op_name="jit(f)/while/op4/dot"}
}

%inner_condition (p: (s32[], f32[16])) -> pred[] {
  %bound = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] fusion(%i, %bound), kind=kLoop, calls=%less
}

%less (a: s32[], b: s32[]) -> pred[] {
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

%body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %ag = f32[16]{0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %w = (s32[], f32[16]) while(%t), condition=%inner_condition, body=%inner_body
}

%condition (p: (s32[], f32[16])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%branch (p: f32[16]) -> f32[16] {
  ROOT %cp = f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %w = (s32[], f32[16]) while(%t), condition=%condition, body=%body, OPTIONS
  %b = f32[16] conditional(%i, %p, %p), branch_computations={%branch, %add}
  ROOT %c = f32[16] call(%p), to_apply=%branch
}
"""
KNOWN = 'metadata={op_name="jit(f)/op9/while"}, backend_config={"known_trip_count":{"n":"5"},"known_init_step":{}}'


def test_loops_multiply_and_calls_and_branches_are_followed() -> None:
    pieces = collectives(LOOPS.replace("OPTIONS", KNOWN), AXES, SIZES)
    assert pieces == (
        Collective("all-gather", ("y",), 64, 5, "op9"),  # the tag of the loop around it
        Collective("all-reduce", ("y",), 64, 15, "op4"),
        Collective("collective-permute", ("y",), 64, 1),
        Collective("collective-permute", ("y",), 64, 1),
    )


def test_a_loop_without_a_bound_counts_once_and_is_named() -> None:
    text = LOOPS.replace("OPTIONS", "metadata={}")
    assert [c.count for c in collectives(text, AXES, SIZES)][:2] == [1, 3]
    assert unknown_trip_counts(text) == ("w",)
    assert unknown_trip_counts(LOOPS.replace("OPTIONS", KNOWN)) == ()


FUSIONS = """\
%all-reduce-scatter (input: f32[16,8]) -> f32[4,8] {
  %ar = f32[16,8]{1,0:T(8,128)} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %ds = f32[4,8]{1,0} dynamic-slice(%ar, %i, %z), dynamic_slice_sizes={4,8}
}

%fused.1 (p: f32[4]) -> (f32[4], f32[16]) {
  %ag.1 = f32[16]{0} all-gather(%p), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %s = (f32[4], f32[16]) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p: f32[4]) -> f32[16] {
  ROOT %ag.2 = f32[16]{0} all-gather(%p), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
}

%async_computation (p: f32[16]) -> f32[16] {
  ROOT %a2a = f32[16]{0} all-to-all(%p), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}
}

ENTRY %main (p: f32[16,8]) -> f32[4,8] {
  %f = f32[4,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="jit(f)/op3/dot_general"}
  %start = (f32[4], f32[16]) fusion(%q), kind=kCustom, calls=%fused.1
  %step = f32[16] fusion(%q), kind=kOutput, calls=%async_collective_fusion.1
  %as = ((f32[16]), f32[16], u32[]) async-start(%r), calls=%async_computation
  %au = ((f32[16]), f32[16], u32[]) async-update(%as), calls=%async_computation
  ROOT %ad = f32[16] async-done(%au), calls=%async_computation
}
"""


def test_fused_and_asynchronous_collectives_count_once() -> None:
    assert collectives(FUSIONS, AXES, SIZES) == (
        Collective("reduce-scatter", ("y",), 512, 1, "op3"),
        Collective("all-gather", ("y",), 64),
        Collective("all-to-all", ("y",), 64),
    )


CHAIN = """\
%part (p: f32[4]) -> f32[16] {
  ROOT %ag = f32[16]{0} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], frontend_attributes={chain_id="0"}
}

%plain (p: f32[4]) -> f32[16] {
  ROOT %ag = f32[16]{0} all-gather(%p), channel_id=8, replica_groups=[2,4]<=[8]
}

%body (c: f32[4]) -> f32[4] {
  %a = f32[16] fusion(%c), kind=kCustom, calls=%part
  ROOT %b = f32[16] fusion(%c), kind=kCustom, calls=%plain
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = f32[4] while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %last = f32[16] fusion(%p), kind=kCustom, calls=%part
}
"""


def test_an_asynchronous_collective_beside_a_loop_runs_as_often_as_its_outermost_part() -> None:
    assert collectives(CHAIN, AXES, SIZES) == (
        Collective("all-gather", ("y",), 64, 1),
        Collective("all-gather", ("y",), 64, 5),
    )


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("jit(f)/op12/dot_general", "op12"),
        ("jit(f)/op12.in0/sharding_constraint", "op12.in0"),
        ("jit(f)/op1/while/body/op1.in2/op7/add", "op7"),
        ("jit(f)/transpose(jvp(op3))/mul", "op3"),
        ("jit(f)/out3", "out3"),
        ("op5", "op5"),
        ("jit(f)/op7x/stop12/layout3/op/in2", ""),
        ("", ""),
    ],
)
def test_the_innermost_tag_of_a_name(name: str, tag: str) -> None:
    assert last_tag(name) == tag


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ('metadata={op_name="jit(f)/dot" source_file="/home/u/model.py" source_line=31}', "model.py:31"),
        ('metadata={op_name="jit(f)/dot" stack_frame_id=2}', "layers.py:20"),
        ('metadata={op_name="jit(f)/dot" stack_frame_id=9}', ""),
        ("", ""),
    ],
)
def test_source_lines_from_metadata_and_from_frame_tables(metadata: str, source: str) -> None:
    text = f"""HloModule m

FileNames
1 "/home/u/step.py"
2 "/home/u/layers.py"

FunctionNames
1 "step"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=10 end_line=10 column=0 end_column=0}}
2 {{file_name_id=2 function_name_id=1 line=20 end_line=20 column=0 end_column=0}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=1}}

ENTRY %main (p: f32[16]) -> f32[16] {{
  ROOT %ar = f32[16] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add, {metadata}
}}"""
    assert [c.source for c in collectives(text, AXES, SIZES)] == [source]


# --- real programs ----------------------------------------------------------------------------------------------------


def compiled(f: Callable[..., object], shapes: list[tuple[int, ...]], ins: list[P], outs: P) -> tuple[Collective, ...]:
    mesh = jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 2)
    args = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p)) for s, p in zip(shapes, ins, strict=True)
    ]
    text = jax.jit(f, out_shardings=NamedSharding(mesh, outs)).lower(*args).compile().as_text()
    return collectives(text or "", AXES, SIZES)


def double(a: jax.Array) -> jax.Array:
    return a * 2


@pytest.mark.parametrize(
    ("f", "shapes", "ins", "outs", "expected"),
    [
        (jnp.matmul, [(64, 64)] * 2, [P(None, "y"), P("y")], P(), [("all-reduce", ("y",), 16384)]),
        (jnp.matmul, [(64, 64)] * 2, [P(None, ("x", "y")), P(("x", "y"))], P(), [("all-reduce", ("x", "y"), 16384)]),
        (double, [(64, 64)], [P("y")], P(), [("all-gather", ("y",), 16384)]),
        (double, [(64, 64)], [P("x", "y")], P(None, "y"), [("all-gather", ("x",), 4096)]),
        (double, [(64, 64)], [P("y")], P(None, "y"), [("all-to-all", ("y",), 4096)]),
        (double, [(64, 64)], [P(("x", "y"))], P(("y", "x")), [("collective-permute", ("x", "y"), 2048)]),
        (
            lambda a, b, c, d: (a @ b, c @ d),
            [(64, 64), (64, 64), (32, 64), (64, 64)],
            [P(None, "y"), P("y")] * 2,
            P(),
            [("all-reduce", ("y",), 8192), ("all-reduce", ("y",), 16384)],
        ),
    ],
)
def test_what_xla_emits(
    f: Callable[..., object],
    shapes: list[tuple[int, ...]],
    ins: list[P],
    outs: P,
    expected: list[tuple[str, tuple[str, ...], int]],
) -> None:
    assert sorted((c.kind, c.axes, c.bytes) for c in compiled(f, shapes, ins, outs)) == expected


def test_what_xla_emits_for_a_tagged_scan() -> None:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("op7"):
            return jnp.tanh(x @ w), None

    scan = partial(jax.lax.scan, layer)
    pieces = compiled(lambda x, w: scan(x, w)[0], [(64, 64), (5, 64, 64)], [P(None, "y"), P(None, "y")], P(None, "y"))
    assert [(c.kind, c.axes, c.bytes, c.count, c.op) for c in pieces] == [("all-reduce", ("y",), 16384, 5, "op7")]
    assert pieces[0].source.startswith("test_hlo.py:")


def test_axis_names_and_sizes_have_to_agree() -> None:
    with pytest.raises(MeshError, match="differ in number"):
        collectives("", ("x",), (2, 4))
