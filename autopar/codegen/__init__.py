"""Code generation: from a plan to functions on arrays, with every value constrained to its planned sharding.

    in     Traced and Plan, or planned stages
    out    functions for `jax.jit`: one for a mesh, several per pipeline stage

Read `emit` first, then `emitter`, then `stages`.
"""
