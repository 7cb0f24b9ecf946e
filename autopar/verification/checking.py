"""Checks that the parallel step equals the step as written: both run on the local devices, leaf by leaf.

    reference   the function as written, under `jax.jit` on one device
    parallel    the same under `autopar.parallelize`, on copies of the arguments
    perturbed   the function as written once more, its arguments changed by one unit in the last place

A leaf is equal if integers, booleans and random keys are, and floats within

    max(tolerance of the least precise type of the step x magnitude of the leaf, 4 |perturbed - reference|).

In parallel, sums are taken in another order; its effect on a leaf is like that of any change of the last place. Adam,
for example, makes a step of full length from a gradient that is zero except for rounding.

If the step does not fit the memory of one device, its batch is halved until it does (`_fit_one_device`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar import jax_compat
from autopar.argnums import batch_positions
from autopar.errors import ArgumentError, DifferenceError
from autopar.hardware.cluster import Cluster
from autopar.ir import arguments
from autopar.ir.arguments import ArrayArguments
from autopar.ir.text import size, table
from autopar.ir.trace import attention_of_cudnn, check_values, needs_gpu, trace
from autopar.options import Settings, name_of
from autopar.plans.plan import Plan
from autopar.runtime.executables import Executable
from autopar.runtime.planned_step import PlannedStep
from autopar.verification import differences

PERTURBATION_FACTOR = 4.0  # allowed over the effect of a perturbation; ratios up to 2 occur in Adam's first steps
SHOWN = 20  # number of leaves that a printed report names


@dataclass(frozen=True)
class Leaf:
    """Comparison of one array of the results, or of a module that the step changes.

    Attributes:
        path: path as in the plan, "0/params/w" or "model/layer/kernel"; "" for a result that is one array.
        type: dtype and shape, such as "float32[8,16]".
        absolute: largest absolute difference.
        relative: largest absolute difference over the largest magnitude in the leaf.
        allowed: largest absolute difference that rounding explains; 0 for integers, booleans and keys.
    """

    path: str
    type: str
    absolute: float
    relative: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within what is allowed."""
        return self.absolute <= self.allowed

    @property
    def numbers(self) -> tuple[str, str, str]:
        """Absolute difference, relative difference and allowed difference, as text of two digits."""
        return f"{self.absolute:.2g}", f"{self.relative:.2g}", f"{self.allowed:.2g}"

    @property
    def excess(self) -> float:
        """Absolute over allowed difference; leaves are sorted by it."""
        return self.absolute / self.allowed if self.allowed else math.inf if self.absolute else 0.0


@dataclass(frozen=True, eq=False)
class Check:
    """Result of `autopar.check`; as text, a table of the twenty leaves with the largest differences.

    Attributes:
        name: name of the function.
        leaves: comparison of each leaf, by decreasing difference over what is allowed.
        plan: plan of the parallel step.
        notes: remarks, such as the size of the batch if it was halved.
    """

    name: str
    leaves: tuple[Leaf, ...]
    plan: Plan
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the difference of every leaf is within what is allowed."""
        return all(leaf.ok for leaf in self.leaves)

    def raise_if_different(self) -> None:
        """Raise an error unless the check is `ok`.

        Raises:
            DifferenceError: a leaf differs; the message is the table.
        """
        if not self.ok:
            raise DifferenceError(str(self))

    def __str__(self) -> str:
        wrong = sum(not leaf.ok for leaf in self.leaves)
        mesh = ", ".join(f"{n}={s}" for n, s in self.plan.mesh.items())
        verdict = f"{wrong} of {len(self.leaves)} leaves DIFFER" if wrong else f"{len(self.leaves)} leaves are equal"
        rows = [
            (leaf.path or "(result)", leaf.type, *leaf.numbers, "" if leaf.ok else "DIFFERS")
            for leaf in self.leaves[:SHOWN]
        ]
        left = len(self.leaves) - SHOWN
        return "\n".join(
            [
                f"{self.name} on the mesh ({mesh}) beside one device: {verdict}",
                *self.notes,
                table("leaf", ("", "type", "difference", "relative", "allowed", " "), rows),
                *([f"and {left} leaves that differ no more"] if left > 0 else []),
            ]
        )


def compare_with_one_device(
    fn: Callable[..., Any],
    args: Sequence[Any],
    s: Settings,
    parallel: Callable[[Sequence[Any]], tuple[PlannedStep, Executable]],
) -> Check:
    """The comparison of a parallel step with the step as written on one device. See `autopar.check`.

    Args:
        fn: the step as written.
        args: its arguments.
        s: the options of the parallel step.
        parallel: arguments -> the step planned for them and compiled.

    Raises:
        ArgumentError: an argument has no value, or the step does not fit one device even with the smallest batch.
        DonatedError: an argument was donated to an earlier step.
    """
    with arguments.as_arrays(args, {}, s.static_argnums) as array_args:
        check_values(fn, array_args.args, s.static_argnums)
        leaves, single, notes = _fit_one_device(fn, array_args, s)
        reference = single(leaves)
        perturbed = single([_perturbed(x, i) for i, x in enumerate(leaves)])
        positional, _ = jax.tree.unflatten(array_args.tree, leaves)
        planned, executable = parallel(arguments.merge_static(array_args.args, s.static_argnums, positional))
        results = executable.flat([_copied(x) for x in leaves])
    within = differences.tolerance(t.dtype for t in planned.traced.graph.types)
    leaf_checks = map(partial(_leaf, within), planned.plan.output_paths, results, reference, perturbed)
    by_excess = sorted(leaf_checks, key=lambda leaf: -leaf.excess)  # stable: equal ones in the order of the results
    return Check(name_of(fn), tuple(by_excess), planned.plan, notes)


def _leaf(within: float, path: str, parallel: Any, reference: Any, perturbed: Any) -> Leaf:
    difference, size = differences.absolute(parallel, reference), differences.magnitude(reference)
    exact = not differences.is_inexact(reference)
    allowed = 0.0 if exact else max(within * size, PERTURBATION_FACTOR * differences.absolute(perturbed, reference))
    relative = difference / size if size else math.copysign(math.inf, difference) if difference else 0.0
    return Leaf(path, f"{reference.dtype}[{','.join(map(str, reference.shape))}]", difference, relative, allowed)


def _copied(leaf: Any) -> Any:
    """A copy of an argument for the parallel step, which may donate it."""
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _perturbed(leaf: Any, seed: int) -> Any:
    """A leaf whose floats are larger or smaller by one unit in the last place, at random."""
    if not isinstance(leaf, jax.Array | np.ndarray) or not differences.is_inexact(leaf):
        return leaf
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), leaf.shape)
    values = differences.host(leaf)
    return (values * (1 + float(jax.numpy.finfo(values.dtype).eps) * signs)).astype(values.dtype)


# On one device


@dataclass(frozen=True, eq=False)
class SingleDevice:
    """The step as written, compiled for one device.

    Attributes:
        device: the device.
        compiled: JAX's compiled object.
    """

    device: Any
    compiled: Any

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the step needs; 0 if the platform does not report it."""
        stats = self.compiled.memory_analysis()
        if stats is None:
            return 0
        return stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Leaves of the results."""
        placed = [jax.device_put(x, self.device) for x in leaves]
        with _one_device_mesh(self.device):
            return jax.tree.leaves(self.compiled(*placed))


def _one_device_mesh(device: Any) -> AbstractContextManager[Any]:
    """A context with a mesh of one device, with the axes of the mesh that is set; none if no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return nullcontext() if mesh.empty else jax.set_mesh(_of_one_device(device, mesh.axis_names, mesh.axis_types))


def _of_one_device(device: Any, names: Sequence[str], types: Sequence[Any] | None = None) -> Mesh:
    devices = np.array([device]).reshape((1,) * len(names))
    return jax_compat.auto_mesh(devices, names) if types is None else Mesh(devices, names, axis_types=tuple(types))


def _compile_single(
    fn: Callable[..., Any],
    array_args: ArrayArguments,
    leaves: Sequence[Any],
    static: Sequence[int],
    mesh_axes: Mapping[str, int],
) -> SingleDevice:
    def flat(*leaves: Any) -> Any:
        pure = jax.tree.unflatten(array_args.tree, leaves)
        return arguments.call_on_arrays(fn, pure, partial(arguments.merge_static, array_args.args, static))

    device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    avals = [jax.typeof(x) for x in leaves]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding, weak_type=a.weak_type) for a in avals]
    with _one_device_mesh(device):
        try:
            try:
                return SingleDevice(device, jax.jit(flat).lower(*shapes).compile())
            except (RuntimeError, ValueError) as error:
                if not (mesh_axes and jax_compat.lacks_mesh(error)):
                    raise
                with jax.set_mesh(_of_one_device(device, tuple(mesh_axes))):
                    return SingleDevice(device, jax.jit(flat).lower(*shapes).compile())
        except RuntimeError as error:
            op = attention_of_cudnn(
                trace(fn, *array_args.args, static_argnums=static, mesh_axes=mesh_axes, **array_args.kwargs).graph
            )
            if op is None or device.platform == "gpu":
                raise
            raise needs_gpu(name_of(fn), op, f"the devices here are of the kind '{device.platform}'") from error
        except ValueError as error:
            fixed = re.search(r"(\w+) inside jit with device ids .* at \S*?([\w.-]+:\d+)", str(error))
            if fixed is None:
                raise
            raise ArgumentError(
                f"{name_of(fn)} is fixed to the devices of a mesh by a {fixed[1]} at {fixed[2]}: as it is written, it "
                "does not run on one device. A constraint that is a PartitionSpec without the mesh does, with the "
                "check under jax.set_mesh(mesh)"
            ) from error


def _fit_one_device(
    fn: Callable[..., Any], array_args: ArrayArguments, s: Settings
) -> tuple[list[Any], SingleDevice, tuple[str, ...]]:
    """Argument leaves that fit one device, the step compiled for it, and a note on the batch if it is smaller."""
    limit = (s.cluster or Cluster.local()).device.memory_bytes
    single = _compile_single(fn, array_args, array_args.leaves, s.static_argnums, s.mesh_axes)
    if single.nbytes <= limit:
        return array_args.leaves, single, ()
    traced = trace(fn, *array_args.args, static_argnums=s.static_argnums, mesh_axes=s.mesh_axes)
    graph, positions = traced.graph, batch_positions(traced, s)
    extents = {graph.types[graph.inputs[i]].shape[0] for i in positions}
    fewest = single.nbytes / limit  # a lower bound: only the batch gets smaller
    for parts in (n for n in _divisors(math.gcd(*extents), s.num_microbatches) if n >= fewest):
        leaves = [x[: x.shape[0] // parts] if i in positions else x for i, x in enumerate(array_args.leaves)]
        single = _compile_single(fn, array_args, leaves, s.static_argnums, s.mesh_axes)
        if single.nbytes <= limit:
            examples = ", ".join(f"{n // parts} of {n}" for n in sorted(extents))
            return leaves, single, (f"with a batch of {examples} examples, which one device has room for",)
    raise ArgumentError(
        f"{name_of(fn)} needs {size(single.nbytes)} on one device, with the smallest batch that can be cut from the "
        f"one given, and a device has {size(limit)}: there is nothing to compare with. Check a smaller model."
    )


def _divisors(extent: int, microbatches: int | str) -> Iterator[int]:
    """Numbers of parts into which to split the batch: powers of two that divide it, and leave whole microbatches."""
    count = microbatches if isinstance(microbatches, int) else 1
    parts = 2
    while extent % parts == 0 and (extent // parts) % count == 0:
        yield parts
        parts *= 2
