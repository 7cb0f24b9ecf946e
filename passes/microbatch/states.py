"""States of values along the microbatches: the lattice of `autopar.passes.microbatch.analysis`.

The batch is cut into m blocks. In the program that runs once per block, a value of the step is

    Invariant            the same for every block
    Split(dim, outer)    block k of the whole value: dimension `dim`, viewed as (outer, m, inner), at [:, k, :]
    Partial(kind)        a part of the whole value, which is the sum (maximum, minimum, bitwise and, or) over all blocks
    Permuted, Positions  the block's own rows, sorted by group

`outer` is 1 if the batch is the leading part of the dimension. A batch of B examples that is flattened behind S
positions, (S, B) -> (S B), is split with outer = S. The first three states also describe values on a mesh axis
(replicated, sharded, partial sum: GSPMD, Xu et al., 2021); here the axis is time.

A part of a sum in a float of less than 32 bits is computed and stored in float32, so that the total is rounded to its
dtype once and not once per block                                                                     -> part_dtype
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]
ReductionKind = Literal["sum", "max", "min", "and", "or"]
#: Kinds for which a value combined with itself is itself.
IDEMPOTENT: tuple[ReductionKind, ...] = ("max", "min", "and", "or")
REDUCTION_KINDS: tuple[ReductionKind, ...] = ("sum", *IDEMPOTENT)


@dataclass(frozen=True, slots=True)
class Invariant:
    """The same in every microbatch.

    Attributes:
        zero: all elements are known to be zero.
    """

    zero: bool = False

    def __str__(self) -> str:
        return "zero" if self.zero else "invariant"


@dataclass(frozen=True, slots=True)
class Split:
    """One block of the whole value along `dim`, seen as (outer, microbatches, inner)."""

    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"split({self.dim})" if self.outer == 1 else f"split({self.dim}, outer={self.outer})"


@dataclass(frozen=True, slots=True)
class Partial:
    """A part of the whole value; the parts of all microbatches are combined."""

    kind: ReductionKind = "sum"

    def __str__(self) -> str:
        return f"partial {self.kind}"


@dataclass(frozen=True, slots=True)
class Permuted:
    """The rows of a split value, sorted by their keys: of the whole value in the whole, of a block in that block.

    Attributes:
        dim: the dimension of the rows.
        keys: the value that sorts them.
    """

    dim: int
    keys: int

    def __str__(self) -> str:
        return f"permuted({self.dim}, by %{self.keys})"


@dataclass(frozen=True, slots=True)
class Positions:
    """A function of the positions of sorted rows, as `argsort` gives them. On a block, positions are in the block.

    Attributes:
        dim, keys: as for `Permuted`.
        inverse: positions behind sorting of rows in their first order, as `argsort(argsort(keys))` gives them.
    """

    dim: int
    keys: int
    inverse: bool = False

    def __str__(self) -> str:
        return f"{'inverse ' if self.inverse else ''}positions({self.dim}, by %{self.keys})"


#: States of rows that their keys have sorted: `autopar.passes.microbatch.grouped`. They do not leave a loop.
Grouped = Permuted | Positions
State = Invariant | Split | Partial | Grouped

INVARIANT = Invariant()
ZERO = Invariant(True)
SUM = Partial("sum")


def local_shape(shape: Shape, state: State, count: int) -> Shape:
    """Shape of a value within one of `count` microbatches."""
    return divided(shape, state.dim, count) if isinstance(state, Split | Permuted | Positions) else shape


def part_dtype(dtype: Any, state: State) -> Any:
    """Dtype of a value within a microbatch: that of the whole value, but float32 for parts of sums in narrower
    floats.
    """
    is_narrow = state == SUM and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if is_narrow else dtype


def divided(shape: Sequence[int], dim: int, count: int) -> Shape:
    """`shape` with one dimension divided by `count`."""
    return tuple(n // count if d == dim else n for d, n in enumerate(shape))


def is_divisible(shape: Shape, state: Split, count: int) -> bool:
    """True if the dimension can be viewed as (outer, count, inner)."""
    return shape[state.dim] % (state.outer * count) == 0


def common_state(states: Sequence[State]) -> State | None:
    """The only state among these that is not invariant; None if there are several or none."""
    distinct = list(dict.fromkeys(s for s in states if not isinstance(s, Invariant)))
    return distinct[0] if len(distinct) == 1 else None


def combines_to_itself(state: State, kind: ReductionKind) -> bool:
    """True if a value that is the same in every microbatch, used as each microbatch's part, combines to itself."""
    return isinstance(state, Invariant) and (kind in IDEMPOTENT or state.zero)


def join(before: State, after: State) -> State | None:
    """The state of a loop's carry that enters as `before` and leaves an iteration as `after`; None if none covers both.

    An invariant that enters a split carry is cut; a sum may start from zero only, a maximum from anything.
    """
    if before == after:
        return before
    if isinstance(before, Invariant) and isinstance(after, Invariant):
        return INVARIANT
    for first, second in ((before, after), (after, before)):
        if isinstance(second, Partial) and combines_to_itself(first, second.kind):
            return second
        if isinstance(first, Invariant) and isinstance(second, Split):
            return second
    return None
