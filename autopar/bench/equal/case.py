"""One case of `autopar bench equal`: three parallel steps against three steps on one device.

    reference(model)        states and losses of `jax.jit(step)` on one device
    by_hand(model, n)       the same through a data-parallel step as an expert writes it: batch cut over the most
                            devices (up to n) that divide it
    run(model, mesh, ...)   the same through `autopar.parallelize`, and what can be checked on the way

Criteria, with |.| the largest magnitude of a leaf and ||.|| the Euclidean norm of all parameters together:

    float64     |parallel - single| <= 1e-9 |single| for every leaf of the state
    float32     the losses agree to 1e-5, and ||parallel - single|| is at most ten times what the data-parallel step
                differs by (Adam divides rounding by rounding where a gradient is nearly zero), or at most 1e-6

A leaf that is zero but for rounding (a key bias, of which the softmax takes no notice) has no digits to agree in. It is
known by its magnitude, at most `NOISE` of the largest of its kind (parameters, first moments, second moments), and may
differ by ten times what it differs by in the data-parallel step.

Much more than an even share of the FLOPs per device must have reasons: `flops`.

The default cluster makes compute dear and communication cheap (`dear`): on figures of a real machine the best plan of
a toy is to compute everything everywhere, which would test nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar import jax_compat, zoo
from autopar.bench.equal import flops as equal_flops
from autopar.bench.worker import cpu_devices, serve
from autopar.hardware.cluster import Cluster
from autopar.runtime.executables import Executable
from autopar.verification import verify as verification
from autopar.verification.differences import host

STEPS = 3
TOLERANCE_64 = 1e-9
TOLERANCE_LOSS = 1e-5
TIMES_BY_HAND = 10.0
FLOOR_32 = 1e-6  # relative difference below which float32 parameters count as equal
NOISE = {"nu": 1e-12}
NOISE_ELSEWHERE = 1e-6  # second moments are squares


@dataclass(frozen=True, kw_only=True)
class Differences:
    """A parallel run beside the single device; differences of leaves are relative to their largest magnitude.

    Attributes:
        loss: largest relative difference of a loss.
        params: norm of the difference of all parameters over their norm.
        leaf: largest relative difference of a leaf of the state that is not rounding alone; `worst` is its path.
        rounding: number of leaves that are zero but for rounding.
        by_hand: `params` of the hand-written data-parallel step on `by_hand_devices` devices (0: it was not run).
    """

    loss: float = 0.0
    params: float = 0.0
    leaf: float = 0.0
    worst: str = ""
    rounding: int = 0
    by_hand: float = 0.0
    by_hand_devices: int = 0


@dataclass(frozen=True)
class Row(Differences):
    """The result of one case.

    Attributes:
        ok: all of `failures` is empty.
        flops_ratio: FLOPs per device of the compiled program times devices over those of one device.
        bytes_ratio: emitted over predicted bytes on the wire.
        wire_bytes: predicted bytes that each device sends per step.
        reasons: what makes `flops_ratio` exceed `flops.FLAG`, if it does.
        failures: a line for each criterion that does not hold.
    """

    model: str
    mesh: tuple[int, ...]
    dtype: str
    ok: bool
    flops_ratio: float = 0.0
    bytes_ratio: float = 0.0
    wire_bytes: float = 0.0
    reasons: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Run:
    """The final state and the losses of `STEPS` steps, as host values."""

    state: Any
    losses: tuple[float, ...]


def dear(mesh: Sequence[int]) -> Cluster:
    """Slow devices (1 Gflop/s, 1 GB/s) on a fast network (0.1 us, 100 GB/s): worth cutting the smallest model."""
    peaks: dict[str, float] = {"float64": 1e9, "float32": 1e9, "bfloat16": 1e9}
    return Cluster.custom(mesh, 1e-7, 1e-11, peaks, 1e9, 2**34, name="dear compute")


CLUSTERS: Mapping[str, Callable[[Sequence[int]], Cluster | None]] = {"dear": dear, "local": lambda mesh: None}


@dataclass(frozen=True, eq=False)
class Inputs:
    """A model with its first state and a batch for each step, on the host."""

    model: zoo.Model
    state: Any
    batches: tuple[Any, ...]

    @property
    def batch_size(self) -> int:
        return max(leaf.shape[0] for leaf in jax.tree.leaves(self.batches[0]))


def inputs(target: str, dtype: str, batch: int | None = None, layers: int | None = None) -> Inputs:
    """The same numbers for every mesh; `batch` and `layers`: examples and blocks, if not as many as the model has."""
    model = zoo.build(target, dtype=dtype, batch=batch, layers=layers)
    batches = tuple(model.make_batch(jax.random.key(1 + i)) for i in range(STEPS))
    return Inputs(model, model.init(jax.random.key(0)), batches)


def steps(step: Callable[..., Any], inputs: Inputs, state: Any) -> Run:
    """`STEPS` steps from `state`."""
    losses: list[float] = []
    for batch in inputs.batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return Run(autopar.gather(state), tuple(losses))


@dataclass(frozen=True, eq=False)
class ByHand:
    """How far the hand-written data-parallel step on so many devices is from one device; 0 devices: it was not run."""

    leaves: Mapping[str, float] = field(default_factory=dict[str, float])
    params: float = 0.0
    devices: int = 0


def needs_expert(dtype: str, params: float, leaf_differences: Mapping[str, float], rounding: frozenset[str]) -> bool:
    """Whether the criteria ask how much rounding does.

    Args:
        dtype: of the model; `params`: relative difference of all parameters.
        leaf_differences: path of a leaf -> difference.
        rounding: leaves that are zero but for rounding.
    """
    if dtype == "float64":
        return any(leaf_differences[path] > TOLERANCE_64 for path in rounding)
    return params > FLOOR_32


def by_hand(baseline: Single, devices: int) -> ByHand:
    """The yardstick of rounding, on up to so many devices."""
    hand, used = _by_hand(baseline.inputs, devices)
    return ByHand(differences(hand.state, baseline.run.state), of_params(hand.state, baseline.run.state), used)


def _by_hand(inputs: Inputs, devices: int) -> tuple[Run, int]:
    """Data parallelism as an expert writes it, and over how many devices it goes."""
    used = max(n for n in range(1, devices + 1) if inputs.batch_size % n == 0)
    mesh = jax_compat.auto_mesh(np.array(jax.devices()[:used]), ("data",))
    whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(inputs.model.step, in_shardings=(whole, cut), out_shardings=whole)
    return steps(step, inputs, inputs.state), used


# Comparing


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def kind(path: str) -> str:
    """Which leaves are of one magnitude: "params", "mu", "nu", or the first part of the path."""
    parts = path.split("/")
    return next((p for p in parts if p in ("mu", "nu")), parts[0])


def rounding_leaves(state: Any) -> frozenset[str]:
    """Paths of the floating leaves that are zero but for rounding (see the module)."""
    magnitudes = {path: _magnitude(x) for path, x in _leaves(state)}
    largest: dict[str, float] = {}
    for path, m in magnitudes.items():
        largest[kind(path)] = max(largest.get(kind(path), 0.0), m)
    return frozenset(
        p for p, m in magnitudes.items() if 0 < m <= NOISE.get(kind(p), NOISE_ELSEWHERE) * largest[kind(p)]
    )


def differences(ours: Any, theirs: Any) -> dict[str, float]:
    """Path -> largest difference over largest magnitude of the leaf; integers differ by 0 or infinity."""
    pairs = zip(_leaves(ours), _leaves(theirs), strict=True)
    return {path: _difference(x, y) for (path, x), (_, y) in pairs}


def of_params(ours: Any, theirs: Any) -> float:
    """Norm of the difference of all parameters over the norm of `theirs`."""
    pairs = zip(_leaves(ours), _leaves(theirs), strict=True)
    kept = [(np.float64(x), np.float64(y)) for (path, x), (_, y) in pairs if kind(path) == "params"]
    squares = [(np.sum((x - y) ** 2), np.sum(y**2)) for x, y in kept]
    return math.sqrt(sum(float(d) for d, _ in squares) / sum(float(n) for _, n in squares))


def _magnitude(x: Any) -> float:
    x = host(x)
    return float(np.max(np.abs(x), initial=0.0)) if np.issubdtype(x.dtype, np.floating) else 0.0


def _difference(x: Any, y: Any) -> float:
    x, y = host(x), host(y)
    if not np.issubdtype(y.dtype, np.floating):
        return 0.0 if np.array_equal(x, y) else math.inf
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.inf
    largest = float(np.max(np.abs(x.astype(np.float64) - y), initial=0.0))
    return largest / _magnitude(y) if largest > 0 and _magnitude(y) > 0 else largest


def loss_difference(ours: Run, theirs: Run) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))


# Running


class Counted:
    """A step that counts how often Python runs it, which is how often it is traced."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self.calls = 0
        self.__name__ = getattr(step, "__name__", "step")

    def __call__(self, state: Any, batch: Any) -> Any:
        self.calls += 1
        return self.step(state, batch)


@dataclass(frozen=True, eq=False)
class Parallel:
    """What the parallel steps gave, and the habits of the step that were seen."""

    run: Run
    compiled: Executable
    habits: tuple[str, ...]

    @property
    def plan(self) -> autopar.Plan:
        return self.compiled.plan


def parallel(inputs: Inputs, *, replans: bool = True, **options: Any) -> Parallel:
    """`STEPS` steps through autopar; `habits` has a line for each of donation, tracing and replanning that fails.

    `replans`: whether to try a batch of another size, which takes as long as planning does.
    """
    counted = Counted(inputs.model.step)
    step = autopar.parallelize(counted, **options)
    state, losses, habits = inputs.state, [], []
    for i, batch in enumerate(inputs.batches):
        before = state
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if i > 0:
            habits += _not_donated(before, step.plan(state, batch))
    if counted.calls != 1:
        habits.append(f"{STEPS} steps of one shape traced the function {counted.calls} times")
    compiled, traced = step.compiled(state, inputs.batches[0]), counted.calls
    if replans:
        double = jax.tree.map(lambda x: jnp.concatenate([x, x]), inputs.batches[0])
        if step.plan(state, double).graph_hash == compiled.plan.graph_hash or counted.calls != traced + 1:
            habits.append(f"a batch of twice the size traced the function {counted.calls - traced} times, not once")
    return Parallel(Run(autopar.gather(state), tuple(losses)), compiled, tuple(dict.fromkeys(habits)))


def _not_donated(before: Any, plan: autopar.Plan) -> list[str]:
    leaves = _leaves(before)
    kept = [path for i, (path, x) in enumerate(leaves) if i in plan.donated and not x.is_deleted()]
    missing = [path for i, (path, _) in enumerate(leaves) if i not in plan.donated]
    lines = [f"state not donated: {', '.join(missing[:3])}"] if missing else []
    return [*lines, f"donated but still alive: {', '.join(kept[:3])}"] if kept else lines


@dataclass(frozen=True, eq=False)
class Single:
    """One model on one device: what every mesh is compared with."""

    inputs: Inputs
    run: Run
    flops: float


def single(target: str, dtype: str, batch: int | None = None, layers: int | None = None) -> Single:
    """`STEPS` jitted steps on one device."""
    model_inputs = inputs(target, dtype, batch, layers)
    compiled = jax.jit(model_inputs.model.step).lower(model_inputs.state, model_inputs.batches[0]).compile()
    run = steps(compiled, model_inputs, model_inputs.state)
    return Single(model_inputs, run, float((compiled.cost_analysis() or {})["flops"]))


def case(baseline: Single, mesh: Sequence[int], dtype: str, cluster: str = "dear", *, replans: bool = True) -> Row:
    """All criteria for one model on one mesh; `replans` as in `parallel`."""
    inputs, devices = baseline.inputs, math.prod(mesh)
    ours = parallel(inputs, replans=replans, mesh=tuple(mesh), cluster=CLUSTERS[cluster](mesh))
    numbers, wrong = compared(baseline, ours.run, dtype, devices)
    report = verification.verify_compiled(ours.compiled, inputs.model.step, inputs.state, inputs.batches[0])
    row = Row(
        inputs.model.name,
        tuple(mesh),
        dtype,
        ok=False,
        **asdict(numbers),
        flops_ratio=report.flops * devices / baseline.flops,
        bytes_ratio=report.comparison.ratio,
        wire_bytes=ours.plan.wire_bytes(),
    )
    found_flops = equal_flops.Reasons()
    if row.flops_ratio > equal_flops.FLAG:
        found_flops = equal_flops.explain(
            inputs.model.step, (inputs.state, inputs.batches[0]), ours.plan, row.flops_ratio
        )
    failures = (*wrong, *ours.habits, *_bytes(report), *found_flops.failures)
    return replace(row, ok=not failures, reasons=found_flops.lines, failures=failures)


def compared(baseline: Single, run: Run, dtype: str, devices: int) -> tuple[Differences, list[str]]:
    """A run beside the single device, and a line for each number that is too far from it.

    Args:
        baseline: the run on a single device.
        run: the parallel run.
        dtype: of the state.
        devices: of the step written by hand, which says what rounding alone does.
    """
    leaf_differences = differences(run.state, baseline.run.state)
    rounding = rounding_leaves(baseline.run.state)
    params = of_params(run.state, baseline.run.state)
    hand = by_hand(baseline, devices) if needs_expert(dtype, params, leaf_differences, rounding) else ByHand()
    worst = max((path for path in leaf_differences if path not in rounding), key=lambda path: leaf_differences[path])
    numbers = Differences(
        loss=loss_difference(run, baseline.run),
        params=params,
        leaf=leaf_differences[worst],
        worst=worst,
        rounding=len(rounding),
        by_hand=hand.params,
        by_hand_devices=hand.devices,
    )
    return numbers, _numbers_64(leaf_differences, hand.leaves, rounding) if dtype == "float64" else _numbers_32(numbers)


def _numbers_64(
    leaf_differences: Mapping[str, float], expert: Mapping[str, float], rounding: frozenset[str]
) -> list[str]:
    allowed = {
        p: max(TOLERANCE_64, TIMES_BY_HAND * expert.get(p, 0.0) if p in rounding else 0.0) for p in leaf_differences
    }
    return [f"{p} differs by {v:.1e} of its magnitude" for p, v in leaf_differences.items() if not v <= allowed[p]]


def _numbers_32(row: Differences) -> list[str]:
    lines = [] if row.loss <= TOLERANCE_LOSS else [f"a loss differs by {row.loss:.1e}"]
    if row.params <= max(TIMES_BY_HAND * row.by_hand, FLOOR_32):
        return lines
    return [*lines, f"parameters differ by {row.params:.1e}, by hand {row.by_hand:.1e}"]


def _bytes(report: autopar.Report) -> list[str]:
    return [] if report.ok else [f"bytes on the wire: {report.comparison.ratio:.2f} of the plan", *report.mismatches]


def work(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rows of one model and dtype on several meshes; an error becomes a failed row."""
    cpu_devices(max(8, *(math.prod(m) for m in spec["meshes"])))
    jax.config.update("jax_enable_x64", spec["dtype"] == "float64")
    warnings.simplefilter("ignore")
    baseline = single(spec["model"], spec["dtype"])
    for mesh in spec["meshes"]:
        try:
            row = case(baseline, mesh, spec["dtype"], spec["cluster"])
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            row = Row(spec["model"], tuple(mesh), spec["dtype"], False, failures=(text[:300],))
        yield asdict(row)


if __name__ == "__main__":
    serve(work)
