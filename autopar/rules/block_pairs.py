"""Pairs of blocks of positions, exchanged so that devices have the same work under a causal mask.

Under a causal mask the first queries see few keys and the last ones all. Positions are in 2 n blocks, two neighbours on
each of n devices. Device d computes block d and block 2 n - 1 - d, which together see as many keys on every device.
Source: Dubey et al. (2024), The Llama 3 Herd of Models, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.rules.sent import Sent


def exchanged(arrays: Iterable[int], factor: int) -> Iterator[Sent]:
    """The exchanges of arrays, numbers among operands and results: their first blocks, which two devices keep, and
    their second ones.
    """
    for i in arrays:
        yield Sent("collective-permute", i, (factor,), 0.5, least=3)
        yield Sent("collective-permute", i, (factor,), 0.5)


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Two blocks of positions on each of some devices.

    Attributes:
        axes: names of the mesh axes that cut the positions, in the order in which they do.
        count: number of devices along these axes.
    """

    axes: tuple[str, ...]
    count: int

    @property
    def numbers(self) -> tuple[Any, Any]:
        """The numbers of the two blocks that this device computes."""
        here = lax.axis_index(self.axes)
        return here, 2 * self.count - 1 - here

    def _moves(self, side: int) -> list[tuple[int, int]]:
        """(device that has it, device that computes it) of the first or second block of every device."""
        blocks = [2 * d + side for d in range(self.count)]
        return [(d, min(j, 2 * self.count - 1 - j)) for d, j in enumerate(blocks)]

    def taken(self, x: Any, dim: int) -> tuple[Any, Any]:
        """From the piece of this device, the two blocks that it computes."""
        first, second = jnp.split(x, 2, dim)
        moved = (lax.ppermute(half, self.axes, self._moves(i)) for i, half in enumerate((first, second)))
        return self._by_parity(*moved)

    def joined(self, x: Any, dim: int) -> Any:
        """The two blocks that this device computes, one behind the other."""
        return jnp.concatenate(self.taken(x, dim), dim)

    def returned(self, first: Any, second: Any, dim: int) -> Any:
        """From the two blocks that this device has computed, its piece."""
        halves = (
            lax.ppermute(block, self.axes, [(to, of) for of, to in self._moves(i)])
            for i, block in enumerate(self._by_parity(first, second))
        )
        return jnp.concatenate([*halves], dim)

    def split(self, x: Any, dim: int) -> Any:
        """From both blocks that this device has computed, one behind the other, its piece."""
        first, second = jnp.split(x, 2, dim)
        return self.returned(first, second, dim)

    def _by_parity(self, a: Any, b: Any) -> tuple[Any, Any]:
        """(a, b) on devices of even number, whose first block is even as well; (b, a) on the others."""
        is_even = lax.axis_index(self.axes) % 2 == 0
        return jnp.where(is_even, a, b), jnp.where(is_even, b, a)
