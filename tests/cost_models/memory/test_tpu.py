"""What XLA's TPU compiler fuses, rounds and lays out, as the memory model has it; programs small enough to count."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.bench.predictions import run as predictions
from autopar.cost_models.compiler.backends import GPU, TPU, Backend
from autopar.cost_models.compiler.compiled_program import Program, Step
from autopar.cost_models.compiler.flatten import flatten
from autopar.cost_models.compiler.fusion import LOOP
from autopar.cost_models.compiler.lifetimes import lifetimes
from autopar.cost_models.compiler.written_values import Written, written
from autopar.cost_models.memory.delayed_products import Waiting
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.sizes import Sizes
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.trace import trace
from autopar.passes.remat.options import Options
from autopar.plans.builders.one_mesh import Planned, make_plan

WHOLE = 128 * 128 * 4  # bytes of one array of these programs
PLAIN = replace(TPU, near_bytes=0.0, fragmentation=1.0)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X = array(128, 128)


def flattened(fn: Callable[..., Any], args: Sequence[Any], backend: Backend = TPU) -> tuple[Program, Written]:
    program = flatten(trace(fn, *args).graph, backend, {})
    return program, written(program)


def products(program: Program) -> list[Step]:
    return [s for frame in program.top.walk() for s in frame.steps if s.name == "dot_general"]


def planned(fn: Callable[..., Any], args: Sequence[Any], mesh: tuple[int, ...] = (1,), **options: Any) -> Planned:
    cluster = Cluster.custom(mesh, 1e-6, 1e-11, {"float32": 1e12}, 1e12, 2**34)
    return make_plan(trace(fn, *args), cluster.logical_mesh(mesh), "custom", Options(**options))


def liveness(planned_step: Planned, mesh: tuple[int, ...] = (1,), backend: Backend = PLAIN) -> Liveness:
    logical = Cluster.custom(mesh, 1e-6, 1e-11, {"float32": 1e12}, 1e12, 2**34).logical_mesh(mesh)
    return Liveness(planned_step.graph, planned_step.model, logical, backend, planned_step.plan.donated)


def masked(x: Any, w: Any, m: Any) -> Any:
    y = jnp.where(m > 0.0, x @ w, 0.0)
    return (y @ w).max(), (w @ y).max()


def added(x: Any, w: Any) -> Any:
    y = x @ w + w @ x
    return jnp.exp(y).sum(), (2.0 * y).max()


def read_twice(x: Any, w: Any, m: Any) -> Any:
    z = x @ w
    y = jnp.where(m > 0.0, z, 0.0)
    return (y @ w).max(), (w @ y).max(), z.sum()


def returned(x: Any, w: Any, m: Any) -> Any:
    z = x @ w
    return z, jnp.where(m > 0.0, z, 0.0)


@pytest.mark.parametrize(
    ("fn", "count", "absorbed"),
    [(masked, 3, 1), (added, 2, 1), (read_twice, 3, 0), (returned, 3, 0)],
)
def test_a_product_writes_what_alone_is_made_of_it(fn: Callable[..., Any], count: int, absorbed: int) -> None:
    """Two products are added in the kernel of one of them; what is read or returned besides is written."""
    program, w = flattened(fn, [X] * count)
    absorbed_products = [s for s in products(program) if s.outputs[0] not in w.values]
    assert len(absorbed_products) == absorbed
    assert sorted(w.absorbed) == sorted(s.outputs[0] for s in absorbed_products)
    assert all(end in w.values for end in w.absorbed.values())
    assert not flattened(fn, [X] * count, GPU)[1].absorbed


def test_the_kernel_of_an_absorbed_product_runs_once_and_counts_as_a_product() -> None:
    program, w = flattened(masked, [X] * 3)
    moments = lifetimes(program, w).moments
    kernels = [s for s in moments if w.has_product(s)]
    assert [s.name for s in kernels] == ["select_n", "dot_general", "dot_general"]
    outputs = {v for s in moments for v in s.outputs}
    assert all(product not in outputs for product in w.absorbed)
    assert w.inner[id(kernels[0])] == set(trace(masked, X, X, X).graph.inputs[:2])


def test_gradients_are_summed_before_an_update_reads_them() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.sin(x @ w).sum())(w)

    _, w = flattened(step, [X, X])
    assert not w.absorbed


def test_a_masked_product_is_one_array_and_half_of_one_where_products_alone_read_it() -> None:
    """Beside the arguments, at the first product: what its kernel writes."""
    planned_step = planned(masked, [X] * 3)
    for narrows, arrays in ((False, 1.0), (True, 0.5)):
        lives = liveness(planned_step, backend=replace(PLAIN, narrows=narrows))
        first = next(t for t, step in enumerate(lives.moments) if step.name == "select_n")
        assert lives.profile(planned_step.solution.assignment)[first] == pytest.approx(arrays * WHOLE)


@pytest.mark.parametrize("out", [P(), P("x")])
def test_what_a_product_is_summed_to_is_whole_before_its_kernel_goes_on(out: P) -> None:
    """Half of the contracted dimension on each device: an all-reduce, of which a half may be kept, and the mask."""
    planned_step = planned(lambda x, w, m: jnp.where(m > 0.0, x @ w, 0.0), [X] * 3, (2,), pins={
        "arg:0": P(None, "x"), "arg:1": P("x"), "arg:2": out, "out:0": out,
    })  # fmt: skip
    lives = liveness(planned_step, (2,))
    sizes = lives.sizes(planned_step.solution.assignment).tolist()
    assert [n for b, n in zip(lives.buffers, sizes, strict=True) if b.what == "unsummed"] == [WHOLE]


# Loops


def stacks(x: Any, w: Any) -> Any:
    """Products alone read the first stack; the second is read by arithmetic whose result products read."""

    def body(c: Any, _: Any) -> Any:
        c = jnp.sin(c @ w)
        return c, (c, jnp.cos(c))

    _, (first, second) = jax.lax.scan(body, x, None, length=4)
    return (first @ w).max(), ((second * second) @ w).max()


def test_what_a_loop_stacks_is_rounded_where_products_read_it_as_it_is() -> None:
    program, w = flattened(stacks, [X, X])
    loop = next(s for s in program.top.steps if s.kind == LOOP)
    stacked = [v for v in loop.outputs if program.type_of(v).rank == 3]
    assert [v in w.narrow for v in stacked] == [True, False]


def test_what_a_loop_stacks_is_stored_as_soon_as_it_is_made() -> None:
    def fn(x: Any, w: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            early = jnp.exp(c @ w)
            return jnp.sin(early @ w) @ w, early

        return jax.lax.scan(body, x, None, length=4)

    for early in (False, True):
        program, w = flattened(fn, [X, X], replace(TPU, stores_early=early))
        lives = lifetimes(program, w)
        store = next(t for t, step in enumerate(lives.moments) if step.kind == "store")
        (stored,) = program.stacked.values()
        written_until = max(lives.death[v] for v in w.sources[stored])
        assert (written_until < store) == early


def test_a_loop_makes_what_is_broadcast_for_it_in_its_body() -> None:
    """A mask that every iteration reads is no array of its own; what the loop starts from is."""

    def fn(x: Any, w: Any, m: Any) -> Any:
        mask, start = jnp.broadcast_to(m, (128, 128)), jnp.broadcast_to(m[:1], (128, 128))

        def body(c: Any, _: Any) -> Any:
            return jnp.where(mask > 0.0, c @ w, x), None

        return jax.lax.scan(body, start, None, length=4)[0]

    written_broadcasts = {}
    for backend in (GPU, TPU):
        program, w = flattened(fn, [X, X, array(128)], backend)
        broadcasts = [s for s in program.top.steps if s.name == "broadcast_in_dim"]
        written_broadcasts[backend.name] = sum(s.outputs[0] in w.values for s in broadcasts)
    assert written_broadcasts == {"gpu": 2, "tpu": 1}


def assert_never_more_and_somewhere_less(planned_step: Any, less: Any, more: Any) -> None:
    """Under random layouts: at no moment more bytes, at some moment fewer."""
    rng = np.random.default_rng(0)
    changes: list[Any] = []
    for _ in range(5):
        assignment = np.array([rng.integers(len(n.cost)) for n in planned_step.model.problem.nodes], np.int64)
        changes.append(more.profile(assignment) - less.profile(assignment))
    assert min(change.min() for change in changes) >= 0.0
    assert max(change.max() for change in changes) > 0.0


def test_what_two_products_fetch_alike_is_counted_once_between_them() -> None:
    """Half on either reader: all of it where both fetch it, for any layouts never less than without."""
    model, mesh = zoo.build("mlp-toy", layers=2, batch=4096), (8,)
    planned_step = planned(model.step, model.abstract_args(), mesh)
    alone, merged = (liveness(planned_step, mesh, replace(PLAIN, merges_fetches=merges)) for merges in (False, True))
    assert_never_more_and_somewhere_less(planned_step, alone, merged)


# Tiles of 8 x 128


def batched(x: Any, y: Any) -> Any:
    return jnp.einsum("bik,bkj->bij", x, y)


def held_of_the_result(planned_step: Any) -> float:
    """Bytes of the buffer of the first result."""
    lives = liveness(planned_step)
    sizes = lives.sizes(planned_step.solution.assignment)
    return next(n for b, n in zip(lives.buffers, sizes, strict=True) if b.value == planned_step.graph.outputs[0])


def test_products_of_a_batch_are_tiled_behind_the_batch() -> None:
    """32 columns fill a quarter of a row of tiles; were the batch in the rows, nothing would be padded."""
    planned_step = planned(batched, [array(128, 16, 16), array(128, 16, 32)])
    assert held_of_the_result(planned_step) == pytest.approx(128 * 16 * 32 * 4 * 4)


def test_a_stack_has_the_layout_of_what_is_stored() -> None:
    def fn(x: Any, y: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            s = batched(c, y)
            return c + 1.0, s

        return jax.lax.scan(body, x, None, length=2)[1]

    planned_step = planned(fn, [array(128, 16, 16), array(128, 16, 32)])
    assert held_of_the_result(planned_step) == pytest.approx(2 * 128 * 16 * 32 * 4 * 4)


def test_rows_gathered_for_products_keep_their_width_in_rows() -> None:
    """Rows of 32 columns, rounded to half their bytes and padded fourfold."""

    def fn(table: Any, tokens: Any, w: Any) -> Any:
        return (table[tokens] @ w).max()

    planned_step = planned(fn, [array(64, 32), jax.ShapeDtypeStruct((1024,), jnp.int32), array(32, 32)])
    lives = liveness(planned_step)
    sizes = lives.sizes(planned_step.solution.assignment).tolist()
    rows_bytes = [
        n for b, n in zip(lives.buffers, sizes, strict=True) if planned_step.graph.types[b.value].shape == (1024, 32)
    ]
    assert rows_bytes[0] == pytest.approx(1024 * 32 * 2 * 4)


# Copies


def test_parameters_gathered_for_products_are_not_held_for_their_updates() -> None:
    """Random layouts of a transformer on eight devices: never more at any moment, less in some."""
    model, mesh = zoo.build("gpt-toy"), (8,)
    planned_step = planned(model.step, model.abstract_args(), mesh)
    early, late = (liveness(planned_step, mesh, replace(PLAIN, updates_read_pieces=pieces)) for pieces in (True, False))
    assert_never_more_and_somewhere_less(planned_step, early, late)


def test_an_array_that_arithmetic_reads_too_is_not_rounded_while_products_read_it() -> None:
    """What the blocks of an MLP add up, read by a sum and by two products: one array, whole to the last of them."""
    model, mesh, batch = zoo.build("mlp-toy", layers=3, batch=65536), (8,), 65536
    planned_step = planned(model.step, model.abstract_args(), mesh)
    lives = liveness(planned_step, mesh)
    sums = {op.outputs[0] for op in planned_step.graph.walk() if op.name == "add" and op.phase == "forward"}
    sums = {v for v in sums if planned_step.graph.types[v].shape == (batch, 32)}
    sizes = lives.sizes(planned_step.solution.assignment).tolist()
    held = {v: [(b, n) for b, n in zip(lives.buffers, sizes, strict=True) if b.value == v and n > 0] for v in sums}
    for sized in filter(None, held.values()):
        last = max(b.death for b, _ in sized)
        assert sum(n for b, n in sized if b.birth <= last <= b.death) == pytest.approx(batch // 8 * 32 * 4)
    assert sum(map(bool, held.values())) == 2


@pytest.mark.parametrize(("reads", "nbytes"), [("product", 2), ("product and sum", 4)])
def test_a_copy_that_a_loop_reads_is_rounded_where_products_read_it(reads: str, nbytes: int) -> None:
    """Its weight is gathered once, before the loop: as large as it is, in bfloat16 or in float32."""

    def fn(w: Any, x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            return jnp.sin(c @ w) + (w.sum(0) if reads == "product and sum" else 0.0), None

        return jax.lax.scan(body, x, None, length=4)[0]

    pins = {"arg:0": P(("x",)), "arg:1": P(("x",))}
    args = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((65536, 512), jnp.float32)
    plan = autopar.plan(fn, *args, mesh={"x": 8}, cluster="tpu-v5e", pins=pins)
    (gather,) = [c for c in plan.collectives if c.kind == "all-gather"]
    assert gather.count == 1
    wide = autopar.plan(fn, *args, mesh={"x": 8}, cluster=unrounded("tpu-v5e"), pins=pins)
    assert plan.stages[0].memory["resharding"] == pytest.approx(512 * 512 * nbytes, rel=0.2)
    assert (plan.objective_s < wide.objective_s) == (nbytes == 2)


def unrounded(name: str) -> Cluster:
    """A preset whose backend rounds no operands before it moves them."""
    preset = Cluster.preset(name)
    return replace(preset, device=replace(preset.device, rounds_operands=False))


@pytest.mark.parametrize(("start", "is_sum"), [(0.0, True), (1.0, False)])
def test_what_a_loop_adds_up_is_added_as_soon_as_it_is_made(start: float, is_sum: bool) -> None:
    """So what the product for it reads is kept no longer. A carry that starts otherwise waits until the body's end."""

    def fn(w: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            part = x.T @ x
            y = jnp.sin(jnp.sin(x @ w) @ w) @ w
            return total + part, y.sum()

        return jax.lax.scan(body, jnp.full((256, 256), start, jnp.float32), xs)

    graph = trace(fn, array(256, 256), array(4, 1024, 256)).graph
    program = flatten(graph, TPU, {})
    moments = lifetimes(program, written(program)).moments
    (added,) = [
        i for i, step in enumerate(moments) if step.name == "add" and step.op.outputs[0] in graph.bodies[1].outputs
    ]
    products = [i for i, step in enumerate(moments) if step.name == "dot_general"]
    assert (added < max(products)) == is_sum


# Products that wait


def chain(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = jnp.sin(h @ w)
        return h.sum()

    return [w - 0.1 * d for w, d in zip(weights, jax.grad(loss)(weights), strict=True)]


def rated(flops: float, mesh: tuple[int, ...]) -> LogicalMesh:
    return Cluster.custom(mesh, 1e-6, 1e-11, {"float32": flops}, 1e15, 2**34).logical_mesh(mesh)


def test_products_made_before_a_gather_wait_as_long_as_it_takes() -> None:
    """The third cotangent: two gradients are made before it; each reads a whole array and one that is rounded."""
    planned_step = planned(chain, [[X] * 4, X])
    program, w = flattened(chain, [[X] * 4, X], PLAIN)
    lives = lifetimes(program, w)
    makers = {v: step for step in lives.moments for v in step.outputs}
    rate = 1e12
    sizes = Sizes(planned_step.graph, planned_step.model, rated(rate, (1,)), PLAIN, program, w, lives, makers)
    urgent = [t for t, s in enumerate(lives.moments) if s.op.phase == "backward" and s.name == "dot_general"]
    gathered = next(t for t in urgent if t not in lives.late)
    product = 2 * 128**3 / rate
    assert [t in lives.late for t in urgent] == [True, True, False, True, True]
    for seconds, groups in ((0.0, 0), (0.9 * product, 1), (1.1 * product, 2), (1.0, 2)):
        kept = list(Waiting(sizes).kept(gathered, seconds))
        assert [k.nbytes for k in kept] == [1.5 * WHOLE] * groups
        assert [k.seconds for k in kept] == pytest.approx([0.0, product][:groups])
        assert [k.birth for k in kept] == [t + 1 for t in reversed(urgent[:2])][:groups]
    assert not list(Waiting(sizes).kept(urgent[0], 1.0))  # nothing urgent happens there


def test_fewer_products_wait_where_they_take_longer() -> None:
    model, mesh = zoo.build("mlp-toy", layers=4, batch=4096), (8,)
    planned_step = planned(model.step, model.abstract_args(), mesh)
    fast, slow = (
        Liveness(planned_step.graph, planned_step.model, rated(f, mesh), PLAIN, planned_step.plan.donated)
        for f in (1e15, 1e6)
    )
    assert_never_more_and_somewhere_less(planned_step, slow, fast)


# The compiler


def test_the_prediction_holds_for_the_compiler() -> None:
    """The free plan of a toy whose hidden layers are masked in the kernels of products; compiled, not run."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu): nothing here compiles for tpu:v5e:2x4")
    spec = {"model": "equinox-toy", "sizes": {"batch": 8388608}, "mesh": (8,), "target": "tpu:v5e:2x4"}
    row = next(iter(predictions.rows(spec)))
    assert row["plan"] == "free"
    assert row["predicted_arguments"] == pytest.approx(row["compiled_arguments"], rel=0.01)
    assert -predictions.BELOW <= row["error"] <= predictions.MOST
