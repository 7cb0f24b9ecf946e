"""The intra-op problem within a memory budget: memory at program points as constraints that are added as they bind.

    in     Problem, rows (bytes at a program point under every choice), a budget
    out    the cheapest solution that fits, with a bound; the smallest one; the Pareto front of both

Read `budget` first, then `search`; rows are `autopar.cost_models.memory.row`.
"""
