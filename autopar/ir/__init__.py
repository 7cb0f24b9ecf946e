"""The program that all passes share: a function as traced, its arguments, its shardings.

    in     a Python function and its arguments
    out    Traced: Graph (operations, regions, types), pytrees, pins of Explicit meshes

What several passes share is here as well: sets of operations, the problem that solvers get, text for people.

Read `graph` first, then `trace` and `layout`.
"""
