"""What runs a compiled step on flat argument leaves: on one mesh, or as a pipeline.

Arguments that are not in their place are put there, arguments that were donated are refused -> place

    OneMesh     one program; XLA reuses the buffers of donated arguments
    Staged      a pipeline. Its updates take over the state that they replace (`autopar.runtime.donation`), after all
                passes, so that arguments are as they were if a pass fails; once all is dispatched, what else was
                donated is deleted. After an error in an update some of the state is gone

Devices run what they are given in order. Where two threads hand over a step each at the same time, one device may get
the first step first and another the second, and each then waits in a collective for the other. So threads take turns:
a step is handed over whole before the next one is                                                       -> DISPATCH
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar import jax_compat
from autopar.errors import ArgumentError, DonatedError
from autopar.plans.plan import Plan
from autopar.runtime import PipelineStep

#: Held while a step is handed to the devices, not while they run it; of the process, as its devices are.
DISPATCH = threading.RLock()


def place(leaf: Any, sharding: NamedSharding, donated: bool, path: str) -> Any:
    """An argument in its place.

    Raises:
        DonatedError: its memory was given to an earlier step.
        ArgumentError: it has a shape, but no value.
    """
    if isinstance(leaf, jax.Array):
        _check_alive(leaf, path)
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        # A copy, so that donating it cannot take the caller's own buffer away: device_put aliases the shard of the
        # device that holds the array, whatever may_alias says, when it replicates (seen on 0.10.2).
        return jax.device_put(leaf.copy() if donated else leaf, sharding)
    _check_value(leaf, path)
    return jax.device_put(leaf, sharding)


def _check_alive(leaf: jax.Array, path: str) -> None:
    if leaf.is_deleted():
        raise DonatedError(
            f"'{path}' of shape {leaf.shape} was donated to an earlier step and its memory reused. "
            "Use the state that the step returned, or pass donate_argnums=()."
        )


def _check_value(leaf: Any, path: str) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ArgumentError(
            f"'{path}' is {leaf}; a call needs arrays. With shapes alone use .plan(...) or .lower(...)."
        )


def unaliased(placed: Sequence[Any], donated: Sequence[int]) -> Sequence[Any]:
    """Arguments in their place, an array that is donated and occurs twice copied: no memory can be given up twice.

    A target network that has been set to the model's values is one, or an average before its first step.
    """
    if len(set(map(id, placed))) == len(placed):
        return placed
    found, used = list(placed), Counter(map(id, placed))
    for i in donated:
        if used[id(placed[i])] > 1:
            used[id(placed[i])] -= 1
            found[i] = placed[i].copy()
    return found


@dataclass(frozen=True, eq=False)
class OneMesh:
    """One compiled program.

    Attributes:
        plan: its plan.
        program: JAX's compiled object.
        shardings: of the argument leaves.
        in_place: per leaf the sharding object last seen to be right.
    """

    plan: Plan
    program: Any
    shardings: tuple[NamedSharding, ...]
    in_place: list[Any] = field(default_factory=list)

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        known = self.in_place or [None] * len(self.shardings)
        donated = frozenset(self.plan.donated)
        placed = [
            # What the last step returned comes with the sharding objects it came with before: most leaves end here.
            x
            if isinstance(x, jax.Array) and x.sharding is seen and not x.is_deleted()
            else place(x, self.shardings[i], i in donated, self.plan.input_paths[i])
            for i, (x, seen) in enumerate(zip(leaves, known, strict=True))
        ]
        self.in_place[:] = [x.sharding for x in placed]
        return self.program(*unaliased(placed, self.plan.donated))


@dataclass(frozen=True, eq=False)
class Staged:
    """A compiled pipeline.

    Attributes:
        plan: its plan.
        step: what walks the schedule.
        shardings: of the argument leaves; None for the batch, which every stage that reads it gets a copy of.
        weak: positions of results that are as Python numbers are; programs of stages do not know.
    """

    plan: Plan
    step: PipelineStep
    shardings: tuple[NamedSharding | None, ...]
    weak: tuple[int, ...]

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        donated = frozenset(self.plan.donated)
        placed = [
            self._batch(x, i) if sharding is None else place(x, sharding, i in donated, self.plan.input_paths[i])
            for i, (x, sharding) in enumerate(zip(leaves, self.shardings, strict=True))
        ]
        results = self.step.results(unaliased(placed, self.plan.donated))
        for i in self.weak:
            results[i] = results[i] if results[i].weak_type else jax_compat.weakly_typed(results[i])
        self._delete([x for i, x in enumerate(leaves) if i in donated and x is placed[i]], results)
        return results

    def _batch(self, leaf: Any, position: int) -> Any:
        path = self.plan.input_paths[position]
        if isinstance(leaf, jax.Array):
            _check_alive(leaf, path)
        else:
            _check_value(leaf, path)
        return leaf

    def _delete(self, arrays: Sequence[Any], results: Sequence[Any]) -> None:
        """Give up arrays that were in their place, but for those that the step hands back as they are."""
        handed = {id(x) for x in results}
        for array in arrays:
            if id(array) not in handed and not array.is_deleted():
                array.delete()
