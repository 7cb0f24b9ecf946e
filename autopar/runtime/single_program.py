"""Runs a compiled step on flat argument leaves: on one mesh, or as a pipeline.

Arguments with another sharding are copied, arguments that were donated before are refused             -> place_argument

    SingleMeshRunner  one program; XLA reuses the buffers of donated arguments
    PipelineRunner    a pipeline. Arguments are donated to its updates (`autopar.runtime.donation`), which run after all
                      passes, so that arguments stay valid if a pass fails. Once all is dispatched, donated arguments
                      that no update took are deleted. After an error in an update some of the state is lost

A device runs programs in the order in which it gets them. If two threads dispatched a step each at the same time, one
device could get the first step first and another device the second, and both would wait in a collective for ever. So a
step is dispatched as a whole before the next one                                                       -> DISPATCH_LOCK
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
from autopar.ir import arguments
from autopar.plans.plan import Plan
from autopar.runtime.executor import PipelineStep
from autopar.runtime.processes import agree, host_value
from autopar.runtime.transport import host_view, place

#: Locked while a step is dispatched, not while it runs; one per process, since threads share its devices.
DISPATCH_LOCK = threading.RLock()


def place_argument(leaf: Any, sharding: NamedSharding, donated: bool, path: str) -> Any:
    """An argument with the sharding that the step needs.

    Args:
        leaf: the argument.
        sharding: what the step needs.
        donated: the step donates it.
        path: its name in errors.

    Raises:
        DonatedError: it was donated to an earlier step.
        ArgumentError: it has a shape, but no value.
    """
    if isinstance(leaf, jax.Array):
        arguments.check_value(leaf, path)
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        view = host_view(leaf)
        if view is not leaf:
            return jax.device_put(view, sharding)
        # A copy, so that donation does not delete the caller's own buffer: when device_put replicates an array, the
        # shard on the array's own device aliases it whatever may_alias says (seen on 0.10.2).
        return jax.device_put(leaf.copy() if donated else leaf, sharding)
    arguments.check_value(leaf, path)
    return jax.device_put(leaf, sharding)


def _checked(leaf: Any, path: str) -> Any:
    """An argument that has a value, and was not donated to an earlier step."""
    arguments.check_value(leaf, path)
    return leaf


def unaliased(placed: Sequence[Any], donated: Sequence[int]) -> Sequence[Any]:
    """The arguments, with a copy for every donated array that occurs twice: a buffer can be donated only once.

    An array occurs twice, for example, as parameters and as their moving average before the first step.
    """
    if len(set(map(id, placed))) == len(placed):
        return placed
    distinct, uses = list(placed), Counter(map(id, placed))
    for i in donated:
        if uses[id(placed[i])] > 1:
            uses[id(placed[i])] -= 1
            distinct[i] = placed[i].copy()
    return distinct


@dataclass(frozen=True, eq=False)
class SingleMeshRunner:
    """One compiled program.

    Attributes:
        plan: its plan.
        program: JAX's compiled object.
        shardings: of the argument leaves.
        in_place: per leaf the sharding object of the last call, which is known to be equivalent.
    """

    plan: Plan
    program: Any
    shardings: tuple[NamedSharding, ...]
    in_place: list[Any] = field(default_factory=list)

    @property
    def taken_at(self) -> Sequence[NamedSharding | None]:
        """The sharding in which it takes each argument leaf."""
        return self.shardings

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        last = self.in_place or [None] * len(self.shardings)
        donated = frozenset(self.plan.donated)
        placed = [
            # Results of one step are the arguments of the next, with the same sharding objects: the common case.
            x
            if isinstance(x, jax.Array) and x.sharding is seen and not x.is_deleted()
            else place_argument(x, self.shardings[i], i in donated, self.plan.input_paths[i])
            for i, (x, seen) in enumerate(zip(leaves, last, strict=True))
        ]
        self.in_place[:] = [x.sharding for x in placed]
        return self.program(*unaliased(placed, self.plan.donated))


@dataclass(frozen=True, eq=False)
class PipelineRunner:
    """A compiled pipeline.

    Attributes:
        plan: its plan.
        step: runs the schedule.
        shardings: of the argument leaves; None for the batch, which is copied to every stage that reads it.
        weak: positions of weakly typed results; the types of stage programs do not record that.
    """

    plan: Plan
    step: PipelineStep
    shardings: tuple[NamedSharding | None, ...]
    weak: tuple[int, ...]

    @property
    def taken_at(self) -> Sequence[NamedSharding | None]:
        """The sharding in which it takes each argument leaf: of the batch, that of the first stage that reads it.

        With several processes None for the batch, which all of them have, or have parts of.
        """
        if jax.process_count() > 1:
            return self.shardings
        begins = reversed(self.step.lowered_schedule.begins)
        first = {position: sharding for begin in begins for _, position, sharding in begin.arguments}
        return [first.get(i) if sharding is None else sharding for i, sharding in enumerate(self.shardings)]

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        with jax_compat.no_mesh():
            return self._results(leaves)

    def _results(self, leaves: Sequence[Any]) -> Sequence[Any]:
        donated = frozenset(self.plan.donated)
        placed = self._placed(leaves) if jax.process_count() == 1 else self._placed_by_all(leaves)
        results = self.step.results(unaliased(placed, self.plan.donated))
        for i in self.weak:
            results[i] = results[i] if results[i].weak_type else jax_compat.weakly_typed(results[i])
        self._delete([x for i, x in enumerate(leaves) if i in donated and x is placed[i]], results)
        return results

    def _placed(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The arguments with their shardings between steps, the batch as it is."""
        donated = frozenset(self.plan.donated)
        return [
            _checked(x, self.plan.input_paths[i])
            if sharding is None
            else place_argument(x, sharding, i in donated, self.plan.input_paths[i])
            for i, (x, sharding) in enumerate(zip(leaves, self.shardings, strict=True))
        ]

    def _placed_by_all(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The same in one of several processes, which all have the same arguments: whole, or parts of global arrays."""
        for x, path in zip(leaves, self.plan.input_paths, strict=True):
            arguments.check_value(x, path)
        is_global = agree(leaves, self.plan.input_paths)
        return [self._place_global(x, i) if is_global[i] else self._place_whole(x, i) for i, x in enumerate(leaves)]

    def _place_global(self, leaf: jax.Array, position: int) -> Any:
        sharding = self.shardings[position]
        return leaf if sharding is None else self.step.transport.move([leaf], [sharding])[0]

    def _place_whole(self, leaf: Any, position: int) -> Any:
        """A value that every process has; one that is donated is copied, since a part may share the caller's memory."""
        sharding = self.shardings[position]
        if sharding is None:
            return host_value(leaf)
        copied = isinstance(leaf, jax.Array) and position in self.plan.donated
        return place(leaf.copy() if copied else leaf, sharding)

    def _delete(self, arrays: Sequence[Any], results: Sequence[Any]) -> None:
        """Delete donated arrays that were not copied, except those that are results of the step."""
        returned = {id(x) for x in results}
        for array in arrays:
            if id(array) not in returned and not array.is_deleted():
                array.delete()
