"""Error message of a failed instruction: its stage, first and last line of the error, and a line of the user's code.

a callback failed      the lines of all callbacks of the program, since the error does not say which
out of memory          the line of the program's largest value
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.errors import NanError, StageError
from autopar.ir.graph import Graph, Op
from autopar.ir.op_sets import CALLBACKS
from autopar.passes.microbatch.programs import PlacedOp


def failure(
    stage: int, what: str, error: Exception, graph: Graph, ops: Sequence[PlacedOp], microbatch: int | None = None
) -> StageError | NanError:
    """The error of a stage; a NanError stays one.

    Args:
        stage: its number.
        what: the instruction that failed.
        error: what JAX raised.
        graph: the step.
        ops: the operations of the program that failed.
        microbatch: that it ran on.
    """
    if isinstance(error, NanError):
        of = "" if microbatch is None else f", microbatch {microbatch}"
        return NanError(f"stage {stage}{of}, in {what}: {error}")
    lines = str(error).strip().splitlines() or [type(error).__name__]
    message = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    walked = [op for placed in ops for op in placed.op.walk()]
    user_lines = (find(graph, walked) for word, find in _LINES.items() if word in str(error))
    at = next((line for line in user_lines if line), "")
    return StageError(f"stage {stage} failed in {what}: {message}{f' [{at}]' if at else ''}")


def _callbacks(graph: Graph, ops: Sequence[Op]) -> str:
    lines = dict.fromkeys(f"{op.name} at {op.source}" for op in ops if op.name in CALLBACKS and op.source)
    return " or ".join(lines)


def _largest(graph: Graph, ops: Sequence[Op]) -> str:
    results = [(graph.types[v].nbytes, -op.index, op, v) for op in ops for v in op.outputs if op.source]
    if not results:
        return ""
    _, _, op, value = max(results, key=lambda entry: entry[:2])
    return f"its largest value is {graph.types[value]} of {op.name} at {op.source}"


#: Word in an error -> function of the operations that describes where it may have come from.
_LINES: Mapping[str, Callable[[Graph, Sequence[Op]], str]] = {
    "RESOURCE_EXHAUSTED": _largest,
    "allback": _callbacks,
}
