"""What was published of Alpa's plans, as it is entered."""

from __future__ import annotations

import jax
import pytest

from autopar import zoo
from autopar.bench.references.alpa import CLUSTER, OPTIMIZERS, PUBLISHED
from autopar.hardware.cluster import Cluster
from tests.support.effort import sample


@pytest.mark.parametrize("name", sample(PUBLISHED, ["gpt-350m", "gpt-39b", "moe-27b", "moe-70b", "wresnet-13b"]))
def test_the_state_that_was_trained_fits_into_the_devices_that_it_was_trained_on(name: str) -> None:
    """Parameters, optimizer state and sums of gradients; with Adam, those of the MoE with 70B parameters do not."""
    device = Cluster.preset(CLUSTER).device

    def needed(suffix: str) -> float:
        model = zoo.build(name + suffix)
        state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.abstract_args()[0]))
        return state + 4 * model.parameters()

    there = sum(PUBLISHED[name].devices) * device.memory_bytes
    assert needed(OPTIMIZERS[name.partition("-")[0]]) <= there
    assert (needed("") > there) == (name == "moe-70b")


@pytest.mark.parametrize(("name", "groups"), [("gpt-39b", 16), ("moe-70b", 8), ("wresnet-13b", 33)])
def test_groups_and_submeshes_are_those_of_the_paper(name: str, groups: int) -> None:
    plan = PUBLISHED[name]
    assert (sum(plan.groups), sum(plan.devices)) == (groups, 64)
    assert len(plan.groups) == len(plan.devices)
