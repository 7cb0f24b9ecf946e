"""Every mistake a user can make ends in one of these, never in a solver's, MLIR's or our own traceback.

A message names the value, its shape, the user's source line where one is known, what was expected, and what to do.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors; the message has the value, its shape, the source line, what is expected and what to do."""


class ArgumentError(AutoparError, ValueError):
    """An argument of the public API, or of the step, is invalid."""


class MeshError(AutoparError, ValueError):
    """A mesh does not fit the devices, the cluster, or the shape of an argument."""


class ClusterError(AutoparError, ValueError):
    """A cluster is unknown, or its description is contradictory."""


class PinError(AutoparError, ValueError):
    """A pin matches no leaf, has an unknown mesh axis, or shards a dimension that the axis does not divide."""


class TraceError(AutoparError, TypeError):
    """A function cannot be traced: side effects, leaked tracers, lost updates, results that are no arrays."""


class GraphError(AutoparError):
    """The graph breaks an invariant; raised by the verifier between passes."""


class GraphTextError(AutoparError, ValueError):
    """A text is no printed form of a graph; the message begins with the number of the line."""


class RuleError(AutoparError, ValueError):
    """A sharding rule has a syntax error, or does not fit its operation."""


class ScheduleError(AutoparError, ValueError):
    """A pipeline schedule is unknown or does not fit its sizes, or its instructions are incomplete or deadlock."""


class SolverError(AutoparError, RuntimeError):
    """No plan satisfies the constraints, or no solver could be run and there is no fallback."""


class MemoryBudgetError(AutoparError, RuntimeError):
    """No plan satisfies the memory budget; the message has the shortfall, the live tensors and what would help.

    Attributes:
        budget: the budget, bytes per device.
        least_bytes: peak of the smallest plan that was found, bytes per device; planning with this budget succeeds.
        bound_bytes: lower bound on the peak of every plan, bytes per device; planning with less fails.
    """

    def __init__(self, message: str, budget: float, least_bytes: int, bound_bytes: int) -> None:
        super().__init__(message)
        self.budget, self.least_bytes, self.bound_bytes = budget, least_bytes, bound_bytes

    def __reduce__(self) -> tuple[type[MemoryBudgetError], tuple[str, float, int, int]]:
        return type(self), (str(self), self.budget, self.least_bytes, self.bound_bytes)


class MicrobatchError(AutoparError, ValueError):
    """A step cannot be divided into microbatches: the batch size, or examples that depend on each other, prevent it."""


class StageError(AutoparError, RuntimeError):
    """A stage of a running pipeline failed; the arguments of the step are unchanged."""


class NanError(AutoparError, FloatingPointError):
    """An operation of a step made a NaN (`debug_nans=True`); the message has its line, stage and microbatch."""


class ProcessError(AutoparError, RuntimeError):
    """Another process of `jax.distributed` has ended, or is not connected any more: a step cannot go on."""


class CheckpointError(AutoparError, OSError):
    """A checkpoint cannot be written or read: it is damaged, or of other arrays than those that are wanted."""


class PlanMismatchError(AutoparError, ValueError):
    """A plan is damaged, or belongs to another function, other shapes or another mesh."""


class DonatedError(AutoparError, RuntimeError):
    """An array was used after it was donated to a step."""


class DifferenceError(AutoparError):
    """A parallel step differs from the step as written by more than rounding (`Check.raise_if_different`)."""


class AutoparWarning(UserWarning):
    """A remark about a step that runs nevertheless: a fallback, or a plan that exceeds the memory of a device."""
