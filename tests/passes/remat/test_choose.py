"""Rematerialisation chosen by search: the decision alone, then planned, run and measured on eight devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar import Cluster, MemoryBudgetError, zoo
from autopar.compile.call import Call
from autopar.compile.one_mesh import few_microbatches, planners, try_one_mesh
from autopar.errors import ArgumentError, AutoparWarning, PlanMismatchError
from autopar.ir.problem import Problem
from autopar.ir.trace import trace
from autopar.options import settings
from autopar.passes.mesh_search import planner as planning
from autopar.passes.microbatch.split import split
from autopar.passes.remat import choose as recomputation
from autopar.passes.remat import memory_policy
from autopar.passes.remat import rewrite as remat
from autopar.passes.remat.choose import Effort, RematResult
from autopar.passes.remat.estimates import Estimate, Forecast
from autopar.passes.solver.optimize import bound, optimize
from autopar.plans import cache as plan_cache
from autopar.plans.plan import Plan
from autopar.progress import Progress
from tests.support.effort import sample

# The decision, on a made-up program of eight equal layers, the last of which has nothing to drop

LAYERS = (True,) * 7 + (False,)
SECONDS = {"none": 1.0, "dots": 1.1, "full": 1.4}
BYTES = {"none": 10.0, "dots": 4.0, "full": 1.0}


@dataclasses.dataclass
class Planner:
    """Plans by a table: to fit where the fastest plan does not costs `penalty` times the bytes over the budget."""

    budget: float
    penalty: float = 0.0
    tried: list[tuple[tuple[str, ...], Effort]] = dataclasses.field(default_factory=list)

    def __call__(self, policies: Sequence[str], effort: Effort, cutoff: float = math.inf) -> RematResult[str]:
        policies = tuple(policies)
        self.tried.append((policies, effort))
        names = policies or ("none",) * len(LAYERS)
        seconds, held = sum(map(SECONDS.__getitem__, names)), sum(map(BYTES.__getitem__, names))
        over = max(0.0, held - self.budget)
        if effort == "fastest" or not over:
            return RematResult(policies, "plan", seconds, held, fits=not over, constrained=over > 0)
        if self.penalty:
            return RematResult(
                policies, "plan", seconds + self.penalty * over, self.budget, fits=True, constrained=True
            )
        error = MemoryBudgetError("too much", self.budget, int(held), int(held) - 1)
        return RematResult(policies, None, float("inf"), held - 1, False, True, error if effort == "proven" else None)


CHOICES = (
    ("what fits is planned as written, at once", 80.0, 0.0, (), 1),
    ("a little less memory, at a low price", 79.0, 0.05, (), None),
    ("a little less memory, at a high price", 79.0, 9.0, ("dots",), None),
    ("as many layers as it takes", 60.0, 9.0, ("dots",) * 4, None),
    ("where products do not fit either", 30.0, 9.0, ("full",) * 6, None),
    ("as far as recomputing goes", 17.0, 9.0, ("full",) * 7, None),
    ("and further, at a price", 16.0, 0.3, ("full",) * 7, None),
)


@pytest.mark.parametrize(("title", "budget", "penalty", "chosen", "attempts"), CHOICES, ids=[c[0] for c in CHOICES])
def test_the_fastest_plan_that_fits_is_chosen(
    title: str, budget: float, penalty: float, chosen: tuple[str, ...], attempts: int | None
) -> None:
    planner = Planner(budget, penalty)
    chosen_result = recomputation.choose(planner, lambda: LAYERS, budget)
    assert chosen_result.fits
    assert tuple(p for p in chosen_result.policies if p != "none") == chosen
    assert chosen_result.policies == (*chosen, *("none",) * (len(LAYERS) - len(chosen))) or not chosen
    assert attempts is None or len(planner.tried) == attempts


def test_few_attempts_find_the_fewest_layers() -> None:
    planner = Planner(45.0)
    assert recomputation.choose(planner, lambda: LAYERS, 45.0).policies.count("dots") == 6
    assert len(planner.tried) <= 12


def test_for_the_least_memory_everything_is_recomputed() -> None:
    assert recomputation.choose(Planner(float("inf")), lambda: LAYERS, "min").policies.count("full") == 7


def test_if_no_plan_fits_the_error_has_the_smallest_plan() -> None:
    prove = recomputation.choose(Planner(5.0), lambda: LAYERS, 5.0).prove
    assert prove is not None
    error = prove()
    assert (error.least_bytes, error.bound_bytes) == (17, 16)


def test_a_program_without_layers_is_planned_as_written() -> None:
    planner = Planner(5.0)
    prove = recomputation.choose(planner, lambda: (False,), 5.0).prove
    assert prove is not None
    assert prove().least_bytes == 80


# The same where it is forecast what layers cost and free


@dataclasses.dataclass
class Unequal:
    """Eight layers of unequal bytes, recomputed by "full" alone; `off`: truth over forecast of bytes."""

    budget: float
    nbytes: tuple[float, ...]
    off: float = 1.0
    tried: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, policies: Sequence[str], effort: Effort, cutoff: float = math.inf) -> RematResult[str]:
        policies = tuple(policies)
        if "dots" in policies:
            return RematResult(policies, None, math.inf, 2 * self.budget, fits=False, constrained=True)
        count = policies.count("full")
        if effort == "fastest":
            self.tried.append(count)
        held, fits = self.peak(count), self.peak(count) <= self.budget
        if effort != "fastest" and not fits:
            error = MemoryBudgetError("too much", self.budget, int(held) + 1, int(held)) if effort == "proven" else None
            return RematResult(policies, None, math.inf, held, fits=False, constrained=True, error=error)
        return RematResult(policies, "plan", 10.0 + count, held, fits, constrained=not fits)

    def peak(self, count: int) -> float:
        return 1.0 + sum(self.nbytes) - sum(self.nbytes[:count])

    def forecasts(self, as_written: RematResult[str]) -> Mapping[str, Forecast]:
        layers = tuple(Estimate(1.0, n / self.off) for n in self.nbytes)
        return {"dots": Forecast(layers, 2 * self.budget), "full": Forecast(layers, 1.0)}

    def fewest(self) -> int | None:
        return next((k for k in range(len(self.nbytes) + 1) if self.peak(k) <= self.budget), None)


UNEQUAL = st.lists(st.floats(0.5, 20.0), min_size=8, max_size=8).map(tuple)


@given(UNEQUAL, st.floats(0.0, 1.1))
def test_a_right_forecast_finds_the_layers_at_once(nbytes: tuple[float, ...], share: float) -> None:
    planner = Unequal(1.001 + share * sum(nbytes), nbytes)
    results = recomputation.search(planner, lambda: (True,) * 8, planner.budget, forecasts=planner.forecasts)
    best = min((o for o in results if o.fits), key=lambda o: o.seconds)
    assert best.policies.count("full") == planner.fewest()
    assert len(planner.tried) <= 3


@given(UNEQUAL, st.floats(0.0, 1.1), st.floats(0.3, 3.0))
def test_a_wrong_forecast_only_costs_attempts(nbytes: tuple[float, ...], share: float, off: float) -> None:
    planner = Unequal(1.001 + share * sum(nbytes), nbytes, off)
    results = recomputation.search(planner, lambda: (True,) * 8, planner.budget, forecasts=planner.forecasts)
    best = min((o for o in results if o.fits), key=lambda o: o.seconds)
    assert best.policies.count("full") == planner.fewest()
    assert len(planner.tried) == len({*planner.tried})


def test_a_policy_with_an_insufficient_forecast_is_skipped_if_another_suffices() -> None:
    planner = Unequal(30.0, (10.0,) * 8)
    results = recomputation.search(planner, lambda: (True,) * 8, 30.0, forecasts=planner.forecasts)
    assert not any("dots" in o.policies for o in results)


class Promising(Unequal):
    """The same, where "dots" is forecast to cost nothing and to suffice, and frees nothing."""

    def __call__(self, policies: Sequence[str], effort: Effort, cutoff: float = math.inf) -> RematResult[str]:
        if "dots" not in policies:
            return super().__call__(policies, effort, cutoff)
        plan = "plan" if effort == "fastest" else None
        return RematResult(tuple(policies), plan, 10.0, self.peak(0), fits=False, constrained=True)

    def forecasts(self, as_written: RematResult[str]) -> Mapping[str, Forecast]:
        return {**super().forecasts(as_written), "dots": Forecast((Estimate(1e-6, 100.0),) * 8, 1.0)}


def test_a_policy_that_was_put_off_is_planned_where_the_other_does_not_suffice() -> None:
    planner = Promising(60.0, (10.0,) * 8)
    results = recomputation.search(planner, lambda: (True,) * 8, 60.0, forecasts=planner.forecasts)
    (best,) = (o for o in results if o.fits)
    assert best.policies.count("full") == planner.fewest()


class NothingSuffices(Unequal):
    """The same, where even all layers are forecast to be too few, by "dots" more than by "full"."""

    def forecasts(self, as_written: RematResult[str]) -> Mapping[str, Forecast]:
        forecasts = super().forecasts(as_written)
        return {
            policy: dataclasses.replace(forecast, least_bytes=2 * forecast.least_bytes)
            for policy, forecast in forecasts.items()
        }


def test_if_no_forecast_suffices_the_closest_policy_is_planned_with_all_layers() -> None:
    planner = NothingSuffices(0.9, (10.0,) * 8)
    results = recomputation.search(planner, lambda: (True,) * 8, 0.9, forecasts=planner.forecasts)
    assert planner.tried == [0, 8]
    assert not any("dots" in o.policies for o in results)


@pytest.mark.parametrize(("cutoff", "tried"), [(15.0, [0]), (math.inf, [0, 8])])
def test_insufficient_forecasts_are_not_planned_with_a_cutoff(cutoff: float, tried: list[int]) -> None:
    planner = NothingSuffices(0.9, (10.0,) * 8)
    recomputation.search(planner, lambda: (True,) * 8, 0.9, cutoff, planner.forecasts)
    assert planner.tried == tried


def test_if_more_layers_free_nothing_all_are_tried_next() -> None:
    """The first layers free what they should, all that come then nothing, and the last one the rest."""
    planner = Unequal(22.0, (10.0,) * 4 + (0.0,) * 15 + (50.0,))
    layers = (True,) * len(planner.nbytes)

    def even(as_written: RematResult[str]) -> Mapping[str, Forecast]:
        return {"full": Forecast((Estimate(1.0, 10.0),) * len(layers), 1.0)}

    recomputation.search(planner, lambda: layers, planner.budget, forecasts=even)
    assert planner.tried[:4] == [0, 7, 13, 20]


@dataclasses.dataclass
class Rising(Unequal):
    """The same, where more than four layers take memory. By layouts only these numbers of layers fit."""

    fitted: frozenset[int] = frozenset()

    def __call__(self, policies: Sequence[str], effort: Effort, cutoff: float = math.inf) -> RematResult[str]:
        result, count = super().__call__(policies, effort, cutoff), policies.count("full")
        if effort == "fastest" or count not in self.fitted:
            return result
        return dataclasses.replace(result, plan="plan", seconds=11.0 + count, fits=True)

    def peak(self, count: int) -> float:
        return 20.0 + super().peak(count)


@pytest.mark.parametrize("count", [5, 8])
def test_layouts_are_sought_for_the_layers_with_the_least_peak_before_all_of_them(count: int) -> None:
    planner = Rising(12.5, (10.0,) * 4 + (-2.0,) * 4, fitted=frozenset({count}))

    def even(as_written: RematResult[str]) -> Mapping[str, Forecast]:
        return {"full": Forecast((Estimate(1.0, 10.0),) * 8, 1.0)}

    results = recomputation.search(planner, lambda: (True,) * 8, planner.budget, forecasts=even)
    assert planner.tried == [0, 5, 6, 8]
    assert [o.policies.count("full") for o in results if o.fits] == [count]


class Slow(Unequal):
    """The same, where more than seven layers take five seconds more than forecast."""

    def __call__(self, policies: Sequence[str], effort: Effort, cutoff: float = math.inf) -> RematResult[str]:
        result = super().__call__(policies, effort, cutoff)
        return dataclasses.replace(result, seconds=result.seconds + 5.0 * (policies.count("full") > 7))


@pytest.mark.parametrize(("cutoff", "tried"), [(25.0, [0, 7, 13]), (math.inf, [0, 7, 13, 20])])
def test_more_layers_are_not_planned_where_too_few_take_too_long(cutoff: float, tried: list[int]) -> None:
    planner = Slow(22.0, (10.0,) * 4 + (0.0,) * 15 + (50.0,))
    layers = (True,) * len(planner.nbytes)

    def even(as_written: RematResult[str]) -> Mapping[str, Forecast]:
        return {"full": Forecast((Estimate(1.0, 10.0),) * len(layers), 1.0)}

    recomputation.search(planner, lambda: layers, planner.budget, cutoff, forecasts=even)
    assert planner.tried[: len(tried)] == tried
    assert math.isinf(cutoff) or planner.tried == tried


def test_the_overhead_is_that_of_the_cheapest_sufficient_policy() -> None:
    planner = Unequal(41.0, (10.0,) * 8)
    free, few = planner((), "fastest"), planner(("full",) * 2, "fastest")
    forecast = planner.forecasts(free)

    def overhead(*tried: RematResult[str], budget: float = 41.0) -> float:
        return recomputation.overhead(tried, (True,) * 8, budget, forecast)

    assert overhead(free) == pytest.approx(4 * (1 - recomputation.OVERESTIMATE["full"]))  # 4 layers of a second
    assert overhead(free, planner(("full",) * 3, "fastest"), few) == pytest.approx(3.6)
    assert overhead(free, dataclasses.replace(few, seconds=15.0)) == pytest.approx(5.0)  # too few, and so slow
    assert overhead(free, dataclasses.replace(few, seconds=15.0, peak_bytes=40.0)) == pytest.approx(3.6)
    assert overhead(free, budget=0.5) == 0.0  # no policy is forecast to suffice
    assert recomputation.overhead([free], (True,) * 8, 41.0, {}) == 0.0


def test_expected_seconds_follow_from_the_program_as_written() -> None:
    planner = Unequal(41.0, (10.0,) * 8)
    free = planner((), "fastest")
    forecast = planner.forecasts(free)
    assert recomputation.expected_seconds(free, (True,) * 8, 41.0, forecast) == free.seconds + 4  # 4 layers of a second
    assert recomputation.expected_seconds(dataclasses.replace(free, fits=True), (True,) * 8, 41.0, {}) == free.seconds
    assert (
        recomputation.expected_seconds(free, (True,) * 8, 0.5, forecast) == math.inf
    )  # no policy is forecast to suffice
    assert recomputation.expected_seconds(free, (True,) * 8, 41.0, {}) == math.inf


@pytest.mark.parametrize("policy", ["dots", "full"])
def test_rematerialised_programs_can_be_split_into_microbatches(policy: str) -> None:
    """In half precision gradients are converted after the products they are made by: no barrier may wait for them."""
    built = zoo.build("gpt-125m", layers=3, batch=8)
    graph = trace(built.step, *built.abstract_args()).graph
    policies = tuple(policy if open_ else "none" for open_ in remat.recomputable(graph))
    assert policies.count(policy) > 1
    assert split(remat.rewrite(graph, policies), 4).loop_share == 1.0


# Planned, run and measured

MESHES = {False: (2, 4), True: (8,)}
CLUSTER = Cluster.local()


@cache
def model(scan: bool) -> zoo.Model:
    return zoo.build("gpt-toy-scan" if scan else "gpt-toy", layers=2, batch=64)


def planned(scan: bool, **options: Any) -> Plan:
    return autopar.plan(model(scan).step, *model(scan).abstract_args(), mesh=MESHES[scan], cluster=CLUSTER, **options)


def peak(plan: Plan) -> int:
    return plan.stages[0].peak_memory_bytes


@cache
def tight(scan: bool) -> tuple[float, Plan]:
    """A budget into which no plan of the program as written fits, and the plan for it."""
    budget = 1.02 * peak(planned(scan, remat="dots"))
    return budget, planned(scan, memory_budget=budget)


def difference(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max()) for x, y in pairs)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_a_step_that_only_fits_rematerialised_runs_and_equals_one_device(scan: bool) -> None:
    budget, plan = tight(scan)
    assert {*plan.remat} - {"none"}
    assert peak(plan) <= budget
    state, batch = model(scan).init(jax.random.key(0)), model(scan).make_batch(jax.random.key(1))
    step = autopar.parallelize(model(scan).step, mesh=MESHES[scan], cluster=CLUSTER, plan=plan)
    compiled, single = step.lower(state, batch).compile(), jax.jit(model(scan).step)
    expected, sharded = state, jax.tree.map(lambda x: x.copy(), state)
    for _ in range(3):
        expected, metrics = single(expected, batch)
        sharded, seen = compiled(sharded, batch)
        assert difference(metrics, seen) < 1e-5
    assert difference(expected, sharded) < 1e-4
    stats = compiled.memory_analysis()
    real = stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes
    assert 0.9 <= peak(plan) / (real - stats.alias_size_in_bytes) <= 1.25
    assert autopar.verify(plan, model(scan).step, state, batch, target="shardy").ok


def test_a_plan_says_what_it_recomputes_and_keeps_it_on_disk(tmp_path: Path) -> None:
    _, plan = tight(False)
    assert any("recomputed in the backward pass, to save memory: " in note for note in plan.notes)
    assert plan.graph_hash == planned(False).graph_hash
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == dataclasses.replace(plan, remat=again.remat)
    assert again.remat == plan.remat


def with_memory(usable: float) -> Cluster:
    """The cluster, with devices of which plans may use so many bytes."""
    memory = usable / (1 - memory_policy.MARGIN)
    return dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, memory_bytes=memory))


def three_layers(ws: Sequence[jax.Array], x: jax.Array) -> Any:
    """A step of few operations most of whose memory is activations."""

    def loss(ws: Sequence[jax.Array]) -> jax.Array:
        return (reduce(lambda h, w: jnp.tanh(h @ w), ws, x) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))


def test_no_plan_of_the_program_as_written_fits() -> None:
    """Into a budget in which there is one that recomputes layers of a scan."""

    def step(ws: jax.Array, x: jax.Array) -> Any:
        def loss(ws: jax.Array) -> jax.Array:
            return (jax.lax.scan(lambda h, w: (jnp.tanh(jnp.tanh(h @ w) @ w), None), x, ws)[0] ** 2).mean()

        return ws - 0.1 * jax.grad(loss)(ws)

    args = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32), jax.ShapeDtypeStruct((1024, 16), jnp.float32)
    plan = partial(autopar.plan, step, *args, mesh=(8,), cluster=CLUSTER, num_microbatches=1)
    budget = 1.02 * peak(plan(remat="full"))
    within = plan(memory_budget=budget)
    assert {*within.remat} - {"none"}
    assert peak(within) <= budget
    with pytest.raises(MemoryBudgetError, match="no plan fits"):
        plan(memory_budget=budget, remat="none")


@pytest.mark.parametrize("is_option", [True, False])
def test_a_step_that_fits_in_no_other_way_has_the_fewest_microbatches_that_fit(is_option: bool) -> None:
    args = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 3, jax.ShapeDtypeStruct((1024, 16), jnp.float32)
    plan = partial(autopar.plan, three_layers, *args, mesh=(8,), remat="none")
    budget = 1.02 * peak(plan(cluster=CLUSTER, num_microbatches=4))
    small = plan(cluster=CLUSTER, memory_budget=budget) if is_option else plan(cluster=with_memory(budget))
    assert small.num_microbatches == 4
    assert peak(small) <= budget
    with pytest.raises(MemoryBudgetError, match="no plan fits"):
        plan(cluster=CLUSTER, memory_budget=budget, num_microbatches=2)


def test_that_nothing_fits_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for every number of microbatches that is tried."""
    tried: list[tuple[int, Effort]] = []
    attempt = planning.Planner.attempt

    def recorded(self: planning.Planner, policies: Any, hosted: Any, effort: Effort, cutoff: float) -> Any:
        tried.append((self.parts.count, effort))
        return attempt(self, policies, hosted, effort, cutoff)

    monkeypatch.setattr(planning.Planner, "attempt", recorded)
    args = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 3, jax.ShapeDtypeStruct((1024, 16), jnp.float32)
    with pytest.raises(MemoryBudgetError, match="no plan fits into 2 kB"):
        autopar.plan(three_layers, *args, mesh=(8,), cluster=CLUSTER, remat="none", memory_budget=2_000)
    assert {count for count, _ in tried} == {1, 2, 4, 8, 16}
    assert [count for count, effort in tried if effort == "proven"] == [1]


def test_fewer_microbatches_than_a_search_for_stages_chose_where_they_are_faster() -> None:
    step, args = model(False).step, model(False).abstract_args()
    call = Call(step, trace(step, *args), args, local=False, trace_s=0.0, report=Progress("step", False))
    s = settings({"mesh": (8,), "cluster": CLUSTER})
    chosen = try_one_mesh(call, dataclasses.replace(s, num_microbatches=8))
    assert chosen is not None
    best = few_microbatches(s, chosen, {8}, planners(call, s))
    assert best is not None
    assert best.plan.num_microbatches == 1
    assert best.plan.step_time_s < chosen.plan.step_time_s


def test_a_plan_that_fits_is_found_after_the_time_limit() -> None:
    budget = (peak(planned(False)) + tight(False)[0]) / 2
    assert peak(planned(False)) > budget
    step, args = model(False).step, model(False).abstract_args()
    with pytest.warns(AutoparWarning, match="the time limit was reached"):
        plan = autopar.plan(step, *args, mesh=(2, 4), cluster=with_memory(budget), num_microbatches=1, time_limit=1e-3)
    assert peak(plan) <= budget


def test_if_no_plan_can_fit_only_the_closest_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the program as written, that is the one with all layers recomputed."""
    solved: list[object] = []

    def counted(solve: Callable[..., Any]) -> Callable[..., Any]:
        def run(problem: Problem, **how: Any) -> Any:
            solved.append(problem)
            return solve(problem, **how)

        return run

    monkeypatch.setattr(planning, "bound", counted(bound))
    monkeypatch.setattr(memory_policy, "optimize", counted(optimize))
    step, small = model(False), Cluster.custom((2, 4), 1e-6, 1e-10, 1e12, 1e11, 100_000)
    with pytest.warns(AutoparWarning, match="no layouts of it need less than"):
        plan = autopar.plan(
            step.step, *step.abstract_args(), mesh=(2, 4), cluster=small, offload="none", num_microbatches=1
        )
    assert set(plan.remat) == {"none", "full"}
    assert len(solved) == 2
    assert peak(plan) < peak(planned(False))


@pytest.mark.parametrize("microbatches", sample([1, 2], [2]))
def test_a_user_s_plan_begins_with_as_many_layers_as_are_forecast_to_suffice(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with all of them, as without a forecast."""
    tried: list[int] = []
    attempt = planning.Planner.attempt

    def recorded(self: planning.Planner, policies: Sequence[str], *args: Any) -> Any:
        tried.extend([sum(policy != "none" for policy in policies)] if policies else [])
        return attempt(self, policies, *args)

    monkeypatch.setattr(planning.Planner, "attempt", recorded)
    step, preset = zoo.build("gpt-toy", layers=3, batch=256), Cluster.preset("dgx-h100", hosts=1)
    chosen: dict[str, Any] = {"mesh": (8,), "num_microbatches": microbatches, "offload": "none"}
    with plan_cache.use_folder(None):
        free = autopar.plan(step.step, *step.abstract_args(), cluster=preset, remat="none", **chosen)
        assert not tried
        autopar.plan(step.step, *step.abstract_args(), cluster=preset, memory_budget=0.8 * peak(free), **chosen)
    open_to = sum(remat.recomputable(trace(step.step, *step.abstract_args()).graph))
    assert 0 < tried[0] < open_to


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_a_requested_policy_is_planned_even_if_it_cannot_fit(remat: str) -> None:
    preset = Cluster.preset("dgx-h100")
    small = dataclasses.replace(preset, device=dataclasses.replace(preset.device, memory_bytes=100_000))
    step = model(False)
    with pytest.warns(AutoparWarning, match="no layouts of it need less than"):
        plan = autopar.plan(
            step.step, *step.abstract_args(), mesh=(2, 4), cluster=small, remat=remat, num_microbatches=1
        )
    assert set(plan.remat) == {"none", remat}


def test_recomputed_products_count_as_executed_but_not_as_the_model_s() -> None:
    free, full = planned(False), planned(False, remat="full")
    forward = 1 / 3  # of the products of a train step; the head's are not repeated
    assert full.hfu / full.mfu == pytest.approx(1 + forward, rel=0.1)
    assert full.mfu * full.step_time_s == pytest.approx(free.mfu * free.step_time_s)


def test_a_plan_for_other_layers_is_refused() -> None:
    _, plan = tight(False)
    with pytest.raises(PlanMismatchError, match="Plan again"):
        autopar.parallelize(
            model(False).step, mesh=MESHES[False], cluster=CLUSTER, plan=dataclasses.replace(plan, remat=("full",))
        ).plan(*model(False).abstract_args())


def test_with_enough_memory_nothing_is_rematerialised() -> None:
    free = planned(False)
    assert free.remat == ()
    assert free.mfu == free.hfu
    assert planned(False, memory_budget=2 * peak(free)).remat == ()


@pytest.mark.parametrize("remat", ["some", True, None, ("full",)])
def test_the_option_is_checked(remat: Any) -> None:
    with pytest.raises(ArgumentError, match=r"remat=.* must be 'auto' or 'none' or 'dots' or 'full'"):
        planned(False, remat=remat)
