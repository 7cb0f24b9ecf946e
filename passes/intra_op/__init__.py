"""One strategy per group of operations on one mesh, and the plan that it makes.

    in     Graph, Grouping, LogicalMesh, memory budget
    out    Problem (the ILP); its solution as shardings and collectives; Plan

Read `build` for the equations, `extract` for what a solution means, `plan` for the way from a graph to a plan.
"""
