"""The state of a training loop among the arguments of a step, and the roles of its leaves.

    state              leaves that the step returns anew                                        -> match_state
    state in place     those of equal type, whose buffers the new values may take                  -> in_place
    optimizer state    state with one of `OPTIMIZER_NAMES` in its path                          -> optimizer_leaves
    parameters         other state of a floating-point type                                     -> parameter_leaves

A moment of the optimizer belongs to the parameter whose path ends as its own does              -> owned_parameter
So does a copy of a parameter that only the update reads: a float32 master, an average           -> parameter_copies
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType

from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.keyed import grouped
from autopar.ir.on_graph import cached_on_graph

#: Parts of paths that mark optimizer state: fields of optax's states, and usual names of arguments.
OPTIMIZER_NAMES = ("mu", "nu", "opt", "opt_state", "trace")
#: Beginnings of the names of types that can be differentiated.
FLOATING = ("float", "bfloat", "complex")


@cached_on_graph
def match_state(graph: Graph) -> Mapping[int, int]:
    """Results that carry an argument into the next step: output position -> input position.

    `graph.carried` if the graph has it. Otherwise results match by equal path; then by equal path below the top of the
    result (position in the tuple, taken as the position of the argument); then by equal path below the first component.
    Matches have equal types, or else equal shapes: the first step may change the dtype of a parameter. Each argument is
    matched once.
    """
    if graph.carried is not None:
        return graph.carried
    by_tail = grouped((path.split("/", 1)[-1], i) for i, path in enumerate(graph.input_paths))
    arguments = list(dict.fromkeys(path.split("/", 1)[0] for path in graph.input_paths))
    full = {path: i for i, path in enumerate(graph.input_paths)}
    claimed: set[int] = set()
    carried: dict[int, int] = {}

    def claim(out: int, candidates: Sequence[int | None], same_dtype: bool) -> None:
        type_ = graph.type_of(graph.outputs[out])
        for i in candidates if out not in carried else ():
            before = None if i is None or i in claimed else graph.types[graph.inputs[i]]
            if i is not None and before and (before == type_ or (not same_dtype and before.shape == type_.shape)):
                carried[out] = i
                claimed.add(i)
                return

    def named(path: str) -> Sequence[int | None]:
        head, _, tail = path.partition("/")
        names = [arguments[int(head)]] if head.isdigit() and int(head) < len(arguments) else []
        candidates = [path, *("/".join(p for p in (name, tail) if p) for name in names)]
        candidates.extend(f"{name}/{path}" if path else name for name in arguments[:1])
        return [full.get(t) for t in candidates]

    for out, path in enumerate(graph.output_paths):
        claim(out, named(path), same_dtype=True)
    for out, path in enumerate(graph.output_paths):
        if "/" in path:
            claim(out, by_tail.get(path.split("/", 1)[1], []), same_dtype=True)
    for out, path in enumerate(graph.output_paths):
        if "/" in path:  # a result of its own is more often a loss that a scalar argument happens to be named as
            claim(out, named(path), same_dtype=False)
    return MappingProxyType(carried)


def in_place(graph: Graph) -> Mapping[int, int]:
    """Results that carry an argument of equal type: output position -> input position."""
    carried = match_state(graph).items()
    return {out: i for out, i in carried if graph.types[graph.inputs[i]] == graph.type_of(graph.outputs[out])}


def is_optimizer_state(path: str) -> bool:
    """Whether the path of a leaf of the state is one of the optimizer's."""
    return any(part in OPTIMIZER_NAMES for part in path.split("/"))


def parameter_leaves(graph: Graph) -> tuple[int, ...]:
    """Positions of the argument leaves that are parameters, batch statistics among them."""
    state = set(match_state(graph).values())
    return tuple(
        i
        for i, (path, v) in enumerate(zip(graph.input_paths, graph.inputs, strict=True))
        if i in state and not is_optimizer_state(path) and graph.types[v].dtype.startswith(FLOATING)
    )


def optimizer_leaves(graph: Graph) -> tuple[int, ...]:
    """Positions of the argument leaves that are state of the optimizer."""
    state = set(match_state(graph).values())
    return tuple(i for i, path in enumerate(graph.input_paths) if i in state and is_optimizer_state(path))


def of_parameter(path: str, parameters: Container[str]) -> tuple[str, str] | None:
    """A path of optimizer state as (what is before its parameter's path, that path below "params/"); None for others.

    "opt/0/mu/blocks/0/w" belongs to "params/blocks/0/w": the longest end that both paths have in common.
    """
    parts = path.split("/")
    pairs = (("/".join(parts[:k]), "/".join(parts[k:])) for k in range(1, len(parts)))
    before, end = next((pair for pair in pairs if pair[1] in parameters), ("", ""))
    return (before, end) if end and "params" not in before.split("/") else None


def owned_parameter(graph: Graph) -> Mapping[int, int]:
    """Leaf of the optimizer's state -> the parameter that it belongs to, if they have one shape."""
    copies = parameter_copies(graph)
    return _of_parameters(graph, optimizer_leaves(graph), [i for i in parameter_leaves(graph) if i not in copies])


@cached_on_graph
def parameter_copies(graph: Graph) -> Mapping[int, int]:
    """Parameter that only the update reads -> the parameter of its path and shape that the gradient is computed from.

    In mixed precision these are the float32 masters; averages of parameters are others. Rajbhandari et al. (2020),
    section 3.1, count masters as optimizer state. Without a backward pass there are none.
    """
    values = differentiated(graph.ops)
    leaves = parameter_leaves(graph)
    read = [i for i in leaves if graph.inputs[i] in values]
    return MappingProxyType(_of_parameters(graph, [i for i in leaves if graph.inputs[i] not in values], read))


def differentiated(ops: Sequence[Op]) -> set[Atom]:
    """Operands of operations of the backward pass, and all values that these are computed from."""
    values: set[Atom] = set()
    for op in reversed(ops):
        if any(v in values for v in op.outputs) or any(inner.phase == "backward" for inner in op.walk()):
            values.update(op.inputs)
    return values


def _of_parameters(graph: Graph, leaves: Sequence[int], parameters: Sequence[int]) -> dict[int, int]:
    """Leaf -> the parameter whose path ends as its own does, if they have one shape."""
    by_end: dict[str, int] = {}
    for i in parameters:
        path = graph.input_paths[i]
        by_end[path.partition("params/")[2] or path.partition("/")[2] or path] = i
    owned: dict[int, int] = {}
    for i in leaves:
        belongs = of_parameter(graph.input_paths[i], by_end)
        if belongs and _shape(graph, i) == _shape(graph, by_end[belongs[1]]):
            owned[i] = by_end[belongs[1]]
    return owned


def _shape(graph: Graph, position: int) -> tuple[int, ...]:
    return graph.types[graph.inputs[position]].shape
