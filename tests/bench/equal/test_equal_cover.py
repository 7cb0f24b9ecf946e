"""A toy of every kind on one mesh, every mesh for one toy at least: the cases of `autopar bench equal` in the suite.

Each does what a worker of the benchmark does: three steps, donation, tracing, bytes on the wire; the small ones and
the one in a worker also a batch of another size, which is planned anew. A process for each would take a third of the
time.
"""

from __future__ import annotations

import itertools
import warnings

import jax
import pytest

from autopar import zoo
from autopar.bench.equal import case as equal_case
from autopar.bench.equal import run as equal
from tests.support.effort import ALL, sample

#: Models of many kinds; all of them are the benchmark's.
MODELS = sample(
    (
        *("rnn-toy", "gpt-toy-scan", "moe-toy", "wresnet-toy", "equinox-toy", "mlp-toy"),
        *("unet-toy", "flax-nnx-toy", "gpt-toy-remat", "vit-toy"),
    ),
    ("rnn-toy", "gpt-toy-scan", "moe-toy", "wresnet-toy", "equinox-toy", "mlp-toy"),
)
#: Those that are planned once more, for a batch of twice the size; planning a large one takes half of its time.
REPLANNED = ("mlp-toy", "equinox-toy")
CASES = tuple(
    (model, mesh, "float64" if i % 3 == 1 else "float32")
    for i, (model, mesh) in enumerate(zip(MODELS, itertools.cycle(equal.MESHES), strict=False))
)


def test_the_cover_has_every_mesh_and_dtype():
    models, meshes, dtypes = (tuple(dict.fromkeys(column)) for column in zip(*CASES, strict=True))
    assert {*models} <= {*zoo.TOYS}
    assert (meshes, sorted(dtypes)) == (equal.MESHES, sorted(equal.DTYPES))


@pytest.mark.parametrize(
    ("model", "mesh", "dtype"), CASES, ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x))
)
def test_parallel_steps_equal_single_device_steps(model, mesh, dtype):
    with jax.enable_x64(dtype == "float64"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = equal_case.case(equal_case.single(model, dtype), mesh, dtype, replans=ALL or model in REPLANNED)
    assert row.ok, row.failures


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_gives_a_row():
    (row,) = equal.run(equal.Product(("mlp-toy",), ((2, 4),), ("float64",)))
    assert row["ok"], equal.line(row)
