"""The fields of a plan, and what follows from them alone.

A plan names values by their number in the graph, and says with a hash for which graph. It holds the layout of every
value that has a layout, of every use that differs, and of shared copies; what it costs and why; and what was proven
about it. `autopar.plans.plan` adds files and views.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autopar.cost_models.memory.report import Moment
from autopar.errors import ArgumentError
from autopar.ir.collective import Collective
from autopar.ir.layout import Layout, spec
from autopar.passes.intra_op.time_spent import Spent
from autopar.plans.validation.schema import Listed, Packed
from autopar.version import VERSION

FORMAT = 6


@dataclass(frozen=True)
class Stage:
    """One part of the program on one submesh; a plan without pipelining has one.

    Attributes:
        name: "all" for the whole step; "stage 0" and so on in a pipeline.
        submesh: axis name -> size.
        devices: number of devices.
        values: number of a value in the graph -> its layout: for each mesh axis the dimension that it shards, "-" for
            replicated or "+" for partial sums.
        uses: use of a value, such as "op12.in0" or "out3" -> the layout in which it is read, if that differs.
        copies: number of a value -> layout of a resharded copy that its readers share, if that differs.
        peak_memory_bytes: predicted peak memory, bytes per device.
        memory: kind of tensor (`autopar.cost_models.memory.report.KINDS`) -> bytes per device at the peak.
        rank: number of the submesh; its devices follow those of lower ranks.
        layers: range (first, end) of the layers that `autopar.passes.inter_op.pipelines.layers_for` finds.
        arguments: positions of the argument leaves that it stores between steps.
        seconds: pass -> predicted seconds: "F", "B" and "W" (forward, backward, weight gradients) per microbatch,
            "once" per step.
        host_memory_bytes: state in host memory between steps, bytes per device.
        collectives: predicted communication inside the stage.
        graph_hash: hash of the program that `values`, `uses` and `copies` number; "": the program of the plan.
        over_time: what a device holds in the course of the step, at some moments; empty in a pipeline.
        rings: tags of the operations, such as "op12", whose devices pass pieces of operands round, instead of gathering
            them.
    """

    name: str
    submesh: Mapping[str, int]
    devices: int
    values: Mapping[int, Packed]
    uses: Mapping[str, Packed]
    copies: Mapping[int, Packed]
    peak_memory_bytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0
    layers: tuple[int, int] = (0, 0)
    arguments: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    host_memory_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    graph_hash: str = ""
    over_time: tuple[Moment, ...] = ()
    rings: tuple[str, ...] = ()

    def busy(self, microbatches: int) -> Mapping[str, float]:
        """Pass -> predicted seconds per step."""
        return {kind: t if kind == "once" else t * microbatches for kind, t in self.seconds.items()}

    @property
    def layouts(self) -> Mapping[int, Layout]:
        """The same as `values`."""
        return self.values


@dataclass(frozen=True)
class PlanRecord:
    """The fields of a plan; `autopar.plans.plan.Plan` describes them."""

    graph_hash: str
    mesh_names: tuple[str, ...]
    mesh_sizes: tuple[int, ...]
    cluster: str
    stages: tuple[Stage, ...]
    inputs: tuple[Listed, ...]
    outputs: tuple[Listed, ...]
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    input_types: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    donated: tuple[int, ...]
    collectives: tuple[Collective, ...]
    step_time_s: float
    parts: Mapping[str, float]
    objective_s: float
    lower_bound_s: float
    gap: float
    solver_status: str
    solver: str
    variables: int
    variables_unfolded: int
    rows: int
    phases: Mapping[str, float]
    mfu: float = 0.0
    hfu: float = 0.0
    flops_per_device: float = 0.0
    bytes_per_device: float = 0.0
    schedule: str = "none"
    num_microbatches: int = 1
    state: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    per_microbatch: tuple[str, ...] = ()
    remat: tuple[str, ...] = ()
    pieces: int = 0
    offloaded: tuple[int, ...] = ()
    forms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    read_in_parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    spent: tuple[Spent, ...] = ()
    transfers: Mapping[str, float] = field(default_factory=dict)
    transfer_bytes: Mapping[str, float] = field(default_factory=dict)
    memory_limit_bytes: int = 0
    devices_per_host: int = 0
    code: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    version: str = VERSION
    format: int = FORMAT

    @property
    def pipelined(self) -> bool:
        """Whether the plan has several stages."""
        return self.schedule != "none"

    @property
    def peak_memory_bytes(self) -> int:
        """Predicted peak memory, bytes per device, of the devices with most; stages of one rank share its devices."""
        return max(sum(stage.peak_memory_bytes for stage in stages) for stages in self.ranks)

    @property
    def ranks(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages of each rank."""
        numbers = sorted({stage.rank for stage in self.stages})
        return tuple(tuple(stage for stage in self.stages if stage.rank == rank) for rank in numbers)

    @property
    def rank_devices(self) -> tuple[range, ...]:
        """The positions of each rank's devices among those of the mesh."""
        ends = list(itertools.accumulate((stages[0].devices for stages in self.ranks), initial=0))
        return tuple(range(begin, end) for begin, end in itertools.pairwise(ends))

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis name -> size of the whole mesh."""
        return dict(zip(self.mesh_names, self.mesh_sizes, strict=True))

    def in_specs(self) -> tuple[jax.sharding.PartitionSpec, ...]:
        """The PartitionSpec of each argument leaf."""
        return tuple(
            spec(layout, len(shape), self.mesh_names)
            for layout, shape in zip(self.inputs, self.input_shapes, strict=True)
        )

    def out_specs(self) -> tuple[jax.sharding.PartitionSpec, ...]:
        """The PartitionSpec of each result leaf."""
        return tuple(
            spec(layout, len(shape), self.mesh_names)
            for layout, shape in zip(self.outputs, self.output_shapes, strict=True)
        )

    def shardings(self, tree: Any = None) -> Any:
        """The PartitionSpecs of the arguments.

        Args:
            tree: the tuple of arguments, or one of them; arrays or `ShapeDtypeStruct`s.

        Returns:
            A tree of the same structure; without `tree`, a dict from paths of argument leaves.

        Raises:
            ArgumentError: the shapes of the leaves are neither those of all arguments nor those of one, or those of
                several arguments with different shardings. Or leaves have the same path, and `tree` is not given.
        """
        specs = self.in_specs()
        if tree is None:
            return self._by_path(specs)
        try:
            structure = jax.tree.structure(tree)
        except ValueError as error:  # keys of a dict that cannot be sorted
            raise ArgumentError(f"the tree is none that JAX can flatten: {error}") from error
        return jax.tree.unflatten(structure, [specs[i] for i in self.positions(tree)])

    def _by_path(self, specs: Sequence[jax.sharding.PartitionSpec]) -> Mapping[str, jax.sharding.PartitionSpec]:
        for path, count in Counter(self.input_paths).items():
            if count > 1:
                raise ArgumentError(
                    f"{count} leaves of the arguments have the path '{path}'. Pass the tuple of all arguments to "
                    "shardings(), or rename keys such as those that contain '/'"
                )
        return dict(zip(self.input_paths, specs, strict=True))

    def positions(self, tree: Any) -> range:
        """The positions of the leaves of a tree, found by their shapes.

        Args:
            tree: the tuple of arguments, or one of them.

        Raises:
            ArgumentError: the shapes of the leaves are neither those of all arguments nor those of one, or those of
                several arguments with different shardings.
        """
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(tree)]
        count = len(self.input_shapes)
        starts = [i for i in range(count - len(shapes) + 1) if list(self.input_shapes[i : i + len(shapes)]) == shapes]
        if not starts:
            raise ArgumentError(
                f"no argument of the planned function has the {len(shapes)} leaves given; "
                f"it has {count}: {', '.join(self.input_paths[:8])}{', ...' if count > 8 else ''}"
            )
        matches = [range(start, start + len(shapes)) for start in starts]
        other = next((match for match in matches if self._placed(match) != self._placed(matches[0])), None)
        if other is not None:
            first, second = (self.input_paths[match.start] for match in (matches[0], other))
            raise ArgumentError(
                f"the shapes of the {len(shapes)} leaves given are those from '{first}' on and those from '{second}' "
                "on, which are sharded differently. Pass the tuple of all arguments, or take shardings() by path"
            )
        return matches[0]

    def _placed(self, positions: range) -> list[Any]:
        """Layouts of argument leaves, and the stages that store them."""
        return [(self.inputs[i], [i in stage.arguments for stage in self.stages]) for i in positions]

    def sent(self) -> Sequence[tuple[Collective, float]]:
        """Every collective with the bytes that a device sends for it per step; in a pipeline those inside stages."""
        if self.pipelined:
            return [(c, c.bytes_sent(stage.submesh)) for stage in self.stages for c in stage.collectives]
        return [(c, c.bytes_sent(self.mesh)) for c in self.collectives]

    def wire_bytes(self) -> float:
        """Bytes that each device sends per step; in a pipeline those inside the stage that sends most."""
        if self.pipelined:
            return max(sum(c.bytes_sent(stage.submesh) for c in stage.collectives) for stage in self.stages)
        return float(sum(nbytes for _, nbytes in self.sent()))
