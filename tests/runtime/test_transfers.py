"""What crosses between processes in a compiled transfer is what has to, and nothing is lost on the way."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from autopar.bench.processes import transfers
from autopar.runtime.transport import Exchange


@pytest.mark.parametrize("case", transfers.CASES, ids=lambda case: case.name)
def test_the_bytes_between_processes_in_the_compiled_program_are_the_lower_bound(case: transfers.Case) -> None:
    row = transfers.counted(case)
    assert row["sent"] == row["least"] > 0


@pytest.mark.parametrize("case", transfers.CASES, ids=lambda case: case.name)
def test_the_array_arrives(case: transfers.Case) -> None:
    values = np.arange(np.prod(case.shape)).reshape(case.shape).astype(case.dtype)
    source, target = case.source.sharding(), case.target.sharding()
    exchange = Exchange([(case.shape, values.dtype, source, target)], lambda d: d.id // case.per_process)
    (moved,) = exchange([jax.device_put(values, source)])
    assert moved.sharding == target
    np.testing.assert_array_equal(np.asarray(moved), values)


def test_a_permutation_counts_its_pairs_between_processes() -> None:
    text = "  %p = f32[2,3]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}, x={}"
    assert transfers.crossing_bytes(text, [0, 0, 1, 1], 4) == 2 * 3 * 4
    assert transfers.crossing_bytes(text, [0, 1, 2, 3], 4) == 3 * 2 * 3 * 4
