"""Sharding rules read from Shardy, so that planner and compiler use the same rules.

Every distinct operation of a program is bound once in one function, lowered as one StableHLO module, and annotated by
Shardy's `populate-op-sharding-rules` pass. One JAX primitive may lower to several StableHLO operations (a gather with
fill, argsort, cumsum); their factors are then unified along the values between them:

    factors of an operand dimension    =  factors of the value's dimension that is the operand    -> _Unifier.union
    a dimension with factors (i, j)    is sharded along its major factor only                     -> _major
    CHLO operations                    elementwise                                                -> _elementwise
    reduced, need_replication          if so in any of the StableHLO operations                   -> _Reader
    an argument without uses           is not read by the operation                               -> _Reader.unread
    factors of one side only           need replication: a Cholesky factor's (i, j) -> (k, l)     -> _unmatched
    the bits of a random key           dimensions that only the lowered form has; need replication -> _Reader.logical
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxlib.mlir import ir, passmanager  # the same on jaxlib 0.10.2 and 0.12.0
from jaxlib.mlir.dialects import sdy

from autopar.ir.graph import Op
from autopar.rules.notation import Dims, Rule

_POPULATE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_FREE_PRODUCERS = ("stablehlo.constant", "stablehlo.iota", "sdy.constant")


@dataclass
class _Unifier:
    """Union-find over factors. The smallest index represents a class; per class the extremes of extents are kept."""

    parent: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)  # the smallest extent
    largest: list[int] = field(default_factory=list)  # the largest extent

    def new(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.largest.append(size)
        return len(self.parent) - 1

    def find(self, x: int) -> int:
        parent = self.parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            low, high = min(a, b), max(a, b)
            self.parent[high] = low
            self.size[low] = min(self.size[low], self.size[high])
            self.largest[low] = max(self.largest[low], self.largest[high])


@dataclass(frozen=True)
class ShardyRule:
    """One `sdy.op_sharding_rule` attribute: factors per dimension, sizes and kinds."""

    operands: list[list[Dims]]
    results: list[list[Dims]]
    sizes: list[int]
    reduced: list[int]
    need_replication: list[int]


def read_rules(ops: Sequence[Op], operand_avals: Sequence[Sequence[Any]]) -> tuple[Rule, ...]:
    """The rule of each leaf operation; `operand_avals` are JAX abstract values, literals included."""
    flat = [jax.ShapeDtypeStruct(a.shape, a.dtype) for avals in operand_avals for a in avals]
    counts = [len(avals) for avals in operand_avals]
    module, result_counts = _lower(ops, flat, counts)
    with module.context:
        passmanager.PassManager.parse(_POPULATE).run(module.operation)
        reader = _Reader(module)
        arguments = reader.arguments("main")
        results = reader.visit("main", arguments)
        unread = reader.unread("main")
    arguments = reader.logical(arguments, [len(a.shape) for a in flat])
    results = reader.logical(results, [len(v.aval.shape) for op in ops for v in op.equation.outvars])
    return _split_by_op(reader, arguments, results, counts, result_counts, unread)


def _lower(ops: Sequence[Op], flat: Sequence[Any], counts: Sequence[int]) -> tuple[Any, list[int]]:
    result_counts: list[int] = []

    def program(*args: Any) -> list[Any]:
        outputs: list[Any] = []
        position = 0
        for op, count in zip(ops, counts, strict=True):
            bound = op.equation.primitive.bind(*args[position : position + count], **op.equation.params)
            bound = list(bound) if op.equation.primitive.multiple_results else [bound]
            result_counts.append(len(bound))
            outputs.extend(bound)
            position += count
        return outputs

    lowered = jax.jit(program, keep_unused=True).trace(*flat).lower(lowering_platforms=("cpu",))
    return lowered.compiler_ir("stablehlo"), result_counts


class _Reader:
    """Walks the annotated module once and unifies factors along its values."""

    def __init__(self, module: Any) -> None:
        self.unify = _Unifier()
        self.reduced: list[int] = []
        self.need_replication: list[int] = []
        self._parsed_rules: dict[Any, ShardyRule] = {}
        self._functions = {f.attributes["sym_name"].value: f for f in module.body.operations}

    def arguments(self, name: str) -> list[list[int]]:
        """A new factor for every dimension of the arguments of one function."""
        block = self._functions[name].regions[0].blocks[0]
        return [[self.unify.new(size) for size in _shape(argument)] for argument in block.arguments]

    def unread(self, name: str) -> frozenset[int]:
        """Positions of the arguments of one function that no operation reads."""
        block = self._functions[name].regions[0].blocks[0]
        return frozenset(i for i, argument in enumerate(block.arguments) if not self._is_read(argument))

    def _is_read(self, value: Any) -> bool:
        for use in value.uses:
            if use.owner.name != "func.call":
                return True
            called = self._functions[use.owner.attributes["callee"].value].regions[0].blocks[0]
            if self._is_read(called.arguments[use.operand_number]):
                return True
        return False

    def logical(self, values: Sequence[list[int]], ranks: Sequence[int]) -> list[list[int]]:
        """Values with their dimensions in JAX; further dimensions are the bits of a random key and need replication."""
        self.need_replication.extend(f for dims, rank in zip(values, ranks, strict=True) for f in dims[rank:])
        return [dims[:rank] for dims, rank in zip(values, ranks, strict=True)]

    def visit(self, name: str, arguments: Sequence[list[int]]) -> list[list[int]]:
        """Factors of the results of one function, given those of its arguments."""
        block = self._functions[name].regions[0].blocks[0]
        env: dict[Any, list[int]] = dict(zip(block.arguments, arguments, strict=True))
        for view in block.operations:
            op = view.operation
            if op.name == "func.return":
                return [env[x] for x in op.operands]
            env.update(zip(op.results, self._results(op, env), strict=True))
        raise AssertionError(f"function {name} does not return")

    def _results(self, op: Any, env: dict[Any, list[int]]) -> list[list[int]]:
        if op.name == "func.call":
            return self.visit(op.attributes["callee"].value, [env[x] for x in op.operands])
        if "sdy.sharding_rule" in op.attributes:
            return self._by_rule(op, env)
        if op.name.startswith("chlo.") and all(_shape(x) == _shape(op.results[0]) for x in (*op.operands, *op.results)):
            return self._elementwise(op, env)
        new = [[self.unify.new(size) for size in _shape(result)] for result in op.results]
        if op.name not in _FREE_PRODUCERS:
            self.need_replication.extend(f for dims in new for f in dims)
            self.need_replication.extend(f for x in op.operands for f in env[x])
        return new

    def _elementwise(self, op: Any, env: dict[Any, list[int]]) -> list[list[int]]:
        """CHLO operations (erf, square, tan, ...) are elementwise; Shardy annotates none of them."""
        result = op.results[0]
        dims = [self.unify.new(size) for size in _shape(result)]
        for operand in op.operands:
            for existing, factor in zip(env[operand], dims, strict=True):
                self.unify.union(existing, factor)
        return [dims for _ in op.results]

    def _by_rule(self, op: Any, env: dict[Any, list[int]]) -> list[list[int]]:
        rule = self._parse(op.attributes["sdy.sharding_rule"])
        factors = [self.unify.new(size) for size in rule.sizes]
        for operand, dims in zip(op.operands, rule.operands, strict=True):
            for dim_factors, size, existing in zip(dims, _shape(operand), env[operand], strict=True):
                if dim_factors:
                    self.unify.union(factors[_major(dim_factors, rule.sizes)], existing)
                    self._keep_minor(dim_factors, rule.sizes, factors)
                elif size > 1:
                    self.need_replication.append(existing)
        results: list[list[int]] = []
        for result, dims in zip(op.results, rule.results, strict=True):
            results.append(
                [
                    self._result_factor(dim_factors, size, rule.sizes, factors)
                    for dim_factors, size in zip(dims, _shape(result), strict=True)
                ]
            )
            for dim_factors in dims:
                self._keep_minor(dim_factors, rule.sizes, factors)
        self.reduced.extend(factors[f] for f in rule.reduced)
        self.need_replication.extend(factors[f] for f in (*rule.need_replication, *_unmatched(op.name, rule)))
        return results

    def _result_factor(self, dim_factors: Dims, size: int, sizes: Sequence[int], factors: Sequence[int]) -> int:
        """The factor of a dimension of a result; a dimension without factors needs replication."""
        if dim_factors:
            return factors[_major(dim_factors, sizes)]
        new = self.unify.new(size)
        if size > 1:
            self.need_replication.append(new)
        return new

    def _keep_minor(self, dim_factors: Dims, sizes: Sequence[int], factors: Sequence[int]) -> None:
        """Minor factors of a dimension need replication."""
        major = _major(dim_factors, sizes) if dim_factors else None
        self.need_replication.extend(factors[f] for f in dim_factors if f != major and sizes[f] > 1)

    def _parse(self, attribute: Any) -> ShardyRule:
        parsed = self._parsed_rules.get(attribute)
        if parsed is None:
            parsed = self._parsed_rules[attribute] = parse_rule(attribute)
        return parsed


def parse_rule(attribute: Any) -> ShardyRule:
    """What an `sdy.op_sharding_rule` attribute says; permuted factors need replication."""
    rule = sdy.OpShardingRuleAttr(attribute)
    return ShardyRule(
        _mappings(rule.operand_mappings),
        _mappings(rule.result_mappings),
        list(rule.factor_sizes),
        list(rule.reduction_factors),
        [*rule.need_replication_factors, *rule.permutation_factors],
    )


def _unmatched(name: str, rule: ShardyRule) -> list[int]:
    """Factors of operands only that are not reduced; for a custom call, factors of results only as well."""
    read = {f for dims in rule.operands for dim_factors in dims for f in dim_factors}
    written = {f for dims in rule.results for dim_factors in dims for f in dim_factors}
    unreduced = sorted(read - written - {*rule.reduced})
    return [*unreduced, *sorted(written - read)] if name == "stablehlo.custom_call" else unreduced


def _major(dim_factors: Dims, sizes: Sequence[int]) -> int:
    """The first factor with more than one element."""
    return next((f for f in dim_factors if sizes[f] > 1), dim_factors[0])


def _mappings(tensors: Any) -> list[list[Dims]]:
    return [
        [tuple(sdy.DimMappingAttr(d).factor_indices) for d in sdy.TensorMappingAttr(t).dim_mappings] for t in tensors
    ]


def _shape(value: Any) -> list[int]:
    """Extents of an MLIR value; tokens have none."""
    try:
        return list(ir.RankedTensorType(value.type).shape)
    except (TypeError, ValueError):
        return []


def _split_by_op(
    reader: _Reader,
    arguments: Sequence[list[int]],
    results: Sequence[list[int]],
    counts: Sequence[int],
    result_counts: Sequence[int],
    unread: Collection[int],
) -> tuple[Rule, ...]:
    """One rule per operation, its factors numbered from 0."""
    find = reader.unify.find
    reduced = {find(f) for f in reader.reduced}
    need_replication = {find(f) for f in reader.need_replication}
    rules: list[Rule] = []
    a = r = 0
    for n_in, n_out in zip(counts, result_counts, strict=True):
        names: dict[int, int] = {}
        operands = tuple(_renumber(dims, names, find) for dims in arguments[a : a + n_in])
        op_results = tuple(_renumber(dims, names, find) for dims in results[r : r + n_out])
        # A factor of operands with extent 1 and with a larger one (a concatenation) gets the larger extent and needs
        # replication.
        read, written = ({n for dims in side for n in dims} for side in (operands, op_results))
        shared = [f for f, n in names.items() if n in read and n in written]
        uneven = {f for f in shared if reader.unify.size[f] == 1 < reader.unify.largest[f]}
        sizes = tuple((reader.unify.largest if f in uneven else reader.unify.size)[f] for f in names)
        rules.append(
            Rule(
                operands,
                op_results,
                sizes,
                tuple(n for f, n in names.items() if f in reduced and f not in need_replication | uneven),
                tuple(n for f, n in names.items() if f in need_replication | uneven),
                unread=tuple(k for k in range(n_in) if a + k in unread),
            )
        )
        a, r = a + n_in, r + n_out
    return tuple(rules)


def _renumber(dims: Sequence[int], names: dict[int, int], find: Any) -> Dims:
    return tuple(names.setdefault(find(f), len(names)) for f in dims)
