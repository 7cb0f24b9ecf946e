"""Strategy sets are found once and shared by all problems, each under its own number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.collectives import collective_time
from autopar.cost_models.compute import op_time
from autopar.cost_models.resharding import resharding_on
from autopar.cost_models.sharding.groups import projection
from autopar.cost_models.sharding.strategies import RING
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import Type
from autopar.passes.op_groups.strategies import Work, layouts_of, strategies_of
from autopar.rules.notation import Rule, parse
from autopar.rules.sent import Sent

CLUSTER = Cluster.preset("p3.16xlarge")
MESH, OTHER = CLUSTER.logical_mesh((2, 4)), CLUSTER.logical_mesh((8,))
SHAPES = (64, 32), (32, 16)


def work(flops: float) -> Work:
    operands = tuple(Type(shape, "float32", 4) for shape in SHAPES)
    return Work(flops, operands, (Type((64, 16), "float32", 4),), "float32", product=True)


def test_equal_operations_share_their_strategies() -> None:
    rule = parse("a b, b c -> a c | reduce b", SHAPES, [(64, 16)])
    first, second = (strategies_of(rule, work(65536.0), MESH, index) for index in (3, 7))
    assert (first.index, second.index) == (3, 7)
    assert first.cost is second.cost
    assert first.projections is second.projections
    assert projection(first, (0, 2), False)[0] is projection(second, (0, 2), False)[0]
    assert not np.array_equal(first.cost, strategies_of(rule, work(2.0**40), MESH, 3).cost)
    assert len(strategies_of(rule, work(65536.0), OTHER, 3)) < len(first)


def test_layouts_depend_on_shape_mesh_and_padding() -> None:
    first, second = layouts_of((12, 8), MESH, 0), layouts_of([12, 8], MESH, 5)
    assert first.result is second.result
    assert (first.index, second.index) == (0, 5)
    assert len(layouts_of((12, 8), OTHER, 0)) < len(first)
    assert len(layouts_of((9, 8), MESH, 0, 1.0)) < len(layouts_of((9, 8), MESH, 0))


def test_the_reshards_of_a_mesh_are_priced_once() -> None:
    assert resharding_on(MESH) is resharding_on(CLUSTER.logical_mesh((2, 4)))
    assert resharding_on(MESH) is not resharding_on(MESH.with_overlap())


def test_pieces_are_gathered_or_passed_round_along_all_axes_that_cut_them() -> None:
    """Seconds are those of the collectives; in a ring also those of each piece's kernels and what they read again."""
    dims, whole = (0, 1), Type((64, 32), "float32", 4)
    gather = Sent("all-gather", 1, (0,), ring=False)
    sent = gather, Sent("collective-permute", 1, (0,), hops=-1, ring=True)
    rule = Rule((dims, dims), (dims,), whole.shape, rings=(0,), sent=sent, passing=((0, 1.0), (2, 6.0)))
    of = Work(0.0, (whole, whole), (whole,), "float32")
    both, plain = (strategies_of(r, of, MESH, 0) for r in (rule, replace(rule, rings=(), sent=(), passing=())))
    least = {tuple(cut): cost for cut, cost in zip(plain.assigned.tolist(), plain.cost, strict=True)}
    seen = dict[tuple[tuple[int, ...], bool], float]()
    for cut, after, cost in zip(both.assigned.tolist(), both.after.tolist(), both.cost, strict=True):
        ring = RING in after
        assert not ring or {a for f, a in zip(cut, after, strict=True) if f == 0} == {RING}
        seen[tuple(cut), ring] = cost - least[tuple(cut)]
    assert len(seen) == len(both) > len(plain)
    for cut, axes, devices in (((-1, 0), (1,), 4), ((0, 0), (0, 1), 8), ((0, 1), (0,), 2)):
        piece = whole.nbytes / devices / (4 if 1 in cut else 1)
        assert seen[cut, False] == pytest.approx(collective_time("all-gather", piece * devices, axes, MESH))
        work_of_piece = op_time(0.0, 7 * piece, "float32", MESH.device, launches=2)
        passed = collective_time("collective-permute", piece, axes, MESH)
        assert seen[cut, True] == pytest.approx((devices - 1) * (passed + float(work_of_piece)))
    assert all(seen[cut, False] == 0 for cut in least if 0 not in cut)
