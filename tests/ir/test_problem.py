"""The problem's formula, its checks, and the ways to cut it down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import SolverError
from autopar.ir.problem import Problem, absorb_loops, check, compact, restrict
from tests.passes.support.small_problems import all_values, edge, node, problems

PAIR = Problem((node("a", 1.0, 2.0), node("b", 0.0, 5.0, 7.0)), (edge(0, 1, [[0.0, 10.0, 20.0], [30.0, 0.0, 0.0]]),))


@pytest.mark.parametrize(
    ("plan", "seconds"),
    [((0, 0), 1.0), ((0, 1), 1.0 + 5.0 + 10.0), ((1, 0), 2.0 + 30.0), ((1, 2), 2.0 + 7.0)],
)
def test_value_is_the_sum_over_nodes_and_edges(plan: tuple[int, int], seconds: float) -> None:
    assert PAIR.value(np.array(plan)) == seconds


def test_variables_counts_strategies() -> None:
    assert PAIR.variables == 5


def broken(what: str) -> Problem:
    a, b = PAIR.nodes
    (e,) = PAIR.edges
    cases = {
        "nan cost": Problem((replace(a, cost=np.array([1.0, np.nan])), b), (e,)),
        "no strategy": Problem((replace(a, cost=np.zeros(0)), b), ()),
        "signature": Problem((a, replace(b, signature=a.signature)), (e,)),
        "length": Problem((a, b), (replace(e, gu=np.array([0])),)),
        "class": Problem((a, b), (replace(e, gv=np.array([0, 1, 3])),)),
        "nan table": Problem((a, b), (replace(e, table=np.full((2, 3), np.nan)),)),
        "index": Problem((a, b), (replace(e, v=2),)),
        "key": Problem((a, b), (e, replace(e, table=e.table + 1))),
    }
    return cases[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan cost", r"'a' needs a vector of costs without nan"),
        ("no strategy", r"'a' needs a vector .* not one of \(0,\)"),
        ("signature", r"'b' has the signature of a node with other costs: \(1.0, 2.0\)"),
        ("length", r"'a' -> 'b': the 2 strategies of 'a' need one class each, not an array of shape \(1,\)"),
        ("class", r"classes run from 0 to 3, but its table has shape \(2, 3\)"),
        ("nan table", r"has nan in its table of shape \(2, 3\)"),
        ("index", r"key \(0,\) names node 2, but there are 2"),
        ("key", r"'a' -> 'b' has the key of an edge with another table: \(0,\)"),
    ],
)
def test_check_names_what_is_wrong(what: str, message: str) -> None:
    check(PAIR)
    with pytest.raises(SolverError, match=message):
        check(broken(what))


def test_the_quick_check_trusts_equal_keys() -> None:
    check(broken("key"), thorough=False)
    with pytest.raises(SolverError, match="one class each"):
        check(broken("length"), thorough=False)


@settings(max_examples=50)
@given(problems)
def test_absorbing_loops_changes_no_value(problem: Problem) -> None:
    without = absorb_loops(problem)
    assert all(e.u != e.v for e in without.edges)
    np.testing.assert_allclose(all_values(without)[1], all_values(problem)[1], atol=1e-12)


@settings(max_examples=50)
@given(problems)
def test_restricting_keeps_the_values_of_remaining_assignments(problem: Problem) -> None:
    keep = tuple(np.arange(0, len(n.cost), 2) for n in problem.nodes)
    small = restrict(problem, keep)
    plans, values = all_values(small)
    lifted = np.stack([k[row] for k, row in zip(keep, plans, strict=True)])
    np.testing.assert_allclose(values, [problem.value(plan) for plan in lifted.T], rtol=1e-12)
    assert all(set(e.gu.tolist()) == set(range(len(e.table))) for e in small.edges)


def test_restricted_equal_keys_still_mean_equal_tables() -> None:
    two = Problem((*PAIR.nodes, node("c", 1.0, 2.0)), (PAIR.edges[0], replace(PAIR.edges[0], u=2)))
    same = restrict(two, (np.array([1]), np.arange(3), np.array([1])))
    other = restrict(two, (np.array([1]), np.arange(3), np.array([0])))
    assert same.edges[0].key == same.edges[1].key
    assert other.edges[0].key != other.edges[1].key
    check(same)
    check(other)


def test_compact_drops_classes_out_of_use() -> None:
    gu, gv, table = compact(np.array([2, 0]), np.array([1, 1]), np.arange(6.0).reshape(3, 2))
    assert gu.tolist() == [1, 0]
    assert gv.tolist() == [0, 0]
    assert table.tolist() == [[1.0], [5.0]]
