"""The zoo: every toy trains, sizes match their sources, names are found or refused with the alternatives."""

from __future__ import annotations

import fnmatch
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import ArgumentError
from autopar.zoo import TOYS, build, names
from autopar.zoo.moe import balance, route
from autopar.zoo.table import FAMILIES
from tests.support.effort import ALL, sample

GPT_FORMULA = {  # Alpa: L (12 D^2 + 11 D) + V (D + 1), as printed by its benchmark suite
    "125m": 124408832,
    "350m": 354740224,
    "760m": 758577152,
    "1.3b": 1313409024,
    "2.6b": 2648606720,
    "6.7b": 6653659136,
    "15b": 15364392960,
    "39b": 39078512640,
    "76b": 76028569600,
}
MOE_FORMULA = {
    "380m": 383506688,
    "690m": 685717760,
    "1.3b": 1346827520,
    "2.4b": 2382961920,
    "7.1b": 7069615360,
    "10b": 10169642240,
    "27b": 26648100096,
    "70b": 70415219968,
    "140b": 139153571072,
}


def types(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def paths(tree):
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in _leaves(tree)]


def _leaves(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


# Code that runs twice need not be fast: this halves the time that XLA takes to compile it.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


#: Families of which a toy is trained with one layer: each layer is compiled anew, and trains like the others.
ONE_LAYER = () if ALL else ("bert", "clip", "ctc", "mamba", "speech", "vit")


def toy(target):
    """The model of a toy that is trained."""
    return build(target, layers=1 if target.removesuffix("-toy") in ONE_LAYER else None)


@cache
def start(target):
    """(state, batch) of a toy before training."""
    model = toy(target)
    return jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))


@cache
def two_steps(target):
    """(state after one step, state after two, the two losses) of a toy, compiled once for all tests."""
    state, batch = start(target)
    step = jit(toy(target).step)
    after, first = step(state, batch)
    final, second = step(after, batch)
    return after, final, (float(first["loss"]), float(second["loss"]))


@pytest.mark.parametrize("target", TOYS)
def test_toy_trains_two_steps(target):
    after, final, losses = two_steps(target)
    assert np.isfinite(losses[0])
    assert losses[1] < losses[0]
    assert types(final) == types(after)


@pytest.mark.parametrize("target", TOYS)
def test_abstract_arguments_are_those_of_real_ones(target):
    model = build(target)
    state, batch = model.abstract_args()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((state, batch)))
    assert types(batch) == types(model.make_batch(jax.random.key(0)))
    after, metrics = jax.eval_shape(model.step, state, batch)
    assert types(after) == types(state)
    assert metrics["loss"].shape == ()


def test_toys_are_known_names_with_suffixes():
    assert all(any(toy == name or toy.startswith(f"{name}-") for name in names()) for toy in TOYS)


@pytest.mark.parametrize(
    ("target", "least", "most"),
    [("moe-380m", 12, 12.01), ("moe-380m-adafactor", 4, 4.2), ("wresnet-250m", 12, 12.1), ("wresnet-250m-sgd", 8, 8.1)],
)
def test_state_has_the_bytes_per_parameter_of_its_optimizer(target, least, most):
    model = build(target)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.abstract_args()[0]))
    assert least <= nbytes / model.parameters() <= most


@pytest.mark.parametrize("size", GPT_FORMULA)
def test_gpt_has_the_parameters_of_its_source(size):
    config = FAMILIES["gpt"].sizes[size]
    tied = build(f"gpt-{size}-tied-scan").parameters()
    assert tied == pytest.approx(GPT_FORMULA[size], rel=0.01)
    # What the formula leaves out: positions, the last norm, a bias per block; and it has one on the output.
    missing = config.seq * config.width + 2 * config.width + config.layers * config.width - config.vocab
    assert tied - GPT_FORMULA[size] == missing
    assert build(f"gpt-{size}-scan").parameters() == tied + config.vocab * config.width


@pytest.mark.parametrize("size", MOE_FORMULA)
def test_moe_has_the_parameters_of_its_source(size):
    assert build(f"moe-{size}-tied-scan").parameters() == pytest.approx(MOE_FORMULA[size], rel=0.01)


@pytest.mark.parametrize(
    ("target", "billions", "tolerance"),
    [
        ("llama3-8b-scan", 8.03, 0.001),
        ("llama3-70b-scan", 70.55, 0.001),
        ("gpt-3m", 0.003, 0.15),
        ("gpt-10m", 0.010, 0.15),
        ("vit-b16", 0.0864, 0.01),
        ("mlp-1b", 1.074, 0.001),
        ("bert-base", 0.110, 0.01),
        ("bert-large", 0.340, 0.02),  # the paper's, which counts generously; other implementations have 336M
        ("t5-base", 0.220, 0.02),
        ("t5-large", 0.770, 0.05),  # the paper's; its checkpoints have 737,668,096
        ("speech-small", 0.244, 0.02),
        ("speech-large", 1.550, 0.01),
        ("clip-b32", 0.151, 0.01),
        ("clip-l14", 0.428, 0.01),
        ("resnet-50", 0.0256, 0.01),
        ("resnet-101", 0.0445, 0.01),
        ("ctc-medium", 0.0307, 0.11),  # the paper's with an LSTM decoder, which is not there
        ("ctc-large", 0.1188, 0.03),
    ],
)
def test_size_is_as_its_name_says(target, billions, tolerance):
    assert build(target).parameters() / 1e9 == pytest.approx(billions, rel=tolerance)


@pytest.mark.parametrize(
    ("target", "published", "missing"),
    [
        ("bert-base", 110_106_428, 12 * 768),
        ("bert-large", 336_226_108, 24 * 1024),
        ("t5-base", 222_903_552, 0),
        ("t5-large", 737_668_096, 0),
        ("speech-small", 241_734_912, 1500 * 768),
        ("speech-large", 1_543_490_560, 1500 * 1280),
        ("mamba-130m-tied", 129_135_360, 0),
        ("mamba-2.8b-tied", 2_768_345_600, 0),
        ("clip-b32", 151_277_313, 12 * (768 + 512)),
        ("clip-l14", 427_616_513, 24 * 1024 + 12 * 768),
        ("resnet-50", 25_557_032, 0),
        ("resnet-101", 44_549_160, 0),
    ],
)
def test_parameters_are_those_of_published_checkpoints(target: str, published: int, missing: int):
    """All of them, less key biases (bert, clip) and the positions of the encoder, which are not trained (speech)."""
    assert build(target).parameters() == published - missing


@pytest.mark.parametrize(("target", "short"), [("gpt-125m", "f16"), ("moe-380m", "f16"), ("llama3-8b", "bf16")])
def test_mixed_precision_keeps_float32_state_and_computes_in_half(target: str, short: str):
    model = build(target, layers=2, batch=2)
    state, batch = model.abstract_args()
    floats = {str(leaf.dtype) for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats == {"float32"}
    products = [
        line for line in str(jax.make_jaxpr(model.step)(state, batch)).splitlines() if " = dot_general[" in line
    ]
    assert products
    assert all(f":{short}[" in line for line in products)


@pytest.mark.parametrize("target", [name for name in TOYS if name != "ctc-toy"])
def test_float64_reaches_every_float(target):
    """But for what Optax says in zeros and ones: `ctc_loss` has repeated labels in float32."""
    with jax.enable_x64(True):
        model = build(target, dtype="float64")
        jaxpr = jax.make_jaxpr(model.step)(*model.abstract_args())
    assert not narrow_floats(jaxpr.jaxpr)


def narrow_floats(jaxpr):
    """Every value that is a float but not float64, in the jaxpr and all that it calls."""
    values = [*jaxpr.invars, *(out for equation in jaxpr.eqns for out in equation.outvars)]
    narrow = [str(v.aval) for v in values if str(v.aval).startswith(("float32", "bfloat16", "float16"))]
    for equation in jaxpr.eqns:
        for param in jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                narrow += narrow_floats(inner)
    return narrow


def test_float64_without_64_bit_mode_is_refused():
    with pytest.raises(ArgumentError, match="JAX_ENABLE_X64"):
        build("gpt-toy", dtype="float64")


SCANNED = ("gpt", "llama3", "mamba", "moe", "mlp", "vit", "rnn", "bert", "t5", "speech", "clip", "ctc")


@pytest.mark.parametrize("family", sample(SCANNED, ["gpt", "llama3", "moe", "mlp", "rnn", "t5"]))
def test_scanned_and_unrolled_losses_agree(family):
    state, batch = start(f"{family}-toy")
    scanned = build(f"{family}-toy-scan", layers=2)
    loss = loss_of(scanned)(stacked(scanned, state), batch)
    np.testing.assert_allclose(loss, two_steps(f"{family}-toy")[2][0], rtol=1e-6)


def stack(params):
    """Unrolled parameters in the form of the scanned model."""
    return jax.tree.map(_stack, params, is_leaf=lambda node: isinstance(node, tuple))


def _stack(node):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *node) if isinstance(node, tuple) else node


def stacked(scanned, state):
    """The scanned model's state with the unrolled model's parameters, before the first update."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), scanned.abstract_args()[0]["opt"])
    return {"params": stack(state["params"]), "opt": zeros}


def loss_of(model):
    """The forward pass alone: what else the step computes is dead code."""
    return jit(lambda state, batch: model.step(state, batch)[1]["loss"])


def test_scanned_and_unrolled_updates_agree():
    state, batch = start("gpt-toy")
    scanned = build("gpt-toy-scan", layers=2)
    params = jit(scanned.step)(stacked(scanned, state), batch)[0]["params"]
    expected = stack(two_steps("gpt-toy")[0]["params"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, expected)


@pytest.mark.parametrize("target", ["gpt-toy", "gpt-toy-scan"])
def test_rematerialised_training_is_the_same(target):
    after, final, losses = two_steps(target)
    also_after, also_final, also_losses = two_steps(f"{target}-remat")
    np.testing.assert_allclose(also_losses, losses, rtol=1e-6)
    close = partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, (also_after["params"], also_final["params"]), (after["params"], final["params"]))


def test_the_same_key_gives_the_same_state_and_batch():
    first, two = build("mlp-toy"), build("mlp-toy-remat")
    key = jax.random.key(3)
    jax.tree.map(np.testing.assert_array_equal, first.init(key), two.init(key))
    jax.tree.map(np.testing.assert_array_equal, first.make_batch(key), two.make_batch(key))


def test_overrides_replace_dimensions():
    _, batch = build("llama3-8b", layers=1, batch=4, seq=128).abstract_args()
    assert batch["tokens"].shape == (4, 128)
    assert build("gpt-toy", layers=5).parameters() - build("gpt-toy", layers=4).parameters() == 12 * 32**2 + 12 * 32


@pytest.mark.parametrize("target", [name for name in TOYS if build(name).megatron])
def test_megatron_table_names_parameters_and_fits_their_ranks(target):
    model = build(target)
    params = paths(model.abstract_args()[0]["params"])
    for glob, spec in model.megatron:
        matching = [(path, leaf) for path, leaf in params if fnmatch.fnmatch(f"params/{path}", glob)]
        assert matching or (glob == "*/head" and "tied" in target), glob
        for path, leaf in matching:
            assert len(spec) == leaf.ndim, (path, spec, leaf.shape)


def test_a_tie_between_experts_and_full_experts_drop_tokens():
    gates = jnp.array([[[0.6, 0.4, 0.0], [0.7, 0.3, 0.0], [0.2, 0.0, 0.8]]])
    combine = route(gates, capacity=2)
    np.testing.assert_allclose(combine[0].sum((1, 2)), [1.0, 1.0, 1.0], rtol=1e-6)
    # The third token's second choice, expert 0, has no slot left: all its weight goes to expert 2.
    np.testing.assert_allclose(combine[0, 2].sum(-1), [0.0, 0.0, 1.0], atol=1e-6)
    assert int((combine[0] > 0).sum(0).max()) == 1  # no slot is used twice


def test_balance_is_one_when_even_and_experts_when_not():
    even = jnp.eye(4)[None]
    assert float(balance(even)) == pytest.approx(1.0)
    assert float(balance(jnp.zeros((1, 4, 4)).at[..., 0].set(1.0))) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("gpt-2.7b"), "unknown zoo target 'gpt-2.7b'; known, closest first: gpt-2.6b, "),
        (lambda: build("scan"), "unknown zoo target 'scan'; known, closest first: "),
        (lambda: build("mlp-toy", seq=4), "'mlp-toy' takes no 'seq'; it takes: layers, batch, precision, scan, remat"),
        (lambda: build("wresnet-1b-scan"), "'wresnet-1b-scan' takes no 'scan'; it takes: batch, precision, remat"),
        (lambda: build("gpt-toy", batch=0), "batch=0 of 'gpt-toy' must be at least 1"),
        (lambda: build("gpt-toy", dtype="int32"), "dtype='int32' is not floating"),
        (lambda: build("gpt-toy", dtype="float31"), "dtype='float31' is no dtype"),
        (lambda: build("moe-toy", layers=3), "layers=3 of 'moe-toy' must be even"),
    ],
)
def test_a_wrong_call_is_refused_with_the_alternatives(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert message in str(caught.value)


def test_a_missing_library_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "equinox", None)
    monkeypatch.delitem(sys.modules, "autopar.zoo.libraries.equinox_mlp", raising=False)
    with pytest.raises(ArgumentError, match=r"autopar\[zoo\]"):
        build("equinox-toy", batch=7)  # no other test builds this one, so no model is remembered
