"""A placed argument has the numbers of the caller's array, and neither of the two is ever written to for the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.runtime.single_program import place_argument
from autopar.runtime.transport import host_view

pytestmark = pytest.mark.core

SPECS = [PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "x")]
NUMBERS = np.arange(64.0).reshape(8, 8)
VALUES = {
    "float32": (NUMBERS - 7).astype(np.float32),
    "bfloat16": NUMBERS.astype(jnp.bfloat16),
    "int4": (NUMBERS % 16 - 8).astype(jnp.int4),
    "bool": NUMBERS % 3 == 0,
    "complex64": (NUMBERS * (1 - 2j)).astype(np.complex64),
    "large": np.arange(4096, dtype=np.float32).reshape(64, 64),
}


def sharding(spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(jax_compat.auto_mesh(np.array(jax.devices()), ("x",)), spec)


@jax.jit
def plus_one(x: Any) -> Any:
    return ~x if x.dtype == jnp.bool_ else x + jnp.ones((), x.dtype)


donating = jax.jit(plus_one, donate_argnums=0)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("donated", [False, True])
def test_it_is_the_callers_array_in_the_sharding_and_of_its_type(name: str, spec: PartitionSpec, donated: bool) -> None:
    value = jnp.array(VALUES[name])
    placed = place_argument(value, sharding(spec), donated, "x")
    assert (placed.dtype, placed.weak_type, placed.sharding) == (value.dtype, value.weak_type, sharding(spec))
    np.testing.assert_array_equal(np.asarray(placed), VALUES[name])


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_donating_what_is_placed_leaves_the_callers_array(name: str, spec: PartitionSpec) -> None:
    value = jnp.array(VALUES[name])
    for _ in range(2):
        placed = place_argument(value, sharding(spec), True, "x")
        stepped = donating(placed)
        np.testing.assert_array_equal(np.asarray(stepped), np.asarray(plus_one(VALUES[name])))
        np.testing.assert_array_equal(np.asarray(value), VALUES[name])
        assert placed.is_deleted()


@pytest.mark.parametrize(
    "ends", [lambda x: x.delete(), donating, lambda x: None], ids=["deleted", "donated", "dropped"]
)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_end_of_the_callers_array_leaves_what_is_placed(spec: PartitionSpec, ends: Any) -> None:
    value = jnp.array(VALUES["large"])
    placed = place_argument(value, sharding(spec), False, "x")
    ends(value)
    del value
    later = [jnp.full((64, 64), -1.0) for _ in range(8)]  # takes memory that is freed
    np.testing.assert_array_equal(np.asarray(placed), VALUES["large"])
    assert len(later) == 8


def test_the_callers_array_is_donated_in_place_once_what_is_placed_is_gone() -> None:
    value = jnp.array(VALUES["large"])
    address = value.unsafe_buffer_pointer()
    place_argument(value, sharding(PartitionSpec()), False, "x").delete()
    assert donating(value).unsafe_buffer_pointer() == address


def test_weakly_typed_arrays_and_random_keys_keep_their_types() -> None:
    weak, key = jax.jit(lambda: 2.0)(), jax.random.key(1)
    assert weak.weak_type
    assert place_argument(weak, sharding(PartitionSpec()), True, "x").weak_type
    placed = place_argument(key, sharding(PartitionSpec()), True, "x")
    assert placed.dtype == key.dtype
    assert bool((placed == key).all())


def test_only_an_array_of_one_device_has_a_view() -> None:
    value = jnp.array(VALUES["float32"])
    placed = place_argument(value, sharding(PartitionSpec("x")), False, "x")
    assert isinstance(host_view(value), np.ndarray)
    assert host_view(placed) is placed


def test_nothing_is_compiled() -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(listener := lambda event, *_, **__: compiled.append(event))
    try:
        value = jax.block_until_ready(jnp.arange(33.0 * 8).reshape(8, 33))
        compiled.clear()
        for spec in SPECS[:2]:
            place_argument(value, sharding(spec), True, "x")
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not [event for event in compiled if "compile" in event]
