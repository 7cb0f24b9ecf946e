"""Seconds and bytes: what operations, collectives and pipelines take on given hardware, what a program keeps in memory.

    compute, collectives, resharding, pipeline, host    seconds of one operation, collective, reshard, schedule, copy
    sharding/                                           strategies, op groups and bindings, on which costs depend
    compiler/                                           the program as a target's compiler runs it
    memory/                                             what of it is live when, under every choice of shardings
    presets/                                            figures of known machines

Read `collectives.py` first, then `memory/liveness.py`.
"""
