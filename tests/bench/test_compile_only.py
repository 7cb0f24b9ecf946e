"""The benchmark of compile-only checks: its statistics, its forced plans, and a row on virtual devices."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from autopar.bench import compile_only
from autopar.errors import ArgumentError

MESH = {"x": 2, "y": 4}


def test_forced_plans_pin_what_they_say() -> None:
    model = compile_only.build("mlp")
    data, fsdp, megatron = (compile_only.PLANS[name](model, MESH) for name in ("data", "fsdp", "megatron"))
    weight = "state/params/blocks/0/w1"  # [1024, 4096]
    assert data["state/*"] == P()
    assert data["batch/x"] == fsdp["batch/x"] == P(("x", "y"))
    assert fsdp[weight] == P(None, ("x", "y"))
    assert megatron[weight] == P(None, "y")
    assert megatron["batch/x"] == P(("x",))
    assert compile_only.PLANS["free"](model, MESH) == {}
    assert compile_only.PLANS["megatron"](model, {"x": 8})["batch/x"] == P()


def test_a_plan_along_positions_pins_the_tokens() -> None:
    model = compile_only.build("llama3-splash")
    assert compile_only.PLANS["context"](model, MESH) == dict.fromkeys(
        ("batch/labels", "batch/tokens"), P(None, ("x", "y"))
    )


def test_figures_are_taken_over_all_rows() -> None:
    row = {
        "ok": True, "exceptions": {}, "unexplained": [], "ratio": 1.0, "loops": False,
        "predicted_flops": 1.0, "compiled_flops": 1.0, "predicted_accessed_bytes": 9.0, "compiled_accessed_bytes": 10.0,
    }  # fmt: skip
    larger = {**row, "predicted_flops": 2.0, "compiled_flops": 2.5, "ratio": 1.2, "ok": False, "unexplained": ["one"]}
    looping = {**row, "loops": True, "predicted_flops": 100.0, "exceptions": {"why": 1}}
    figures = compile_only.figures([row, larger, looping])
    assert (figures["rows"], figures["ok"], figures["exact"], figures["unexplained_rows"]) == (3, 2, 1, 1)
    assert (figures["ratio_least"], figures["ratio_most"]) == (1.0, 1.2)
    assert figures["flops_spearman"] == pytest.approx(1)
    assert figures["flops_median_error"] == pytest.approx(0.1)
    assert figures["accessed_bytes_median_error"] == pytest.approx(0.1)


def test_a_row_on_virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"layers": 1, "width": 64, "hidden": 128, "batch": 64}
    monkeypatch.setattr(compile_only, "SIZES", {"mlp": small})
    row = compile_only.row("mlp", (2, 4), "megatron", "cpu")
    assert row["ok"], row["unexplained"]
    assert row["ratio"] == pytest.approx(1.0)
    assert row["predicted_memory"] == pytest.approx(row["compiled_memory"], rel=0.5)
    assert row["predicted_flops"] == pytest.approx(row["compiled_flops"], rel=0.1)
    assert "ok   mlp      2x4    megatron" in compile_only.table([row])
    staged = compile_only.row("mlp", (2, 4), "stages", "cpu")
    assert staged["ok"], staged["unexplained"]
    assert staged["matched"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("abacus",)}, "model 'abacus' is not known. Available: mlp, gpt"),
        ({"plans": ("abacus",)}, "plan 'abacus' is not known. Available: free, data"),
        ({"target": "shardy"}, "target='shardy' does not compile. Available: cpu, tpu, gpu"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        compile_only.run(**options)  # type: ignore[arg-type]
