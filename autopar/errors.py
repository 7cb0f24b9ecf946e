"""Every mistake a user can make ends in one of these, never in a solver's, MLIR's or our own traceback.

A message names the value, its shape, the user's source line where one is known, what was expected, and what to do.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base of every error that autopar raises for a mistake of the caller or the environment."""


class ArgumentError(AutoparError, ValueError):
    """An argument of the public API, or of the traced function, that autopar cannot take."""


class MeshError(AutoparError, ValueError):
    """A mesh that does not fit the devices, the cluster, or an argument's shape."""


class ClusterError(AutoparError, ValueError):
    """A cluster description that is unknown or contradicts itself."""


class PinError(AutoparError, ValueError):
    """A pinned layout that matches nothing, names an unknown axis, or does not divide."""


class TraceError(AutoparError, TypeError):
    """The function cannot be traced: side effects, leaked tracers, arguments that are no arrays."""


class GraphError(AutoparError):
    """The graph breaks an invariant; raised by the verifier between passes."""


class RuleError(AutoparError, ValueError):
    """A sharding rule that does not parse or does not fit its operation."""


class ScheduleError(AutoparError, ValueError):
    """A pipeline schedule that is unknown, does not fit its sizes, or whose instructions are wrong."""


class SolverError(AutoparError, RuntimeError):
    """No plan exists under the constraints, or no solver could be run and no fallback was left."""


class MemoryBudgetError(AutoparError, RuntimeError):
    """No plan fits into the memory of a device.

    Attributes:
        budget: bytes per device that were allowed.
        least_bytes: peak of the smallest plan that was found, bytes per device; planning with this budget works.
        bound_bytes: no plan's peak is below; planning with one byte less can only fail.
    """

    def __init__(self, message: str, budget: float, least_bytes: int, bound_bytes: int) -> None:
        super().__init__(message)
        self.budget, self.least_bytes, self.bound_bytes = budget, least_bytes, bound_bytes

    def __reduce__(self) -> tuple[type[MemoryBudgetError], tuple[str, float, int, int]]:
        return type(self), (str(self), self.budget, self.least_bytes, self.bound_bytes)


class MicrobatchError(AutoparError, ValueError):
    """A step that does not fall into microbatches: its batch does not divide, or examples depend on each other."""


class StageError(AutoparError, RuntimeError):
    """A stage of a running pipeline failed; the step's arguments are as they were."""


class PlanMismatchError(AutoparError, ValueError):
    """A plan loaded for another function, other shapes, or another mesh."""


class DonatedError(AutoparError, RuntimeError):
    """An array was used after its buffer had been given to an earlier step."""


class DifferenceError(AutoparError):
    """A parallel step that does not give what the step as written gives, beyond rounding."""


class AutoparWarning(UserWarning):
    """Something a user should know that did not stop the step: a fallback, an operation that runs replicated."""
