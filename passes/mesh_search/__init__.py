"""The search over meshes: one program planned on candidate meshes, each with the rematerialisation that it needs.

    in     Traced, candidate meshes, Options
    out    MeshSolution: the problem of the best mesh, its solution, notes and phases

Read `planner` first, which runs all passes on one mesh, then `search`, which chooses among meshes.
"""
