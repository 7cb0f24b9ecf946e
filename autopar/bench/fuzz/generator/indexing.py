"""Moves that index: every gather and scatter mode, by examples, into examples, into parameters; dynamic slices."""

from __future__ import annotations

from autopar.bench.fuzz.generator.scope import Scope, Value, batched, exact, floating, integral, numeric, of_rank, plain
from autopar.bench.fuzz.generator.shapes import EXTENTS

READS = ("clip", "fill", "wrap", "promise_in_bounds")
WRITES = ("clip", "drop", "promise_in_bounds")
FILLS = ("", "", ", fill_value=3", ", fill_value=-1", ", fill_value=0")


def _whole(value: Value) -> bool:
    return value.folded == (1, 1)


def _index(scope: Scope, value: Value, extent: int, mode: str) -> str:
    """An expression for indices from integers {1}: out of bounds too, where the mode says what that means."""
    if mode == "promise_in_bounds":
        return f"({{1}} % {extent}).astype(jnp.int32)"
    return "({1} % 97).astype(jnp.int32)" if value.dtype in ("int64", "uint64", "uint32") else "{1}"


def _columns(scope: Scope, labels: Value) -> Value | None:
    """Labels with one entry of every dimension but that of the examples."""
    assert labels.batch is not None
    at = ", ".join(":" if d == labels.batch else "0" for d in range(labels.rank))
    return labels if labels.rank == 1 else scope.emit(f"{{0}}[{at}]", labels, batch=0)


def table(scope: Scope) -> None:
    """Rows of a parameter, or of a total, by integers of the examples."""
    labels = scope.find(integral, batched, of_rank(1, 2), _whole)
    if labels is None:
        return
    rows = scope.rng.choice(EXTENTS)
    source = scope.find(lambda v: v.batch is None and v.rank >= 1 and v.kind in "if", lambda v: v.stage in (0, 2))
    if source is None or scope.chance(0.7):
        source = scope.param((rows, scope.rng.choice(EXTENTS)))
    mode = scope.rng.choice(READS)
    fill = scope.rng.choice(FILLS) if mode == "fill" and source.kind == "f" else ""
    index = _index(scope, labels, source.shape[0], mode)
    form = scope.rng.choice(("{{0}}.at[{}].get(mode='{}'{})", "jnp.take({{0}}, {}, axis=0, mode='{}'{})"))
    form = "{{0}}.at[{}].get(mode='{}'{})" if mode == "promise_in_bounds" else form
    scope.emit(form.format(index, mode, fill), source, labels, batch=labels.batch)


#: The rows that examples read: their own, unless a type wraps, or those of others; {n} examples, {h} half of them.
ROWS = (
    "jnp.arange({n})", "jnp.arange({n}, dtype=jnp.int32)", "jnp.arange({n})[::-1][::-1]", "jnp.arange({n}) * 0",
    "jnp.arange({n}).astype(jnp.uint8)", "jnp.arange({n}).astype(jnp.int8)", "jnp.arange({n}).astype(jnp.int16)",
    "jnp.arange({n}).astype(jnp.uint32)", "jnp.arange({n}).astype(bool).astype(jnp.int32)",
    "jnp.where(jnp.arange({n}) < {h}, jnp.arange({n}) + {h}, jnp.arange({n}) - {h})",
)  # fmt: skip


def _rows_and_column(scope: Scope) -> tuple[Value, Value] | None:
    """A value with a row for each example, and an integer for each."""
    value = scope.find(batched, numeric, of_rank(2, 3), lambda v: v.batch == 0 and _whole(v))
    labels = scope.find(integral, batched, _whole)
    column = labels and _columns(scope, labels)
    return None if value is None or column is None else (value, column)


def own_label(scope: Scope) -> None:
    """x[arange(n), labels] in several ways, and adding to what it reads."""
    pair = _rows_and_column(scope)
    if pair is None:
        return
    value, column = pair
    n, width = value.shape[:2]
    rows = scope.rng.choice(ROWS).replace("{n}", str(n)).replace("{h}", str(n // 2))
    mode = scope.rng.choice(READS[:3])
    label = f"jnp.abs({{1}} % {width}).astype(jnp.int32)" if scope.chance(0.6) else _index(scope, column, width, mode)
    if "uint8" in rows or "int8" in rows or "bool" in rows:
        label = f"({{1}} % {width}).astype(jnp.int32)"
    if scope.chance(0.6):
        scope.emit(f"{{0}}.at[{rows}, {label}].get(mode='{mode}')", value, column, batch=0)
    else:
        how = scope.rng.choice(("add(1)", "set(2)", "max(0)", "multiply(2)"))
        value = scope.stopped(value) if "multiply" in how else value
        mode = "drop" if mode == "fill" else mode if mode == "clip" else "drop"
        scope.emit(f"{{0}}.at[{rows}, {label}].{how.replace(')', '')}, mode='{mode}')", value, column, batch=0)


def along_axis(scope: Scope) -> None:
    """Entries of each example by its own integers."""
    value = scope.find(batched, numeric, of_rank(2, 3), _whole)
    labels = value and scope.find(integral, batched, _whole, lambda v: v.rank == value.rank and v.batch == value.batch)
    if value is None or labels is None:
        return
    dim = scope.rng.choice(value.free_dims())
    if any(value.shape[d] != labels.shape[d] for d in range(value.rank) if d != dim):
        return
    mode = scope.rng.choice(("clip", "fill", "wrap"))
    width = value.shape[dim]
    index = f"{{1}} % {width}" if scope.chance(0.5) or mode == "wrap" else "{1}"
    scope.emit(f"jnp.take_along_axis({{0}}, ({index}).astype(jnp.int32), axis={dim}, mode={mode!r})", value, labels)


def columns(scope: Scope) -> None:
    """Some columns of every example, by integers that are known before, or by a counter."""
    value = scope.find(batched, numeric, of_rank(2, 3))
    if value is None:
        return
    dim = scope.rng.choice(value.free_dims())
    width = value.shape[dim]
    counter = scope.find(integral, lambda v: v.batch is None and v.rank == 0 and v.stage == 0)
    picks = tuple(scope.rng.randrange(-1, width + 2) for _ in range(scope.rng.choice((1, 2, 3))))
    lead = ":, " * dim
    mode = scope.rng.choice(("clip", "fill", "wrap"))
    if counter is not None and scope.chance(0.6):
        form = scope.rng.choice((
            f"lax.dynamic_slice_in_dim({{0}}, {{1}}.astype(jnp.int32), {max(1, width - 1)}, axis={dim})",
            f"lax.dynamic_index_in_dim({{0}}, {{1}}.astype(jnp.int32), axis={dim}, keepdims=True)",
            f"lax.dynamic_update_slice_in_dim({{0}}, jnp.ones_like(lax.slice_in_dim({{0}}, 0, 1, axis={dim})), "
            f"{{1}}.astype(jnp.int32), axis={dim})",
        ))  # fmt: skip
        scope.emit(form, value, counter)
        return
    scope.emit(f"{{0}}.at[{lead}jnp.array({picks})].get(mode={mode!r})", value)


def gathered_total(scope: Scope) -> None:
    """Entries of a total over the batch by constants, some out of bounds."""
    total = scope.find(numeric, of_rank(1, 3), lambda v: v.batch is None and v.stage in (2, 4))
    if total is None:
        return
    picks = tuple(scope.rng.randrange(-1, total.shape[0] + 2) for _ in range(3))
    mode = scope.rng.choice(("clip", "fill", "wrap"))
    fill = scope.rng.choice(FILLS) if mode == "fill" and total.kind == "f" else ""
    scope.emit(f"jnp.take({{0}}, jnp.array({picks}), axis=0, mode={mode!r}{fill})", scope.stopped(total))


def segments(scope: Scope) -> None:
    """Examples added up, or combined, in the rows that their integers name: a total."""
    value = scope.find(batched, exact, of_rank(1, 3), lambda v: v.batch == 0 and _whole(v))
    labels = scope.find(integral, batched, _whole)
    column = labels and _columns(scope, labels)
    if value is None or column is None:
        return
    rows, mode = scope.rng.choice(EXTENTS), scope.rng.choice(WRITES)
    index = _index(scope, column, rows, mode)
    how = scope.rng.choice(("add", "add", "add", "max", "min", "multiply"))
    ground = scope.rng.choice(("jnp.zeros", "jnp.zeros", "jnp.ones"))
    value = value if how == "add" else scope.stopped(value)
    bounded = "jnp.tanh({0})" if value.kind == "f" else "{0}"
    code = f"{ground}({(rows, *value.shape[1:])}, {{0}}.dtype).at[{index}].{how}({bounded}, mode='{mode}')"
    hot = f"jax.nn.one_hot({{1}} % {rows}, {rows}, dtype=jnp.float64).T @ {{0}}"
    code = hot if scope.chance(0.15) and value.dtype == "float64" and not value.mixed and value.rank > 1 else code
    scope.emit(code, value, column, batch=None, stage=2 * (value.stage // 2) + 2)


def scatter_columns(scope: Scope) -> None:
    """Columns of every example overwritten or added to, by constants or by parameters' integers."""
    value = scope.find(batched, numeric, of_rank(2, 3))
    if value is None:
        return
    dim = scope.rng.choice(value.free_dims())
    width, lead = value.shape[dim], ":, " * dim
    picks = tuple(scope.rng.sample(range(width + 1), min(2, width)))
    mode = scope.rng.choice(("clip", "drop"))
    how = scope.rng.choice(("set", "add", "max", "min"))
    source = value if how in ("set", "add") else scope.stopped(value)
    scope.emit(f"{{0}}.at[{lead}jnp.array({picks})].{how}(1, mode='{mode}')", source)


def slices_of_examples(scope: Scope) -> None:
    """A slice of each example that begins where the example says."""
    pair = _rows_and_column(scope)
    if pair is None:
        return
    value, column = pair
    size = max(1, value.shape[1] - 1)
    form = scope.rng.choice((
        f"jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i.astype(jnp.int32), {size}, axis=0))({{0}}, {{1}})",
        "jax.vmap(lambda x, i: lax.dynamic_update_slice_in_dim(x, jnp.ones_like(x[:1]), i.astype(int), 0))({0}, {1})",
        "jax.vmap(lambda x, i: x.at[i % 3].add(1, mode='drop'))({0}, {1})",
        "jax.vmap(lambda x, i: jnp.roll(x, i % 3, axis=0))({0}, {1})",
    ))  # fmt: skip
    scope.emit(form, value, column, batch=0)


def embed(scope: Scope) -> None:
    """A table of parameters that a loss reads by integers: its gradient is a scatter."""
    labels = scope.find(integral, batched, of_rank(1, 2), _whole, plain)
    if labels is not None:
        rows, width = scope.rng.choice(EXTENTS), scope.rng.choice(EXTENTS)
        scope.emit(f"{{0}}[({{1}} % {rows}).astype(jnp.int32)]", scope.param((rows, width)), labels, batch=labels.batch)


def attend_by_table(scope: Scope) -> None:
    """Floats by the rank of each in its example."""
    value = scope.find(floating, batched, of_rank(2, 2), lambda v: v.batch == 0 and _whole(v))
    if value is not None:
        scope.emit("jnp.take_along_axis({0}, jnp.argsort({0}, axis=1), axis=1)", value)
