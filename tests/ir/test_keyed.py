"""Sums and lists by key."""

from __future__ import annotations

from autopar.ir.keyed import grouped, totals

PAIRS = (("b", 1), ("a", 2), ("b", 3))


def test_values_of_one_key_are_in_order_and_keys_as_they_first_occur() -> None:
    assert list(grouped(PAIRS).items()) == [("b", [1, 3]), ("a", [2])]
    assert list(totals(PAIRS).items()) == [("b", 4.0), ("a", 2.0)]


def test_amounts_are_added_one_by_one() -> None:
    """`sum` and `fsum` of floats may give other last digits, and plans are compared to the bit."""
    amounts = [0.1] * 10
    assert totals(("x", amount) for amount in amounts) == {"x": 0.9999999999999999}
