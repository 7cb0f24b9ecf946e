"""Which arguments of a step hold the batch: as the user says, or the leaves that share a leading extent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from autopar.errors import MicrobatchError
from autopar.ir.graph import Graph
from autopar.ir.keyed import grouped
from autopar.ir.train_state import match_state


def batch_leaves(graph: Graph, count: int, chosen: Sequence[int] | Literal["auto"] = "auto") -> tuple[int, ...]:
    """Positions of the argument leaves that hold the batch.

    "auto": leaves that are neither state nor random keys, of arguments whose leaves all have one leading extent (of any
    argument, if there is none such), restricted to the leading extent that most of these leaves share; of two such
    extents, the one with more elements. Scalars among chosen leaves are the same for all microbatches.

    Raises:
        MicrobatchError: there is none and "auto" or several microbatches are asked for, or the leading extent of one is
            0 or not divisible by `count`.
    """
    if isinstance(chosen, str):
        chosen = infer_batch(graph)
        if not chosen:
            raise MicrobatchError(_no_batch(graph))
    chosen = [i for i in chosen if graph.types[graph.inputs[i]].rank]
    if not chosen and count > 1:
        raise MicrobatchError(
            f"none of the arguments in batch_argnums has a dimension that {count} microbatches could cut: name those "
            "that hold the batch, or leave out num_microbatches"
        )
    for i in chosen:
        shape = graph.types[graph.inputs[i]].shape
        if not shape[0]:
            raise MicrobatchError(
                f"batch argument '{graph.input_paths[i]}' of shape {shape} has no examples: its first dimension is 0. "
                "Pass a batch with examples, or name the arguments that hold them with batch_argnums."
            )
        if shape[0] % count:
            raise MicrobatchError(
                f"batch argument '{graph.input_paths[i]}' of shape {shape} cannot be cut into {count} microbatches: "
                f"its first dimension has to divide by {count}"
            )
    return tuple(chosen)


def _no_batch(graph: Graph) -> str:
    """Why no argument is the batch; one without examples is named, as it may look like state."""
    paths = zip(graph.inputs, graph.input_paths, strict=True)
    empty = [f"'{path}' of shape {graph.types[v].shape}" for v, path in paths if 0 in graph.types[v].shape[:1]]
    if empty:
        return (
            f"the batch has no examples: the first dimension of {empty[0]} is 0, and all other arguments are state or "
            "scalars. Pass a batch with examples, or name it with batch_argnums."
        )
    return (
        f"none of the {len(graph.inputs)} arguments holds a batch: all are state, random keys or scalars. A step that "
        "makes its own examples has none to cut: leave out num_microbatches. Otherwise name the batch with "
        "batch_argnums."
    )


def infer_batch(graph: Graph) -> list[int]:
    """Positions of the leaves that "auto" chooses; see `batch_leaves`."""
    state = set(match_state(graph).values())
    given = [(i, v) for i, v in enumerate(graph.inputs) if i not in state]
    shapes = {i: graph.types[v].shape for i, v in given if graph.types[v].rank and not _is_raw_key(graph, v)}
    arguments = grouped((graph.input_paths[i].split("/", 1)[0], i) for i in shapes)
    uniform = [i for leaves in arguments.values() if len({shapes[i][0] for i in leaves}) == 1 for i in leaves]
    fit = uniform or list(shapes)
    leaves, elements = Counter(shapes[i][0] for i in fit), Counter[int]()
    for i in fit:
        elements[shapes[i][0]] += math.prod(shapes[i])
    best = max(leaves, key=lambda n: (leaves[n], elements[n], n), default=0)
    return [i for i in fit if shapes[i][0] == best]


def _is_raw_key(graph: Graph, value: int) -> bool:
    """True for the words of one random key: nothing reads them but `random_wrap`."""
    type_ = graph.types[value]
    if type_.rank != 1 or type_.dtype != "uint32":
        return False
    return all(use.op is not None and use.op.name == "random_wrap" for use in graph.uses_of(value))
