"""Tags: which operation of a graph an emitted equation, or an instruction of HLO, belongs to.

    op12        operation 12
    op12.in0    a copy of its operand 0 in another layout
    out3        a copy for result 3 of the program

`jax_compat.emitting` writes a tag into the name stack of the equations that are bound inside.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"(?:^|[/(;])(op\d+(?:\.in\d+)?|out\d+)(?=$|[/);])")


def last_tag(name: str) -> str:
    """The innermost component of a name path that is a tag, or ""."""
    tags = _TAG.findall(name)
    return tags[-1] if tags else ""
