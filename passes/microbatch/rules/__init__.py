"""Rules of the microbatch analysis: what each primitive yields block by block, as data.

    in     an operation, the states of its operands
    out    the states of its results, and how it is bound on blocks; None if it needs the whole batch

Read `table` first, then `types` and `blockwise`.
"""
