"""Checkpoints of steps that scan over their layers and of steps that do not are restored into each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar import checkpoints, zoo
from autopar.checkpoints.folder import Entry
from autopar.checkpoints.layers import Source, sources, unread
from autopar.errors import CheckpointError

UNSTACKED = {f"blocks/{i}/w": (3, 2) for i in range(4)}
STACKED = {"blocks/w": (4, 3, 2)}


def entries(shapes: dict[str, tuple[int, ...]]) -> dict[str, Entry]:
    return {name: Entry(shape, "float32") for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("saved", "wanted", "expected", "not_read"),
    [
        (UNSTACKED, UNSTACKED, {name: Source((name,)) for name in UNSTACKED}, []),
        (STACKED, UNSTACKED, {name: Source(("blocks/w",), i) for i, name in enumerate(UNSTACKED)}, []),
        (UNSTACKED, STACKED, {"blocks/w": Source((*UNSTACKED,), is_stack=True)}, []),
        (STACKED, {"blocks/0/w": (3, 2)}, {"blocks/0/w": Source(("blocks/w",), 0)}, ["blocks/w"]),
        (STACKED, {"blocks/4/w": (3, 2)}, {}, ["blocks/w"]),
        (STACKED, {"blocks/0/w": (2, 3)}, {}, ["blocks/w"]),
        ({"blocks/0/w": (3, 2), "blocks/2/w": (3, 2)}, {"blocks/w": (2, 3, 2)}, {}, ["blocks/0/w", "blocks/2/w"]),
        ({"blocks/0/w": (3, 2), "blocks/1/w": (3, 1)}, {"blocks/w": (2, 3, 2)}, {}, ["blocks/0/w", "blocks/1/w"]),
        ({"opt/0/mu/blocks/w": (2, 5)}, {"opt/0/mu/blocks/1/w": (5,)}, {"opt/0/mu/blocks/1/w": Source(
            ("opt/0/mu/blocks/w",), 1)}, ["opt/0/mu/blocks/w"]),
        ({"w": ()}, {"0/w": ()}, {}, ["w"]),
        ({"0/w": ()}, {"w": ()}, {}, ["0/w"]),
    ],
    ids=["alike", "rows", "stack", "a row alone", "a row too many", "another shape", "a gap", "unequal layers",
         "a number elsewhere", "scalars", "a scalar is no stack"],
)  # fmt: skip
def test_what_a_leaf_is_read_from(
    saved: dict[str, tuple[int, ...]],
    wanted: dict[str, tuple[int, ...]],
    expected: dict[str, Source],
    not_read: list[str],
) -> None:
    assert sources(wanted, entries(saved)) == expected
    assert unread(sources(wanted, entries(saved)), entries(saved)) == not_read


@given(st.integers(1, 12), st.lists(st.integers(1, 4), max_size=2), st.booleans())
def test_stacking_is_the_inverse_of_taking_apart(count: int, shape: list[int], opt: bool) -> None:
    prefix = "opt/1/mu/" * opt
    unstacked = {f"{prefix}layers/{i}/w": tuple(shape) for i in range(count)}
    stacked = {f"{prefix}layers/w": (count, *shape)}
    assert sources(stacked, entries(unstacked)) == {f"{prefix}layers/w": Source((*unstacked,), is_stack=True)}
    assert sources(unstacked, entries(stacked)) == {
        name: Source((f"{prefix}layers/w",), i) for i, name in enumerate(unstacked)
    }


def trained(model: zoo.Model, **options: Any) -> tuple[Any, Any, Any]:
    """A parallelized step, its state after a step, and the batch."""
    step = autopar.parallelize(model.step, donate_argnums=(), progress=False, **options)
    batch = model.make_batch(jax.random.key(1))
    state, _ = step(model.init(jax.random.key(0)), batch)
    return step, state, batch


@pytest.mark.parametrize(
    ("saved", "wanted", "options"),
    [
        ("gpt-toy", "gpt-toy-scan", {"mesh": (2, 2)}),
        ("mlp-toy-scan", "mlp-toy", {"mesh": (2,), "stages": 2, "num_microbatches": 2}),
    ],
    ids=["stacked", "unstacked"],
)
def test_a_scanned_step_goes_on_from_the_state_of_one_that_is_not(
    tmp_path: Path, saved: str, wanted: str, options: Any
) -> None:
    step, state, batch = trained(zoo.build(saved, layers=2), mesh=(2,))
    autopar.save_checkpoint(tmp_path, state, step).wait()
    model = zoo.build(wanted, layers=2)
    other = autopar.parallelize(model.step, progress=False, **options)
    other.plan(*model.abstract_args())
    restored = autopar.restore_checkpoint(tmp_path, other)
    _, expected = step(state, batch)
    _, metrics = other(restored, batch)
    np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=1e-5)


def test_layers_that_are_missing_are_named(tmp_path: Path) -> None:
    autopar.save_checkpoint(tmp_path, {"blocks": {"w": np.ones((2, 3))}}).wait()
    with pytest.raises(CheckpointError, match=r"lacks 'blocks/2/w' \(1 of 3 leaves are missing, 0 are not wanted\)"):
        autopar.restore_checkpoint(tmp_path, {"blocks": [{"w": np.ones(3)}] * 3})
    assert not checkpoints.is_saved(tmp_path, {"blocks": [{"w": np.ones(3)}] * 3})
    rows = autopar.restore_checkpoint(tmp_path, {"blocks": [{"w": np.ones(3)}] * 2})
    np.testing.assert_array_equal(rows["blocks"][1]["w"], np.ones(3))


def test_a_single_layer_is_a_stack_of_one_row(tmp_path: Path) -> None:
    autopar.save_checkpoint(tmp_path, {"blocks": [{"w": np.arange(3.0)}]}).wait()
    restored = autopar.restore_checkpoint(tmp_path, {"blocks": {"w": np.ones((1, 3))}})
    np.testing.assert_array_equal(restored["blocks"]["w"], np.arange(3.0)[None])
