"""Targets of a check: what is known, what is missing, and the real compilers for devices that are not here."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import cli
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError, MeshError
from autopar.hardware import gpu_topology, tpu_topology
from autopar.hardware.cluster import Cluster
from autopar.ir.collective import Collective
from autopar.plans import comparison

WEIGHT, ROWS = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((512, 1024), jnp.float32)
NEEDS = {"tpu:v5e:2x4": "libtpu", "gpu:h100:8": "jax_cuda12_plugin"}


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
    return w - 0.1 * gradient, jnp.sum(gradient)


def fsdp() -> autopar.Plan:
    """The batch and the weight cut over both axes: a gather, and sums that end cut."""
    pins = {"w": P("x", "y"), "x": P(("x", "y")), "out:0": P("x", "y")}
    cluster = Cluster.preset("tpu-v5e", topology="2x4")
    return autopar.plan(step, WEIGHT, ROWS, mesh=(2, 4), cluster=cluster, pins=pins)


@pytest.mark.parametrize("target", ["abacus", "tpu", "gpu", "cpu:8", "shardy:x", ""])
def test_an_unknown_target_names_the_known_ones(target: str) -> None:
    with pytest.raises(ArgumentError, match=r"is not known. Available: cpu, shardy, tpu:TOPOLOGY"):
        autopar.verify(fsdp(), step, WEIGHT, ROWS, target=target)


@pytest.mark.parametrize("target", ["cpu", "shardy"])
def test_a_plan_on_two_axes_holds_without_devices(target: str) -> None:
    report = autopar.verify(fsdp(), step, WEIGHT, ROWS, target=target)
    assert report.ok, str(report)
    assert report.mismatches == ()
    assert report.comparison.ratio == pytest.approx(1.0)
    assert report.bytes > 1e6


def scaled(w: jax.Array, x: jax.Array, power: int) -> jax.Array:
    return jnp.sum((x @ w) ** power)


def test_what_is_verified_is_the_function_that_was_planned() -> None:
    """Static arguments are those of the parallelized function; a gradient is not the function that it is of."""
    parallel = autopar.parallelize(scaled, mesh=(8,), cluster=dear((8,)), static_argnums=2)
    args = (jnp.ones((16, 16)), jnp.ones((32, 16)), 3)
    assert autopar.verify(parallel.plan(*args), parallel, *args, target="shardy").ok
    gradient = jax.grad(lambda w, x: scaled(w, x, 2))
    plan = autopar.plan(gradient, *args[:2], mesh=(8,), cluster=dear((8,)))
    assert autopar.verify(plan, gradient, *args[:2], target="shardy").ok


class Model:
    def __init__(self, power: int) -> None:
        self.power = power

    @autopar.parallelize(mesh=(8,), cluster=dear((8,)))
    def loss(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return scaled(w, x, self.power)


def test_methods_are_verified() -> None:
    loss, args = Model(2).loss, (jnp.ones((16, 16)), jnp.ones((32, 16)))
    assert autopar.verify(loss.plan(*args), loss, *args, target="shardy").ok


def iterated(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loop whose trips depend on values, with a sum over rows in every round, and a callback to Python."""

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, rounds = carry
        return jnp.tanh(y @ w) * jnp.sum((x * y).T @ x, 0), rounds + 1

    y, rounds = jax.lax.while_loop(lambda c: (jnp.sum(c[0]) < 1e9) & (c[1] < 7.5), body, (x, jnp.zeros(())))
    return y, jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((), jnp.float32), rounds)


@pytest.mark.parametrize("target", ["cpu", "shardy"])
def test_a_loop_of_unknown_length_is_taken_to_run_as_often_as_planned(target: str) -> None:
    arguments = jnp.ones((64, 64)), jnp.ones((128, 64))
    plan = autopar.plan(iterated, *arguments, mesh=(8,), cluster=dear((8,)))
    report = autopar.verify(plan, iterated, *arguments, target=target)
    assert report.ok, str(report)
    assert report.bytes == pytest.approx(report.comparison.predicted_wire_bytes)
    assert {c.count for c in report.collectives if c.bytes > 64} == {10}


@pytest.mark.parametrize("target", ["cpu", "shardy"])
def test_what_a_callback_returns_is_no_collective_of_the_plan(target: str) -> None:
    """One device has it; in a branch Shardy is asked to bring it to all."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        y = (x @ w).sum(0)
        called = lambda y: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((64,), jnp.float32), y)  # noqa: E731
        return jax.lax.cond(y[0] > 0, called, lambda y: y, y) + y

    arguments = jnp.ones((64, 64)), jnp.ones((128, 64))
    plan = autopar.plan(fn, *arguments, mesh=(8,), cluster=dear((8,)))
    assert autopar.verify(plan, fn, *arguments, target=target).ok


def test_a_callback_is_verified_for_devices_at_hand_only() -> None:
    arguments = jnp.ones((64, 64)), jnp.ones((128, 64))
    plan = autopar.plan(iterated, *arguments, mesh=(16,))
    with pytest.raises(MeshError, match=r"needs 16 devices .* for 'pure_callback' at test_verify\.py:\d+, 8 are"):
        autopar.verify(plan, iterated, *arguments, target="shardy")


@pytest.mark.parametrize("target", ["cpu", "shardy"])
def test_what_a_shard_map_of_the_user_sends_is_compared_with_the_rest(target: str) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    summed = jax.shard_map(
        lambda x, w: jax.lax.psum(x @ w, "x"), mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P()
    )

    def mixed(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(summed(x, w) ** 2), x.T @ x

    plan = autopar.plan(mixed, WEIGHT, ROWS, mesh=(8,), pins={"w": P(), "x": P("x"), "out:1": P()})
    report = autopar.verify(plan, mixed, WEIGHT, ROWS, target=target)
    assert report.ok, str(report)
    assert report.comparison.matched > 0
    assert report.comparison.ratio == pytest.approx(1.0)
    assert not report.uncounted
    (own,) = [c for c in plan.collectives if c.op == "op0"]
    assert own in [replace(c, source=own.source) for c in report.collectives]


@pytest.mark.parametrize(
    ("mesh", "operands", "result", "expected"),
    [
        ((2, 4), P("x", "y"), P(), ["all-reduce over x", "all-reduce over y"]),
        ((2, 4), P(("x", "y")), P(), ["all-reduce over x+y"]),
        ((2, 2, 2), P(("x", "z"), "y"), P(), ["all-reduce over x+z", "all-reduce over y"]),
        ((2, 2, 2), P(("x", "z"), "y"), P("x"), ["all-reduce over x", "all-reduce over y+z"]),  # a scatter first
    ],
)
def test_sums_over_several_dimensions_are_compiled_as_predicted(
    mesh: tuple[int, ...], operands: P, result: P, expected: list[str]
) -> None:
    x = jax.ShapeDtypeStruct((64, 64, 32), jnp.float32)

    def products(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,bsf->df", x, y)

    cluster = Cluster.preset("tpu-v5e", topology="2x4")
    pins = {"x": operands, "y": operands, "out:0": result}
    plan = autopar.plan(products, x, x, mesh=mesh, cluster=cluster, pins=pins)
    report = autopar.verify(plan, products, x, x, target="cpu")
    assert report.mismatches == ()
    assert sorted(f"{c.kind} over {'+'.join(c.axes)}" for c in report.collectives) == expected
    assert sorted((c.kind, c.axes) for c in report.predicted) == sorted((c.kind, c.axes) for c in report.collectives)


@pytest.mark.parametrize("axis", [0, 1])
def test_what_a_dot_reads_where_it_lies_is_exchanged_as_planned(axis: int) -> None:
    """XLA of jaxlib 0.12 gathers it whole, unless the exchange starts from an array of its own."""

    def fn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x * 2
        return y @ w, jnp.tanh(y)

    rows, columns = (tuple(dim if a == axis else -1 for a in (0, 1)) for dim in (0, 1))
    plan: autopar.Plan = autopar.plan(fn, ROWS, WEIGHT, mesh=(2, 4))
    layouts = {0: rows, 1: (-1, -1), 2: rows, 3: rows, 4: columns}
    stage = replace(plan.stages[0], values=layouts, uses={"op2.in0": columns}, copies={})
    exchange = Collective("all-to-all", ("xy"[axis],), 4 * 512 * 1024 // (2, 4)[axis], op="op2.in0")
    plan = replace(plan, stages=(stage,), collectives=(exchange,), inputs=(rows, (-1, -1)), outputs=(rows, columns))
    report = autopar.verify(plan, fn, ROWS, WEIGHT, target="cpu")
    assert report.mismatches == ()
    assert report.comparison.matched == 1


@pytest.mark.parametrize("target", ["cpu", "shardy"])
def test_a_scatter_into_zeros_stays_cut_while_its_sums_are_added_up(target: str) -> None:
    """The gradient of a table cut over x, of tokens cut over y: the zeros that it starts from have no layout."""

    def fn(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return jax.grad(lambda table: jnp.sum(table[tokens] ** 2))(table)

    table, tokens = jax.ShapeDtypeStruct((256, 64), jnp.float32), jax.ShapeDtypeStruct((4, 64), jnp.int32)
    pins = {"table": P("x"), "tokens": P("y"), "out:0": P("x")}
    cluster = Cluster.preset("tpu-v5e", topology="2x4")
    plan = autopar.plan(fn, table, tokens, mesh=(2, 4), cluster=cluster, pins=pins, donate_argnums=())
    report = autopar.verify(plan, fn, table, tokens, target=target)
    assert report.mismatches == ()


@pytest.mark.parametrize("target", ["cpu", "shardy"])
def test_what_has_no_line_of_the_users_names_none_of_ours(target: str) -> None:
    """An argument that is handed back in another layout is nobody's line; a result is the line that makes it."""

    def fn(kept: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kept, jnp.tanh(x)

    pins = {"kept": P("x"), "out:0": P("y"), "x": P("x"), "out:1": P("y")}
    cluster = Cluster.preset("tpu-v5e", topology="2x4")
    plan = autopar.plan(fn, ROWS, ROWS, mesh=(2, 4), cluster=cluster, pins=pins, donate_argnums=())
    report = autopar.verify(plan, fn, ROWS, ROWS, target=target)
    files = {c.op: c.source.partition(":")[0] for c in report.collectives}
    assert files["out0"] == ""
    assert files["out1"] == "test_verify.py"


def test_what_differs_is_told_in_a_line_for_equal_pieces() -> None:
    pieces = [Collective("all-reduce", ("x", "y"), 1024, 1 + (k == 0), f"op{k}", "model.py:7") for k in range(5)]
    compared = comparison.compare([*pieces, Collective("all-gather", ("x",), 4096)], [], {"x": 2, "y": 4})
    report = autopar.Report(False, "cpu", (), compared, {}, 0.0, tuple(comparison.differences(compared)))
    assert str(report).splitlines()[1:] == [
        "predicted but not emitted: 6 x all-reduce over x+y, 1,024 bytes at model.py:7 (op0, op1, op2 and 2 more)",
        "predicted but not emitted: 1 x all-gather over x, 4,096 bytes",
    ]


def skip_without_compiler(target: str) -> None:
    if importlib.util.find_spec(NEEDS[target]) is None:
        pytest.skip(f"{NEEDS[target]} is not installed (extra {target[:3]}): nothing here compiles for {target}")


@pytest.mark.core
@pytest.mark.parametrize("target", NEEDS)
def test_a_compiler_emits_what_is_predicted_for_devices_that_are_not_here(target: str) -> None:
    skip_without_compiler(target)
    report = autopar.verify(fsdp(), step, WEIGHT, ROWS, target=target)
    assert report.ok, str(report)
    assert report.mismatches == ()
    assert report.exceptions == {}
    assert report.comparison.ratio == pytest.approx(1.0)
    assert report.bytes > 1e6
    assert report.memory["arguments"] == (1024 * 1024 + 512 * 1024) * 4 // 8


def test_topologies_that_do_not_fit_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Described:
        devices = (object(),) * 4

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", lambda *args, **kwargs: Described())
    with pytest.raises(MeshError, match=r"'v5e:2x2' has 4 devices, the plan's mesh \{'x': 2, 'y': 4\} has 8"):
        tpu_topology.mesh("v5e:2x2", (2, 4), ("x", "y"))
    with pytest.raises(MeshError, match=r"'h100:4' has not the 8 devices"):
        gpu_topology.mesh("h100:4", (2, 4), ("x", "y"))


def test_what_is_not_installed_or_not_known_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such plugin\nand more")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(ArgumentError, match=r"topology 'v5e:2x4' \(no such plugin\).*autopar\[tpu\]"):
        tpu_topology.mesh("v5e:2x4", (8,), ("x",))
    with pytest.raises(ArgumentError, match=r"cannot describe 'h100:8' \(no such plugin\).*autopar\[gpu\]"):
        gpu_topology.mesh("h100:8", (8,), ("x",))
    for topology in ("b17:8", "h100", "h100:none"):
        with pytest.raises(ArgumentError, match=r"named like 'h100:8'. Known: h100, a100"):
            gpu_topology.mesh(topology, (8,), ("x",))


def test_the_description_of_a_gpu_is_the_text_of_a_message() -> None:
    lines = gpu_topology.target_config("h100").splitlines()
    assert lines[0] == "gpu_device_info {"
    assert "  core_count: 132" in lines
    assert "  cuda_compute_capability { major: 9 minor: 0 }" in lines
    assert 'platform_name: "CUDA"' in lines


@pytest.mark.parametrize("target", ["shardy", "tpu:v5e:2x4", "gpu:h100:8"])
def test_the_command_line_passes_the_target_on(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def stop(plan: object, fn: object, *args: object, target: str) -> None:
        seen.append(target)
        raise ArgumentError("stop here")

    monkeypatch.setattr("autopar.verification.verify.verify", stop)
    monkeypatch.setattr("sys.argv", ["autopar", "verify", "mlp-toy", "--mesh", "2,4", "--target", target])
    with pytest.raises(SystemExit):
        cli.main()
    assert seen == [target]
