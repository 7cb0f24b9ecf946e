"""Loops and branches bound again, their bodies emitted by whoever calls: operands in, results out, all as lists.

scan        operands are constants, carries, stacked operands; body(constants + carries + slices)
while       operands are constants of the test, constants of the body, carries
cond        operands are the index and what every branch gets
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar import jax_compat
from autopar.ir.graph import Op

#: Arrays that enter a body -> its results.
Body = Callable[[Sequence[Any]], Sequence[Any]]


def scan(op: Op, operands: Sequence[Any], body: Body) -> list[Any]:
    """Results of a scan: carries, then stacked results."""
    constants, carries = jax_compat.scan_counts(op.params)
    fixed = operands[:constants]

    def iteration(carry: Any, slices: Any) -> Any:
        results = body([*fixed, *carry, *slices])
        return tuple(results[:carries]), tuple(results[carries:])

    carry, stacked = jax.lax.scan(
        iteration,
        tuple(operands[constants : constants + carries]),
        tuple(operands[constants + carries :]),
        length=op.params["length"],
        reverse=op.params["reverse"],
        unroll=op.params["unroll"],
    )
    return [*carry, *stacked]


def while_loop(op: Op, operands: Sequence[Any], test: Body, body: Body, *, batched: bool) -> list[Any]:
    """Results of a while loop; `batched`: under vmap, so that the test has a value for each element."""
    first = op.params["cond_nconsts"]
    carries = first + op.params["body_nconsts"]

    def goes_on(carry: Any) -> Any:
        return test([*operands[:first], *carry])[0]

    def step(carry: Any) -> Any:
        new = body([*operands[first:carries], *carry])
        if not batched:
            return tuple(new)
        going = goes_on(carry)
        return tuple(_kept_where_done(going, a, b) for a, b in zip(new, carry, strict=True))

    # under vmap, as long as one element goes on
    return list(jax.lax.while_loop(lambda carry: goes_on(carry).any(), step, tuple(operands[carries:])))


def _kept_where_done(going: Any, new: Any, old: Any) -> Any:
    """The new value of a carry for those elements (leading dimensions) of a loop under vmap that go on."""
    spread = jax.lax.broadcast_in_dim(going, new.shape, tuple(range(going.ndim)))
    return jax.lax.select(spread, new, old)


def cond(operands: Sequence[Any], branches: Sequence[Body]) -> list[Any]:
    """Results of the branch that the first operand chooses."""
    functions = [lambda *arrays, branch=branch: tuple(branch(arrays)) for branch in branches]
    return list(jax.lax.switch(operands[0], functions, *operands[1:]))
