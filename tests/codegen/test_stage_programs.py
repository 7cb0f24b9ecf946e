"""StepPrograms of a planned stage: between them arrays lie in even pieces, and each takes only what is there."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import jax_compat
from autopar.api import parallelize
from autopar.codegen.stages.programs import StageEmitter, even, program_interfaces
from autopar.ir.layout import cuts, divides
from autopar.passes.stages.divide import PASS_KINDS
from tests.passes.stages.test_cost import mesh, plans_of
from tests.programs.steps import array, sgd
from tests.programs.test_real_programs import assert_equal


@given(st.data())
def test_even_layouts_divide_and_keep_what_does(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    layout = tuple(data.draw(st.integers(-2, len(shape) - 1)) for _ in sizes)
    evened = even(layout, shape, sizes)
    assert divides(evened, shape, sizes)
    assert all(a == b or b == -1 for a, b in zip(layout, evened, strict=True))
    assert evened == layout or not divides(layout, shape, sizes)
    assert math.prod(cuts(evened, sizes).values()) <= math.prod(cuts(layout, sizes).values())


def test_what_programs_take_is_given_before() -> None:
    """In the order in which they run; what passes take whole is there before all of them."""
    on = mesh((2, 2), beta=1e-10)
    for plan in plans_of("gpt-toy", on, weights=True).plans:
        emitter = StageEmitter(plan, jax_compat.auto_abstract_mesh(on.sizes, on.names))
        names = list(plan.graph.programs)
        atoms = [a for v in plan.graph.completed_in if isinstance(a := plan.graph.local[v], int)]
        totals = {kind: [a for a in atoms if plan.graph.maker[a] == kind] for kind in PASS_KINDS}
        interfaces = program_interfaces(emitter, {}, totals)
        arguments = {(v, None) for v in plan.graph.graph.inputs}
        for i, name in enumerate(names):
            earlier = {key for other in names[:i] for key in interfaces.writes[other]}
            assert {*interfaces.reads[name]} <= arguments | earlier
            for value, copy in interfaces.reads[name]:
                shape = plan.graph.graph.types[value].shape
                assert divides(emitter.layout((value, copy)), shape, on.sizes)
        assert interfaces.writes["F"]


def test_arrays_of_partial_sums_have_dimensions_in_front() -> None:
    plans = plans_of("mlp-toy", mesh((4,), beta=1e-9))
    for plan in plans.plans:
        emitter = StageEmitter(plan, jax_compat.auto_abstract_mesh((4,), ("x",)))
        for v in plan.graph.completed_in:
            key = (plan.graph.local[v], None)
            if -2 in (plan.layout(key[0]) or ()):  # pyright: ignore[reportArgumentType]
                assert emitter.lead(key) == (4,)  # pyright: ignore[reportArgumentType]
                assert emitter.sharding(key).spec[0] == "x"  # pyright: ignore[reportArgumentType]


def test_a_received_value_may_be_another_of_its_stage() -> None:
    """Its conversion to its own type is no operation in the program of the stage: both are one array."""

    def step(w: jax.Array, batch: dict[str, jax.Array]) -> Any:
        loops = jax.vmap(lambda n: jax.lax.while_loop(lambda c: c < n, lambda c: c + 1, 0))(batch["n"])
        hidden = jnp.tanh(batch["x"] @ w)
        return jnp.tensordot(batch["x"], 1 - hidden * hidden, ((0,), (0,))), jnp.prod(loops, dtype=loops.dtype)

    with jax.enable_x64(True):
        args = array(3, 5), {"x": array(8, 3), "n": jnp.arange(8) % 3 + 1}
        run = parallelize(step, mesh=(2,), stages=2, batch_argnums=1, donate_argnums=())
        assert run.plan(*args).num_microbatches > 1
        assert_equal(run(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("policy", ["dots", "full"])
def test_a_loop_over_time_that_needs_the_whole_batch_is_rewritten_in_stages_too(policy: str) -> None:
    """Time comes first, so that no dimension of the batch is cut, and the loop runs outside of microbatches."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            def cell(h: jax.Array, x: jax.Array) -> Any:
                gate, value = jnp.split(jnp.concatenate([x, h], 1) @ params["w"], 2, 1)
                h = jax.nn.sigmoid(gate) * jnp.tanh(value)
                return h, jnp.sin(h)

            _, hidden = jax.lax.scan(cell, jnp.zeros((8, 16)), batch["x"])
            return jnp.mean((jnp.tanh(hidden @ params["u"]) @ params["o"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads), value

    args = {"w": array(32, 32), "u": array(16, 16), "o": array(16, 4)}, {"x": array(12, 8, 16), "y": array(12, 8, 4)}
    run = parallelize(step, mesh=(2,), stages=2, remat=policy, donate_argnums=())
    assert run.plan(*args).num_microbatches == 1
    assert_equal(run(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("apply", [lambda body: body, jax.checkpoint], ids=["kept", "recomputed"])
def test_an_auxiliary_loss_is_carried_through_the_layers_of_all_stages(apply: Any) -> None:
    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(carry: Any, w: jax.Array) -> Any:
            hidden = jnp.tanh(carry[0] @ w)
            return (carry[0] + hidden, carry[1] + jnp.mean(hidden**2)), None

        (x, extra), _ = jax.lax.scan(apply(layer), (x, 0.0), params)
        return jnp.mean(x**2) + 0.1 * extra, extra

    def step(params: Any, x: jax.Array) -> Any:
        values, grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        return sgd(params, grads), values

    args = array(4, 8, 8), array(8, 8)
    run = parallelize(step, mesh=(2,), stages=2, num_microbatches=2, donate_argnums=())
    assert_equal(run(*args), jax.jit(step)(*args))
