"""Our own rules, and those taken from Shardy, against the compiler: cut by the rule on eight devices, run, compare.

Every dimension that a rule lets go is cut over the first axis of a (2, 4) mesh alone and over the second alone. The
numbers must be those of one device, and the compiler must add nothing: one all-reduce for a summed dimension, else no
communication. The second axis being idle or not has uncovered wrong sums in the compiler itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import random as jax_random
from jax.sharding import NamedSharding

from autopar import jax_compat
from autopar.ir.graph import Op
from autopar.ir.layout import spec
from autopar.ir.trace import trace
from autopar.rules import Rule, convolutions, rules_of, runs_per_device
from autopar.rules.convolutions import is_grouped
from autopar.rules.own import OWN_RULES
from autopar.verification import hlo
from tests.programs.steps import array
from tests.programs.test_real_programs import values
from tests.support.effort import sample

NAMES, SIZES = ("x", "y"), (2, 4)


def convolution(groups: int = 1, stride: int = 1) -> Callable[..., jax.Array]:
    def fn(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        padding = ((1, 1), (1, 1))
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, feature_group_count=groups, dimension_numbers=numbers
        )

    return fn


def kernel_gradient(groups: int = 1, stride: int = 1) -> Callable[..., jax.Array]:
    conv = convolution(groups, stride)
    return lambda x, kernel: jax.grad(lambda k: jnp.sum(jnp.sin(conv(x, k))))(kernel)


KEY, KEYS = jax.random.key(0), jax.random.split(jax.random.key(1), 8)
RBG = jax.random.key(0, impl="rbg")
X, SQUARES, IMAGES = array(8, 16), array(8, 4, 4), array(8, 8, 8, 8)
TOKENS, COUNTS = array(8, 4, dtype=jnp.int32), jnp.arange(8)
DIAGONAL, POSITIVE = SQUARES + 4 * jnp.eye(4), jnp.abs(array(8)) + 0.1
CONV = "conv_general_dilated"

#: Operations that have no result for just any numbers.
WITHIN_ONE = ("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta")

#: title -> (primitive, function, arguments); all operations of the function with that primitive are tested
CASES: dict[str, tuple[str, Callable[..., Any], Sequence[Any]]] = {
    "barrier": ("optimization_barrier", lambda x, t: lax.optimization_barrier((x, t)), (X, TOKENS)),
    "copy": ("copy", lambda x: jnp.array(x, copy=True), (X,)),
    "bits": ("random_bits", lambda key: jax.random.bits(key, (8, 16)), (KEY,)),
    "bits of many keys": ("random_bits", jax.vmap(lambda key: jax.random.bits(key, (16,))), (KEYS,)),
    "bits of rbg": ("random_bits", lambda key: jax.random.bits(key, (8, 16)), (RBG,)),
    "split key": ("random_split", lambda key: jax.random.split(key, 8), (KEY,)),
    "split keys": ("random_split", jax.vmap(lambda key: jax.random.split(key, 4)), (KEYS,)),
    "fold in": ("random_fold_in", jax.vmap(jax.random.fold_in), (KEYS, COUNTS)),
    "seed": ("random_seed", jax.vmap(jax.random.key), (COUNTS,)),
    "hash": ("threefry2x32", lambda c: jax_random.threefry_2x32(c[:2], c), (COUNTS.astype("uint32"),)),
    "wrap": ("random_wrap", jax.random.wrap_key_data, (jnp.zeros((8, 2), jnp.uint32),)),
    "unwrap": ("random_unwrap", jax.random.key_data, (KEYS,)),
    "dot": ("dot_general", lambda x, w: jnp.einsum("bmk,kn->bmn", x, w), (array(8, 4, 16), array(16, 8))),
    "batched dot": ("dot_general", lambda x: jnp.einsum("bmk,bnk->bmn", x, x), (array(8, 4, 16),)),
    "gather": ("gather", lambda x, i: x[i], (X, TOKENS)),
    "scatter-add": ("scatter-add", lambda x, i: x.at[i].add(1.0), (X, TOKENS[:, 0])),
    "sort": ("sort", lambda x: lax.sort((x, -x), dimension=1), (X,)),
    "cumsum": ("cumsum", lambda x: jnp.cumsum(x, 1), (X,)),
    "sum": ("reduce_sum", lambda x: x.sum(0), (X,)),
    "max": ("reduce_max", lambda x: x.max(1), (X,)),
    "argmax": ("argmax", lambda x: jnp.argmax(x, 1), (X,)),
    "select": ("select_n", lambda x: jnp.where(x > 0, x, 0.0), (X,)),
    "split and merge": ("reshape", lambda x: x.reshape(8, 4, 4).reshape(32, 4), (X,)),
    "update": ("dynamic_update_slice", lambda x: lax.dynamic_update_slice(x, x[:2], (1, 0)), (X,)),
    "window": ("reduce_window_sum", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"), (X,)),
    "cholesky": ("cholesky", lambda x: lax.linalg.cholesky(jnp.eye(4) + 0 * x), (SQUARES,)),
    "eigenvalues": ("eigh", lambda x: jnp.linalg.eigvalsh(x), (SQUARES,)),
    "lu": ("lu", lax.linalg.lu, (SQUARES,)),
    "pivots": ("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p % 4, 4), (TOKENS,)),
    "qr": ("qr", lambda x: lax.linalg.qr(x, full_matrices=False), (SQUARES,)),
    "singular values": ("svd", lambda x: lax.linalg.svd(x, compute_uv=False), (SQUARES,)),
    "triangles": ("triangular_solve", lambda x: lax.linalg.triangular_solve(x, x, left_side=True), (DIAGONAL,)),
    "systems": ("triangular_solve", lambda x: jnp.linalg.solve(x, x), (DIAGONAL,)),
    "symmetric products": ("symmetric_product", lambda x: lax.linalg.symmetric_product(x, x), (SQUARES,)),
    "fft": ("fft", jnp.fft.fft, (X,)),
    "real fft": ("fft", lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x)), (SQUARES,)),
    "top_k": ("top_k", lambda x: lax.top_k(x, 3), (X,)),
    "series": ("igamma", lambda x: lax.igamma(x, x), (POSITIVE,)),
    "series from above": ("igammac", lambda x: lax.igammac(x, x), (POSITIVE,)),
    "gradient of a series": ("igamma_grad_a", lambda x: lax.igamma_grad_a(x, x), (POSITIVE,)),
    "continued fraction": ("regularized_incomplete_beta", lambda x: lax.betainc(x, x, x), (POSITIVE,)),
    "conv": (CONV, convolution(), (IMAGES, array(3, 3, 8, 16))),
    "depthwise conv": (CONV, convolution(8, 2), (IMAGES, array(3, 3, 1, 16))),
    "grouped conv": (CONV, convolution(4), (IMAGES, array(3, 3, 2, 8))),
    "conv gradient": (CONV, kernel_gradient(1, 2), (IMAGES, array(3, 3, 8, 8))),
    "depthwise conv gradient": (CONV, kernel_gradient(8, 2), (IMAGES, array(3, 3, 1, 16))),
    "grouped conv gradient": (CONV, kernel_gradient(4), (IMAGES, array(3, 3, 2, 8))),
}


def operations(title: str) -> list[tuple[Op, Rule]]:
    """The distinct operations that a case tests, with their rules."""
    primitive, fn, args = CASES[title]
    graph = trace(fn, *args).graph
    rules = rules_of(graph)
    distinct = {op.signature: op for op in graph.walk() if op.name == primitive}
    assert distinct, f"{title} has no {primitive}"
    return [(op, rules[op.signature]) for op in distinct.values()]


@pytest.mark.parametrize("title", list(CASES))
def test_sharded_by_the_rule_results_are_the_same(title: str) -> None:
    mesh = jax_compat.auto_mesh(np.array(jax.devices()).reshape(SIZES), NAMES)
    for op, rule in operations(title):
        for factor in rule.free:
            for axis in sample(range(len(SIZES)), [len(SIZES) - 1]):
                if rule.sizes[factor] % SIZES[axis] == 0:
                    _check(op, rule, factor, axis, mesh)


def _check(op: Op, rule: Rule, factor: int, axis: int, mesh: Any) -> None:
    """One operation with one factor cut over one mesh axis."""

    def sharding(dims: Sequence[int], aval: Any) -> NamedSharding:
        layout = tuple(dims.index(factor) if a == axis and factor in dims else -1 for a in range(len(SIZES)))
        return NamedSharding(mesh, spec(layout, len(aval.shape), NAMES))

    def run(*operands: Any) -> tuple[Any, ...]:
        return tuple(jax_compat.bind(op.equation, operands))

    def run_part(*operands: Any) -> tuple[Any, ...]:
        devices = SIZES[axis] if is_grouped(op) and factor == convolutions.group_factor(op, rule) else 1
        params = convolutions.part(op.params, devices) if is_grouped(op) else op.params
        parts = jax_compat.bind(op.equation.replace(params=params), operands)
        return tuple(lax.psum(x, NAMES[axis]) if factor in rule.reduced else x for x in parts)

    avals = [v.aval for v in op.equation.invars]
    operands = [_numbers(op, aval) for aval in avals]
    into = [sharding(dims, aval) for dims, aval in zip(rule.operands, avals, strict=True)]
    out = tuple(sharding(dims, v.aval) for dims, v in zip(rule.results, op.equation.outvars, strict=True))
    specs: Any = {"in_specs": tuple(s.spec for s in into), "out_specs": tuple(s.spec for s in out)}
    emitted_as = jax.shard_map(run_part, mesh=mesh, check_vma=False, **specs) if runs_per_device(op) else run
    compiled = jax.jit(emitted_as, in_shardings=into, out_shardings=out).lower(*avals).compile()
    what = f"{op.name} '{rule}', factor {factor} over {NAMES[axis]}"
    for got, expected in zip(compiled(*map(jax.device_put, operands, into)), jax.jit(run)(*operands), strict=True):
        np.testing.assert_allclose(values(got), values(expected), rtol=1e-4, atol=1e-4, err_msg=what)
    emitted = [c.kind for c in hlo.collectives(str(compiled.as_text()), NAMES, SIZES)]
    assert emitted == ["all-reduce"] * (factor in rule.reduced), what


def _numbers(op: Op, aval: Any) -> Any:
    if op.name == "triangular_solve" and aval.shape == DIAGONAL.shape:
        return DIAGONAL
    if op.name in WITHIN_ONE:
        return jnp.abs(array(*aval.shape, dtype=aval.dtype)) % 0.8 + 0.1
    if op.name == "lu_pivots_to_permutation":
        return array(*aval.shape, dtype=aval.dtype) % aval.shape[-1]
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        seeds = jnp.arange(aval.size).reshape(aval.shape)
        impl = "rbg" if "rbg" in str(aval.dtype) else "threefry2x32"
        keys = [jax.random.key(int(seed), impl=impl) for seed in seeds.flatten()]
        return jnp.stack(keys).reshape(aval.shape) if aval.shape else keys[0]
    if aval.dtype == jnp.bool_:
        return array(*aval.shape) > 0
    return array(*aval.shape, dtype=aval.dtype)


def test_every_own_rule_is_tested() -> None:
    tested = {primitive for primitive, _, _ in CASES.values()}
    assert set(OWN_RULES) <= tested


@pytest.mark.parametrize("title", ["conv gradient", "depthwise conv gradient", "grouped conv gradient"])
def test_only_features_of_a_convolution_leave_partial_sums(title: str) -> None:
    _, rule = operations(title)[-1]
    assert [rule.operands[0].index(f) for f in rule.reduced] == [0]
