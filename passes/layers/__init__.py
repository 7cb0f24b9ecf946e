"""Layers of a step: where they begin, which are equal, and scans over layers cut into pieces.

    in     Graph
    out    Layers: for every operation its layer, for every layer its kind

Read `find` first.
"""
