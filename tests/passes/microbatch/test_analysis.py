"""Steps that fall into microbatches compute what they compute undivided; those that do not are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import jax_compat
from autopar.errors import ArgumentError, MicrobatchError
from autopar.ir.trace import trace
from autopar.passes.microbatch.loop import StepPrograms, split_step
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.split import split
from autopar.passes.microbatch.states import Partial, Split
from autopar.zoo import TOYS, build
from tests.passes.microbatch import batch_programs as programs
from tests.support.effort import sample
from tests.support.traces import traced

#: Zoo models whose examples depend on each other.
COUPLED = ("wresnet-toy", "resnet-toy", "clip-toy")
COUNT = 4
#: One layer shows what several do; these have no such option, or alternate between two kinds.
AS_LONG = ("moe-toy", "moe-toy-dropless", "unet-toy", "wresnet-toy", "resnet-toy")

jit = partial(jax.jit, compiler_options=dict(jax_compat.quick_compilation()))


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def assert_close(got: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Equal trees and types; every leaf within `tolerance` of its largest magnitude, integers and keys bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert jax.typeof(a).str_short() == jax.typeof(b).str_short(), name
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        if np.issubdtype(a.dtype, np.integer) or a.dtype == bool:
            np.testing.assert_array_equal(a, b, err_msg=name)
        elif b.size:
            error = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
            assert error <= tolerance * np.abs(b.astype(np.float64)).max() + 1e-300, (name, error)


def batch_argument(name: str) -> Any:
    """A step that hands no state back, so that its batch cannot be told from its parameters with certainty."""
    return (2,) if name in ("evaluation", "generation") else "auto"


# Exact


@pytest.mark.parametrize("name", programs.EXACT)
def test_step_in_microbatches_is_the_step(name: str) -> None:
    step = programs.EXACT[name]
    args = programs.arguments(name, step)
    divided = split_step(programs.traced(name), COUNT, batch_argument(name))
    assert divided.split.loop_share >= 0.99
    assert len(divided.split.loops) == (2 if name in programs.TWO_LOOPS else 1)
    assert_close(*jit(lambda *args: (divided(*args), step(*args)))(*args))


UNCOUPLED = [t for t in TOYS if t not in COUPLED]


@pytest.mark.parametrize("target", UNCOUPLED)
def test_zoo_model_falls_into_microbatches(target: str) -> None:
    assert split(traced(target, **sizes(target)).graph, COUNT).loop_share >= 0.99


def zoo_model(target: str, **options: Any) -> Any:
    return build(target, **options, **sizes(target))


def sizes(target: str) -> dict[str, int]:
    return {} if target in AS_LONG else {"layers": 1}


#: A loop over layers, tied weights, grouped queries, two sweeps over the microbatches, recurrence, convolutions.
COMPUTED = ("gpt-toy-scan-remat", "gpt-toy-tied", "llama3-toy", "moe-toy", "rnn-toy", "vit-toy")


@pytest.mark.parametrize("target", sample(UNCOUPLED, COMPUTED))
def test_zoo_model_in_microbatches_is_the_model(target: str) -> None:
    model = zoo_model(target, dtype="float64")
    args = jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    divided = split_step(trace(model.step, *args), COUNT)
    assert divided.split.loop_share >= 0.99
    assert_close(*jit(lambda *args: (divided(*args), model.step(*args)))(*args))


def test_halves_are_summed_in_single_precision() -> None:
    """Rounding a running sum of 64 ones and some to halves would lose what is added last."""

    def step(w: jax.Array, b: Any) -> jax.Array:
        return jnp.sum(b["x"] * w, dtype=jnp.bfloat16)

    b = {"x": jnp.asarray([256.0] + [1.0] * 63, jnp.bfloat16)}
    divided = split_step(trace(step, jnp.ones((), jnp.bfloat16), b), 64, (1,))
    assert float(jit(divided)(jnp.ones((), jnp.bfloat16), b)) == float(jnp.bfloat16(319))


def test_half_precision_step_is_the_step_to_rounding() -> None:
    args = programs.arguments("halves", programs.HALVES)
    divided = split_step(trace(programs.HALVES, *args), COUNT)
    assert divided.split.loop_share >= 0.99
    (_, _, got), (_, _, expected) = jit(lambda *args: (divided(*args), programs.HALVES(*args)))(*args)
    assert_close(got, expected, 1e-2)


def test_unrolled_loop_and_one_microbatch_are_the_step() -> None:
    step = programs.EXACT["global norm"]
    args = programs.arguments("global norm", step)
    traced = trace(step, *args)
    unrolled, whole = split_step(traced, 2, unrolled=True), split_step(traced, 1)
    first, second, expected = jit(lambda *args: (unrolled(*args), whole(*args), step(*args)))(*args)
    assert_close(first, expected)
    assert_close(second, expected)


# Refused


def mistakes(source: str, text: str) -> str:
    """ "file.py:line" of the first line of a test program that has this text."""
    with open(source) as file:
        number = next(i for i, line in enumerate(file, 1) if text in line)
    return f"batch_programs.py:{number}"


@pytest.mark.parametrize(
    ("name", "line"), [("contrastive", "z @ z.T"), ("batch norm", "x = (x - x.mean((0, 1)))")], ids=["dot", "norm"]
)
def test_coupled_step_is_refused_with_its_forward_line(name: str, line: str) -> None:
    graph = programs.traced(name).graph
    with pytest.raises(MicrobatchError, match=r"% of its FLOPs") as refused:
        split(graph, COUNT)
    assert mistakes(programs.__file__, line) in str(refused.value)


def test_batch_norm_of_the_zoo_is_refused() -> None:
    graph = traced("wresnet-toy").graph
    with pytest.raises(MicrobatchError, match=r"at wresnet\.py:\d+ hands it back to every example.*per_microbatch"):
        split(graph, COUNT)


def test_one_microbatch_is_never_refused() -> None:
    for name, step in programs.REFUSED.items():
        args = programs.arguments(name, step)
        divided = split_step(trace(step, *args), 1)
        assert_close(*jit(lambda *args, divided=divided, step=step: (divided(*args), step(*args)))(*args))


def test_one_loop_refuses_steps_that_need_two() -> None:
    graph = programs.traced("balanced experts").graph
    with pytest.raises(MicrobatchError, match=mistakes(programs.__file__, "routed = jax.nn.one_hot")):
        split(graph, COUNT, loops=1)
    assert split(graph, COUNT).repeated_share > 0


@pytest.mark.parametrize("name", [*programs.EXACT, *programs.REFUSED])
@pytest.mark.parametrize("loops", sample([1, 2], [2]))
def test_without_reasons_the_same_is_refused(name: str, loops: int) -> None:
    graph = programs.traced(name).graph
    try:
        share = split(graph, COUNT, loops=loops).loop_share
    except MicrobatchError:
        with pytest.raises(MicrobatchError, match=f"the step does not fall into {COUNT} microbatches$"):
            split(graph, COUNT, loops=loops, reasons=False)
    else:
        assert split(graph, COUNT, loops=loops, reasons=False).loop_share == share


def test_counts_and_arguments_are_checked() -> None:
    traced = trace(lambda p, x: p * x, jnp.ones(()), jnp.ones(4))
    with pytest.raises(ArgumentError, match="at least 1, got 0"):
        split(traced.graph, 0)
    with pytest.raises(ArgumentError, match="no traced argument 2"):
        split_step(traced, 2, (2,))
    with pytest.raises(ArgumentError, match="was traced for"):
        split_step(traced, 2, (1,))(1.0)


# A microbatch's own totals


def test_batch_norm_per_microbatch_is_the_mean_over_microbatches() -> None:
    """Loss and gradients with each microbatch's own statistics, as frameworks that accumulate gradients have them."""

    def step(p: Any, b: Any) -> Any:
        value, grads = jax.value_and_grad(programs.batch_norm)(p, b)
        return programs.sgd(p, grads), value

    p, b = programs.params(), programs.batch()

    def parts(p: Any, b: Any) -> Any:
        cut = jax.tree.map(lambda x: x.reshape(COUNT, -1, *x.shape[1:]), b)
        values, grads = jax.lax.map(lambda part: jax.value_and_grad(programs.batch_norm)(p, part), cut)
        return programs.sgd(p, jax.tree.map(lambda g: g.mean(0), grads)), values.mean()

    got = jit(split_step(trace(step, p, b), COUNT, per_microbatch=("*",)))(p, b)
    assert_close(got, jit(parts)(p, b))


def test_running_statistics_stay_those_of_the_whole_batch() -> None:
    def step(p: Any, b: Any) -> Any:
        def loss(w: jax.Array) -> Any:
            y = b["x"] @ w
            mean = y.mean(0)
            return jnp.mean(jnp.tanh(y - mean * p["gain"]) @ w.T), mean

        (value, mean), grad = jax.value_and_grad(loss, has_aux=True)(p["w"])
        return {**p, "w": p["w"] - grad, "mean": 0.9 * p["mean"] + 0.1 * mean}, value

    p = {"w": jnp.arange(12.0).reshape(3, 4) / 10, "mean": jnp.zeros(4), "gain": jnp.full(4, 0.9)}
    b = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)))}
    traced = trace(step, p, b)
    got, _ = jit(split_step(traced, COUNT, per_microbatch=("*",)))(p, b)
    expected, _ = jit(step)(p, b)
    assert_close(got["mean"], expected["mean"])
    assert not np.allclose(got["w"], expected["w"])


# What stands where


def split_program(name: str) -> Microbatches:
    return split(programs.traced(name).graph, COUNT)


def test_gradients_are_summed_and_the_update_runs_once() -> None:
    divided = split_program("global norm")
    assert {p.op.phase for p in divided.body} == {"forward", "backward"}
    assert "sqrt" in {p.op.name for p in divided.epilogue}
    assert all(total.combine == "sum" for total in divided.totals)
    assert all(isinstance(divided.states[total.value], Partial) for total in divided.totals)
    assert not any(p.op.phase == "update" for p in divided.prologue)


@pytest.mark.parametrize(("share_accumulators", "accumulators"), [(True, 1), (False, 2)])
def test_two_gradients_of_one_table_share_an_accumulator_if_they_may(
    share_accumulators: bool, accumulators: int
) -> None:
    step = programs.EXACT["by hand"]
    args = programs.arguments("by hand", step)
    divided = split(trace(step, *args).graph, COUNT, share_accumulators=share_accumulators)
    assert [total.combine for total in divided.totals].count("sum") == accumulators
    got = StepPrograms(divided).step(jax.tree.leaves(args))
    assert_close(got, tuple(jax.tree.leaves(step(*args))))


@pytest.mark.parametrize("cast", [None, jnp.bfloat16])
def test_gradients_of_weights_that_layers_share_have_one_accumulator(cast: Any) -> None:
    """Each is transposed before it is added to the others, and converted where layers cast their weights."""

    def step(w: jax.Array, b: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            y, head = b["x"], w
            for _ in range(3):
                y = jnp.tanh(jnp.matmul(y, w if cast is None else w.astype(cast), preferred_element_type=y.dtype))
            return jnp.mean((y @ head.T) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value

    random = np.random.default_rng(0)
    args = (jnp.asarray(random.normal(size=(6, 6)) / 6), {"x": jnp.asarray(random.normal(size=(8, 6)))})
    traced = trace(step, *args)
    divided = split(traced.graph, COUNT)
    assert sorted(divided.graph.types[total.value].shape for total in divided.totals) == [(), (6, 6)]
    got, expected = jit(split_step(traced, COUNT))(*args), jit(step)(*args)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-12 if cast is None else 1e-3)
    assert_close(got[1], expected[1])


def test_a_gradient_that_is_read_elsewhere_keeps_its_accumulator() -> None:
    def step(w: jax.Array, b: Any) -> Any:
        def loss(first: jax.Array, second: jax.Array) -> jax.Array:
            return jnp.mean(jnp.tanh(jnp.tanh(b["x"] @ first) @ second))

        first, second = jax.grad(loss, (0, 1))(w, w)
        return w - (first + second), jnp.sum(first**2)

    args = (jnp.arange(16.0).reshape(4, 4) / 16, {"x": jnp.ones((8, 4))})
    traced = trace(step, *args)
    assert len(split(traced.graph, COUNT).totals) == 2
    for got, expected in zip(jit(split_step(traced, COUNT))(*args), jit(step)(*args), strict=True):
        assert_close(got, expected)


def test_metrics_are_combined_by_kind() -> None:
    assert {total.combine for total in split_program("metrics").totals} == {"sum", "max", "min", "or", "concatenate"}


def test_values_of_the_batchs_size_are_not_live_during_the_loop() -> None:
    """Dropout masks and zeros are made block by block; what is made before the loop is small."""
    for name in ("dropout", "flattened", "global norm"):
        divided = split_program(name)
        most = max(divided.graph.types[v].size for p in divided.prologue for v in p.op.outputs)
        assert most <= programs.VOCAB * programs.WIDTH, name


def test_mask_count_is_computed_before_the_loop() -> None:
    assert any(p.op.name == "reduce_sum" for p in split_program("masked mean").prologue)


def test_hoisting_is_bounded() -> None:
    """A count of something far larger than the batch comes after the loop, and with it what divides by it."""

    def step(w: jax.Array, b: Any) -> Any:
        wide = b["x"][:, None] * jnp.ones(1 << 16) * w
        return jnp.sum(wide / jnp.sum(jnp.tanh(b["x"][:, None] * jnp.arange(float(1 << 16)))))

    graph = trace(step, jnp.ones(()), {"x": jnp.ones(8)}).graph
    assert not any(p.op.name in ("tanh", "reduce_sum") for p in split(graph, COUNT).prologue)


def test_an_op_without_a_rule_may_read_values_of_the_loop() -> None:
    """Rows at counts that a scan over the batch makes as well: equal in all microbatches, unknown before it."""

    def step(b: Any) -> Any:
        wide, counts = jax.lax.scan(lambda x, _: (jnp.tanh(x), jnp.int32(1)), b["x"], None, length=8)
        return wide, b["x"].at[jnp.arange(8), counts].get(mode="fill")

    args = ({"x": jnp.arange(24.0).reshape(8, 3)},)
    divided = split_step(trace(step, *args), 2, (0,))
    assert_close(*jit(lambda *args: (divided(*args), step(*args)))(*args))


def test_equal_operations_share_a_rule_result_unless_values_decide() -> None:
    def step(b: Any) -> Any:
        rows = jnp.arange(8)
        own, other = b["x"][rows, b["y"]], b["x"][rows[::-1], b["y"]]  # equal gathers, but of other rows
        return jnp.tanh(b["x"]), jnp.tanh(jnp.tanh(b["x"])), own, other

    args = {"x": jnp.arange(24.0).reshape(8, 3), "y": jnp.zeros(8, jnp.int32)}
    graph = trace(step, args).graph
    assert len({op.signature for op in graph.ops if op.name == "gather"}) == 1
    microbatches = split(graph, 2, (0, 1))
    (first, *later_results) = (p.rule_result for p in microbatches.body if p.op.name == "tanh")
    assert first is not None
    assert [result is first for result in later_results] == [True, True]
    assert [p.op.outputs[0] for p in microbatches.body if p.op.name == "gather"] == [graph.outputs[2]]
    assert_close(split_step(trace(step, args), 2)(args), step(args))


def test_a_value_is_a_total_or_made_whole_and_never_both() -> None:
    """Of two results of one operation, one is added up in the loop, and one is wanted whole before it."""

    def step(b: Any) -> Any:
        largest, where = jax.lax.top_k(b["x"], 2)
        weights = jnp.arange(8.0)[:, None] * jnp.where(largest > 1, largest, 1)
        return jnp.sum(weights.astype(jnp.float16), 0).astype(jnp.float32), where

    divided = split(trace(step, {"x": jnp.arange(32.0).reshape(8, 4)}).graph, 2, (0,))
    totals = {total.value for loop in divided.loops for total in loop.totals}
    once = [placed.op for part in (divided.prologue, *(loop.after for loop in divided.loops)) for placed in part]
    assert totals.isdisjoint(v for op in once for v in op.outputs)


def test_users_own_loop_gets_a_batch_stride() -> None:
    assert set(split_program("accumulated").batch.values()) == {Split(0, 2)}


def test_rematerialisation_stays_in_the_loop() -> None:
    step = programs.EXACT["remat in remat"]
    args = programs.arguments("", step)
    before = jax.make_jaxpr(step)(*args)
    after = jax.make_jaxpr(split_step(trace(step, *args), COUNT))(*args)

    def count(jaxpr: Any) -> int:
        inner = [j for e in jaxpr.eqns for j in jax.tree.leaves(e.params, is_leaf=is_jaxpr) if is_jaxpr(j)]
        mine = sum(e.primitive.name == jax_compat.REMAT for e in jaxpr.eqns)
        return mine + sum(count(getattr(j, "jaxpr", j)) for j in inner)

    assert count(after.jaxpr) == count(before.jaxpr) > 1


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_effects_happen_once() -> None:
    seen: list[Any] = []

    def step(w: jax.Array, b: Any) -> Any:
        losses = (b["x"] @ w) ** 2
        jax.debug.callback(lambda x: seen.append(x.shape), losses)
        return w - jax.grad(lambda w: jnp.mean((b["x"] @ w) ** 2))(w), losses.sum()

    args = jnp.ones(3), {"x": jnp.ones((8, 3))}
    traced = trace(step, *args)
    jax.block_until_ready(jit(split_step(traced, COUNT))(*args))
    jax.effects_barrier()
    assert seen == [(8,)]


def test_programs_can_be_traced_separately() -> None:
    """The loop can be planned for a mesh: traced, it has the phases and the user's lines of the step."""
    step = programs.EXACT["remat"]
    args = programs.arguments("", step)
    divided = split_step(trace(step, *args), COUNT)
    step_programs, accumulation = divided.programs, divided.split.loops[0]
    outer = jax.eval_shape(step_programs.prologue, jax.tree.leaves(args))
    blocks = jax.eval_shape(lambda leaves: step_programs.blocks(leaves, 0), jax.tree.leaves(args))
    loop = trace(
        lambda outer, blocks, k: step_programs.loop_body(accumulation, outer, blocks, k), outer, blocks, jnp.int32(0)
    ).graph
    assert {op.phase for op in loop.walk() if op.name == "dot_general"} == {"forward", "backward"}
    assert all(op.source.startswith("batch_programs.py") for op in loop.walk() if op.name == "dot_general")
    assert [loop.type_of(a).shape for a in loop.outputs] == [
        step_programs.graph.types[t.value].shape for t in accumulation.totals
    ]


@pytest.mark.parametrize(("start", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_sum_in_a_carry_starts_from_zero(start: float, share: float) -> None:
    """From anything else it would be counted once per microbatch: that loop runs on the whole batch."""

    def step(w: jax.Array, b: Any) -> Any:
        added, _ = jax.lax.scan(lambda c, _: (c + jnp.sum(b["x"] @ w), None), jnp.full((), start), None, length=3)
        _, before = jax.lax.scan(lambda c, _: (jnp.sum(b["x"] @ w), c), jnp.full((), start), None, length=3)
        return added + before[0] + before[1]

    args = jnp.ones((3, 2)), {"x": jnp.arange(24.0).reshape(8, 3)}
    traced = trace(step, *args)
    divided = split(traced.graph, COUNT, (1,), min_loop_share=0.0)
    assert divided.loop_share == share
    assert StepPrograms(divided).step(jax.tree.leaves(args))[0] == step(*args)


def test_neighbouring_examples_stay_together_where_the_step_mixes_them() -> None:
    """A microbatch of one example of each of eight shards would tear groups of four apart."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return (jnp.cumsum((x @ w).reshape(8, 4, -1), axis=1) ** 2).sum()

        return w - jax.grad(loss)(w)

    graph = trace(step, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 8), (32, 16)))).graph
    divided = split(graph, 4, shards=8)
    assert divided.loop_share == 1.0
    assert [state.outer for state in divided.batch.values()] == [1]


def test_a_batch_in_shards_stays_on_its_devices() -> None:
    """Dealt to microbatches shard by shard, no example moves: the only collectives are sums."""

    def step(w: jax.Array, b: Any) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(b["x"] @ w) ** 2))(w)
        return w - grad, value

    args = jnp.ones((4, 4)) / 3, {"x": jnp.arange(128.0).reshape(32, 4) / 128}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    across, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (["data"], []))

    def moves(shards: int) -> int:
        divided = split_step(trace(step, *args), COUNT, shards=shards)
        compiled = jax.jit(divided, in_shardings=(whole, across)).lower(*args).compile()
        assert_close(compiled(*args), step(*args))
        return sum(compiled.as_text().count(f" {kind}(") for kind in ("all-gather", "all-to-all", "collective-permute"))

    assert moves(8) == 0 < moves(1)


def test_a_group_of_examples_is_whole_in_a_microbatch() -> None:
    """The groups are rows of activations, not of the batch: the standard deviation over a group goes to each of its 4
    examples, a quarter of the batch apart."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            hidden = jnp.tanh(x @ w)
            deviation = hidden.reshape(4, -1, 8).std(axis=0).mean(axis=1, keepdims=True)
            return jnp.mean(jnp.concatenate([hidden, jnp.tile(deviation, (4, 1))], axis=1) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    args = jnp.eye(8) / 3, jnp.sin(jnp.arange(128.0)).reshape(16, 8)
    for count in (2, 4):
        assert_close(split_step(trace(step, *args), count)(*args), step(*args))
    with pytest.raises(MicrobatchError, match="does not fall into 8 microbatches"):
        split_step(trace(step, *args), 8)
