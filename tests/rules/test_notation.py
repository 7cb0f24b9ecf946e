"""Rules as text: what is printed is what was read, and what cannot be read says why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.rules.notation import Rule, check_syntax, parse

NAMES = "abcdefgh"


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Rules whose factors are numbered in the order in which they are read, as `parse` numbers them."""
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    dims = st.lists(st.integers(0, count - 1), max_size=4).map(tuple)
    operands = draw(st.lists(dims, min_size=1, max_size=3))
    results = draw(st.lists(dims, min_size=1, max_size=2))
    order = list(dict.fromkeys(f for d in (*operands, *results) for f in d))
    number = {f: i for i, f in enumerate(order)}
    renumbered = [tuple(tuple(number[f] for f in d) for d in side) for side in (operands, results)]
    kept = tuple(sorted(number[f] for f in draw(st.sets(st.sampled_from(order))))) if order else ()
    of_results = {f for d in renumbered[1] for f in d}
    reduced = tuple(sorted({f for d in renumbered[0] for f in d} - of_results - {*kept}))
    return Rule(*map(tuple, renumbered), tuple(sizes[f] for f in order), reduced, kept, "user")  # type: ignore[arg-type]


def shapes(rule: Rule, side: str) -> list[tuple[int, ...]]:
    return [tuple(rule.sizes[f] for f in dims) for dims in getattr(rule, side)]


@given(rules())
@settings(max_examples=200)
def test_printing_and_parsing_round_trip(rule: Rule) -> None:
    assert parse(str(rule), shapes(rule, "operands"), shapes(rule, "results")) == rule


@given(rules())
@settings(max_examples=50)
def test_free_factors_can_be_sharded(rule: Rule) -> None:
    assert {*rule.free} == {f for f, size in enumerate(rule.sizes) if size > 1} - {*rule.need_replication}


@pytest.mark.core
@pytest.mark.parametrize(
    ("text", "operands", "results", "printed"),
    [
        ("b m k, k n -> b m n", [(2, 4, 8), (8, 6)], [(2, 4, 6)], "a b c, c d -> a b d | reduce c"),
        ("rows cols -> cols rows", [(2, 3)], [(3, 2)], "a b -> b a"),
        ("b s d -> b s d | keep s", [(2, 3, 4)], [(2, 3, 4)], "a b c -> a b c | keep b"),
        ("b 1 -> b 1", [(2, 3)], [(2, 5)], "a b -> a c | keep b c"),
        ("(), a -> a", [(), (4,)], [(4,)], "(), a -> a"),
        (" -> a b", [], [(4, 5)], " -> a b"),
        ("a -> ()", [(4,)], [()], "a -> () | reduce a"),
        ("a b -> a | keep b", [(4, 5)], [(4,)], "a b -> a | keep b"),
    ],
)
def test_parsing(text: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], printed: str) -> None:
    assert str(parse(text, operands, results)) == printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "rule 'm k, k n' needs exactly one '->', as in 'b m k, k n -> b m n'"),
        ("m k -> m n -> n", "rule 'm k -> m n -> n' needs exactly one '->', as in 'b m k, k n -> b m n'"),
        ("m k -> m n", "rule 'm k -> m n' names 1 operands, the operation has 2"),
        ("m k, k n -> m n, m n", "rule 'm k, k n -> m n, m n' names 2 results, the operation has 1"),
        ("b m k, k n -> m n", "rule 'b m k, k n -> m n' gives 'b m k' for a operand of shape (4, 8)"),
        ("m k, m n -> m n", "rule 'm k, m n -> m n': 'm' is 4 elsewhere but 8 in a operand of shape (8, 6)"),
        ("m ?, k n -> m n", "rule 'm ?, k n -> m n': '?' is no dimension name"),
        (
            "m k, k n -> m n | hold m",
            "rule 'm k, k n -> m n | hold m': 'hold m' must be 'keep' or 'reduce' and names out of m, k, n",
        ),
        (
            "m k, k n -> m n | keep z",
            "rule 'm k, k n -> m n | keep z': 'keep z' must be 'keep' or 'reduce' and names out of m, k, n",
        ),
    ],
)
def test_a_rule_that_does_not_fit_says_why(text: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text, [(4, 8), (8, 6)], [(4, 6)])
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["a b", "a -> b -> c", "a $ -> a", 3, None])
def test_syntax_is_checked_without_shapes(text: object) -> None:
    with pytest.raises(RuleError):
        check_syntax(text)  # type: ignore[arg-type]
