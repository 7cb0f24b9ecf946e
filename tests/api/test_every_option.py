"""Every option of `autopar.plan`, on one mesh and in stages: it is seen in the plan, and the step is the plain one.

`OPTIONS` has a row for every option, with further options that the row needs. Where an option makes no sense, the row
has the error. A row's plan is run with `plan=`, once if several rows have the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError, AutoparError, ScheduleError
from autopar.hardware.cluster import Cluster
from autopar.options import Options
from autopar.plans.plan import Plan, from_json

CLUSTER = replace(Cluster.preset("dgx-h100"), devices_per_host=4)
OTHER = replace(Cluster.preset("p4d.24xlarge"), devices_per_host=4)
BASE: Mapping[str, Any] = {"mesh": (2, 2), "cluster": CLUSTER}
#: Kind -> the options that make it.
KINDS: Mapping[str, Mapping[str, Any]] = {"one mesh": {"stages": 1}, "stages": {"stages": 2}}
LAYERS, WIDTH, SCALE = 2, 16, 3


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def step(state: Any, batch: Any, scale: Any) -> Any:
    def loss(params: Any) -> Any:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    momentum = [0.9 * m + scale * g for m, g in zip(state["momentum"], grads, strict=True)]
    params = [w - 0.1 * m for w, m in zip(state["params"], momentum, strict=True)]
    return {"params": params, "momentum": momentum}, value


def arguments() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys[:LAYERS]]
    batch = {name: jax.random.normal(k, (8, WIDTH)) for name, k in zip("xy", keys[LAYERS:], strict=True)}
    return {"params": params, "momentum": [w + 1 for w in params]}, batch, SCALE


@dataclass(frozen=True)
class Seen:
    """A plan, that of its kind without the option, and what planning has printed to stderr."""

    plan: Plan
    default: Plan
    printed: str


@dataclass(frozen=True)
class Row:
    """A value of an option, and what has to be seen.

    Attributes:
        value: of the option.
        seen: whether it is in the plan.
        further: other options.
        refused: kind -> error, its message, and why the option makes no sense there.
    """

    value: Any
    seen: Callable[[Seen], bool]
    further: Mapping[str, Any] = field(default_factory=dict[str, Any])
    refused: Mapping[str, tuple[type[AutoparError], str, str]] = field(
        default_factory=dict[str, tuple[type[AutoparError], str, str]]
    )


def positions(plan: Plan, start: str) -> tuple[int, ...]:
    return tuple(i for i, path in enumerate(plan.input_paths) if path.startswith(start))


def no_slower(s: Seen) -> bool:
    return s.plan.step_time_s <= s.default.step_time_s * (1 + 1e-9)


SPLIT: Mapping[str, Any] = {"num_microbatches": 2}
OPTIONS: Mapping[str, tuple[Row, ...]] = {
    "cluster": (Row(OTHER, lambda s: s.plan.cluster == OTHER.name != s.default.cluster),),
    "mesh": (
        Row({"a": 2, "b": 2}, lambda s: s.plan.mesh == {"a": 2, "b": 2}),
        Row((4,), lambda s: s.plan.mesh == {"x": 4}),
    ),
    "batch_argnums": (Row(1, lambda s: s.plan.batch == positions(s.plan, "batch/"), SPLIT),),
    "donate_argnums": (
        Row((), lambda s: s.plan.donated == () != s.default.donated),
        Row(0, lambda s: s.plan.donated == positions(s.plan, "state/")),
    ),
    "static_argnums": (Row(2, lambda s: "scale" in s.default.input_paths and "scale" not in s.plan.input_paths),),
    "static_argnames": (Row("scale", lambda s: "scale" not in s.plan.input_paths),),
    "memory_budget": (
        Row("min", lambda s: s.plan.peak_memory_bytes < s.default.peak_memory_bytes),
        Row("5.5kB", lambda s: s.plan.peak_memory_bytes <= 5500 < s.default.peak_memory_bytes),
        Row("1GiB", lambda s: s.plan.stages == s.default.stages),
    ),
    "pins": (
        Row({"state/params/1": P("y")}, lambda s: s.plan.shardings()["state/params/1"] == P("y")),
        Row(
            {"params/*": P()},
            lambda s: {*map(s.plan.inputs.__getitem__, positions(s.plan, "state/params"))} == {(-1, -1)},
        ),
    ),
    "solver": tuple(
        Row(name, lambda s, name=name: s.plan.solver == name and no_slower(s)) for name in ("highs", "cbc")
    ),
    "time_limit": (Row(60.0, lambda s: s.plan.stages == s.default.stages),),
    "gap": (Row(0.0, no_slower),),
    "progress": (Row(True, lambda s: "step" in s.printed and s.plan.stages == s.default.stages),),
    "debug_nans": (Row(True, lambda s: s.plan.stages == s.default.stages),),
    "remat": (
        *(Row(policy, lambda s, policy=policy: policy in s.plan.remat) for policy in ("dots", "full")),
        Row("none", lambda s: s.plan.remat == ()),
    ),
    "offload": (
        Row("all", lambda s: s.plan.offloaded == positions(s.plan, "state/momentum")),
        Row("none", lambda s: s.plan.offloaded == ()),
    ),
    "num_microbatches": (
        Row(4, lambda s: s.plan.num_microbatches == 4),
        Row(1, lambda s: s.plan.num_microbatches == 1),
    ),
    "stages": (
        Row(2, lambda s: len(s.plan.stages) == 2),
        Row(1, lambda s: len(s.plan.stages) == 1),
    ),
    "schedule": (
        Row(
            "gpipe",
            lambda s: s.plan.schedule == "gpipe",
            refused={"one mesh": (ArgumentError, "schedule='gpipe' orders the stages", "one stage has no order")},
        ),
        Row(
            "none",
            lambda s: s.plan.schedule == "none",
            refused={"stages": (ScheduleError, "schedule='none' is for one stage", "stages need an order")},
        ),
    ),
    "per_microbatch": (Row("*", lambda s: s.plan.per_microbatch == ("*",), SPLIT),),
}
CASES = {
    f"{kind}, {option}={row.value!r:.20}": (kind, option, row)
    for option, rows in OPTIONS.items()
    for row in rows
    for kind in KINDS
}


def planned(kind: str, **options: Any) -> Plan:
    return autopar.plan(step, *arguments(), **{**BASE, **KINDS[kind], **options})


@cache
def default(kind: str) -> Plan:
    return planned(kind)


@cache
def largest_difference(plan: str, static: bool) -> float:
    """Between the results of a plan, in JSON, and of the plain step, relative to these."""
    run = autopar.parallelize(step, plan=from_json(json.loads(plan)), static_argnums=2 if static else ())
    ours, expected = autopar.gather(run(*arguments())), jax.jit(step)(*arguments())
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs((np.asarray(x) - y) / np.abs(y).max()).max()) for x, y in pairs)


@pytest.mark.parametrize(("kind", "option", "row"), CASES.values(), ids=CASES)
def test_it_is_in_the_plan_and_the_step_is_the_plain_one(
    kind: str, option: str, row: Row, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {**row.further, option: row.value}
    if kind in row.refused:
        error, message, _ = row.refused[kind]
        with pytest.raises(error, match=message):
            planned(kind, **options)
        return
    plan = planned(kind, **options)
    assert row.seen(Seen(plan, default(kind), capfd.readouterr().err))
    same = replace(plan, phases={}, notes=())
    assert largest_difference(same.to_json(), option.startswith("static_")) < 1e-12


def test_every_option_has_a_row() -> None:
    assert {*OPTIONS, "plan"} == Options.__annotations__.keys()  # every row is run with a plan
