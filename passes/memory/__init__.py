"""The intra-op problem under a memory budget. Memory rows are constraints, added when a solution violates them.

    in     a Problem, a RowSource (bytes per device at every program point, under every choice), a budget in bytes
    out    the cheapest solution within the budget, with a lower bound; the solution with the least peak; the Pareto
           front of seconds and peak

Start with `budget`, then read `search`. `autopar.cost_models.memory.row` defines the rows.
"""
