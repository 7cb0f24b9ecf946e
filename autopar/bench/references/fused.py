"""Published steps with fused attention: the plan as published as pins, its predicted step beside the measured one.

    llama3.1        NVIDIA DGX Cloud benchmark recipes v25.02 (NeMo), H100: data parallel, the sequence in two parts
                    (context parallelism), optimizer state over both axes (ZeRO-1), cuDNN's attention; 70B and 405B in
                    stages, heads and hidden layer over a third axis, what blocks add over all but the first
    maxtext         MaxText, configs/v5p/README.md of December 2023, TPU v5p: parameters over one axis (FSDP), heads and
                    hidden layer over another, activations between products over both, Pallas attention, products kept
                    for the backward pass or nothing

What is predicted otherwise than it was run, for every row of a kind, is in `Kind.differs`; what the prediction leaves
out, in `Kind.missing`. Rows with microbatches on one mesh have a second prediction, "at once", of the whole batch in
one: it is without the traffic of adding up gradients.

    ratio     predicted / measured
    order     of all pairs of rows on the same hardware whose measured steps differ by more than `TIE`, those whose
              predicted steps differ in the same direction; the other pairs are printed

Sources: https://github.com/NVIDIA/dgxc-benchmarking (v25.02), https://github.com/AI-Hypercomputer/maxtext (76bd53b0f).
MaxText's steps are computed from the TFLOP/s that it prints, which count 6 N per token and causal attention.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from jax.sharding import PartitionSpec

from autopar import api
from autopar.bench.ranking import rank_correlation
from autopar.errors import ArgumentError
from autopar.hardware.cluster import Cluster
from autopar.ir.keyed import grouped
from autopar.ir.text import seconds, size
from autopar.ir.text import table as grid
from autopar.ir.trace import trace
from autopar.pins import Pins
from autopar.plans import cache as plan_cache
from autopar.plans.plan import Plan
from autopar.zoo import llama3
from autopar.zoo.model import MIXED, Model

Row = dict[str, Any]

#: Measured steps that differ by less have no order: they are published with three digits.
TIE = 0.01


#: Memory that a plan as published may take, as a multiple of the device's: it ran, whatever it is predicted to need.
MOST_MEMORY = 2.0
#: The same for the prediction "at once", which is not to run.
MOST_MEMORY_AT_ONCE = 20.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What the rows of one source share.

    Attributes:
        cluster: the preset.
        attention: as published.
        differs: what is entered otherwise than it was run.
        missing: what the prediction leaves out, or assumes.
    """

    cluster: str
    attention: str
    differs: tuple[str, ...]
    missing: tuple[str, ...]


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "llama3.1": Kind(
            "dgx-h100",
            "cudnn",
            (
                "attention is cut by heads, in NeMo by positions",
                "gradients are added up and reduced in float32, in NeMo reduced in bfloat16",
                "two stages on each submesh, in NeMo five (70B) or seven (405B)",
            ),
            (
                "70% of the peak is assumed for products and attention; compute is most of these steps",
                "no collective along the axis tensor overlaps with computation, as some do in NeMo",
            ),
        ),
        "maxtext": Kind(
            "tpu-v5p",
            "splash",
            (
                "silu for relu, splash for flash attention",
                "512b and 1024b: where backward passes compute layers again, the planner chooses layouts",
            ),
            (
                "no collective along the axis tensor overlaps with computation",
                "between slices bytes alone are priced: slices of 256 chips and more measured 2 to 18 times that",
                "1024b on twice the chips measured 15% less time, with the same work on each chip",
            ),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Published:
    """A measured step and its plan.

    Attributes:
        name: for the table.
        kind: of `KINDS`.
        config: the model, with its attention.
        axes: the mesh; the first axis is that of the stages, if there are several.
        step_s: as measured.
        microbatches: per step.
        remat: what the backward pass computes again.
        slices: tori, connected by the data centre's network; the first axis counts them.
    """

    name: str
    kind: str
    config: llama3.Config
    axes: Mapping[str, int]
    step_s: float
    microbatches: int = 1
    remat: Literal["none", "dots", "full"] = "none"
    slices: int = 1
    stages: int = 1


_LLAMA = MappingProxyType(
    {  # layers, width, heads, heads of keys, hidden layer
        "8b": (32, 4096, 32, 8, 14336),
        "70b": (80, 8192, 64, 8, 28672),
        "405b": (126, 16384, 128, 16, 53248),
        "405b-21l": (21, 16384, 128, 16, 53248),
    }
)


def _llama(name: str, data: int, microbatches: int, step_s: float, tensor: int = 1, stages: int = 1) -> Published:
    batch = data * microbatches
    config = llama3.Config(*_LLAMA[name], batch=batch, master=True, attention="cudnn", precision=MIXED)
    axes = {"data": data, "context": 2}
    if stages > 1:
        axes = {"pipe": stages, **axes, "tensor": tensor}
    title = f"llama3.1-{name} 1x{math.prod(axes.values())}"
    return Published(title, "llama3.1", config, axes, step_s, microbatches, stages=stages)


_MAXTEXT = MappingProxyType(
    {  # layers, width, heads, hidden layer, sequences per device
        "32b": (32, 10240, 32, 32768, 8),
        "64b": (64, 10240, 32, 32768, 4),
        "128b": (64, 10240, 64, 65536, 2),
        "256b": (64, 20480, 64, 65536, 2),
        "512b": (128, 20480, 64, 65536, 2),
        "1024b": (128, 20480, 128, 131072, 2),
    }
)


def _maxtext(name: str, fsdp: int, tensor: int, step_s: float, slices: int = 1) -> Published:
    layers, width, heads, hidden, per_device = _MAXTEXT[name]
    devices = slices * fsdp * tensor
    config = llama3.Config(
        *(layers, width, heads, heads, hidden),
        vocab=32768,
        seq=2048,
        batch=per_device * devices,
        precision=MIXED,
        scan=True,
        tied=True,
        attention="splash",
        head_dim=256,
        gated=False,
    )
    axes = {**({"data": slices} if slices > 1 else {}), "fsdp": fsdp, "tensor": tensor}
    remat = "full" if width == 20480 and layers == 128 else "dots"
    return Published(f"maxtext-{name} {slices}x{fsdp * tensor}", "maxtext", config, axes, step_s, 1, remat, slices)


ROWS: tuple[Published, ...] = (
    _llama("8b", 4, 32, 12.78),
    _llama("8b", 8, 32, 12.99),
    _llama("8b", 16, 32, 13.0),
    _llama("70b", 4, 64, 14.7, 4, 4),
    _llama("70b", 8, 64, 14.72, 4, 4),
    _llama("70b", 16, 64, 14.8, 4, 4),
    _llama("70b", 64, 64, 14.84, 4, 4),
    _llama("405b", 16, 63, 17.7, 8, 9),
    _llama("405b-21l", 2, 63, 8.87, 8, 3),
    _maxtext("32b", 16, 4, 9.9157),
    _maxtext("32b", 16, 4, 10.195, 2),
    _maxtext("64b", 16, 4, 10.018),
    _maxtext("64b", 16, 4, 10.472, 2),
    _maxtext("128b", 16, 8, 10.246),
    _maxtext("128b", 16, 8, 10.582, 2),
    _maxtext("128b", 32, 8, 10.214),
    _maxtext("128b", 32, 8, 11.78, 2),
    _maxtext("256b", 64, 8, 20.787),
    _maxtext("256b", 64, 8, 22.154, 2),
    _maxtext("512b", 32, 16, 43.498),
    _maxtext("512b", 32, 16, 45.349, 2),
    _maxtext("1024b", 64, 16, 100.63),
    _maxtext("1024b", 64, 16, 107.85, 2),
    _maxtext("1024b", 128, 16, 86.062),
    _maxtext("1024b", 128, 16, 91.614, 2),
)


def model_of(row: Published) -> Model:
    """The model of a row."""
    return llama3.build(row.name, row.config)


def _pins_of_llama(row: Published, model: Model) -> Mapping[str, Any]:
    """ZeRO-1 over data and positions; in stages Megatron's layouts too, and what a block adds by positions alone."""
    inner = {axis: size for axis, size in row.axes.items() if axis != "pipe"}
    given = Pins({"zero1": PartitionSpec("data")})
    given |= {"megatron": PartitionSpec("tensor")} if "tensor" in inner else {}
    pins = given.expand(model.step, *model.abstract_args(), mesh=inner)
    sums, open_dim = f",{row.config.seq},{row.config.width}]", PartitionSpec.UNCONSTRAINED

    def entered(key: str, spec: PartitionSpec) -> PartitionSpec:
        if key.startswith("batch/"):
            return PartitionSpec("data", "context")
        if not key.startswith("products"):
            return PartitionSpec(*(("data", "context") if entry == "data" else entry for entry in spec))
        scattered = "tensor" in inner and key.endswith(sums)
        return PartitionSpec("data", open_dim) if scattered else PartitionSpec("data", "context", *spec[2:])

    added = PartitionSpec("data", ("context", "tensor"))
    lines = _block_sums(row, model) if "tensor" in inner else ()
    return {**{key: entered(key, spec) for key, spec in pins.items()}, **{f"activations at {x}": added for x in lines}}


def _pins_of_maxtext(row: Published, model: Model) -> Mapping[str, Any]:
    """FSDP and Megatron's layouts, and what a block adds to its input sharded over both axes.

    The products whose results are added are cut along the dimension that they contract: their sums are scattered.
    """
    batch = ("data", "fsdp") if row.slices > 1 else ("fsdp",)
    given = Pins({"fsdp": PartitionSpec("fsdp"), "megatron": PartitionSpec("tensor")})
    pins = given.expand(model.step, *model.abstract_args(), mesh=dict(row.axes))
    sums = f",{row.config.seq},{row.config.width}]"

    def entered(key: str, spec: PartitionSpec) -> PartitionSpec:
        if key.startswith("batch/"):
            return PartitionSpec(batch)
        if key.startswith("products") and key.endswith(sums):
            return PartitionSpec(batch, None, PartitionSpec.UNCONSTRAINED)
        return PartitionSpec(batch, *spec[1:]) if key.startswith("products") else spec

    added = {f"activations at {line}": PartitionSpec(batch, None, "tensor") for line in _block_sums(row, model)}
    return {**{key: entered(key, spec) for key, spec in pins.items()}, **added}


def _block_sums(row: Published, model: Model) -> list[str]:
    """The source lines at which blocks add to their input."""
    graph, config = trace(model.step, *model.abstract_args()).graph, row.config
    shape = (config.batch, config.seq, config.width)
    adds = (op for op in graph.walk() if op.name == "add" and op.phase == "forward")
    return list(dict.fromkeys(op.source for op in adds if graph.types[op.outputs[0]].shape == shape))


_PINS: Mapping[str, Callable[[Published, Model], Mapping[str, Any]]] = MappingProxyType(
    {"llama3.1": _pins_of_llama, "maxtext": _pins_of_maxtext}
)


def planned(row: Published, most_memory: float = MOST_MEMORY) -> Plan:
    """The plan of a row as published."""
    model, kind, devices = model_of(row), KINDS[row.kind], math.prod(row.axes.values())
    cluster = Cluster.named(kind.cluster, None, devices) if row.slices == 1 else _slices(kind.cluster, row, devices)
    with plan_cache.off():
        return api.plan(
            *(model.step, *model.abstract_args()),
            mesh=dict(row.axes),
            cluster=cluster,
            pins=_PINS[row.kind](row, model),
            num_microbatches=row.microbatches,
            stages=row.stages,
            schedule="interleaved-1f1b" if row.stages > 1 else "auto",
            remat=row.remat,
            memory_budget=round(most_memory * cluster.device.memory_bytes),
        )


def _slices(name: str, row: Published, devices: int) -> Cluster:
    torus = Cluster.named(name, None, devices // row.slices)
    return Cluster.preset(name, torus.num_devices // torus.devices_per_host, None, row.slices)


def run(wanted: Sequence[str] = (), tell: Callable[[str], None] = lambda text: None) -> list[Row]:
    """The rows whose names start with one of these texts; without any, all rows.

    Raises:
        ArgumentError: a text that no name starts with.
    """
    unknown = [text for text in wanted if not any(row.name.startswith(text) for row in ROWS)]
    if unknown:
        raise ArgumentError(f"no published step is {unknown[0]!r}; there are {', '.join(row.name for row in ROWS)}")
    rows: list[Row] = []
    for row in ROWS:
        if not wanted or row.name.startswith(tuple(wanted)):
            rows.append(compared(row))
            tell(f"{row.name}: {rows[-1]['ratio']:.3f} of the measured step")
    return rows


def compared(row: Published) -> Row:
    """The prediction of a row beside its measurement."""
    begin = time.perf_counter()
    plan = planned(row)
    took = time.perf_counter() - begin
    at_once = row.microbatches > 1 and row.stages == 1
    once = planned(replace(row, microbatches=1), MOST_MEMORY_AT_ONCE).step_time_s if at_once else None
    return {
        "name": row.name,
        "cluster": KINDS[row.kind].cluster,
        "attention": row.config.attention,
        "mesh": dict(row.axes),
        "remat": row.remat,
        "measured_s": row.step_s,
        "predicted_s": plan.step_time_s,
        "ratio": plan.step_time_s / row.step_s,
        "once_s": once,
        "once_ratio": None if once is None else once / row.step_s,
        "kinds": dict(plan.time().kinds),
        "mfu": plan.mfu,
        "peak_bytes": plan.peak_memory_bytes,
        "planning_s": took,
        "differs": KINDS[row.kind].differs,
        "missing": KINDS[row.kind].missing,
    }


def ordered_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The pairs of rows whose measured steps differ by more than `TIE`, the faster one first."""
    ascending = sorted(rows, key=lambda row: row["measured_s"])
    pairs = itertools.combinations(ascending, 2)
    return [(a, b) for a, b in pairs if math.log(b["measured_s"] / a["measured_s"]) > TIE]


def wrong_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Those of them that are predicted in the other order."""
    return [(a, b) for a, b in ordered_pairs(rows) if a["predicted_s"] >= b["predicted_s"]]


def by_cluster(rows: Sequence[Row]) -> Mapping[str, Sequence[Row]]:
    """Cluster -> its rows."""
    return grouped((row["cluster"], row) for row in rows)


def figures(rows: Sequence[Row]) -> Row:
    """Per cluster: pairs that have an order, those predicted in the other one by name, and Spearman's correlation."""
    return {
        cluster: {
            "pairs": len(ordered_pairs(here)),
            "wrong": [(a["name"], b["name"]) for a, b in wrong_pairs(here)],
            "spearman": rank_correlation([row["predicted_s"] for row in here], [row["measured_s"] for row in here]),
        }
        for cluster, here in by_cluster(rows).items()
    }


def table(rows: Sequence[Row]) -> str:
    """Rows, their order on each cluster, and why predictions differ."""
    heads = ("attention", "measured", "predicted", "ratio", "at once", "compute", "communication", "MFU", "peak")
    body = [
        (
            *(row["name"], row["attention"], seconds(row["measured_s"]), seconds(row["predicted_s"])),
            *(f"{row['ratio']:.3f}", f"{row['once_ratio']:.3f}" if row["once_ratio"] else "-"),
            *(seconds(row["kinds"].get(kind, 0.0)) for kind in ("compute", "communication")),
            *(f"{row['mfu']:.1%}", size(row["peak_bytes"])),
        )
        for row in rows
    ]
    lines = [grid("published steps", ("", *heads), body)]
    for cluster, here in by_cluster(rows).items():
        counts = figures(here)[cluster]
        right = counts["pairs"] - len(counts["wrong"])
        lines.append(
            f"{cluster}: {right} of {counts['pairs']} pairs in order; Spearman's correlation {counts['spearman']:.2f}"
        )
        lines.extend(f"  in the other order: {_pair(a)} and {_pair(b)}" for a, b in wrong_pairs(here))
        lines.extend(
            f"  entered otherwise: {text}" for text in dict.fromkeys(x for row in here for x in row["differs"])
        )
        lines.extend(f"  not in the price: {text}" for text in dict.fromkeys(x for row in here for x in row["missing"]))
    return "\n".join(lines)


def _pair(row: Row) -> str:
    return f"{row['name']} ({seconds(row['measured_s'])}, predicted {seconds(row['predicted_s'])})"
