"""A random train step of a seed.

    leaves       a few arguments with examples in front, counters, keys, a value that is no batch
    before       moves on what has no gradient: integers, masks, indices
    loss         moves on float64 with new parameters; its gradient by `jax.grad`, by hand, or along another
    after        the update of the parameters, metrics, counters, results of examples

Equal seeds give equal programs on one version of JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from autopar.bench.fuzz.generator import elementwise, experts, indexing, library, regions, shapes, totals
from autopar.bench.fuzz.generator.regions import Move, Moves
from autopar.bench.fuzz.generator.scope import LARGEST_STAGE, Names, Scope, Value, batched, floating, of_rank, plain
from autopar.bench.fuzz.program import KEY, KEYS, STATE, Block, Node, Program, Type

BATCHES = (8, 8, 8, 16)
LARGE_BATCHES = (256, 512)
#: Share of float arguments without elements.
EMPTY = 0.01
WIDTHS = (1, 2, 3, 4, 5, 6, 8)

SMOOTH_MOVES: tuple[Move, ...] = (
    *(elementwise.smooth,) * 4, *(elementwise.pair,) * 2, *(elementwise.broadcast_pair,) * 3, elementwise.random_bits,
    *(shapes.product,) * 5, shapes.attention, shapes.attention, shapes.convolution, shapes.window, shapes.normalise,
    shapes.normalise, shapes.transpose, shapes.transpose, shapes.fold, shapes.fold, shapes.extend, shapes.along,
    shapes.along, shapes.join, shapes.cumulate, shapes.order, shapes.reduce, shapes.reduce, indexing.embed,
    indexing.own_label, indexing.along_axis, indexing.columns, indexing.table, indexing.scatter_columns,
    indexing.attend_by_table, indexing.slices_of_examples, elementwise.choose, shapes.decompose, shapes.decompose,
    shapes.spectrum,
)  # fmt: skip
FROZEN_MOVES: tuple[Move, ...] = (
    *(elementwise.integer,) * 4, *(elementwise.integer_pair,) * 3, *(elementwise.convert,) * 5, elementwise.to_float,
    elementwise.narrow_chain, elementwise.bitcast, elementwise.bitcast, elementwise.fold_bits,
    elementwise.fold_bits, elementwise.compare,
    elementwise.compare, elementwise.logic, elementwise.choose, elementwise.steps, elementwise.complex_chain,
    elementwise.of_complex, elementwise.random_bits, elementwise.keys, elementwise.special, shapes.transpose,
    shapes.fold, shapes.extend, shapes.along, shapes.join, shapes.cumulate, shapes.order, shapes.order, shapes.reduce,
    shapes.window, indexing.table, indexing.own_label, indexing.own_label, indexing.along_axis, indexing.columns,
    indexing.columns, indexing.scatter_columns, indexing.segments, indexing.slices_of_examples, totals.total,
    totals.wrapped_total, totals.narrow_total, totals.flags, library.each, library.each, library.count,
    regions.loop_of_each, regions.loop_of_each,
)  # fmt: skip
ACROSS_MOVES: tuple[Move, ...] = (
    shapes.across, totals.single_total, indexing.gathered_total, regions.chain, regions.chain, totals.by_product,
    indexing.segments, totals.total, library.total, library.count, library.integer_product,
)  # fmt: skip
BODY = Moves(SMOOTH_MOVES, 1, 4)
MIXED_BODY = Moves((*FROZEN_MOVES, *SMOOTH_MOVES[:12]), 1, 4)


#: How many moves a part of a program makes at most, over three; small programs find more in the same time.
SIZES = (1, 1, 1, 2, 3)


def program(seed: int, largest: int = SIZES[-1]) -> Program:
    """The program of this seed; `largest`: of `SIZES`."""
    rng = Random(seed)
    size = min(largest, rng.choice(SIZES))
    for _ in range(20):
        drawn = _drawn(seed, rng, size)
        if drawn is not None:
            return drawn
    raise AssertionError(f"seed {seed} gives no program")


def _drawn(seed: int, rng: Random, size: int) -> Program | None:
    names = Names(rng.choice(LARGE_BATCHES) if rng.random() < 0.04 else rng.choice(BATCHES))
    scope = Scope(rng, names)
    batch_groups = _leaves(scope)
    _play(scope, rng.randint(1, 3 * size), FROZEN_MOVES, MIXED_BODY, 0.25)
    results = (_by_hand if rng.random() < BY_HAND else _trained)(scope, size)
    if results is None:
        return None
    _play(scope, rng.randint(1, 3 * size), (*ACROSS_MOVES, *FROZEN_MOVES), MIXED_BODY, 0.2)
    metrics = _metrics(scope)
    outputs = [*results, *_counters(scope), *((f"metrics/m{i}", v.name) for i, v in enumerate(metrics))]
    leaves = tuple(names.leaves)
    block = Block("step", tuple(x.name for x in leaves), tuple(scope.nodes), tuple(name for _, name in outputs))
    groups = tuple(dict.fromkeys(x.group for x in leaves if x.group not in STATE))
    batch = tuple(i + 1 for i, group in enumerate(groups) if group in batch_groups)
    return Program(seed, leaves, block, tuple(outputs), () if scope.chance(0.3) else batch, dict(names.types))


# Arguments


INTEGER_NUMBERS = {
    "int8": ("rng.integers(-128, 128, {shape}).astype(np.int8)",),
    "uint8": ("rng.integers(0, 256, {shape}).astype(np.uint8)",),
    "int16": ("rng.integers(-300, 300, {shape}).astype(np.int16)",),
    "uint16": ("rng.integers(0, 2**16, {shape}).astype(np.uint16)",),
    "int32": ("rng.integers(0, 8, {shape}).astype(np.int32)", "rng.integers(-5, 9, {shape}).astype(np.int32)",
              "rng.integers(-2**31, 2**31, {shape}).astype(np.int32)"),
    "uint32": ("rng.integers(0, 2**32, {shape}).astype(np.uint32)", "rng.integers(0, 6, {shape}).astype(np.uint32)"),
    "int64": ("rng.integers(-9, 9, {shape})", "rng.integers(-2**62, 2**62, {shape})"),
    "uint64": ("rng.integers(0, 2**63, {shape}).astype(np.uint64)",),
    "int4": ("rng.integers(-8, 8, {shape}).astype(jnp.int4)",),
}  # fmt: skip


def _numbers(scope: Scope, dtype: str) -> str:
    """An expression for the numbers of an argument."""
    if dtype in INTEGER_NUMBERS:
        return scope.rng.choice(INTEGER_NUMBERS[dtype])
    if dtype == "bool":
        return f"rng.random({{shape}}) < {scope.rng.choice((0.5, 0.9, 0.02))}"
    if dtype.startswith("complex"):
        return f"(rng.normal(size={{shape}}) + 1j * rng.normal(size={{shape}})).astype(np.{dtype})"
    cast = {"float64": "", "float32": ".astype(np.float32)", "bfloat16": ".astype(jnp.bfloat16)"}[dtype]
    return f"rng.normal(size={{shape}}){cast}"


OTHERS = ("int32", "int32", "int32", "int64", "int8", "uint8", "uint32", "bool", "bool", "float64", "float32",
          "bfloat16", "int16", "uint16", "uint64", "complex128", "int4")  # fmt: skip


def _leaves(scope: Scope) -> list[str]:
    """The arguments; returns the names of those that hold examples."""
    rng, batch = scope.rng, scope.names.batch
    groups = ["batch", "more"][: rng.choice((1, 1, 2))]
    shapes_of = [_shape(rng, batch) for _ in range(rng.choice((1, 2)))]
    if batch > 16:
        shapes_of = [(batch, rng.choice((2, 3)))]
    for shape in shapes_of:
        _leaf(scope, "x", rng.choice(groups), "float64", shape, batch=0, stage=1)
    for _ in range(rng.randint(1, 3)):
        shape = (batch, *(rng.choice(WIDTHS) for _ in range(rng.choice((0, 0, 1, 1, 2)))))
        shape = rng.choice(shapes_of) if rng.random() < 0.3 else shape
        dtype = rng.choice(OTHERS)
        _leaf(scope, "y", rng.choice(groups), dtype, shape, batch=0, stage=1)
    _leaf(scope, "n", "counters", "int32", (), f"np.int32({rng.randrange(5)})")
    if rng.random() < 0.5:
        _leaf(scope, "t", "counters", "float64", (), "np.float64(0.5)")
    if rng.random() < 0.6:
        kind, impl = rng.choice((*[(KEY, KEYS[KEY])] * 5, *list(KEYS.items())[1:]))
        _leaf(
            scope, "k", rng.choice(("counters", "key")), kind, (), f'jax.random.key({rng.randrange(9)}, impl="{impl}")'
        )
    if rng.random() < 0.3:
        extent = rng.choice((3, 5, 7))
        _leaf(scope, "q", "scale", rng.choice(("float64", "int32")), rng.choice(((), (extent,))))
    return groups


def _shape(rng: Random, batch: int) -> tuple[int, ...]:
    """Examples in front, then one to three dimensions, now and then an empty one."""
    if rng.random() < EMPTY:
        return (batch, rng.choice(WIDTHS), 0)
    return (batch, *(rng.choice(WIDTHS[1:]) for _ in range(rng.choice((1, 1, 2)))), *rng.choice(((), (), (3,))))


def _leaf(
    scope: Scope, prefix: str, group: str, dtype: str, shape: Sequence[int], code: str = "", **facts: Any
) -> None:
    code = code or _numbers(scope, dtype)
    code = code.replace("rng.normal(size={shape})", "np.float64(rng.normal())") if not shape else code
    type_ = Type(dtype, tuple(shape))
    name = scope.names.leaf(prefix, group, code, type_)
    scope.values.append(Value(name, type_, smooth=dtype == "float64", **facts))


def _play(scope: Scope, count: int, table: Sequence[Move], body: Moves, regions_share: float) -> None:
    for _ in range(count):
        if scope.depth < regions.DEEPEST and scope.chance(regions_share):
            scope.rng.choice(regions.REGIONS)(scope, body)
        else:
            scope.rng.choice(table)(scope)


# The loss and its gradient


#: Share of programs whose gradient is written by hand: they are traced and compiled in half the time.
BY_HAND = 0.4


#: Shares of losses with a product, a scan over layers, and a mixture of experts.
SHARES = (0.7, 0.18, 0.12)


def _layers(scope: Scope) -> None:
    regions.layers(scope, BODY)


def _by_hand(scope: Scope, size: int) -> list[tuple[str, str]] | None:
    """One layer behind some moves, its gradient a product over the examples."""
    _play(scope, scope.rng.randint(0, 2 * size), SMOOTH_MOVES, BODY, 0.15)
    x = scope.find(floating, plain, batched, of_rank(2, 4), lambda v: v.batch != v.rank - 1 and v.folded == (1, 1))
    if x is None:
        return None
    w = scope.param((x.shape[-1], scope.rng.choice(WIDTHS)))
    y = scope.emit("jnp.tanh({0} @ {1})", x, w)
    axes = tuple(range(x.rank - 1))
    total: dict[str, Any] = {"batch": None, "stage": 2, "folded": (1, 1)}
    code = f"jnp.tensordot({{0}}, (1.0 - {{1}} * {{1}}) * ({{1}} - 0.5), ({axes}, {axes}))"
    grad = None if y is None else scope.emit(code, x, y, **total, smooth=False)
    return None if grad is None else _update(scope, [w.name], [grad])


def _trained(scope: Scope, size: int) -> list[tuple[str, str]] | None:
    """New parameters, by path; None where no loss was found."""
    inner = scope.inner([v for v in scope.values if v.stage <= 1 and not v.mixed])
    inner.depth = 0
    inner.trained = {}
    _play(inner, inner.rng.randint(0, size), SMOOTH_MOVES, BODY, 0.2)
    inner.rng.choices((shapes.product, _layers, experts.experts), SHARES)[0](inner)
    _play(inner, inner.rng.randint(1, 2 * size), SMOOTH_MOVES, BODY, 0.2)
    loss = _loss(inner)
    if loss is None or not inner.trained:
        return None
    aux = [v for v in inner.values[-6:] if v.kind in "bif" and v.name not in inner.trained.values() and v != loss]
    aux = scope.rng.sample(aux, min(len(aux), scope.rng.choice((0, 1, 2))))
    leaves = list(inner.trained)
    form = "({0}, " + "(" + "".join(f"{{{i}}}, " for i in range(1, len(aux) + 1)) + "))"
    block = inner.block("loss", list(inner.trained.values()), [loss, *aux], form)
    operands = ", ".join(f"{{{i}}}" for i in range(len(leaves)))
    numbers = tuple(range(len(leaves)))
    code = f"jax.tree.leaves(jax.value_and_grad({{b0}}, argnums={numbers}, has_aux=True)({operands}))"
    values = scope.emit_all(code, *leaves, bodies=(block,))
    if len(values) != 1 + len(aux) + len(leaves):
        return None
    total = {"batch": None, "stage": 2, "folded": (1, 1), "smooth": False}
    scope.learn(values[0], **total)
    for value, inside in zip(values[1:], aux, strict=False):
        facts = {"batch": inside.batch, "stage": inside.stage, "folded": inside.folded, "mixed": inside.mixed}
        scope.learn(value, **facts, smooth=False)
    grads = [scope.learn(v, **total) for v in values[1 + len(aux) :]]
    grads = _second_order(scope, block, leaves, grads)
    return _update(scope, leaves, grads)


LOSSES = ("jnp.mean({0} ** 2)", "jnp.sum(jnp.tanh({0}))", "jnp.mean(jnp.abs({0} - 0.3))",
          "jnp.sum(jnp.log1p({0} * {0}))",
          "-jnp.mean(jax.nn.log_softmax({0})[..., 0])", "jnp.mean(jax.nn.softplus({0}))")  # fmt: skip


def _loss(scope: Scope) -> Value | None:
    """A scalar of the last values with a gradient: means of one or two, a product of means, a regulariser."""
    inner = set((scope.trained or {}).values())
    names = {v.name for v in scope.values if v.name in inner}
    computed = {out for node in scope.nodes for out in node.outs}
    fit = [
        v
        for v in scope.values
        if v.smooth and v.stage == 1 and not v.mixed and v.name in computed and v.name not in names
    ]
    if not fit:
        return None
    terms = fit[-scope.rng.choice((1, 1, 2)) :]
    total: dict[str, Any] = {"batch": None, "stage": 2, "folded": (1, 1)}
    parts = [scope.emit(_loss_of(scope, v), v, **total) for v in terms]
    if scope.chance(0.12):  # a balance loss: a product of two means over the batch
        value = fit[-1]
        mean = scope.emit(f"jnp.mean({{0}}, {value.batch})", value, **total)
        other = scope.rng.choice(fit)
        also = scope.emit(f"jnp.mean(jnp.tanh({{0}}), {other.batch})", other, **total)
        if mean is not None and also is not None:
            parts.append(scope.emit("jnp.sum({0}) * jnp.mean({1} * {1})", mean, also, **total))
    if scope.chance(0.3) and scope.trained:
        name = scope.rng.choice(list(scope.trained.values()))
        parts.append(scope.emit("0.01 * jnp.sum({0} ** 2)", name, **total))
    emitted = [p for p in parts if p is not None]
    if len(emitted) < len(parts) or any(p.shape for p in emitted):
        return None
    return scope.emit(" + ".join(f"{{{i}}}" for i in range(len(emitted))), *emitted, smooth=True, **total)


def _loss_of(scope: Scope, value: Value) -> str:
    """A scalar of a value: losses over its last dimension where that has no examples."""
    fit = LOSSES if value.rank and value.batch != value.rank - 1 and value.folded == (1, 1) else LOSSES[:1]
    return scope.rng.choice(fit)


def _second_order(scope: Scope, block: Block, leaves: Sequence[str], grads: Sequence[Value]) -> list[Value]:
    """The gradients, in some programs with a product of the Hessian and another vector, or themselves."""
    if not scope.chance(0.12):
        return list(grads)
    operands = ", ".join(f"{{{i}}}" for i in range(len(leaves)))
    along = ", ".join(
        f"{{{len(leaves) + i}}}" if scope.chance(0.4) else f"jnp.ones_like({{{i}}})" for i in range(len(leaves))
    )
    gradient = f"jax.grad(lambda *p: {{b0}}(*p)[0], argnums={tuple(range(len(leaves)))})"
    code = f"jax.jvp({gradient}, ({operands},), ({along},))[1]"
    products = scope.emit_all(
        code, *leaves, *grads, bodies=(block,), batch=None, stage=LARGEST_STAGE, folded=(1, 1), smooth=False
    )
    if len(products) != len(grads):
        return list(grads)
    mixed = [scope.emit("{0} + 0.1 * {1}", g, h, smooth=False) for g, h in zip(grads, products, strict=True)]
    return [m or g for m, g in zip(mixed, grads, strict=True)]


UPDATES = ("{0} - 0.1 * {1}", "{0} - 0.1 * jnp.tanh({1})", "{0} - 0.1 * {1} / jnp.sqrt({1} * {1} + 1e-2)",
           "0.9 * {0} - 0.1 * {1}", "{0} - 0.05 * jnp.clip({1}, -0.3, 0.3)",
           "{0} - 0.1 * {1} / (1.0 + jnp.sqrt(jnp.sum({1} ** 2)))")  # fmt: skip


def _update(scope: Scope, leaves: Sequence[str], grads: Sequence[Value]) -> list[tuple[str, str]] | None:
    code = scope.rng.choice(UPDATES)
    updated: list[tuple[str, str]] = []
    for leaf, grad in zip(leaves, grads, strict=True):
        new = scope.emit(code, leaf, grad, batch=None, stage=grad.stage, folded=(1, 1), smooth=False)
        if new is None:
            return None
        updated.append((f"params/{leaf}", new.name))
    rest = [x.name for x in scope.names.leaves if x.group == "params" and x.name not in leaves]
    return [*updated, *((f"params/{name}", name) for name in rest)]


# Metrics and counters


def _metrics(scope: Scope) -> list[Value]:
    """Totals, values of examples, and whatever came last."""
    computed = {out for node in scope.nodes for out in node.outs}
    count = scope.rng.randint(1, 3)
    metrics: list[Value] = []
    for _ in range(count):
        value = totals.total(scope)
        if value is not None:
            metrics.append(value)
    unused = [v for v in scope.values if v.name in computed and v.kind != "k" and v not in metrics]
    recent = [v for v in unused if not _read(scope, v)]
    metrics += scope.rng.sample(recent, min(len(recent), 8))
    return list(dict.fromkeys(metrics))


def _read(scope: Scope, value: Value) -> bool:
    return any(value.name in node.free() for node in scope.nodes)


COUNTERS = {
    "n": ("{0} + 1", "{0} + jnp.sum({1} > 0).astype(jnp.int32)"),
    "t": ("0.9 * {0} + 0.1 * jnp.mean({1})", "jnp.maximum({0}, jnp.max({1}))"),
}  # fmt: skip


def _counters(scope: Scope) -> list[tuple[str, str]]:
    """Counters one step on."""
    counters: list[tuple[str, str]] = []
    for leaf in [x for x in scope.names.leaves if x.group == "counters"]:
        value = next(v for v in scope.values if v.name == leaf.name)
        other = scope.find(floating, of_rank(1), lambda v: v.stage == 1 and not v.mixed)
        if leaf.type.dtype in KEYS:
            new = scope.emit("jax.random.fold_in({0}, 1)", value)
        elif other is None:
            new = value
        else:
            code = scope.rng.choice(COUNTERS[leaf.name[0]])
            new = scope.emit(code, value, scope.stopped(other), batch=None, stage=2, folded=(1, 1), smooth=False)
        counters.append((f"counters/{leaf.name}", (new or value).name))
    return counters


def node_count(block: Block) -> int:
    """Nodes of a block and of the bodies in it."""

    def count(node: Node) -> int:
        return 1 + sum(node_count(body) for body in node.bodies)

    return sum(map(count, block.nodes))
