"""`debug_nans`: the operation, line, stage and microbatch that made a NaN, and what is none of its business."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from autopar.errors import NanError
from tests.support.source_lines import line

ONE_MESH: Mapping[str, Any] = {"mesh": (2,)}
MICROBATCHES: Mapping[str, Any] = {"mesh": (2,), "num_microbatches": 4}
STAGES: Mapping[str, Any] = {"mesh": (2,), "stages": 2, "num_microbatches": 4, "schedule": "1f1b"}
EXAMPLES, WIDTH = 8, 4


def logarithm(w: Any, x: Any) -> Any:
    return jnp.log(x.sum(-1) + w.sum())  # NaN where the sum is below zero


def masked_logarithm(w: Any, x: Any) -> Any:
    total = x.sum(-1) + w.sum()
    return jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1.0)), 0.0)


def unguarded_mask(w: Any, x: Any) -> Any:
    total = x.sum(-1) + w.sum()
    return jnp.where(total > 0, jnp.sqrt(total), 0.0)  # its derivative is NaN, masked or not


def in_a_scan(w: Any, x: Any) -> Any:
    def layer(x: Any, shift: Any) -> Any:
        return jnp.sqrt(x - shift), None  # NaN in the third iteration

    return jax.lax.scan(layer, jnp.abs(x) + 1.0, jnp.array([0.0, 0.0, 9.0, 0.0]) + 0 * w.sum())[0].sum(-1)


def in_a_branch(w: Any, x: Any) -> Any:
    return jax.lax.cond(x.sum() < 0, lambda: jnp.arccos(x - 9), lambda: x).sum(-1) * w.sum()  # not in [-1, 1]


def in_a_while(w: Any, x: Any) -> Any:
    def body(carry: Any) -> Any:
        i, x = carry
        return i + 1, jnp.log(x - 1)  # below zero after some iterations

    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.abs(x) + 1.5))[1].sum(-1) * w.sum()


def of_a_constant(w: Any, x: Any) -> Any:
    return (x * np.array([1.0, np.nan, 1.0, 1.0], np.float32) + w).sum(-1)  # a constant


def behind_a_callback(w: Any, x: Any) -> Any:
    same = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
    return jnp.log(same.sum(-1) + w.sum())  # NaN behind a callback


def beside_a_callback(w: Any, x: Any) -> Any:
    total = io_callback(np.asarray, jax.ShapeDtypeStruct((), x.dtype), jax.lax.stop_gradient(x.sum()))
    return jnp.log(x.sum(-1) + w.sum()) + total  # NaN beside a callback


def of_a_callback(w: Any, x: Any) -> Any:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    rows = jax.pure_callback(lambda x: np.full_like(x, np.nan), like, jax.lax.stop_gradient(x))  # made by the host
    return rows.sum(-1) + w.sum()


def difference_of_infinities(w: Any, x: Any) -> Any:
    large = jnp.exp(jnp.abs(x) * 1e4)
    return (large - 2 * large).sum(-1) + w.sum()  # infinity minus infinity


def trained(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A train step of two layers with this loss of examples."""

    def step(params: Any, x: Any) -> Any:
        def mean(params: Any) -> Any:
            return loss(params["b"], x @ params["a"]).mean()

        value, gradient = jax.value_and_grad(mean)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient), value

    return step


def arguments(example: int = 5) -> tuple[Any, Any]:
    """Parameters, and a batch of which the sum of one example is below zero."""
    x = np.ones((EXAMPLES, WIDTH), np.float32)
    x[example] = -4.0
    return {"a": np.eye(WIDTH, dtype=np.float32), "b": np.zeros(WIDTH, np.float32)}, x


def error_of(loss: Callable[[Any, Any], Any], options: Mapping[str, Any]) -> str:
    """The message of the NanError of a step."""
    step = autopar.parallelize(trained(loss), debug_nans=True, progress=False, **options)
    with pytest.raises(NanError) as caught:
        step(*arguments())
    return str(caught.value)


def marked(text: str) -> str:
    """The line of this file with a text."""
    return line(sys.modules[__name__], f"# {text}")


@pytest.mark.parametrize("options", [ONE_MESH, MICROBATCHES], ids=["one mesh", "microbatches"])
@pytest.mark.parametrize(
    ("loss", "text", "operation", "cause"),
    [
        (logarithm, "NaN where the sum", "log", "no operand holds NaN"),
        (unguarded_mask, "its derivative", r"(mul|div|sqrt|rsqrt)", "an operand is infinite|no operand holds NaN"),
        (of_a_constant, "a constant", "broadcast_in_dim", "it reads a constant that holds NaN"),
        (in_a_scan, "NaN in the third", "sqrt", "no operand holds NaN"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_the_line_of_the_operation_that_made_a_nan(
    loss: Callable[[Any, Any], Any], text: str, operation: str, cause: str, options: Mapping[str, Any]
) -> None:
    message = error_of(loss, options)
    loop = r", iteration 2 of the loop at test_nans\.py:\d+" if loss is in_a_scan else ""
    microbatch = r"(, microbatch \d of 4)?" if options is MICROBATCHES else ""
    pattern = rf"{operation} at {re.escape(marked(text))} gives NaN{microbatch}{loop}: ({cause})"
    assert re.fullmatch(pattern, message), message


@pytest.mark.parametrize(
    ("loss", "text", "operation"),
    [(in_a_branch, "not in", "acos"), (in_a_while, "below zero", "log")],
    ids=["cond", "while"],
)
def test_bodies_of_branches_and_loops(loss: Callable[[Any, Any], Any], text: str, operation: str) -> None:
    step = autopar.parallelize(lambda w, x: loss(w, x), debug_nans=True, **ONE_MESH)
    with pytest.raises(NanError, match=rf"^{operation} at {re.escape(marked(text))} gives NaN"):
        step(np.ones(WIDTH, np.float32), -np.ones((EXAMPLES, WIDTH), np.float32))


@pytest.mark.parametrize(
    ("loss", "text", "operation"),
    [
        (behind_a_callback, "NaN behind", "log"),
        (beside_a_callback, "NaN beside", "log"),
        (of_a_callback, "made by the host", "pure_callback"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_a_step_with_a_callback(loss: Callable[[Any, Any], Any], text: str, operation: str) -> None:
    assert error_of(loss, ONE_MESH) == f"{operation} at {marked(text)} gives NaN: no operand holds NaN"


def test_an_operand_that_is_infinite_is_said() -> None:
    message = error_of(difference_of_infinities, ONE_MESH)
    assert message == f"sub at {marked('infinity minus')} gives NaN: an operand is infinite"


def test_the_microbatch_of_one_mesh() -> None:
    """Each device divides its own examples, so that microbatch 1 has the second of the four of either device."""
    assert ", microbatch 1 of 4: " in error_of(logarithm, MICROBATCHES)


def test_the_stage_and_the_microbatch_of_a_pipeline() -> None:
    message = error_of(logarithm, STAGES)
    assert message == (
        f"stage 0, microbatch 2, in F0.2: log at {marked('NaN where the sum')} gives NaN: no operand holds NaN"
    )


@pytest.mark.parametrize("options", [ONE_MESH, STAGES], ids=["one mesh", "stages"])
def test_what_a_mask_drops_is_no_error(options: Mapping[str, Any]) -> None:
    step = trained(masked_logarithm)
    params, x = arguments()
    ours = autopar.parallelize(step, debug_nans=True, **options)(params, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(step(params, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("options", [ONE_MESH, STAGES], ids=["one mesh", "stages"])
def test_arguments_with_nan_are_named_and_nothing_is_donated(options: Mapping[str, Any]) -> None:
    step = autopar.parallelize(trained(masked_logarithm), debug_nans=True, **options)
    params, x = arguments()
    state, _ = step(params, x)
    with pytest.raises(NanError, match=r"^results of the step are NaN because of NaN in 'x'$"):
        step(state, np.full_like(x, np.nan))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    step(state, x)


def test_as_jax_s_own_setting_is() -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"^log at test_nans\.py:\d+ gives NaN"):
        autopar.parallelize(trained(logarithm), **ONE_MESH)(*arguments())


def test_without_it_a_step_returns_nan() -> None:
    _, loss = autopar.parallelize(trained(logarithm), **ONE_MESH)(*arguments())
    assert np.isnan(loss)


def test_a_nan_that_is_made_is_named_beside_one_that_an_argument_has() -> None:
    step = autopar.parallelize(lambda w, x: (w + 1, jnp.log(x)), debug_nans=True, **ONE_MESH)
    with pytest.raises(NanError, match=r"^log at test_nans\.py:\d+ gives NaN: no operand holds NaN$"):
        step(np.full(WIDTH, np.nan, np.float32), -np.ones((EXAMPLES, WIDTH), np.float32))


def test_a_constant_with_nan_that_is_returned_is_named() -> None:
    step = autopar.parallelize(lambda x: (x * 2, np.float32("nan")), debug_nans=True, **ONE_MESH)
    with pytest.raises(NanError, match=r"because of NaN in a constant$"):
        step(np.ones(WIDTH, np.float32))
