"""Strategy sets are found once and shared by all problems, each under its own number."""

from __future__ import annotations

import numpy as np

from autopar.cost_models.resharding import resharding_on
from autopar.cost_models.sharding.groups import projection
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import Type
from autopar.passes.op_groups.strategies import Work, layouts_of, strategies_of
from autopar.rules.notation import parse

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
