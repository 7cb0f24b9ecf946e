"""Collectives in the body of a `shard_map`, on blocks of the shards.

All devices run block k of their shards at a time. What a collective does to elements of the same position on several
devices, it does to those of block k alone; what it does to dimensions decides where block k is in its result:

    psum, pmax, pmin, ppermute    the same block. Sums may be partial in a psum, maxima in a pmax
    all_gather along a dimension  n shards in a row: (outer, m, inner) becomes (n outer, m, inner)
    reduce_scatter                the inverse, if each of the n pieces has whole rows of `outer`; likewise all_to_all
                                  along the dimension that it divides

and along all other dimensions the block stays.
"""

from __future__ import annotations

from autopar.passes.microbatch.rules.types import Operands, RuleResult
from autopar.passes.microbatch.states import Split, State


def same_positions(operands: Operands) -> RuleResult | None:
    """A collective of elements of the same position."""
    return RuleResult(operands.states)


def all_gather(operands: Operands) -> RuleResult | None:
    """Shards in a row along a dimension, or along a new one."""
    (state,), gathered = operands.states, operands.params["all_gather_dimension"]
    if not isinstance(state, Split):
        return None
    if not operands.params["tiled"]:
        return RuleResult((Split(state.dim + (gathered <= state.dim), state.outer),))
    return RuleResult((_joined(operands, state) if gathered == state.dim else state,))


def reduce_scatter(operands: Operands) -> RuleResult | None:
    """One of the pieces along a dimension, or one of its elements."""
    (state,), scattered = operands.states, operands.params["scatter_dimension"]
    if not isinstance(state, Split):
        return None
    if not operands.params["tiled"]:
        return (
            None if scattered == state.dim else RuleResult((Split(state.dim - (scattered < state.dim), state.outer),))
        )
    return _result(_divided(operands, state) if scattered == state.dim else state)


def all_to_all(operands: Operands) -> RuleResult | None:
    """Pieces along one dimension, joined along another."""
    (state,) = operands.states
    divided, joined = operands.params["split_axis"], operands.params["concat_axis"]
    if not isinstance(state, Split) or divided == joined == state.dim:
        return None
    if divided == joined or state.dim not in (divided, joined):
        return RuleResult((state,))
    return _result(_divided(operands, state) if state.dim == divided else _joined(operands, state))


def _result(state: State | None) -> RuleResult | None:
    return None if state is None else RuleResult((state,))


def _joined(operands: Operands, state: Split) -> Split:
    """The block in n shards in a row."""
    return Split(state.dim, state.outer * (operands.result_shapes[0][state.dim] // operands.shapes[0][state.dim]))


def _divided(operands: Operands, state: Split) -> Split | None:
    """The block in one of n pieces; None if a piece begins in the middle of a block's rows."""
    pieces = operands.shapes[0][state.dim] // operands.result_shapes[0][state.dim]
    return Split(state.dim, state.outer // pieces) if state.outer % pieces == 0 else None
