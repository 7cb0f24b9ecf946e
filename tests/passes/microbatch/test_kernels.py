"""Pallas kernels in microbatches: random kernels, models with kernels, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import find, given, settings
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention

import autopar
from autopar import jax_compat
from autopar.bench.equal.case import dear
from autopar.errors import MicrobatchError
from autopar.ir.graph import Op
from autopar.ir.trace import trace
from autopar.passes.microbatch.loop import StepPrograms, slice_block
from autopar.passes.microbatch.rules import kernels
from autopar.passes.microbatch.rules.table import apply_table
from autopar.passes.microbatch.rules.types import Operands, RuleResult
from autopar.passes.microbatch.split import split
from autopar.passes.microbatch.states import INVARIANT, SUM, Invariant, Split, State, is_divisible
from autopar.rules import pallas
from tests.passes.microbatch.test_exactness import in_loop, in_microbatches
from tests.rules import kernels as samples
from tests.rules.kernels import Kernel, array, call_of, matmul
from tests.rules.test_random_kernels import FIRST, random_kernels

pytestmark = pytest.mark.core

QUICK = dict(jax_compat.quick_compilation())


# The rule on its own


def operands_in(op: Op, args: Sequence[Any], states: Sequence[State], count: int) -> Operands:
    shapes = tuple(tuple(v.aval.shape) for v in op.equation.outvars)
    return Operands(op, tuple(x.shape for x in args), shapes, tuple(states), count)


def states_of(x: Any, count: int) -> list[State]:
    splits = [Split(d, outer) for d in range(x.ndim) for outer in (1, 2)]
    return [INVARIANT, *(s for s in splits if x.size and is_divisible(x.shape, s, count))]


def accepted(kernel: Kernel) -> Iterator[tuple[int, Sequence[State], RuleResult]]:
    """Numbers of microbatches, and states of the operands, in which a kernel runs on blocks."""
    op = call_of(kernel)
    for count in (2, 4):
        for states in itertools.product(*(states_of(x, count) for x in kernel[1])):
            if not all(isinstance(s, Invariant) for s in states):
                result = apply_table(operands_in(op, kernel[1], states, count))
                if result is not None:
                    yield count, states, result


def assert_blocks_are_those_of_the_whole(kernel: Kernel, most: int = 4) -> int:
    """The number of ways in which the kernel runs on blocks, at most `most` of which are run."""
    op = call_of(kernel)
    ways = list(accepted(kernel))
    run = ways[:: max(1, len(ways) // most)][:most]

    @partial(jax.jit, compiler_options=QUICK)
    def blocks_and_whole(*args: Any) -> Any:
        whole = jax_compat.bind(op.equation, args)
        pairs: list[tuple[Any, Any]] = []
        for count, states, result in run:
            read = {i: s for i, s in enumerate(states) if isinstance(s, Split)} | dict(result.slices)
            equation = op.equation.replace(params={**op.params, **result.params})
            for k in range(count):
                parts = [slice_block(x, read[i], count, k) if i in read else x for i, x in enumerate(args)]
                expected = [slice_block(x, s, count, k) for x, s in zip(whole, result.results, strict=True)]
                pairs.append((jax_compat.bind(equation, parts), expected))
        return pairs

    for ours, theirs in blocks_and_whole(*kernel[1]):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    return len(ways)


@pytest.mark.parametrize("name", samples.CUT)
def test_kernels_that_are_cut_over_devices_run_in_microbatches(name: str) -> None:
    assert assert_blocks_are_those_of_the_whole(samples.CUT[name][0]()) > 0


@pytest.mark.parametrize("name", samples.REFUSED)
def test_kernels_that_are_not_cut_do_not(name: str) -> None:
    make, why = samples.REFUSED[name]
    kernel = make()
    assert list(accepted(kernel)) == []
    op = call_of(kernel)
    largest = max(range(len(kernel[1])), key=lambda i: kernel[1][i].size)
    states = [Split(0) if i == largest else INVARIANT for i in range(len(kernel[1]))]
    assert why in kernels.refusal(operands_in(op, kernel[1], states, 2))


REFUSALS: dict[str, tuple[Callable[[], Kernel], tuple[State, ...], int, str]] = {
    "a total": (samples.twice, (SUM,), 2, "operand 0 is a total over the batch"),
    "half of a block": (samples.twice, (Split(0),), 8, "grid axis 0: its 4 blocks do not divide into 8 microbatches"),
    "blocks of each of two parts": (
        samples.twice, (Split(0, 2),), 4, "its 4 blocks do not divide into 4 microbatches in each of 2 parts"
    ),
    "a dimension in one block": (
        samples.twice, (Split(1),), 2, "no grid axis counts blocks of dimension 1 of operand 0"
    ),
    "a contraction": (
        lambda: (matmul, (array(32, 32), array(32, 16))), (Split(1), Split(0)), 2, "it accumulates over this axis"
    ),
    "rows and columns": (
        lambda: (matmul, (array(32, 32), array(32, 16))), (Split(0), Split(1)), 2, "cut along different grid axes"
    ),
    "prefetched numbers": (
        samples.prefetched_scale, (Split(0), INVARIANT), 2, "no grid axis counts blocks of dimension 0 of operand 0"
    ),
    "a grid of run time": (
        samples.dynamic_grid, (INVARIANT, Split(0)), 2, "no grid axis counts blocks of dimension 0 of operand 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_states_in_which_a_kernel_does_not_run_on_blocks(name: str) -> None:
    make, states, count, why = REFUSALS[name]
    kernel = make()
    op = call_of(kernel)
    operands = operands_in(op, kernel[1], states, count)
    assert apply_table(operands) is None
    assert why in kernels.refusal(operands)


@settings(max_examples=20)
@given(random_kernels())
def test_random_kernels_in_microbatches_are_the_whole(kernel: Kernel) -> None:
    assert_blocks_are_those_of_the_whole(kernel)


def test_some_random_kernels_run_in_microbatches_with_scratch_memory() -> None:
    def is_wanted(kernel: Kernel) -> bool:
        op = call_of(kernel)
        return len(op.params["jaxpr"].invars) > 3 and any(accepted(kernel))

    assert assert_blocks_are_those_of_the_whole(find(random_kernels(), is_wanted, settings=FIRST)) > 0


@pytest.mark.parametrize("name", [*samples.CARELESS.split("; ")[:3], "a written operand", "half of a block"])
def test_a_rule_that_looks_less_closely_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that takes any axis whose numbers a dimension depends on, however many blocks it has."""

    def any_axis(operands: Operands) -> pallas.GridAxis | str:
        first, state = next((i, s) for i, s in enumerate(operands.states) if isinstance(s, Split))
        axes = [axis for axis in pallas.grid_axes(operands.params) if axis.dims[first] == state.dim]
        return axes[0] if axes else "none"

    plain = pallas.grid_axes
    monkeypatch.setattr(kernels, "_grid_axis", any_axis)
    monkeypatch.setattr(
        pallas, "grid_axes", lambda params: tuple(pallas.GridAxis(a.size, a.dims, "") for a in plain(params))
    )
    kernel = samples.of_rows(samples.identity, grid=(1,)) if name == "half of a block" else samples.REFUSED[name][0]()
    with pytest.raises((AssertionError, ValueError, TypeError)):
        assert_blocks_are_those_of_the_whole(kernel)


# Models


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return matmul(x, w)


product.defvjp(lambda x, w: (matmul(x, w), (x, w)), lambda kept, g: (matmul(g, kept[1].T), kept[0].T @ g))


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.tanh(product(x, w))


def unrolled(ws: jax.Array, x: jax.Array) -> jax.Array:
    return layer(layer(x, ws[0]), ws[1])


def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]


def recomputed(ws: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), jax.checkpoint(layer)(x, ws[0]), ws[1:])[0]


def branched(ws: jax.Array, x: jax.Array) -> jax.Array:
    for w in ws:
        x = jax.lax.cond(w[0, 0] > 0, layer, lambda x, w: x, x, w)
    return x


def added_to_the_batch(ws: jax.Array, x: jax.Array) -> jax.Array:
    """A kernel of parameters whose result is read in blocks."""
    rows = jnp.broadcast_to(jnp.sin(ws[0, :1]), x.shape)
    return unrolled(ws, x + product(rows, ws[1]))


def train_step(model: Callable[..., Any]) -> Callable[..., Any]:
    def step(ws: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda ws: jnp.square(model(ws, x)).mean())(ws)
        return jax.tree.map(lambda w, g: w - g, ws, gradients), loss

    return step


def small() -> tuple[jax.Array, jax.Array]:
    return array(2, 16, 16) / 10, array(32, 16) / 10


def assert_close(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(jnp.abs(b).max()))


def divided_step(step: Callable[..., Any], args: Sequence[Any], count: int) -> StepPrograms:
    """The step in microbatches of its last argument."""
    traced = trace(step, *args)
    return StepPrograms(split(traced.graph, count, [len(traced.in_avals) - 1]))


@pytest.mark.parametrize(
    ("model", "count"),
    [(unrolled, 2), (scanned, 2), (scanned, 4), (recomputed, 4), (branched, 2), (added_to_the_batch, 4)],
)
def test_models_with_kernels_are_the_undivided_step(model: Callable[..., Any], count: int) -> None:
    step, args = train_step(model), small()
    programs = divided_step(step, args, count)
    outside = [op.name for p in (*programs.split.prologue, *programs.split.epilogue) for op in p.op.walk()]
    assert "pallas_call" in in_loop(programs.split)
    assert "pallas_call" not in outside
    both = jax.jit(lambda *args: (programs.step(args), jax.tree.leaves(step(*args))), compiler_options=QUICK)
    assert_close(*both(*args))


@pytest.mark.parametrize("model", [unrolled, scanned, branched])
def test_a_kernel_that_does_not_run_on_blocks_is_named(model: Callable[..., Any]) -> None:
    why = "does not run on a part of the batch: grid axis 0: its 4 blocks do not divide into 8 microbatches"
    with pytest.raises(MicrobatchError, match=rf"pallas_call at \w+\.py:\d+ {why}") as error:
        divided_step(train_step(model), small(), 8)
    assert "per_microbatch" not in str(error.value)


def test_a_registered_rule_does_not_say_how_a_kernel_runs_on_a_part() -> None:
    """It says how XLA may cut the whole call; blocks follow what is derived from the kernel."""

    def check() -> None:
        autopar.register_rule("pallas_call", "a b -> a b")
        for make, runs in ((samples.REFUSED["program_id"][0], False), (samples.twice, True)):
            kernel = make()
            divided, got, expected = in_microbatches(kernel[0], *kernel[1])
            assert ("pallas_call" in in_loop(divided)) == runs
            np.testing.assert_array_equal(got, expected)

    copy_context().run(check)


def test_kernels_with_a_registered_rule_in_microbatches_and_over_devices() -> None:
    step, args = train_step(unrolled), small()

    def run() -> Any:
        autopar.register_rule("pallas_call", "a k, k b -> a b | keep k")
        return autopar.parallelize(step, mesh=(2,), cluster=dear((2,)), num_microbatches=2, donate_argnums=())(*args)

    assert_close(copy_context().run(run), jax.jit(step)(*args))


# Plans

BATCH, HEADS, SEQ, WIDTH = 4, 4, 128, 8


def transformer(params: Any, x: jax.Array) -> jax.Array:
    for p in params:
        q, k, v = (jnp.einsum("bsd,dhk->bhsk", x, p[name]) for name in "qkv")
        heads = flash_attention.flash_attention(q, k, v, causal=True, sm_scale=0.3)
        x = x + jnp.einsum("bhsk,hkd->bsd", heads, p["o"])
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
    return x


def transformer_arguments() -> tuple[Any, jax.Array]:
    shapes = dict.fromkeys("qkv", (WIDTH, HEADS, WIDTH)) | {"o": (HEADS, WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    rng = np.random.default_rng(0)
    params = [{name: jnp.asarray(rng.normal(size=shape) / 3, "f4") for name, shape in shapes.items()} for _ in range(2)]
    return params, jnp.asarray(rng.normal(size=(BATCH, SEQ, WIDTH)), "f4")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Any]:
    """What one device gives; in all tests that ask for it, kernels are interpreted."""
    with pltpu.force_tpu_interpret_mode(True):  # pyright: ignore[reportArgumentType]
        yield jax.jit(train_step(transformer))(*transformer_arguments())


Schedule = Literal["gpipe", "1f1b", "zb-h1"]


@pytest.mark.parametrize(("mesh", "count"), [((2,), 4), ((2, 4), 2)])
def test_flash_attention_in_microbatches_and_over_devices(interpreted: Any, mesh: tuple[int, ...], count: int) -> None:
    step, args = train_step(transformer), transformer_arguments()
    parallel = autopar.parallelize(step, mesh=mesh, cluster=dear(mesh), num_microbatches=count, donate_argnums=())
    plan = parallel.plan(*args)
    assert not any("pallas_call" in note for note in plan.notes)
    assert_close(parallel(*args), interpreted)


@pytest.mark.parametrize(("count", "schedule"), [(4, "1f1b"), (2, "zb-h1")])
def test_flash_attention_in_stages(interpreted: Any, count: int, schedule: Schedule) -> None:
    options: dict[str, Any] = {"stages": 2, "num_microbatches": count, "schedule": schedule, "cluster": dear((2,))}
    args = transformer_arguments()
    parallel = autopar.parallelize(train_step(transformer), mesh=(2,), donate_argnums=(), **options)
    assert len(parallel.plan(*args).stages) == 2
    assert_close(parallel(*args), interpreted)


@pytest.mark.parametrize(("model", "schedule"), [(unrolled, "gpipe"), (scanned, "zb-h1")])
def test_kernels_in_stages(model: Callable[..., Any], schedule: Schedule) -> None:
    step, args = train_step(model), small()
    options: dict[str, Any] = {"stages": 2, "num_microbatches": 2, "schedule": schedule, "cluster": dear((2, 2))}
    parallel = autopar.parallelize(step, mesh=(2, 2), donate_argnums=(), **options)
    assert_close(parallel(*args), jax.jit(step)(*args))
