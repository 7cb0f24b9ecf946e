"""How operands enter the regions of loops and branches, and these bound again with bodies that the caller emits.

scan        operands are constants, carries, stacked operands; body(constants + carries + slices)
while       operands are constants of the condition, constants of the body, carries
cond        operands are the index, then the operands of every branch

A rematerialised body reads all operands, and runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax

from autopar import jax_compat
from autopar.ir.graph import Atom, Graph, Op, Region
from autopar.ir.op_sets import ADDITIONS

#: Operands of a body -> its results.
BodyFunction = Callable[[Sequence[Any]], Sequence[Any]]


#: Of a region's input: the same in every iteration, the result of the iteration before, or a slice of a stack.
Kind = Literal["constant", "carry", "slice"]


class Entry(NamedTuple):
    """How an operand enters a region.

    Attributes:
        kind: how the input changes between iterations; inputs of bodies that run once are constants.
        region: the region.
        value: its input.
        operand: the operand from which a constant or slice is read, or with which a carry begins.
        position: position of the operand.
    """

    kind: Kind
    region: Region
    value: int
    operand: Atom
    position: int


def entries(op: Op) -> Iterator[Entry]:
    """How each input of the regions of an operation gets its value, in order."""
    for number, region in enumerate(op.regions):
        constants, carries, first = len(region.inputs), 0, len(op.inputs) - len(region.inputs)
        if op.name == "scan":
            constants, carries = jax_compat.scan_counts(op.params)
        elif op.name == "while":
            before, inside = op.params["cond_nconsts"], op.params["body_nconsts"]
            constants, first = (inside, before) if number else (before, 0)
            carries = len(region.inputs) - constants
        for i, value in enumerate(region.inputs):
            kind: Kind = "constant" if i < constants else "carry" if i < constants + carries else "slice"
            # carries of a `while` follow the constants of both of its regions
            position = i - len(region.inputs) + len(op.inputs) if kind == "carry" and op.name == "while" else i + first
            yield Entry(kind, region, value, op.inputs[position], position)


def num_carries(op: Op) -> int:
    """The number of results, from the first, that the next iteration reads."""
    return jax_compat.scan_counts(op.params)[1] if op.name == "scan" else len(op.outputs) if op.name == "while" else 0


def sums(graph: Graph, op: Op) -> Iterator[tuple[int, tuple[Op, ...]]]:
    """Carries of a scan that start from zero and are only added to: position, and the additions of one iteration.

    They may be converted to their own dtype as well: so JAX makes a weak type a strong one.
    """
    constants, carries = jax_compat.scan_counts(op.params)
    (body,) = op.regions
    for k in range(carries):
        value, additions = body.inputs[constants + k], list[Op]()
        while len(uses := graph.uses_of(value)) == 1 and (reader := uses[0].op) is not None:
            if reader.name in ADDITIONS:
                additions.append(reader)
            elif not keeps_value(graph, reader):
                break
            value = reader.outputs[0]
        if additions and value == body.outputs[k] and len(uses) == 1 and graph.is_zero(op.inputs[constants + k]):
            yield k, tuple(additions)


def keeps_value(graph: Graph, op: Op) -> bool:
    """Whether an operation converts its operand to the operand's own dtype."""
    return op.name == "convert_element_type" and graph.types[op.outputs[0]] == graph.type_of(op.inputs[0])


def scan(op: Op, operands: Sequence[Any], body: BodyFunction, length: int | None = None) -> list[Any]:
    """Results of a scan: carries, then stacked results; `length`: iterations, if other than those of `op`."""
    constants, carries = jax_compat.scan_counts(op.params)
    constant_operands = operands[:constants]

    def iteration(carry: Any, slices: Any) -> Any:
        results = body([*constant_operands, *carry, *slices])
        return tuple(results[:carries]), tuple(results[carries:])

    start, stacks = tuple(operands[constants:][:carries]), tuple(operands[constants + carries :])
    how = {name: op.params[name] for name in ("reverse", "unroll")}
    carry, stacked = jax.lax.scan(iteration, start, stacks, op.params["length"] if length is None else length, **how)
    return [*carry, *stacked]


def while_loop(op: Op, operands: Sequence[Any], test: BodyFunction, body: BodyFunction, *, batched: bool) -> list[Any]:
    """Results of a while loop; `batched`: under vmap, so that the condition has a value for each element."""
    first = op.params["cond_nconsts"]
    carries = first + op.params["body_nconsts"]

    def condition(carry: Any) -> Any:
        return test([*operands[:first], *carry])[0]

    def step(carry: Any) -> Any:
        new = body([*operands[first:carries], *carry])
        if not batched:
            return tuple(new)
        is_running = condition(carry)
        return tuple(_update_running(is_running, a, b) for a, b in zip(new, carry, strict=True))

    # under vmap, until no element is running
    return list(jax.lax.while_loop(lambda carry: condition(carry).any(), step, tuple(operands[carries:])))


def _update_running(is_running: Any, new: Any, old: Any) -> Any:
    """The new value of a carry for those elements (leading dimensions) of a loop under vmap that are still running."""
    mask = jax.lax.broadcast_in_dim(is_running, new.shape, tuple(range(is_running.ndim)))
    return jax.lax.select(mask, new, old)


def cond(operands: Sequence[Any], branches: Sequence[BodyFunction]) -> list[Any]:
    """Results of the branch that the first operand selects."""
    functions = [lambda *arrays, branch=branch: tuple(branch(arrays)) for branch in branches]
    return list(jax.lax.switch(operands[0], functions, *operands[1:]))
