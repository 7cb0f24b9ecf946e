"""The plan: a small, portable artefact that codegen, verification and people read; JSON, never pickle.

It names values by their number in the graph, and says with a hash for which graph. It holds the layout of every value
that has a layout, of every use that differs, and of shared copies; what it costs and why; and what was proven about it.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from autopar import jax_compat
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.layout import Layout, spec
from autopar.plans.checks import check_all, check_consistent, mismatches, unlike
from autopar.plans.schema import FieldError, Listed, Packed, form, parsed, shown
from autopar.version import VERSION

FORMAT = 1


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

    @property
    def layouts(self) -> Mapping[int, Layout]:
        """The same as `values`."""
        return self.values


@dataclass(frozen=True)
class Plan:
    """How a program runs on a mesh, on all of it or in stages; printed, a table.

    Data, not code: layouts, costs, and what is proven about them. Positions count the leaves of all arguments, or of
    all results, in the order of `jax.tree.leaves`.

    Attributes:
        graph_hash: hash of the traced program, by which a plan is checked against a function.
        mesh_names: names of the mesh axes.
        mesh_sizes: sizes of the mesh axes.
        cluster: name of the cluster whose costs were used.
        stages: programs and their layouts; one without pipelining.
        inputs: layout of each argument leaf, in a pipeline on the submesh of its stage.
        outputs: layout of each result leaf.
        input_paths: path of each argument leaf, such as "state/params/w".
        output_paths: path of each result leaf.
        input_types: dtype and shape of each argument leaf, such as "f32[8,16]".
        input_shapes: shape of each argument leaf.
        output_shapes: shape of each result leaf.
        donated: positions of the argument leaves whose buffers the step reuses.
        collectives: predicted communication, with the source lines that cause it.
        step_time_s: predicted seconds per step.
        parts: part of the step -> seconds: "operations", "reshards" and "host" (copies of offloaded state), or
            "pipeline" and "first loop" with stages. "hidden" is communication that is not in the step time, because it
            overlaps with computation or is combined.
        objective_s: value of the solution, seconds.
        lower_bound_s: lower bound on the step time of all plans of all candidate meshes, seconds.
        gap: (objective - lower bound) / objective; 1 for stages, for which no bound is known. If the budget is "min",
            the gap of the peak memory.
        solver_status: what is proven: "certified", "optimal", "optimal-tied", "near-optimal", "least-memory", "open",
            "time-limit", "fallback" or "chosen"; `autopar.plans.summary.STATUS` has the meaning of each.
        solver: what found the solution, such as "dual ascent" or "highs".
        variables: strategies of all operations after symmetric ones are merged.
        variables_unfolded: strategies of all operations.
        rows: constraints of the ILP; 0 if none was solved.
        phases: phase of planning -> seconds; of a cached plan "trace" and "cache".
        mfu: model FLOPs utilization (PaLM, Chowdhery et al., 2022): FLOPs of the model over what the devices could
            execute in the step time, from 0 to 1.
        hfu: hardware FLOPs utilization: the same for the executed FLOPs, recomputation included.
        flops_per_device: floating-point operations per step and device.
        bytes_per_device: bytes read and written in device memory per step and device; 0 for stages.
        schedule: pipeline schedule, a key of `autopar.schedules.SCHEDULES`; "none" for one stage.
        num_microbatches: parts of the batch that run one after the other.
        batch: positions of the argument leaves that are divided into microbatches.
        per_microbatch: globs of what is computed per microbatch, as in the option.
        remat: policy of each layer (`autopar.passes.layers.find`), "none", "dots" or "full"; empty if nothing is
            recomputed.
        pieces: number of scans into which stages divide a scan over layers; 0: the number of stages.
        offloaded: positions of the argument leaves that are in host memory between steps.
        notes: remarks for the user: replicated operations, padding, side effects, fallbacks.
        version: version of autopar that made the plan.
        format: version of the file format.
    """

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
    batch: tuple[int, ...] = ()
    per_microbatch: tuple[str, ...] = ()
    remat: tuple[str, ...] = ()
    pieces: int = 0
    offloaded: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    version: str = VERSION
    format: int = FORMAT

    @property
    def pipelined(self) -> bool:
        """Whether the plan has several stages."""
        return self.schedule != "none"

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis name -> size of the whole mesh."""
        return dict(zip(self.mesh_names, self.mesh_sizes, strict=True))

    # For people

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
            ArgumentError: the shapes of the leaves are neither those of all arguments nor those of one.
        """
        specs = self.in_specs()
        if tree is None:
            return dict(zip(self.input_paths, specs, strict=True))
        try:
            structure = jax.tree.structure(tree)
        except ValueError as error:  # keys of a dict that cannot be sorted
            raise ArgumentError(f"the tree is none that JAX can flatten: {error}") from error
        return jax.tree.unflatten(structure, [specs[i] for i in self.positions(tree)])

    def positions(self, tree: Any) -> range:
        """The positions of the leaves of a tree, found by their shapes.

        Args:
            tree: the tuple of arguments, or one of them.

        Raises:
            ArgumentError: the shapes of the leaves are neither those of all arguments nor those of one.
        """
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(tree)]
        count = len(self.input_shapes)
        for start in range(count - len(shapes) + 1):
            if list(self.input_shapes[start : start + len(shapes)]) == shapes:
                return range(start, start + len(shapes))
        raise ArgumentError(
            f"no argument of the planned function has the {len(shapes)} leaves given; "
            f"it has {count}: {', '.join(self.input_paths[:8])}{', ...' if count > 8 else ''}"
        )

    def explain(self, name: str) -> str:
        """A line with path and PartitionSpec for each argument leaf whose path matches the glob `name`."""
        lines = [f"{p}: {s}" for p, s in self.shardings().items() if fnmatch.fnmatch(p, str(name))]
        return "\n".join(lines) if lines else f"no argument matches '{name}'"

    def wire_bytes(self) -> float:
        """Bytes that each device sends per step; in a pipeline those inside the stage that sends most."""
        if self.pipelined:
            return max(sum(c.bytes_sent(stage.submesh) for c in stage.collectives) for stage in self.stages)
        return float(sum(c.bytes_sent(self.mesh) for c in self.collectives))

    def summary(self, graph: Graph | None = None) -> str:
        """The plan as tables for a terminal.

        For each group of parameters: shape, PartitionSpec and reason. For each collective: bytes and source line.
        Then the predicted step time, the memory and what is proven.

        Args:
            graph: the program that is executed, for a table of the largest activations as well.
        """
        from autopar.plans.summary import summary

        return summary(self, graph)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the plan: the shards of the largest tensors, the parts of the step, the peak memory.

        Args:
            path: the file; its ending is a format that matplotlib writes, such as ".png" or ".svg".

        Raises:
            ArgumentError: matplotlib (`pip install "autopar[report]"`) is missing, or the file cannot be written.
        """
        from autopar.plans.picture import draw

        draw(self, Path(path))

    def __str__(self) -> str:
        return self.summary()

    # On disk

    def to_json(self) -> str:
        """The plan as JSON; the text of equal plans is equal."""
        return json.dumps(form(Plan).write(self), sort_keys=True, separators=(",", ":"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        Raises:
            ArgumentError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.to_json())
        except (OSError, TypeError, ValueError) as error:
            raise ArgumentError(f"the plan cannot be saved to {path!r}: {error}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan and check it.

        Every field has its type, none is missing or unknown, and no two contradict each other. A plan is checked
        against a function when it is used: paths, shapes and types of arguments and results, the executed program,
        stages with their layers, and the layout of every value. Layouts may be edited by hand: a layout that passes
        does not change results.

        Raises:
            PlanMismatchError: the file is no valid plan; the message has the field, its value and what is expected:
                "plan.json is a damaged plan: field 'stages[0].values['12']' is '0 ?', expected a layout such as ...".
        """
        try:
            data = parsed(Path(path).read_text(encoding="utf-8"))
        except (OSError, TypeError, ValueError) as error:
            raise PlanMismatchError(f"{path} is no plan: {error}") from error
        return from_json(data, str(path))


def from_json(data: Any, where: str = "the data") -> Plan:
    """The plan that `Plan.to_json` wrote. PlanMismatchError naming the field if it is none, or contradicts itself."""
    found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
    if not isinstance(data, Mapping) or type(found) is not int or found != FORMAT:
        raise PlanMismatchError(f"{where} is no plan of format {FORMAT} (found {shown(found)})")
    try:
        plan: Plan = form(Plan).read(data)
        check_consistent(plan)
    except FieldError as error:
        raise PlanMismatchError(f"{where} is a damaged plan: {error}. Plan again.") from None
    return replace(plan, stages=tuple(_in_order(stage, plan.mesh_names) for stage in plan.stages))


def _in_order(stage: Stage, names: Sequence[str]) -> Stage:
    """A stage with the axes of its submesh in the order of the mesh, which JSON does not keep."""
    return replace(stage, submesh={name: stage.submesh[name] for name in names})


def _of_graph(graph: Graph) -> Mapping[str, tuple[Any, ...]]:
    """Fields of a plan that say what the arguments and results of its program are."""
    results = [graph.type_of(atom) for atom in graph.outputs]
    arguments = [graph.types[v] for v in graph.inputs]
    return {
        "input_paths": graph.input_paths,
        "output_paths": graph.output_paths,
        "input_types": tuple(map(str, arguments)),
        "input_shapes": tuple(t.shape for t in arguments),
        "output_shapes": tuple(t.shape for t in results),
    }


def check_matches(plan: Plan, graph: Graph, name: str) -> None:
    """PlanMismatchError unless the plan was made for this graph; the message says what differs."""
    if plan.graph_hash == graph_hash(graph):
        with mismatches():
            check_all(*(unlike(field, getattr(plan, field), found) for field, found in _of_graph(graph).items()))
        return
    _check_arguments(plan, tuple(str(graph.types[v]) for v in graph.inputs), name)
    raise PlanMismatchError(
        f"the plan was made for another program than {name} traces to (same arguments, other operations; "
        f"planned with autopar {plan.version}, this is {VERSION} on {jax_compat.versions()}). Plan again."
    )


def _check_arguments(plan: Plan, types: Sequence[str], name: str) -> None:
    """PlanMismatchError unless the plan is for arguments of these types."""
    for path, theirs, ours in zip(plan.input_paths, plan.input_types, types, strict=False):
        if theirs != ours:
            raise PlanMismatchError(
                f"the plan was made for other arguments of {name}: '{path}' was {theirs} and is now {ours}. Plan again."
            )
    if len(plan.input_types) != len(types):
        raise PlanMismatchError(
            f"the plan was made for {len(plan.input_types)} argument leaves, {name} has {len(types)}. Plan again."
        )
