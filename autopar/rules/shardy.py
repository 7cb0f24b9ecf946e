"""Sharding rules read from Shardy, so that planner and compiler hold the same.

Every distinct operation of a program is bound once in one function, lowered as one StableHLO module, and annotated by
Shardy's `populate-op-sharding-rules` pass. One JAX primitive may lower to several StableHLO operations (a gather with
fill, argsort, cumsum); their factors are then unified along the values that flow between them:

    factors of an operand dimension  =  factors of the value's dimension that arrives there      -> _Unifier.join
    a dimension with factors (i, j)  is cut along its major factor only                          -> _major
    CHLO operations                  one to one                                                  -> _elementwise
    reduced / kept                   if any of the StableHLO operations says so                  -> _Reader
    matched by nothing               whole: a Cholesky factor's (i, j) -> (k, l) cannot be cut    -> _unmatched
    the bits of a random key         dimensions that only the lowered form has, kept whole       -> _Reader.logical
    operands without a reader        such as the matrix of a linear solve, that has its factors  -> _Reader.unread
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Union-find over factors, the smaller index representing a class; keeps the extremes of each one's extents."""

    parent: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)  # the smallest extent
    largest: list[int] = field(default_factory=list)

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

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            low, high = min(a, b), max(a, b)
            self.parent[high] = low
            self.size[low] = min(self.size[low], self.size[high])
            self.largest[low] = max(self.largest[low], self.largest[high])


@dataclass(frozen=True)
class _Parsed:
    """One `sdy.op_sharding_rule` attribute: factors per dimension, sizes and kinds."""

    operands: list[list[Dims]]
    results: list[list[Dims]]
    sizes: list[int]
    reduced: list[int]
    kept: list[int]


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
    return _cut_apart(reader, arguments, results, counts, result_counts, unread)


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
        self.kept: list[int] = []
        self._parsed: dict[Any, _Parsed] = {}
        self._functions = {f.attributes["sym_name"].value: f for f in module.body.operations}

    def arguments(self, name: str) -> list[list[int]]:
        """A fresh factor for every dimension of the arguments of one function."""
        block = self._functions[name].regions[0].blocks[0]
        return [[self.unify.new(size) for size in _shape(argument)] for argument in block.arguments]

    def unread(self, name: str) -> list[bool]:
        """For each argument of one function whether nothing in it, or in what it calls, has that as an operand."""
        block = self._functions[name].regions[0].blocks[0]
        return [all(map(self._is_passed_on, argument.uses)) for argument in block.arguments]

    def _is_passed_on(self, use: Any) -> bool:
        """Whether a value is only handed to a function that does not read it."""
        call = use.owner.operation
        return call.name == "func.call" and self.unread(call.attributes["callee"].value)[use.operand_number]

    def logical(self, values: Sequence[list[int]], ranks: Sequence[int]) -> list[list[int]]:
        """Values with the dimensions that JAX shows; further ones hold the bits of a random key and are kept whole."""
        self.kept.extend(f for dims, rank in zip(values, ranks, strict=True) for f in dims[rank:])
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
        fresh = [[self.unify.new(size) for size in _shape(result)] for result in op.results]
        if op.name not in _FREE_PRODUCERS:
            self.kept.extend(f for dims in fresh for f in dims)
            self.kept.extend(f for x in op.operands for f in env[x])
        return fresh

    def _elementwise(self, op: Any, env: dict[Any, list[int]]) -> list[list[int]]:
        """CHLO operations (erf, square, tan, ...) work element by element; Shardy annotates none of them."""
        result = op.results[0]
        dims = [self.unify.new(size) for size in _shape(result)]
        for operand in op.operands:
            for have, factor in zip(env[operand], dims, strict=True):
                self.unify.join(have, factor)
        return [dims for _ in op.results]

    def _by_rule(self, op: Any, env: dict[Any, list[int]]) -> list[list[int]]:
        rule = self._parse(op.attributes["sdy.sharding_rule"])
        factors = [self.unify.new(size) for size in rule.sizes]
        for operand, dims in zip(op.operands, rule.operands, strict=True):
            for of_dim, size, have in zip(dims, _shape(operand), env[operand], strict=True):
                if of_dim:
                    self.unify.join(factors[_major(of_dim, rule.sizes)], have)
                    self._keep_minor(of_dim, rule.sizes, factors)
                elif size > 1:
                    self.kept.append(have)
        out: list[list[int]] = []
        for result, dims in zip(op.results, rule.results, strict=True):
            out.append(
                [
                    self._of_result(of_dim, size, rule.sizes, factors)
                    for of_dim, size in zip(dims, _shape(result), strict=True)
                ]
            )
            for of_dim in dims:
                self._keep_minor(of_dim, rule.sizes, factors)
        self.reduced.extend(factors[f] for f in rule.reduced)
        self.kept.extend(factors[f] for f in (*rule.kept, *_unmatched(op.name, rule)))
        return out

    def _of_result(self, of_dim: Dims, size: int, sizes: Sequence[int], factors: Sequence[int]) -> int:
        """The factor of a dimension of a result; one without factors is whole."""
        if of_dim:
            return factors[_major(of_dim, sizes)]
        fresh = self.unify.new(size)
        if size > 1:
            self.kept.append(fresh)
        return fresh

    def _keep_minor(self, of_dim: Dims, sizes: Sequence[int], factors: Sequence[int]) -> None:
        major = _major(of_dim, sizes) if of_dim else None
        self.kept.extend(factors[f] for f in of_dim if f != major and sizes[f] > 1)

    def _parse(self, attribute: Any) -> _Parsed:
        found = self._parsed.get(attribute)
        if found is None:
            rule = sdy.OpShardingRuleAttr(attribute)
            found = self._parsed[attribute] = _Parsed(
                _mappings(rule.operand_mappings),
                _mappings(rule.result_mappings),
                list(rule.factor_sizes),
                list(rule.reduction_factors),
                [*rule.need_replication_factors, *rule.permutation_factors],
            )
        return found


def _unmatched(name: str, rule: _Parsed) -> list[int]:
    """Factors that only operands have and nothing sums over, and those that only the results of a custom call have."""
    read = {f for dims in rule.operands for of_dim in dims for f in of_dim}
    made = {f for dims in rule.results for of_dim in dims for f in of_dim}
    lost = sorted(read - made - {*rule.reduced})
    return [*lost, *sorted(made - read)] if name == "stablehlo.custom_call" else lost


def _major(of_dim: Dims, sizes: Sequence[int]) -> int:
    return next((f for f in of_dim if sizes[f] > 1), of_dim[0])


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


def _cut_apart(
    reader: _Reader,
    arguments: Sequence[list[int]],
    results: Sequence[list[int]],
    counts: Sequence[int],
    result_counts: Sequence[int],
    unread: Sequence[bool],
) -> tuple[Rule, ...]:
    find = reader.unify.find
    reduced = {find(f) for f in reader.reduced}
    kept = {find(f) for f in reader.kept}
    rules: list[Rule] = []
    a = r = 0
    for n_in, n_out in zip(counts, result_counts, strict=True):
        names: dict[int, int] = {}
        operands = tuple(_renumber(dims, names, find) for dims in arguments[a : a + n_in])
        outs = tuple(_renumber(dims, names, find) for dims in results[r : r + n_out])
        # Where operands share a factor, one with extent 1 and another longer (a concatenation), it is long, and whole.
        read, made = ({n for dims in side for n in dims} for side in (operands, outs))
        shared = [f for f, n in names.items() if n in read and n in made]
        uneven = {f for f in shared if reader.unify.size[f] == 1 < reader.unify.largest[f]}
        sizes = tuple((reader.unify.largest if f in uneven else reader.unify.size)[f] for f in names)
        rules.append(
            Rule(
                operands,
                outs,
                sizes,
                tuple(n for f, n in names.items() if f in reduced and f not in kept | uneven),
                tuple(n for f, n in names.items() if f in kept | uneven),
                unread=tuple(k for k in range(n_in) if unread[a + k]),
            )
        )
        a, r = a + n_in, r + n_out
    return tuple(rules)


def _renumber(dims: Sequence[int], names: dict[int, int], find: Any) -> Dims:
    return tuple(names.setdefault(find(f), len(names)) for f in dims)
