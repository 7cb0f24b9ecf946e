"""Programs of pipeline stages.

    in     the stages of a step, and a plan of each
    out    functions for `jax.jit`, several per stage: forward and backward passes, update

Read `programs` first, then `planned`.
"""
