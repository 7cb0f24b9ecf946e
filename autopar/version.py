"""The version of autopar, in a module without imports so that all others, and the build, can read it."""

from __future__ import annotations

VERSION = "0.1.0"
