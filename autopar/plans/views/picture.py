"""Pictures by matplotlib (extra `report`): of a plan, and of measurements.

A plan is one picture of how tensors are sharded, and of where time and memory go:

    tensors   a box for each group of equal layers; its cells are the shards, along the two dimensions with the most
              of them                                                                        -> _box
    time      the parts of the predicted step; with stages, the passes of each stage         -> times
    memory    bytes per device at the peak, by kind of tensor                                -> Stage.memory
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import ArgumentError
from autopar.ir.layout import cuts, spec
from autopar.ir.text import seconds, size, spec_text
from autopar.plans.views.groups import argument_groups, label, owner, sections

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.plans.record import PlanRecord

COLUMNS, ROWS = 6, 2  # of tensors
CELLS = 64  # most cells along one side of a box: more cannot be told apart
LINED = 32  # most cells along one side that are separated by lines
PALETTE, WHOLE = "viridis", "#dddddd"


@dataclass(frozen=True)
class Tensor:
    """Equal argument leaves.

    Attributes:
        name: the path that they have in common, and their number.
        shape: of one leaf.
        spec: its PartitionSpec, as text.
        cells: number of shards along the rows and along the columns of the box.
        shards: number of different shards.
        copies: devices that hold the same shard.
        elements: of all leaves together.
        position: the first of the leaves.
        dimensions: those that are drawn, rows before columns.
    """

    name: str
    shape: tuple[int, ...]
    spec: str
    cells: tuple[int, int]
    shards: int
    copies: int
    elements: int
    position: int
    dimensions: tuple[int, ...]


def draw(plan: PlanRecord, path: Path) -> None:
    """Write the picture of a plan to a file. Errors as for `picture.figure`."""
    shown = tensors(plan)[: COLUMNS * ROWS]
    rows = -(-len(shown) // COLUMNS)
    with figure(path, (2.0 * COLUMNS, 2.3 * rows + 0.4 + _bars_height(plan))) as drawn:
        parts = drawn.subfigures(2, 1, squeeze=False, height_ratios=(2.3 * rows + 0.4, _bars_height(plan)))
        boxes, bars = parts.flat
        boxes.suptitle(_title(plan), fontsize="medium")
        grid = boxes.subplots(rows, COLUMNS, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for axes, tensor in zip(grid.flat, shown, strict=False):
            _box(axes, tensor)
        left, right = bars.subplots(1, 2)
        _stacked(left, f"predicted step: {seconds(plan.step_time_s)}", times(plan), seconds)
        memory = {stage.name: stage.memory for stage in plan.stages}
        _stacked(right, f"peak memory per device: {size(plan.peak_memory_bytes)}", memory, size)


def _bars_height(plan: PlanRecord) -> float:
    return 1.5 + 0.3 * len(plan.stages)


def _title(plan: PlanRecord) -> str:
    mesh = " x ".join(f"{name}={n}" for name, n in plan.mesh.items())
    stages = f", {len(plan.stages)} stages, {plan.schedule}" if plan.pipelined else ""
    return f"{math.prod(plan.mesh_sizes)} devices of {plan.cluster}, mesh {mesh}{stages}; one colour for each shard"


def tensors(plan: PlanRecord) -> list[Tensor]:
    """The argument leaves by groups of equal layers, optimizer state left out, the largest first."""
    kinds = (members for title, members in sections(plan).items() if title != "optimizer state")
    groups = (group for members in kinds for group in argument_groups(plan, members).values())
    return sorted((_tensor(plan, group) for group in groups), key=lambda tensor: -tensor.elements)


def _tensor(plan: PlanRecord, group: Sequence[int]) -> Tensor:
    layout, shape, sizes = plan.inputs[group[0]], plan.input_shapes[group[0]], _sizes(plan, group[0])
    parts = cuts(layout, sizes)
    # The two dimensions with the most shards; the longer ones of equally many, which are the matrix of a weight.
    drawn = sorted(sorted(range(len(shape)), key=lambda d: (-parts.get(d, 1), -shape[d]))[:2])
    rows, columns = ([1, 1] + [parts.get(d, 1) for d in drawn])[-2:]
    shards = math.prod(parts.values())
    return Tensor(
        label([plan.input_paths[i] for i in group]),
        shape,
        spec_text(spec(layout, len(shape), plan.mesh_names)),
        (rows, columns),
        shards,
        math.prod(sizes) // shards,
        len(group) * math.prod(shape),
        group[0],
        tuple(drawn),
    )


def _sizes(plan: PlanRecord, leaf: int) -> tuple[int, ...]:
    """Sizes of the mesh over which an argument leaf is sharded: with stages, that of the stage that stores it."""
    return tuple((owner(plan, leaf) or plan.stages[0]).submesh.values())


def _box(axes: Axes, tensor: Tensor) -> None:
    """The shards of a tensor, and what they are."""
    rows, columns = (min(n, CELLS) for n in tensor.cells)
    shades = [[r * columns + c for c in range(columns)] for r in range(rows)]
    if tensor.shards == 1:
        axes.axhspan(0, 1, color=WHOLE)
    else:
        # The lightest colours are left out, since lines between shards are white.
        axes.imshow(shades, PALETTE, vmin=0, vmax=1.15 * rows * columns, aspect="auto", extent=(0, 1, 0, 1))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    for number, line in ((rows, axes.axhline), (columns, axes.axvline)):
        for border in range(1, number if number <= LINED else 0):
            line(border / number, color="white", linewidth=0.6)
    axes.set_title(f"{_short(tensor.name)}\n{list(tensor.shape)}", fontsize="x-small")
    axes.text(0.5, -0.05, f"{tensor.spec}\n{_shards_text(tensor)}", ha="center", va="top", fontsize="x-small")


def _shards_text(tensor: Tensor) -> str:
    if tensor.shards == 1:
        return "whole on every device"
    return f"{tensor.shards} shards" + (f", {tensor.copies} copies of each" if tensor.copies > 1 else "")


def _short(name: str, most: int = 26) -> str:
    name = name.removeprefix("state/").removeprefix("params/")
    return name if len(name) <= most else f"...{name[3 - most :]}"


def times(plan: PlanRecord) -> Mapping[str, Mapping[str, float]]:
    """Row -> part -> seconds: the parts of the step; with stages, the time of each pass over the whole batch."""
    if not plan.pipelined:
        return {"all": {part: t for part, t in plan.parts.items() if part != "hidden"}}
    counts = dict.fromkeys("FBW", plan.num_microbatches)
    return {s.name: {kind: t * counts.get(kind, 1) for kind, t in s.seconds.items()} for s in plan.stages}


def _stacked(axes: Axes, title: str, rows: Mapping[str, Mapping[str, float]], text: Callable[[float], str]) -> None:
    """A bar for each row, its parts one after the other."""
    parts = dict.fromkeys(part for row in rows.values() for part, amount in row.items() if amount)
    ends = dict.fromkeys(rows, 0.0)
    for part in parts:
        amounts = [row.get(part, 0.0) for row in rows.values()]
        whole = f"{part}: {text(max(amounts))}" if len(rows) == 1 else part
        axes.barh(list(rows), amounts, left=list(ends.values()), label=whole, height=0.6)
        ends = {name: end + amount for (name, end), amount in zip(ends.items(), amounts, strict=True)}
    axes.invert_yaxis()  # the first stage on top
    axes.set_title(title, fontsize="small")
    axes.xaxis.set_major_formatter(lambda amount, _: text(amount))
    axes.tick_params(labelsize="x-small")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(fontsize="x-small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)


# Any picture


@contextmanager
def figure(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    """A figure to draw on; written to `path` in the end.

    Raises:
        ArgumentError: matplotlib is not installed, or it does not write files with this ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(f'the picture {str(path)!r} needs matplotlib: pip install "autopar[report]"') from error
    drawn = Figure(figsize=inches, layout="constrained")
    yield drawn
    try:
        drawn.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the picture {str(path)!r} cannot be written: {error}") from error


@contextmanager
def picture(path: Path, title: str, **axes: Any) -> Iterator[Axes]:
    """One pair of axes with a legend; `axes`: labels and scales as matplotlib names them. Errors as for `figure`."""
    with figure(path, (8, 5)) as whole:
        drawn = whole.add_subplot(title=title, **axes)
        yield drawn
        drawn.legend(fontsize="small")
