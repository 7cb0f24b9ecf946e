"""A step divided into pipeline stages: passes of every stage, and each stage planned on its submesh.

    in     Graph, Layers, borders between stages
    out    Stages (forward, backward and update passes, transfers), planned stages with shardings

Read `divide` first, then `plan`.
"""
