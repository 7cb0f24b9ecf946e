"""Strategies by name, as values of the option `pins`.

    autopar.parallelize(step, mesh={"data": 8}, pins=autopar.pins.fsdp("data"))
    pins = fsdp("data") | megatron("model") | {"params/embed": P()}
    autopar.plan(step, *args, mesh={"data": 4, "model": 2}, pins=pins)

A strategy is a start: it pins the state, the batch and the products of the forward pass, and the planner chooses
everything else around them. `Pins.expand` shows the ordinary pins that it means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from autopar.compile.call import ordinary_pins
from autopar.errors import ArgumentError
from autopar.ir.arguments import as_arrays
from autopar.ir.text import spec_text, table
from autopar.ir.trace import trace
from autopar.options import for_function, settings, written


class Pins(dict[str, PartitionSpec]):
    """Pins, combined with others by `|`; those on the right override equal keys. They print as a table."""

    def __or__(self, other: Mapping[str, Any]) -> Pins:  # type: ignore[override]
        """These pins and others."""
        return Pins({**self, **other})

    def __ror__(self, other: Mapping[str, Any]) -> Pins:  # type: ignore[override]
        """Other pins, and these."""
        return Pins({**other, **self})

    def expand(self, step: Callable[..., Any], *args: Any, **options: Any) -> Pins:
        """The pins of a step, with ordinary pins in place of strategies.

        Args:
            step: the step as it is written, or a parallelized one.
            *args: its arguments, arrays or `ShapeDtypeStruct`s.
            **options: those of `autopar.parallelize`; the mesh is needed. Without any, those of a parallelized step.

        Returns:
            The pins: paths of leaves and products of source lines -> spec.

        Raises:
            PinError: no mesh is given, the mesh lacks an axis, or a strategy fits no leaf of the step.
        """
        fn, args, own = written(step, args)
        chosen = replace(own if own is not None and not options else for_function(settings(options), fn), pins=self)
        with as_arrays(args, {}, chosen.static_argnums) as arrays:
            traced = trace(fn, *arrays.args, static_argnums=chosen.static_argnums, mesh_axes=chosen.mesh_axes)
            return Pins(ordinary_pins(traced, chosen).pins or {})

    def __str__(self) -> str:
        return table("pin", ("", "layout"), [(key, spec_text(spec)) for key, spec in self.items()])


Axis = str | Sequence[str]
"""A mesh axis, or several that cut one dimension together."""


def data_parallel(axis: Axis) -> Pins:
    """Data parallelism: the batch in parts, parameters and the optimizer's state whole on every device.

    Args:
        axis: the mesh axis, or several.
    """
    return _strategy("data_parallel", axis)


def zero1(axis: Axis) -> Pins:
    """ZeRO stage 1 (Rajbhandari et al., 2020): the batch and the optimizer's state in parts, parameters whole.

    Args:
        axis: the mesh axis, or several.
    """
    return _strategy("zero1", axis)


def fsdp(axis: Axis) -> Pins:
    """Fully sharded data parallelism, ZeRO stage 3: the batch, parameters and the optimizer's state in parts.

    A leaf is cut along its first longest dimension that the axis divides; it stays whole if there is none.

    Args:
        axis: the mesh axis, or several.
    """
    return _strategy("fsdp", axis)


def megatron(axis: Axis) -> Pins:
    """Tensor parallelism (Shoeybi et al., 2019): weights of products in columns and rows, attention by heads.

    A product whose activation is whole cuts the weight along its first free dimension that divides; one whose
    activation is cut along a contracted dimension cuts the weight along the same. The batch is free for other axes.

    Args:
        axis: the mesh axis, or several.
    """
    return _strategy("megatron", axis)


def _strategy(name: str, axis: Axis) -> Pins:
    axes: tuple[Any, ...] = tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    if not axes or any(not isinstance(a, str) for a in axes):
        raise ArgumentError(f"pins.{name}({axis!r:.60}): give the name of a mesh axis, such as 'x', or several")
    return Pins({name: PartitionSpec(axis if isinstance(axis, str) else axes)})
