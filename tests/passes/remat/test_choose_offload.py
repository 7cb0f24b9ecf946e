"""Offloaded state: the decision alone, then planned, run on eight devices, and compiled for a TPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import Cluster, MemoryBudgetError, jax_compat, zoo
from autopar.errors import ArgumentError, AutoparWarning, PlanMismatchError
from autopar.passes.mesh_search import planner as planning
from autopar.passes.remat import choose as recomputation
from autopar.passes.remat import choose_offload
from autopar.passes.remat.choose import Effort, RematResult
from autopar.passes.remat.choose_offload import OffloadCandidates
from autopar.plans.plan import Plan

# The decision, on a made-up program of four layers and eight leaves of state

LAYERS = (True,) * 4
SECONDS = {"none": 1.0, "dots": 1.1, "full": 1.4}
BYTES = {"none": 10.0, "dots": 4.0, "full": 1.0}
STATE = 8  # leaves of four bytes


@dataclasses.dataclass
class Planner:
    """Plans by a table: a leaf on the host frees four bytes and costs `copy` s per byte.

    To fit where the fastest plan does not costs `penalty` s per byte over the budget, for up to `give` bytes.
    """

    budget: float
    copy: float
    penalty: float = 9.0
    give: float = 0.0
    tried: list[tuple[tuple[str, ...], int, Effort]] = dataclasses.field(default_factory=list)

    def __call__(
        self, policies: Sequence[str], hosted: Sequence[int], effort: Effort, cutoff: float
    ) -> RematResult[str]:
        policies, hosted = tuple(policies), tuple(hosted)
        self.tried.append((policies, len(hosted), effort))
        names = policies or ("none",) * len(LAYERS)
        seconds = sum(map(SECONDS.__getitem__, names)) + self.copy * 4 * len(hosted)
        held = sum(map(BYTES.__getitem__, names)) + 4.0 * (STATE - len(hosted))
        over = max(0.0, held - self.budget)
        if effort == "fastest" or not over:
            return RematResult(policies, "plan", seconds, held, not over, over > 0, offloaded=hosted)
        if over <= self.give:
            return RematResult(
                policies, "plan", seconds + self.penalty * over, self.budget, True, True, offloaded=hosted
            )
        least = int(held - self.give)
        error = MemoryBudgetError("too much", self.budget, least, least) if effort == "proven" else None
        return RematResult(policies, None, float("inf"), least, False, True, error, hosted)

    def choose(self, budget: float | str | None = None) -> RematResult[str]:
        state = OffloadCandidates(tuple(range(STATE)), (4.0,) * STATE, lambda nbytes: self.copy * nbytes)
        return choose_offload.choose(self, lambda: LAYERS, state, self.budget if budget is None else budget)


EXPENSIVE, FAIR, CHEAP = 1.0, 0.008, 0.001  # s per byte
CASES = {
    "what fits is planned as it is, at once": (72.0, CHEAP, (), 0, 1),
    "recomputing is cheaper": (64.0, EXPENSIVE, ("dots",) * 2, 0, None),
    "the host is cheaper": (64.0, FAIR, (), 2, None),
    "copies that are too short to matter": (64.0, CHEAP, (), 8, None),
    "all of the state": (40.0, CHEAP, (), 8, None),
    "neither alone": (18.0, EXPENSIVE, ("full",) * 4, 5, None),
    "all of the state, and some layers": (30.0, CHEAP, ("dots",) * 2, 8, None),
    "as far as both go": (4.0, CHEAP, ("full",) * 4, 8, None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_fastest_plan_that_fits_is_chosen(case: str) -> None:
    budget, copy, policies, hosted, attempts = CASES[case]
    planner = Planner(budget, copy)
    result = planner.choose()
    assert result.fits
    assert tuple(p for p in result.policies if p != "none") == policies
    assert result.offloaded == tuple(range(hosted))
    assert attempts is None or len(planner.tried) == attempts


def test_if_copies_are_expensive_offload_is_not_tried() -> None:
    planner = Planner(64.0, EXPENSIVE)
    planner.choose()
    assert {hosted for _, hosted, _ in planner.tried} == {0}


def test_no_attempt_is_made_twice() -> None:
    planner = Planner(30.0, CHEAP, penalty=0.1, give=6.0)
    planner.choose()
    assert len(planner.tried) == len(dict.fromkeys(planner.tried))


@settings(max_examples=200)
@given(st.floats(4.0, 75.0), st.floats(0.0001, 1.0), st.floats(0.001, 1.0), st.floats(0.0, 20.0))
def test_plans_that_can_fit_do_and_offload_never_makes_them_slower(
    budget: float, copy: float, penalty: float, give: float
) -> None:
    planner = Planner(budget, copy, penalty, give)
    result = planner.choose()
    alone = recomputation.choose(lambda p, e, cutoff=math.inf: planner(p, (), e, cutoff), lambda: LAYERS, budget)
    assert result.fits
    assert result.peak_bytes <= budget
    assert result.seconds <= alone.seconds


def test_the_least_memory_is_that_of_both() -> None:
    result = Planner(float("inf"), CHEAP).choose("min")
    assert (result.policies, result.peak_bytes) == (("full",) * 4, 4.0)


def test_if_no_plan_fits_the_error_has_the_smallest_plan() -> None:
    prove = Planner(3.0, CHEAP).choose().prove
    assert prove is not None
    error = prove()
    assert (error.least_bytes, error.bound_bytes) == (4, 4)


def test_steps_are_of_about_equal_bytes() -> None:
    state = OffloadCandidates(tuple(range(100)), (64.0,) * 40 + (1.0,) * 60, float)
    steps = state.steps()
    assert steps[0] == ()
    assert steps[-1] == state.positions
    assert len(steps) <= choose_offload.OFFLOAD.steps + 1
    assert all(0 < state.between(i, i + 1) <= 64 + sum(state.nbytes) / 32 for i in range(len(steps) - 1))


# Planned and run

MODEL = zoo.build("mlp-toy", layers=1, batch=8)
CLUSTER = Cluster.preset("dgx-h100")
SHARE = 3 * 4 * MODEL.parameters() / 8  # bytes of the state on one of eight devices


def planned(**options: Any) -> Plan:
    return autopar.plan(MODEL.step, *MODEL.abstract_args(), **{"mesh": (8,), "cluster": CLUSTER, **options})


@cache
def tight() -> Plan:
    """A plan for a budget into which none fits that keeps everything on the device."""
    least = planned(memory_budget="min", offload="none")
    return planned(memory_budget=0.9 * peak(least))


def peak(plan: Plan) -> int:
    return plan.stages[0].peak_memory_bytes


def difference(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(autopar.gather(a)), jax.tree.leaves(autopar.gather(b)), strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max()) for x, y in pairs)


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def needs_host_memory() -> None:
    here = jax_compat.memory_kinds(jax.devices()[0])
    if jax_compat.HOST_MEMORY not in here:
        pytest.skip(f"{jax.devices()[0].platform} devices of JAX {jax.__version__} have no pinned_host, only {here}")


def test_a_step_that_only_fits_with_offload_is_planned_with_it() -> None:
    with pytest.raises(MemoryBudgetError):
        planned(memory_budget=peak(tight()) / 0.99, offload="none")
    stage = tight().stages[0]
    assert tight().offloaded
    assert all("/mu/" in p or "/nu/" in p for p in (tight().input_paths[i] for i in tight().offloaded))
    assert 0 < stage.host_memory_bytes <= SHARE
    assert stage.memory.get("optimizer state", 0) < SHARE / 3
    assert tight().parts["host"] == pytest.approx(2 * stage.host_memory_bytes / CLUSTER.device.host_bandwidth)
    assert sum(t for name, t in tight().parts.items() if name != "hidden") == pytest.approx(tight().step_time_s)


def test_with_enough_memory_everything_stays_on_the_device() -> None:
    free = planned()
    assert free.offloaded == ()
    assert free.stages[0].host_memory_bytes == 0
    assert "host" not in free.parts


def test_a_plan_says_what_is_offloaded_and_saves_it(tmp_path: Path) -> None:
    assert any(note.startswith("kept in host memory between steps, to save device memory") for note in tight().notes)
    assert "in host memory" in tight().summary()
    tight().save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == tight()
    assert again.offloaded == tight().offloaded


@pytest.mark.parametrize("mesh", [(8,), (2, 4)], ids=str)
def test_a_step_with_its_moments_on_the_host_equals_one_device(mesh: tuple[int, ...]) -> None:
    needs_host_memory()
    state, batch = MODEL.init(jax.random.key(0)), MODEL.make_batch(jax.random.key(1))
    step = autopar.parallelize(MODEL.step, mesh=mesh, cluster=CLUSTER, offload="all")
    plan, single = step.plan(state, batch), jax.jit(MODEL.step)
    sharded = step.init(MODEL.init, jax.random.key(0))
    assert kinds(sharded["opt"]) == {"pinned_host"}
    copied = jax.tree.map(lambda x: x.copy(), state)
    expected = state
    for _ in range(3):
        expected, metrics = single(expected, batch)
        sharded, seen = step(sharded, batch)
        copied, again = step(copied, batch)
        assert difference(metrics, seen) < 1e-5
        assert difference(seen, again) == 0
    assert difference(expected, sharded) < 1e-4
    assert difference(sharded, copied) == 0
    assert kinds(sharded["opt"]) == {"pinned_host"}
    assert kinds(sharded["params"]) == {"device"}
    assert autopar.verify(plan, MODEL.step, state, batch, target="shardy").ok
    assert autopar.verify(plan, MODEL.step, state, batch, target="cpu").ok


def test_a_plan_chosen_within_a_budget_runs() -> None:
    needs_host_memory()
    state, batch = MODEL.init(jax.random.key(0)), MODEL.make_batch(jax.random.key(1))
    expected, _ = jax.jit(MODEL.step)(state, batch)
    sharded, _ = autopar.parallelize(MODEL.step, mesh=(8,), cluster=CLUSTER, plan=tight())(state, batch)
    assert difference(expected, sharded) < 1e-5


def test_devices_without_such_memory_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_compat, "memory_kinds", lambda device: ("device",))
    args = MODEL.abstract_args()
    with pytest.raises(ArgumentError, match=r"'pinned_host'; those here have 'device'. Use offload='auto' or 'none'"):
        autopar.parallelize(MODEL.step, mesh=(8,), cluster=CLUSTER, offload="all").plan(*args)
    with pytest.raises(MemoryBudgetError):
        autopar.parallelize(MODEL.step, mesh=(8,), cluster=CLUSTER, memory_budget=peak(tight())).plan(*args)
    with pytest.raises(PlanMismatchError, match=r"the devices here have 'device'. Plan again"):
        autopar.parallelize(MODEL.step, mesh=(8,), cluster=CLUSTER, plan=tight()).plan(*args)


def test_a_cluster_that_knows_of_no_link_is_left_alone() -> None:
    bare = Cluster.custom((8,), 1e-6, 1e-11, {"float32": 1e12}, 1e12, 2**34)
    assert planned(cluster=bare, memory_budget="min").offloaded == ()
    with pytest.raises(ArgumentError, match="offload='all': nothing is known of a link between custom device"):
        planned(cluster=bare, offload="all")


def test_the_memory_of_virtual_devices_is_their_host_s() -> None:
    """State may be moved there on demand, which frees nothing; it is not done for a budget."""
    here = Cluster.local()
    assert planned(cluster=here, memory_budget="min").offloaded == ()
    assert any("no host memory apart from the device's own" in n for n in planned(cluster=here, offload="all").notes)


def test_more_than_host_memory_is_not_chosen_and_has_a_note() -> None:
    small = replace(CLUSTER, device=replace(CLUSTER.device, host_memory_bytes=1))
    with pytest.raises(MemoryBudgetError):
        planned(cluster=small, memory_budget=peak(tight()))
    assert any("more than the 1 B of host memory there" in n for n in planned(cluster=small, offload="all").notes)


def test_a_device_that_is_too_small_is_warned_of_and_planned_for() -> None:
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=2000))
    for offload in ("auto", "all"):
        with pytest.warns(AutoparWarning, match="more than the 1.8 kB that are there"):
            plan = planned(cluster=small, offload=offload)
        assert bool(plan.offloaded) == (offload == "all")


def test_if_offload_cannot_suffice_memory_is_modelled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[tuple[int, ...]] = []

    class Counted(planning.Liveness):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            built.append(args[-1])

    monkeypatch.setattr(planning, "Liveness", Counted)
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=2000))
    with pytest.warns(AutoparWarning, match="more than the 1.8 kB that are there"):
        planned(cluster=small, remat="none", num_microbatches=1)
    assert built == [()]
    planned(memory_budget=peak(tight()) / 0.99)
    assert len(set(built)) > 1


@pytest.mark.parametrize("value", ["some", True, None])
def test_the_option_is_checked(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"offload=.* must be 'auto' or 'none' or 'all'"):
        planned(offload=value)


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry:UserWarning")  # then it compiles
def test_a_tpu_keeps_them_in_its_host_s_memory() -> None:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu): nothing here compiles for tpu:v5e:2x4")
    model = zoo.build("gpt-toy", layers=2, batch=16)
    cluster = Cluster.preset("tpu-v5e", topology="2x4")
    memory = []
    for offload in ("none", "all"):
        plan = autopar.plan(model.step, *model.abstract_args(), mesh=(8,), cluster=cluster, offload=offload)
        report = autopar.verify(plan, model.step, *model.abstract_args(), target="tpu:v5e:2x4")
        assert report.ok, str(report)
        memory.append(report.memory)
    on_device = [m["arguments"] for m in memory]
    assert memory[0]["host arguments"] == 0
    assert memory[1]["host arguments"] > 0
    assert on_device[1] < on_device[0]
