"""Loops and branches bound again, with bodies that the caller emits: operands in, results out, all as lists.

scan        operands are constants, carries, stacked operands; body(constants + carries + slices)
while       operands are constants of the condition, constants of the body, carries
cond        operands are the index, then the operands of every branch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar import jax_compat
from autopar.ir.graph import Op

#: Operands of a body -> its results.
BodyFunction = Callable[[Sequence[Any]], Sequence[Any]]


def scan(op: Op, operands: Sequence[Any], body: BodyFunction) -> list[Any]:
    """Results of a scan: carries, then stacked results."""
    constants, carries = jax_compat.scan_counts(op.params)
    constant_operands = operands[:constants]

    def iteration(carry: Any, slices: Any) -> Any:
        results = body([*constant_operands, *carry, *slices])
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


def while_loop(op: Op, operands: Sequence[Any], test: BodyFunction, body: BodyFunction, *, batched: bool) -> list[Any]:
    """Results of a while loop; `batched`: under vmap, so that the condition has a value for each element."""
    first = op.params["cond_nconsts"]
    carries = first + op.params["body_nconsts"]

    def condition(carry: Any) -> Any:
        return test([*operands[:first], *carry])[0]

    def step(carry: Any) -> Any:
        new = body([*operands[first:carries], *carry])
        if not batched:
            return tuple(new)
        is_running = condition(carry)
        return tuple(_update_running(is_running, a, b) for a, b in zip(new, carry, strict=True))

    # under vmap, until no element is running
    return list(jax.lax.while_loop(lambda carry: condition(carry).any(), step, tuple(operands[carries:])))


def _update_running(is_running: Any, new: Any, old: Any) -> Any:
    """The new value of a carry for those elements (leading dimensions) of a loop under vmap that are still running."""
    mask = jax.lax.broadcast_in_dim(is_running, new.shape, tuple(range(is_running.ndim)))
    return jax.lax.select(mask, new, old)


def cond(operands: Sequence[Any], branches: Sequence[BodyFunction]) -> list[Any]:
    """Results of the branch that the first operand selects."""
    functions = [lambda *arrays, branch=branch: tuple(branch(arrays)) for branch in branches]
    return list(jax.lax.switch(operands[0], functions, *operands[1:]))
