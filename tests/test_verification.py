"""Targets of a check: what is known, what is missing, and the real compilers for devices that are not here."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import cli, gpu_topology, tpu_topology
from autopar.cluster import Cluster
from autopar.errors import ArgumentError, MeshError

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


@pytest.mark.core
@pytest.mark.parametrize("target", NEEDS)
def test_a_compiler_emits_what_is_predicted_for_devices_that_are_not_here(target: str) -> None:
    if importlib.util.find_spec(NEEDS[target]) is None:
        pytest.skip(f"{NEEDS[target]} is not installed (extra {target[:3]}): nothing here compiles for {target}")
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

    monkeypatch.setattr("autopar.verification.verify", stop)
    monkeypatch.setattr("sys.argv", ["autopar", "verify", "mlp-toy", "--mesh", "2,4", "--target", target])
    with pytest.raises(SystemExit):
        cli.main()
    assert seen == [target]
