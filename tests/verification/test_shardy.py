"""StepPrograms for abstract meshes in, collectives out; and the same programs compiled on eight CPU devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import TraceError
from autopar.plans.comparison import compare
from autopar.verification import hlo
from autopar.verification.shardy import collectives, partition

AXES, SIZES = ("x", "y"), (2, 4)
MESH = AbstractMesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 2)
Arg = tuple[tuple[int, ...], P]


def on(*spec: object, mesh: AbstractMesh = MESH) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def lower(
    f: Callable[..., object], args: list[Arg], outs: P, mesh: AbstractMesh = MESH, dtype: str = "float32"
) -> jax.stages.Lowered:
    avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, spec in args]
    return jax.jit(f, out_shardings=NamedSharding(mesh, outs)).trace(*avals).lower(lowering_platforms=("cpu",))


def read(
    f: Callable[..., object], args: list[Arg], outs: P, mesh: AbstractMesh = MESH, dtype: str = "float32"
) -> list[tuple[str, tuple[str, ...], int]]:
    return [(c.kind, c.axes, c.bytes) for c in collectives(partition(lower(f, args, outs, mesh, dtype)))]


def copy(a: jax.Array) -> jax.Array:
    return a + a


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (P("y"), P(), [("all-gather", ("y",), 16384)]),
        (P("x", "y"), P(), [("all-gather", ("x", "y"), 16384)]),
        (P(("x", "y")), P("x"), [("all-gather", ("y",), 8192)]),
        (P("y"), P(None, "y"), [("all-to-all", ("y",), 4096)]),
        (P(("x", "y")), P(("y", "x")), [("collective-permute", ("x", "y"), 2048)]),
        (P("x"), P("y"), [("collective-permute", ("x", "y"), 4096)]),
        (P(), P("x", "y"), []),
        (P("x"), P("x", "y"), []),
    ],
)
def test_a_change_of_layout(before: P, after: P, expected: list[tuple[str, tuple[str, ...], int]]) -> None:
    def f(a: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(copy(a), NamedSharding(MESH, before)) * 1.5

    def g(a: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(f(a), NamedSharding(MESH, after))

    assert read(g, [((64, 64), before)], after) == expected


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (P(), [("all-reduce", ("y",), 16384)]),
        (P("x"), [("all-reduce", ("y",), 8192)]),
        (P(None, "y"), [("reduce-scatter", ("y",), 16384)]),
        (P("x", "y"), [("reduce-scatter", ("y",), 8192)]),
    ],
)
def test_partial_sums(out: P, expected: list[tuple[str, tuple[str, ...], int]]) -> None:
    rows = P(out[0] if len(out) else None, "y")
    assert read(jnp.matmul, [((64, 64), rows), ((64, 64), P("y"))], out) == expected


@pytest.mark.parametrize(
    ("dtype", "item"),
    [("bfloat16", 2), ("float16", 2), ("int8", 1), ("bool", 1), ("uint32", 4), ("complex64", 8), ("float8_e4m3fn", 1)],
)
def test_bytes_of_every_number_format(dtype: str, item: int) -> None:
    assert read(lambda a: a.T, [((8, 6), P("y"))], P(), dtype=dtype) == [("all-gather", ("y",), 48 * item)]


def test_double_precision_counts_eight_bytes() -> None:
    with jax.enable_x64(True):
        assert read(copy, [((8, 6), P("y"))], P(), dtype="float64") == [("all-gather", ("y",), 384)]


def test_a_dim_that_does_not_divide_counts_its_padding() -> None:
    def f(a: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(a[:5] * 2, on("y", "x"))

    # the shards of a dim of 5 over 4 devices have two rows each
    pieces = read(lambda a: lax.with_sharding_constraint(f(a), on("y")), [((8, 6), P("y"))], P())
    assert ("all-gather", ("x",), 2 * 6 * 4) in pieces


def scanned(x: jax.Array, ws: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        def twice(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope("op7"):
                return lax.with_sharding_constraint(jnp.tanh(x @ w), on(None, "y")), None

        x = lax.scan(twice, x, None, length=3)[0]
        with jax.named_scope("op3.in1"):
            return lax.with_sharding_constraint(lax.with_sharding_constraint(x, on("y")), on(None, "y")), None

    return lax.scan(layer, x, ws)[0]


def test_loops_multiply_and_locations_name_the_operation() -> None:
    lowered = lower(scanned, [((64, 64), P(None, "y")), ((5, 64, 64), P(None, "y"))], P(None, "y"))
    pieces = collectives(partition(lowered))
    assert [(c.kind, c.count, c.op) for c in pieces if c.kind == "reduce-scatter"] == [("reduce-scatter", 15, "op7")]
    assert [(c.count, c.op) for c in pieces if c.kind == "all-to-all"] == [(5, "op3.in1")] * 2
    assert all(c.source.startswith("test_shardy.py:") for c in pieces)


def test_a_loop_of_unknown_length_counts_once() -> None:
    def f(a: jax.Array, n: jax.Array) -> jax.Array:
        return lax.fori_loop(0, n[0].astype(int), lambda _, a: lax.with_sharding_constraint(a @ a, on("y")), a)

    pieces = collectives(partition(lower(f, [((64, 64), P("y")), ((1,), P())], P("y"))))
    assert [(c.kind, c.count) for c in pieces] == [("all-gather", 1)]


def test_the_lowered_program_stays_as_it_was() -> None:
    lowered = lower(copy, [((64, 64), P("y"))], P())
    before = lowered.as_text()
    first = partition(lowered)
    assert lowered.as_text() == before
    assert "sdy.all_gather" in str(first)
    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module)
    assert collectives(partition(module)) == collectives(first)


def test_a_mesh_of_512_devices_needs_no_device() -> None:
    mesh = AbstractMesh((8, 16, 4), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    args = [((1024, 512), P("a", ("b", "c"))), ((512, 2048), P(("b", "c")))]
    assert read(jnp.matmul, args, P("a"), mesh) == [("all-reduce", ("b", "c"), 128 * 2048 * 4)]


def test_a_program_that_shardy_rejects_is_named() -> None:
    lowered = lower(copy, [((64, 64), P("y"))], P())
    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module)
    with module.context:
        grouped = ir.Module.parse(
            """
            func.func @main(%a: tensor<8xf32>, %b: tensor<4xf32>) -> tensor<8xf32> {
              sdy.sharding_group %a group_id=0 : tensor<8xf32>
              sdy.sharding_group %b group_id=0 : tensor<4xf32>
              return %a : tensor<8xf32>
            }
            """
        )
    with pytest.raises(
        TraceError, match=r"sdy-propagation-pipeline\) rejects the program: .*\n.* must have the same shape"
    ):
        partition(grouped)


# --- the same program compiled ----------------------------------------------------------------------------------------


def megatron(w1: jax.Array, w2: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradient step of a two-layer MLP: columns of w1 and rows of w2 over y, batch over x."""

    def loss(ws: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden = jax.nn.relu(x @ ws[0])
        return jnp.mean((hidden @ ws[1] - x) ** 2)

    g1, g2 = jax.grad(loss)((w1, w2))
    return w1 - 0.1 * g1, w2 - 0.1 * g2


def test_a_megatron_mlp_compiles_to_what_shardy_predicts() -> None:
    specs = [P(None, "y"), P("y"), P("x")]
    shapes = [(64, 256), (256, 64), (32, 64)]

    def lowered(mesh: AbstractMesh | jax.sharding.Mesh) -> jax.stages.Lowered:
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        avals = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=n) for s, n in zip(shapes, shardings, strict=True)]
        traced = jax.jit(megatron, out_shardings=tuple(shardings[:2])).trace(*avals)
        return traced.lower(lowering_platforms=("cpu",)) if isinstance(mesh, AbstractMesh) else traced.lower()

    predicted = collectives(partition(lowered(MESH)))
    concrete = jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 2)
    emitted = hlo.collectives(lowered(concrete).compile().as_text() or "", AXES, SIZES)
    # one sum of activations over y, and of each shard of the two gradients over x
    expected = [("all-reduce", ("x",), 16384)] * 2 + [("all-reduce", ("y",), 4096)]
    assert sorted((c.kind, c.axes, c.bytes) for c in predicted) == expected
    result = compare(predicted, emitted, dict(zip(AXES, SIZES, strict=True)), reduce_scatter_as_all_reduce=True)
    assert (result.matched, result.predicted_only, result.emitted_only, result.ratio) == (3, (), (), 1.0)
