"""The leaves of the arguments that `batch_argnums` and `donate_argnums` name.

    argument     position among the positional parameters, static ones included, also if it is given by keyword
    leaf         position among all leaves of the traced arguments, as `Graph.inputs` has them

Where an option is "auto", the batch is what looks like it (`autopar.passes.microbatch.batch.batch_leaves`), and what
is donated is the state that the step returns anew (`autopar.ir.train_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import ArgumentError
from autopar.hardware.meshes import Target
from autopar.ir import arguments
from autopar.ir.graph import Graph
from autopar.ir.trace import Traced
from autopar.ir.train_state import in_place
from autopar.options import Settings
from autopar.passes.microbatch.batch import batch_leaves
from autopar.plans.plan import Plan


def microbatches(traced: Traced, s: Settings) -> tuple[int, tuple[int, ...]]:
    """The number of microbatches, and the argument leaves that they cut; one, and none, unless more are asked for."""
    if isinstance(s.num_microbatches, str) or s.num_microbatches == 1:
        return 1, ()
    return s.num_microbatches, batch_positions(traced, s, s.num_microbatches)


def batch_positions(traced: Traced, s: Settings, count: int = 1) -> tuple[int, ...]:
    """Positions of the argument leaves that hold the batch; MicrobatchError if it does not fall into `count` parts."""
    leaves = named_batch(traced, s)
    return batch_leaves(traced.graph, count, "auto" if leaves is None else leaves)


def named_batch(traced: Traced, s: Settings) -> tuple[int, ...] | None:
    """The leaves of the arguments in `batch_argnums`; None for "auto"."""
    return _named("batch_argnums", s.batch_argnums, traced)


def donated(traced: Traced, s: Settings) -> tuple[int, ...] | str:
    """The leaves whose buffers the step may reuse; "auto": those of the state.

    Arguments in `batch_argnums` are kept, also where the step returns what looks like the next ones.
    """
    kept, named = arguments.unchanged_leaves(traced.out_tree), _named("donate_argnums", s.donate_argnums, traced)
    if named is None:
        kept = {*kept, *(named_batch(traced, s) or ())}
        return tuple(sorted({*in_place(traced.graph).values()} - kept)) if kept else "auto"
    return tuple(i for i in named if i not in kept)


def donating_no_more(plan: Plan, traced: Traced, s: Settings) -> Plan:
    """A plan from elsewhere that donates of its arguments those alone that `donate_argnums` names, if it is given."""
    named = _named("donate_argnums", s.donate_argnums, traced)
    return plan if named is None else replace(plan, donated=tuple(i for i in plan.donated if i in named))


def check_batch(name: str, traced: Traced, s: Settings, candidates: Sequence[Target]) -> None:
    """ArgumentError where an argument of the function in `batch_argnums` divides by no axis of the candidate meshes."""
    if isinstance(s.batch_argnums, str):
        return
    axes = sorted({size for t in candidates for size in t.logical.sizes if size > 1})
    for number in s.batch_argnums:
        if number not in traced.argument_leaves:
            raise ArgumentError(f"batch_argnums={s.batch_argnums}: {name} has no traced argument {number}")
        for i in traced.argument_leaves[number]:
            _check_divides(traced.graph, i, axes)


def _check_divides(graph: Graph, position: int, axes: Sequence[int]) -> None:
    """ArgumentError if the batch argument at a position divides by none of these sizes of mesh axes."""
    value = graph.inputs[position]
    shape = graph.types[value].shape
    if axes and (not shape or all(shape[0] % size for size in axes)):
        readers = [op.source for op in graph.walk() if value in op.inputs and op.source]
        raise ArgumentError(
            f"batch argument '{graph.input_paths[position]}' of shape {shape}"
            f"{f', read at {readers[0]},' if readers else ''} does not divide by any mesh axis "
            f"({', '.join(map(str, axes))}). Use a batch that is a multiple, or leave batch_argnums on 'auto'."
        )


def _named(option: str, argnums: Sequence[int] | str, traced: Traced) -> tuple[int, ...] | None:
    """The leaves of the arguments that an option names; None for "auto"."""
    if isinstance(argnums, str):
        return None
    leaves = traced.argument_leaves
    unknown = [n for n in argnums if n not in leaves]
    if unknown:
        raise ArgumentError(f"{option}={argnums}: there is no traced argument {unknown[0]}")
    return tuple(i for n in argnums for i in leaves[n])
