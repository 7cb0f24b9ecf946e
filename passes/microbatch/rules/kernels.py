"""Operations on blocks of the batch whose bodies the table does not know: their sharding rules say what is independent.

A grid axis of a Pallas kernel whose runs are independent (`autopar.rules.pallas`) may run in parts. It has n points,
and in every operand and result that it counts there is a dimension of n blocks of b elements, with a b of their own.
Viewed as (outer, m, inner), as a split dimension is, such a dimension falls into microbatches of whole blocks if

    n is a multiple of outer m,    so that    inner = (n / (outer m)) b

and microbatch k then has the same points of the axis in all operands and results, in the same order.

    operands      those that the axis counts are split along the dimension that it counts; invariant ones are sliced.
                  All others are invariant
    results       split along the dimension that the axis counts; each has one
    parameters    the axis has n / m points; blocks, index maps and the body stay

No operand may be partial, since nothing is known of what the body computes. Everything else is refused with a reason
that names the grid axis                                                                                     -> refusal

Attention of cuDNN and operations with `custom_partitioning` run block by block along a free factor of their rule. That
of cuDNN does as it is; what a block lacks of a result (the gradient of a bias that all examples share) is a partial
result. An operation with `custom_partitioning` does as the function that its `partition` gives for as many shards as
there are blocks, if that function communicates with no other shard, or only sums its results: a block then gives a part
of the sum.
"""

from __future__ import annotations

from autopar.passes.microbatch.rules.types import Operands, RuleResult
from autopar.passes.microbatch.states import INVARIANT, SUM, Invariant, Partial, Split, State, local_shape
from autopar.rules import cudnn, pallas, partitioned
from autopar.rules.notation import Rule


def kernel(operands: Operands) -> RuleResult | None:
    """A kernel whose split operands are cut along one grid axis of independent runs."""
    axis = _grid_axis(operands)
    if isinstance(axis, str):
        return None
    states, count = operands.states, operands.count
    outer = next(state.outer for state in states if isinstance(state, Split))
    splits = [None if dim is None else Split(dim, outer) for dim in axis.dims]
    of_operands, of_results = splits[: len(states)], splits[len(states) :]
    pairs = list(zip(states, of_operands, strict=True))
    if any(state != want for state, want in pairs if isinstance(state, Split)):
        return None
    results: list[State] = [split for split in of_results if split is not None]
    slices = {i: want for i, (s, want) in enumerate(pairs) if want is not None and isinstance(s, Invariant)}
    parts = [local_shape(n, want or INVARIANT, count) for n, want in zip(operands.shapes, of_operands, strict=True)]
    shapes = [local_shape(n, state, count) for n, state in zip(operands.result_shapes, results, strict=True)]
    return RuleResult(tuple(results), slices, pallas.part_params(operands.params, parts, shapes))


def refusal(operands: Operands) -> str:
    """Why a kernel does not run on blocks in these states; "" if it does."""
    axis = _grid_axis(operands)
    if isinstance(axis, str):
        return axis
    return "" if kernel(operands) else "its operands are cut along different grid axes, or in different orders"


def _grid_axis(operands: Operands) -> pallas.GridAxis | str:
    """The grid axis along which the first split operand is cut, if its runs are independent; else why there is none."""
    states, count = operands.states, operands.count
    for i, state in enumerate(states):
        if isinstance(state, Partial):
            return f"operand {i} is a total over the batch"
    first, state = next((i, state) for i, state in enumerate(states) if isinstance(state, Split))
    axes = pallas.grid_axes(operands.params)
    number = next((g for g, axis in enumerate(axes) if axis.dims[first] == state.dim), None)
    if number is None:
        uncounted = f"no grid axis counts blocks of dimension {state.dim} of operand {first}"
        return f"{uncounted}; {pallas.obstacles(operands.params)}" if any(axis.obstacle for axis in axes) else uncounted
    axis = axes[number]
    if axis.obstacle:
        return f"grid axis {number}: {axis.obstacle}"
    if axis.queries is not None:
        return f"grid axis {number}: it has positions of queries, and a batch is not along positions"
    if axis.size % (state.outer * count):
        strided = f" in each of {state.outer} parts" if state.outer > 1 else ""
        return f"grid axis {number}: its {axis.size} blocks do not divide into {count} microbatches{strided}"
    return axis


# By the factors of a rule


def partitioned_call(operands: Operands) -> RuleResult | None:
    """An operation with `custom_partitioning`."""
    rule = partitioned.analyse(operands.params).rule
    factor = _split_factor(operands, rule)
    if factor is None:
        return None
    params = partitioned.block_params(operands.params, rule, factor, operands.count)
    results = tuple(Split(dims.index(factor)) if factor in dims else SUM for dims in rule.results)
    return None if params is None else RuleResult(results, _slices(operands, rule, factor), params)


def attention(operands: Operands) -> RuleResult | None:
    """cuDNN's attention."""
    name = operands.op.name
    rule = cudnn.rule(name, operands.params, operands.shapes, operands.result_shapes)
    factor = _split_factor(operands, rule)
    if factor is None or factor == cudnn.POSITIONS:  # a batch is not along positions
        return None
    results: list[State] = []
    for i, dims in enumerate(rule.results):
        combined = cudnn.combined(name, i)
        if factor not in dims and combined is None:
            return None
        results.append(Split(dims.index(factor)) if factor in dims else Partial(combined or "sum"))
    return RuleResult(tuple(results), _slices(operands, rule, factor))


def _split_factor(operands: Operands, rule: Rule) -> int | None:
    """The free factor along which all split operands are split; None if there is none."""
    split = [(s, dims) for s, dims in zip(operands.states, rule.operands, strict=True) if isinstance(s, Split)]
    factors = {dims[s.dim] for s, dims in split}
    factor = factors.pop()
    unsuitable = factors or factor not in rule.free or rule.sizes[factor] % operands.count
    return None if unsuitable or any(s.outer > 1 for s, _ in split) else factor


def _slices(operands: Operands, rule: Rule, factor: int) -> dict[int, Split]:
    """The blocks of operands that are not split and have the factor."""
    return {
        i: Split(dims.index(factor))
        for i, (s, dims) in enumerate(zip(operands.states, rule.operands, strict=True))
        if factor in dims and not isinstance(s, Split)
    }
