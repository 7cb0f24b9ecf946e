"""Microbatches: which operations of a step run once per block of the batch, proven for every operation.

    in     Graph, the number of microbatches, the argument leaves that hold the batch
    out    Microbatches: operations before, in and after the loops, and the state of every value in them

Read `analysis` first, then `states` (the lattice) and `table` (the rules, checked by `tests/passes/microbatch`).
"""
