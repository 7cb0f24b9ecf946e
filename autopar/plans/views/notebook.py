"""What a notebook shows of values that print as text: the text, in a fixed pitch."""

from __future__ import annotations

import html


class ShownAsText:
    """A value whose `str` is its display in a notebook too, in place of the fields that `repr` has."""

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(str(self))}</pre>'
