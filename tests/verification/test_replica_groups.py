"""Device groups as XLA writes them in, mesh axes out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import MeshError
from autopar.verification.replica_groups import communicating_axes

AXES, SIZES = ("x", "y"), (2, 4)


def read(groups: str) -> tuple[str, ...]:
    return communicating_axes(f"%p), channel_id=1, replica_groups={groups}, dimensions={{0}}", AXES, SIZES)


def permuted(pairs: str) -> tuple[str, ...]:
    return communicating_axes(f"%p), channel_id=1, source_target_pairs={pairs}, metadata={{}}", AXES, SIZES)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("y",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("x",)),
        ("{{0, 4}, {1, 5}, {2, 6}, {3, 7}}", ("x",)),
        ("{{0,1,2,3,4,5,6,7}}", ("x", "y")),
        ("{}", ("x", "y")),
        ("[2,4]<=[8]", ("y",)),
        ("[4,2]<=[2,4]T(1,0)", ("x",)),
        ("[1,8]<=[8]", ("x", "y")),
        ("mesh['x'=2,'y'=4] {'y'}", ("y",)),
        ("mesh['x'=2,'y'=4] {'x','y'}", ("x", "y")),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", ("x", "y")),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("y",)),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("x",)),
        ("mesh['a'=8] {'a':(1)2}", ("x",)),
        ("mesh['a'=8] {'a':(2)4}", ("y",)),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("x", "y:(2)2")),
        ("mesh['x'=2,'y'=4] {'x','y':(1)2}", ("x", "y:(1)2")),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ("y:(2)2",)),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", ("y:(1)2",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("y:(2)2",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("y:(1)2",)),
        ("{{0,5},{1,6},{2,7},{3,4}}", ("x", "y")),
    ],
)
def test_every_syntax_of_replica_groups_gives_mesh_axes(groups: str, axes: tuple[str, ...]) -> None:
    assert read(groups) == axes


@pytest.mark.parametrize("groups", ["{{0},{1},{2},{3},{4},{5},{6},{7}}", "[8,1]<=[8]"])
def test_a_group_of_one_device_communicates_nothing(groups: str) -> None:
    assert read(groups) == ()


@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.data())
@settings(max_examples=50)
def test_listed_and_iota_groups_agree_on_any_mesh(sizes: list[int], data: st.DataObject) -> None:
    names = tuple("abc"[: len(sizes)])
    used = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    order = [i for i in range(len(sizes)) if i not in used] + used
    members = math.prod(sizes[i] for i in used)
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, members)
    listed = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in ids) + "}"
    dims, perm = (",".join(map(str, numbers)) for numbers in (sizes, order))
    iota = f"[{ids.shape[0]},{members}]<=[{dims}]T({perm})"
    for groups in (listed, iota):
        assert communicating_axes(f"replica_groups={groups}", names, sizes) == tuple(names[i] for i in used)


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}", ("y",)),
        ("{{0,4},{4,0}}", ("x",)),
        ("{{0, 1}, {1, 0}}", ("y",)),
        ("{{0,0},{1,1}}", ()),
        ("{}", ()),
        ("{{0,0},{1,4},{2,1},{3,5},{4,2},{5,6},{6,3},{7,7}}", ("x", "y")),
    ],
)
def test_a_permute_runs_over_the_axes_whose_coordinate_changes(pairs: str, axes: tuple[str, ...]) -> None:
    assert permuted(pairs) == axes


def test_a_program_for_more_devices_than_the_mesh_is_refused() -> None:
    with pytest.raises(MeshError, match=r"device 15, but a mesh of \(2, 4\) has 8 devices"):
        read("[1,16]<=[16]")
