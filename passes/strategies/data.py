"""Data parallelism over an axis, with the state whole or in shards (Rajbhandari et al., 2020, ZeRO).

                    batch           parameters      optimizer state
    data_parallel   dimension 0     whole           whole
    zero1           dimension 0     whole           longest dimension          stage 1
    fsdp            dimension 0     longest dim.    longest dimension          stage 3

A leaf is cut along its first longest dimension that the axis divides and that no other strategy cuts; it stays whole if
there is none. Every product of the forward pass is cut along the batch, so that data parallelism is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PinError
from autopar.ir.layout import longest_dividing
from autopar.passes.strategies.cuts import Cut, Cuts, Step


def data_parallel(step: Step, name: str, size: int, before: Cuts) -> Cut:
    """The batch in parts, all state whole."""
    return Cut({**dict.fromkeys(step.state), **_batch(step, name, size)}, _products(step, size))


def zero1(step: Step, name: str, size: int, before: Cuts) -> Cut:
    """The batch and the optimizer's state in parts, parameters whole."""
    batch = _batch(step, name, size)
    sharded = _longest(step, name, size, step.optimizer, "array of the optimizer's state", before)
    return Cut({**dict.fromkeys(step.state), **sharded, **batch}, _products(step, size))


def fsdp(step: Step, name: str, size: int, before: Cuts) -> Cut:
    """The batch, parameters and the optimizer's state in parts."""
    batch = _batch(step, name, size)
    sharded = _longest(step, name, size, (*step.parameters, *step.optimizer), "parameter", before)
    return Cut({**dict.fromkeys(step.state), **sharded, **batch}, _products(step, size))


def _batch(step: Step, name: str, size: int) -> dict[int, int]:
    """Dimension 0 of every leaf of the batch. Raises PinError if it does not divide."""
    if not step.batch:
        raise PinError(f"{name} needs a batch, and no argument of the step holds one; batch_argnums names it")
    for i in step.batch:
        rows = step.shape(i)[0]
        if rows % size:
            raise PinError(
                f"{name}: batch argument '{step.graph.input_paths[i]}' of shape {step.shape(i)} has {rows} rows, which "
                f"{size} devices do not divide; the nearest: {rows // size * size or size} or {-(-rows // size) * size}"
            )
    return dict.fromkeys(step.batch, 0)


def _products(step: Step, size: int) -> dict[int, int]:
    """The first dimension from the batch of every product that the axis divides."""
    cut: dict[int, int] = {}
    for v in step.products:
        shape = step.graph.types[v].shape
        dims = [d for d in sorted(step.batch_dimensions.get(v, ())) if shape[d] % size == 0]
        cut.update({v: dims[0]} if dims else {})
    return cut


def _longest(step: Step, name: str, size: int, leaves: Sequence[int], what: str, before: Cuts) -> dict[int, int]:
    """The dimension of every leaf that is cut. Raises PinError if there is none at all."""
    dims = {i: longest_dividing(step.shape(i), size, before.leaves.get(i, ())) for i in leaves}
    sharded = {i: dim for i, dim in dims.items() if dim is not None}
    if not sharded:
        shapes = ", ".join(f"'{step.graph.input_paths[i]}' {step.shape(i)}" for i in leaves[:3]) or "the step has none"
        raise PinError(f"{name}: no {what} has a dimension that {size} devices divide: {shapes}")
    return sharded
