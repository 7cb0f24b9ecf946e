"""Source lines by what is written there, so that tests that pin them need not count lines."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

from autopar.zoo import moe


def line(module: ModuleType, text: str) -> str:
    """ "file.py:line" of the one line of a module that contains a text."""
    file = inspect.getsourcefile(module)
    assert file is not None
    (number,) = (n for n, of in enumerate(Path(file).read_text().splitlines(), 1) if text in of)
    return f"{Path(file).name}:{number}"


#: Of the products with the weights of experts.
EXPERT_PRODUCTS = tuple(line(moe, f'params["{name}"].astype(h.dtype)') for name in ("expert_in", "expert_out"))
