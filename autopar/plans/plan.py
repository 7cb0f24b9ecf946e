"""The plan: a small, portable artefact that codegen, verification and people read; JSON, never pickle.

It names values by their number in the graph, and says with a hash for which graph. It holds the layout of every value
that has a home, of every use that differs, and of shared copies; what it costs and why; and what was proven about it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from autopar import __version__, jax_compat
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout, spec
from autopar.plans.checks import check_all, check_consistent, mismatches, unlike
from autopar.plans.schema import FieldError, Listed, Packed, form, parsed, shown

FORMAT = 1


@dataclass(frozen=True)
class Stage:
    """One part of the program on one submesh; a plan without pipelining has a single stage.

    Attributes:
        name: "all" for the whole step, "stage 0" and so on in a pipeline.
        submesh: axis name -> size.
        devices: number of devices.
        values, uses, copies: layouts, see `autopar.passes.intra_op.extract.Layouts`.
        peak_memory_bytes: most bytes held by any device at once.
        memory: kind of tensor -> bytes per device.
        host_memory_bytes: bytes per device that wait in the host's memory between steps.
        rank: number of the submesh; its devices follow those of the ranks before it.
        layers: (first layer, behind the last), of the layers that `autopar.passes.inter_op.pipelines.layers_for` finds.
        arguments: positions of the argument leaves that it holds between steps.
        seconds: pass ("F", "B", "W" per microbatch, "once" per step) -> predicted s.
        collectives: predicted communication inside it.
        graph_hash: of its program, which `values`, `uses` and `copies` are about; "": of the whole.
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
        return self.values


@dataclass(frozen=True)
class Plan:
    """How one program runs on one mesh, whole or in stages.

    Attributes:
        graph_hash: of the graph it was made for.
        mesh_names, mesh_sizes: the mesh's axes.
        cluster: name of the cluster that priced it.
        stages: programs and their layouts.
        inputs, outputs: layouts of the argument and result leaves; in a pipeline on the submesh of their stage.
        input_paths, output_paths: their paths.
        input_shapes: their shapes.
        collectives: predicted communication, with user lines.
        step_time_s: predicted seconds per step, and its parts; "hidden" is communication on top of them, behind
            computation.
        objective_s, lower_bound_s, gap: what the solver reached and proved.
        flops_per_device, bytes_per_device: operations, and bytes read and written in memory, of each device per step.
        schedule: of the pipeline, a name of `autopar.schedules.SCHEDULES`; "none" for one stage.
        num_microbatches: parts of the batch that run one after the other; batch: the argument leaves cut so.
        per_microbatch: globs of what is computed per microbatch; see `autopar.passes.microbatch.analysis`.
        remat: what the backward pass recomputes: for each layer (`autopar.passes.layers.find`) one of
            `autopar.passes.remat.rewrite.POLICIES`; empty if nothing.
        pieces: of a pipeline, how many shorter scans a scan over layers is cut into; 0: as many as there are stages.
        offloaded: positions of the argument leaves that wait in the host's memory between steps.
        mfu, hfu: share of the devices' peak rate that the model's operations take, and all that are executed, what is
            recomputed included.
        notes: what a user should know: replicated operations, padding, side effects, fallbacks.
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
    version: str = __version__
    format: int = FORMAT

    @property
    def pipelined(self) -> bool:
        """It has several stages."""
        return self.schedule != "none"

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis name -> size, of the whole mesh."""
        return dict(zip(self.mesh_names, self.mesh_sizes, strict=True))

    # For people

    def in_specs(self) -> tuple[jax.sharding.PartitionSpec, ...]:
        """PartitionSpec of every argument leaf."""
        return tuple(
            spec(layout, len(shape), self.mesh_names)
            for layout, shape in zip(self.inputs, self.input_shapes, strict=True)
        )

    def out_specs(self) -> tuple[jax.sharding.PartitionSpec, ...]:
        """PartitionSpec of every result leaf."""
        return tuple(
            spec(layout, len(shape), self.mesh_names)
            for layout, shape in zip(self.outputs, self.output_shapes, strict=True)
        )

    def shardings(self, tree: Any = None) -> Any:
        """PartitionSpecs of the arguments: by path, or in the shape of `tree` (the tuple of arguments, or one of them).

        Raises:
            ArgumentError: the tree's leaves are not those of the arguments, nor of one argument.
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
        """The argument leaves that a tree (the tuple of arguments, or one of them) has, by their shapes.

        Raises:
            ArgumentError: the tree's leaves are not those of the arguments, nor of one argument.
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
        """Layouts of the arguments and results whose path matches `name` (a glob)."""
        lines = [f"{p}: {s}" for p, s in self.shardings().items() if fnmatch.fnmatch(p, str(name))]
        return "\n".join(lines) if lines else f"no argument matches '{name}'"

    def wire_bytes(self) -> float:
        """Bytes each device sends per step; in a pipeline, inside the stage that sends most."""
        if self.pipelined:
            return max(sum(c.sent(stage.submesh) for c in stage.collectives) for stage in self.stages)
        return float(sum(c.sent(self.mesh) for c in self.collectives))

    def summary(self, graph: Graph | None = None) -> str:
        """The plan as a table for a terminal; with the graph that is executed also its largest activations."""
        from autopar.plans.summary import summary

        return summary(self, graph)

    def __str__(self) -> str:
        return self.summary()

    # On disk

    def to_json(self) -> str:
        """The plan as JSON text; equal plans give equal text."""
        return json.dumps(form(Plan).write(self), sort_keys=True, separators=(",", ":"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. ArgumentError where the file cannot be written."""
        try:
            Path(path).write_text(self.to_json())
        except (OSError, TypeError, ValueError) as error:
            raise ArgumentError(f"the plan cannot be saved to {path!r}: {error}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan. PlanMismatchError naming the field where the file is no plan, or one that contradicts itself."""
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


def graph_hash(graph: Graph) -> str:
    """A hash of the program: operations, parameters, types, paths; equal in every process."""
    digest = hashlib.sha256()
    described: dict[int, str] = {}
    types = {t: str(t) for t in set(graph.types)}  # looked up, never iterated
    for op in graph.walk():
        if op.signature not in described:
            described[op.signature] = f"{op.name} {_stable(op.params)}"
        atoms = " ".join(str(a) for a in op.inputs)
        outs = " ".join(f"{v}:{types[graph.types[v]]}" for v in op.outputs)
        digest.update(f"{described[op.signature]}|{atoms}|{outs}|{op.trips}\n".encode())
    for title, paths, atoms in (("in", graph.input_paths, graph.inputs), ("out", graph.output_paths, graph.outputs)):
        for path, atom in zip(paths, atoms, strict=True):
            digest.update(f"{title} {path} {graph.type_of(atom)} {atom}\n".encode())
    if graph.repeats is not None:
        digest.update(repr((graph.repeats, graph.carried)).encode())
    return digest.hexdigest()[:32]


_PLAIN = (int, float, bool, str, type(None))


def _stable(value: Any) -> str:
    """Text of a parameter that is the same in every process: nothing that would print an address."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_stable(v)}" for k, v in sorted(value.items(), key=lambda kv: str(kv[0]))) + "}"
    if isinstance(value, Sequence):
        return "(" + ",".join(map(_stable, value)) + ")"
    if isinstance(value, Set):
        return "{" + ",".join(sorted(map(_stable, value))) + "}"
    text = str(value)
    return type(value).__name__ if " at 0x" in text or "\n" in text else text


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
    types = tuple(str(graph.types[v]) for v in graph.inputs)
    for path, theirs, ours in zip(plan.input_paths, plan.input_types, types, strict=False):
        if theirs != ours:
            raise PlanMismatchError(
                f"the plan was made for other arguments of {name}: '{path}' was {theirs} and is now {ours}. Plan again."
            )
    if len(plan.input_types) != len(types):
        raise PlanMismatchError(
            f"the plan was made for {len(plan.input_types)} argument leaves, {name} has {len(types)}. Plan again."
        )
    raise PlanMismatchError(
        f"the plan was made for another program than {name} traces to (same arguments, other operations; "
        f"planned with autopar {plan.version}, this is {__version__} on {jax_compat.versions()}). Plan again."
    )
