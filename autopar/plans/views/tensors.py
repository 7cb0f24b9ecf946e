"""The argument and result leaves of a plan as rows: for the table of a report, and as a DataFrame of pandas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from autopar.errors import ArgumentError
from autopar.ir.layout import device_share
from autopar.ir.text import spec_text
from autopar.ir.text.parameters import dtype_of
from autopar.ir.text.printer import long_dtype
from autopar.plans.record import PlanRecord
from autopar.plans.views.groups import owner, sections

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Tensor:
    """An argument leaf or a result leaf.

    Attributes:
        name: its path, such as "state/params/w".
        role: "parameters and other state", "optimizer state", "other arguments" or "result".
        dtype: such as "float32"; "" for results, whose types a plan does not have.
        shape: of the whole.
        spec: its PartitionSpec as text, in a pipeline on the submesh of its stage.
        nbytes: bytes of the whole; None without a dtype.
        bytes_per_device: bytes of one device's part, padding included; None without a dtype.
        stage: the stage that stores it; "" on one mesh, and for what no stage stores.
        in_host_memory: whether it is in host memory between steps.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    spec: str
    nbytes: int | None
    bytes_per_device: int | None
    stage: str
    in_host_memory: bool


def tensors(plan: PlanRecord) -> Iterator[Tensor]:
    """Every argument leaf by role, then every result leaf."""
    specs = plan.in_specs()
    for role, members in sections(plan).items():
        for i in members:
            dtype = long_dtype(plan.input_types[i].partition("[")[0])
            shape, stage = plan.input_shapes[i], owner(plan, i)
            nbytes = math.prod(shape) * dtype_of(dtype).itemsize
            share = device_share(plan.inputs[i], shape, tuple((stage or plan.stages[0]).submesh.values()))
            yield Tensor(
                *(plan.input_paths[i], role, dtype, shape, spec_text(specs[i]), nbytes, round(nbytes * share)),
                stage=stage.name if stage else "",
                in_host_memory=i in plan.offloaded,
            )
    for path, shape, spec in zip(plan.output_paths, plan.output_shapes, plan.out_specs(), strict=True):
        yield Tensor(path, "result", "", shape, spec_text(spec), None, None, "", in_host_memory=False)


def to_dataframe(plan: PlanRecord) -> pandas.DataFrame:
    """The rows as a DataFrame, with the fields of `Tensor` as columns.

    Raises:
        ArgumentError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ArgumentError('to_dataframe needs pandas: pip install "autopar[report]"') from error
    columns = [f.name for f in fields(Tensor)]
    return pandas.DataFrame([[getattr(row, name) for name in columns] for row in tensors(plan)], columns=columns)
