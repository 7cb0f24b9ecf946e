"""Moves with rows that are sorted by group: mixtures of experts whose tokens are sorted, multiplied and put back.

Most forms give every row what it would get alone. Some do not, in one place: other rows are counted, read or added, or
the order of the rows matters. These have to be refused in microbatches, or be exact.
"""

from __future__ import annotations

from typing import Any

from autopar.bench.fuzz.generator.scope import Scope, Value, batched, floating, of_rank, plain

#: Share of steps that are taken in a form that mixes rows.
MIXING = 0.06
# {k}: experts of a row, {e}: experts
KEYS = ("lax.top_k({0} @ {1}, {k})[1].reshape(-1)", "jnp.ravel(lax.top_k(jnp.tanh({0} @ {1}), {k})[1])")
COUNTS = (
    "jnp.bincount({0}, length={e})", "jnp.bincount({0}, length={e}).astype(jnp.int32)",
    "jnp.zeros({e}, jnp.int32).at[{0}].add(1)", "jax.nn.one_hot({0}, {e}, dtype=jnp.int32).sum(0)",
    "jnp.sum({0}[:, None] == jnp.arange({e}), 0)",
)  # fmt: skip
COUNTS_OF_OTHERS = (
    "jnp.bincount({0} + 1, length={e})", "jnp.bincount(jnp.maximum({0}, 1), length={e})",
    "jnp.bincount({e} - 1 - {0}, length={e})", "jnp.bincount({0}, length={e} - 1)",
    "jnp.full({e}, {0}.size // {e})", "jnp.zeros({e}, jnp.int32).at[{0} - 1].add(1)",
)  # fmt: skip
ROWS = ("{0}[{1} // {k}]", "jnp.take({0}, {1} // {k}, axis=0)", "jnp.repeat({0}, {k}, axis=0)[{1}]")
OTHER_ROWS = ("{0}[({1} // {k} + 1) % {0}.shape[0]]", "jnp.repeat({0}, {k}, axis=0)[{1}[::-1]]", "{0}[{1} // {k} // 2]")
PRODUCT = "lax.ragged_dot({0}, {1}, {2})"
ALIKE = (
    "jnp.tanh({0})", "jax.nn.silu({0})", "{0} * 2 + 1", "jnp.where({0} > 0, {0}, 0.1 * {0})",
    "{0} - {0}.max(-1, keepdims=True)", "jax.nn.softmax({0})", "{0} + {2}[{3}[{1}]]", "jnp.concatenate([{0}, {0}], 1)",
    "{0}[:, ::-1]", "{0} @ {2}.T @ {2}",
)  # fmt: skip
BY_POSITION = (
    "jnp.cumsum({0}, 0)", "{0}[::-1]", "{0} * jnp.arange({0}.shape[0])[:, None]", "{0} + 0.01 * {1}[:, None]",
    "{0} - {0}.mean(0)", "jnp.where(jnp.arange({0}.shape[0])[:, None] < 5, {0}, 0)", "{0} * {0}[0]",
)  # fmt: skip
BACK = (
    "jnp.zeros(({b}, {0}.shape[1])).at[{1} // {k}].add({0} * {2}.reshape(-1)[{1}][:, None])",
    "({0}[jnp.argsort({1})].reshape({b}, {k}, -1) * {2}[..., None]).sum(1)",
    "jnp.einsum('tkd,tk->td', jnp.take({0}, jnp.argsort({1}), axis=0).reshape({b}, {k}, -1), {2})",
)  # fmt: skip
ELSEWHERE = ("jnp.zeros(({b}, {0}.shape[1])).at[({1} + 1) % {b}].add({0} * {2}.reshape(-1)[{1}][:, None])",)


def experts(scope: Scope) -> None:
    """A mixture of experts without a capacity."""
    x = scope.find(
        floating, plain, batched, of_rank(2, 2), lambda v: v.batch == 0 and v.folded == (1, 1) and v.shape[1] > 1
    )
    if x is None or scope.closed or x.stage != 1:
        return
    rng, (batch, width) = scope.rng, x.shape
    count, each = rng.choice((2, 3, 4)), rng.choice((1, 2))
    sorted_rows: dict[str, Any] = {"batch": 0, "folded": (1, each), "stage": 1, "mixed": True}

    def emit(table: tuple[str, ...], mixing: tuple[str, ...], *reads: Value | None, **facts: Any) -> Value | None:
        operands = [v for v in reads if v is not None]
        if len(operands) < len(reads):
            return None
        code = rng.choice(mixing if mixing and scope.chance(MIXING) else table)
        for name, number in (("{k}", each), ("{e}", count), ("{b}", batch)):
            code = code.replace(name, str(number))
        return scope.emit(code, *operands, **facts)

    router, bias = scope.param((width, count)), scope.param((count, width))
    keys = emit(KEYS, (), x, router, batch=0, folded=(1, each), stage=1, smooth=False)
    gates = scope.emit(f"lax.top_k(jax.nn.softmax({{0}} @ {{1}}), {each})[0]", x, router)
    order = emit(("jnp.argsort({0})",), ("jnp.argsort(-{0})",), keys, **sorted_rows)
    sizes = emit(COUNTS, COUNTS_OF_OTHERS, keys, batch=None, folded=(1, 1), stage=2, smooth=False)
    rows = emit(ROWS, OTHER_ROWS, x, order, **sorted_rows)
    for _ in range(rng.choice((1, 1, 2))):
        weights = None if rows is None else scope.param((count, rows.shape[1], width))
        rows = emit((PRODUCT,), (), rows, weights, sizes, **sorted_rows)
        if scope.chance(0.6):
            rows = emit(ALIKE, BY_POSITION, rows, order, bias, keys, **sorted_rows) or rows
    emit(BACK, ELSEWHERE, rows, order, gates, batch=0, folded=(1, 1), stage=1, mixed=False)
