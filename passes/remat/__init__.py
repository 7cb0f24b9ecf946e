"""What the backward pass computes again to save memory, and which state waits in the host's memory.

    in     Graph with its layers, a memory budget
    out    the rewritten Graph; the choice of layers and policies

Read `rewrite` first, then `choose`.
"""
