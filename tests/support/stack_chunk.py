"""Tests run in one chunk of the interpreter's stack.

CPython 3.11 and later keep the frames of Python functions in chunks of 16 KB, about sixty frames each. A call that
does not fit gets a chunk of its own, which is mapped for it and unmapped when it returns. A loop at such a depth pays
two system calls and some page faults for every call: 4% of the processor time of tests. The chunk of a frame that is
larger than 16 KB has the next power of two as its size, so that the calls of a large frame share its chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

SLOTS = 33_000  # of 8 bytes, in the frame: 264 KB, so that its chunk of 512 KB has room for about a thousand frames


def in_one_chunk(function: Callable[[], Result]) -> Result:
    """What a function returns, called from a large frame."""
    return function()


in_one_chunk.__code__ = in_one_chunk.__code__.replace(co_stacksize=SLOTS)
