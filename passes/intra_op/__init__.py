"""The intra-operator pass: chooses one strategy per op group on one mesh, and makes a plan from the choice.

    in     Graph, Grouping, LogicalMesh, memory budget
    out    Problem (the ILP); its solution as shardings and collectives; Plan

`build` has the equations, `extract` turns a solution into layouts and collectives, `export` into a Plan. `plan` runs
all steps from a graph to a plan on one mesh, and `mesh_search` chooses among meshes.
"""
