"""From a plan to programs: functions on arrays with every value constrained to its planned sharding.

    in     Traced and Plan, or planned stages
    out    functions for `jax.jit`: one for a mesh, several for every stage

Read `emit` first, then `stage_programs`.
"""
