"""Search for stages of layers on submeshes, microbatches, a schedule and rematerialisation policies.

    in     Graph, Cluster, SearchSpace
    out    StageChoice: borders, submeshes, microbatches, schedule; the stages assembled from it

Read `search` first, then `dynamic_program`.
"""
