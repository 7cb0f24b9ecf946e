"""A plan that is given is run as it is: options that want another one are refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError
from tests.programs.steps import array


def product(w: Any, x: Any) -> Any:
    return w, jnp.sum(x @ w)


ARGS = array(8, 8), array(16, 8)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"pins": {"w": P("x")}}, "pins={'w': P('x',)} does not go with plan=:"),
        ({"num_microbatches": 8}, "num_microbatches=8 does not go with plan=, which has 1:"),
        ({"stages": 2}, "stages=2 does not go with plan=, which has 1:"),
        ({"stages": 2, "schedule": "gpipe"}, "stages=2 does not go with plan=, which has 1:"),
        ({"memory_budget": "1GB"}, "memory_budget=1000000000.0 does not go with plan=:"),
        ({"remat": "full"}, "remat='full' does not go with plan=:"),
        ({"offload": "all"}, "offload='all' does not go with plan=:"),
        ({"per_microbatch": "*"}, "per_microbatch=('*',) does not go with plan=, which has ():"),
    ],
)
def test_what_it_cannot_have_is_refused(options: dict[str, Any], part: str) -> None:
    plan = autopar.plan(product, *ARGS, mesh=(4,))
    with pytest.raises(ArgumentError) as error:
        autopar.parallelize(product, plan=plan, **options)
    assert part in str(error.value)
    assert "leave plan out" in str(error.value)


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 1, "stages": 1, "schedule": "none", "remat": "auto"}])
def test_what_it_has_may_be_given_too(options: dict[str, Any]) -> None:
    plan = autopar.plan(product, *ARGS, mesh=(4,))
    assert autopar.parallelize(product, plan=plan, **options).plan(*ARGS).inputs == plan.inputs
