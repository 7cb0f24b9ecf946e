"""What `jax.vmap` stacks can be cut along the stack: no operation that is separable there runs replicated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.scipy import linalg as scipy_linalg

import autopar
from autopar.api import parallelize
from autopar.bench.equal.case import dear
from autopar.ir.trace import trace
from autopar.rules import rules_of
from autopar.rules.inherent import REASONS, UNKNOWN
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal

STACK = 8  # no other dimension below has this extent
X, SQUARES = array(STACK, 16), array(STACK, 4, 4) + 4 * jnp.eye(4)
POSITIVE, COMPLEX = jnp.abs(X) + 0.1, X.astype(jnp.complex64)
COUNTS, ROWS = jnp.ones((STACK, 16), jnp.int32), jnp.ones((STACK, 4), jnp.int32)
linalg = lax.linalg


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID")


#: title -> a function of one element of the stack, and stacks of its arguments
SEPARABLE: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "top_k": (lambda x: lax.top_k(x, 3), (X,)),
    "approx_top_k": (lambda x: lax.approx_max_k(x, 3), (X,)),
    "fft": (jnp.fft.fft, (COMPLEX,)),
    "rfft": (jnp.fft.rfft, (X,)),
    "irfft2": (jnp.fft.irfft2, (SQUARES.astype(jnp.complex64),)),
    "sort": (jnp.sort, (X,)),
    "argsort": (jnp.argsort, (X,)),
    "argmax": (jnp.argmax, (X,)),
    "median": (jnp.median, (X,)),
    "cumsum": (jnp.cumsum, (X,)),
    "cumprod": (jnp.cumprod, (X,)),
    "cummax": (lax.cummax, (X,)),
    "cummin": (lax.cummin, (X,)),
    "cumlogsumexp": (lax.cumlogsumexp, (X,)),
    "associative_scan": (lambda x: lax.associative_scan(lambda a, b: a * b + 1, x), (X,)),
    "cholesky": (linalg.cholesky, (SQUARES,)),
    "eig": (linalg.eig, (SQUARES,)),
    "eigh": (linalg.eigh, (SQUARES,)),
    "svd": (linalg.svd, (SQUARES,)),
    "lu": (linalg.lu, (SQUARES,)),
    "pivots": (lambda p: linalg.lu_pivots_to_permutation(p, 4), (ROWS,)),
    "qr": (jnp.linalg.qr, (SQUARES,)),
    "pivoted qr": (lambda x: scipy_linalg.qr(x, pivoting=True), (SQUARES,)),
    "householder_product": (lambda x: linalg.householder_product(x, x[0]), (SQUARES,)),
    "hessenberg": (linalg.hessenberg, (SQUARES,)),
    "schur": (linalg.schur, (SQUARES,)),
    "tridiagonal": (linalg.tridiagonal, (SQUARES,)),
    "tridiagonal_solve": (lambda x: linalg.tridiagonal_solve(x[0], x[1], x[2], x), (SQUARES,)),
    "triangular_solve": (lambda x: linalg.triangular_solve(x, x), (SQUARES,)),
    "symmetric_product": (lambda x: linalg.symmetric_product(x, x), (SQUARES,)),
    "inv": (jnp.linalg.inv, (SQUARES,)),
    "solve": (lambda x: jnp.linalg.solve(x, x), (SQUARES,)),
    "slogdet": (jnp.linalg.slogdet, (SQUARES,)),
    "igamma": (lambda x: lax.igamma(x, x), (POSITIVE,)),
    "igammac": (lambda x: lax.igammac(x, x), (POSITIVE,)),
    "betainc": (lambda x: lax.betainc(x, x, x), (POSITIVE,)),
    "lgamma": (lax.lgamma, (POSITIVE,)),
    "polygamma": (lambda x: lax.polygamma(x, x), (POSITIVE,)),
    "zeta": (lambda x: lax.zeta(x + 2, x), (POSITIVE,)),
    "reduce": (lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 1, (0,)), (X,)),
    "pooling": (pooled, (X,)),
    "pooling gradient": (jax.grad(lambda x: pooled(x).sum()), (X,)),
    "take": (lambda x, i: x[i], (X, COUNTS)),
    "put": (lambda x, i: x.at[i].set(1.0), (X, COUNTS)),
    "segment sum": (lambda x, i: jax.ops.segment_sum(x, i, 4), (X, COUNTS)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i[0],), (4,)), (X, COUNTS)),
    "searchsorted": (lambda x: jnp.searchsorted(x, x), (X,)),
    "interp": (lambda x: jnp.interp(x, x, x), (X,)),
    "convolve": (lambda x: jnp.convolve(x, x[:3]), (X,)),
    "roll": (lambda x: jnp.roll(x, 1), (X,)),
}


@pytest.mark.core
def test_a_stack_is_free_in_every_rule() -> None:
    functions = [jax.vmap(fn) for fn, _ in SEPARABLE.values()]
    stacks = [args for _, args in SEPARABLE.values()]
    graph = trace(lambda *stacks: [fn(*s) for fn, s in zip(functions, stacks, strict=True)], *stacks).graph
    rules = rules_of(graph)
    stuck: list[str] = []
    for op in graph.walk():
        if not op.regions and any(STACK in graph.types[v].shape for v in op.outputs):
            rule = rules[op.signature]
            stacked = {f for dims in rule.results for f in dims if rule.sizes[f] == STACK}
            stuck += [] if stacked & {*rule.free} else [f"{op.name} {rule}"]
    assert stuck == []


@pytest.mark.core
def test_operations_of_library_functions_have_the_users_line() -> None:
    fn, args = SEPARABLE["searchsorted"]
    graph = trace(jax.vmap(fn), *args).graph
    line = f"test_separable.py:{fn.__code__.co_firstlineno}"
    assert {op.source for op in graph.walk()} == {line}
    assert "call_hi_primitive" not in {op.name for op in graph.walk()}


def test_operations_that_xla_would_gather_run_on_shards() -> None:
    """Transforms and selections in a loop and in a rematerialised body, series, factorisations: nothing is moved."""

    def step(x: jax.Array, s: jax.Array, p: jax.Array) -> Any:
        def body(carry: jax.Array, _: Any) -> Any:
            kept = jax.checkpoint(lambda y: jnp.abs(jnp.fft.fft(jnp.sin(y))))(carry)
            return lax.top_k(kept, 16)[0] / 16, lax.top_k(kept, 3)[1]

        gradient = jax.grad(lambda x: (jnp.abs(jnp.fft.rfft(x)) ** 2).sum() + lax.top_k(x, 3)[0].sum())(x)
        looped = lax.scan(body, x, None, length=2)
        return looped, gradient, jnp.linalg.inv(s), jnp.linalg.slogdet(s)[1], lax.igamma(p, p)

    args = X, SQUARES, POSITIVE
    run = parallelize(step, mesh=(2, 4), cluster=dear((2, 4)), donate_argnums=())
    plan = run.plan(*args)
    assert plan.notes == ()
    assert plan.collectives == ()
    assert {d for layout in plan.inputs for d in layout} == {0}
    assert_equal(run(*args), jax.jit(step)(*args))
    for target in ("cpu", "shardy"):
        report = autopar.verify(plan, step, *args, target=target)
        assert report.ok, report
        assert report.collectives == ()


@pytest.mark.parametrize(
    "options",
    [{"stages": 2, "num_microbatches": 2}, {"num_microbatches": 2}, {"remat": "full"}],
    ids=["stages", "microbatches", "remat"],
)
def test_shard_mapped_operations_in_stages_and_microbatches(options: Mapping[str, Any]) -> None:
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            h = x
            for w in params:
                h = jnp.abs(jnp.fft.fft(jnp.tanh(h @ w))) / 4
                h = h * lax.top_k(h, 4)[0].sum(1, keepdims=True) / 16
            return (h**2).sum()

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.01 * g for p, g in zip(params, grads, strict=True)], value

    args = [array(16, 16), array(16, 16)], array(32, 16)
    run = parallelize(step, mesh=(8,), cluster=dear((8,)), donate_argnums=(), **options)
    plan = run.plan(*args)
    assert not any("replicated" in note for note in plan.notes)
    assert plan.collectives  # it is cut
    assert_equal(run(*args), jax.jit(step)(*args))


@pytest.mark.core
@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (jnp.sort, "it orders all of its elements"),
        (jnp.cumsum, "it runs along its only dimension"),
        (lambda x: jnp.abs(jnp.fft.fft2(x.reshape(8, 8))), "it transforms all of its dimensions"),
        (lambda x: jnp.linalg.qr(x.reshape(8, 8))[0], "it works on a single matrix"),
    ],
)
def test_replicated_operations_have_a_reason(fn: Callable[[Any], Any], reason: str) -> None:
    (note,) = autopar.plan(lambda x: fn(x * 2), array(64), mesh=(8,)).notes[:1]
    assert " runs replicated (1 times, first at " in note
    assert note.endswith(f": {reason}")
    assert UNKNOWN not in REASONS.values()
