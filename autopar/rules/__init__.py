"""Sharding rules: which dimensions of an operation may be sharded, and which of them leave partial sums.

Sources, in order: rules that the user registered; a few of autopar's own (`own.OWN_RULES`); rules derived from Pallas
kernels (`pallas.rule`), stated by `custom_partitioning` (`partitioned.analyse`), those of cuDNN's attention
(`cudnn.rule`) and of products over groups of rows (`ragged.rule`); Shardy's (`shardy.read_rules`, all operations of a
program lowered together). Any other operation gets the rule in which every dimension needs replication, so that it runs
replicated and correctly.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from autopar import jax_compat, parallel_map
from autopar.errors import RuleError
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.on_graph import cached_on_graph
from autopar.ir.op_sets import (
    ATTENTION,
    CALLBACKS,
    KERNEL_CALLS,
    LOGICAL_REDUCTIONS,
    MEGABLOX_PRODUCTS,
    NUMERIC_REDUCTIONS,
    PRODUCTS,
    RAGGED_PRODUCTS,
)
from autopar.jax_compat import megablox
from autopar.rules import cudnn, pallas, partitioned, ragged
from autopar.rules.convolutions import CONVOLUTION, is_grouped
from autopar.rules.notation import Rule, parse
from autopar.rules.own import OWN_RULES, SHARD_MAPPED
from autopar.rules.registry import registered_rules
from autopar.rules.shardy import read_rules

__all__ = ["SHARD_MAPPED", "Rule", "RuleReader", "parse", "replicated_rule", "rules_of", "runs_per_device"]

#: Leaf primitives whose lowering is opaque, or that cannot be lowered alone; replicated unless a rule is registered.
OPAQUE = (
    *(*KERNEL_CALLS, *CALLBACKS, "debug_print", "shard_map", "sharding_constraint"),
    *("run_state", "tpu_custom_call"),
)


#: Most operations whose rules are cached; a large step has a few hundred distinct ones.
MOST_CACHED = 4096

#: Operations whose partial results one all-reduce can combine (for which types on which backend:
#: `autopar.cost_models.reductions`). Reduced factors of other operations need replication.
COMBINABLE = (*PRODUCTS, *NUMERIC_REDUCTIONS, *LOGICAL_REDUCTIONS, "reduce_xor", "gather", "scatter-add")


#: Operations whose operands XLA gathers, whatever their sharding -> element sizes (bytes) for which it does.
GATHERED_BY_XLA: Mapping[str, tuple[int, ...]] = {"select_and_scatter_add": (8,)}


def runs_per_device(op: Op) -> bool:
    """Whether an operation is emitted under `jax.shard_map`, so that every cut has to be even."""
    return op.name in SHARD_MAPPED or is_grouped(op)


def _keep_combinable(op: Op, rule: Rule) -> Rule:
    """The rule, in which reduced factors whose partial sums cannot be combined need replication."""
    combined = _reduced_features(op, rule) if op.name == CONVOLUTION else rule.reduced
    combined = combined if op.name in COMBINABLE else ()
    whole = {*rule.need_replication, *rule.reduced} - {*combined}
    if is_grouped(op):  # windows of a kernel's gradient, which Shardy leaves free in JAX 0.10 and not in 0.12
        whole.update({f for dims in rule.results for f in dims} - {f for dims in rule.operands for f in dims})
    return replace(rule, reduced=combined, need_replication=tuple(sorted(whole)))


def _reduced_features(op: Op, rule: Rule) -> tuple[int, ...]:
    """The input features of a convolution.

    Sharded along the positions of windows, XLA adds the partial sums of too many devices whenever a mesh axis is left
    over (seen on jaxlib 0.10.2 and 0.12.0).
    """
    features = rule.operands[0][op.params["dimension_numbers"].lhs_spec[1]]
    return tuple(f for f in rule.reduced if f == features)


def replicated_rule(operand_shapes: Sequence[tuple[int, ...]], result_shapes: Sequence[tuple[int, ...]]) -> Rule:
    """The rule of an operation that cannot be sharded: every dimension is a factor of its own and needs replication."""
    sizes: list[int] = []

    def dims(shape: tuple[int, ...]) -> tuple[int, ...]:
        start = len(sizes)
        sizes.extend(shape)
        return tuple(range(start, len(sizes)))

    operands = tuple(map(dims, operand_shapes))
    results = tuple(map(dims, result_shapes))
    return Rule(operands, results, tuple(sizes), (), tuple(range(len(sizes))), "autopar")


def rules_of(graph: Graph, registered: Mapping[str, str] | None = None) -> Mapping[int, Rule]:
    """Rule of every leaf operation: signature -> Rule. Distinct operations are lowered in one module.

    The rules of the last few graphs are cached: planning for several meshes and code generation read them once. So are
    the rules of the last `MOST_CACHED` operations, which the stages and the rewritings of a step have in common.
    """
    registered = registered_rules() if registered is None else registered
    return _rules_of(graph, tuple(sorted(registered.items())))


@cached_on_graph
def _rules_of(graph: Graph, registered: tuple[tuple[str, str], ...]) -> Mapping[int, Rule]:
    return _reader().read(graph, dict(registered))


@lru_cache(maxsize=1)
def _reader() -> RuleReader:
    """The reader of this process."""
    return RuleReader()


@dataclass(eq=False)
class RuleReader:
    """Reads the rules of graphs with common operations, such as the stages of a step, each operation once.

    Attributes:
        cache: Shardy's rules that were read, by what they depend on; the least recently used first.
    """

    cache: dict[Hashable, Rule] = field(default_factory=dict)

    def read(self, graph: Graph, registered: Mapping[str, str]) -> Mapping[int, Rule]:
        """Rule of every leaf operation: signature -> Rule. `registered`: rules by operation."""
        representatives: dict[int, Op] = {}
        for op in graph.walk():
            if not op.regions:
                representatives.setdefault(op.signature, op)
        rules: dict[int, Rule] = {}
        from_shardy: list[Op] = []
        unread = _unread(graph)
        for signature, op in representatives.items():
            rule = _rule_without_shardy(graph, op, registered, unread.get(signature, ()))
            if rule is not None:
                rules[signature] = rule
            else:
                from_shardy.append(op)
        rules.update(self._read(graph, from_shardy))
        return MappingProxyType({signature: rules[signature] for signature in representatives})

    def _read(self, graph: Graph, ops: Sequence[Op]) -> Mapping[int, Rule]:
        keys = {op.signature: _key(op) for op in ops}
        missing = [op for op in ops if keys[op.signature] not in self.cache]
        avals = [[v.aval for v in op.equation.invars] for op in missing]
        # lowering starts a backend, which later tasks must not be forked from; so it runs in a process of its own
        (rules,) = parallel_map.results([partial(_read_from_shardy, graph, missing, avals)]) if missing else ({},)
        read = {s: rules[s] if s in rules else self.cache[key] for s, key in keys.items()}
        for s, key in keys.items():
            if key is not None:
                self.cache.pop(key, None)
                self.cache[key] = read[s]
        for oldest in list(itertools.islice(self.cache, max(0, len(self.cache) - MOST_CACHED))):
            del self.cache[oldest]
        return read


def _key(op: Op) -> Hashable:
    """What the rule of an operation depends on, JAX's configuration included; None if that is not hashable."""
    equation = op.equation
    avals = tuple(v.aval for v in equation.invars)
    key = equation.primitive, tuple(equation.params.items()), avals, jax_compat.trace_context()
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _shapes(graph: Graph, atoms: Sequence[Atom]) -> list[tuple[int, ...]]:
    return [graph.type_of(a).shape for a in atoms]


def _unread(graph: Graph) -> Mapping[int, tuple[int, ...]]:
    """Signature of a Pallas kernel -> the results that nothing reads of any kernel with this signature."""
    unread: dict[int, tuple[int, ...]] = {}
    for op in graph.walk():
        if op.name == "pallas_call":
            before = unread.get(op.signature, range(len(op.outputs)))
            unread[op.signature] = tuple(r for r in before if not graph.uses_of(op.outputs[r]))
    return unread


def _rule_without_shardy(graph: Graph, op: Op, registered: Mapping[str, str], unread: Sequence[int]) -> Rule | None:
    """A registered rule, one of autopar's own, or replication of what is opaque; None if Shardy's rule applies."""
    operands, results = _shapes(graph, op.inputs), _shapes(graph, op.outputs)
    own = partitioned.name(op.params) if op.name == "custom_partitioning" else op.params.get("name")
    name = next((n for n in (own, op.params.get("target_name"), op.name) if n in registered), None)
    if name is not None:
        return _parse_registered(name, registered[name], op, operands, results)
    if op.name in OWN_RULES:
        return parse(OWN_RULES[op.name](operands, results, op.params), operands, results, "autopar")
    if op.name == "pallas_call":
        return pallas.rule(op.params, operands, results, unread)
    if op.name == "custom_partitioning":
        return partitioned.analyse(op.params).rule
    if op.name in ATTENTION:
        return cudnn.rule(op.name, op.params, operands, results)
    if op.name in RAGGED_PRODUCTS:
        tile = megablox.row_tile(op.params) if op.name in MEGABLOX_PRODUCTS else 1
        return ragged.rule(op.params, operands, results, graph.type_of(op.inputs[2]).dtype, tile)
    opaque = op.name in OPAQUE or op.equation.effects or _is_gathered(graph, op)
    return replicated_rule(operands, results) if opaque else None


def _parse_registered(
    name: str, text: str, op: Op, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> Rule:
    try:
        return parse(text, operands, results, "user")
    except RuleError as error:
        raise RuleError(f"{error} (registered for '{name}', used{f' at {op.source}' if op.source else ''})") from None


def _is_gathered(graph: Graph, op: Op) -> bool:
    """True if XLA gathers the operands, whatever their sharding."""
    sizes = GATHERED_BY_XLA.get(op.name)
    return sizes is not None and any(graph.type_of(a).itemsize in sizes for a in op.inputs)


def _read_from_shardy(graph: Graph, ops: Sequence[Op], avals: Sequence[Sequence[Any]]) -> dict[int, Rule]:
    """Shardy's rules. If a single operation fails to lower, only that operation is replicated."""
    if not ops:
        return {}
    try:
        rules = read_rules(ops, avals)
        return {op.signature: _keep_combinable(op, rule) for op, rule in zip(ops, rules, strict=True)}
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        if len(ops) == 1:
            return {ops[0].signature: replicated_rule(_shapes(graph, ops[0].inputs), _shapes(graph, ops[0].outputs))}
        middle = len(ops) // 2
        left = _read_from_shardy(graph, ops[:middle], avals[:middle])
        return left | _read_from_shardy(graph, ops[middle:], avals[middle:])
