"""Which dimensions of an operation may be cut, and what that leaves to be summed: one Rule per operation.

Sources, in order: rules the user registered, our own few (`own.OWN_RULES`), Shardy's (`shardy.read_rules`, all
operations of a program lowered together), and for anything else the rule that keeps every dimension whole, so that an
unknown operation runs replicated and correctly.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from autopar import parallel_map
from autopar.errors import RuleError
from autopar.ir.graph import Atom, Graph, Op
from autopar.rules.notation import Rule, parse
from autopar.rules.own import LOCAL, OWN_RULES
from autopar.rules.registry import registered_rules
from autopar.rules.shardy import read_rules

__all__ = ["LOCAL", "Reader", "Rule", "parse", "rules_of", "whole"]

#: Leaf primitives whose lowering is opaque, or that must not be lowered alone; replicate-only unless registered.
OPAQUE = (
    "pallas_call",
    "shard_map",
    "custom_call",
    "ffi_call",
    "pure_callback",
    "io_callback",
    "debug_callback",
    "debug_print",
    "custom_partitioning",
    "xla_call",
    "infeed",
    "outfeed",
    "sharding_constraint",
    "run_state",
    "tpu_custom_call",
)


#: Operations whose partial results one all-reduce may combine (`autopar.cost_models.reductions` says of which types, on
#: which backend). Any other reduced factor is kept whole.
COMBINABLE = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot",
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    "gather",
    "scatter-add",
)


#: Operations that XLA gathers whole, whatever the sharding, for operands of these element sizes (bytes).
NOT_PARTITIONED: Mapping[str, tuple[int, ...]] = {"select_and_scatter_add": (8,)}


def _combinable(op: Op, rule: Rule) -> Rule:
    """The rule without the partial sums that nothing can combine."""
    combined = _contracted_features(op, rule) if op.name == "conv_general_dilated" else rule.reduced
    combined = combined if op.name in COMBINABLE else ()
    if combined == rule.reduced:
        return rule
    return replace(rule, reduced=combined, kept=tuple(sorted({*rule.kept, *rule.reduced} - {*combined})))


def _contracted_features(op: Op, rule: Rule) -> tuple[int, ...]:
    """The input features of a convolution, if it has one batch group.

    Cut along anything else that it sums over (windows, batch groups), XLA adds the partial sums of too many devices
    whenever a mesh axis is left over (seen on jaxlib 0.10.2 and 0.12.0).
    """
    features = rule.operands[0][op.params["dimension_numbers"].lhs_spec[1]]
    return tuple(f for f in rule.reduced if f == features and op.params["batch_group_count"] == 1)


def whole(operand_shapes: Sequence[tuple[int, ...]], result_shapes: Sequence[tuple[int, ...]]) -> Rule:
    """The rule of an operation that cannot be cut: every dimension a factor of its own, all kept."""
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

    The rules of the last few graphs are remembered: planning for several meshes and generating code read them once.
    """
    known = registered_rules() if registered is None else registered
    return _rules_of(graph, tuple(sorted(known.items())))


@lru_cache(maxsize=4)
def _rules_of(graph: Graph, registered: tuple[tuple[str, str], ...]) -> Mapping[int, Rule]:
    return Reader(dict(registered)).of(graph)


@dataclass(eq=False)
class Reader:
    """Reads the rules of graphs that have operations in common, such as the stages of a step, each of these once.

    Attributes:
        registered: rules by operation; None: those that are registered.
        known: Shardy's rules that were read.
    """

    registered: Mapping[str, str] | None = None
    known: dict[Hashable, Rule] = field(default_factory=dict)

    def of(self, graph: Graph) -> Mapping[int, Rule]:
        """Rule of every leaf operation: signature -> Rule."""
        registered = registered_rules() if self.registered is None else self.registered
        representatives: dict[int, Op] = {}
        for op in graph.walk():
            if not op.regions:
                representatives.setdefault(op.signature, op)
        found: dict[int, Rule] = {}
        from_shardy: list[Op] = []
        for signature, op in representatives.items():
            rule = _without_compiler(graph, op, registered)
            if rule is not None:
                found[signature] = rule
            else:
                from_shardy.append(op)
        found.update(self._read(graph, from_shardy))
        return MappingProxyType({signature: found[signature] for signature in representatives})

    def _read(self, graph: Graph, ops: Sequence[Op]) -> Mapping[int, Rule]:
        keys = {op.signature: _key(op) for op in ops}
        missing = [op for op in ops if keys[op.signature] not in self.known]
        avals = [[v.aval for v in op.equation.invars] for op in missing]
        # lowering starts a backend, and what comes after that is not run side by side
        (found,) = parallel_map.results([partial(_read_all, graph, missing, avals)]) if missing else ({},)
        self.known.update((keys[s], rule) for s, rule in found.items() if keys[s] is not None)
        return {s: found[s] if s in found else self.known[key] for s, key in keys.items()}


def _key(op: Op) -> Hashable:
    """What the rule of an operation depends on; None where that cannot be compared."""
    key = op.equation.primitive, tuple(op.equation.params.items()), tuple(v.aval for v in op.equation.invars)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _shapes(graph: Graph, atoms: Sequence[Atom]) -> list[tuple[int, ...]]:
    return [graph.type_of(a).shape for a in atoms]


def _without_compiler(graph: Graph, op: Op, registered: Mapping[str, str]) -> Rule | None:
    operands, results = _shapes(graph, op.inputs), _shapes(graph, op.outputs)
    name = next((n for n in (op.params.get("name"), op.params.get("target_name"), op.name) if n in registered), None)
    if name is not None:
        return _parse_registered(name, registered[name], op, operands, results)
    if op.name in OWN_RULES:
        return parse(OWN_RULES[op.name](operands, results, op.params), operands, results, "autopar")
    opaque = op.name in OPAQUE or op.equation.effects or _gathered(graph, op)
    return whole(operands, results) if opaque else None


def _parse_registered(
    name: str, text: str, op: Op, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> Rule:
    try:
        return parse(text, operands, results, "user")
    except RuleError as error:
        raise RuleError(f"{error} (registered for '{name}', used{f' at {op.source}' if op.source else ''})") from None


def _gathered(graph: Graph, op: Op) -> bool:
    """XLA gathers the operands whole, whatever their sharding."""
    if op.name == "conv_general_dilated" and op.params["feature_group_count"] > 1:
        kernel = graph.type_of(op.inputs[1]).shape
        return kernel[op.params["dimension_numbers"].rhs_spec[1]] > 1  # only depthwise groups are partitioned
    sizes = NOT_PARTITIONED.get(op.name)
    return sizes is not None and any(graph.type_of(a).itemsize in sizes for a in op.inputs)


def _read_all(graph: Graph, ops: Sequence[Op], avals: Sequence[Sequence[Any]]) -> dict[int, Rule]:
    """Shardy's rules; should one operation fail to lower on its own, it alone becomes replicate-only."""
    if not ops:
        return {}
    try:
        rules = read_rules(ops, avals)
        return {op.signature: _combinable(op, rule) for op, rule in zip(ops, rules, strict=True)}
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        if len(ops) == 1:
            return {ops[0].signature: whole(_shapes(graph, ops[0].inputs), _shapes(graph, ops[0].outputs))}
        middle = len(ops) // 2
        left = _read_all(graph, ops[:middle], avals[:middle])
        return left | _read_all(graph, ops[middle:], avals[middle:])
