"""The plan: a small, portable artefact that codegen, verification and people read; JSON, never pickle.

It names values by their number in the graph, and says with a hash for which graph. It holds the layout of every value
that has a layout, of every use that differs, and of shared copies; what it costs and why; and what was proven about it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar import jax_compat
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.text import write_file
from autopar.plans.origin import Hint, Origin
from autopar.plans.record import FORMAT, PlanRecord, Stage
from autopar.plans.validation.consistency import check_all, check_consistent, mismatches, unlike
from autopar.plans.validation.schema import FieldError, form, parsed, shown
from autopar.plans.views.diff import PlanDiff
from autopar.plans.views.explain import Explanation, explain
from autopar.plans.views.notebook import ShownAsText
from autopar.plans.views.picture import draw
from autopar.plans.views.report.page import html
from autopar.plans.views.summary import summary
from autopar.plans.views.tensors import to_dataframe
from autopar.plans.views.timeline import trace_events
from autopar.plans.views.usage import MemoryUse, TimeUse, memory_use, time_use
from autopar.version import VERSION

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Plan(PlanRecord, ShownAsText):
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
        state: positions of the argument leaves that the step returns anew, donated or not.
        collectives: predicted communication, with the source lines that cause it.
        step_time_s: predicted seconds per step.
        parts: part of the step -> seconds: "operations" and "reshards", or "pipeline" and "first loop" with stages, and
            "host" (copies of offloaded state). "hidden" is communication that is not in the step time, because it
            overlaps with computation or is combined.
        objective_s: value of the solution, seconds.
        lower_bound_s: lower bound on the step time of all plans of all candidate meshes, seconds; for stages that were
            searched on that of all pipelines (`autopar.passes.inter_op.lower_bound`).
        gap: (objective - lower bound) / objective; 1 for a given number of stages, for which no bound is known. If the
            budget is "min", the gap of the peak memory.
        solver_status: what is proven: "certified", "optimal", "optimal-tied", "near-optimal", "least-memory", "open",
            "time-limit", "fallback" or "chosen"; `autopar.plans.views.summary.STATUS` has the meaning of each.
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
        forms: mesh axis -> form of parallelism (`autopar.plans.forms.FORMS`) -> share of the FLOPs of the
            forward pass's products, in a pipeline of those inside stages.
        read_in_parts: mesh axis along which weights are whole for most products, as in data parallelism -> positions of
            the argument leaves that products read in parts along it nevertheless, such as weights of experts.
        spent: predicted seconds by source line, which add up to the step; for stages, those of the devices that have
            most to do, "idle" among the kinds.
        transfers: "0>1" -> seconds in which stage 0 sends stage 1 what one microbatch needs; empty on one mesh.
        transfer_bytes: the same -> bytes of one microbatch.
        memory_limit_bytes: bytes per device that planning allowed: the budget, or what is usable of a device's memory.
        devices_per_host: number of devices of each host of the cluster.
        code: source line -> its text, for lines of `spent` and of collectives whose file could be read.
        notes: remarks for the user: replicated operations, padding, side effects, fallbacks.
        version: version of autopar that made the plan.
        format: version of the file format.
        origin: the step that the plan was made for, for questions that need it; None for a plan from a file.
    """

    origin: Origin | None = field(default=None, repr=False, compare=False, metadata={"saved": False})

    def __deepcopy__(self, memo: Any) -> Plan:
        """The plan itself: it does not change, and its step cannot be copied."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: as from a file, without the step."""
        return {**self.__dict__, "origin": None}

    def explain(self, name: str, *, exact: bool = False) -> Explanation:
        """Why values have their layouts, the collectives that they cause, and what other layouts would cost.

        The step time with another layout is a lower bound, certified by dual ascent, or exact. Equal layers change
        together. A plan from `Plan.load` has no prices; `autopar.plan(fn, *args, plan=path)` is that plan with them.

        Args:
            name: a glob for paths of arguments, as in pins ("params/*/wq"); "arg:3" or "out:0"; a source line
                ("model.py:30"); or an operation ("dot_general").
            exact: solve the problem again for each other layout, within the memory budget.

        Returns:
            The explanation, which prints as text.

        Raises:
            ArgumentError: the name matches nothing, and the message has the nearest names; or it is no text.
        """
        if not isinstance(name, str):
            raise ArgumentError(f"explain({name!r:.60}): give the name of a value, such as 'params/*' or 'model.py:30'")
        return explain(self, name, self.origin, exact=exact)

    def time(self) -> TimeUse:
        """Where the predicted step time goes: by source line on one mesh, by stage and pass in a pipeline."""
        return time_use(self)

    def memory(self) -> MemoryUse:
        """What a device holds at the peak, by kind of tensor and stage; on one mesh also in the course of the step."""
        return memory_use(self)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step as a timeline that https://ui.perfetto.dev shows, in the Trace Event Format.

        In a pipeline every instruction of every rank, as the simulator runs the schedule; on one mesh the seconds of
        source lines by phase and kind of work.

        Args:
            path: the file, such as "plan.trace.json".

        Raises:
            ArgumentError: the file cannot be written.
        """
        write_file(path, json.dumps(trace_events(self)), "the trace cannot be written to")

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        beside: Mapping[str, PlanRecord] | None = None,
        baselines: bool = False,
    ) -> None:
        """Write the plan as one HTML page that needs no network, for a browser.

        Words and figures, devices with their stages, the timeline of the predicted step, time by source line, memory,
        tensors and their parts, collectives with the user's code, and what the solver proved.

        Args:
            path: the file, such as "plan.html".
            beside: name -> another plan of the same step, for a table of step times, memory and bytes sent.
            baselines: plan the step as data parallel, ZeRO-1, FSDP and Megatron as well, for that table.

        Raises:
            ArgumentError: plotly or jinja2 (`pip install "autopar[report]"`) is missing, the file cannot be written, or
                `baselines` is asked of a plan without its step.
        """
        planned = self._origin("report(baselines=True)").baselines() if baselines else {}
        write_file(path, html(self, {**planned, **(beside or {})}), "the report cannot be written to")

    def diff(self, other: PlanRecord) -> PlanDiff:
        """This plan beside another of the same step: figures, layouts of arguments, and collectives that differ.

        Args:
            other: a plan, also for another mesh, cluster or number of stages.

        Raises:
            ArgumentError: `other` is no plan.
        """
        if not isinstance(other, Plan):
            raise ArgumentError(f"diff({other!r:.60}): give the other Plan; Plan.load reads one from a file")
        return PlanDiff(self, other)

    def what_if(self, **options: Any) -> PlanDiff:
        """The best plan under other options, beside this one.

        Nothing is run or compiled, and the plan that a function uses stays the same.

        Args:
            **options: those of `autopar.parallelize` that change: `memory_budget="40GiB"`, `mesh=(8, 8)`, `stages=4`,
                `pins={...}`. Pins are added to those there are; other options replace theirs.

        Returns:
            Both plans; the new one is `after`.

        Raises:
            ArgumentError: the plan is from `Plan.load`, without its step, or an option is unknown or invalid.
            AutoparError: the step cannot be planned under these options; see `autopar.parallelize`.
        """
        return PlanDiff(self, self._origin("what_if").replanned(options))

    def _origin(self, asked: str) -> Origin:
        if self.origin is None:
            raise ArgumentError(
                f"{asked} needs the step, which a file does not contain: "
                "autopar.plan(fn, *args, plan=path) is this plan with its step"
            )
        return self.origin

    def hints(self) -> tuple[Hint, ...]:
        """What would make the step faster, each with its price: the step is planned again under one other option.

        More memory, another mesh, number of microbatches or schedule, no pins; and twice the batch, for which the
        function is traced again, by the time of an example. Those that apply, fit, and save a hundredth or more.

        Returns:
            Three changes at most, those that save most first; each prints as a line.

        Raises:
            ArgumentError: the plan is from `Plan.load`, without its step.
        """
        return self._origin("hints").hints()

    def summary(self, graph: Graph | None = None) -> str:
        """The plan as tables for a terminal.

        For each group of parameters: shape, PartitionSpec and reason. For each collective: bytes and source line.
        Then the predicted step time, the memory and what is proven.

        Args:
            graph: the program that is executed, for a table of the largest activations as well.
        """
        return summary(self, graph)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the plan: the shards of the largest tensors, the parts of the step, the peak memory.

        Args:
            path: the file; its ending is a format that matplotlib writes, such as ".png" or ".svg".

        Raises:
            ArgumentError: matplotlib (`pip install "autopar[report]"`) is missing, or the file cannot be written.
        """
        draw(self, Path(path))

    def to_dataframe(self) -> pandas.DataFrame:
        """The argument and result leaves as a DataFrame, one in a row: the data of a report's table of tensors.

        Columns: name, role, dtype, shape, spec, nbytes, bytes_per_device, stage and in_host_memory, as
        `autopar.plans.views.tensors.Tensor` describes them.

        Raises:
            ArgumentError: pandas (`pip install "autopar[report]"`) is missing.
        """
        return to_dataframe(self)

    def __str__(self) -> str:
        return self.summary()

    # On disk

    def to_json(self) -> str:
        """The plan as JSON. Mappings keep their order, so that a loaded plan prints as the saved one does.

        Plans of two calls differ in `phases`, the times of planning.
        """
        written = replace(self, collectives=()) if self.pipelined else self  # those of a pipeline are in its stages
        return json.dumps(form(Plan).write(written), separators=(",", ":"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        Raises:
            ArgumentError: the file cannot be written.
        """
        write_file(path, self.to_json(), "the plan cannot be saved to")

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
    format_ = data.get("format") if isinstance(data, Mapping) else type(data).__name__
    if not isinstance(data, Mapping) or type(format_) is not int or format_ != FORMAT:
        raise PlanMismatchError(f"{where} is no plan of format {FORMAT} (found {shown(format_)})")
    try:
        plan: Plan = form(Plan).read(data)
        if plan.pipelined and not plan.collectives:
            plan = replace(plan, collectives=tuple(c for stage in plan.stages for c in stage.collectives))
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
            check_all(*(unlike(field, getattr(plan, field), expected) for field, expected in _of_graph(graph).items()))
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
