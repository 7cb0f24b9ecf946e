"""Published steps with fused attention: the plan as published as pins, its predicted step beside the measured one.

    llama3.1-8b     NVIDIA DGX Cloud benchmark recipes v25.02 (NeMo), H100: data parallel, the sequence in two parts
                    (context parallelism), optimizer state over all devices (ZeRO-1), 32 microbatches, cuDNN's attention
    maxtext         MaxText, configs/v5p/README.md of December 2023, TPU v5p: parameters over one axis (FSDP), heads and
                    hidden layer over another, activations between products over both, Pallas attention, products kept
                    for the backward pass or nothing

What is predicted otherwise than it was run, for every row of a kind, is in `Kind.differs`. Gradients are one such: here
they are reduced in every microbatch, in NeMo once per step. So rows with microbatches have a second prediction, "at
once", of the whole batch in one.

    ratio     predicted / measured
    order     of all pairs of rows on the same hardware whose measured steps differ by more than `TIE`, those whose
              predicted steps differ in the same direction

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
from autopar.errors import ArgumentError
from autopar.hardware.cluster import Cluster
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
    """

    cluster: str
    attention: str
    differs: str


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "llama3.1-8b": Kind(
            "dgx-h100",
            "cudnn",
            "attention is cut by heads, in NeMo by positions; gradients are added up in float32",
        ),
        "maxtext": Kind("tpu-v5p", "splash", "silu for relu, splash for flash attention"),
    }
)


@dataclass(frozen=True, slots=True)
class Published:
    """A measured step and its plan.

    Attributes:
        name: for the table.
        kind: of `KINDS`.
        config: the model, with its attention.
        axes: the mesh.
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


def _llama(devices: int, step_s: float) -> Published:
    config = llama3.Config(32, 4096, 32, 8, 14336, batch=16 * devices, master=True, attention="cudnn", precision=MIXED)
    axes = {"data": devices // 2, "context": 2}
    return Published(f"llama3.1-8b 1x{devices}", "llama3.1-8b", config, axes, step_s, microbatches=32)


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
    _llama(8, 12.78),
    _llama(16, 12.99),
    _llama(32, 13.0),
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
    """ZeRO-1 over all devices, examples over the first axis and positions over the second."""
    given = Pins({"zero1": PartitionSpec(tuple(row.axes))})
    pins = given.expand(model.step, *model.abstract_args(), mesh=dict(row.axes))
    entered = PartitionSpec(*row.axes)
    return {key: entered if key.startswith(("batch/", "products")) else spec for key, spec in pins.items()}


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
    {"llama3.1-8b": _pins_of_llama, "maxtext": _pins_of_maxtext}
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
            stages=1,
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
    once = planned(replace(row, microbatches=1), MOST_MEMORY_AT_ONCE).step_time_s if row.microbatches > 1 else None
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
    }


def order(rows: Sequence[Row], cluster: str) -> tuple[int, int]:
    """Of the pairs of rows on a cluster that have an order, how many have the predicted one; and how many there are."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations([row for row in rows if row["cluster"] == cluster], 2)
        if abs(math.log(a["measured_s"] / b["measured_s"])) > TIE
    ]
    same = [(a["measured_s"] < b["measured_s"]) == (a["predicted_s"] < b["predicted_s"]) for a, b in pairs]
    return sum(same), len(same)


def table(rows: Sequence[Row]) -> str:
    """Rows, their order on each cluster, and what is predicted otherwise than it was run."""
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
    for cluster in dict.fromkeys(row["cluster"] for row in rows):
        right, count = order(rows, cluster)
        lines.append(f"{cluster}: {right} of {count} pairs in order")
    return "\n".join([*lines, *dict.fromkeys(f"{row['cluster']}: {row['differs']}" for row in rows)])
