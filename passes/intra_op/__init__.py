"""The intra-operator pass: chooses one strategy per op group on one mesh.

    in     Graph, Grouping, LogicalMesh
    out    Problem (the ILP); its solution as layouts and collectives

`build` has the equations, `extract` turns a solution into layouts and collectives. All steps from a graph to a solution
are in `autopar.passes.mesh_search`.
"""
