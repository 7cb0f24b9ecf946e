"""Operations with `custom_partitioning`: what their rules allow, what is refused, and equality with one device.

The functions that devices run differ from the operations' own: they sum over the mesh axes that cut what is contracted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar import jax_compat
from autopar.bench.equal.case import dear
from autopar.cost_models.flops import model_flops
from autopar.errors import MicrobatchError, RuleError
from autopar.ir.graph import Op
from autopar.ir.trace import trace
from autopar.rules import partitioned, registry, rules_of
from autopar.rules.inherent import reason
from tests.support.effort import sample

pytestmark = pytest.mark.core

Array = jax.Array
Operation = Callable[..., Any]


def array(*shape: int) -> Array:
    return jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


def axis_of(shaped: Any, dim: int) -> Any:
    """The mesh axes that cut a dimension."""
    return (*shaped.sharding.spec, *[None] * len(shaped.shape))[dim]


def total(x: Array, axes: Any) -> Array:
    return x if axes is None else jax.lax.psum(x, axes)


Local = Callable[[Any, Any], Operation]


def operation(function: Operation, local: Local | None, rule: Any, static: Sequence[int] = (), **factors: Any) -> Any:
    """An operation; `local`: (operands, results) with shardings -> what a device runs, if not the function."""
    op = custom_partitioning(function, static_argnums=tuple(static))

    def partition(*args: Any) -> Any:
        mesh, operands, result = args[-3:]
        run = function if local is None else local(operands, result)
        return mesh, run, jax.tree.map(lambda r: r.sharding, result), jax.tree.map(lambda a: a.sharding, operands)

    op.def_partition(partition, sharding_rule=rule, **factors)
    return op


def product(x: Array, w: Array) -> Array:
    return x @ w


def summed_product(operands: Any, _: Any) -> Operation:
    return lambda x, w: total(x @ w, axis_of(operands[0], 1))


def norm(x: Array) -> Array:
    return x / jnp.sqrt(1 + (x * x).sum(-1, keepdims=True))


def norm_of_parts(operands: Any, _: Any) -> Operation:
    def run(x: Array) -> Array:
        return x / jnp.sqrt(1 + total((x * x).sum(-1, keepdims=True), axis_of(operands[0], 1)))

    return run


def global_sum(operands: Any, _: Any) -> Operation:
    def run(x: Array) -> Array:
        return total(total(x.sum(), axis_of(operands[0], 0)), axis_of(operands[0], 1))

    return run


def moments(x: Array) -> dict[str, Array]:
    return {"mean": x.mean(-1), "twice": 2 * x}


def moments_of_parts(operands: Any, _: Any) -> Operation:
    def run(x: Array) -> dict[str, Array]:
        axes = axis_of(operands[0], 1)
        return {"mean": x.mean(-1) if axes is None else jax.lax.pmean(x.mean(-1), axes), "twice": 2 * x}

    return run


def sort(x: Array) -> Array:
    return jnp.sort(x)


def add_up(x: Array) -> Array:
    return x.sum()


def columns(x: Array) -> Array:
    return jnp.outer(x, jnp.ones(4))


def merged(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def by_types(mesh: Any, operands: Any, results: Any) -> Any:
    return " ".join("ijk"[: len(operands[0].shape)]) + " -> " + " ".join("ijk"[: len(operands[0].shape)])


def scaled(factor: float, x: Array) -> Array:
    return factor * x


PRODUCT = operation(product, summed_product, "m k, k n -> m n", reduction_factors=("k",))
TWICE = operation(lambda x: x + x, None, "... -> ...")
SDY = SdyShardingRule((("i", "j"),), (("i", "j"),))

#: title -> operation, operands, its rule as it is read
CUT: Mapping[str, tuple[Any, tuple[Any, ...], str]] = {
    "a product": (
        PRODUCT,
        (array(16, 32), array(32, 8)),
        "a b, b c -> a c | reduce b",
    ),
    "a norm": (operation(norm, norm_of_parts, "b h -> b h"), (array(16, 32),), "a b -> a b"),
    "batch dimensions": (operation(jnp.tanh, None, "... h -> ... h"), (array(8, 4, 16),), "a b c -> a b c"),
    "a rule object": (operation(jnp.tanh, None, SDY), (array(8, 16),), "a b -> a b"),
    "a rule from types": (operation(jnp.tanh, None, by_types), (array(8, 16),), "a b -> a b"),
    "a factor kept": (
        operation(sort, None, "b n -> b n", need_replication_factors=("n",)),
        (array(16, 32),),
        "a b -> a b | keep b",
    ),
    "a sum of everything": (
        operation(add_up, global_sum, "a b ->", reduction_factors=("a", "b")),
        (array(16, 8),),
        "a b -> () | reduce a b",
    ),
    "a tree of results": (operation(moments, moments_of_parts, "b h -> b, b h"), (array(16, 8),), "a b -> a, a b"),
    "compound factors": (operation(merged, None, "a b c -> (a b) c"), (array(16, 4, 8),), "a c b -> a b | keep c"),
    "static arguments": (
        operation(scaled, lambda operands, _: lambda x: 3.0 * x, lambda factor, *rest: by_types(*rest), static=(0,)),
        (3.0, array(8, 16)),
        "a b -> a b",
    ),
}  # fmt: skip


def calls(fn: Any, *args: Any) -> list[Op]:
    static = tuple(i for i, x in enumerate(args) if isinstance(x, float))
    ops = trace(fn, *args, static_argnums=static).graph.walk()
    return [op for op in ops if op.name == "custom_partitioning"]


@pytest.mark.parametrize("title", CUT)
def test_rules_are_read_from_the_operation(title: str) -> None:
    fn, args, text = CUT[title]
    (op,) = calls(fn, *args)
    analysis = partitioned.analyse(op.params)
    assert normalised(str(analysis.rule)) == normalised(text)


def normalised(text: str) -> str:
    """The rule with its factors named in the order in which they occur."""
    names: dict[str, str] = {}
    words = text.replace(",", " ,").split()
    return " ".join(names.setdefault(w, f"f{len(names)}") if len(w) == 1 and w.isalpha() else w for w in words)


MESHES = ((8,), (2, 4), (2, 2, 2))


def bound(fn: Any, args: Sequence[Any], mesh_sizes: Sequence[int], axes: Mapping[str, int]) -> list[Any]:
    """What the emitter runs where mesh axes cut these factors, and the whole results."""
    (op,) = calls(fn, *args)
    rule = partitioned.analyse(op.params).rule
    mesh = jax_compat.auto_mesh(np.array(jax.devices()).reshape(tuple(mesh_sizes)), "xyz"[: len(mesh_sizes)])
    arrays = [np.asarray(x) for x in args if not isinstance(x, float)]
    cut = partitioned.specs(rule.operands, axes), partitioned.specs(rule.results, axes)
    call = partitioned.local_call(partitioned.Partitioned.of(op.params), mesh, *cut)
    specs: dict[str, Any] = {"in_specs": call.operands, "out_specs": call.results}
    local = jax.shard_map(lambda *shards: tuple(call.run(*shards)), mesh=mesh, check_vma=False, **specs)
    return list(jax.jit(local)(*arrays))


@pytest.mark.parametrize("sizes", sample(MESHES, [(2, 4)]))
@pytest.mark.parametrize("title", CUT)
def test_every_way_to_cut_is_equal_to_the_whole(title: str, sizes: tuple[int, ...]) -> None:
    fn, args, _ = CUT[title]
    (op,) = calls(fn, *args)
    rule, names = partitioned.analyse(op.params).rule, "xyz"[: len(sizes)]
    whole = jax.tree.leaves(fn(*args))
    tried = 0
    for factors in itertools.product((None, *rule.free), repeat=len(sizes)):
        axes = {name: f for name, f in zip(names, factors, strict=True) if f is not None}
        shards = {f: int(np.prod([n for n, g in zip(sizes, factors, strict=True) if g == f])) for f in axes.values()}
        if not axes or any(rule.sizes[f] % n for f, n in shards.items()):
            continue
        tried += 1
        for ours, theirs in zip(bound(fn, args, sizes, axes), whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=str(axes))
    assert tried


# What is refused


def unsummed(operands: Any, _: Any) -> Operation:
    return product


def rotated(x: Array) -> Array:
    return jnp.roll(x, 1, 0)


def moves_operands() -> Any:
    op = custom_partitioning(jnp.tanh)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        whole = NamedSharding(mesh, P())
        return mesh, jnp.tanh, whole, (whole,)

    op.def_partition(partition, sharding_rule="i j -> i j")
    return op


def refuses() -> Any:
    op = custom_partitioning(jnp.tanh)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        if axis_of(operands[0], 0) is not None:
            raise ValueError("rows are kept whole\nfor ever")
        return mesh, jnp.tanh, result.sharding, (operands[0].sharding,)

    op.def_partition(partition, sharding_rule="i j -> i j")
    return op


def encoded() -> Any:
    op = custom_partitioning(jnp.tanh)
    op.def_partition(lambda *args: None, sharding_rule="i j -> i j", decode_shardings=False)
    return op


def rule_fails(*args: Any) -> str:
    raise IndexError("no such type")


X = array(8, 16)
#: title -> operation, operands, why
REFUSED: Mapping[str, tuple[Any, tuple[Any, ...], str]] = {
    "no sharding rule": (operation(jnp.tanh, None, None), (X,), "it has no sharding_rule; def_partition takes one"),
    "encoded shardings": (encoded(), (X,), "its def_partition has decode_shardings=False"),
    "a rule that fails": (operation(jnp.tanh, None, rule_fails), (X,), "its sharding_rule does not fit (IndexError"),
    "a rule of another rank": (
        operation(jnp.tanh, None, "i j k -> i j k"), (X,), "its sharding_rule does not fit (ValueError: Sharding rule"
    ),
    "no sum": (
        operation(product, unsummed, "m k, k n -> m n", reduction_factors=("k",)),
        (X, array(16, 8)),
        "dimension 1 of operand 0: its lower_fn does not communicate over it, and a result has no dimension of it",
    ),
    "a permutation": (
        operation(rotated, None, "i j -> i j", permutation_factors=("i",)),
        (X,),
        "dimension 0 of operand 0: its sharding_rule keeps it whole",
    ),
    "operands that partition moves": (moves_operands(), (X,), "dimension 0 of operand 0: partition wants operand 0 as"),
    "a sharding that partition refuses": (
        refuses(), (X,), "dimension 0 of operand 0: partition refuses it (ValueError: rows are kept whole)"
    ),
    "shards of another shape": (
        operation(jnp.tanh, lambda *_: lambda x: x[:1], "i j -> i j"), (X,), "its lower_fn gives float32[1,16]"
    ),
    "a function that fails": (
        operation(jnp.tanh, lambda *_: lambda x: x.nothing, "i j -> i j"), (X,), "its lower_fn fails (AttributeError"
    ),
    "a dimension of results alone": (
        operation(columns, None, "i -> i j"), (array(8),), "dimension 1 of result 0: no operand has it"
    ),
    "a minor factor": (
        operation(merged, None, "a b c -> (a b) c"), (array(4, 8, 2),), "dimension 1 of operand 0: it is a minor factor"
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", REFUSED)
def test_what_is_refused_says_why(title: str) -> None:
    fn, args, why = REFUSED[title]
    (op,) = calls(fn, *args)
    assert why in "; ".join(partitioned.analyse(op.params).obstacles)
    assert why in reason(op)


@pytest.mark.parametrize("title", REFUSED)
def test_what_is_refused_equals_one_device(title: str) -> None:
    fn, args, _ = REFUSED[title]
    expected = _function_of(fn)(*args)
    step = autopar.parallelize(lambda *args: fn(*args), mesh=(2, 4), cluster=dear((2, 4)))
    np.testing.assert_allclose(step(*args), expected, rtol=1e-5, atol=1e-5)


def _function_of(fn: Any) -> Operation:
    return fn.fun


def test_a_plan_notes_what_runs_whole() -> None:
    def step(x: Array) -> Array:
        return jnp.sin(operation(jnp.tanh, None, None)(x * 2))

    plan = autopar.plan(step, X, mesh=(8,), cluster=dear((8,)))
    (note,) = [n for n in plan.notes if "custom_partitioning" in n]
    assert note.startswith("custom_partitioning runs replicated (1 times, first at test_partitioned.py:")
    assert note.endswith("tanh: it has no sharding_rule; def_partition takes one")


def test_a_combination_that_partition_refuses_is_an_error() -> None:
    op = custom_partitioning(jnp.tanh)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        if None not in operands[0].sharding.spec:
            raise ValueError("not both")
        return mesh, jnp.tanh, result.sharding, (operands[0].sharding,)

    op.def_partition(partition, sharding_rule="i j -> i j")
    step = autopar.parallelize(lambda x: op(x) * 2, mesh=(2, 4), cluster=dear((2, 4)), pins={"x": P("x", "y")})
    with pytest.raises(RuleError, match=r"tanh at test_partitioned.py:\d+ cannot be cut .*P\('x', 'y'\).*not both"):
        step(X)


def test_a_registered_rule_takes_the_place_of_its_own() -> None:
    before = registry._REGISTERED.set(registry.registered_rules())
    try:
        autopar.register_rule("norm", "b h -> b h | keep h")
        (op,) = calls(CUT["a norm"][0], X)
        graph = trace(CUT["a norm"][0], X).graph
        assert str(rules_of(graph)[op.signature]) == "a b -> a b | keep b"
    finally:
        registry._REGISTERED.reset(before)


def test_flops_are_those_of_the_function() -> None:
    fn, args, _ = CUT["a product"]
    assert model_flops(trace(fn, *args).graph) == 2 * 16 * 32 * 8


# In steps


matmul, rms_norm = CUT["a product"][0], CUT["a norm"][0]


@jax.custom_vjp
def layer(x: Array, w: Array) -> Array:
    return matmul(rms_norm(x), w)


def _layer_forward(x: Array, w: Array) -> Any:
    normed, back = jax.vjp(norm, x)
    del normed
    return layer(x, w), (x, w, back)


def _layer_backward(kept: Any, g: Array) -> Any:
    x, w, back = kept
    return back(matmul(g, w.T))[0], matmul(rms_norm(x).T, g)


layer.defvjp(_layer_forward, _layer_backward)


def train(weights: Array, x: Array) -> Any:
    """One step of stacked layers, scanned."""

    def loss(weights: Array) -> Array:
        out, _ = jax.lax.scan(lambda h, w: (h + layer(h, w), None), x, weights)
        return (out**2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * grads, value


WEIGHTS, BATCH = array(3, 32, 32) / 4, array(16, 32)
PINNED = (None, {"x": P("x")}, {"weights": P(None, "x")}, {"weights": P(None, None, "x")})


@pytest.mark.parametrize("sizes", sample(MESHES, [(2, 4)]))
@pytest.mark.parametrize("pins", PINNED)
def test_a_scanned_step_and_its_gradients_equal_one_device(pins: Any, sizes: tuple[int, ...]) -> None:
    step = autopar.parallelize(train, mesh=sizes, cluster=dear(sizes), pins=pins, donate_argnums=())
    plan = step.plan(WEIGHTS, BATCH)
    assert not any("custom_partitioning runs replicated" in note for note in plan.notes)
    for ours, theirs in zip(step(WEIGHTS, BATCH), jax.jit(train)(WEIGHTS, BATCH), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_collectives_are_those_of_the_plan() -> None:
    def step(x: Array, w: Array) -> Array:
        return matmul(jnp.tanh(x), w)

    x, w = array(64, 512), array(512, 64)
    plan = autopar.plan(step, x, w, mesh=(8,), cluster=dear((8,)), pins={"x": P(None, "x"), "w": P("x")})
    assert [c.kind for c in plan.collectives] == ["all-reduce"]
    assert autopar.verify(plan, step, x, w, target="cpu").ok


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_microbatches_equal_the_whole_batch(sizes: tuple[int, ...]) -> None:
    step = autopar.parallelize(
        train, mesh=sizes, cluster=dear(sizes), num_microbatches=4, batch_argnums=(1,), donate_argnums=()
    )
    for ours, theirs in zip(step(WEIGHTS, BATCH), jax.jit(train)(WEIGHTS, BATCH), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_operation_on_constants_equals_one_device() -> None:
    def step(x: Array) -> Any:
        table = rms_norm(jnp.arange(512, dtype=jnp.float32).reshape(16, 32))
        return x * table, (x @ table.T).sum(0)

    ours, theirs = (jax.tree.leaves(f(BATCH)) for f in (autopar.parallelize(step, mesh=(2, 4)), jax.jit(step)))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_pipeline_equals_one_device() -> None:
    def step(weights: Sequence[Array], x: Array) -> Any:
        def loss(weights: Sequence[Array]) -> Array:
            h = x
            for w in weights:
                h = h + layer(h, w)
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    weights = [*WEIGHTS, WEIGHTS[0]]
    parallel = autopar.parallelize(
        step, mesh=(2, 2), cluster=dear((2, 2)), stages=2, num_microbatches=4, batch_argnums=(1,), donate_argnums=()
    )
    ours, theirs = (jax.tree.leaves(f(weights, BATCH)) for f in (parallel, jax.jit(step)))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_communicates_along_the_batch_is_not_cut_into_microbatches() -> None:
    def centred(operands: Any, _: Any) -> Operation:
        def run(x: Array) -> Array:
            axes = axis_of(operands[0], 0)
            return x - (x.mean(0) if axes is None else jax.lax.pmean(x.mean(0), axes))

        return run

    centre = operation(lambda x: x - x.mean(0), centred, "b h -> b h")

    def step(w: Array, x: Array) -> Array:
        return (jnp.tanh(centre(x @ w)) @ w).mean()

    assert partitioned.analyse(calls(step, WEIGHTS[0], BATCH)[0].params).rule.free == (0, 1)
    with pytest.raises(MicrobatchError, match=r"custom_partitioning at test_partitioned.py"):
        autopar.plan(step, WEIGHTS[0], BATCH, mesh=(2,), num_microbatches=2, batch_argnums=(1,))
