"""Sets of operations hold names that JAX has, and those that are written out have none in common."""

from __future__ import annotations

import gc
import importlib
import itertools

import pytest
from jax.extend.core import Primitive

from autopar.ir import op_sets

pytestmark = pytest.mark.core

#: Modules that define primitives when they are imported, which `import jax` does not do.
MODULES = (
    *("jax.experimental.custom_partitioning", "jax.experimental.pallas", "jax.experimental.xla_metadata", "jax.ffi"),
    *("jax._src.tpu_custom_call", "autopar.jax_compat.megablox"),
)

#: Primitives of JAX 0.12 that 0.10 lacks.
NEWER = {"eval_jaxpr", "log2", "one_minus_square", "polynomial"}
#: Primitives of JAX 0.10 that 0.12 lacks.
OLDER = {"closed_call"}

#: Sets that are written out and have no primitive in common; all others are unions or parts of them.
DISJOINT = (
    *("PRODUCTS", "XLA_RAGGED_PRODUCTS", "MEGABLOX_PRODUCTS", "NUMERIC_REDUCTIONS", "LOGICAL_REDUCTIONS"),
    *(
        "INDEX_REDUCTIONS",
        "CUMULATIVE_REDUCTIONS",
        "WINDOW_REDUCTIONS",
        "ADDITIONS",
        "ARITHMETIC",
        "COMPARISONS",
        "BITWISE",
        "SELECTIONS",
    ),
    *("COMPLEX_PARTS", "CASTS", "COSTLY", "RARE_ELEMENTWISE", "RESHAPES", "REORDERINGS", "BROADCASTS", "SLICES"),
    *("JOINS", "SCATTERS", "LAPACK", "KERNEL_CALLS", "ATTENTION", "RETURNING_CALLBACKS"),
)

#: Set -> the set that holds it.
PARTS = {"SINES": "COSTLY", "CHEAP": "ELEMENTWISE", "RETURNING_CALLBACKS": "CALLBACKS", "PRODUCTS": "ALL_PRODUCTS"}

#: Module -> its tables that are derived from the sets, or add names to them.
DERIVED = {
    "codegen.partial_sums": ("SPLITS",),
    "codegen.start_indices": ("_STARTS",),
    "cost_models.compiler.compiled_program": ("OVERWRITES", "IN_PLACE_OPERAND", "RENAMINGS", "COMMUTATIVE"),
    "cost_models.compiler.cpu_kernels": ("_UNKNOWN",),
    "cost_models.compiler.fusion": ("MOVES", "KINDS", "KERNELS"),
    "cost_models.compiler.simplifications": ("_TABLE",),
    "cost_models.kernels": ("KERNELS",),
    "cost_models.reductions": ("REDUCTIONS",),
    "ir.jaxpr": ("SAME_VALUES",),
    "jax_compat": ("INLINED_CALLS",),
    "passes.microbatch.analysis": ("_OPAQUE",),
    "passes.microbatch.constant_indices": ("_FOLDED",),
    "passes.microbatch.programs": ("_VIEWS",),
    "passes.microbatch.slice_pushdown": ("_DIM_CREATORS",),
    "passes.microbatch.rules.table": ("RULES",),
    "passes.op_groups.merge": ("ANCHORS", "NEVER_FREE", "WINDOWED", "SUMS"),
    "passes.op_groups.unreduced": ("SUMS", "DOTS", "SPLIT", "LINEAR"),
    "passes.stages.assign": ("NOT_DUPLICATED",),
    "passes.stages.updates": ("SHAPE_OPS",),
    "plans.imbalance": ("MOVES",),
    "rules": ("OPAQUE", "COMBINABLE", "GATHERED_BY_XLA", "SHARD_MAPPED"),
    "rules.inherent": ("REASONS",),
    "rules.own": ("OWN_RULES",),
    "verification.dataflow": ("SAME_DATA", "UNIFORM"),
    "verification.lowering_tpu": ("REARRANGING",),
    "verification.targets": ("LOWERED_FOR_DEVICES",),
}


@pytest.fixture(scope="module")
def primitives() -> set[str]:
    """Names of all primitives of JAX."""
    modules = [importlib.import_module(name) for name in MODULES]
    names = {o.name for o in gc.get_objects() if isinstance(o, Primitive)}
    assert len(modules) == len(MODULES)
    assert {"add", "pallas_call", "custom_partitioning", "ffi_call", "tpu_custom_call"} <= names
    return names | NEWER | OLDER


SETS = {name: frozenset[str](value) for name, value in vars(op_sets).items() if name.isupper()}


@pytest.mark.parametrize(("name", "names"), SETS.items())
def test_jax_has_every_primitive_of_a_set(primitives: set[str], name: str, names: frozenset[str]) -> None:
    assert names
    assert names <= primitives, name


@pytest.mark.parametrize(("module", "tables"), DERIVED.items())
def test_jax_has_every_primitive_of_a_table(primitives: set[str], module: str, tables: tuple[str, ...]) -> None:
    for table in tables:
        assert set(getattr(importlib.import_module(f"autopar.{module}"), table)) <= primitives, table


def test_sets_that_are_written_out_have_no_primitive_in_common() -> None:
    for a, b in itertools.combinations(DISJOINT, 2):
        assert not SETS[a] & SETS[b], (a, b)


def test_every_other_set_is_a_union_or_a_part() -> None:
    written = frozenset[str]().union(*(SETS[name] for name in DISJOINT))
    assert all(SETS[part] < SETS[whole] for part, whole in PARTS.items())
    extra_names = {name: SETS[name] - written for name in SETS.keys() - {*DISJOINT}}
    assert {name: extra for name, extra in extra_names.items() if extra} == {
        "CALLBACKS": {"debug_callback"},
        "LINEAR_UNARY": {"copy"},
    }
