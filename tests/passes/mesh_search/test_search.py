"""The choice among candidate meshes, and between one mesh and stages, against every candidate planned by itself."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Cluster, Plan, zoo
from autopar.bench.predictions.programs import PROGRAMS
from autopar.errors import ArgumentError, AutoparWarning, MemoryBudgetError, PinError, ScheduleError
from autopar.hardware import meshes
from autopar.hardware.meshes import factorisations
from autopar.ir.trace import trace
from autopar.passes.inter_op import pipelines
from autopar.passes.mesh_search.planner import Parts, Planner
from autopar.passes.mesh_search.search import MeshSearch
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import Pruned
from autopar.plans import cache as plan_cache
from autopar.plans.builders.one_mesh import make_plan
from tests.support.effort import sample
from tests.support.processes import printed_twice
from tests.support.traces import traced as zoo_traced

P = jax.sharding.PartitionSpec
CLUSTER = Cluster.preset("dgx-h100", hosts=1)
SIX = Cluster.custom((6,), alpha=1e-6, beta=1e-9, peak_flops=1e12, memory_bandwidth=1e11, memory_bytes=1e9)
MODELS = ("mlp-toy", "gpt-toy-scan")


@cache
def planned(model: str, mesh: tuple[int, ...] | None, **options: Any) -> Plan:
    built = zoo.build(model)
    return autopar.plan(built.step, *built.abstract_args(), mesh=mesh, cluster=CLUSTER, **options)


@cache
def alone(model: str) -> dict[tuple[int, ...], Plan]:
    """The optimum of every mesh."""
    return {sizes: planned(model, sizes, gap=0.0, time_limit=60.0) for sizes in factorisations(CLUSTER.num_devices)}


@cache
def without_time(model: str) -> tuple[Plan, list[tuple[int, ...]], list[str]]:
    """The plan of a search that has no time, the meshes that are planned, and the warnings."""
    meshes_planned: list[tuple[int, ...]] = []
    plan_of = Planner.plan

    def recorded(self: Planner, *args: Any) -> Any:
        meshes_planned.append(self.mesh.sizes)
        return plan_of(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "plan", recorded)
        with pytest.warns(AutoparWarning) as warned:
            plan = planned(model, None, time_limit=1e-3, gap=0.0)
    return plan, meshes_planned, [str(w.message) for w in warned]


@pytest.mark.parametrize(
    ("model", "gap"),
    sample(product(MODELS, [0.0, 0.005, 0.2]), [("mlp-toy", 0.0), ("mlp-toy", 0.2), ("gpt-toy-scan", 0.005)]),
)
def test_the_answer_is_within_the_gap_of_the_best_mesh(model: str, gap: float) -> None:
    searched, best = (
        planned(model, None, gap=gap, time_limit=60.0),
        min(plan.step_time_s for plan in alone(model).values()),
    )
    assert searched.lower_bound_s <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= searched.step_time_s <= best / (1 - gap) * (1 + 1e-9)
    assert searched.gap == pytest.approx(max(0.0, 1 - searched.lower_bound_s / searched.step_time_s), abs=1e-9)
    assert searched.gap <= gap + 1e-9
    assert alone(model)[searched.mesh_sizes].step_time_s <= searched.step_time_s * (1 + 1e-9)


def test_a_mesh_is_left_once_its_bound_is_no_better() -> None:
    traced, mesh = zoo_traced("mlp-toy"), CLUSTER.logical_mesh((8,))
    best = make_plan(traced, mesh, "local", Options()).plan.step_time_s
    with pytest.raises(Pruned) as left:
        make_plan(traced, mesh, "local", Options(), cutoff=0.9 * best)
    assert left.value.lower_bound <= best * (1 + 1e-9)
    assert left.value.phases["graph"] > 0
    assert make_plan(traced, mesh, "local", Options(), cutoff=1.1 * best).plan.step_time_s == pytest.approx(best)


def test_with_no_time_there_is_a_plan_and_an_honest_gap() -> None:
    best, (searched, _, messages) = alone("gpt-toy-scan"), without_time("gpt-toy-scan")
    assert any("the time limit was reached" in message for message in messages)
    assert searched.lower_bound_s <= min(plan.step_time_s for plan in best.values()) * (1 + 1e-9)
    assert searched.step_time_s >= min(plan.step_time_s for plan in best.values()) * (1 - 1e-9)


def test_phases_are_those_of_all_meshes() -> None:
    phases = planned("mlp-toy", None, gap=0.0, time_limit=60.0).phases
    assert {"trace", "rules", "graph", "fold", "presolve", "bound", "eliminate", "export"} <= {*phases}
    assert all(seconds >= 0 for seconds in phases.values())


def test_a_pin_that_few_meshes_can_take_is_no_error() -> None:
    """An axis "y" is there with two axes and not with one; one that none has is an error."""
    step, w, x = (lambda w, x: w - jnp.tanh(x @ w).sum()), np.ones((16, 16), "f4"), np.ones((16, 16), "f4")
    searched = autopar.plan(step, w, x, cluster=CLUSTER, pins={"w": P("y")})
    assert len(searched.mesh_sizes) > 1
    with pytest.raises(PinError):
        autopar.plan(step, w, x, cluster=CLUSTER, pins={"w": P("model")})


def test_what_fits_on_one_mesh_is_planned_there() -> None:
    """A budget that not all meshes can keep is refused only where none can."""

    def plan(mesh: tuple[int, ...] | None, budget: float | str) -> Plan:
        shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((6, 8), (8, 6))]
        return autopar.plan(lambda a, b: jnp.tanh(a @ b).sum(), *shapes, mesh=mesh, cluster=SIX, memory_budget=budget)

    least = [plan(sizes, "min").stages[0].peak_memory_bytes for sizes in factorisations(6)]
    assert min(least) < max(least)
    assert plan(None, float(min(least))).stages[0].peak_memory_bytes <= min(least)
    with pytest.raises(MemoryBudgetError) as refused:
        plan(None, float(min(least)) / 4)
    assert refused.value.least_bytes == min(least)


@pytest.mark.parametrize("gap", [-0.1, 1.5, "small", math.nan, True])
def test_the_gap_is_checked(gap: Any) -> None:
    with pytest.raises(ArgumentError, match=r"gap=.* must be a relative gap from 0 to 1"):
        planned("mlp-toy", None, gap=gap)


def test_every_process_finds_the_same_plan() -> None:
    code = (
        "import dataclasses; from autopar import zoo, plan, Cluster; m = zoo.build('mlp-toy'); "
        "p = plan(m.step, *m.abstract_args(), cluster=Cluster.preset('dgx-h100')); "
        "print(dataclasses.replace(p, phases={}).to_json())"
    )
    printed_twice(code)


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lower bounds on pipelines, which take half of the time and do not change the plan."""
    monkeypatch.setattr(pipelines, "least_seconds", lambda *_: 0.0)


@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize(
    ("model", "hosts"),
    sample([("mlp-toy", 1), ("mlp-toy", 2), ("gpt-toy-scan", 2)], [("mlp-toy", 1), ("mlp-toy", 2)]),
)
def test_stages_are_searched_among_plans_of_one_mesh(model: str, hosts: int) -> None:
    built, cluster = zoo.build(model), Cluster.preset("p3.16xlarge", hosts=hosts)
    searched = autopar.plan(built.step, *built.abstract_args(), cluster=cluster, stages="search")
    for sizes in factorisations(cluster.num_devices):
        fixed = autopar.plan(built.step, *built.abstract_args(), cluster=cluster, mesh=sizes)
        assert searched.step_time_s <= fixed.step_time_s * 1.005, (sizes, searched.mesh_sizes, len(searched.stages))


@pytest.mark.usefixtures("unbounded")
def test_stages_are_searched_on_a_cluster_with_a_level_per_axis() -> None:
    """Five of two rows of four devices are no submesh; they are not among those tried."""
    built = zoo.build("mlp-toy")
    cluster = Cluster.custom((2, 4), alpha=1e-6, beta=1e-9, peak_flops=1e12, memory_bandwidth=1e11, memory_bytes=1e9)
    searched = autopar.plan(built.step, *built.abstract_args(), cluster=cluster, stages="search")
    for sizes in factorisations(8):
        fixed = autopar.plan(built.step, *built.abstract_args(), cluster=cluster, mesh=sizes)
        assert searched.step_time_s <= fixed.step_time_s * 1.005


@pytest.mark.usefixtures("unbounded")
def test_what_one_mesh_was_expected_to_take_hides_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages are found where one mesh does not fit, whatever it was forecast to take once it does."""
    built = zoo.build("mlp-toy", batch=256)
    cluster = Cluster.custom((2,), alpha=1e-5, beta=1e-9, peak_flops=1e12, memory_bandwidth=1e11, memory_bytes=2e5)
    searched = autopar.plan(built.step, *built.abstract_args(), cluster=cluster, stages="search")
    assert len(searched.stages) == 2
    for promised in sample((1e-12, 1.0), (1e-12,)):
        monkeypatch.setattr(MeshSearch, "expected", lambda self, promised=promised: (promised, False))
        with plan_cache.use_folder(None):
            again = autopar.plan(built.step, *built.abstract_args(), cluster=cluster, stages="search")
        assert again.step_time_s == searched.step_time_s
        assert [stage.submesh for stage in again.stages] == [stage.submesh for stage in searched.stages]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unbounded")
def test_what_one_mesh_refuses_that_was_expected_to_fit_hides_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: MeshSearch, cutoff: float) -> Any:
        raise MemoryBudgetError("nothing fits", 1.0, 2, 2)

    monkeypatch.setattr(MeshSearch, "expected", lambda self: (1e-12, False))
    monkeypatch.setattr(MeshSearch, "best", refused)
    built = zoo.build("gpt-toy", batch=64)
    cluster = Cluster.custom(
        (2, 4), alpha=(1e-5, 1e-6), beta=(1e-9, 1e-11), peak_flops=1e12, memory_bandwidth=1e11, memory_bytes=1e6
    )
    with plan_cache.use_folder(None):
        assert len(autopar.plan(built.step, *built.abstract_args(), cluster=cluster, stages="search").stages) == 2
        with pytest.raises(MemoryBudgetError, match="nothing fits"):
            autopar.plan(built.step, *built.abstract_args(), cluster=cluster, stages="search", num_microbatches=1)


def test_no_other_mesh_is_planned_once_the_time_is_over() -> None:
    """Their bounds count: the gap says what may be missed."""
    plan, meshes_planned, messages = without_time("gpt-toy-scan")
    assert messages == [
        f"step: the time limit was reached (0.001 s) with a gap of {plan.gap:.1%}: another plan may be up to "
        f"{plan.gap:.1%} faster. Raise time_limit= (--time-limit)"
    ]
    assert meshes_planned == [plan.mesh_sizes]
    assert plan.lower_bound_s <= min(fixed.step_time_s for fixed in alone("gpt-toy-scan").values()) * (1 + 1e-9)


def test_where_nothing_fits_other_meshes_are_soon_left(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[int, ...]] = []

    def recorded(self: Planner, *args: Any) -> Any:
        planned.append(self.mesh.sizes)
        return plan_of(self, *args)

    plan_of = Planner.plan
    monkeypatch.setattr(Planner, "plan", recorded)
    built, tiny = zoo.build("gpt-toy"), Cluster.custom((8,), 1e-6, 1e-10, 1e12, 1e11, 20_000)
    with pytest.warns(AutoparWarning, match="no layouts of it need less than"):
        plan = autopar.plan(built.step, *built.abstract_args(), cluster=tiny, stages=1, num_microbatches=1)
    assert set(plan.remat) == {"none", "full"}
    assert planned == [plan.mesh_sizes]


@pytest.mark.parametrize(
    ("name", "preset"),
    sample(
        product(["mlp-toy", "half-gpt"], ["tpu-v5e", "dgx-h100"]),
        [("mlp-toy", "tpu-v5e"), ("half-gpt", "dgx-h100")],
    ),
)
def test_no_mesh_is_left_that_has_a_plan_that_fits(name: str, preset: str) -> None:
    """Nor is recomputing everything taken for the least that a step may need: it may need more."""
    built = PROGRAMS[name](layers=1, batch=8, seq=256) if name in PROGRAMS else zoo.build(name)
    cluster = Cluster.preset(preset, hosts=1)
    least = autopar.plan(built.step, *built.abstract_args(), cluster=cluster, mesh=(8,), memory_budget="min")
    budget = 1.0 + least.stages[0].peak_memory_bytes
    options = Options(remat="auto", offload="auto", memory_budget=budget)
    traced = trace(built.step, *built.abstract_args())
    planner = Planner(traced, cluster.logical_mesh((8,)), options, Parts(traced))
    assert not planner.cannot_fit()
    assert not planner.cannot_fit(anywhere=True)


def test_a_loss_that_compares_all_rows_is_planned_on_one_mesh() -> None:
    """Its gradient needs the whole batch, so that no stage has a backward pass of its own."""
    built, cluster = zoo.build("clip-toy", layers=1), Cluster.preset("p3.16xlarge", hosts=2)
    searched = autopar.plan(built.step, *built.abstract_args(), cluster=cluster)
    assert len(searched.stages) == 1
    with pytest.raises(
        ScheduleError, match=r"runs microbatch by microbatch: .*whole batch at once, as dot_general at clip\.py:\d+"
    ):
        autopar.plan(built.step, *built.abstract_args(), cluster=cluster, mesh=(2, 8), stages=2, schedule="1f1b")


def test_gradients_that_a_scan_accumulates_are_no_backward_pass_of_a_stage() -> None:
    def step(w: Any, batches: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return total + jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2))(w), None

        return w - jax.lax.scan(add, jnp.zeros_like(w), batches)[0]

    with pytest.raises(
        ScheduleError, match=r"gradients are made inside of the scan at test_search\.py:\d+, .*'inference'"
    ):
        autopar.plan(step, jnp.ones((16, 16)), jnp.ones((4, 24, 16)), mesh=(8,), stages=2, schedule="1f1b")


@pytest.mark.usefixtures("unbounded")
def test_what_one_mesh_refuses_leaves_the_stages() -> None:
    """A batch of five divides by no mesh axis, and falls into five microbatches."""
    built = zoo.build("mlp-toy", batch=5)
    cluster = Cluster.custom(
        (2, 4), alpha=(1e-3, 1e-6), beta=(1e-7, 1e-10), peak_flops=1e9, memory_bandwidth=1e11, memory_bytes=1e9
    )
    searched = autopar.plan(built.step, *built.abstract_args(), cluster=cluster, stages="search", batch_argnums=(1,))
    assert (len(searched.stages), searched.num_microbatches) == (2, 5)
    with pytest.raises(ArgumentError, match=r"batch argument .* of shape \(5, 32\).* does not divide"):
        autopar.plan(built.step, *built.abstract_args(), cluster=cluster, mesh=(2, 4), batch_argnums=(1,))


def test_meshes_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    built, lines = zoo.build("mlp-toy"), list[str]()
    traced = trace(built.step, *built.abstract_args())
    targets = [meshes.Target(CLUSTER.logical_mesh(sizes), CLUSTER) for sizes in ((2, 4), (8,))]
    MeshSearch(traced, targets, Options(), Parts(traced), lines.append).best()
    assert [line.split(":")[0].split(";")[0] for line in lines] == [
        "bounding mesh 8",
        "bounding mesh 2x4",
        "planning mesh 8",
        "mesh 8",
        "planning mesh 2x4",
        "mesh 2x4",
    ]
    assert "best so far" in lines[4]
    assert capsys.readouterr() == ("", "")
