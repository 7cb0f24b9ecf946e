"""Shardings of stages without a planner, as a function from (stage, value) to a `PartitionSpec` on the stage's submesh.

`data_parallel` is the simplest: blocks of the batch are sharded along one axis of every submesh where they divide, and
all other values are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.sharding import Mesh, PartitionSpec

from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.states import Split, local_shape

#: (stage, value) -> the sharding of the value there; for an argument that holds the batch, that of one microbatch.
Layouts = Callable[[int, int], PartitionSpec]


def data_parallel(split: Microbatches, meshes: Sequence[Mesh], placement: Sequence[int]) -> Layouts:
    """Data parallelism: the batch is sharded along the first axis of each submesh that has more than one device.

    Args:
        split: the step in microbatches.
        meshes: the submesh of every rank.
        placement: the rank of every stage.
    """
    axes = [next((axis for axis in mesh.shape.items() if axis[1] > 1), (mesh.axis_names[0], 1)) for mesh in meshes]

    def layout(stage: int, value: int) -> PartitionSpec:
        state = split.batch.get(value, split.states.get(value))
        if not isinstance(state, Split):
            return PartitionSpec()
        name, size = axes[placement[stage]]
        extent = local_shape(split.graph.types[value].shape, state, split.count)[state.dim]
        return PartitionSpec(*[None] * state.dim, name) if extent % size == 0 else PartitionSpec()

    return layout
