"""Why values have their layouts, what others would cost, and two plans side by side.

`python -m tests.plans.test_explain` times explanations of models of a billion parameters.
"""

from __future__ import annotations

import html
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError
from autopar.ir.layout import spec
from autopar.ir.text import WIDTH, seconds, table
from autopar.plans import cache as plan_cache
from autopar.plans.plan import Plan
from autopar.plans.views.groups import label

MESH = (2, 4)


@pytest.fixture(scope="module")
def mlp():
    return zoo.build("mlp-toy")


@pytest.fixture(scope="module")
def plan(mlp):
    return autopar.plan(mlp.step, *mlp.abstract_args(), mesh=MESH, cluster=dear(MESH))


def only(explanation):
    (entry,) = explanation.entries
    return entry


@pytest.mark.parametrize("name", ["params/blocks/*/w1", "state/params/blocks/*/w1"])
def test_equal_layers_are_one_entry_whose_layouts_are_priced(plan, name):
    entry = only(plan.explain(name))
    assert entry.name == "state/params/blocks/*/w1 x2"
    planned = next(a for a in entry.alternatives if a.layout == entry.chosen)
    assert planned.at_least_s <= plan.step_time_s * (1 + 1e-9)
    assert len(entry.alternatives) > 3
    assert all(a.exact_s is None and a.at_least_s >= plan.lower_bound_s * 0.9 for a in entry.alternatives)
    assert [a.seconds for a in entry.alternatives] == sorted(a.seconds for a in entry.alternatives)


def test_exact_prices_are_above_the_bounds_and_the_planned_layout_costs_the_step(plan):
    entry = only(plan.explain("params/blocks/0/w1", exact=True))
    assert all(a.proven and a.exact_s >= a.at_least_s * (1 - 1e-9) for a in entry.alternatives)
    planned = next(a for a in entry.alternatives if a.layout == entry.chosen)
    assert planned.exact_s == pytest.approx(plan.step_time_s, rel=plan.gap + 1e-6)
    assert min(a.exact_s for a in entry.alternatives) <= plan.step_time_s * (1 + 1e-9)


def test_it_prints_layouts_sizes_and_differences(plan):
    last = len(plan.inputs) - 1
    text = str(plan.explain(f"arg:{last}"))
    assert text.startswith(f"{plan.input_paths[last]}: {plan.input_types[last]} as P(")
    assert "a device" in text
    assert "(planned)" in text
    assert "at least" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_source_line_and_an_operation_are_what_they_compute(plan):
    line = next(c.source for c in plan.collectives if c.source)
    entries = plan.explain(line).entries
    assert all(line in entry.name for entry in entries)
    assert sum(entry.bytes_sent for entry in entries) > 0
    products = plan.explain("dot_general").entries
    assert {entry.name.split()[0] for entry in products} == {"dot_general"}
    for entry in products:
        assert entry.chosen in [a.layout for a in entry.alternatives]
        assert entry.alternatives[0].at_least_s <= plan.step_time_s * (1 + 1e-9)


def test_a_result(plan):
    entry = only(plan.explain(f"out:{len(plan.outputs) - 1}"))
    assert (entry.name, entry.alternatives) == (f"result {plan.output_paths[-1]}", ())


def test_a_pin_is_named(mlp):
    pinned = autopar.plan(mlp.step, *mlp.abstract_args(), mesh=MESH, pins={"params/blocks/*/w1": P("x")})
    entry = only(pinned.explain("params/blocks/*/w1"))
    assert "fixed by the pin 'params/blocks/*/w1'" in entry.reasons
    assert len(entry.alternatives) == 1


def test_an_unknown_name_has_neighbours(plan):
    with pytest.raises(ArgumentError, match=r"'params/blocks/0/wi' is no argument, .*'params/blocks/0/w1'"):
        plan.explain("params/blocks/0/wi")


def test_a_plan_from_a_file_has_prices_with_its_step(plan, mlp, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = autopar.Plan.load(path)
    assert loaded == replace(plan, origin=None)
    assert only(loaded.explain("params/blocks/*/w1")).alternatives == ()
    assert "not priced without the step" in str(loaded.explain("params/blocks/*/w1"))
    checked = autopar.plan(mlp.step, *mlp.abstract_args(), plan=path, cluster=dear(MESH))
    assert str(checked.explain("params/blocks/*/w1")) == str(plan.explain("params/blocks/*/w1"))
    change = {"pins": {"params/blocks/*/w1": P("x")}}
    assert checked.what_if(**change).after.step_time_s == plan.what_if(**change).after.step_time_s
    assert checked.what_if(gap=0.0).after.mesh_sizes == MESH
    elsewhere = autopar.plan(mlp.step, *mlp.abstract_args(), plan=path)
    with pytest.raises(ArgumentError, match="give cluster= as it was then"):
        elsewhere.explain("params/blocks/*/w1")


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w["up"]) @ w["down"])


def train(w, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))


def test_where_memory_binds_exact_prices_fit_and_faster_layouts_are_left_out():
    """With a budget the plan is slower than without; no layout of an argument is priced below what fits."""
    args = {n: jax.ShapeDtypeStruct((512, 512), jnp.float32) for n in ("up", "down")}, jnp.zeros((64, 512))
    options = {"mesh": (4,), "cluster": dear((4,)), "remat": "none", "offload": "none", "gap": 0.0}
    free = autopar.plan(train, *args, **options)
    least = autopar.plan(train, *args, memory_budget="min", **options)
    budget = (free.peak_memory_bytes + least.peak_memory_bytes) / 2
    tight = autopar.plan(train, *args, memory_budget=budget, **options)
    assert tight.step_time_s > free.step_time_s
    for a in only(tight.explain("w/up", exact=True)).alternatives:
        assert a.exact_s >= tight.step_time_s * (1 - 1e-9)
        assert a.at_least_s <= a.exact_s * (1 + 1e-9)


# Two plans side by side


def test_what_if_is_the_plan_with_the_option(plan, mlp):
    compared = plan.what_if(pins={"params/blocks/*/w1": P("x")})
    again = autopar.plan(
        mlp.step, *mlp.abstract_args(), mesh=MESH, cluster=dear(MESH), pins={"params/blocks/*/w1": P("x")}
    )
    assert replace(compared.after, phases={}, origin=None) == replace(again, phases={}, origin=None)
    assert compared.before is plan
    assert compared.slower_s == again.step_time_s - plan.step_time_s
    assert {after for path, (_, after) in compared.layouts.items() if path.endswith("params/blocks/0/w1")} <= {"P('x')"}


def test_what_if_adds_pins_and_goes_on_from_its_plan(plan):
    first = plan.what_if(pins={"params/blocks/0/w1": P("x")}).after
    both = first.what_if(pins={"params/blocks/0/w2": P("x")}).after
    specs = both.shardings()
    assert specs["state/params/blocks/0/w1"] == specs["state/params/blocks/0/w2"] == P("x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"static_argnums": 0}, "static_argnums= cannot be another"),
        ({"memory_bugdet": 1}, "option 'memory_bugdet' is not known"),
        ({"stages": 0}, "stages=0 must be"),
    ],
)
def test_what_if_refuses(plan, options, message):
    with pytest.raises(ArgumentError, match=message):
        plan.what_if(**options)


def test_what_if_needs_the_step(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ArgumentError, match="what_if needs the step"):
        autopar.Plan.load(tmp_path / "plan.json").what_if(stages=2)


def test_a_plan_does_not_keep_the_arrays_of_the_call(mlp):
    plan = autopar.plan(mlp.step, mlp.init(jax.random.key(0)), mlp.make_batch(jax.random.key(1)), mesh=MESH)
    kept = plan.origin.replan.__closure__
    leaves = [leaf for cell in kept for leaf in jax.tree.leaves(getattr(cell.cell_contents, "args", ()))]
    assert leaves
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_what_if_of_saved_stages_keeps_them(mlp, tmp_path):
    options = {"cluster": dear((4,)), "stages": 2, "num_microbatches": 4, "schedule": "gpipe"}
    autopar.plan(mlp.step, *mlp.abstract_args(), mesh=(4,), **options).save(tmp_path / "plan.json")
    loaded = autopar.plan(mlp.step, *mlp.abstract_args(), plan=tmp_path / "plan.json", cluster=dear((4,)))
    after = loaded.what_if(remat="full").after
    assert (len(after.stages), after.schedule, after.num_microbatches, after.mesh_sizes) == (2, "gpipe", 4, (4,))
    assert only(loaded.explain("params/blocks/1/w1")).prices.subject == "stage 1"


def test_stages_beside_one_mesh(plan):
    compared = plan.what_if(stages=2)
    text = str(compared)
    assert "2 stages" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "stages" in compared.data()
    back = compared.after.what_if(stages=1, num_microbatches=1)
    assert back.after.step_time_s == pytest.approx(plan.step_time_s, rel=0.01)


def test_a_stage_is_priced_by_the_time_that_it_is_busy(mlp):
    options = {"mesh": (4,), "cluster": dear((4,)), "stages": 2, "num_microbatches": 2, "gap": 0.0}
    plan = autopar.plan(mlp.step, *mlp.abstract_args(), **options)
    entry = only(plan.explain("params/blocks/1/w1", exact=True))
    assert entry.prices.subject == "stage 1"
    assert f"stored by {entry.prices.subject}" in entry.reasons
    planned = next(a for a in entry.alternatives if a.layout == entry.chosen)
    # the problem prices local slices, the times of passes do not
    assert planned.exact_s == pytest.approx(entry.prices.seconds, rel=1e-3)
    assert min(a.exact_s for a in entry.alternatives) == pytest.approx(planned.exact_s, rel=1e-6)
    assert all(a.at_least_s <= a.exact_s * (1 + 1e-9) for a in entry.alternatives)
    assert "stage 1" in str(plan.explain("params/blocks/1/w1"))
    dearest = max(entry.alternatives, key=lambda a: a.exact_s)
    pin = spec(dearest.layout, 2, plan.mesh_names)
    pinned = plan.what_if(pins={"params/blocks/1/w1": pin}).after
    assert pinned.stages[0].seconds == pytest.approx(plan.stages[0].seconds)
    passes = pinned.num_microbatches * (pinned.stages[1].seconds["F"] + pinned.stages[1].seconds["B"])
    assert passes + pinned.stages[1].seconds["once"] == pytest.approx(dearest.exact_s, rel=1e-3)


def test_a_plan_beside_itself_has_no_difference(plan):
    compared = plan.diff(plan)
    assert (compared.slower_s, compared.layouts, compared.data()["collectives"]) == (0.0, {}, [])
    assert "are the same" in str(compared)


def test_a_notebook_shows_the_text(plan):
    for value in (plan, plan.explain("params/blocks/0/w1"), plan.diff(plan), plan.time(), plan.memory()):
        shown = value._repr_html_()
        assert shown.startswith("<pre")
        assert html.escape(str(value)) in shown


def test_tables_are_text_in_a_kernel_of_jupyter_too(plan, monkeypatch):
    expected = str(plan.time())
    assert "compute" in expected
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # then rich displays tables by itself
    assert str(plan.time()) == expected


# Hints


def test_hints_are_plans_under_one_other_option() -> None:
    model = zoo.build("mlp-toy", batch=512)
    args, mesh, cluster = model.abstract_args(), (2, 4), dear((2, 4))
    free = autopar.plan(model.step, *args, mesh=mesh, cluster=cluster)
    options = {"mesh": mesh, "cluster": cluster, "memory_budget": 0.6 * free.peak_memory_bytes}
    tight = autopar.plan(model.step, *args, **options)
    ranked = tight.hints()
    hints = {hint.change.partition("=")[0]: hint for hint in ranked}
    doubled = autopar.plan(model.step, *args, **{**options, "memory_budget": 1.2 * free.peak_memory_bytes})
    assert hints["memory_budget"].step_time_s == pytest.approx(doubled.step_time_s)
    assert hints["memory_budget"].saved_s == pytest.approx(tight.step_time_s - doubled.step_time_s)
    assert hints["memory_budget"].peak_memory_bytes == doubled.peak_memory_bytes
    assert f"{hints['memory_budget'].saved_s / tight.step_time_s:.1%} less" in str(hints["memory_budget"])
    times = [hint.step_time_s for hint in ranked]
    assert times == sorted(times)
    assert times[-1] < tight.step_time_s


def test_a_pipeline_is_told_of_the_schedule_with_the_smallest_bubble() -> None:
    model = zoo.build("mlp-toy")
    options = {"mesh": (2,), "cluster": dear((2,)), "stages": 2, "num_microbatches": 2}
    plan = autopar.plan(model.step, *model.abstract_args(), schedule="gpipe", **options)
    other = autopar.plan(model.step, *model.abstract_args(), schedule="zb-h1", **options)
    hints = {hint.change: hint.step_time_s for hint in plan.hints()}
    assert hints["schedule='zb-h1'"] == pytest.approx(other.step_time_s)
    assert not any(hint.change.startswith("schedule") for hint in other.hints())


def test_twice_the_batch_is_planned_from_a_trace_of_its_own() -> None:
    cluster = dear((2,))
    small, large = (zoo.build("mlp-toy", batch=batch) for batch in (32, 64))
    plan = autopar.plan(small.step, *small.abstract_args(), mesh=(2,), cluster=cluster)
    other = autopar.plan(large.step, *large.abstract_args(), mesh=(2,), cluster=cluster)
    (hint,) = plan.hints()
    assert (hint.change, hint.examples, hint.batches) == ("twice the batch", 64, 2)
    assert hint.step_time_s == pytest.approx(other.step_time_s)
    assert hint.peak_memory_bytes == other.peak_memory_bytes
    assert hint.saved_s == pytest.approx(plan.step_time_s - other.step_time_s / 2)
    assert f"of 64 examples, {seconds(other.step_time_s / 64)} per example, {hint.share:.1%} less" in str(hint)
    assert hint.share == pytest.approx(1 - other.step_time_s / 2 / plan.step_time_s)


def test_twice_the_batch_is_compared_with_other_changes_by_the_time_of_an_example() -> None:
    model = zoo.build("mlp-toy")
    plan = autopar.plan(model.step, *model.abstract_args(), mesh=(8,), cluster=dear((8,)), pins={"batch": P()})
    hints = plan.hints()
    assert {hint.change for hint in hints} == {"no pins", "twice the batch"}
    saved = [hint.saved_s for hint in hints]
    assert saved == sorted(saved, reverse=True)


def of_any(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - x.T @ (x @ w)


def of_32(w: jax.Array, x: jax.Array) -> jax.Array:
    if x.shape[0] != 32:
        raise RuntimeError("a batch has 32 examples")
    return of_any(w, x)


def whose_state_grows(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.concatenate([of_any(w, x)] * (x.shape[0] // 32))


@pytest.mark.parametrize(("step", "fits"), [(of_any, True), (of_32, False), (whose_state_grows, False)])
def test_no_hint_names_twice_the_batch_where_the_step_does_not_take_it(step, fits) -> None:
    shapes = jax.ShapeDtypeStruct((64, 8), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")
    plan = autopar.plan(step, *shapes, mesh=(2,), cluster=dear((2,)))
    assert [hint.change for hint in plan.hints()] == ["twice the batch"] * fits


def test_a_module_of_flax_is_traced_again_with_twice_the_batch() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")

    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    before = np.array(model.kernel[...])
    plan = autopar.plan(step, model, optimizer, jnp.ones((16, 32)), mesh=(2,), cluster=dear((2,)))
    assert [hint.examples for hint in plan.hints()] == [32]
    np.testing.assert_array_equal(before, model.kernel[...])


CUDNN = 'implementation="cudnn" in jax.nn.dot_product_attention'


def attention_hints(attention: str, cluster: str) -> list[float]:
    """Predicted step times of the hint of cuDNN's attention, for a GPT with this attention on a preset."""
    model = zoo.build("gpt-3m", seq=1024, batch=16, layers=1, dtype="bfloat16", attention=attention)
    plan = autopar.plan(model.step, *model.abstract_args(), mesh=(8,), cluster=cluster)
    return [hint.step_time_s for hint in plan.hints() if hint.change == CUDNN]


def test_attention_of_cudnn_is_planned_in_place_of_that_of_xla() -> None:
    model = zoo.build("gpt-3m", seq=1024, batch=16, layers=1, dtype="bfloat16", attention="cudnn")
    fused = autopar.plan(model.step, *model.abstract_args(), mesh=(8,), cluster="dgx-h100")
    assert attention_hints("dot_product", "dgx-h100") == [pytest.approx(fused.step_time_s)]


@pytest.mark.parametrize(("attention", "cluster"), [("naive", "dgx-h100"), ("dot_product", "tpu-v5e")])
def test_attention_that_is_written_out_or_on_tpus_has_no_such_hint(attention: str, cluster: str) -> None:
    assert attention_hints(attention, cluster) == []


def test_a_plan_that_nothing_makes_faster_has_no_hints() -> None:
    shapes = jax.ShapeDtypeStruct((64, 8), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")
    plan = autopar.plan(of_32, *shapes, mesh=(2,), cluster=dear((2,)))
    assert plan.hints() == ()
    with pytest.raises(ArgumentError, match="hints needs the step, which a file does not contain"):
        replace(plan, origin=None).hints()


def test_a_glob_over_leaves_of_several_depths_names_what_they_begin_with(plan):
    """Moments are one group whatever their paths: those of one type and layout are an entry."""
    entries = plan.explain("*").entries
    leaves = len(plan.input_paths)
    counts = [int(entry.name.rpartition(" x")[2]) if " x" in entry.name else 1 for entry in entries]
    assert sum(counts) == leaves
    assert {entry.name.partition("/")[0] for entry in entries} == {path.partition("/")[0] for path in plan.input_paths}
    assert label(["opt/mu/blocks/0/w", "opt/mu/head"]) == "opt/mu/... x2"
    assert label(["opt/mu/blocks/0/w", "opt/mu/blocks/1/w"]) == "opt/mu/blocks/*/w x2"


# Times

TIMED: tuple[tuple[str, Any], ...] = (
    ("gpt-1.3b", {}),
    ("moe-1.3b", {}),
    ("wresnet-1b", {}),
    ("gpt-1.3b", {"memory_budget": "60%"}),
    ("moe-1.3b", {"memory_budget": "60%"}),
)
GLOBS = ("*", "state/*", "opt/*", "params/*")
SAMPLED = 7  # arguments whose layouts are solved again


def explained_s(plan: Plan, name: str, *, exact: bool = False) -> float:
    """Seconds until an explanation is there; of an exact one, per layout."""
    began = time.perf_counter()
    entries = plan.explain(name, exact=exact).entries
    return (time.perf_counter() - began) / (max(1, sum(len(entry.alternatives) for entry in entries)) if exact else 1)


def times_of(model: str, options: Any) -> Sequence[str]:
    """A row of the table of times."""
    built = zoo.build(model)
    began = time.perf_counter()
    plan = autopar.plan(built.step, *built.abstract_args(), cluster="dgx-h100", mesh=(8, 8), **options)
    planned = time.perf_counter() - began
    first = explained_s(plan, "params/*")
    lines = [line for line in plan.time().lines if ".py:" in line]
    params = [path for path in plan.input_paths if "params/" in path]
    sampled = params[:: max(1, len(params) // SAMPLED)][:SAMPLED]

    def both(times: Iterable[float]) -> str:
        ordered = sorted(times)
        return f"{statistics.median(ordered):.3f}, {ordered[-1]:.2f}"

    return (
        " ".join([model, *map(str, options.values())]),
        f"{planned:.1f}",
        f"{first:.2f}",
        both(explained_s(plan, path) for path in plan.input_paths),
        f"{max(explained_s(plan, name) for name in GLOBS):.2f}",
        both(explained_s(plan, line) for line in lines),
        both(explained_s(plan, path, exact=True) for path in sampled),
    )


if __name__ == "__main__":
    HEADS = ("", "planning", "first", "by name", "globs", "by line", "exact, a layout")
    with plan_cache.off():
        print(table("seconds", HEADS, [times_of(*timed) for timed in TIMED]))
