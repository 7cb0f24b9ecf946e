"""What a device keeps in memory when, under every choice of shardings.

    in     Graph, the problem whose choices decide, mesh, backend
    out    Liveness: buffers with births, deaths and sizes; peaks, and rows for the solver

Read `liveness` first, then `row` and `buffers`.
"""
