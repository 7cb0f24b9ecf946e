"""Plan files as they should not be: every one is refused with the field and what was expected, or computes the step."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import AutoparError, PlanMismatchError
from autopar.hardware.cluster import Cluster
from autopar.plans.plan import Plan, from_json
from tests.plans.plan_edits import deep, edited, laid_out
from tests.programs.steps import array, loss, sgd, two_layers

CLUSTER = Cluster.custom((2, 4), (1e-9, 1e-9), (1e-13, 1e-13), 1e9, 1e8, 10**10)
ARGS = two_layers(), array(16, 8)
MESH = {"x": 2, "y": 4}
PINS = {"params/up": P(None, "y"), "x": P("x")}


def step(params: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return sgd(params, grads), value


def meeting(a: jax.Array, b: jax.Array, x: jax.Array) -> Any:
    """Two products that meet in a sum, of which `planned_sums` leaves the parts to the sum."""
    return jnp.tanh(x @ a + x @ b)


SMALL = zoo.build("mlp-toy", batch=16, dtype="float32")

#: name -> function, arguments, options of a plan of it.
CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "whole": (step, lambda: ARGS, {"mesh": MESH, "cluster": CLUSTER, "pins": PINS}),
    "narrow": (step, lambda: (two_layers(), array(6, 8)), {"mesh": MESH, "cluster": CLUSTER}),
    "stages": (SMALL.step, lambda: inputs(), {"mesh": (4, 2), "stages": 2, "num_microbatches": 2}),
    "parts": (
        SMALL.step,
        lambda: inputs(),
        {"mesh": (2, 4), "cluster": CLUSTER, "num_microbatches": 2, "remat": "full"},
    ),
}


@cache
def inputs() -> tuple[Any, ...]:
    return SMALL.init(jax.random.key(0)), SMALL.make_batch(jax.random.key(1))


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and the text of a plan of it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    text: str


@cache
def case(name: str) -> Case:
    fn, args, options = CASES[name]
    return Case(fn, args(), autopar.plan(fn, *args(), **options).to_json())


# Every field


def at(data: Any, *path: str | int) -> tuple[Any, str | int]:
    """The list or object that holds a field, and its key there."""
    for key in path[:-1]:
        data = data[key]
    return data, path[-1]


def put(value: Any, *path: str | int) -> Callable[[Any], Any]:
    def edit(data: Any) -> None:
        holder, key = at(data, *path)
        holder[key] = value

    return edit


def drop(*path: str | int) -> Callable[[Any], Any]:
    def edit(data: Any) -> None:
        holder, key = at(data, *path)
        del holder[key]

    return edit


def backwards(*path: str | int) -> Callable[[Any], Any]:
    def edit(data: Any) -> None:
        holder, key = at(data, *path)
        holder[key] = holder[key][::-1]

    return edit


#: title -> (plan, what is done to it, the message)
LOADED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no stages": (
        "whole",
        put([], "stages"),
        "field 'stages' is a list of 0, expected one stage, as schedule 'none' has",
    ),
    "stages missing": ("whole", drop("stages"), "field 'stages' is missing, expected a list, each an object with .*"),
    "a stage too few": ("stages", drop("stages", 1), r"field 'stages' is a list of 1, expected several stages, .*"),
    "a field of a stage missing": ("stages", drop("stages", 1, "rank"), r"field 'stages\[1\]\.rank' is missing, .*"),
    "another type": ("whole", put("many", "rows"), "field 'rows' is 'many', expected an integer from 0 to .*"),
    "a truth value": ("whole", put(True, "rows"), "field 'rows' is True, expected an integer .*"),
    "nan": ("whole", put(float("nan"), "gap"), "field 'gap' is nan, expected a number between .*"),
    "infinity": ("whole", put(float("inf"), "parts", "reshards"), r"field 'parts\['reshards'\]' is inf, .*"),
    "a huge number": (
        "whole",
        put(10**400, "mesh_sizes", 0),
        r"field 'mesh_sizes\[0\]' is 10000.*, expected an integer .*",
    ),
    "text that is none": ("whole", put("\ud800", "notes"), "field 'notes' is .*, expected a list, each text .*"),
    "half a character": ("whole", put(["\ud800"], "notes"), r"field 'notes\[0\]' is .*, expected text that UTF-8 .*"),
    "a field nobody knows": ("whole", put(1, "speed"), "field 'speed' is not known, expected one of graph_hash, .*"),
    "a list nested deep": (
        "whole",
        put(deep(300), "batch"),
        r"field 'batch\[0\]' is \[\[\[\.\.\.\]\]\], expected an .*",
    ),
    "inputs short": (
        "whole",
        drop("inputs", 0),
        "field 'inputs' is a list of 2, expected 3, one for each of input_paths",
    ),
    "results short": ("whole", drop("output_shapes", 0), "field 'output_shapes' is .* one for each of output_paths"),
    "donation of an unknown leaf": (
        "whole",
        put([0, 3], "donated"),
        r"field 'donated' is \(0, 3\), expected positions .*",
    ),
    "donation twice": ("whole", put([1, 1], "donated"), r"field 'donated' is \(1, 1\), expected .*, each once"),
    "donation of a path": ("whole", put(["w"], "donated"), r"field 'donated\[0\]' is 'w', expected an integer .*"),
    "an unknown schedule": (
        "stages",
        put("2f2b", "schedule"),
        "field 'schedule' is '2f2b', expected one of none, .*",
    ),
    "a schedule for one stage": (
        "whole",
        put("1f1b", "schedule"),
        "field 'stages' is a list of 1, expected several .*",
    ),
    "an unknown policy": ("parts", put("some", "remat", 0), r"field 'remat\[0\]' is 'some', expected one of none, .*"),
    "no microbatches": ("whole", put(0, "num_microbatches"), "field 'num_microbatches' is 0, expected at least 1"),
    "microbatches of nothing": ("parts", put([], "batch"), "field 'batch' is empty, expected the argument leaves .*"),
    "an axis twice": ("whole", put(["x", "x"], "mesh_names"), r"field 'mesh_names' is \('x', 'x'\), expected names .*"),
    "an axis too few": (
        "whole",
        put([8], "mesh_sizes"),
        r"field 'mesh_sizes' is \(8,\), expected sizes of 2 mesh axes.*",
    ),
    "another submesh": (
        "whole",
        put(4, "stages", 0, "submesh", "x"),
        r"field 'stages\[0\]\.devices' is 8, expected 16",
    ),
    "an unknown axis of a submesh": (
        "stages",
        put(1, "stages", 0, "submesh", "z"),
        r"field 'the axes of stages\[0\]\..*",
    ),
    "devices that are not there": (
        "stages",
        put([8, 2], "mesh_sizes"),
        r"field 'stages\[\*\]\.devices' is \[4, 4\], .*",
    ),
    "layers that overlap": ("stages", put([0, 2], "stages", 1, "layers"), r"field 'stages\[1\]\.layers\[0\]' is 0, .*"),
    "a rank left out": ("stages", put(2, "stages", 1, "rank"), r"field 'the ranks of stages' is \[0, 2\], expected .*"),
    "state in two stages": (
        "stages",
        put([0], "stages", 1, "arguments"),
        r"field 'stages\[1\]\.arguments' is \(0,\), .*",
    ),
    "an unknown collective": (
        "whole",
        put("sum", "collectives", 0, "kind"),
        r"field 'collectives\[0\]\.kind' is 'sum', .*",
    ),
    "a collective over no axis": (
        "whole",
        put(["z"], "collectives", 0, "axes"),
        r"field 'collectives\[0\]\.axes' is .*",
    ),
    "a layout of other axes": (
        "whole",
        put([-1], "inputs", 0),
        r"field 'inputs\[0\]' is \(-1,\), expected a layout of 2 .*",
    ),
    "a layout of a higher rank": (
        "whole",
        put([2, -1], "inputs", 0),
        r"field 'inputs\[0\]' is .*, expected .* of rank 2",
    ),
    "a layout that does not divide": (
        "narrow",
        put([-1, 0], "inputs", 2),
        r"field 'inputs\[2\]' is \(-1, 0\), expected a layout that divides the shape \(6, 8\) on a mesh of \(2, 4\)",
    ),
    "sums that are handed out": (
        "whole",
        put([-2, -1], "outputs", 0),
        r"field 'outputs\[0\]' is .*, expected .* without sums",
    ),
    "no layout": ("whole", put("0 ?", "stages", 0, "values", "0"), r"field 'stages\[0\]\.values\['0'\]' is '0 \?', .*"),
    "no value": ("whole", put("- -", "stages", 0, "values", "07"), r"field 'stages\[0\]\.values\['07'\]' is '07', .*"),
}

FITTED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "inputs reordered": ("whole", backwards("input_paths"), r"field 'input_paths\[0\]' is 'x', expected 'params/down'"),
    "results reordered": ("whole", backwards("output_paths"), r"field 'output_paths\[0\]' is '1', expected '0/down'"),
    "another type of argument": ("whole", put("f64[32,8]", "input_types", 0), r"field 'input_types\[0\]' is .*"),
    "another layout of an argument": (
        "whole",
        put([-1, -1], "inputs", 2),
        r"field 'inputs\[2\]' is \(-1, -1\), expected .*",
    ),
    "a value too few": (
        "whole",
        drop("stages", 0, "values", "0"),
        r"field 'inputs\[0\]' is .*, expected \(-1, -1\)",
    ),
    "a value that is not there": (
        "whole",
        put("- -", "stages", 0, "values", "999"),
        r"field 'stages\[0\]\.values\[999\]' is \(-1, -1\), expected no such field: the program has no such value",
    ),
    "a site that is not there": (
        "whole",
        put("- -", "stages", 0, "uses", "op99.in0"),
        r"field 'stages\[0\]\.uses\['op99\.in0'\]' is \(-1, -1\), expected no such field: .*",
    ),
    "a copy of nothing": (
        "whole",
        put("- -", "stages", 0, "copies", "999"),
        r"field 'stages\[0\]\.copies\[999\]' is \(-1, -1\), expected no such field: the value has no layout",
    ),
    "a ring that is not there": (
        "whole",
        put(["op99"], "stages", 0, "rings"),
        r"field 'stages\[0\]\.rings' is 'op99', expected tags of attention that is cut along its positions",
    ),
    "a ring of no attention": (
        "whole",
        put(["op0"], "stages", 0, "rings"),
        r"field 'stages\[0\]\.rings' is 'op0', expected tags of attention that is cut along its positions",
    ),
    "microbatches of another program": ("parts", put(4, "num_microbatches"), r"field 'stages\[0\]\.graph_hash' is .*"),
    "recomputation of another program": ("parts", put("none", "remat", 0), r"field 'stages\[0\]\.graph_hash' is .*"),
    "a batch that is none": (
        "parts",
        put([0], "batch"),
        r"the plan .* other microbatches, .*: none of the arguments .*",
    ),
    "microbatches that do not divide": ("parts", put(3, "num_microbatches"), "the plan recomputes other layers, or .*"),
    "a policy too many": ("parts", put(["full"] * 99, "remat"), "the plan recomputes other layers, or has other .*"),
    "state that cannot wait": (
        "whole",
        put([0], "offloaded"),
        "field 'offloaded' is 'params/down', expected state that .*",
    ),
    "more layers than there are": (
        "stages",
        lambda data: (put([0, 98], "stages", 0, "layers")(data), put([98, 99], "stages", 1, "layers")(data)),
        "the plan has other stages than this autopar finds: borders .*",
    ),
    "other state in a stage": ("stages", put([], "stages", 1, "arguments"), r"field 'stages\[1\]\.arguments' is .*"),
    "another program of a stage": ("stages", put("0", "stages", 1, "graph_hash"), "stage 1 of the plan is another .*"),
}


def change(name: str, edit: Callable[[Any], Any]) -> Any:
    data = json.loads(case(name).text)
    edit(data)
    return data


@pytest.mark.parametrize(("name", "edit", "message"), LOADED.values(), ids=LOADED)
def test_a_plan_that_contradicts_itself_is_not_loaded(name: str, edit: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        from_json(change(name, edit), "plan.json")
    assert re.fullmatch(rf"plan\.json is a damaged plan: {message}\. Plan again\.", str(caught.value)), str(
        caught.value
    )


@pytest.mark.parametrize(("name", "edit", "message"), FITTED.values(), ids=FITTED)
def test_a_plan_that_does_not_fit_is_not_run(name: str, edit: Callable[[Any], Any], message: str) -> None:
    changed = from_json(change(name, edit))
    with pytest.raises(PlanMismatchError) as caught:
        autopar.parallelize(case(name).fn, plan=changed).plan(*case(name).args)
    assert re.fullmatch(rf"(.*: )?{message}(\. Plan again\.)?", str(caught.value)), str(caught.value)


TEXTS = {
    "nested without end": ("[" * 100_000, "nested too deep"),
    "nested in a field": ('{"format":1,"notes":' + "[" * 100_000, "nested too deep"),
    "a key twice": ('{"format":1,"rows":1,"rows":2}', "key 'rows' is there twice"),
    "a number of many digits": ('{"format":1,"rows":' + "9" * 5000 + "}", "Exceeds the limit"),
    "a format that is none": ('{"format":true}', r"format 6 \(found True\)"),
    "no UTF-8": (b"\xff\xfe\x00", "can't decode"),
}


@pytest.mark.parametrize(("text", "message"), TEXTS.values(), ids=TEXTS)
def test_text_that_is_no_plan(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanMismatchError, match=rf"plan\.json is no plan.*{message}"):
        Plan.load(path)


def test_json_keeps_no_order_of_axes() -> None:
    mesh = {"z": 4, "a": 2}
    plan = autopar.plan(SMALL.step, *inputs(), mesh=mesh, stages=2, num_microbatches=2)
    loaded = from_json(json.loads(plan.to_json()))
    assert [list(stage.submesh.items()) for stage in loaded.stages] == [[("z", 2), ("a", 2)]] * 2
    assert autopar.parallelize(SMALL.step, plan=loaded).plan(*inputs()) == plan


def test_scalars_that_follow_an_array_may_have_layouts(tmp_path: Path) -> None:
    def scaled(scale: jax.Array, x: jax.Array) -> Any:
        return jnp.reshape(scale, ()) * x

    args = jnp.ones(1), jnp.ones((16, 8))
    plan = autopar.plan(scaled, *args, mesh=MESH, cluster=CLUSTER)
    assert plan.stages[0].values[2] == (-1, -1)  # the scalar
    plan.save(tmp_path / "plan.json")
    np.testing.assert_array_equal(autopar.parallelize(scaled, plan=tmp_path / "plan.json")(*args), args[1])


# Partial sums


def planned_sums(home: str, site: str) -> Plan:
    """A plan in which both products cut what they add up over x, with a layout for them and for the sum's operands."""
    args = array(16, 8), array(16, 8), array(8, 16)
    data = json.loads(autopar.plan(meeting, *args, mesh={"x": 8}, cluster=CLUSTER, pins={"*": P()}).to_json())
    for k in (0, 1):
        (stage,) = data["stages"]
        stage["uses"] |= {f"op{k}.in0": "1", f"op{k}.in1": "0", f"op2.in{k}": site}
        stage["values"] |= {str(3 + k): home}
    return from_json(data)


def test_sums_may_stay_where_they_are_added_up() -> None:
    args = tuple(jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(16, 8), (16, 8), (8, 16)]))
    for home, site in (("+", "-"), ("+", "+"), ("-", "-")):
        sums = autopar.parallelize(meeting, plan=planned_sums(home, site))(*args)
        np.testing.assert_allclose(sums, meeting(*args), 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("field", "key", "layout", "message"),
    [
        ("values", 6, (-2,), r"values\[6\]' is \(-2,\), expected sums as tanh test_files\.py:\d+ leaves them"),
        ("values", 3, (-2,), r"values\[3\]' is \(-2,\), expected sums as dot_general .*"),
        ("uses", "op3.in0", (-2,), r"uses\['op3\.in0'\]' is \(-2,\), expected sums along axes only along which .*"),
        ("uses", "op2.in0", (-1,), r"uses\['op2\.in1'\]' is \(-2,\), expected what add .* can read: no such sums"),
        ("uses", "op0.in0", (-1,), r"values\[3\]' is \(-2,\), expected sums as dot_general .*"),
        ("uses", "op0.in0", (0,), r"values\[3\]' is \(-2,\), expected sums as dot_general .*"),
        ("copies", 3, (-2,), r"copies\[3\]' is \(-2,\), expected a layout without sums"),
    ],
)
def test_sums_elsewhere_are_refused(field: str, key: int | str, layout: tuple[int, ...], message: str) -> None:
    plan = planned_sums("-" if field == "values" else "+", "-" if field == "values" else "+")
    (stage,) = plan.stages
    uses = {} if key == 3 and field == "values" else {**stage.uses}
    changed = replace(stage, uses=uses)
    changed = replace(changed, **{field: {**getattr(changed, field), key: layout}})
    args = array(16, 8), array(16, 8), array(8, 16)
    with pytest.raises(PlanMismatchError, match=rf"field 'stages\[0\]\.{message}"):
        autopar.parallelize(meeting, plan=replace(plan, stages=(changed,))).plan(*args)


def products_in_a_loop(x: jax.Array, y: jax.Array) -> Any:
    """A sum of products over the iterations of a loop."""
    return jax.lax.scan(lambda total, ab: (total + ab[0].T @ ab[1], None), jnp.zeros((16, 8)), (x, y))[0]


@cache
def planned_in_a_loop() -> Plan:
    """The sum stays partial over all iterations."""
    args, options = (array(3, 32, 16), array(3, 32, 8)), {"mesh": {"x": 8}, "cluster": "dgx-h100"}
    return autopar.plan(products_in_a_loop, *args, **options, pins={"*": P(None, "x")})


def test_sums_over_a_loop_are_reduced_once() -> None:
    args = tuple(jax.random.normal(jax.random.key(i), (3, 32, n)) for i, n in enumerate((16, 8)))
    plan = planned_in_a_loop()
    assert [(c.kind, c.count) for c in plan.collectives] == [("reduce-scatter", 1)]
    assert autopar.verify(plan, products_in_a_loop, *args).ok
    sums = autopar.parallelize(products_in_a_loop, plan=plan)(*args)
    np.testing.assert_allclose(sums, products_in_a_loop(*args), 1e-5, 1e-5)


@pytest.mark.parametrize("field", ["values", "uses"])
def test_sums_over_a_loop_are_partial_in_all_of_it(field: str) -> None:
    (stage,), args = planned_in_a_loop().stages, (array(3, 32, 16), array(3, 32, 8))
    layouts = getattr(stage, field)
    partial = [key for key, layout in layouts.items() if layout == (-2,)]
    assert len(partial) == {"values": 4, "uses": 1}[field]  # carry, product, sum, result; the zeros
    for key in partial:
        changed = replace(stage, **{field: {**layouts, key: (-1,)}})
        with pytest.raises(PlanMismatchError, match=r"field 'stages\[0\]\.(values|uses)\[.*sums"):
            autopar.parallelize(products_in_a_loop, plan=replace(planned_in_a_loop(), stages=(changed,))).plan(*args)


def repeated_total(x: jax.Array) -> jax.Array:
    """A sum over a loop, repeated: its parts are added up where the broadcast reads them."""
    total, _ = lax.scan(lambda total, _: (total + x.mean((0, 1)), None), jnp.zeros(x.shape[2]), length=2)
    return jnp.repeat(total, 2)


def test_sums_may_be_broadcast() -> None:
    x = jax.random.normal(jax.random.key(0), (16, 6, 3))
    cluster, pins = dear((8,)), {"x": P("x")}
    plan = autopar.plan(repeated_total, x, mesh={"x": 8}, cluster=cluster, pins=pins, num_microbatches=2)
    assert (-2,) in plan.stages[0].values.values()
    read = from_json(json.loads(plan.to_json()))
    np.testing.assert_allclose(autopar.parallelize(repeated_total, plan=read)(x), repeated_total(x), 1e-5, 1e-5)
    assert autopar.verify(plan, repeated_total, x).ok


# Any field


NAMED = r"field '|is no plan|this autopar (finds|makes)|was made for"


def check(name: str, what: str, text: str, place: Path, *, runs: bool) -> None:
    """The file is refused by an AutoparError that names what is wrong, or it is a plan with which the step is right."""
    (path := place / "plan.json").write_text(text)
    try:
        carry_out(case(name), path, runs=runs)
    except AutoparError as error:
        refusal = str(error)
    else:
        refusal = "is no plan"
    assert re.search(NAMED, refusal), f"{what}: {refusal}"


def carry_out(case: Case, path: Path, *, runs: bool) -> None:
    plan = Plan.load(path)
    assert plan.summary()
    assert plan.shardings()
    assert plan.wire_bytes() >= 0
    parallel = autopar.parallelize(case.fn, plan=path)
    parallel.plan(*case.args)
    if runs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # donated buffers that nothing takes over
            results = parallel(*jax.tree.map(jnp.copy, case.args))
        expected = jax.jit(case.fn)(*case.args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), results, expected)


QUICK = settings(database=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(("name", "examples"), [("whole", 60), ("stages", 20), ("parts", 20)])
def test_no_edit_of_a_file_ends_in_another_error(name: str, examples: int, tmp_path: Path) -> None:
    @seed(1)
    @settings(QUICK, max_examples=examples)
    @given(edited(case(name).text))
    def edits(edit: tuple[str, str]) -> None:
        check(name, *edit, tmp_path, runs=False)

    edits()


@pytest.mark.parametrize(("name", "examples"), [("whole", 20), ("parts", 10)])
def test_no_layout_changes_what_is_computed(name: str, examples: int, tmp_path: Path) -> None:
    @seed(2)
    @settings(QUICK, max_examples=examples)
    @given(laid_out(case(name).text))
    def edits(edit: tuple[str, str]) -> None:
        check(name, *edit, tmp_path, runs=True)

    edits()


def scaled(v: jax.Array, x: jax.Array) -> Any:
    """A scalar that a loop reads, which gives it a layout, and that an array is made of beside the loop."""
    scale = v.reshape(())
    x = jax.lax.while_loop(lambda c: c.sum() < 100.0, lambda c: c * scale + 1.0, x)
    return x, jnp.concatenate([scale.reshape(1), v])


def test_a_plan_fits_what_is_made_of_a_scalar_with_a_layout(tmp_path: Path) -> None:
    args = jnp.full(1, 2.0), jnp.ones((16, 8))
    plan = autopar.plan(scaled, *args, mesh=MESH, cluster=CLUSTER)
    plan.save(tmp_path / "plan.json")
    results = autopar.parallelize(scaled, plan=Plan.load(tmp_path / "plan.json"))(*args)
    for ours, theirs in zip(results, scaled(*args), strict=True):
        np.testing.assert_array_equal(ours, theirs)
