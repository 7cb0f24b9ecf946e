"""Prices of changes of layout: single pairs by hand, tables against single pairs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.collectives import collective_time
from autopar.cost_models.resharding import SLICE_SECONDS, Resharding, reshard_time
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.layout import PARTIAL, REPLICATED, steps

MESHES = ((8,), (2, 4), (2, 2, 2))
SIZE = 2.0**20


def mesh_of(sizes: tuple[int, ...]) -> LogicalMesh:
    return Cluster.custom(sizes, 1e-5, 1e-9, 1e12, 1e11, 2**30).logical_mesh(sizes)


def test_a_pair_costs_the_sum_of_its_steps() -> None:
    mesh = mesh_of((2, 4))
    gathers = collective_time("all-gather", SIZE / 4, (0,), mesh) + collective_time("all-gather", SIZE, (1,), mesh)
    assert reshard_time((0, 1), (-1, -1), SIZE, mesh) == pytest.approx(gathers)


def test_a_local_slice_costs_next_to_nothing_but_something() -> None:
    assert reshard_time((-1, -1), (0, 1), SIZE, mesh_of((2, 4))) == pytest.approx(2 * SLICE_SECONDS)


def test_a_permute_comes_with_a_cut_against_the_order_of_axes() -> None:
    mesh = mesh_of((2, 4))
    moved = reshard_time((-1, 0), (0, 0), SIZE, mesh)
    assert moved == pytest.approx(collective_time("collective-permute", SIZE / 8, (0, 1), mesh))
    assert moved > reshard_time((0, -1), (0, 0), SIZE, mesh)


def test_no_price_into_a_partial_sum() -> None:
    mesh = mesh_of((2, 4))
    assert reshard_time((0, -1), (PARTIAL, -1), SIZE, mesh) == math.inf
    table = Resharding(mesh).table(np.array([[0, -1]], np.int8), np.array([[PARTIAL, -1], [0, -1]], np.int8), SIZE)
    assert table.tolist() == [[math.inf, 0.0]]


def test_a_scalar_is_free() -> None:
    nowhere = np.full((1, 2), REPLICATED, np.int8)
    assert Resharding(mesh_of((2, 4))).table(nowhere, nowhere, 4.0).tolist() == [[0.0]]


@pytest.mark.parametrize("sizes", MESHES)
@given(data=st.data())
def test_a_table_is_its_pairs(sizes: tuple[int, ...], data: st.DataObject) -> None:
    mesh, whole = mesh_of(sizes), list(itertools.product(range(PARTIAL, 3), repeat=len(sizes)))
    layout_lists = st.lists(st.sampled_from(whole), min_size=1, max_size=6)
    sources, targets = data.draw(layout_lists), data.draw(layout_lists)
    nbytes = data.draw(st.floats(4.0, 1e10))
    table = Resharding(mesh).table(np.array(sources, np.int8), np.array(targets, np.int8), nbytes)
    pairs = [[reshard_time(s, t, nbytes, mesh) for t in targets] for s in sources]
    assert np.allclose(table, pairs, rtol=1e-12)
    assert (table >= 0).all()


@pytest.mark.parametrize("sizes", MESHES)
@given(data=st.data())
def test_only_staying_is_free(sizes: tuple[int, ...], data: st.DataObject) -> None:
    layout = st.tuples(*(st.integers(REPLICATED, 2) for _ in sizes))
    source, target = data.draw(layout), data.draw(layout)
    assert (reshard_time(source, target, SIZE, mesh_of(sizes)) == 0.0) == (source == target)
    assert bool(steps(source, target, sizes)) == (source != target)


def test_a_table_is_remembered_for_other_sizes() -> None:
    resharding = Resharding(mesh_of((2, 4)))
    layouts = np.array([[0, 1], [-1, -1]], np.int8)
    small, large = resharding.table(layouts, layouts, 1e6), resharding.table(layouts, layouts, 1e9)
    assert small[0, 1] < large[0, 1]
    assert small[0, 1] == pytest.approx(reshard_time((0, 1), (-1, -1), 1e6, resharding.mesh))
