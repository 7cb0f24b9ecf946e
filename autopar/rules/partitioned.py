"""Sharding rules of operations with `custom_partitioning`, and what such an operation runs on each device.

Such an operation has a function, a sharding rule in Shardy's terms, and a callback that says, for shardings of operands
and results, which function each device runs on its shards, and which shardings that function takes:

    partition(*static, mesh, operands, results)  ->  mesh, lower_fn, shardings of results, shardings of operands

The results of `lower_fn` are complete: XLA adds no sum over devices, whatever the rule calls a reduction (tested on jax
0.10.2 and 0.12.0). So the rule alone does not show that an operation may be cut. A factor of it is free if, on a mesh
of one axis of the fewest shards that divide it,

    1. the rule neither keeps nor permutes it, it is the major factor of every dimension that it is in, and some operand
       has it
    2. `partition` accepts operands and results that are cut along it, and returns the same shardings
    3. `lower_fn` gives the shards of these results
    4. if some result does not have it, `lower_fn` communicates over the axis

Everything else needs replication. A free factor that no result has is reduced.

If `lower_fn` communicates over no axis, it is the operation on a block of its operands: so the operation runs on blocks
of a batch as well                                                                                      -> block_params
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.errors import RuleError
from autopar.rules.notation import Dims, Rule
from autopar.rules.shardy import ShardyRule, parse_rule

Shape = tuple[int, ...]
Params = Mapping[str, Any]
Specs = tuple[PartitionSpec, ...]

AXIS = "shards"
#: Most operations whose analysis is cached; the layers of a model have a few distinct ones.
MOST_CACHED = 256


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What `custom_partitioning` says about one operation; operands and results are flat.

    Attributes:
        partition, sharding_rule, decode_shardings: arguments of `def_partition`.
        static_args: static arguments, which both callbacks get first.
        in_tree, out_tree: trees of operands and results.
        operands, results: their shapes and types.
        context: JAX's settings that change what a trace gives.
    """

    partition: Callable[..., Any]
    sharding_rule: Any
    decode_shardings: bool
    static_args: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    context: Any

    @staticmethod
    def of(params: Params) -> Partitioned:
        """What the parameters of an equation say."""
        operands, results = (
            tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
            for avals in (params["call"].in_avals, params["call"].out_avals)
        )
        return Partitioned(
            params["partition"],
            params["sharding_rule"],
            params["decode_shardings"],
            params["static_args"],
            params["in_tree"],
            params["out_tree"],
            operands,
            results,
            jax_compat.trace_context(),
        )


@dataclass(frozen=True, slots=True)
class LocalCall:
    """What each device runs.

    Attributes:
        run: function of the device's shards, flat; gives the shards of the results, flat.
        operands, results: shardings in which it takes operands and gives results.
    """

    run: Callable[..., list[Any]]
    operands: Specs
    results: Specs


def name(params: Params) -> str:
    """The name of the operation's function."""
    return params["call"].jaxpr.debug_info.func_name


# The callback


def local_call(op: Partitioned, mesh: Any, operands: Specs, results: Specs) -> LocalCall:
    """What `partition` gives for these shardings.

    Raises:
        RuleError: it fails, or gives anything else than a function and shardings over the same mesh.
    """
    shaped = [
        [
            jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, spec))
            for t, spec in zip(*of, strict=True)
        ]
        for of in ((op.operands, operands), (op.results, results))
    ]
    try:
        own_mesh, run, of_results, of_operands = op.partition(
            *op.static_args, mesh, op.in_tree.unflatten(shaped[0]), op.out_tree.unflatten(shaped[1])
        )
        flat = op.in_tree.flatten_up_to(of_operands), op.out_tree.flatten_up_to(of_results)
    except Exception as error:
        raise RuleError(f"partition refuses it ({_said(error)})") from error
    if dict(own_mesh.shape) != dict(mesh.shape):
        raise RuleError(f"partition takes another mesh, {dict(own_mesh.shape)}")
    if any(not isinstance(s, NamedSharding) or dict(s.mesh.shape) != dict(mesh.shape) for of in flat for s in of):
        raise RuleError("partition gives shardings that are no NamedSharding over its mesh")
    specs = (tuple(s.spec for s in of) for of in flat)
    return LocalCall(lambda *shards: jax.tree.leaves(run(*op.in_tree.unflatten(shards))), *specs)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def specs(dims: Sequence[Dims], axes: Mapping[str, int]) -> Specs:
    """Shardings of arrays whose dimensions have these factors; `axes`: name of a mesh axis -> the factor it cuts."""

    def entry(factor: int) -> Any:
        names = tuple(name for name, cut in axes.items() if cut == factor)
        return names[0] if len(names) == 1 else names or None

    return tuple(PartitionSpec(*map(entry, of)) for of in dims)


def _padded(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return (*entries, *[()] * (rank - len(entries)))


@dataclass(frozen=True, slots=True)
class Trial:
    """`lower_fn` of an operation that is cut along one factor.

    Attributes:
        jaxpr: on the shards of one device.
        communicates: whether it communicates between devices.
    """

    jaxpr: Any
    communicates: bool


def trial(op: Partitioned, rule: Rule, factor: int, shards: int) -> Trial:
    """Cut an operation along one factor of its rule, on a mesh of one axis.

    Raises:
        RuleError: conditions 2 or 3 do not hold.
    """
    mesh = jax_compat.auto_abstract_mesh((shards,), (AXIS,))
    wanted = specs(rule.operands, {AXIS: factor}), specs(rule.results, {AXIS: factor})
    call = local_call(op, mesh, *wanted)
    for kind, types, asked, given in (
        ("operand", op.operands, wanted[0], call.operands),
        ("result", op.results, wanted[1], call.results),
    ):
        for i, (t, a, g) in enumerate(zip(types, asked, given, strict=True)):
            if _padded(a, len(t.shape)) != _padded(g, len(t.shape)):
                raise RuleError(f"partition wants {kind} {i} as {g}, not as {a}")
    shard = [[_shard(t, spec, shards) for t, spec in zip(*of, strict=True)]
             for of in ((op.operands, wanted[0]), (op.results, wanted[1]))]  # fmt: skip
    try:
        jaxpr = jax.make_jaxpr(call.run, axis_env=[(AXIS, shards)])(*shard[0])
    except Exception as error:
        raise RuleError(f"its lower_fn fails ({_said(error)})") from error
    given = [(a.shape, a.dtype) for a in jaxpr.out_avals]
    if given != [(t.shape, t.dtype) for t in shard[1]]:
        raise RuleError(f"its lower_fn gives {', '.join(a.str_short() for a in jaxpr.out_avals)}")
    return Trial(jaxpr, _communicates(jaxpr.jaxpr))


def _shard(whole: jax.ShapeDtypeStruct, spec: PartitionSpec, shards: int) -> jax.ShapeDtypeStruct:
    shape = [n // shards if names else n for n, names in zip(whole.shape, _padded(spec, len(whole.shape)), strict=True)]
    return jax.ShapeDtypeStruct(tuple(shape), whole.dtype)


def _communicates(jaxpr: Any) -> bool:
    """Whether an equation of a jaxpr, or of one inside it, sends data along a mesh axis."""
    return any(map(_communicates_in, jaxpr.eqns))


def _communicates_in(equation: Any) -> bool:
    params = equation.params
    over_axis = AXIS in str((params.get("axes"), params.get("axis_name")))
    return (over_axis and equation.primitive.name != "axis_index") or any(map(_communicates, _inner(params)))


def _inner(params: Params) -> Iterator[Any]:
    for value in params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(inner, "jaxpr", inner)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


# Rules


@dataclass(frozen=True, slots=True)
class Analysis:
    """The rule of an operation.

    Attributes:
        rule: with only those factors free for which the conditions hold.
        obstacles: why the others are not, in words.
    """

    rule: Rule
    obstacles: tuple[str, ...]


def analyse(params: Params) -> Analysis:
    """The rule of an operation with these parameters; see the module's text."""
    op = Partitioned.of(params)
    try:
        return _cached(op)
    except TypeError:  # static arguments that are not hashable
        return _analyse(op)


@lru_cache(maxsize=MOST_CACHED)
def _cached(op: Partitioned) -> Analysis:
    return _analyse(op)


def _analyse(op: Partitioned) -> Analysis:
    whole = _as_rule(op, None)
    if op.sharding_rule is None:
        return Analysis(whole, ("it has no sharding_rule; def_partition takes one",))
    if not op.decode_shardings:
        return Analysis(whole, ("its def_partition has decode_shardings=False",))
    try:
        said = _sharding_rule(op)
    except Exception as error:
        return Analysis(whole, (f"its sharding_rule does not fit ({_said(error)})",))
    rule, obstacles = _as_rule(op, said), list[str]()
    kept, reduced = set(rule.need_replication), list[int]()
    for factor, size in enumerate(rule.sizes):
        obstacle = _obstacle(op, said, rule, factor) if size > 1 else ""
        if obstacle:
            kept.add(factor)
            obstacles.append(f"{_place(rule, factor)}: {obstacle}")
        elif size > 1 and not any(factor in dims for dims in rule.results):
            reduced.append(factor)
    return Analysis(replace(rule, reduced=tuple(reduced), need_replication=tuple(sorted(kept))), tuple(obstacles))


def _sharding_rule(op: Partitioned) -> ShardyRule:
    mesh = jax_compat.auto_abstract_mesh((2,), (AXIS,))
    return parse_rule(jax_compat.partitioning_rule(op.sharding_rule, (*op.static_args, mesh), op.operands, op.results))


def _as_rule(op: Partitioned, said: ShardyRule | None) -> Rule:
    """The rule that is stated, with a factor for every dimension; its sizes divide the extents of their dimensions."""
    sizes: list[int] = [0] * (len(said.sizes) if said else 0)
    minor: set[int] = set()

    def factor(dim_factors: Dims, extent: int) -> int:
        large = [f for f in dim_factors if said is not None and said.sizes[f] > 1]
        minor.update(large[1:])
        if not large or extent == 1:
            sizes.append(extent)
            return len(sizes) - 1
        major = large[0]
        sizes[major] = math.gcd(sizes[major], said.sizes[major] if said and len(large) > 1 else extent)
        return major

    def side(types: Sequence[Any], mappings: Sequence[Sequence[Dims]]) -> tuple[Dims, ...]:
        return tuple(
            tuple(factor(dims, n) for dims, n in zip(of, t.shape, strict=True))
            for of, t in zip(mappings, types, strict=True)
        )

    def unknown(types: Sequence[Any]) -> list[list[Dims]]:
        return [[()] * len(t.shape) for t in types]

    operands = side(op.operands, said.operands if said else unknown(op.operands))
    results = side(op.results, said.results if said else unknown(op.results))
    stated = len(said.sizes) if said else 0
    own = range(stated, len(sizes))  # dimensions without a factor in the stated rule
    return Rule(operands, results, tuple(sizes), (), tuple(sorted({*minor, *own})), "custom_partitioning")


def _obstacle(op: Partitioned, said: ShardyRule, rule: Rule, factor: int) -> str:
    """Why a factor is not free; "" if it is."""
    if factor >= len(said.sizes):
        return "its sharding_rule gives it no factor"
    if factor in said.need_replication:
        return "its sharding_rule keeps it whole"
    if factor in rule.need_replication:
        return "it is a minor factor of another dimension"
    if not any(factor in dims for dims in rule.operands):
        return "no operand has it"
    try:
        tried = trial(op, rule, factor, _fewest(rule.sizes[factor]))
    except RuleError as error:
        return str(error)
    if not tried.communicates and not all(factor in dims for dims in rule.results):
        return "its lower_fn does not communicate over it, and a result has no dimension of it"
    return ""


def _fewest(size: int) -> int:
    """The least divisor above 1."""
    return next((n for n in range(2, math.isqrt(size) + 1) if size % n == 0), size)


def _place(rule: Rule, factor: int) -> str:
    """The first dimension that has a factor."""
    for kind, side in (("operand", rule.operands), ("result", rule.results)):
        for i, dims in enumerate(side):
            if factor in dims:
                return f"dimension {dims.index(factor)} of {kind} {i}"
    return "a factor of none of its dimensions"


# Blocks


def block_params(params: Params, rule: Rule, factor: int, count: int) -> Mapping[str, Any] | None:
    """Parameters of the operation on one of `count` blocks along a factor; None if there is no such operation.

    Along a reduced factor its results are the parts that `lower_fn` sums.
    """
    try:
        tried = trial(Partitioned.of(params), rule, factor, count)
    except RuleError:
        return None
    jaxpr = _part(tried.jaxpr) if factor in rule.reduced else None if tried.communicates else tried.jaxpr
    return None if jaxpr is None or jaxpr.consts or jaxpr.effects else {"call": jaxpr}


def _part(closed: Any) -> Any:
    """A jaxpr without the sums over the axis that give its results; None if it communicates in other ways."""
    jaxpr, part = closed.jaxpr, dict[Any, Any]()
    for equation in jaxpr.eqns:
        if _communicates_in(equation):
            if equation.primitive.name != "psum" or equation.params["axis_index_groups"] is not None:
                return None
            part.update(zip(equation.outvars, equation.invars, strict=True))
    rest = [equation for equation in jaxpr.eqns if equation.outvars[0] not in part]
    read = set(map(id, chain(part.values(), *(equation.invars for equation in rest))))
    if any(id(total) in read for total in part) or any(result not in part for result in jaxpr.outvars):
        return None
    effects = frozenset[Any]().union(*(equation.effects for equation in rest))
    return jex.ClosedJaxpr(
        jaxpr.replace(eqns=rest, outvars=[part[result] for result in jaxpr.outvars], effects=effects), closed.consts
    )
