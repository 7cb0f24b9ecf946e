"""Which results are the next step's arguments: the state of a training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from autopar.ir.graph import Graph


@lru_cache(maxsize=4)  # several passes call it for one graph
def match_state(graph: Graph) -> Mapping[int, int]:
    """Results that carry an argument into the next step: output position -> input position.

    `graph.carried` if the graph has it. Otherwise results match by equal path; then by equal path below the top of the
    result (position in the tuple, taken as the position of the argument); then by equal path below the first component.
    Matches have equal types, and each argument is matched once.
    """
    if graph.carried is not None:
        return graph.carried
    by_tail: dict[str, list[int]] = {}
    for i, path in enumerate(graph.input_paths):
        by_tail.setdefault(path.split("/", 1)[-1], []).append(i)
    arguments = list(dict.fromkeys(path.split("/", 1)[0] for path in graph.input_paths))
    full = {path: i for i, path in enumerate(graph.input_paths)}
    claimed: set[int] = set()
    carried: dict[int, int] = {}

    def claim(out: int, candidates: Sequence[int | None]) -> None:
        type_ = graph.type_of(graph.outputs[out])
        for i in candidates:
            if i is not None and i not in claimed and graph.types[graph.inputs[i]] == type_:
                carried[out] = i
                claimed.add(i)
                return

    for out, path in enumerate(graph.output_paths):
        head, _, tail = path.partition("/")
        names = [arguments[int(head)]] if head.isdigit() and int(head) < len(arguments) else []
        candidates = [path, *("/".join(p for p in (name, tail) if p) for name in names)]
        candidates.extend(f"{name}/{path}" if path else name for name in arguments[:1])
        claim(out, [full.get(t) for t in candidates])
    for out, path in enumerate(graph.output_paths):
        if out not in carried and "/" in path:
            claim(out, by_tail.get(path.split("/", 1)[1], []))
    return MappingProxyType(carried)
