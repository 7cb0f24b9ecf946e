"""Where the models of what compilers fuse answer differently about one operation or value: listed, and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost_models.compiler import fusion
from autopar.cost_models.compiler.backends import CPU, GPU, TPU, Backend
from autopar.cost_models.compiler.flatten import flatten
from autopar.cost_models.compiler.fusion import BYTES_ACCESSED, KERNEL, LIGHT, LOOP, PRODUCT, REDUCTION, SECONDS, STORE
from autopar.cost_models.compiler.hbm_traffic import values_in_memory
from autopar.cost_models.compiler.written_values import Written, written
from autopar.hardware.description import Device
from autopar.ir import op_sets
from autopar.ir.graph import Graph, Op
from autopar.ir.trace import trace
from autopar.zoo import targets

DEVICE = Device("plain", {"float32": 1e12}, 1e11, 2**30)
NAMES = {name for key, names in vars(op_sets).items() if key.isupper() for name in names}

#: Kernels of compilers that count as light in bytes accessed, with what is another name for its operand in memory.
LIGHT_IN_BYTES = {
    *{*op_sets.CUMULATIVE_REDUCTIONS} - {"cumsum"},
    *("reduce_window_min", "scatter-mul", "scatter-min", "scatter-max"),
    *(*op_sets.LAPACK, *op_sets.KERNEL_CALLS, *op_sets.ATTENTION, *op_sets.CALLBACKS, *op_sets.RARE_ELEMENTWISE),
    *(*op_sets.RESHAPES, "copy"),
}


@pytest.mark.parametrize("backend", [CPU, GPU, TPU], ids=lambda b: b.name)
def test_kinds_of_operations_differ_where_it_is_stated(backend: Backend) -> None:
    kinds = {name: (_kind(backend.fusion, name), _kind(BYTES_ACCESSED, name)) for name in NAMES}
    different = {name: both for name, both in kinds.items() if both[0] != both[1]}
    assert different == {
        **dict.fromkeys(LIGHT_IN_BYTES, (KERNEL, LIGHT)),
        **dict.fromkeys(op_sets.XLA_RAGGED_PRODUCTS, (PRODUCT, KERNEL)),
    }


def _kind(model: fusion.Fusion, name: str) -> str:
    return model.kinds.get(name, model.unlisted)


def test_readers_differ_where_it_is_stated() -> None:
    """The table in the docstring of the module; "any" is None."""
    rows = {
        kind: [_most(m, kind) for m in (SECONDS, BYTES_ACCESSED, fusion.CPU, fusion.GPU, fusion.TPU)] for kind in KINDS
    }
    assert rows == KINDS


#: Kind of readers -> how many compute a light value, in seconds, in bytes, on CPU, on GPU and on TPU.
KINDS: Mapping[str, list[float | None]] = {
    LIGHT: [1, None, None, None, None],
    REDUCTION: [0, None, None, None, None],
    PRODUCT: [0, 1, 0, 0, None],
    KERNEL: [0, 0, 0, 0, 0],
    LOOP: [0, 0, 0, 0, 0],
    STORE: [0, 0, None, None, None],
}


def _most(model: fusion.Fusion, kind: str) -> float | None:
    most = model.readers.get(kind, 0)
    return None if most == float("inf") else most


def shared(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = jnp.tanh(a)
    return half @ b, b @ half


def chain(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(a @ b * 2) + a)


def gathered(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sort(a * 2)[jnp.arange(8) * 2] @ b + jnp.cumsum(b)[:8, None]


SQUARES = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
PROGRAMS: Mapping[str, Callable[..., Any]] = {"shared": shared, "chain": chain, "gathered": gathered}


@pytest.mark.parametrize("name", [*PROGRAMS, "gpt-toy", "moe-toy"])
def test_what_memory_takes_to_be_fused_is_no_traffic(name: str) -> None:
    """On GPU never; on TPU but for what several products read and what is made in a product's kernel."""
    fn, args = (PROGRAMS[name], SQUARES) if name in PROGRAMS else targets.load(name)
    graph = trace(fn, *args).graph
    stage = autopar.plan(fn, *args, mesh=(1,), progress=False).stages[0]
    counted = values_in_memory(graph, stage, (), DEVICE)
    assert counted
    assert not [*_fused_away(graph, GPU, counted)]
    for v, op, w in _fused_away(graph, TPU, counted):
        by = Counter(BYTES_ACCESSED.kind(use.op) for use in graph.uses[v] if use.op is not None)
        several = by[PRODUCT] > 1 and not TPU.fusion.is_written(by)
        assert several or v in w.absorbed or TPU.fusion.kind(op) != BYTES_ACCESSED.kind(op), (v, op.name, by)


def _fused_away(graph: Graph, backend: Backend, values: frozenset[int]) -> Iterator[tuple[int, Op, Written]]:
    """Those of the values that get no memory of their own on a backend, and what makes them."""
    program = flatten(graph, backend, {})
    w = written(program)
    for v in values:
        shown = program.root(v)
        if isinstance(shown, int) and program.behind(shown) not in w.values:
            yield v, graph.producers[v], w


ACTIVATIONS = (
    *("celu", "elu", "gelu", "glu", "hard_sigmoid", "hard_silu", "hard_tanh", "identity", "leaky_relu"),
    *("log_sigmoid", "log_softmax", "logsumexp", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign"),
    *("softmax", "softplus", "sparse_plus", "sparse_sigmoid", "squareplus", "standardize", "tanh"),
)


@pytest.mark.core
@pytest.mark.parametrize("name", [*ACTIVATIONS, "gelu of erf"])
def test_activations_and_their_derivatives_consist_of_what_compilers_fuse(name: str) -> None:
    """A release of JAX that writes a derivative with a new primitive shows here."""
    function = getattr(jax.nn, name.partition(" ")[0])
    options = {"approximate": False} if " " in name else {}
    value = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    graph = trace(jax.value_and_grad(lambda x: function(x, **options).sum()), value).graph
    kernels = {op.name for op in graph.walk() if _kind(CPU.fusion, op.name) == KERNEL}
    assert kernels <= {*op_sets.RESHAPES, "copy"}  # these are other names of their operands
