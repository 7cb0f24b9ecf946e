"""Groups operations whose layouts go together, so that one decision serves many operations.

Three kinds of value:

- *homed*: its layout is decided by a cluster: arguments, heavy operations, meeting points, and what follows them;
- *a view*: a homed value broadcast to more dimensions; along the new ones any layout is free;
- *free*: made from constants, iotas, scalars and random keys alone; every use gets it in the layout it wants.

An operation follows an operand if all factors of its result live in that operand and none is reduced or kept: it then
runs in whatever layout the operand has. Of several candidates the oldest cluster leads, which makes a residual stream
one cluster, and the clusters of equal layers symmetric around it. Any other operation gets strategies of its own.

Regions are planned in place: a loop's body counts as often as it runs. What enters a loop gets a cluster of its own
(entering may reshard once); a carry leaves an iteration in the layout it entered with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar import jax_compat
from autopar.cluster import LogicalMesh
from autopar.cost_models.compute import conv_flops, dot_flops
from autopar.graph import Atom, Constant, Graph, Op, Region, Type
from autopar.layout import Layout, divides
from autopar.passes import deferral
from autopar.passes.deferral import Deferral
from autopar.passes.pins import constraint
from autopar.passes.strategies import MOST_PADDING, StrategySet, Work, layouts_of, strategies_of, sum_strategies
from autopar.rules import Rule

#: A dimension of a view along which any layout costs nothing.
FREE = -3
#: A dimension that its cluster never cuts.
WHOLE = -1

#: Trip count assumed for a loop whose bound is only known at run time.
UNKNOWN_TRIPS = 10

#: Operations that always have strategies of their own, however their factors lie.
ANCHORS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "sharding_constraint")
#: Operations that are not repeated for every layout that wants their result.
NEVER_FREE = (*ANCHORS, "gather", "scatter", "scatter-add", "sort", "rng_bit_generator", "custom_call")
#: Operations that are only cut where it divides: the compilers pad their operands in ways that cost more than they save.
EVEN_ONLY = ("gather", "scatter-add", "scatter", "sort", "conv_general_dilated", "reshape", "sharding_constraint")
#: Reductions that are sums, whose partial results may be scattered.
SUMS = ("dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "ragged_dot", "cumsum")


@dataclass(frozen=True, slots=True)
class Home:
    """Where a value's layout is decided.

    Attributes:
        cluster: index of the cluster.
        value: the value itself, or the one that a view looks at.
        dims: for each dimension of `value`, the cluster's factor, or WHOLE.
        view: for each dimension of this value, the dimension of `value` behind it, or FREE; None if it is no view.
    """

    cluster: int
    value: int
    dims: tuple[int, ...]
    view: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """A value read at a site, in the layout that a cluster's strategy wants there.

    Attributes:
        site: "op12.in0", "op12.body.out1" or "out3".
        value: the value read.
        consumer: the cluster that decides the layout.
        dims: for each dimension of the value, the consumer's factor, or WHOLE.
        assigned: the layout follows what the strategy cuts while running, not what its result holds.
        weight: executions per step.
        op: index of the operation it belongs to, -1 for results of the graph.
    """

    site: str
    value: int
    consumer: int
    dims: tuple[int, ...]
    assigned: bool
    weight: float
    op: int


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """A decision: its strategies, how often it runs, and the light operations that follow it.

    Attributes:
        name: for people and for breaking ties.
        strategies: what may be chosen.
        weight: executions per step.
        op: index of the operation that has the strategies, -1 for arguments, copies and region borders.
        value: the value whose layout it decides (the operation's largest result).
        light: bytes moved by followers: cluster factors of the value -> bytes per execution.
    """

    name: str
    strategies: StrategySet
    weight: float
    op: int
    value: int
    light: tuple[tuple[tuple[int, ...], float], ...] = ()


@dataclass(frozen=True, eq=False)
class Clustering:
    """The whole program's decisions: which clusters, where every value lives, who reads what how."""

    clusters: tuple[Cluster, ...]
    homes: Mapping[int, Home]
    uses: tuple[Use, ...]
    arguments: tuple[int, ...]
    rules: Mapping[int, Rule]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all operations of one signature share."""

    rule: Rule
    main: int
    candidates: tuple[int, ...]
    may_be_free: bool
    broadcast: bool


@dataclass
class _Draft:
    name: str
    strategies: StrategySet
    weight: float
    op: int
    value: int
    light: dict[tuple[int, ...], float] = field(default_factory=dict)


@dataclass
class _Builder:
    """Local state of one `cluster` call."""

    graph: Graph
    rules: Mapping[int, Rule]
    mesh: LogicalMesh
    deferral: Deferral
    drafts: list[_Draft] = field(default_factory=list)
    homes: dict[int, Home] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    kinds: dict[int, _Kind] = field(default_factory=dict)
    sets: dict[object, StrategySet] = field(default_factory=dict)
    followers: list[tuple[Op, float]] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)
    heavy_reads: set[int] = field(default_factory=set)

    def new(self, name: str, strategies: StrategySet, weight: float, op: int, value: int) -> int:
        self.drafts.append(_Draft(name, strategies, weight, op, value))
        return len(self.drafts) - 1

    def strategy_set(self, key: object, make: Callable[[int], StrategySet]) -> StrategySet:
        found = self.sets.get(key)
        if found is None:
            found = self.sets[key] = make(len(self.sets))
        return found

    def layouts(self, shape: tuple[int, ...], most_padding: float = MOST_PADDING) -> StrategySet:
        key = ("layouts", shape, most_padding)
        return self.strategy_set(key, lambda index: layouts_of(shape, self.mesh, index, most_padding))

    def is_free(self, atom: Atom) -> bool:
        return not isinstance(atom, int) or not self.graph.types[atom].shape or atom not in self.homes

    def pinned(self, shape: tuple[int, ...], layout: Layout, open_dims: tuple[int, ...] = ()) -> StrategySet:
        """The layouts of this shape, restricted to one; axes it leaves out may cut the open dimensions."""
        every = self.layouts(shape, 1.0)
        wanted = np.array(layout, every.held.dtype)
        rows = ((every.held == wanted) | ((wanted == WHOLE) & np.isin(every.held, open_dims))).all(1)
        parts = (every.assigned[rows], every.held[rows], every.after[rows], every.cost[rows], every.sizes)
        return self.strategy_set(("pinned", shape, layout, open_dims), lambda index: StrategySet(index, *parts))

    def enter(self, name: str, value: int, weight: float, most_padding: float = MOST_PADDING) -> int:
        """A cluster for a value that comes from outside: the border of a region."""
        return self.enter_as(name, value, weight, self.layouts(self.graph.types[value].shape, most_padding))

    def enter_as(self, name: str, value: int, weight: float, strategies: StrategySet) -> int:
        """A cluster for a value that comes from outside, with these layouts."""
        shape = self.graph.types[value].shape
        cluster = self.new(name, strategies, weight, -1, value)
        self.homes[value] = Home(cluster, value, tuple(range(len(shape))))
        return cluster


def cluster(
    graph: Graph,
    rules: Mapping[int, Rule],
    mesh: LogicalMesh,
    pinned_arguments: Mapping[int, Layout] | None = None,
    pinned_results: Mapping[int, Layout] | None = None,
) -> Clustering:
    """Clusters, homes and uses of a whole program.

    Args:
        graph: the program.
        rules: rule of every leaf operation by signature.
        mesh: the mesh to plan for.
        pinned_arguments, pinned_results: position -> the one layout that the argument or result may have.
    """
    b = _Builder(graph, rules, mesh, deferral.find(graph))
    for position, (value, path) in enumerate(zip(graph.inputs, graph.input_paths, strict=True)):
        shape = graph.types[value].shape
        if shape:
            pin = (pinned_arguments or {}).get(position)
            b.enter_as(path, value, 1.0, b.layouts(shape, 1.0) if pin is None else b.pinned(shape, pin))
    arguments = tuple(range(len(b.drafts)))
    for value, _ in graph.constants:
        if graph.types[value].shape:
            b.enter(f"constant%{value}", value, 1.0)
    _visit(b, graph.ops, 1.0)
    _leave(b, pinned_results or {})
    _charge_followers(b)
    clusters = tuple(
        Cluster(d.name, d.strategies, d.weight, d.op, d.value, tuple(d.light.items())) for d in b.drafts
    )
    return Clustering(clusters, b.homes, tuple(b.uses), arguments, rules)


def _visit(b: _Builder, ops: Sequence[Op], weight: float) -> None:
    for op in ops:
        if op.regions:
            _REGIONS[_region_kind(op)](b, op, weight)
        else:
            _leaf(b, op, weight)


# Leaves


def _kind(b: _Builder, op: Op) -> _Kind:
    kind = b.kinds.get(op.signature)
    if kind is None:
        rule = b.rules[op.signature]
        results = [b.graph.types[v] for v in op.outputs]
        main = max(range(len(results)), key=lambda i: (results[i].size, -i)) if results else 0
        kind = b.kinds[op.signature] = _Kind(
            rule,
            main,
            _candidates(rule, main) if results and op.name not in ANCHORS else (),
            op.name not in NEVER_FREE and not rule.reduced and not op.equation.effects,
            op.name == "broadcast_in_dim",
        )
    return kind


def _big(rule: Rule, dims: Sequence[int]) -> list[int]:
    return sorted(f for f in dims if rule.sizes[f] > 1)


def _candidates(rule: Rule, main: int) -> tuple[int, ...]:
    """Operands whose cuttable dimensions are exactly those of the main result, one to one."""
    wanted = _big(rule, rule.results[main])
    stuck = {*rule.reduced, *rule.kept}
    if len(set(wanted)) != len(wanted) or stuck & set(wanted):
        return ()
    if any(not set(_big(rule, dims)) <= set(wanted) for dims in rule.results):
        return ()
    return tuple(k for k, dims in enumerate(rule.operands) if dims and _big(rule, dims) == wanted)


def _leaf(b: _Builder, op: Op, weight: float) -> None:
    kind = _kind(b, op)
    for atom in op.inputs:
        if isinstance(atom, int):
            b.reads[atom] = b.reads.get(atom, 0) + 1
    if not op.outputs:
        return
    if kind.may_be_free and all(b.is_free(a) for a in op.inputs):
        return
    if op.name in _BORDERS:
        _BORDERS[op.name](b, op, weight)
        return
    if kind.broadcast and _view_of_broadcast(b, op, kind):
        return
    leader = None if op.index in b.deferral.sums else _leader(b, op, kind)
    if leader is not None:
        _follow(b, op, kind, leader, weight)
    elif not _view_of_unary(b, op, kind):
        _anchor(b, op, kind, weight)


def _pass_through(b: _Builder, op: Op, weight: float) -> None:
    """Result i is operand i, in the operand's layout."""
    for i, (atom, result) in enumerate(zip(op.inputs, op.outputs, strict=True)):
        home = b.homes.get(atom) if isinstance(atom, int) else None
        if home is not None and home.view is None:
            b.homes[result] = Home(home.cluster, result, home.dims)
        elif b.graph.types[result].shape:
            cluster = b.enter(f"{op.tag} %{result}", result, weight)
            if isinstance(atom, int):
                _use(b, f"{op.tag}.in{i}", atom, cluster, tuple(range(b.graph.types[result].rank)), False, weight, op.index)


def _constrained(b: _Builder, op: Op, weight: float) -> None:
    """The user's `with_sharding_constraint`: a cluster with the layouts that it allows."""
    (result,) = op.outputs
    type_ = b.graph.types[result]
    if not type_.shape:
        return
    layout, open_dims = constraint(op, type_, b.mesh)
    cluster = b.enter_as(f"{op.tag} {op.name}", result, weight, b.pinned(type_.shape, layout, open_dims))
    if isinstance(op.inputs[0], int):
        _use(b, f"{op.tag}.in0", op.inputs[0], cluster, tuple(range(type_.rank)), False, weight, op.index)


#: Operations whose result lies where the user or the operand says.
_BORDERS = {"optimization_barrier": _pass_through, "sharding_constraint": _constrained}


def _leader(b: _Builder, op: Op, kind: _Kind) -> int | None:
    """The candidate of the oldest cluster."""
    best: tuple[int, int] | None = None
    for k in kind.candidates:
        atom = op.inputs[k]
        home = b.homes.get(atom) if isinstance(atom, int) else None
        if home is not None and home.view is None and (best is None or home.cluster < best[0]):
            best = (home.cluster, k)
    return None if best is None else best[1]


def _follow(b: _Builder, op: Op, kind: _Kind, leader: int, weight: float) -> None:
    rule = kind.rule
    home = b.homes[_value(op.inputs[leader])]
    factor_of = {f: c for f, c in zip(rule.operands[leader], home.dims, strict=True) if rule.sizes[f] > 1}
    for value, dims in zip(op.outputs, rule.results, strict=True):
        b.homes[value] = Home(home.cluster, value, tuple(factor_of.get(f, WHOLE) for f in dims))
    b.followers.append((op, weight))
    for k, atom in enumerate(op.inputs):
        if k != leader and isinstance(atom, int):
            dims = tuple(factor_of.get(f, WHOLE) for f in rule.operands[k])
            _use(b, f"{op.tag}.in{k}", atom, home.cluster, dims, False, weight, op.index)


def _anchor(b: _Builder, op: Op, kind: _Kind, weight: float) -> None:
    rule = kind.rule
    role = (op.signature, op.index in b.deferral.products, b.deferral.sums.get(op.index))
    strategies = b.strategy_set(role, lambda index: _op_strategies(b, op, rule, index))
    cluster = b.new(f"{op.tag} {op.name}", strategies, weight, op.index, op.outputs[kind.main])
    for value, dims in zip(op.outputs, rule.results, strict=True):
        if b.graph.types[value].shape:
            b.homes[value] = Home(cluster, value, tuple(dims))
    light = op.index in b.deferral.sums
    if light:
        b.followers.append((op, weight))
    for k, atom in enumerate(op.inputs):
        if isinstance(atom, int):
            if not light:
                b.heavy_reads.add(atom)
            _use(b, f"{op.tag}.in{k}", atom, cluster, tuple(rule.operands[k]), True, weight, op.index)


def _op_strategies(b: _Builder, op: Op, rule: Rule, index: int) -> StrategySet:
    operands = tuple(b.graph.type_of(a) for a in op.inputs)
    results = tuple(b.graph.types[v] for v in op.outputs)
    dtype = operands[0].dtype if operands else results[0].dtype
    defers = op.index in b.deferral.products
    paddable = op.name not in EVEN_ONLY
    work = Work(flops(op, operands, results), operands, results, dtype, op.name in SUMS, defers, paddable)
    if op.index in b.deferral.sums:
        return sum_strategies(work, b.mesh, index, stays=b.deferral.sums[op.index])
    return strategies_of(rule, work, b.mesh, index)


def flops(op: Op, operands: Sequence[Type], results: Sequence[Type]) -> float:
    """Floating-point operations of one execution: exact for dot and conv, one per element otherwise."""
    if op.name == "dot_general":
        return float(dot_flops(op.params["dimension_numbers"], operands[0].shape, operands[1].shape))
    if op.name == "conv_general_dilated":
        names = ("dimension_numbers", "window_strides", "padding", "lhs_dilation", "rhs_dilation", "batch_group_count")
        return float(conv_flops(operands[0].shape, operands[1].shape, **{n: op.params[n] for n in names}))
    return float(max([t.size for t in (*operands, *results)], default=0))


def _use(
    b: _Builder, site: str, value: int, consumer: int, dims: tuple[int, ...], assigned: bool, weight: float, op: int
) -> None:
    if not dims:
        return
    home = b.homes.get(value)
    same = home is not None and home.view is None and home.cluster == consumer and home.dims == dims
    if not same or assigned:
        b.uses.append(Use(site, value, consumer, dims, assigned, weight, op))


def _value(atom: Atom) -> int:
    assert isinstance(atom, int)
    return atom


# Views


def _view_of_broadcast(b: _Builder, op: Op, kind: _Kind) -> bool:
    """A broadcast of a homed value looks at its operand; False if it is a mere reshape."""
    atom = op.inputs[0]
    home = b.homes.get(atom) if isinstance(atom, int) else None
    if home is None or 0 in kind.candidates:
        return False
    behind = {f: i for i, f in enumerate(kind.rule.operands[0]) if kind.rule.sizes[f] > 1}
    view = tuple(behind.get(f, FREE) for f in kind.rule.results[0])
    if home.view is not None:
        view = tuple(home.view[i] if i >= 0 else FREE for i in view)
    b.homes[op.outputs[0]] = Home(home.cluster, home.value, home.dims, view)
    return True


def _view_of_unary(b: _Builder, op: Op, kind: _Kind) -> bool:
    """An elementwise operation whose only homed operand is a view is a view as well."""
    homed = [k for k, a in enumerate(op.inputs) if isinstance(a, int) and not b.is_free(a)]
    if len(homed) != 1 or homed[0] not in kind.candidates or len(op.outputs) != 1:
        return False
    home = b.homes[_value(op.inputs[homed[0]])]
    if home.view is None:
        return False
    behind = {f: home.view[i] for i, f in enumerate(kind.rule.operands[homed[0]]) if kind.rule.sizes[f] > 1}
    view = tuple(behind.get(f, FREE) for f in kind.rule.results[0])
    b.homes[op.outputs[0]] = Home(home.cluster, home.value, home.dims, view)
    return True


# Regions


def _region_kind(op: Op) -> str:
    return "remat" if op.name in jax_compat.REMAT else op.name


def _enter_all(b: _Builder, op: Op, region: Region, first: int, offset: int, outer: float, inner: float) -> list[int]:
    """Clusters for region inputs from position `first` on; input i reads operand i + offset. -1 for scalars."""
    found: list[int] = []
    for i in range(first, len(region.inputs)):
        value, atom = region.inputs[i], op.inputs[i + offset]
        if not b.graph.types[value].shape:
            found.append(-1)
            continue
        cluster = b.enter(f"{op.tag}.{region.name} %{value}", value, inner)
        found.append(cluster)
        if isinstance(atom, int):
            shift = b.graph.types[atom].rank - b.graph.types[value].rank
            dims = (WHOLE,) * shift + tuple(range(b.graph.types[value].rank))
            _use(b, f"{op.tag}.in{i + offset}", atom, cluster, dims, False, outer, op.index)
    return found


def _enter_constants(b: _Builder, region: Region, weight: float) -> None:
    for value, _ in region.constants:
        if b.graph.types[value].shape:
            b.enter(f"constant%{value}", value, weight)


def _return_carry(b: _Builder, op: Op, region: Region, position: int, cluster: int, weight: float) -> None:
    atom = region.outputs[position]
    if cluster >= 0 and isinstance(atom, int):
        dims = tuple(range(b.graph.types[atom].rank))
        _use(b, f"{op.tag}.{region.name}.out{position}", atom, cluster, dims, False, weight, op.index)


def _leave_region(
    b: _Builder, op: Op, region: Region, position: int, result: int, weight: float, stacked: bool
) -> None:
    """Home of a result that a region's output becomes, with a new leading dimension if it is stacked."""
    if not b.graph.types[result].rank - stacked:
        if stacked:
            b.enter(f"{op.tag} %{result}", result, weight)
        return
    atom = region.outputs[position]
    home = b.homes.get(atom) if isinstance(atom, int) else None
    lead = (WHOLE,) if stacked else ()
    if home is not None and home.view is None:
        b.homes[result] = Home(home.cluster, result, (*lead, *home.dims))
        return
    type_ = b.graph.type_of(atom)
    cluster = b.new(f"{op.tag}.{region.name}.out{position}", b.layouts(type_.shape), weight, -1, result)
    own = tuple(range(type_.rank))
    if isinstance(atom, int):
        _use(b, f"{op.tag}.{region.name}.out{position}", atom, cluster, own, False, weight, op.index)
    b.homes[result] = Home(cluster, result, (*lead, *own))


def _scan(b: _Builder, op: Op, weight: float) -> None:
    region = op.regions[0]
    constants, carries = jax_compat.scan_counts(op.params)
    inner = weight * (op.trips or UNKNOWN_TRIPS)
    entered = _enter_all(b, op, region, 0, 0, weight, inner)
    _enter_constants(b, region, inner)
    _visit(b, region.ops, inner)
    for j in range(carries):
        cluster, value = entered[constants + j], region.inputs[constants + j]
        _return_carry(b, op, region, j, cluster, inner)
        if cluster >= 0:
            b.homes[op.outputs[j]] = Home(cluster, op.outputs[j], b.homes[value].dims)
    for j in range(carries, len(op.outputs)):
        _leave_region(b, op, region, j, op.outputs[j], inner, stacked=True)


def _while(b: _Builder, op: Op, weight: float) -> None:
    condition, body = op.regions
    n_cond, n_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    inner = weight * (op.trips or UNKNOWN_TRIPS)
    entered = _enter_all(b, op, body, 0, n_cond, weight, inner)
    carry = entered[n_body:]
    outside = Region(condition.name, condition.inputs[:n_cond], (), ())
    _enter_all(b, op, outside, 0, 0, weight, inner)
    for value, cluster in zip(condition.inputs[n_cond:], carry, strict=True):
        if cluster >= 0:
            b.homes[value] = Home(cluster, value, tuple(range(b.graph.types[value].rank)))
    for region in (condition, body):
        _enter_constants(b, region, inner)
        _visit(b, region.ops, inner)
    for j, cluster in enumerate(carry):
        _return_carry(b, op, body, j, cluster, inner)
        if cluster >= 0:
            b.homes[op.outputs[j]] = Home(cluster, op.outputs[j], tuple(range(b.graph.types[op.outputs[j]].rank)))


def _alias_inputs(b: _Builder, op: Op, region: Region, offset: int, weight: float) -> None:
    """Inputs of a body that runs once read the outer values where they live; free ones get a border cluster."""
    for i, value in enumerate(region.inputs):
        atom = op.inputs[i + offset]
        home = b.homes.get(atom) if isinstance(atom, int) else None
        if home is not None and home.view is None:
            b.homes[value] = Home(home.cluster, value, home.dims)
        elif b.graph.types[value].shape:
            cluster = b.enter(f"{op.tag}.{region.name} %{value}", value, weight)
            if isinstance(atom, int):
                dims = tuple(range(b.graph.types[value].rank))
                _use(b, f"{op.tag}.in{i + offset}", atom, cluster, dims, False, weight, op.index)


def _cond(b: _Builder, op: Op, weight: float) -> None:
    for region in op.regions:
        _alias_inputs(b, op, region, 1, weight)
        _enter_constants(b, region, weight)
        _visit(b, region.ops, weight)
    for j, result in enumerate(op.outputs):
        if not b.graph.types[result].shape:
            continue
        cluster = b.enter(f"{op.tag}.out{j}", result, weight)
        for region in op.regions:
            _return_carry(b, op, region, j, cluster, weight)


def _remat(b: _Builder, op: Op, weight: float) -> None:
    region = op.regions[0]
    _alias_inputs(b, op, region, 0, weight)
    _enter_constants(b, region, weight)
    _visit(b, region.ops, weight)
    for j, result in enumerate(op.outputs):
        _leave_region(b, op, region, j, result, weight, stacked=False)


_REGIONS: Mapping[str, Callable[[_Builder, Op, float], None]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat": _remat,
}


# Results and followers


def match_state(graph: Graph) -> Mapping[int, int]:
    """Results that carry an argument into the next step: output position -> input position.

    First by equal path below the top of the result (position in the tuple and position of the argument), then by equal
    path below the first component, each with equal type and each argument once.
    """
    by_tail: dict[str, list[int]] = {}
    for i, path in enumerate(graph.input_paths):
        by_tail.setdefault(path.split("/", 1)[-1], []).append(i)
    arguments = list(dict.fromkeys(path.split("/", 1)[0] for path in graph.input_paths))
    full = {path: i for i, path in enumerate(graph.input_paths)}
    taken: set[int] = set()
    found: dict[int, int] = {}

    def claim(out: int, candidates: Sequence[int | None]) -> None:
        type_ = graph.type_of(graph.outputs[out])
        for i in candidates:
            if i is not None and i not in taken and graph.types[graph.inputs[i]] == type_:
                found[out] = i
                taken.add(i)
                return

    for out, path in enumerate(graph.output_paths):
        head, _, tail = path.partition("/")
        names = [arguments[int(head)]] if head.isdigit() and int(head) < len(arguments) else []
        tries = ["/".join(p for p in (name, tail) if p) for name in names]
        tries.extend(f"{name}/{path}" if path else name for name in arguments[:1])
        claim(out, [full.get(t) for t in tries])
    for out, path in enumerate(graph.output_paths):
        if out not in found and "/" in path:
            claim(out, by_tail.get(path.split("/", 1)[1], []))
    return found


def _leave(b: _Builder, pinned: Mapping[int, Layout]) -> None:
    """State comes back in the layout it was given in, a pinned result in its own, and any result in even pieces."""
    for out, layout in pinned.items():
        atom = b.graph.outputs[out]
        if isinstance(atom, int) and b.graph.types[atom].rank:
            shape = b.graph.types[atom].shape
            border = b.new(f"out{out}", b.pinned(shape, layout), 1.0, -1, atom)
            _use(b, f"out{out}", atom, border, tuple(range(len(shape))), False, 1.0, -1)
    state = match_state(b.graph)
    for out, position in state.items():
        if out in pinned:
            continue
        atom, argument = b.graph.outputs[out], b.graph.inputs[position]
        rank = b.graph.types[argument].rank
        if isinstance(atom, int) and rank:
            _use(b, f"out{out}", atom, b.homes[argument].cluster, tuple(range(rank)), False, 1.0, -1)
    for out, atom in enumerate(b.graph.outputs):
        if isinstance(atom, int):
            b.heavy_reads.add(atom)
            if out not in pinned and out not in state and _may_be_uneven(b, atom):
                shape = b.graph.types[atom].shape
                border = b.new(f"out{out}", b.layouts(shape, 1.0), 1.0, -1, atom)
                _use(b, f"out{out}", atom, border, tuple(range(len(shape))), False, 1.0, -1)


def _may_be_uneven(b: _Builder, value: int) -> bool:
    """A result that is a view, or that its cluster may leave in pieces that JAX does not hand out."""
    home = b.homes.get(value)
    if home is None or home.view is not None:
        return home is not None
    _, found = projection(b.drafts[home.cluster].strategies, home.dims, False)
    return not all(divides(tuple(row), b.graph.types[value].shape, b.mesh.sizes) for row in found.tolist())


def _charge_followers(b: _Builder) -> None:
    """Memory traffic of light operations: what is written for a heavy reader or for several, and arguments read."""
    for op, _ in b.followers:
        for value in op.outputs:
            if value in b.heavy_reads or b.reads.get(value, 0) > 1:
                _charge(b, value)
        for atom in op.inputs:
            if isinstance(atom, int) and atom in b.graph.names and atom in b.homes:
                _charge(b, atom)


def _charge(b: _Builder, value: int) -> None:
    home = b.homes[value]
    light = b.drafts[home.cluster].light
    key = tuple(sorted(d for d in home.dims if d >= 0))
    light[key] = light.get(key, 0.0) + b.graph.types[value].nbytes


def bytes_of(graph: Graph, home: Home) -> int:
    """Bytes that move when a value with this home is resharded: those behind a view, not those it shows."""
    return graph.types[home.value].nbytes


def literal(atom: Atom) -> bool:
    """True for an operand that is a literal."""
    return isinstance(atom, Constant)


def projection(strategies: StrategySet, dims: Sequence[int], assigned: bool) -> tuple[np.ndarray, np.ndarray]:
    """(class of each strategy, layouts of the classes) of a value whose dimensions are these cluster factors.

    Shapes (n,) and (classes, axes); classes are ordered by first appearance in the sorted codes.
    """
    factors = strategies.assigned if assigned else strategies.held
    dim_of = np.full(len(strategies.sizes) + 2, -1, np.int8)
    dim_of[-2] = -2
    for dim, factor in enumerate(dims):
        if factor >= 0:
            dim_of[factor] = dim
    layouts = dim_of[factors]
    codes = ((layouts.astype(np.int64) + 2) * (16 ** np.arange(layouts.shape[1]))).sum(1)
    _, first, classes = np.unique(codes, return_index=True, return_inverse=True)
    return classes.astype(np.int64), layouts[first]
