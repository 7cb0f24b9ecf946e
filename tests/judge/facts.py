"""What the judge reads off the graph alone: where partial sums may stay, which results are state, what has time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar import jax_compat
from autopar.ir import control_flow
from autopar.ir.graph import Atom, Graph, Op

ADDITIONS = ("add", "add_any", "sub")
LINEAR = ("neg", "transpose", "reshape", "squeeze", "copy", "mul", "div", "convert_element_type")


def deferral(graph: Graph) -> tuple[frozenset[int], Mapping[int, bool]]:
    """Products that may leave partial sums, and the sums that may take them (True: and leave them)."""
    deferring: set[int] = set()
    sums: dict[int, bool] = {}
    for ops, outputs in [(graph.ops, graph.outputs), *((r.ops, r.outputs) for op in graph.walk() for r in op.regions)]:
        producers = {v: op for op in ops for v in op.outputs}
        reads = [a for op in ops for a in op.inputs] + list(outputs)
        once = {a for a in producers if reads.count(a) == 1}
        for op in ops:
            if origins := _summands(graph, op, producers, once):
                sums.setdefault(op.index, False)
                deferring.update(o.index for o in origins if o.name not in ADDITIONS)
                sums.update((o.index, True) for o in origins if o.name in ADDITIONS)
    return frozenset(deferring), sums


def _summands(graph: Graph, op: Op, producers: Mapping[int, Op], once: set[int]) -> list[Op]:
    """The products and sums that an addition adds up, if it adds nothing else; empty otherwise."""
    if op.name not in ADDITIONS or len({*op.inputs}) != 2:
        return []
    if len({graph.type_of(a).shape for a in op.inputs}) != 1:
        return []
    origins = [_origin(graph, a, producers, once) for a in op.inputs]
    return [o for o in origins if o] if all(origins) else []


def _origin(graph: Graph, atom: Atom, producers: Mapping[int, Op], once: set[int]) -> Op | None:
    if atom not in once:
        return None
    op = producers[atom]  # type: ignore[index]
    if op.name == "dot_general":
        return op
    if op.name in ADDITIONS:
        return op if _summands(graph, op, producers, once) else None
    big = [a for a in op.inputs if graph.type_of(a).shape]
    if op.name not in LINEAR or len(op.outputs) != 1 or len(big) != 1 or (op.name == "div" and op.inputs[0] != big[0]):
        return None
    before, after = graph.type_of(big[0]), graph.types[op.outputs[0]]
    grows = after.size == before.size and after.itemsize >= before.itemsize and "float" in after.dtype
    return _origin(graph, big[0], producers, once) if grows else None


def state(graph: Graph) -> dict[int, int]:
    """Result position -> the argument of equal path and type that it becomes in the next step."""
    names = list(dict.fromkeys(path.split("/")[0] for path in graph.input_paths))
    arguments = dict(zip(graph.input_paths, graph.inputs, strict=True))
    outputs_to_arguments: dict[int, int] = {}
    rest: list[int] = []
    for out, path in enumerate(graph.output_paths):
        head, _, tail = path.partition("/")
        guesses = [f"{names[int(head)]}/{tail}".rstrip("/")] if head.isdigit() and int(head) < len(names) else []
        guesses += [f"{name}/{path}".rstrip("/") for name in names[:1]]
        hits = [arguments[g] for g in guesses if g in arguments]
        _take(graph, outputs_to_arguments, out, hits)
        rest += [out] if out not in outputs_to_arguments and tail else []
    for out in rest:
        tail = graph.output_paths[out].partition("/")[2]
        _take(
            graph,
            outputs_to_arguments,
            out,
            [v for p, v in arguments.items() if p.partition("/")[2] == tail or p == tail],
        )
    return outputs_to_arguments


def _take(graph: Graph, outputs_to_arguments: dict[int, int], out: int, arguments: Sequence[int]) -> None:
    for v in arguments:
        if v not in outputs_to_arguments.values() and graph.types[v] == graph.type_of(graph.outputs[out]):
            outputs_to_arguments[out] = v
            return


def hurried(graph: Graph) -> tuple[frozenset[int], frozenset[int]]:
    """(values that depend on the batch, operations of which something before the update reads a result)."""
    batch = {*graph.inputs} - {*state(graph).values()}
    waited: set[int] = set()
    grown = True
    while grown:
        before = len(batch) + len(waited)
        for op in graph.walk():
            _spread(op, batch)
        for op in graph.walk():
            _wait(op, waited)
        grown = len(batch) + len(waited) > before
    return frozenset(batch), frozenset(op.index for op in graph.walk() if waited & {*op.outputs})


def _spread(op: Op, batch: set[int]) -> None:
    """From operands to results, in and out of bodies; what a loop carries changes from iteration to iteration."""
    if not op.regions:
        if batch & {a for a in op.inputs if isinstance(a, int)}:
            batch.update(op.outputs)
        return
    for region in op.regions:
        outside = op.inputs[len(op.inputs) - len(region.inputs) :]
        batch.update(v for a, v in zip(outside, region.inputs, strict=True) if a in batch)
        if op.name == "scan":
            constants, carries = jax_compat.scan_counts(op.params)
            batch.update(region.inputs[constants : constants + carries])
        if op.name == "while":
            batch.update(region.inputs)
    batch.update(op.outputs)


def _wait(op: Op, waited: set[int]) -> None:
    """Operands of what runs before the update; what a body returns is waited for as its result is, if not carried."""
    if op.phase != "update":
        waited.update(a for a in op.inputs if isinstance(a, int))
    carried = control_flow.num_carries(op)
    for region in op.regions:
        for i, (a, result) in enumerate(zip(region.outputs, op.outputs, strict=False)):
            if isinstance(a, int) and (result in waited or (i < carried and op.phase != "update")):
                waited.add(a)
