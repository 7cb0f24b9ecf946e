"""The tables of a report: a row for each argument and result leaf, each group of collectives, and each figure.

A cell has a text and, where the text does not sort as it should, its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.collective import Collective
from autopar.ir.text import excess, seconds, size
from autopar.ir.text.printer import short_dtype
from autopar.plans.record import PlanRecord
from autopar.plans.views import tensors as leaves
from autopar.plans.views.parallelism import describe
from autopar.plans.views.summary import STATUS, cause, stage_rows


@dataclass(frozen=True)
class Cell:
    """The text of a cell, the number by which it sorts (None: by its text), and whether it is program text."""

    text: str
    number: float | None = None
    code: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under heads; `name` is the identifier in the page."""

    name: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def _nbytes(n: float | None) -> Cell:
    return Cell("", 0.0) if n is None else Cell(size(n), n)


def tensors(plan: PlanRecord) -> Table:
    """Every argument leaf and every result leaf."""
    heads = ("path", "role", "type", "PartitionSpec", "bytes", "per device", "stored by")
    return Table("tensors", heads, tuple(_tensor(plan, row) for row in leaves.tensors(plan)))


def _tensor(plan: PlanRecord, row: leaves.Tensor) -> tuple[Cell, ...]:
    place = row.stage or ("the stages that read it" if plan.pipelined else "all devices")
    place += ", host memory" if row.in_host_memory else ""
    extents = "x".join(map(str, row.shape)) or "scalar"
    kind = f"{short_dtype(row.dtype)}[{','.join(map(str, row.shape))}]" if row.dtype else extents
    return (
        Cell(row.name, code=True),
        Cell(row.role),
        Cell(kind, code=True),
        Cell(row.spec, code=True),
        _nbytes(row.nbytes),
        _nbytes(row.bytes_per_device),
        Cell(place if row.role != "result" else ""),
    )


def collectives(plan: PlanRecord) -> Table:
    """Collectives by kind, axes, stage and source line, with the text of the line."""
    groups: dict[tuple[str, str, str, str], tuple[int, float]] = {}
    for stage, c, sent in _sent(plan):
        key = (c.kind, "+".join(c.axes), stage, cause(plan, c))
        times, before = groups.get(key, (0, 0.0))
        groups[key] = (times + c.count, before + sent)
    rows = [
        (
            Cell(kind),
            Cell(axes, code=True),
            *([Cell(stage)] if plan.pipelined else []),
            Cell(f"{times:,}", times),
            _nbytes(sent),
            Cell(source, code=source in plan.code),
            Cell(plan.code.get(source, ""), code=True),
        )
        for (kind, axes, stage, source), (times, sent) in sorted(groups.items(), key=lambda item: -item[1][1])
    ]
    where = ("stage",) if plan.pipelined else ()
    return Table("collectives", ("kind", "axes", *where, "times", "sent per device", "line", "code"), tuple(rows))


def _sent(plan: PlanRecord) -> Iterator[tuple[str, Collective, float]]:
    if not plan.pipelined:
        yield from (("", c, sent) for c, sent in plan.sent())
    for stage in plan.stages if plan.pipelined else ():
        yield from ((stage.name, c, c.bytes_sent(stage.submesh)) for c in stage.collectives)


def stages(plan: PlanRecord) -> Table | None:
    """The stages of a pipeline."""
    if not plan.pipelined:
        return None
    heads = ("stage", "layers", "devices", "seconds per microbatch", "memory per device")
    numbers = [stage.peak_memory_bytes for stage in plan.stages]
    rows = [
        (*map(Cell, row[:-1]), Cell(row[-1], n)) for row, n in zip(stage_rows(plan), numbers, strict=True)
    ]  # fmt: skip
    return Table("stages", heads, tuple(rows))


def comparison(plans: Mapping[str, PlanRecord | str]) -> Table | None:
    """Plans of the step side by side; a text says why there is none."""
    if len(plans) < 2:
        return None
    rows = [_unplanned(name, plan) if isinstance(plan, str) else _figures(name, plan) for name, plan in plans.items()]
    heads = ("plan", "step", "memory per device", "sent per device", "MFU", "what it is")
    return Table("comparison", heads, tuple(rows))


def _figures(name: str, plan: PlanRecord) -> tuple[Cell, ...]:
    peak, limit = plan.peak_memory_bytes, plan.memory_limit_bytes
    step, sent = plan.step_time_s, plan.wire_bytes()
    numbers = (Cell(seconds(step), step), Cell(f"{size(peak)}{excess(peak, limit)}", peak), _nbytes(sent))
    return (Cell(name), *numbers, Cell(f"{plan.mfu:.1%}", plan.mfu), Cell(describe(plan)))


def _unplanned(name: str, why: str) -> tuple[Cell, ...]:
    return (Cell(name), *(Cell("", math.inf) for _ in range(4)), Cell(why))


def solver(plan: PlanRecord) -> Sequence[tuple[str, str]]:
    """What is proven about the plan, and what it took, as pairs of a name and a text."""
    return [
        ("status", f"{plan.solver_status}: {STATUS.get(plan.solver_status, plan.solver)}"),
        ("lower bound", f"{seconds(plan.lower_bound_s)}, a gap of {plan.gap:.2%}" if plan.lower_bound_s else "none"),
        ("solver", plan.solver),
        ("variables", f"{plan.variables_unfolded:,}, {plan.variables:,} after equal layers are merged"),
        ("constraints of the ILP", f"{plan.rows:,}" if plan.rows else "none was solved"),
        ("planning", ", ".join(f"{name} {seconds(t)}" for name, t in plan.phases.items() if t)),
        ("made by", f"autopar {plan.version}, format {plan.format}"),
    ]
