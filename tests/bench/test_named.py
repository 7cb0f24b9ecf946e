"""`autopar bench named` and `autopar bench sizes`: what is named, what holds, and one row of each measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autopar.bench import sizes
from autopar.bench.references import named
from autopar.bench.references.named import Pair


def test_every_mesh_and_every_uniform_pipeline_is_named_once() -> None:
    named_plans = list(named.named(8, 4))
    assert len({name for name, _ in named_plans}) == len(named_plans)
    one_mesh = [options for _, options in named_plans if "stages" not in options]
    assert [options["mesh"] for options in one_mesh if "num_microbatches" not in options] == [
        *((8,), (2, 4), (4, 2), (2, 2, 2)),
    ]
    assert {options["num_microbatches"] for options in one_mesh if "num_microbatches" in options} == {4}
    pipelines = [options for _, options in named_plans if "stages" in options]
    assert all(math.prod(options["mesh"]) == 8 for options in pipelines)
    assert all(options["mesh"][0] == options["stages"] for options in pipelines)
    assert {(2, 4), (2, 2, 2), (4, 2), (8,)} <= {options["mesh"] for options in pipelines}
    assert {options["remat"] for options in pipelines} == {"none", "full"}


def test_an_answer_holds_where_no_named_plan_is_shorter() -> None:
    row: dict[str, Any] = {"fits": True, "ratio": 1.004}
    assert named.holds(row)
    assert not named.holds({**row, "ratio": 1.006})
    assert not named.holds({**row, "fits": False})


@pytest.mark.usefixtures("forked_workers")
def test_a_pair_is_compared() -> None:
    (row,) = named.run([Pair("mlp-toy", 0, "tpu-v4", 1)])
    assert row["pair"] == "mlp-toy on tpu-v4 x 1"
    assert named.holds(row)
    assert row["fitting"] >= 3
    assert "mlp-toy" in named.table([row])


@pytest.mark.usefixtures("forked_workers")
def test_a_size_is_measured_and_held_to_its_limit() -> None:
    assert len(sizes.MODELS) == len({*sizes.MODELS})
    assert {"bert-large", "gpt-39b", "moe-70b-adafactor", "wresnet-13b-sgd", "unet-2b"} <= {*sizes.MODELS}
    (row,) = sizes.run(["mlp-toy"], ["tpu-v5e"])
    assert (row["model"], row["on"], row["hosts"]) == ("mlp-toy", "tpu-v5e", 4)
    assert "tpu-v5e x 4" in sizes.table([row])
    for stages, limit in ((1, sizes.ONE_MESH), (2, sizes.SEARCHED)):
        assert sizes.holds({**row, "stages": stages, "total_s": limit})
        assert not sizes.holds({**row, "stages": stages, "total_s": limit + 0.1})


@pytest.mark.parametrize("pair", named.PAIRS, ids=lambda pair: pair.name)
def test_pairs_are_of_the_zoo(pair: Pair) -> None:
    from autopar.zoo import targets

    targets.load(pair.model, batch=pair.batch or None)
    assert targets.cluster(pair.cluster, pair.hosts, None).num_devices >= 8
