"""Warnings that point to the user's line, whatever the depth of the code that gives them."""

from __future__ import annotations

import warnings

from autopar import jax_compat
from autopar.errors import AutoparWarning


def warn(message: str) -> None:
    """An AutoparWarning that points to the user's line."""
    warnings.warn(message, AutoparWarning, stacklevel=_user_stacklevel())


def _user_stacklevel() -> int:
    """The `stacklevel` at which a warning of the caller points to the user's line."""
    files = [frame.f_code.co_filename for frame in jax_compat.frames()]
    # `warnings.warn` counts from `warn`, one frame above this one, as 1
    return next((level for level, file in enumerate(files) if jax_compat.is_own(file)), len(files) - 1)
