"""The program that all passes share: a function as traced, its arguments, its shardings.

    in     a Python function and its arguments
    out    Traced: Graph (operations, regions, types), pytrees, pins of Explicit meshes

Also here: what several passes use, such as sets of operations, the problem that solvers get, and text output.

Read `graph` first, then `trace` and `layout`.
"""
