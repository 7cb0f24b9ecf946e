"""Moves with bodies: scan, while, cond, switch, custom gradients, recomputation, jit and vmap.

A body is a block of further moves. Loops carry up to three values: one with examples, a total that every iteration
adds to, and a counter. What is added to a total goes through a chain of functions that are linear, or nearly so: a
fill value, a constant added, a conversion that wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.bench.fuzz.generator import totals
from autopar.bench.fuzz.generator.scope import Scope, Value, batched, exact, floating, integral, numeric, of_rank
from autopar.bench.fuzz.program import Block, Node, Type, jnp_name, tuple_form

Move = Callable[[Scope], object]
DEEPEST = 2
TRIPS = (1, 2, 3)


@dataclass(frozen=True)
class Moves:
    """Which moves a body may make, and how many."""

    table: Sequence[Move]
    least: int = 1
    most: int = 4

    def play(self, scope: Scope) -> None:
        """Make some moves."""
        for _ in range(scope.rng.randint(self.least, self.most)):
            scope.rng.choice(self.table)(scope)


# Making a value fit


def fit(scope: Scope, value: Value, target: Value) -> Value | None:
    """A value of the target's type that reads `value`; examples stay in their places."""
    cast = "" if value.dtype == target.dtype else f".astype(jnp.{jnp_name(target.dtype)})"
    bounded = "jnp.clip(jnp.nan_to_num({0}), -5, 5)" if value.kind == "f" and target.kind in "ib" else "{0}"
    if target.kind == "i" and target.dtype[0] == "u" and value.kind == "f":
        bounded = f"jnp.abs({bounded})"
    if value.batch is None:
        code = f"jnp.broadcast_to(jnp.sum({bounded}){cast}, {target.shape})"
        code = f"{bounded}{cast}" if value.shape == target.shape else code
    elif (value.shape, value.batch, value.folded) == (target.shape, target.batch, target.folded):
        code = f"{bounded}{cast}"
    elif target.batch is None or value.folded != (1, 1) or target.folded != (1, 1):
        return None
    else:
        axes = tuple(value.free_dims())
        lone = tuple(scope.names.batch if d == target.batch else 1 for d in range(target.rank))
        over = "sum" if value.kind in "fi" else "any"
        code = f"jnp.broadcast_to(jnp.{over}({bounded}, {axes}).reshape({lone}){cast}, {target.shape})"
    if value.kind == "c":
        code = code.replace("{0}", "jnp.real({0})")
    facts: dict[str, Any] = {"batch": target.batch, "folded": target.folded, "stage": max(value.stage, target.stage)}
    fitted = scope.emit(code, value, **facts)
    return fitted if fitted is not None and fitted.type == target.type else None


COMBINED = (
    "0.5 * {0} + 0.5 * jnp.tanh({1})",
    "{0} * jnp.cos({1})",
    "jnp.maximum({0}, jnp.tanh({1}))",
    "jnp.tanh({0} + {1})",
)
COMBINED_INTEGERS = ("{0} + {1}", "{0} ^ {1}", "{0} * 3 + {1}", "jnp.maximum({0}, {1})", "{0} | {1}")
COMBINED_BOOLS = ("{0} | {1}", "{0} ^ {1}", "{0} & {1}")


def merged(scope: Scope, carry: Value, values: Sequence[Value]) -> Value:
    """A carry's next value: itself, with one of these values in it where one fits."""
    table = {"f": COMBINED, "i": COMBINED_INTEGERS, "b": COMBINED_BOOLS}.get(carry.kind)
    for value in scope.rng.sample(list(values), min(4, len(values))):
        fitted = fit(scope, value, carry) if table and value.name != carry.name and value.kind != "k" else None
        if fitted is None:
            continue
        combined = scope.emit(scope.rng.choice(table or ()), carry, fitted)
        if combined is not None and combined.type == carry.type:
            return combined
    return carry


#: Linear functions of a total, for which it need not be complete. {n}: extent, {i}: indices.
LINEAR = (
    "-{0}", "{0} * 2", "{0}[::-1]", "{0}.at[jnp.array({i})].get(mode='clip')", "jnp.cumsum({0}, 0)",
    "{0}.at[jnp.array({i})].get(mode='fill', fill_value=0)", "jnp.concatenate([{0}, jnp.zeros_like({0})])",
    "jnp.where(jnp.arange({n}).reshape((-1,) + (1,) * ({0}.ndim - 1)) > 0, {0}, 0)",
    "jnp.zeros_like({0}).at[jnp.array({i})].add({0}[0], mode='drop')", "jnp.sum({0}, 0)",
    "lax.dynamic_slice_in_dim({0}, 1, 1, axis=0)", "lax.rev({0}, (0,))",
)  # fmt: skip
#: Functions that are nearly linear: a constant added, a fill value, a sign. {q}: divisor.
AFFINE = (
    "{0} + 1", "jnp.take({0}, jnp.array({i}), axis=0, mode='fill', fill_value=5)", "1 - {0}", "{0} * {0}",
    "jnp.take({0}, jnp.array({i}), axis=0)", "{0}.at[jnp.array({i})].get(mode='fill', fill_value=-1)",
    "lax.cummax({0}, axis=0)", "jnp.concatenate([{0}, jnp.ones_like({0})])", "jnp.abs({0})", "jnp.maximum({0}, 0)",
    "jnp.pad({0}, [(1, 0)] + [(0, 0)] * ({0}.ndim - 1), constant_values=1)", "lax.div({0}, jnp.full_like({0}, {q}))",
    "jnp.where(jnp.arange({n}).reshape((-1,) + (1,) * ({0}.ndim - 1)) > 0, {0}, 1)",
    "jnp.ones_like({0}).at[jnp.array({i})].add({0}[0], mode='drop')",
)  # fmt: skip
SCALARS = ("-{0}", "{0} * 2", "{0} + 1", "{0} * {0}", "lax.div({0}, jnp.full_like({0}, {q}))", "jnp.maximum({0}, 0)")
WIDER = {
    "int8": ("float64", "int32", "uint8", "int64"), "uint8": ("float64", "int32", "uint32", "int8"),
    "int16": ("float64", "int8", "int64"), "uint16": ("float64", "uint8", "uint64"),
    "int32": ("float64", "int64", "int8"),
    "uint32": ("float64", "uint64", "int64"), "int64": ("float64", "uint8"), "uint64": ("float64", "int16"),
    "bool": ("float64", "int32", "uint8"), "bfloat16": ("float64",), "float16": ("float64",), "float32": ("float64",),
    "float8_e4m3fn": ("float64",), "float8_e5m2": ("float64",),
}  # fmt: skip


def chained(scope: Scope, value: Value) -> Value:
    """A total behind up to two more functions, and perhaps converted."""
    for _ in range(scope.rng.choice((0, 1, 1, 1, 2))):
        if value.kind == "b":
            break
        extent = value.shape[0] if value.rank else 1
        picks = str(tuple(scope.rng.randrange(-1, extent + 2) for _ in range(scope.rng.choice((1, 2)))))
        table = scope.rng.choice((LINEAR, AFFINE)) if value.rank else SCALARS
        # a third of a large part of a narrow sum is rounded, and nothing tells that from a part rounded by mistake
        divisor = "4" if value.kind == "f" and value.dtype != "float64" else "3"
        code = scope.rng.choice(table).replace("{n}", str(extent)).replace("{i}", picks).replace("{q}", divisor)
        value = scope.emit(code, value) or value
    if value.dtype in WIDER and scope.chance(0.7):
        value = scope.emit(f"{{0}}.astype(jnp.{scope.rng.choice(WIDER[value.dtype])})", value) or value
    return value


def chain(scope: Scope) -> None:
    """A chain behind a total that is there, or a new one."""
    total = scope.find(numeric, of_rank(0, 3), lambda v: v.batch is None and v.stage in (2, 4)) or totals.total(scope)
    if total is not None:
        chained(scope, scope.stopped(total))


# Loops


@dataclass(frozen=True)
class Carry:
    """What a loop carries: its value outside, its name inside, and whether iterations add totals to it."""

    outside: Value
    inside: Value
    adds: bool = False


ACCUMULATORS = ("float64", "float64", "int32", "int8", "uint8", "uint32", "int64", "bool")


def _carries(scope: Scope) -> list[Carry]:
    """One value with examples or none, perhaps a total, perhaps another value."""
    carries: list[Carry] = []
    first = scope.find(batched, lambda v: v.kind in "bi" or v.dtype == "float64", lambda v: v.stage in (1, 3))
    if first is not None and scope.chance(0.8):
        carries.append(_carry(scope, first))
    if scope.chance(0.7) and (begin := _accumulator(scope)) is not None:
        scope.values.remove(begin)
        carries.append(_carry(scope, begin, adds=True))
    second = scope.find(exact, lambda v: v.batch is None and v.stage == 0)
    if second is not None and scope.chance(0.4):
        carries.append(_carry(scope, second))
    return carries


def _accumulator(scope: Scope) -> Value | None:
    """The zeros or ones to which a loop adds, often in a dtype that values with examples have."""
    alike = [v.dtype for v in scope.values if v.batch is not None and exact(v)]
    dtype = scope.rng.choice(alike if alike and scope.chance(0.75) else ACCUMULATORS)
    zeros = Type(dtype, scope.rng.choice(((), (), (2,), (3,)))).zeros()
    return scope.emit(zeros if scope.chance(0.8) else zeros.replace("zeros", "ones"))


def _carry(scope: Scope, value: Value, adds: bool = False) -> Carry:
    return Carry(value, scope.within(value), adds)


def _next(scope: Scope, carry: Carry, computed: Sequence[Value]) -> Value:
    """A carry behind one iteration."""
    inside = carry.inside
    if not carry.adds:
        fit_here = [v for v in computed if v.stage == 0 or (inside.batch is not None and v.batch is not None)]
        return merged(scope, inside, [v for v in fit_here if v.mixed <= inside.mixed])
    whole = _total_for(scope, inside, computed)
    added = whole and fit(scope, chained(scope, scope.stopped(whole)), inside)
    if added is None:
        return inside
    form = "{0} | {1}" if inside.kind == "b" else scope.rng.choice(SUMS)
    total = scope.emit(form, inside, added)
    return total if total is not None and total.type == inside.type else inside


#: How a total is added to a carry; sums may stay parts, extremes of sums may not.
SUMS = (*("{0} + {1}",) * 6, "jnp.maximum({0}, {1})")


def _total_for(scope: Scope, carry: Value, computed: Sequence[Value]) -> Value | None:
    """A total over the batch to add to a carry, of what was made or of its own type."""
    sources = [v for v in (*computed, *scope.values) if v.batch is not None and v.stage == 1 and v.kind in "bif"]
    if not sources:
        return None
    alike = [v for v in sources if v.dtype == carry.dtype]
    value = scope.rng.choice(alike if alike and scope.chance(0.8) else sources[: max(1, len(computed))])
    if value in alike and scope.chance(0.7):  # of the carry's own type, that sums may stay parts
        code = f"jnp.sum({{0}}, {value.batch}, dtype={{0}}.dtype)"
        whole = scope.emit(code, value, batch=None, stage=totals.after(value), folded=(1, 1))
    else:
        whole = totals.total_of(scope, value) if value.kind != "f" or value.dtype == "float64" else None
    if scope.chance(0.35):
        before = len(scope.values)
        scope.rng.choice((totals.narrow_total, totals.wrapped_total))(scope)
        whole = scope.values[-1] if len(scope.values) > before and scope.values[-1].batch is None else whole
    return whole


def _body(
    scope: Scope, moves: Moves, carries: Sequence[Carry], slices: Sequence[Value], frozen: bool
) -> tuple[Scope, list[Value]]:
    """A loop's body: its scope, and the carries behind it."""
    outside = [v for v in scope.values if not (frozen and v.smooth)]
    visible = [c.inside for c in carries if not c.adds or scope.chance(0.05)]
    inner = scope.inner([*outside, *visible, *slices], frozen)
    before = len(inner.values)
    moves.play(inner)
    computed = inner.values[before:]
    computed = [*slices, *computed, *visible] if scope.chance(0.5) or not computed else computed
    return inner, [_next(inner, c, computed) for c in carries]


def _facts(carry: Carry, last: Value) -> dict[str, Any]:
    """What is known of a loop's result."""
    if carry.adds:
        return {"batch": None, "stage": max(2, last.stage), "folded": (1, 1), "smooth": False}
    value = carry.outside
    return {"batch": value.batch, "folded": value.folded, "stage": max(last.stage, value.stage), "mixed": last.mixed,
            "smooth": last.smooth and value.smooth}  # fmt: skip


def _facts_of(value: Value, by: int = 0) -> dict[str, Any]:
    """What is known of a result that is stacked behind so many new dimensions."""
    batch = None if value.batch is None else value.batch + by
    return {"batch": batch, "folded": value.folded, "stage": value.stage, "mixed": value.mixed, "smooth": value.smooth}


def _sliced(scope: Scope) -> tuple[list[Value], str, list[Value]]:
    """What a scan goes along: the slice inside, an expression for the whole, and what that reads."""
    if scope.chance(0.35):
        return [], "None", []
    if scope.chance(0.3) and not scope.closed:
        stacked = scope.param((scope.rng.choice(TRIPS), scope.rng.choice((2, 3, 4))))
        return [scope.within(stacked, type=Type(stacked.dtype, stacked.shape[1:]))], "{x}", [stacked]
    value = scope.find(of_rank(1, 4), lambda v: v.kind in "bif", lambda v: bool(v.free_dims()))
    if value is None:
        return [], "None", []
    d = scope.rng.choice(value.free_dims())
    batch = None if value.batch is None else value.batch - (value.batch > d)
    rest = tuple(n for i, n in enumerate(value.shape) if i != d)
    return [scope.within(value, type=Type(value.dtype, rest), batch=batch)], f"jnp.moveaxis({{x}}, {d}, 0)", [value]


def scan(scope: Scope, moves: Moves) -> None:
    """A scan over a dimension without examples, over parameters, or over nothing."""
    carries = _carries(scope)
    if not carries:
        return
    slices, xs, reads = _sliced(scope)
    inner, lasts = _body(scope, moves, carries, slices, False)
    trips = "" if slices else f", length={scope.rng.choice(TRIPS)}"
    _emit_scan(scope, inner, carries, lasts, slices, xs, reads, trips)


def _emit_scan(
    scope: Scope,
    inner: Scope,
    carries: Sequence[Carry],
    lasts: Sequence[Value],
    slices: Sequence[Value],
    xs: str,
    reads: Sequence[Value],
    trips: str = "",
    wrapper: str = "{b0}",
) -> None:
    """The scan of a body that is finished but for what it stacks; `xs`: what it goes along, {x} an operand."""
    candidates = [v for v in inner.values if v not in scope.values and v.kind in "bif" and v.stage in (0, 1, 3)]
    stacked = [scope.rng.choice(candidates)] if candidates and scope.chance(0.5) else []
    carried = scope.names.fresh("s")
    inner.unpack(carried, [c.inside.name for c in carries])
    form = f"({tuple_form(len(carries))}, {f'{{{len(carries)}}}' if stacked else 'None'})"
    body = inner.block("body", (carried, slices[0].name if slices else "_"), [*lasts, *stacked], form)
    reverse = ", reverse=True" if scope.chance(0.2) else ""
    whole = xs.replace("{x}", f"{{{len(carries)}}}")
    code = f"jax.tree.leaves(lax.scan({wrapper}, {tuple_form(len(carries))}, {whole}{trips}{reverse}))"
    outputs = scope.emit_all(code, *(c.outside for c in carries), *reads, bodies=(body,))
    for value, carry, last in zip(outputs, carries, lasts, strict=False):
        scope.learn(value, **_facts(carry, last))
    for value, last in zip(outputs[len(carries) :], stacked, strict=False):
        scope.learn(value, **_facts_of(last, 1))


#: What a layer computes of its operand, its own weight, and a weight or a bias that all layers share.
LAYER = ("jnp.tanh({0} @ {1})", "{0} + jnp.tanh({0} @ {1})", "0.5 * {0} + jnp.sin({0} @ {1})")
LAYER_THAT_SHARES = (
    "jnp.tanh({0} @ {1} + {0} @ {2})", "{0} + jnp.tanh({0} @ {1} + {2}[0])", "jnp.tanh(({0} * {2}[1]) @ {1} @ {2})",
    "jnp.tanh({0} @ ({1} + {2}))",
)  # fmt: skip


def layers(scope: Scope, moves: Moves) -> None:
    """A scan over layers, which stages split; some share a weight besides."""
    x = scope.find(floating, batched, of_rank(2, 4), lambda v: v.stage == 1 and not v.mixed and v.shape[-1] > 1,
                   lambda v: v.batch != v.rank - 1 and v.folded == (1, 1))  # fmt: skip
    if x is None or scope.closed:
        return
    width = x.shape[-1]
    stacked = scope.param((scope.rng.choice((2, 3, 4)), width, width))
    shared = [scope.param((width, width))] if scope.chance(0.6) else []
    carries = [_carry(scope, x)]
    weight = scope.within(stacked, type=Type(stacked.dtype, stacked.shape[1:]))
    inner = scope.inner([*scope.values, carries[0].inside])
    before = len(inner.values)
    replace(moves, least=0, most=2).play(inner)
    layer = inner.emit(scope.rng.choice(LAYER_THAT_SHARES if shared else LAYER), carries[0].inside, weight, *shared)
    if layer is None:
        return
    computed = [v for v in inner.values[before:] if v.batch is not None and not v.mixed and v.stage == 1]
    last = merged(inner, layer, computed) if scope.chance(0.5) else layer
    wrapper = "jax.checkpoint({b0})" if scope.chance(0.3) else "{b0}"
    _emit_scan(scope, inner, carries, [last], [weight], "{x}", [stacked], wrapper=wrapper)


TESTS = (
    "{i} < 3", "{i} < jnp.minimum(2, {n})", "jnp.logical_and({i} < 4, {n} % 7 != 3)", "({i} < 2) | ({i} * {i} < 3)",
)  # fmt: skip


def while_loop(scope: Scope, moves: Moves) -> None:
    """A loop whose test reads a counter, a value known before, or, where no products are in it, a total."""
    counter = scope.find(integral, lambda v: v.rank == 0 and v.stage == 0 and v.dtype in ("int32", "int64"))
    if counter is None or scope.closed:
        return
    carries = [replace(c, outside=scope.stopped(c.outside)) for c in _carries(scope)]
    if not carries:
        return
    inner, lasts = _body(scope, moves, carries, [], True)
    carried, step = scope.names.fresh("s"), scope.names.fresh("i")
    scope.names.types[step] = Type("int64", ())
    inner.unpack(carried, [step, *(c.inside.name for c in carries)])
    names = tuple(v.name for v in lasts)
    body = replace(inner.block("body", (carried,), lasts), results=(step, *names), form=_counted(len(names)))
    test = scope.rng.choice(TESTS).replace("{i}", "{0}[0]").replace("{n}", "{1}")
    node = Node((scope.names.fresh("t"),), test, (carried, counter.name))
    block = Block(scope.names.fresh("test"), (carried,), (node,), node.outs)
    begin = tuple_form(len(carries)).replace("(", "(jnp.int64(0), ", 1)
    code = f"lax.while_loop({{b0}}, {{b1}}, {begin})[1:]"
    outputs = scope.emit_all(code, *(c.outside for c in carries), bodies=(block, body))
    for value, carry, last in zip(outputs, carries, lasts, strict=False):
        scope.learn(value, **{**_facts(carry, last), "smooth": False})


def _counted(count: int) -> str:
    return tuple_form(count, 1).replace("(", "({0} + 1, ", 1)


# Branches


PREDICATES = ("{0} % 2 == 0", "{0} > 1", "{0} != 3")


def cond(scope: Scope, moves: Moves) -> None:
    """One of two or three bodies, by a counter, a parameter, or a total."""
    result = scope.find(lambda v: v.kind in "bi" or v.dtype == "float64", lambda v: v.stage in (0, 1, 3))
    chosen = scope.find(lambda v: v.rank == 0 and v.kind == "i" and v.stage in (0, 2))
    if result is None or chosen is None or (chosen.stage == 2 and not scope.chance(0.3)):
        return
    count = scope.rng.choice((2, 2, 3))
    lasts: list[Value] = []
    blocks: list[Block] = []
    for _ in range(count):
        inside = scope.within(result)
        inner = scope.inner([*scope.values, inside])
        before = len(inner.values)
        moves.play(inner)
        last = merged(inner, inside, [v for v in inner.values[before:] if v.stage <= 1 or result.stage > 1])
        lasts.append(last)
        blocks.append(inner.block("branch", (inside.name,), [last]))
    names = ", ".join(f"{{b{i}}}" for i in range(count))
    code = f"lax.switch(({{0}} % {count}).astype(jnp.int32), [{names}], {{1}})"
    if count == 2:
        code = f"lax.cond({scope.rng.choice(PREDICATES)}, {names}, {{1}})"
    stage = max(v.stage for v in (*lasts, *([chosen] if chosen.stage else [])))
    facts = {"mixed": any(v.mixed for v in lasts) or chosen.stage > 0, "smooth": all(v.smooth for v in lasts)}
    scope.emit(code, chosen, result, bodies=blocks, stage=stage, **facts)


# Functions


def _called(
    scope: Scope, moves: Moves, closed: bool, frozen: bool = False
) -> tuple[list[Value], Scope, Block, list[Value]] | None:
    """A body that is called with a few values: what with, its scope, its block and its results."""
    first = scope.find(floating, lambda v: v.stage in (0, 1)) or scope.find(floating)
    if first is None:
        return None
    second = scope.find(lambda v: v.dtype == "float64", lambda v: v.stage in (0, 1))
    operands = [first] if second is None or second.name == first.name else [first, second]
    insides = [scope.within(v) for v in operands]
    inner = scope.inner(insides if closed else [*scope.values, *insides], frozen, closed)
    before = len(inner.values)
    moves.play(inner)
    results = [v for v in inner.values[before:] if v.dtype == "float64" and v.stage <= 1][-1:] or [insides[0]]
    return operands, inner, inner.block("body", [v.name for v in insides], results), results


def _apply(scope: Scope, form: str, called: tuple[list[Value], Scope, Block, list[Value]] | None) -> None:
    """The body behind a transformation, called."""
    if called is not None:
        arguments, _, block, results = called
        operands = ", ".join(f"{{{i}}}" for i in range(len(arguments)))
        scope.emit(f"{form}({operands})", *arguments, bodies=(block,), **_facts_of(results[0]))


CHECKPOINTS = (
    "jax.checkpoint({b0})", "jax.checkpoint({b0}, policy=jax.checkpoint_policies.dots_saveable)",
    "jax.checkpoint({b0}, prevent_cse=False)", "jax.jit({b0})",
)  # fmt: skip
CUSTOM = (
    "(lambda f: (f.defjvp(lambda p, t: jax.jvp({b0}, p, t)), f)[1])(jax.custom_jvp({b0}))",
    "(lambda f: (f.defvjp(lambda *a: ({b0}(*a), a), lambda r, g: jax.vjp({b0}, *r)[1](g * 0.5)), f)[1])"
    "(jax.custom_vjp({b0}))",
    "(lambda f: (f.defvjp(lambda *a: ({b0}(*a), a), lambda r, g: jax.vjp({b0}, *r)[1](jnp.clip(g, -1.0, 1.0))), f)[1])"
    "(jax.custom_vjp({b0}))",
)  # fmt: skip


def checkpoint(scope: Scope, moves: Moves) -> None:
    """A body that is recomputed, or called."""
    _apply(scope, scope.rng.choice(CHECKPOINTS), _called(scope, moves, closed=False))


def custom(scope: Scope, moves: Moves) -> None:
    """A body with its own derivative."""
    _apply(scope, scope.rng.choice(CUSTOM), _called(scope, moves, closed=True))


def mapped(scope: Scope, moves: Moves) -> None:
    """A body for each example, or for each entry of another dimension."""
    value = scope.find(of_rank(1, 4), lambda v: v.kind in "if" and v.stage in (0, 1), lambda v: v.folded == (1, 1))
    if value is None:
        return
    d = value.batch if value.batch is not None and scope.chance(0.7) else scope.rng.randrange(value.rank)
    rest = tuple(n for i, n in enumerate(value.shape) if i != d)
    of_examples = d == value.batch
    batch = None if value.batch is None or of_examples else value.batch - (value.batch > d)
    inside = scope.within(value, type=Type(value.dtype, rest), batch=batch, stage=0 if of_examples else value.stage)
    closures = [v for v in scope.values if v.batch is None and v.stage == 0]
    inner = scope.inner([*closures, inside])
    before = len(inner.values)
    moves.play(inner)
    results = [v for v in inner.values[before:] if v.kind in "bif" and v.stage <= 1 and v.folded == (1, 1)]
    result = results[-1] if results else inside
    out = scope.rng.randint(0, result.rank)
    block = inner.block("each", (inside.name,), [result])
    where = out if of_examples else None if result.batch is None else result.batch + (out <= result.batch)
    facts = {**_facts_of(result), "batch": where, "stage": max(value.stage, result.stage)}
    if not of_examples and where is None and value.batch is not None:
        return
    scope.emit(f"jax.vmap({{b0}}, in_axes={d}, out_axes={out})({{0}})", value, bodies=(block,), **facts)


#: Loops of one example x, each with its own number of iterations: what they carry besides a counter, one iteration, and
#: whether there are more.
EACH = (
    ("x", "jnp.tanh(c[0] + 0.5 * x)", "jnp.sum(x > 0.1) % 5"), ("jnp.zeros_like(x)", "c[0] * 0.5 + x", "x.size % 3"),
    ("jnp.ones_like(x)", "jnp.where(x > 0, c[0] + x, c[0])", "jnp.sum(x > -0.3) % 4"),
)  # fmt: skip
EACH_INTEGERS = (
    ("x", "c[0] * 3 + x", "jnp.sum(x % 3 == 1) % 4"), ("jnp.zeros_like(x)", "c[0] ^ (x + 1)", "jnp.max(x % 5)"),
)  # fmt: skip


def loop_of_each(scope: Scope) -> None:
    """A loop for each example, under `vmap`: its carry behind the loop, or how often it has run."""
    value = scope.find(of_rank(1, 3), lambda v: v.kind in "if" and v.batch is not None and v.folded == (1, 1))
    if value is None:
        return
    begin, iteration, most = scope.rng.choice(EACH_INTEGERS if value.kind == "i" else EACH)
    loop = f"lax.while_loop(lambda c: c[1] < {most}, lambda c: ({iteration}, c[1] + 1), ({begin}, 0))"
    d = value.batch
    code = f"jax.vmap(lambda x: {loop}, in_axes={d}, out_axes=({d}, 0))({{0}})"
    counts = scope.chance(0.4)
    facts: dict[str, Any] = {**_facts_of(value), "batch": 0 if counts else d, "smooth": False}
    scope.emit(f"{code}[{int(counts)}]", scope.stopped(value) if value.kind == "f" else value, **facts)


def accumulate(scope: Scope, moves: Moves) -> None:
    """A loop that hardly does more than add up totals: it is quickly compiled, and what adds up there is delicate."""
    scope.rng.choice((scan, scan, while_loop))(scope, replace(moves, least=0, most=1))


REGIONS: tuple[Callable[[Scope, Moves], None], ...] = (
    accumulate,
    accumulate,
    accumulate,
    scan,
    scan,
    while_loop,
    cond,
    checkpoint,
    custom,
    mapped,
)
