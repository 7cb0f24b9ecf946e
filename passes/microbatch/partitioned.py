"""Operations on blocks of the batch whose sharding rules say which dimensions are independent.

An operation runs block by block along a free factor of its rule. cuDNN's attention does as it is; what a block lacks of
a result (the gradient of a bias that all examples share) is a partial result. An operation with `custom_partitioning`
does as the function that its `partition` gives for as many shards as there are blocks, if that function communicates
with no other shard, or only sums its results: a block then gives a part of the sum.
"""

from __future__ import annotations

from autopar.passes.microbatch.rule_types import Operands, RuleResult
from autopar.passes.microbatch.states import SUM, Partial, Split, State
from autopar.rules import cudnn, partitioned
from autopar.rules.notation import Rule


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
    if factor is None:
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
