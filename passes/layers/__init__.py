"""Layers of a step: their borders, kinds of equal layers, and scans over layers split into pieces.

    in     Graph
    out    Layers: for every operation its layer, for every layer its kind

Read `find` first.
"""
