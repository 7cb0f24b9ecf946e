"""bench fuzz: programs as data, what counts as equal, shrinking, and a hundred programs in microbatches."""

from __future__ import annotations

import json
import warnings

import jax
import numpy as np
import pytest

from autopar.bench import worker
from autopar.bench.fuzz import campaign, case, compare, noise, shrink
from autopar.bench.fuzz.generator.generate import program
from autopar.bench.fuzz.program import Block, Leaf, Node, Program, Type, load
from autopar.errors import ArgumentError
from tests.bench.fuzz_faults import FAULTS, put_back
from tests.support.effort import sample


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Programs

F8 = Type("float64", (8, 2))
LEAVES = (
    Leaf("w", "params", "np.ones(2)", Type("float64", (2,))),
    Leaf("x", "batch", "rng.normal(size=(8, 2))", F8),
)


def step(*nodes, results=(("metrics/m", "m"),), batch=(1,)):
    types = {"w": LEAVES[0].type, "x": F8, "a": F8, "b": F8, "c": F8}
    return Program(0, LEAVES, Block("step", ("w", "x"), nodes, tuple(n for _, n in results)), results, batch, types)


DOUBLED = step(
    Node(("a",), "{0} * 2", ("x",)),
    Node(("b",), "jax.jit({b0})({0})", ("a",), (Block("f", ("c",), (Node(("d",), "{0} + {1}", ("c", "w")),), ("d",)),)),
    Node(("m",), "jnp.sum({0}, 0)", ("b",)),
)


def test_a_program_is_its_source():
    assert DOUBLED.source() == (
        "def step(state, batch):\n"
        '    w = state["params"]["w"]\n'
        '    x = batch["x"]\n'
        "    a = x * 2\n"
        "    def f(c):\n"
        "        d = c + w\n"
        "        return d\n"
        "    b = jax.jit(f)(a)\n"
        "    m = jnp.sum(b, 0)\n"
        '    return {"params": {}, "counters": {}}, {"m": m}\n'
        "\n\n"
        "def arguments(rng):\n"
        "    w = np.ones(2)  # float64[2]\n"
        "    x = rng.normal(size=(8, 2))  # float64[8, 2]\n"
        '    return {"params": {"w": w}, "counters": {}}, {"x": x}\n'
    )


def test_a_source_runs():
    loaded = load(DOUBLED.source(), 3)
    x = np.random.default_rng(3).normal(size=(8, 2))
    np.testing.assert_allclose(loaded.function(*loaded.arguments)[1]["m"], (2 * x + 1).sum(0))


def test_equal_seeds_give_equal_programs():
    assert program(5) == program(5)
    assert program(5).source() != program(6).source()


def test_small_programs_are_part_of_what_seeds_give():
    assert len(list(shrink.nodes(program(7, 1).block))) <= len(list(shrink.nodes(program(7, 3).block)))


# Equal or not


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        (np.array([1.0, 4.0]), np.array([1.0, 5.0]), 0.2),
        (np.array([np.nan, 1.0]), np.array([np.nan, 1.0]), 0.0),
        (np.array([np.inf, 1.0]), np.array([np.inf, 1.0]), 0.0),
        (np.array([np.inf, 1.0]), np.array([-np.inf, 1.0]), np.inf),
        (np.array([np.nan, 1.0]), np.array([0.0, 1.0]), np.inf),
        (np.array([3]), np.array([4]), np.inf),
        (np.array([True]), np.array([True]), 0.0),
        (np.array([3], np.int32), np.array([3], np.int64), np.inf),
        (np.zeros(2), np.zeros(3), np.inf),
        (np.array([1j]), np.array([2j]), 0.5),
    ],
)
def test_differences(ours, theirs, difference):
    assert compare.difference(ours, theirs) == pytest.approx(difference)


FLOAT8 = ("e5m2", "e4m3fn")


def test_keys_are_compared():
    assert compare.difference(jax.random.key(0), jax.random.key(0)) == 0
    assert compare.difference(jax.random.key(0), jax.random.key(1)) == np.inf


def test_a_leaf_that_differs_from_itself_is_noise():
    """The sign of what is zero but for rounding has no digits to agree in; its argument has."""

    def steep(x):
        return x, jax.numpy.sign(x.sum() - 1.5)

    x = np.array([0.7, 0.3, 0.5])
    step_noise = noise.noise(jax.jit(steep), jax.make_jaxpr(steep)(x), (x,))
    assert step_noise.leaves[0] < 1e-13
    assert step_noise.leaves[1] >= 1
    assert compare.unequal(("x", "sign"), (x + 1e-3, np.float64(1)), (x, np.float64(-1)), lambda: step_noise) == {
        "x": pytest.approx(1e-3 / 0.7)
    }


def test_a_sum_of_terms_that_cancel_is_noise():
    """Its last digits are those of the terms, and change with the order of the sum, whatever the arguments do."""

    def cancelled(x):
        return jax.numpy.tanh(x).sum(), jax.numpy.floor(x).sum()

    x = np.array([7.2, -7.2, 7.5, -7.4, 7.7, -7.8])
    step_noise = noise.noise(jax.jit(cancelled), jax.make_jaxpr(cancelled)(x), (x,))
    assert step_noise.explains(0, 1e-9)
    assert not step_noise.explains(0, 1e-3)
    assert not step_noise.explains(1, 1e-9)


def test_a_sum_in_float32_is_noise_as_a_float64():
    """Devices and microbatches add its terms in another order. Whole numbers below 2**24 are exact in any."""

    def summed(x):
        return (
            jax.numpy.sum(x).astype("float64"),
            jax.numpy.sum(jax.numpy.round(x)).astype("float64"),
            x[0].astype("float64"),
        )

    x = np.array([7.25, 0.1, 3.3], np.float32)
    with jax.enable_x64(True):
        step_noise = noise.noise(jax.jit(summed), jax.make_jaxpr(summed)(x), (x,))
    assert [step_noise.explains(leaf, 1e-7) for leaf in range(3)] == [True, False, False]


def test_a_sum_in_float8_is_noise_as_a_float64():
    """Its last place is a quarter or an eighth of it."""

    def summed(x):
        return [jax.lax.reduce_sum_p.bind(x.astype(f"float8_{f}"), axes=(0,)).astype("float64") for f in FLOAT8]

    for x, noisy in ((np.array([7.25, 0.1, 3.3]), True), (np.array([1.0, 2, 1]), False)):
        step_noise = noise.noise(jax.jit(summed), jax.make_jaxpr(summed)(x), (x,))
        assert [step_noise.explains(leaf, 0.1) for leaf in range(len(FLOAT8))] == [noisy] * len(FLOAT8)


def test_whole_floats_whose_partial_sums_are_rounded_are_noise():
    """Integers beyond 2**24 less their mean, which is taken in float32: the sum is whole in any order, but another."""

    def residue(x):
        return x - jax.numpy.mean(x).astype(x.dtype)

    with jax.enable_x64(True):
        for largest, noisy in ((2**31, True), (2**16, False)):
            x = np.random.default_rng(0).integers(-largest, largest, 16).astype(np.int32)
            step_noise = noise.noise(jax.jit(residue), jax.make_jaxpr(residue)(x), (x,))
            assert step_noise.explains(0, np.inf) == noisy


def test_whole_floats_that_are_rounded_are_noise():
    """Integers beyond 2**53 less their mean: what is left changes with the order in which the mean was summed."""

    def residue(x):
        return (x - jax.numpy.mean(x).astype(x.dtype)).sum()

    for largest, noisy in ((2**62, True), (2**40, False)):
        x = np.random.default_rng(0).integers(-largest, largest, 64)
        step_noise = noise.noise(jax.jit(residue), jax.make_jaxpr(residue)(x), (x,))
        assert step_noise.explains(0, np.inf) == noisy


def test_a_sum_of_fractions_that_is_whole_by_rounding_is_noise():
    """22 is a sum of thirds, or nearly so in another order; as a sum of whole numbers it is exact."""

    def truncated(x):
        return jax.numpy.sum(x / 3).astype(jax.numpy.int32), (jax.numpy.sum(x) / 3).astype(jax.numpy.int32)

    x = np.array([5.0, 3, 0, 3, 7, 6, 5, 3, 6, 2, 4, 4, 5, 4, 5, 4])
    step_noise = noise.noise(jax.jit(lambda x: truncated(jax.numpy.round(x))), jax.make_jaxpr(truncated)(x), (x,))
    assert [step_noise.explains(leaf, np.inf) for leaf in (0, 1)] == [True, False]


def thirds(x):
    """Thirds of integers whose sum is 27 add up to 9, or to just less: truncated to 9 or 8, sixteen times."""
    rows = jax.numpy.broadcast_to(jax.numpy.float64(x), (16, *x.shape)) / 3
    return jax.numpy.sum(jax.numpy.sum(rows, 1).astype(jax.numpy.int32), dtype=jax.numpy.int32)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: jax.lax.scan(lambda c, y: (c + thirds(x), y), 0, x, reverse=True)[0],
        lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, thirds(x)), (0, jax.numpy.int32(0)))[1],
        lambda x: jax.lax.cond(x[0] > 0, thirds, lambda x: x[0], x),
        lambda x: jax.checkpoint(jax.jit(thirds))(x),
    ],
    ids=["scan", "while", "cond", "calls"],
)
def test_noise_inside_bodies(body):
    """What is truncated where a sum is a whole number but for rounding; the arguments are integers and do not move."""
    x = np.array([1, 2, 4, 1, 7, 2, 5, 4, 1], np.int32)
    step_noise = noise.noise(jax.jit(body), jax.make_jaxpr(body)(x), (x,))
    assert step_noise.explains(0, np.inf)


def test_operations_one_by_one_are_the_step():
    """Bodies of every kind, nothing changed."""
    taken, loaded = set(), [program(seed, 1).compiled() for seed in (9, 19)]
    for step in loaded:
        jaxpr = jax.make_jaxpr(step.function)(*step.arguments)
        ours = noise.one_by_one(jaxpr, jax.tree.leaves(step.arguments))
        theirs = jax.tree.leaves(jax.jit(step.function)(*step.arguments))
        assert max(compare.differences(ours, theirs)) < 1e-9
        taken |= {equation.primitive.name for equation in case._equations(jaxpr.jaxpr)}
    assert {"scan", "while", "cond", "custom_jvp_call", "remat2"} <= taken


def test_loops_under_vmap_one_by_one() -> None:
    """Each example goes round as often as it says."""

    def doubled(x, times):
        return jax.lax.while_loop(lambda c: c[1] > 0, lambda c: (c[0] * 2, c[1] - 1), (x, times))

    x, times = np.ones((3, 2)), np.array([0, 3, 1])
    jaxpr = jax.make_jaxpr(jax.vmap(doubled))(x, times)
    ours, left = noise.one_by_one(jaxpr, [jax.numpy.asarray(x), jax.numpy.asarray(times)])
    assert ours[:, 0].tolist() == [1.0, 8.0, 2.0]
    assert left.tolist() == [0, 0, 0]


# Shrinking


def test_shrinking_keeps_what_fails_alone():
    shrunk = shrink.shrunk(DOUBLED, lambda p: "jnp.sum" in p.source())
    assert [node.code for node in shrink.nodes(shrunk.block)] == [F8.zeros(), "jnp.sum({0}, 0)"]
    assert [leaf.name for leaf in shrunk.leaves] == ["x"]
    assert shrunk.batch == (1,)


def test_shrinking_opens_bodies():
    shrunk = shrink.shrunk(DOUBLED, lambda p: "+" in p.source())
    assert [node.code for node in shrink.nodes(shrunk.block) if "zeros" not in node.code][:1] == ["{0} + {1}"]
    assert "def f" not in shrunk.source()


def test_shrinking_ends_where_nothing_fails():
    assert shrink.shrunk(DOUBLED, lambda p: False) == DOUBLED


# A campaign


def row(seed, **more):
    return {"seed": seed, "ok": True, "failures": {}, "refusals": {}, "uncut": 0, "primitives": ["add"],
            "equations": 3, "seconds": {"microbatches": 0.5}, **more}  # fmt: skip


def test_a_campaign_resumes(monkeypatch, tmp_path):
    asked = []

    def lines(module, spec, env):
        asked.append(spec["seeds"])
        yield from (row(seed) for seed in list(spec["seeds"]))

    monkeypatch.setattr(worker, "lines", lines)
    kept = tmp_path / "rows.jsonl"
    kept.write_text(json.dumps(row(1)) + "\n")
    rows = campaign.run(campaign.Campaign(3, modes=("microbatches",)), kept)
    assert [r["seed"] for r in rows] == [0, 1, 2]
    assert asked == [[]]
    assert len(kept.read_text().splitlines()) == 3


def test_a_worker_that_dies_costs_one_program(monkeypatch):
    def lines(module, spec, env):
        for seed in list(spec["seeds"]):
            if seed == 1:
                raise worker.WorkerError("Aborted")
            yield row(seed)

    monkeypatch.setattr(worker, "lines", lines)
    heard = []
    rows = campaign.run(campaign.Campaign(4), tell=heard.append)
    assert [r["ok"] for r in rows] == [True, False, True, True]
    assert heard == ["FAIL seed 1, worker: Aborted"]
    assert "3 of 4 programs equal" in campaign.table(rows)


def test_unknown_modes_are_refused():
    with pytest.raises(ArgumentError, match=r"mode 'gpu' is not known\. Available: microbatches, stages, meshes"):
        campaign.Campaign(modes=("gpu",))


# Cases


def test_a_program_that_is_right():
    row = case.run(DOUBLED, ["microbatches"])
    assert row.ok
    assert not row.refusals
    assert {"add", "mul", "reduce_sum"} <= set(row.primitives)


def test_a_program_that_is_wrong(monkeypatch):
    """Every microbatch's part counts twice."""
    broken = {"2 microbatches": lambda case: jax.jit(lambda *args: jax.tree.map(lambda x: x * 2, case.plain(*args)))}
    monkeypatch.setattr(case, "PARALLEL", broken)
    assert case.outcome(DOUBLED, "2 microbatches") == "differs"


def test_a_refusal_is_no_failure():
    """A product of what is normalised over the batch."""
    refused = step(
        Node(("a",), "{0} / jnp.std({0}, 0) @ jnp.ones((2, 2))", ("x",)),
        Node(("m",), "jnp.sum(jnp.tanh({0} @ {0}.T), 0)", ("a",)),
    )
    row = case.run(refused, ["microbatches"])
    assert row.ok
    assert [reason.split(":")[0] for reason in row.refusals.values()] == ["MicrobatchError"] * 2


# Random programs

SEEDS, PARTS = range(300), 6


@pytest.mark.parametrize("part", sample(range(PARTS), (0, 3)))
def test_random_programs_in_microbatches(part):
    """Small ones, each in 2 or in 4 microbatches, for time: compiling them is all that it takes."""
    seeds = SEEDS[part::PARTS]
    rows = [case.run(program(seed, 1), ["microbatches"], counts=(2 + 2 * (seed // PARTS % 2),)) for seed in seeds]
    assert {r.seed: r.failures for r in rows if r.failures} == {}
    assert sum(bool(r.refusals) for r in rows) <= len(rows) * 0.16  # of fifty; one in ten of many
    assert len({name for r in rows for name in r.primitives}) >= 80


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_in_stages_and_on_meshes(seed):
    row = case.run(program(seed, 1), ["stages", "meshes"])
    assert not row.failures
    assert not row.uncut


@pytest.mark.parametrize(
    ("title", "seed"),
    [
        ("a sum that wraps is converted before it is complete", 17),
        ("or and and of integers over the batch are max and min", 44),
        ("the second loop does not see a total that it reads as it is", 390),
    ],
)
def test_faults_put_back_are_found(title, seed):
    """The quickest of `tests.bench.fuzz_faults`; the seeds are the first that find them there."""
    (fault,) = [fault for fault in FAULTS if fault.title == title]
    with put_back(fault):
        assert case.run(program(seed, 1), [fault.mode]).failures
