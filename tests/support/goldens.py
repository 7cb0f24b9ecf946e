"""Rewrites the expected parts of the text cases: `make goldens`, or `python -m tests.support.goldens [NAME ...]`."""

from __future__ import annotations

import sys

from tests import conftest as conftest  # the devices and settings of the tests
from tests.passes.support.printers import CASES, PRINTERS
from tests.support.text_cases import regenerate

if __name__ == "__main__":
    for name in sys.argv[1:] or PRINTERS:
        regenerate(CASES / f"{name}.txt", PRINTERS[name])
