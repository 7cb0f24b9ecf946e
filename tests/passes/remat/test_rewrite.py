"""Rematerialisation as a rewriting of graphs: the same numbers, less memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from autopar import jax_compat, zoo
from autopar.cost_models.flops import work
from autopar.ir.graph import Graph, Op, Region, verify
from autopar.ir.op_sets import PRODUCTS
from autopar.ir.trace import trace
from autopar.passes.remat import rewrite as remat
from tests.support.effort import sample
from tests.support.traces import traced

BARRIERS: dict[str, str | bool] = {
    "xla_disable_hlo_passes": "cse_barrier_expander"
}  # see autopar.codegen.emit.compiler_options


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def doubles(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float64)


def everywhere(graph: Graph, policy: str) -> Graph:
    """Every layer recomputed that can be."""
    return verify(remat.rewrite(graph, [policy if open_ else "none" for open_ in remat.recomputable(graph)]))


def test_barriers_of_equal_operands_share_one_traced_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    tracing = jax_compat.barrier_equation
    monkeypatch.setattr(jax_compat, "barrier_equation", lambda avals: (traced.append(1), tracing(avals))[1])
    model = zoo.build("gpt-toy", layers=6)
    graph = everywhere(trace(model.step, *model.abstract_args()).graph, remat.FULL)
    barriers = [op for op in graph.ops if op.name == "optimization_barrier"]
    assert len(traced) == len({op.signature for op in barriers}) < len(barriers)
    for op in barriers:
        types = [graph.types[v] for v in op.outputs]
        assert [(v.aval.shape, str(v.aval.dtype)) for v in op.equation.outvars] == [(t.shape, t.dtype) for t in types]


# The same numbers: by value numbering, so that programs of equal numbers do the same operations on the same operands


class Numbering:
    """Gives equal numbers to what is computed alike. Loops are unrolled, barriers are no operations."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, *key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def results(self, graph: Graph) -> list[int]:
        values = {v: self.number("argument", i) for i, v in enumerate(graph.inputs)}
        values.update((v, self.number("constant", id(array))) for v, array in graph.constants)
        self.run(graph.ops, values)
        return [self.read(values, a) for a in graph.outputs]

    def read(self, values: Mapping[int, int], atom: Any) -> int:
        return values[atom] if isinstance(atom, int) else self.number("literal", str(atom), str(atom.type))

    def run(self, ops: Sequence[Op], values: dict[int, int]) -> None:
        for op in ops:
            operands = [self.read(values, a) for a in op.inputs]
            values.update(zip(op.outputs, self.apply(op, operands), strict=True))

    def apply(self, op: Op, operands: list[int]) -> list[int]:
        if op.name == "optimization_barrier":
            return operands
        if op.name == "scan":
            return self.scan(op, operands)
        inside = tuple(tuple(self.body(r, [self.number("inner", i) for i in range(len(r.inputs))])) for r in op.regions)
        what = (op.name, inside) if op.regions else op.signature
        return [self.number(what, i, *operands) for i in range(len(op.outputs))]

    def body(self, region: Region, operands: Sequence[int]) -> list[int]:
        values = dict(zip(region.inputs, operands, strict=True))
        values.update((v, self.number("constant", id(array))) for v, array in region.constants)
        self.run(region.ops, values)
        return [self.read(values, a) for a in region.outputs]

    def scan(self, op: Op, operands: list[int]) -> list[int]:
        constants, carries = jax_compat.scan_counts(op.params)
        first, carry = constants + carries, operands[constants : constants + carries]
        rows: dict[int, list[int]] = {}
        turns = range(op.params["length"])
        for i in reversed(turns) if op.params["reverse"] else turns:
            slices = [self.slice(x, i) for x in operands[first:]]
            results = self.body(op.regions[0], [*operands[:constants], *carry, *slices])
            carry, rows[i] = results[:carries], results[carries:]
        return [*carry, *(self.number("stack", *column) for column in zip(*(rows[i] for i in turns), strict=True))]

    def slice(self, stack: int, i: int) -> int:
        parts = self.parts.get(stack)
        return self.number("slice", i, stack) if parts is None else parts[i]

    @property
    def parts(self) -> Mapping[int, tuple[int, ...]]:
        return {n: key[1:] for key, n in self.numbers.items() if key[0] == "stack"}


def dropping(params: Any, key: Any, x: Any) -> Any:
    """Dropout in every layer, with keys that are split as one goes."""
    for w in params:
        key, mine = jax.random.split(key)
        x = jnp.tanh(x @ w) * jax.random.bernoulli(mine, 0.9, x.shape)
    return (x @ params[0]).sum()


def branching(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.lax.cond(x.sum() > 0, lambda x, w: jnp.sin(x @ w), lambda x, w: jnp.cos(x @ w), x, w)
        x = jnp.sin(jnp.sin(x @ w))
    return (x @ ws[0]).sum()


WS = (array(4, 4),) * 4
OWN: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "dropout": (dropping, (WS, jax.ShapeDtypeStruct((2,), jnp.uint32), array(8, 4))),
    "branches": (branching, (WS, array(8, 4))),
}


def program(name: str) -> Graph:
    if name in OWN:
        fn, args = OWN[name]
        return trace(jax.value_and_grad(fn), *args).graph
    return traced(name).graph


#: Toys of a single layer: there is nothing to drop.
LEAN = ("flax-linen-toy",)
KEPT = ("mlp-toy", "gpt-toy-scan", "gpt-toy-tied", "moe-toy", "wresnet-toy", "unet-toy", "t5-toy", "flax-linen-toy")


@pytest.mark.parametrize("name", sample([*zoo.TOYS, *OWN], [*KEPT, *OWN]))
def test_recomputed_programs_do_the_same_operations_on_the_same_operands(name: str) -> None:
    graph = program(name)
    numbering = Numbering()
    expected = numbering.results(graph)
    for policy in ("dots", "full"):
        rewritten = everywhere(graph, policy)
        assert numbering.results(rewritten) == expected
        assert (count(rewritten) > count(graph)) == (name not in LEAN)
        assert rewritten.inputs == graph.inputs


@pytest.mark.parametrize("name", ["gpt-toy", "wresnet-toy"])
def test_residuals_between_products_are_recomputed_in_parts(name: str) -> None:
    """What is recomputed waits for something made from a product that ran since the barrier before.

    The first barrier of a layer may have nothing behind it that is recomputed: it is there for the parameters.
    """
    graph = everywhere(program(name), "dots")
    layers = sum(remat.recomputable(program(name)))
    barriers = [i for i, op in enumerate(graph.ops) if op.name == "optimization_barrier"]
    assert len(barriers) > 2 * layers
    again = [b for b in barriers if jax_compat.is_rematted(graph.ops[b + 1].name_stack)]
    assert len(again) > layers
    for before, barrier in itertools.pairwise(barriers):
        late: set[int] = set()
        for op in graph.ops[before + 1 : barrier]:
            if op.name in PRODUCTS or not late.isdisjoint(a for a in op.inputs if isinstance(a, int)):
                late.update(op.outputs)
        assert barrier not in again or not late.isdisjoint(a for a in graph.ops[barrier].inputs if isinstance(a, int))


def count(graph: Graph) -> int:
    return sum(1 for _ in graph.walk())


def products(graph: Graph) -> float:
    return sum(work(graph, op) for op in graph.ops)


@pytest.mark.parametrize("name", ["gpt-toy", "llama3-toy-scan", "wresnet-toy"])
def test_dots_repeats_no_product_and_full_at_most_the_forward_pass(name: str) -> None:
    graph = program(name)
    forward = sum(work(graph, op) for op in graph.ops if op.phase == "forward")
    assert products(everywhere(graph, "dots")) == products(graph)
    assert 0.3 * forward < products(everywhere(graph, "full")) - products(graph) < forward


def test_clones_have_the_line_of_the_original_and_are_marked() -> None:
    graph = program("gpt-toy")
    added = [op for op in everywhere(graph, "full").ops if "rematted_computation" in str(op.name_stack)]
    assert {op.phase for op in added} == {"backward"}
    assert {op.source for op in added} <= {op.source for op in graph.ops}


@pytest.mark.parametrize("name", ["gpt-toy-remat", "gpt-toy-scan-remat"])
def test_the_user_s_checkpoints_stay_as_they_are(name: str) -> None:
    graph = program(name)
    assert products(everywhere(graph, "full")) == products(graph)


def measured(x: Any) -> Any:
    """Something from outside that the backward pass reads."""
    return io_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))


def noisy(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.sin(jnp.sin(x @ w) * measured(x))
        jax.debug.print("{}", x.sum())
    return (x @ ws[0]).sum()


def noisy_scan(ws: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, w: (jnp.sin(jnp.sin(x @ w) * measured(x)), None), x, jnp.stack(ws))
    return (x @ ws[0]).sum()


@pytest.mark.parametrize(("fn", "times"), [(noisy, 8), (noisy_scan, 1)])
def test_side_effects_happen_once(fn: Callable[..., Any], times: int) -> None:
    def effects(graph: Graph) -> int:
        return sum(bool(op.equation.effects) for op in graph.walk() if not op.regions)

    graph = trace(jax.grad(fn), WS, array(8, 4)).graph
    rewritten = everywhere(graph, "full")
    assert effects(graph) == effects(rewritten) == times
    assert count(rewritten) > count(graph)


def test_results_of_the_program_are_not_recomputed() -> None:
    def kept(ws: Any, x: Any) -> Any:
        before = [x]
        for w in ws:
            before.append(x @ w)
            x = jnp.sin(jnp.sin(before[-1]))
        return (x @ ws[0]).sum(), before

    graph = trace(jax.grad(kept, has_aux=True), WS, array(8, 4)).graph
    rewritten = everywhere(graph, "full")
    assert count(rewritten) > count(graph)
    assert products(rewritten) == products(graph)


@pytest.mark.parametrize("differentiated", [False, True])
def test_stacked_results_of_the_program_stay(differentiated: bool) -> None:
    """Only the caller reads the stacked results of a loop; with a backward loop, others are recomputed."""

    def kept(ws: Any, x: Any) -> Any:
        x, before = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), x @ w), x, ws)
        return x.sum(), before

    graph = trace(jax.grad(kept, has_aux=True) if differentiated else kept, array(4, 4, 4), array(8, 4)).graph
    assert any(remat.recomputable(graph)) == differentiated
    numbering = Numbering()
    assert numbering.results(everywhere(graph, "full")) == numbering.results(graph)


# Less memory, measured by the compiler on one device


def evaluated(graph: Graph, leaves: Sequence[Any]) -> list[Any]:
    """The results of a program, operation by operation."""
    values = dict(zip(graph.inputs, leaves, strict=True))
    evaluate(graph.ops, values)
    return [values[a] if isinstance(a, int) else a.value for a in graph.outputs]


def evaluate(ops: Sequence[Op], values: dict[int, Any]) -> None:
    for op in ops:
        operands = [values[a] if isinstance(a, int) else a.value for a in op.inputs]
        results = evaluated_scan(op, operands) if op.name == "scan" else jax_compat.bind(op.equation, operands)
        values.update(zip(op.outputs, results, strict=True))


def evaluated_scan(op: Op, operands: list[Any]) -> list[Any]:
    constants, carries = jax_compat.scan_counts(op.params)
    first = constants + carries

    def body(carry: Any, slices: Any) -> Any:
        values = dict(zip(op.regions[0].inputs, [*operands[:constants], *carry, *slices], strict=True))
        evaluate(op.regions[0].ops, values)
        results = [values[a] if isinstance(a, int) else a.value for a in op.regions[0].outputs]
        return results[:carries], results[carries:]

    length, reverse = op.params["length"], op.params["reverse"]
    carry, stacked = jax.lax.scan(body, operands[constants:first], operands[first:], length, reverse)
    return [*carry, *stacked]


def deep(ws: Any, x: Any) -> Any:
    for a, b in ws:
        x = x + jnp.tanh(jnp.sin(x @ a) @ b)
    return jnp.sin(x @ ws[0][0]).sum()


def deep_scan(ws: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(jnp.sin(x @ w[0]) @ w[1]), None), x, ws)
    return jnp.sin(x @ ws[0][0]).sum()


@pytest.mark.parametrize("scan", [False, True])
def test_peak_memory_falls_and_the_numbers_stay(scan: bool) -> None:
    with jax.enable_x64(True):
        falls_and_stays(scan)


def falls_and_stays(scan: bool) -> None:
    shape = (6, 2, 32, 32) if scan else (32, 32)
    weights = doubles(*shape) if scan else ((doubles(*shape), doubles(*shape)),) * 6
    graph = trace(jax.grad(deep_scan if scan else deep), weights, doubles(4096, 32)).graph
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.normal(size=graph.types[v].shape) / 6) for v in graph.inputs]
    peaks: list[int] = []
    results: list[Any] = []
    for policy in remat.POLICIES:
        rewritten = everywhere(graph, policy)
        lowered = jax.jit(lambda *xs, g=rewritten: evaluated(g, xs)).lower(*leaves)
        compiled = lowered.compile(compiler_options=BARRIERS)
        stats = compiled.memory_analysis()
        assert stats is not None
        peaks.append(stats.temp_size_in_bytes)
        results.append(compiled(*leaves))
    none, dots, full = peaks
    assert full < 0.7 * dots < 0.6 * none
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_a_layer_without_a_backward_pass_of_its_own_stays_as_it_is(policy: str) -> None:
    """What is in front of a loop, as the noise of a Kalman filter, whose residuals the loop's backward pass reads."""

    def step(q: Any, batch: Any) -> Any:
        def likelihood(q: Any, y: Any) -> Any:
            noise = jnp.diag(jnp.exp(q))
            return jnp.sum(jax.lax.scan(lambda c, y: (jnp.tanh(c @ noise) + y, jnp.sum(c @ noise)), y[0], y)[1])

        loss, gradient = jax.value_and_grad(lambda q: jax.vmap(likelihood, (None, 0))(q, batch).mean())(q)
        return q - 0.1 * gradient, loss

    args = jnp.zeros(4), jnp.ones((8, 6, 4))
    run = autopar.parallelize(step, mesh=(2, 4), remat=policy, donate_argnums=())
    for ours, theirs in zip(run(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
